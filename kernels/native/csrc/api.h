/* What Python calls, by ctypes. Included by stack.c. Pointers stay the caller's; nothing here outlives its context. */

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t tp_struct_bytes(int which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Rope), sizeof(Model), sizeof(Step),
                             sizeof(Draw)};
    return which >= 0 && which < 6 ? sizes[which] : -1;
}

EXPORT int tp_has_avx512(void) { return TP_AVX512; }

EXPORT int tp_has_bf12(void) { return TP_BF12; }

EXPORT Context *tp_new(int threads) {
    Context *context = calloc(1, sizeof(Context));
    if (context == NULL) return NULL;
    fill_tables();
    pthread_mutex_init(&context->one_at_a_time, NULL);
    context->pool = pool_new(threads);
    if (context->pool == NULL) {
        free(context);
        return NULL;
    }
    return context;
}

EXPORT int tp_threads(const Context *context) { return context->pool->threads; }

/* Bytes of weights, keys and values read since the last call. */
EXPORT int64_t tp_take_bytes(Context *context) {
    quiet(context->pool);
    return atomic_exchange(&context->bytes, 0);
}

/* From any thread: the step that runs, and every later one, ends after its layer, with 3. */
EXPORT void tp_interrupt(Context *context) { atomic_store(&context->interrupted, 1); }

/* Wait until no thread looks at a model any more. */
EXPORT void tp_quiet(Context *context) { quiet(context->pool); }

EXPORT void tp_free(Context *context) {
    if (context == NULL) return;
    pool_free(context->pool);
    for (int i = 0; i < B_BUFFERS; i++) free(context->buffers[i]);
    for (int i = 0; i < MAX_THREADS; i++) free(context->own[i]);
    for (int i = 0; i < context->group_count; i++) free(context->groups[i].blocks);
    free(context->expert_starts);
    free(context);
}

/* ---- work space ------------------------------------------------------------------------------------------------- */

static int want(Context *context, int buffer, int64_t bytes) {
    if (bytes > context->have[buffer]) quiet(context->pool);
    context->buffers[buffer] = grow(context->buffers[buffer], &context->have[buffer], MAX(bytes, TP_PAD));
    return context->buffers[buffer] != NULL;
}

