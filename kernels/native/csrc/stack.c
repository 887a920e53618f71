/* The decoder's layers, run by all threads together in one call: no interpreter between two operations, and others
 * have its lock meanwhile.
 *
 * Hidden states stay in fp32; what a matrix multiplies is rounded to bf16 (int16 beside int8 weights), and so are K, V,
 * queries and softmax shares. No result depends on how a step is put together: the same tokens give the same bits in
 * any chunk, in any batch, with any number of threads.
 */
#include "common.h"
#include "pool.h"
#include "gemm.h"
#include "attention.h"

enum { ROUTER_SIGMOID = 0, ROUTER_SOFTMAX = 1 };
enum { KIND_FULL = 0, KIND_WINDOW = 1 };

typedef struct {
    const float *frequencies; /* [dim / 2] radians per position */
    int32_t dim;
    float scale; /* multiplies cos and sin */
} Rope;

/* Biases and unused norms are NULL. experts == 0: dense. */
typedef struct {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;
    const float *qk_norm; /* [heads + kv_heads, dim] */
    Matrix qkv, output, gate_up, down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    Shape shape;
    Pages pages;
    int32_t kind, rope;
    float value_scale;
    int32_t activation;
    float limit, alpha;
    int32_t experts, active, router_kind, normalize;
    float routed_scale;
    const float *router, *router_bias; /* [experts, hidden], [experts] */
    const Matrix *expert_gate_up, *expert_down;
    const float *expert_gate_up_bias, *expert_down_bias; /* [experts, 2 * width], [experts, hidden] */
} Layer;

typedef struct {
    int64_t hidden;
    float eps, embedding_scale;
    const bf16 *embedding; /* [vocab, hidden]; NULL: rows of the head, bf16, bf12 or int8 */
    Matrix head;
    const float *final_norm;
    const Layer *layers;
    const Rope *ropes;
    int32_t layer_count, rope_count;
} Model;

typedef struct {
    int64_t tokens, rows;
    const int64_t *ids;                    /* [tokens] */
    const int64_t *slots, *starts, *counts; /* [rows]; in a job, the context's own copy of them */
    const int32_t *tables[2];
    int64_t table_stride[2];
    bf16 *out; /* [tokens, hidden] after the final norm; NULL: not wanted */
    /* [layer_count]: the tokens are cached and only run for their window K and V; so many of the first of them that are
     * left go no further than K and V of each layer, and full K and V are not written. NULL: all tokens are new. */
    const int64_t *drops;
} Step;

typedef struct {
    int32_t row, count;
    int64_t token, start; /* its first token in the step, and that token's position */
} QueryBlock;

INLINE int64_t segments_of(const Shape *shape, const QueryBlock *block) {
    return (block->start + block->count - 1) / SEGMENT - first_segment(shape, block->start) + 1;
}

/* The blocks of queries for layers whose heads share KV heads in groups of `group`. */
typedef struct {
    int32_t group;
    int64_t count, have;
    QueryBlock *blocks;
} Blocks;

#define MAX_GROUPS 8
#define OPS_PER_LAYER 16
#define FEW 2 /* tokens up to which every thread computes norms for itself, which saves an operation */

enum {
    B_HIDDEN, B_OTHER_HIDDEN, B_X, B_X_SCALES, B_QKV, B_QUERIES, B_ATTENDED, B_INNER, B_OUT, B_ROTARY, B_ROW_OF,
    B_POSITION, B_ROWS, B_PARTIAL, B_NORMED, B_ROUTER, B_CHOSEN, B_SHARES, B_ORDER, B_PLACE, B_HITS, B_EXPERT_OUT,
    B_PRODUCT, B_BUFFERS
};

typedef struct {
    Pool *pool;
    const Model *model;
    void *buffers[B_BUFFERS];
    int64_t have[B_BUFFERS];
    void *own[MAX_THREADS]; /* attention scratch, panels spread to bf16, private x */
    int64_t own_have[MAX_THREADS];
    int64_t own_x, own_attention; /* where they lie in it */
    Blocks groups[MAX_GROUPS];
    int32_t group_count;
    pthread_mutex_t one_at_a_time;
    int64_t expert_starts_have;
    int32_t *expert_starts; /* [experts + 1] */
    int32_t *hit; /* the experts that have tokens, as many as the layer's entry of B_HITS says */
    _Atomic int64_t bytes;   /* see bytes_read */
    _Atomic int interrupted; /* no step goes on beyond the layer that it is in */
} Context;

