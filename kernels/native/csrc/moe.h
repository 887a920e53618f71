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

/* How many experts have tokens: one place a layer, because a thread may ask after others have gone on to the next. */
INLINE int32_t *hits_of(const Context *context, const Layer *layer) {
    return BUFFER(int32_t, B_HITS) + (layer - context->model->layers);
}

/* Places of (token, choice) in the order of their experts. */
static void sort_by_expert(Context *context, const Layer *layer, int64_t tokens) {
    const int64_t count = tokens * layer->active;
    const int32_t *chosen = BUFFER(int32_t, B_CHOSEN);
    int32_t *starts = context->expert_starts, *order = BUFFER(int32_t, B_ORDER), *place = BUFFER(int32_t, B_PLACE);
    int32_t hits = 0;
    memset(starts, 0, (size_t)(layer->experts + 1) * 4);
    for (int64_t i = 0; i < count; i++) starts[chosen[i] + 1]++;
    for (int32_t e = 0; e < layer->experts; e++) {
        if (starts[e + 1]) context->hit[hits++] = e;
        starts[e + 1] += starts[e];
    }
    *hits_of(context, layer) = hits;
    for (int64_t i = 0; i < count; i++) {
        const int32_t at = starts[chosen[i]]++;
        order[at] = (int32_t)(i / layer->active);
        place[i] = at;
    }
    for (int32_t e = layer->experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* One panel of one hit expert: tasks are (expert, panel). */
static void multiply_expert(const Run *run, const Matrix *matrices, Product p, const int32_t *index,
                            int64_t bias_stride, int64_t panels, int64_t task) {
    const Context *context = run->context;
    const int32_t expert = context->hit[task / panels];
    const int64_t first = context->expert_starts[expert];
    p.w = &matrices[expert];
    p.rows = context->expert_starts[expert + 1] - first;
    if (p.bias) p.bias += expert * bias_stride;
    if (index) {
        p.x.index = index + first;
    } else {
        p.x.values = (const uint16_t *)p.x.values + first * p.x.stride;
        if (p.x.scales) p.x.scales += first;
    }
    if (p.target) p.target += first * p.target_stride;
    if (p.narrow) p.narrow += first * p.target_stride;
    product_panel(&p, task % panels, own_spread(run));
}

static void multiply_experts(Run *run, const Layer *layer, const Matrix *matrices, Product p, const int32_t *index,
                             int64_t bias_stride) {
    p.w = &matrices[0];
    const int64_t panels = product_tasks(&p);
    EACH_TASK(&run->hand, panels * *hits_of(run->context, layer), 6, task,
              multiply_expert(run, matrices, p, index, bias_stride, panels, task));
}

static void score_expert(const Run *run, const Layer *layer, int64_t i) {
    const Context *context = run->context;
    const int64_t hidden = context->model->hidden;
    const float *row = BUFFER(float, B_NORMED) + i / layer->experts * hidden;
    const float *weight = layer->router + i % layer->experts * hidden;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < hidden; j++) sum += row[j] * weight[j];
    BUFFER(float, B_ROUTER)[i] = sum;
}

/* The shares of a token's experts joined to the residual stream. */
static void join_experts(const Run *run, const Layer *layer, int64_t t) {
    const Context *context = run->context;
    const int64_t hidden = context->model->hidden;
    const float *mlp_post = layer->mlp_post_norm;
    float *stream = run->hidden + t * hidden, *sum = (float *)(own(run) + context->own_attention);
    memset(sum, 0, (size_t)hidden * 4);
    for (int32_t a = 0; a < layer->active; a++) {
        const float share = BUFFER(float, B_SHARES)[t * layer->active + a];
        const int32_t place = BUFFER(int32_t, B_PLACE)[t * layer->active + a];
        const float *out = BUFFER(float, B_EXPERT_OUT) + (int64_t)place * hidden;
        for (int64_t j = 0; j < hidden; j++) sum[j] += share * out[j];
    }
    const float factor = mlp_post ? inverse_rms(sum, hidden, context->model->eps) : 1.0f;
    for (int64_t j = 0; j < hidden; j++) stream[j] += mlp_post ? sum[j] * factor * mlp_post[j] : sum[j];
}

static void mixture(Run *run, const Layer *layer, Preparation before) {
    Context *context = run->context;
    Hand *hand = &run->hand;
    const int64_t tokens = run->step.tokens, hidden = context->model->hidden, rows = tokens * layer->active;
    const Matrix *gate_up = layer->expert_gate_up, *down = layer->expert_down;
    const int64_t width = gate_up->n / 2;
    before.w = gate_up, before.keep = BUFFER(float, B_NORMED);
    Rows x = prepare(run, before, tokens);
    EACH_TASK(hand, tokens * layer->experts, 6, i, score_expert(run, layer, i));
    EACH_TASK(hand, tokens, 4, t,
              choose(layer, BUFFER(float, B_ROUTER) + t * layer->experts, BUFFER(int32_t, B_CHOSEN) + t * layer->active,
                     BUFFER(float, B_SHARES) + t * layer->active));
    EACH_TASK(hand, 1, 1, only, (void)only; sort_by_expert(context, layer, tokens));
    Product p = {.bias = layer->expert_gate_up_bias, .x = x, .activation = layer->activation, .limit = layer->limit,
                 .alpha = layer->alpha, .target_stride = width, .out = OUT_GATED, .target = BUFFER(float, B_INNER)};
    if (!can_gate(gate_up))
        p.out = OUT_STORE, p.target = BUFFER(float, B_QKV), p.target_stride = 2 * width;
    else if (down->format != FORMAT_INT8 && width % 2 == 0)
        p.narrow = BUFFER(bf16, B_INNER);
    multiply_experts(run, layer, gate_up, p, BUFFER(int32_t, B_ORDER), 2 * width);
    if (!can_gate(gate_up)) EACH_TASK(hand, rows, 4, i, activate_row(run, layer, width, i));
    if (p.narrow)
        x = (Rows){p.narrow, NULL, width, NULL};
    else
        x = prepare(run, (Preparation){.x = BUFFER(float, B_INNER), .w = down}, rows);
    p = (Product){.bias = layer->expert_down_bias, .x = x, .out = OUT_STORE, .target = BUFFER(float, B_EXPERT_OUT),
                  .target_stride = hidden};
    multiply_experts(run, layer, down, p, NULL, hidden);
    EACH_TASK(hand, tokens, 4, t, join_experts(run, layer, t));
}