static int prepare_memory(Context *context, const Step *step) {
    const int64_t tokens = step->tokens;
    const Model *model = context->model;
    const int64_t hidden = model->hidden;
    int64_t qkv = 0, queries = 0, values = 0, inner = 0, two_inner = 0, multiplied = hidden, rotary = 0, experts = 0;
    int64_t active = 0, attention = hidden * 4, spread = PANEL * 2, partial = 0;
    for (int32_t i = 0; i < model->layer_count; i++) {
        const Layer *layer = &model->layers[i];
        const Shape *shape = &layer->shape;
        const int64_t rows = layer->experts ? layer->active : 1;
        const Matrix *gate_up = layer->experts ? layer->expert_gate_up : &layer->gate_up;
        const Matrix *down = layer->experts ? layer->expert_down : &layer->down;
        const int64_t value_width = (int64_t)shape->heads * shape->value_dim;
        qkv = MAX(qkv, layer->qkv.n);
        queries = MAX(queries, (int64_t)shape->heads * (shape->dim + 1));
        values = MAX(values, value_width);
        inner = MAX(inner, rows * down->k);
        if (!can_gate(gate_up)) two_inner = MAX(two_inner, rows * gate_up->n);
        multiplied = MAX(multiplied, MAX(value_width, rows * (down->k + 1)));
        attention = MAX(attention, scratch_bytes(shape->dim, shape->value_dim));
        experts = MAX(experts, layer->experts);
        active = MAX(active, layer->experts ? layer->active : 0);
        partial = MAX(partial, partial_floats(shape));
        const Matrix *all[] = {&layer->qkv, &layer->output, gate_up, down};
        for (int m = 0; m < 4; m++)
            spread = MAX(spread, 2 * spread_values(all[m]));
    }
    spread = MAX(spread, 2 * spread_values(&model->head));
    for (int32_t r = 0; r < model->rope_count; r++) rotary += model->ropes[r].dim;
    int64_t keys = 0;
    for (int64_t row = 0; row < step->rows; row++) keys = MAX(keys, step->starts[row] + step->counts[row]);
    const int64_t segments = keys / SEGMENT + 2, pieces = 2 * context->pool->threads;
    int ok = want(context, B_HIDDEN, tokens * hidden * 4) && want(context, B_OTHER_HIDDEN, tokens * hidden * 4) &&
             want(context, B_X, tokens * (multiplied + 1) * 2) &&
             want(context, B_X_SCALES, tokens * MAX(1, active) * 4) &&
             want(context, B_QKV, tokens * MAX(qkv, two_inner) * 4) && want(context, B_QUERIES, tokens * queries * 2) &&
             want(context, B_ATTENDED, tokens * values * 4) && want(context, B_INNER, tokens * inner * 4) &&
             want(context, B_OUT, tokens * hidden * 4) && want(context, B_ROTARY, tokens * rotary * 4) &&
             want(context, B_ROW_OF, tokens * 4) && want(context, B_POSITION, tokens * 8) &&
             want(context, B_ROWS, step->rows * 3 * 8) &&
             want(context, B_HITS, (int64_t)model->layer_count * 4) &&
             want(context, B_PARTIAL, MIN(segments * pieces * partial * 4, PARTIAL_BYTES)) &&
             want(context, B_NORMED, (experts ? tokens : 0) * hidden * 4) &&
             want(context, B_ROUTER, tokens * experts * 4) && want(context, B_CHOSEN, tokens * active * 4) &&
             want(context, B_SHARES, tokens * active * 4) && want(context, B_ORDER, tokens * active * 4) &&
             want(context, B_PLACE, tokens * active * 4) &&
             want(context, B_EXPERT_OUT, tokens * active * hidden * 4);
    context->own_x = CEIL_DIV(spread * 2, TP_PAD) * TP_PAD;
    context->own_attention = context->own_x + CEIL_DIV(FEW * (hidden + 1) * 2 + FEW * 8, TP_PAD) * TP_PAD;
    for (int thread = 0; ok && thread < context->pool->threads; thread++) {
        if (context->own_attention + attention > context->own_have[thread]) quiet(context->pool);
        context->own[thread] =
            grow(context->own[thread], &context->own_have[thread], context->own_attention + attention);
        ok = context->own[thread] != NULL;
    }
    if (ok && experts > context->expert_starts_have) {
        quiet(context->pool);
        free(context->expert_starts);
        context->expert_starts = malloc((size_t)(2 * experts + 1) * 4);
        context->expert_starts_have = context->expert_starts ? experts : 0;
        ok = context->expert_starts != NULL;
    }
    context->hit = context->expert_starts ? context->expert_starts + context->expert_starts_have + 1 : NULL;
    return ok;
}

static int most_keys_first(const void *a, const void *b) {
    const QueryBlock *left = a, *right = b;
    const int64_t more = right->start + right->count, less = left->start + left->count;
    return less < more ? 1 : less > more ? -1 : 0;
}

/* Keys that a row's queries look at in a layer that sees all. */
INLINE int64_t looks(const Step *step, int64_t row) {
    return step->counts[row] * (step->starts[row] + step->counts[row] / 2 + 1);
}

/* Into how many blocks of nearly one size a row's queries are cut for each of `heads` KV heads: as few as QUERY_ROWS
 * allows, but more where one of them would keep a thread busy when the others have nothing left. */
static int64_t pieces_of(const Step *step, int64_t row, int64_t all_looks, int32_t group, int32_t heads, int threads) {
    const int64_t count = step->counts[row], least = CEIL_DIV(count, MAX(1, QUERY_ROWS / group));
    const int64_t most = MAX(least, MIN(count, count * group / LEAST_QUERY_ROWS));
    if (threads == 1 || most == least) return least;
    const int64_t mine = looks(step, row), wanted = CEIL_DIV(mine * TASKS_EACH * threads, all_looks * heads);
    const int64_t pieces = MIN(most, MAX(least, wanted));
    if (2 * mine > all_looks && pieces * heads < 8 * threads) /* the same number of tasks for each thread */
        for (int64_t more = pieces; more <= MIN(most, pieces + threads); more++)
            if (more * heads % threads == 0) return more;
    return pieces;
}

