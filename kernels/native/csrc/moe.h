/* Mixture of experts: tokens are sorted by expert, so that every expert that is chosen is read once. Included by
 * stack.c. */

/* The `active` experts of one token and their shares, for logits [experts].
 *
 * Sigmoid: chosen by sigmoid(logit) + bias, shares without the bias, normalized to one if wanted, times the routed
 * scale. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Softmax: chosen by logit + bias, shares the softmax of
 * the chosen (gpt-oss). */
static void choose(const Layer *layer, const float *logits, int32_t *chosen, float *shares) {
    const int sigmoids = layer->router_kind == ROUTER_SIGMOID;
    float total = 0.0f;
    for (int32_t a = 0; a < layer->active; a++) {
        int32_t best = -1;
        float best_score = 0.0f;
        for (int32_t e = 0; e < layer->experts; e++) {
            int taken = 0;
            for (int32_t before = 0; before < a; before++) taken |= chosen[before] == e;
            if (taken) continue;
            const float score = (sigmoids ? 1.0f / (1.0f + expf(-logits[e])) : logits[e]) + layer->router_bias[e];
            if (best < 0 || score > best_score) best = e, best_score = score;
        }
        chosen[a] = best;
        shares[a] = sigmoids ? 1.0f / (1.0f + expf(-logits[best])) : best_score;
    }
    if (sigmoids) {
        for (int32_t a = 0; a < layer->active; a++) total += shares[a];
        const float factor = layer->routed_scale / (layer->normalize ? total + 1e-20f : 1.0f);
        for (int32_t a = 0; a < layer->active; a++) shares[a] *= factor;
    } else {
        const float top = shares[0];
        for (int32_t a = 0; a < layer->active; a++) total += shares[a] = expf(shares[a] - top);
        for (int32_t a = 0; a < layer->active; a++) shares[a] *= layer->routed_scale / total;
    }
}