#define BUFFER(type, name) ((type *)context->buffers[name])

static void count_bytes(Context *context) {
    atomic_fetch_add(&context->bytes, bytes_read);
    bytes_read = 0;
}

/* ---- small operations on rows ----------------------------------------------------------------------------------- */

static float inverse_rms(const float *x, int64_t count, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / (float)count + eps);
}

static void norm_row(const float *x, const float *weight, float eps, float *out, int64_t count) {
    const float factor = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * factor * weight[i];
}

/* Half-split pairing over the first rope dims of a head. */
static void rotate(float *x, const float *cosine, const float *sine, int32_t half) {
    for (int32_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void embed(const Context *context, const Step *step, int64_t t) {
    const Model *model = context->model;
    float *out = BUFFER(float, B_HIDDEN) + t * model->hidden;
    const int64_t id = step->ids[t];
    if (model->embedding) {
        const bf16 *row = model->embedding + id * model->hidden;
        for (int64_t i = 0; i < model->hidden; i++) out[i] = bf16_to_f32(row[i]);
    } else if (model->head.format == FORMAT_INT8) {
        const int8_t *at = (const int8_t *)model->head.data + id / PANEL * pairs_of(&model->head) * PANEL * 2;
        const float scale = ((const float *)model->head.scales)[id];
        at += id % PANEL * 2;
        for (int64_t i = 0; i < model->hidden; i++)
            out[i] = bf16_to_f32(f32_to_bf16((float)at[i / 2 * PANEL * 2 + i % 2] * scale));
    } else if (model->head.format == FORMAT_BF12) {
        const Matrix *head = &model->head;
        const int64_t panel = id / PANEL;
        const int output = (int)(id % PANEL);
        for (int64_t i = 0; i < model->hidden; i++)
            out[i] = bf16_to_f32(
                unpacked(quads(head, panel) + i / QUAD * QUAD_BYTES, codes(head, panel), output, (int)(i % QUAD)));
        for (int64_t e = head->escape_starts[panel]; e < head->escape_starts[panel + 1]; e++)
            if (head->escapes[e].at % PANEL == (uint32_t)output)
                out[head->escapes[e].at / PANEL] = bf16_to_f32((bf16)head->escapes[e].value);
    } else {
        const bf16 *at = (const bf16 *)model->head.data + id / PANEL * pairs_of(&model->head) * PANEL * 2;
        at += id % PANEL * 2;
        for (int64_t i = 0; i < model->hidden; i++) out[i] = bf16_to_f32(at[i / 2 * PANEL * 2 + i % 2]);
    }
    if (model->embedding_scale != 1.0f)
        for (int64_t i = 0; i < model->hidden; i++)
            out[i] = bf16_to_f32(f32_to_bf16(out[i] * model->embedding_scale));
}

INLINE float *rotary_of(const Context *context, int64_t tokens, int32_t rope, int64_t token) {
    int64_t at = 0;
    for (int32_t r = 0; r < rope; r++) at += tokens * context->model->ropes[r].dim;
    return BUFFER(float, B_ROTARY) + at + token * context->model->ropes[rope].dim;
}

static void fill_rotary(const Context *context, int64_t tokens, int64_t t) {
    for (int32_t r = 0; r < context->model->rope_count; r++) {
        const Rope *rope = &context->model->ropes[r];
        const int32_t half = rope->dim / 2;
        float *out = rotary_of(context, tokens, r, t);
        const float position = (float)BUFFER(int64_t, B_POSITION)[t];
        for (int32_t i = 0; i < half; i++) {
            float sine, cosine;
            sincosf(position * rope->frequencies[i], &sine, &cosine);
            out[i] = cosine * rope->scale;
            out[half + i] = sine * rope->scale;
        }
    }
}

/* ---- operations of a layer, done by all threads ------------------------------------------------------------------ */

typedef struct {
    Hand hand;
    Context *context;
    Step step;
    float *hidden; /* where the residual stream is */
    float *other;  /* where it goes next */
    int64_t total; /* tokens of the step; step.tokens are those that are left, the last ones */
    int64_t fed;   /* tokens that had left before this layer */
    int64_t gone;  /* tokens that have left by now */
} Run;

/* Let the first tokens that are left go: what comes is about the others, and all buffers begin with them. */
static void drop(Run *run, int64_t tokens) {
    run->gone += tokens;
    run->step.tokens -= tokens;
    run->hidden += tokens * run->context->model->hidden;
    run->other += tokens * run->context->model->hidden;
}

/* What is left of a block of queries; count <= 0: nothing. */
INLINE QueryBlock left_of(const Run *run, const QueryBlock *block) {
    const int64_t gone = MAX(0, run->gone - block->token);
    return (QueryBlock){block->row, (int32_t)MAX(0, block->count - gone), block->token + gone, block->start + gone};
}

INLINE char *own(const Run *run) { return run->context->own[run->hand.thread]; }

INLINE bf16 *own_spread(const Run *run) { return (bf16 *)own(run); }

static void prepare_row(const float *source, const Matrix *w, void *target, float *scale) {
    if (w->format == FORMAT_INT8) {
        *scale = row_to_int16(source, target, w->k);
        if (w->k % 2) ((int16_t *)target)[w->k] = 0;
    } else {
        row_to_bf16(source, target, w->k);
        if (w->k % 2) ((bf16 *)target)[w->k] = 0;
    }
}

typedef struct {
    const float *x;                 /* [rows, k] */
    const Matrix *w;
    const float *norm;              /* NULL: none */
    const float *add, *add_norm;    /* [rows, k], which joins the residual stream first, normed; NULL: none */
    float *joined;                  /* [rows, k]: the stream with it */
    float *keep;                    /* fp32 copy, rounded as it is multiplied; NULL: none */
    char *target;
    float *scales;
} Preparation;

static void prepare_one(const Run *run, const Preparation *p, int64_t t) {
    const int64_t k = p->w->k, stride = k + k % 2;
    const float eps = run->context->model->eps;
    float *normed = (float *)(own(run) + run->context->own_attention);
    const float *row = p->x + t * k;
    if (p->add) {
        float *joined = p->joined + t * k;
        const float factor = inverse_rms(p->add + t * k, k, eps);
        for (int64_t i = 0; i < k; i++) joined[i] = row[i] + p->add[t * k + i] * factor * p->add_norm[i];
        row = joined;
    }
    if (p->norm) {
        norm_row(row, p->norm, eps, normed, k);
        row = normed;
    }
    prepare_row(row, p->w, p->target + t * stride * 2, p->scales + t);
    if (p->keep)
        for (int64_t i = 0; i < k; i++) p->keep[t * k + i] = bf16_to_f32(f32_to_bf16(row[i]));
}

/* The rows as w multiplies them. A few of them every thread prepares in memory of its own, which is no operation; a
 * late thread may read a stream that has moved on then, but finds no task that would use it. */
static Rows prepare(Run *run, Preparation p, int64_t rows) {
    const Context *context = run->context;
    const int64_t k = p.w->k, stride = k + k % 2;
    if (rows <= FEW && k == context->model->hidden && !p.add && !p.keep) {
        p.target = own(run) + context->own_x;
        p.scales = (float *)(p.target + FEW * stride * 2);
        for (int64_t t = 0; t < rows && !run->hand.late; t++) prepare_one(run, &p, t);
    } else {
        p.target = context->buffers[B_X];
        p.scales = BUFFER(float, B_X_SCALES);
        p.joined = run->other;
        EACH_TASK(&run->hand, rows, 4, t, prepare_one(run, &p, t));
    }
    if (p.add) {
        float *swap = run->hidden;
        run->hidden = run->other;
        run->other = swap;
    }
    return (Rows){p.target, p.scales, stride, NULL};
}

static void multiply(Run *run, Product p) { product(&p, &run->hand, own_spread(run)); }

INLINE const int32_t *table_of(const Step *step, const Layer *layer, int64_t row) {
    return step->tables[layer->kind] + step->slots[row] * step->table_stride[layer->kind];
}

/* Norms of q and k, rotation, scaling of v for one token and KV head; queries to their buffer, k and v to their pages.
 */
static void place(Run *run, const Layer *layer, int64_t t, int32_t head) {
    const Context *context = run->context;
    const Shape *shape = &layer->shape;
    const int32_t dim = shape->dim, padded = dim + dim % 2, half = context->model->ropes[layer->rope].dim / 2;
    const int64_t width = (int64_t)(shape->heads + shape->kv_heads) * dim + (int64_t)shape->kv_heads * shape->value_dim;
    const int32_t group = shape->heads / shape->kv_heads;
    float *qkv = BUFFER(float, B_QKV) + t * width;
    const int64_t token = run->fed + t;
    const float *cosine = rotary_of(context, run->total, layer->rope, token), *sine = cosine + half;
    const int64_t position = BUFFER(int64_t, B_POSITION)[token];
    const int32_t *table = table_of(&run->step, layer, BUFFER(int32_t, B_ROW_OF)[token]);
    const int writes = !run->step.drops || layer->shape.window;
    for (int32_t i = 0; i <= group; i++) {
        const int32_t which = i < group ? head * group + i : shape->heads + head;
        float *x = qkv + (int64_t)which * dim;
        if (layer->qk_norm) norm_row(x, layer->qk_norm + (int64_t)which * dim, context->model->eps, x, dim);
        rotate(x, cosine, sine, half);
        if (i < group) {
            bf16 *query = BUFFER(bf16, B_QUERIES) + (t * shape->heads + which) * padded;
            row_to_bf16(x, query, dim);
            if (dim % 2) query[dim] = 0;
        } else if (writes) {
            row_to_bf16(x, key_at(&layer->pages, table, head, position, dim), dim);
        }
    }
    if (!writes) return;
    const float *v = qkv + (int64_t)(shape->heads + shape->kv_heads) * dim + (int64_t)head * shape->value_dim;
    bf16 *value = value_at(&layer->pages, table, head, position, shape->value_dim);
    for (int32_t i = 0; i < shape->value_dim; i++) value[i] = f32_to_bf16(v[i] * layer->value_scale);
}

INLINE Scratch own_scratch(const Run *run, const Shape *shape) {
    return lay_scratch(own(run) + run->context->own_attention, shape->dim, shape->value_dim);
}

#define PARTIAL_BYTES (64 << 20) /* of partial results; very long contexts on many cores are left whole */
#define SPLIT_ROWS 16 /* query rows of a block up to which its segments may go to several threads */

INLINE int64_t partial_floats(const Shape *shape) {
    return (CEIL_DIV(shape->value_dim, PANEL) * PANEL + 2) * SPLIT_ROWS;
}

/* Few and short blocks with many keys: every segment is a task, and the results are joined in a second round. How many
 * segments there are at most, or 0 to leave blocks whole. */
static int64_t splits(const Run *run, const Shape *shape, const Blocks *blocks) {
    int64_t most = 0;
    const int threads = run->context->pool->threads;
    if (threads == 1 || blocks->count * shape->kv_heads >= 2 * threads) return 0;
    for (int64_t b = 0; b < blocks->count; b++) {
        const QueryBlock *block = &blocks->blocks[b];
        if (block->count * blocks->group > SPLIT_ROWS) return 0;
        most = MAX(most, segments_of(shape, block));
    }
    const int64_t bytes = most * blocks->count * shape->kv_heads * partial_floats(shape) * 4;
    return most > 1 && bytes <= PARTIAL_BYTES ? most : 0;
}

typedef struct {
    const Layer *layer;
    const Blocks *blocks;
    int64_t segments; /* 0: blocks are whole */
    float *out;
    bf16 *narrow;
} Attention;

INLINE int64_t padded_values(const Shape *shape) { return CEIL_DIV(shape->value_dim, PANEL) * PANEL; }

static void attend_task(const Run *run, const Attention *a, int64_t task, Scratch *scratch) {
    const Context *context = run->context;
    const Shape *shape = &a->layer->shape;
    const int32_t group = shape->heads / shape->kv_heads, padded = shape->dim + shape->dim % 2;
    const int64_t of_block = a->segments ? task / a->segments : task;
    const QueryBlock left = left_of(run, &a->blocks->blocks[of_block / shape->kv_heads]), *block = &left;
    if (!block->count) return;
    const int32_t head = (int32_t)(of_block % shape->kv_heads);
    const bf16 *queries =
        BUFFER(bf16, B_QUERIES) + ((block->token - run->fed) * shape->heads + (int64_t)head * group) * padded;
    const int32_t *table = table_of(&run->step, a->layer, block->row);
    const int64_t stride = (int64_t)shape->heads * padded, values = padded_values(shape);
    const int64_t at = (block->token - run->gone) * shape->heads * shape->value_dim;
    if (!a->segments) {
        attend(shape, &a->layer->pages, table, head, queries, stride, block->start, block->count, scratch,
               a->out ? a->out + at : NULL, a->narrow ? a->narrow + at : NULL);
        return;
    }
    const int64_t segment = task % a->segments;
    if (segment >= segments_of(shape, block)) return;
    attend_segment(shape, &a->layer->pages, table, head, queries, stride, block->start, block->count,
                   first_segment(shape, block->start) + segment, scratch);
    const int rows = block->count * group;
    float *partial = BUFFER(float, B_PARTIAL) + task * partial_floats(shape);
    memcpy(partial, scratch->partial, (size_t)(rows * values) * 4);
    memcpy(partial + SPLIT_ROWS * values, scratch->maxima, (size_t)rows * 4);
    memcpy(partial + SPLIT_ROWS * (values + 1), scratch->sums, (size_t)rows * 4);
}

static void join_task(const Run *run, const Attention *a, int64_t piece) {
    const Context *context = run->context;
    const Shape *shape = &a->layer->shape;
    const int32_t group = shape->heads / shape->kv_heads;
    const QueryBlock left = left_of(run, &a->blocks->blocks[piece / shape->kv_heads]), *block = &left;
    if (!block->count) return;
    const int32_t head = (int32_t)(piece % shape->kv_heads);
    const int64_t count = segments_of(shape, block), values = padded_values(shape);
    float *first = BUFFER(float, B_PARTIAL) + piece * a->segments * partial_floats(shape);
    for (int row = 0; row < block->count * group; row++) {
        float *maximum = first + SPLIT_ROWS * values + row, *sum = maximum + SPLIT_ROWS;
        for (int64_t s = 1; s < count; s++) {
            const float *other = first + s * partial_floats(shape);
            join(maximum, sum, first + row * values, other[SPLIT_ROWS * values + row],
                 other[SPLIT_ROWS * (values + 1) + row], other + row * values, values);
        }
        const int32_t query_head = head * group + row % group;
        const int64_t at =
            ((block->token - run->gone + row / group) * shape->heads + query_head) * (int64_t)shape->value_dim;
        finish(shape, query_head, *maximum, *sum, first + row * values, a->out ? a->out + at : NULL,
               a->narrow ? a->narrow + at : NULL);
    }
}

static void attend_all(Run *run, const Layer *layer, float *out, bf16 *narrow) {
    const Shape *shape = &layer->shape;
    const int32_t group = shape->heads / shape->kv_heads;
    const Blocks *blocks = run->context->groups;
    while (blocks->group != group) blocks++;
    Scratch scratch = own_scratch(run, shape);
    const Attention a = {layer, blocks, splits(run, shape, blocks), out, narrow};
    const int64_t pieces = blocks->count * shape->kv_heads;
    EACH_TASK(&run->hand, pieces * MAX(1, a.segments), pieces, task, attend_task(run, &a, task, &scratch));
    if (a.segments) EACH_TASK(&run->hand, pieces, pieces, piece, join_task(run, &a, piece));
}

/* inner = act(gate) * up, in the number format that `next` multiplies. */
static void activate_row(const Run *run, const Layer *layer, int64_t width, int64_t t) {
    const Context *context = run->context;
    const float *both = BUFFER(float, B_QKV) + t * 2 * width;
    activate(layer->activation, layer->limit, layer->alpha, both, both + width, BUFFER(float, B_INNER) + t * width,
             width);
}

static Rows gate(Run *run, const Layer *layer, const Matrix *gate_up, const float *bias, Rows x, const Matrix *next,
                 int64_t rows) {
    const Context *context = run->context;
    const int64_t width = gate_up->n / 2;
    bf16 *narrow = next->format == FORMAT_INT8 || width % 2 ? NULL : BUFFER(bf16, B_INNER);
    Product p = {.w = gate_up, .bias = bias, .x = x, .rows = rows, .activation = layer->activation,
                 .limit = layer->limit, .alpha = layer->alpha};
    if (can_gate(gate_up)) {
        p.out = OUT_GATED, p.target = BUFFER(float, B_INNER), p.narrow = narrow, p.target_stride = width;
        multiply(run, p);
        if (narrow) return (Rows){narrow, NULL, width, NULL};
    } else {
        p.out = OUT_STORE, p.target = BUFFER(float, B_QKV), p.target_stride = 2 * width;
        multiply(run, p);
        EACH_TASK(&run->hand, rows, 4, t, activate_row(run, layer, width, t));
    }
    return prepare(run, (Preparation){.x = BUFFER(float, B_INNER), .w = next}, rows);
}

#include "moe.h"

static void join_stream(const Run *run, const float *norm, int64_t t) {
    const Context *context = run->context;
    const int64_t hidden = context->model->hidden;
    const float *out = BUFFER(float, B_OUT) + t * hidden;
    float *stream = run->hidden + t * hidden;
    const float factor = inverse_rms(out, hidden, context->model->eps);
    for (int64_t i = 0; i < hidden; i++) stream[i] += out[i] * factor * norm[i];
}

static void layer_forward(Run *run, const Layer *layer, int64_t drops) {
    const Context *context = run->context;
    int64_t tokens = run->step.tokens;
    const int64_t hidden = context->model->hidden;
    const int64_t values = (int64_t)layer->shape.heads * layer->shape.value_dim;
    Rows x = prepare(run, (Preparation){.x = run->hidden, .w = &layer->qkv, .norm = layer->attention_norm}, tokens);
    multiply(run, (Product){.w = &layer->qkv, .bias = layer->qkv_bias, .x = x, .rows = tokens, .out = OUT_STORE,
                            .target = BUFFER(float, B_QKV), .target_stride = layer->qkv.n});
    const int32_t kv_heads = layer->shape.kv_heads;
    run->fed = run->gone;
    EACH_TASK(&run->hand, tokens * kv_heads, 4, task, place(run, layer, task / kv_heads, (int32_t)(task % kv_heads)));
    drop(run, drops);
    tokens = run->step.tokens;
    if (!tokens) return;
    const int wide = layer->output.format == FORMAT_INT8 || values % 2;
    attend_all(run, layer, wide ? BUFFER(float, B_ATTENDED) : NULL, wide ? NULL : BUFFER(bf16, B_ATTENDED));
    x = (Rows){BUFFER(bf16, B_ATTENDED), NULL, values, NULL};
    if (wide) x = prepare(run, (Preparation){.x = BUFFER(float, B_ATTENDED), .w = &layer->output}, tokens);
    const float *post = layer->attention_post_norm, *mlp_post = layer->mlp_post_norm;
    multiply(run, (Product){.w = &layer->output, .bias = layer->output_bias, .x = x, .rows = tokens,
                            .out = post ? OUT_STORE : OUT_ADD, .target = post ? BUFFER(float, B_OUT) : run->hidden,
                            .target_stride = hidden});
    Preparation before_mlp = {.x = run->hidden, .norm = layer->mlp_norm};
    if (post) before_mlp.add = BUFFER(float, B_OUT), before_mlp.add_norm = post;
    if (layer->experts) {
        mixture(run, layer, before_mlp);
        return;
    }
    before_mlp.w = &layer->gate_up;
    x = prepare(run, before_mlp, tokens);
    x = gate(run, layer, &layer->gate_up, layer->gate_up_bias, x, &layer->down, tokens);
    multiply(run, (Product){.w = &layer->down, .bias = layer->down_bias, .x = x, .rows = tokens,
                            .out = mlp_post ? OUT_STORE : OUT_ADD,
                            .target = mlp_post ? BUFFER(float, B_OUT) : run->hidden, .target_stride = hidden});
    if (mlp_post) EACH_TASK(&run->hand, tokens, 4, t, join_stream(run, mlp_post, t));
}

static void begin_token(const Run *run, int64_t t) {
    embed(run->context, &run->step, t);
    fill_rotary(run->context, run->step.tokens, t);
}

static void end_token(const Run *run, int64_t t) {
    const Model *model = run->context->model;
    float *normed = (float *)(own(run) + run->context->own_attention);
    norm_row(run->hidden + t * model->hidden, model->final_norm, model->eps, normed, model->hidden);
    row_to_bf16(normed, run->step.out + t * model->hidden, model->hidden);
}

typedef struct {
    Context *context;
    Step step;
} ForwardJob;

static void forward(Hand *hand, const void *given) {
    const ForwardJob *job = given;
    Context *context = job->context;
    const int64_t tokens = job->step.tokens, *drops = job->step.drops;
    Run run = {*hand, context, job->step, BUFFER(float, B_HIDDEN), BUFFER(float, B_OTHER_HIDDEN), tokens, 0, 0};
    EACH_TASK(&run.hand, tokens, 4, t, begin_token(&run, t));
    for (int32_t index = 0; index < context->model->layer_count && !run.hand.late; index++) {
        if (atomic_load(&context->interrupted)) return;
        layer_forward(&run, &context->model->layers[index], drops ? drops[index] : 0);
        if (!run.step.tokens) break;
    }
    if (run.step.out) EACH_TASK(&run.hand, run.step.tokens, 4, t, end_token(&run, t));
    count_bytes(context);
}

#include "sampling.h"
#include "api.h"