/* Cut rows into blocks of queries, the longest work first. */
static int cut_blocks(Context *context, const Step *step) {
    int64_t all_looks = 0;
    for (int64_t row = 0; row < step->rows; row++) all_looks += looks(step, row);
    int used = 0;
    for (int32_t i = 0; i < context->model->layer_count; i++) {
        const Shape *shape = &context->model->layers[i].shape;
        const int32_t group = shape->heads / shape->kv_heads;
        int known = 0;
        for (int g = 0; g < used; g++) known |= context->groups[g].group == group;
        if (known) continue;
        if (used == MAX_GROUPS || group > QUERY_ROWS) return 0;
        Blocks *blocks = &context->groups[used++];
        context->group_count = MAX(context->group_count, used);
        blocks->group = group;
        blocks->count = 0;
        int64_t token = 0;
        for (int64_t row = 0; row < step->rows; row++) {
            const int64_t pieces = pieces_of(step, row, all_looks, group, shape->kv_heads, context->pool->threads);
            if (blocks->count + pieces > blocks->have) {
                const int64_t have = 2 * (blocks->count + pieces) + 64;
                quiet(context->pool);
                QueryBlock *more = realloc(blocks->blocks, (size_t)have * sizeof(QueryBlock));
                if (more == NULL) return 0;
                blocks->blocks = more;
                blocks->have = have;
            }
            for (int64_t piece = 0, first = 0; piece < pieces; piece++) {
                const int32_t count = (int32_t)((step->counts[row] - first) / (pieces - piece));
                blocks->blocks[blocks->count++] =
                    (QueryBlock){(int32_t)row, count, token + first, step->starts[row] + first};
                first += count;
            }
            token += step->counts[row];
        }
        qsort(blocks->blocks, (size_t)blocks->count, sizeof(QueryBlock), most_keys_first);
    }
    return 1;
}

_Static_assert(sizeof(ForwardJob) <= JOB_BYTES && sizeof(Product) + sizeof(Matrix) + 64 <= JOB_BYTES, "too long a job");

/* ---- a step ----------------------------------------------------------------------------------------------------- */

static int prepare_step(Context *context, Step *step) {
    const int64_t ops = (int64_t)context->model->layer_count * OPS_PER_LAYER + 2;
    if (!reserve_ops(context->pool, ops)) return 0;
    pool_open(context->pool, ops);
    if (!prepare_memory(context, step) || !cut_blocks(context, step)) return 0;
    int64_t t = 0;
    for (int64_t row = 0; row < step->rows; row++)
        for (int64_t i = 0; i < step->counts[row]; i++, t++) {
            BUFFER(int32_t, B_ROW_OF)[t] = (int32_t)row;
            BUFFER(int64_t, B_POSITION)[t] = step->starts[row] + i;
        }
    int64_t *rows = BUFFER(int64_t, B_ROWS);
    memcpy(rows, step->slots, (size_t)step->rows * 8);
    memcpy(rows + step->rows, step->starts, (size_t)step->rows * 8);
    memcpy(rows + 2 * step->rows, step->counts, (size_t)step->rows * 8);
    step->slots = rows, step->starts = rows + step->rows, step->counts = rows + 2 * step->rows;
    return 1;
}

/* 0 if done, 1 if there was no memory, 2 for a token that the model does not have, 3 if it was interrupted. */
EXPORT int tp_forward(Context *context, const Model *model, const Step *step) {
    for (int64_t t = 0; t < step->tokens; t++)
        if (step->ids[t] < 0 || step->ids[t] >= model->head.n) return 2;
    pthread_mutex_lock(&context->one_at_a_time);
    if (context->model != model) quiet(context->pool);
    context->model = model;
    ForwardJob job = {context, *step};
    const int ok = prepare_step(context, &job.step);
    if (ok) pool_run(context->pool, forward, &job, sizeof(job));
    const int interrupted = atomic_load(&context->interrupted);
    if (interrupted) quiet(context->pool); /* others may be a layer behind, at work in buffers */
    pthread_mutex_unlock(&context->one_at_a_time);
    return ok ? 3 * interrupted : 1;
}

typedef struct {
    Context *context;
    Matrix w;
    Product product;
    char *spread; /* threads pieces of spread_bytes */
    int64_t spread_bytes;
} ProductJob;

static void multiply_all(Hand *hand, const void *given) {
    const ProductJob *job = given;
    Product p = job->product;
    p.w = &job->w;
    product(&p, hand, (bf16 *)(job->spread + hand->thread * job->spread_bytes));
    count_bytes(job->context);
}