/* Thread 0: places of (token, choice) in the order of their experts. */
static void sort_by_expert(Context *context, const Layer *layer) {
    const int64_t count = context->step->tokens * layer->active;
    const int32_t *chosen = BUFFER(int32_t, B_CHOSEN);
    int32_t *starts = context->expert_starts, *order = BUFFER(int32_t, B_ORDER), *place = BUFFER(int32_t, B_PLACE);
    memset(starts, 0, (size_t)(layer->experts + 1) * 4);
    for (int64_t i = 0; i < count; i++) starts[chosen[i] + 1]++;
    context->hit_count = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        if (starts[e + 1]) context->hit[context->hit_count++] = e;
        starts[e + 1] += starts[e];
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t at = starts[chosen[i]]++;
        order[at] = (int32_t)(i / layer->active);
        place[i] = at;
    }
    for (int32_t e = layer->experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* Every hit expert's product: tasks are (expert, panel). */
static void multiply_experts(Run *run, const Layer *layer, const Matrix *matrices, Product p, const int32_t *index,
                             int64_t bias_stride) {
    const Context *context = run->context;
    Counter *counter = next_counter(run);
    const float *bias = p.bias;
    const Rows x = p.x;
    float *target = p.target;
    bf16 *narrow = p.narrow;
    p.w = &matrices[0];
    const int64_t panels = product_tasks(&p), tasks = panels * context->hit_count;
    const int64_t stride = MAX(1, MIN(panels, tasks / (context->pool->threads * 6)));
    for (int64_t from = take(counter, stride); from < tasks; from = take(counter, stride))
        for (int64_t task = from; task < MIN(from + stride, tasks); task++) {
            const int32_t expert = context->hit[task / panels];
            const int64_t first = context->expert_starts[expert];
            p.w = &matrices[expert];
            p.rows = context->expert_starts[expert + 1] - first;
            p.bias = bias ? bias + expert * bias_stride : NULL;
            p.x = x;
            if (index) {
                p.x.index = index + first;
            } else {
                p.x.values = (const uint16_t *)x.values + first * x.stride;
                p.x.scales = x.scales ? x.scales + first : NULL;
            }
            p.target = target ? target + first * p.target_stride : NULL;
            p.narrow = narrow ? narrow + first * p.target_stride : NULL;
            product_panel(&p, task % panels, own_spread(run));
        }
    (void)layer;
    meet(run);
}

static void mixture(Run *run, const Layer *layer, const float *joined, const float *joined_norm) {
    Context *context = run->context;
    const int64_t tokens = context->step->tokens, hidden = context->model->hidden;
    const int64_t rows = tokens * layer->active;
    const int threads = context->pool->threads;
    const Matrix *gate_up = layer->expert_gate_up, *down = layer->expert_down;
    const int64_t width = gate_up->n / 2;
    float *normed = BUFFER(float, B_NORMED), *logits = BUFFER(float, B_ROUTER);
    Rows x = prepare(run, run->hidden, gate_up, layer->mlp_norm, joined, joined_norm, tokens, normed);
    int64_t to = share_start(tokens * layer->experts, run->thread + 1, threads);
    for (int64_t i = share_start(tokens * layer->experts, run->thread, threads); i < to; i++) {
        const float *row = normed + i / layer->experts * hidden;
        const float *weight = layer->router + i % layer->experts * hidden;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < hidden; j++) sum += row[j] * weight[j];
        logits[i] = sum;
    }
    meet(run);
    to = share_start(tokens, run->thread + 1, threads);
    for (int64_t t = share_start(tokens, run->thread, threads); t < to; t++)
        choose(layer, logits + t * layer->experts, BUFFER(int32_t, B_CHOSEN) + t * layer->active,
               BUFFER(float, B_SHARES) + t * layer->active);
    meet(run);
    if (run->thread == 0) sort_by_expert(context, layer);
    meet(run);
    const int wide = down->format == FORMAT_INT8 || width % 2 || !can_gate(gate_up);
    Product p = {.bias = layer->expert_gate_up_bias, .x = x, .activation = layer->activation, .limit = layer->limit,
                 .alpha = layer->alpha, .target_stride = width, .out = OUT_GATED};
    if (can_gate(gate_up)) {
        p.target = BUFFER(float, B_INNER), p.narrow = wide ? NULL : BUFFER(bf16, B_INNER);
    } else {
        p.out = OUT_STORE, p.target = BUFFER(float, B_QKV), p.target_stride = 2 * width;
    }
    multiply_experts(run, layer, gate_up, p, BUFFER(int32_t, B_ORDER), 2 * width);
    if (!can_gate(gate_up)) {
        to = share_start(rows, run->thread + 1, threads);
        for (int64_t i = share_start(rows, run->thread, threads); i < to; i++) {
            const float *both = BUFFER(float, B_QKV) + i * 2 * width;
            activate(layer->activation, layer->limit, layer->alpha, both, both + width,
                     BUFFER(float, B_INNER) + i * width, width);
        }
        meet(run);
    }
    x = (Rows){BUFFER(bf16, B_INNER), NULL, width, NULL};
    if (wide) x = prepare(run, BUFFER(float, B_INNER), down, NULL, NULL, NULL, rows, NULL);
    p = (Product){.bias = layer->expert_down_bias, .x = x, .out = OUT_STORE, .target = BUFFER(float, B_EXPERT_OUT),
                  .target_stride = hidden};
    multiply_experts(run, layer, down, p, NULL, hidden);
    const float *outs = BUFFER(float, B_EXPERT_OUT), *mlp_post = layer->mlp_post_norm;
    float *sum = (float *)((char *)context->own[run->thread] + context->own_attention);
    to = share_start(tokens, run->thread + 1, threads);
    for (int64_t t = share_start(tokens, run->thread, threads); t < to; t++) {
        float *stream = run->hidden + t * hidden;
        memset(sum, 0, (size_t)hidden * 4);
        for (int32_t a = 0; a < layer->active; a++) {
            const float share = BUFFER(float, B_SHARES)[t * layer->active + a];
            const float *out = outs + (int64_t)BUFFER(int32_t, B_PLACE)[t * layer->active + a] * hidden;
            for (int64_t j = 0; j < hidden; j++) sum[j] += share * out[j];
        }
        const float factor = mlp_post ? inverse_rms(sum, hidden, context->model->eps) : 1.0f;
        for (int64_t j = 0; j < hidden; j++) stream[j] += mlp_post ? sum[j] * factor * mlp_post[j] : sum[j];
    }
    meet(run);
}