/* Rows of x [rows, k] bf16 as w multiplies them, into values and scales. */
static int prepare_rows(const Matrix *w, const bf16 *x, int64_t rows, uint16_t *values, float *scales) {
    const int64_t stride = w->k + w->k % 2;
    float *wide = w->format == FORMAT_INT8 ? malloc((size_t)w->k * 4) : NULL;
    if (w->format == FORMAT_INT8 && wide == NULL) return 0;
    for (int64_t r = 0; r < rows; r++) {
        if (wide) {
            for (int64_t i = 0; i < w->k; i++) wide[i] = bf16_to_f32(x[r * w->k + i]);
            prepare_row(wide, w, values + r * stride, scales + r);
        } else {
            memcpy(values + r * stride, x + r * w->k, (size_t)w->k * 2);
            if (w->k % 2) values[r * stride + w->k] = 0;
        }
    }
    free(wide);
    return 1;
}

/* Pack rows [n, k] of bf16 as bf12.h says: data, all zero before, and tables hold ceil(n / 32) panels, counts [panels]
 * gets how many escapes each has. escapes has `room`; what comes after is not written. Returns how many there are. */
EXPORT int64_t tp_pack_bf12(const bf16 *rows, int64_t n, int64_t k, uint8_t *data, uint8_t *tables, int64_t *counts,
                            Escape *escapes, int64_t room) {
    int64_t found = 0;
    for (int64_t panel = 0; panel * PANEL < n; panel++) {
        const int64_t left = MAX(0, room - found), count = MIN(PANEL, n - panel * PANEL);
        counts[panel] = pack_panel(rows + panel * PANEL * k, (int)count, k, data + panel * quads_of(k) * QUAD_BYTES,
                                   tables + panel * CODES, escapes + MIN(found, room), left);
        found += counts[panel];
    }
    return found;
}

/* out [rows, n] fp32 = x [rows, k] bf16 times w. 0 if done, 1 if there was no memory. */
EXPORT int tp_multiply(Context *context, const Matrix *w, const float *bias, const bf16 *x, int64_t rows, float *out) {
    const int64_t stride = w->k + w->k % 2;
    const int64_t spread = CEIL_DIV(2 * spread_values(w) * 2, TP_PAD) * TP_PAD;
    const int64_t spreads = context->pool->threads * spread, values = CEIL_DIV(rows * stride * 2, TP_PAD) * TP_PAD;
    pthread_mutex_lock(&context->one_at_a_time);
    int ok = want(context, B_PRODUCT, spreads + values + rows * 4) && reserve_ops(context->pool, 1);
    char *memory = context->buffers[B_PRODUCT];
    float *scales = (float *)(memory + spreads + values);
    ok = ok && prepare_rows(w, x, rows, (uint16_t *)(memory + spreads), scales);
    if (ok) {
        pool_open(context->pool, 1);
        const ProductJob job = {context, *w,
                                {.bias = bias, .x = {memory + spreads, scales, stride, NULL}, .rows = rows,
                                 .out = OUT_STORE, .target = out, .target_stride = w->n},
                                memory, spread};
        pool_run(context->pool, multiply_all, &job, sizeof(job));
    }
    pthread_mutex_unlock(&context->one_at_a_time);
    return !ok;
}

/* tokens [rows]: the draw of each row of logits [rows, count], -1 for a row that is not finite. 0 if done, 1 if there
 * was no memory. */
EXPORT int tp_choose(Context *context, const float *logits, int64_t rows, int64_t count, const Draw *draws,
                     int64_t *tokens) {
    const int64_t each = CEIL_DIV((int64_t)sizeof(SampleScratch) + count * 8, TP_PAD) * TP_PAD;
    pthread_mutex_lock(&context->one_at_a_time);
    const int ok = want(context, B_PRODUCT, each * context->pool->threads) && reserve_ops(context->pool, 1);
    if (ok) {
        const ChoiceJob job = {logits, draws, rows, count, tokens, context->buffers[B_PRODUCT], each};
        if (rows == 1) {
            choose_row(&job, 0, 0);
        } else {
            pool_open(context->pool, 1);
            pool_run(context->pool, choose_rows, &job, sizeof(job));
        }
    }
    pthread_mutex_unlock(&context->one_at_a_time);
    return !ok;
}
