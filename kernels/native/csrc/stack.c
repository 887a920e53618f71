/* The decoder's layers, run by all threads together in one call: no interpreter between two operations, and the rest of
 * the server has its lock meanwhile.
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
    const bf16 *embedding; /* [vocab, hidden]; NULL: rows of the head, bf16 or int8 */
    Matrix head;
    const float *final_norm;
    const Layer *layers;
    const Rope *ropes;
    int32_t layer_count, rope_count;
} Model;

typedef struct {
    int64_t tokens, rows;
    const int64_t *ids;                    /* [tokens] */
    const int64_t *slots, *starts, *counts; /* [rows] */
    const int32_t *tables[2];
    int64_t table_stride[2];
    bf16 *out; /* [tokens, hidden] after the final norm */
} Step;

typedef struct {
    int32_t row, first, count;
    int64_t keys;
} QueryBlock;

/* The blocks of queries for layers whose heads share KV heads in groups of `group`. */
typedef struct {
    int32_t group;
    int64_t count, have;
    QueryBlock *blocks;
} Blocks;

#define MAX_GROUPS 8
#define OPS_PER_LAYER 16
#define FEW 2 /* tokens up to which every thread computes norms for itself, which saves a barrier */

enum {
    B_HIDDEN, B_OTHER_HIDDEN, B_X, B_X_SCALES, B_QKV, B_QUERIES, B_ATTENDED, B_INNER, B_OUT, B_ROTARY, B_ROW_OF, B_POSITION,
    B_COUNTERS, B_PARTIAL, B_NORMED, B_ROUTER, B_CHOSEN, B_SHARES, B_ORDER, B_PLACE, B_EXPERT_OF, B_EXPERT_OUT, B_BUFFERS
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
    const Step *step;
    int64_t expert_starts_have;
    int32_t *expert_starts; /* [experts + 1] */
    int32_t *hit, hit_count; /* experts that have tokens */
    _Atomic int64_t bytes;   /* see bytes_read */
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

INLINE int64_t share_start(int64_t total, int thread, int threads) { return total * thread / threads; }

/* Half-split pairing over the first rope dims of a head. */
static void rotate(float *x, const float *cosine, const float *sine, int32_t half) {
    for (int32_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void embed(const Context *context, int64_t from, int64_t to) {
    const Model *model = context->model;
    const Step *step = context->step;
    for (int64_t t = from; t < to; t++) {
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
        } else {
            const bf16 *at = (const bf16 *)model->head.data + id / PANEL * pairs_of(&model->head) * PANEL * 2;
            at += id % PANEL * 2;
            for (int64_t i = 0; i < model->hidden; i++) out[i] = bf16_to_f32(at[i / 2 * PANEL * 2 + i % 2]);
        }
        if (model->embedding_scale != 1.0f)
            for (int64_t i = 0; i < model->hidden; i++)
                out[i] = bf16_to_f32(f32_to_bf16(out[i] * model->embedding_scale));
    }
}

INLINE float *rotary_of(const Context *context, int32_t rope, int64_t token) {
    int64_t at = 0;
    for (int32_t r = 0; r < rope; r++) at += context->step->tokens * context->model->ropes[r].dim;
    return BUFFER(float, B_ROTARY) + at + token * context->model->ropes[rope].dim;
}

static void fill_rotary(const Context *context, int64_t from, int64_t to) {
    for (int32_t r = 0; r < context->model->rope_count; r++) {
        const Rope *rope = &context->model->ropes[r];
        const int32_t half = rope->dim / 2;
        for (int64_t t = from; t < to; t++) {
            float *out = rotary_of(context, r, t);
            const float position = (float)BUFFER(int64_t, B_POSITION)[t];
            for (int32_t i = 0; i < half; i++) {
                float sine, cosine;
                sincosf(position * rope->frequencies[i], &sine, &cosine);
                out[i] = cosine * rope->scale;
                out[half + i] = sine * rope->scale;
            }
        }
    }
}

/* ---- operations of a layer, done by all threads ------------------------------------------------------------------ */

typedef struct {
    Context *context;
    int thread;
    int32_t op;     /* counters used so far */
    float *hidden;  /* where the residual stream is */
    float *other;   /* where it goes next */
} Run;

INLINE Counter *next_counter(Run *run) { return (Counter *)run->context->buffers[B_COUNTERS] + run->op++; }

INLINE void meet(Run *run) { barrier(run->context->pool); }

INLINE bf16 *own_spread(const Run *run) { return run->context->own[run->thread]; }

static void prepare_row(const float *source, const Matrix *w, void *target, float *scale) {
    if (w->format == FORMAT_INT8) {
        *scale = row_to_int16(source, target, w->k);
        if (w->k % 2) ((int16_t *)target)[w->k] = 0;
    } else {
        row_to_bf16(source, target, w->k);
        if (w->k % 2) ((bf16 *)target)[w->k] = 0;
    }
}

/* Rows of x [tokens, k] fp32 as w multiplies them. Ends with a barrier or in memory of the thread's own. add, if any,
 * is normed by add_weight and joins the residual stream first; norm, if any, is applied. keep: fp32 copy of the rows,
 * rounded as they are multiplied. */
static Rows prepare(Run *run, const float *x, const Matrix *w, const float *norm, const float *add,
                    const float *add_weight, int64_t tokens, float *keep) {
    Context *context = run->context;
    const int64_t k = w->k, stride = k + k % 2;
    const int alone = tokens <= FEW && keep == NULL && k == context->model->hidden;
    char *target = alone ? (char *)context->own[run->thread] + context->own_x : context->buffers[B_X];
    float *scales = alone ? (float *)(target + FEW * stride * 2) : BUFFER(float, B_X_SCALES);
    const int threads = context->pool->threads;
    const int64_t from = alone ? 0 : share_start(tokens, run->thread, threads);
    const int64_t to = alone ? tokens : share_start(tokens, run->thread + 1, threads);
    float *normed = (float *)((char *)context->own[run->thread] + context->own_attention);
    for (int64_t t = from; t < to; t++) {
        const float *row = x + t * k;
        if (add) {
            float *joined = run->other + t * k;
            const float factor = inverse_rms(add + t * k, k, context->model->eps);
            for (int64_t i = 0; i < k; i++) joined[i] = row[i] + add[t * k + i] * factor * add_weight[i];
            row = joined;
        }
        if (norm) {
            norm_row(row, norm, context->model->eps, normed, k);
            row = normed;
        }
        prepare_row(row, w, target + t * stride * 2, scales + t);
        if (keep)
            for (int64_t i = 0; i < k; i++) keep[t * k + i] = bf16_to_f32(f32_to_bf16(row[i]));
    }
    if (!alone) meet(run);
    if (add) {
        float *swap = run->hidden;
        run->hidden = run->other;
        run->other = swap;
    }
    return (Rows){target, scales, stride, NULL};
}

static void multiply(Run *run, Product p) {
    product(&p, run->context->pool, next_counter(run), own_spread(run));
    meet(run);
}

/* Norms of q and k, rotation, scaling of v; queries to their buffer, k and v to their pages. */
static void place_tokens(Run *run, const Layer *layer) {
    Context *context = run->context;
    const Step *step = context->step;
    const Shape *shape = &layer->shape;
    const int32_t dim = shape->dim, padded = dim + dim % 2, half = context->model->ropes[layer->rope].dim / 2;
    const int64_t width = (int64_t)(shape->heads + shape->kv_heads) * dim + (int64_t)shape->kv_heads * shape->value_dim;
    const int64_t pieces = shape->heads + shape->kv_heads;
    const int threads = context->pool->threads;
    const int64_t to = share_start(step->tokens * shape->kv_heads, run->thread + 1, threads);
    const int32_t group = shape->heads / shape->kv_heads;
    (void)pieces;
    for (int64_t task = share_start(step->tokens * shape->kv_heads, run->thread, threads); task < to; task++) {
        const int64_t t = task / shape->kv_heads;
        const int32_t head = (int32_t)(task % shape->kv_heads);
        float *qkv = BUFFER(float, B_QKV) + t * width;
        const float *cosine = rotary_of(context, layer->rope, t), *sine = cosine + half;
        const int64_t position = BUFFER(int64_t, B_POSITION)[t];
        const int64_t row = BUFFER(int32_t, B_ROW_OF)[t];
        const int32_t *table = step->tables[layer->kind] + step->slots[row] * step->table_stride[layer->kind];
        for (int32_t i = 0; i <= group; i++) {
            const int32_t which = i < group ? head * group + i : shape->heads + head;
            float *x = qkv + (int64_t)which * dim;
            if (layer->qk_norm) norm_row(x, layer->qk_norm + (int64_t)which * dim, context->model->eps, x, dim);
            rotate(x, cosine, sine, half);
            if (i < group) {
                bf16 *query = BUFFER(bf16, B_QUERIES) + (t * shape->heads + which) * padded;
                row_to_bf16(x, query, dim);
                if (dim % 2) query[dim] = 0;
            } else {
                row_to_bf16(x, key_at(&layer->pages, table, head, position, dim), dim);
            }
        }
        const float *v = qkv + (int64_t)(shape->heads + shape->kv_heads) * dim + (int64_t)head * shape->value_dim;
        bf16 *value = value_at(&layer->pages, table, head, position, shape->value_dim);
        for (int32_t i = 0; i < shape->value_dim; i++) value[i] = f32_to_bf16(v[i] * layer->value_scale);
    }
    meet(run);
}

INLINE Scratch own_scratch(const Run *run, const Shape *shape) {
    char *memory = (char *)run->context->own[run->thread] + run->context->own_attention;
    return lay_scratch(memory, shape->dim, shape->value_dim);
}

INLINE const int32_t *table_of(const Step *step, const Layer *layer, int64_t row) {
    return step->tables[layer->kind] + step->slots[row] * step->table_stride[layer->kind];
}

#define SPLIT_ROWS 16 /* query rows of a block up to which its segments may go to several threads */

INLINE int64_t partial_floats(const Shape *shape) { return (CEIL_DIV(shape->value_dim, PANEL) * PANEL + 2) * SPLIT_ROWS; }

/* Few and short blocks with many keys: every segment is a task, and the results are joined in a second round. */
static int splits(const Context *context, const Shape *shape, const Blocks *blocks, int64_t *segments) {
    if (blocks->count * shape->kv_heads >= 2 * context->pool->threads) return 0;
    *segments = 0;
    for (int64_t b = 0; b < blocks->count; b++) {
        const QueryBlock *block = &blocks->blocks[b];
        const int64_t start = context->step->starts[block->row] + block->first;
        const int64_t count = (start + block->count - 1) / SEGMENT - first_segment(shape, start) + 1;
        if (block->count * blocks->group > SPLIT_ROWS) return 0;
        *segments = MAX(*segments, count);
    }
    return *segments > 1 && context->pool->threads > 1;
}

static void attend_all(Run *run, const Layer *layer, float *out, bf16 *narrow) {
    Context *context = run->context;
    const Step *step = context->step;
    const Shape *shape = &layer->shape;
    const int32_t group = shape->heads / shape->kv_heads, padded = shape->dim + shape->dim % 2;
    const Blocks *blocks = context->groups;
    while (blocks->group != group) blocks++;
    Scratch scratch = own_scratch(run, shape);
    const int64_t per_token = (int64_t)shape->heads * shape->value_dim;
    const int64_t padded_values = CEIL_DIV(shape->value_dim, PANEL) * PANEL;
    int64_t segments = 0;
    const int split = splits(context, shape, blocks, &segments);
    Counter *counter = next_counter(run);
    const int64_t tasks = blocks->count * shape->kv_heads * (split ? segments : 1);
    for (int64_t task = take(counter, 1); task < tasks; task = take(counter, 1)) {
        const int64_t of_block = task / (split ? segments : 1), segment = split ? task % segments : 0;
        const QueryBlock *block = &blocks->blocks[of_block / shape->kv_heads];
        const int32_t head = (int32_t)(of_block % shape->kv_heads);
        const int64_t start = step->starts[block->row] + block->first;
        int64_t token = block->first;
        for (int64_t row = 0; row < block->row; row++) token += step->counts[row];
        const bf16 *queries =
            BUFFER(bf16, B_QUERIES) + (token * shape->heads + (int64_t)head * group) * padded;
        const int32_t *table = table_of(step, layer, block->row);
        const int64_t stride = (int64_t)shape->heads * padded;
        if (!split) {
            attend(shape, &layer->pages, table, head, queries, stride, start, block->count, &scratch,
                   out ? out + token * per_token : NULL, narrow ? narrow + token * per_token : NULL);
            continue;
        }
        const int64_t number = first_segment(shape, start) + segment;
        if (number > (start + block->count - 1) / SEGMENT) continue;
        attend_segment(shape, &layer->pages, table, head, queries, stride, start, block->count, number, &scratch);
        const int rows = block->count * group;
        float *partial = BUFFER(float, B_PARTIAL) + task * partial_floats(shape);
        memcpy(partial, scratch.partial, (size_t)(rows * padded_values) * 4);
        memcpy(partial + SPLIT_ROWS * padded_values, scratch.maxima, (size_t)rows * 4);
        memcpy(partial + SPLIT_ROWS * (padded_values + 1), scratch.sums, (size_t)rows * 4);
    }
    meet(run);
    if (!split) return;
    const int64_t pieces = blocks->count * shape->kv_heads;
    for (int64_t piece = run->thread; piece < pieces; piece += context->pool->threads) {
        const QueryBlock *block = &blocks->blocks[piece / shape->kv_heads];
        const int32_t head = (int32_t)(piece % shape->kv_heads);
        const int64_t start = step->starts[block->row] + block->first;
        const int64_t count = (start + block->count - 1) / SEGMENT - first_segment(shape, start) + 1;
        int64_t token = block->first;
        for (int64_t row = 0; row < block->row; row++) token += step->counts[row];
        float *first = BUFFER(float, B_PARTIAL) + piece * segments * partial_floats(shape);
        for (int row = 0; row < block->count * group; row++) {
            float *maximum = first + SPLIT_ROWS * padded_values + row, *sum = maximum + SPLIT_ROWS;
            for (int64_t s = 1; s < count; s++) {
                const float *other = first + s * partial_floats(shape);
                join(maximum, sum, first + row * padded_values, other[SPLIT_ROWS * padded_values + row],
                     other[SPLIT_ROWS * (padded_values + 1) + row], other + row * padded_values, padded_values);
            }
            const int32_t query_head = head * group + row % group;
            const int64_t at = (token + row / group) * per_token + (int64_t)query_head * shape->value_dim;
            finish(shape, query_head, *maximum, *sum, first + row * padded_values, out ? out + at : NULL,
                   narrow ? narrow + at : NULL);
        }
    }
    meet(run);
}

/* inner = act(gate) * up of x, in the number format that `next` multiplies. */
static Rows gate(Run *run, const Layer *layer, const Matrix *gate_up, const float *bias, Rows x, const Matrix *next,
                 int64_t rows) {
    Context *context = run->context;
    const int64_t width = gate_up->n / 2;
    const int wide = next->format == FORMAT_INT8 || width % 2;
    bf16 *narrow = wide ? NULL : BUFFER(bf16, B_INNER);
    Product p = {.w = gate_up, .bias = bias, .x = x, .rows = rows, .activation = layer->activation,
                 .limit = layer->limit, .alpha = layer->alpha};
    if (can_gate(gate_up)) {
        p.out = OUT_GATED, p.target = BUFFER(float, B_INNER), p.narrow = narrow, p.target_stride = width;
        multiply(run, p);
        if (narrow) return (Rows){narrow, NULL, width, NULL};
        return prepare(run, BUFFER(float, B_INNER), next, NULL, NULL, NULL, rows, NULL);
    }
    p.out = OUT_STORE, p.target = BUFFER(float, B_QKV), p.target_stride = 2 * width;
    multiply(run, p);
    const int64_t to = share_start(rows, run->thread + 1, context->pool->threads);
    for (int64_t t = share_start(rows, run->thread, context->pool->threads); t < to; t++) {
        const float *both = BUFFER(float, B_QKV) + t * 2 * width;
        activate(layer->activation, layer->limit, layer->alpha, both, both + width,
                 BUFFER(float, B_INNER) + t * width, width);
    }
    meet(run);
    return prepare(run, BUFFER(float, B_INNER), next, NULL, NULL, NULL, rows, NULL);
}

#include "moe.h"

static void layer_forward(Run *run, const Layer *layer) {
    Context *context = run->context;
    const Step *step = context->step;
    const int64_t tokens = step->tokens, hidden = context->model->hidden;
    const int64_t values = (int64_t)layer->shape.heads * layer->shape.value_dim;
    /* Norm and qkv. The previous layer's post norm, if it has one, has been joined by its own end. */
    Rows x = prepare(run, run->hidden, &layer->qkv, layer->attention_norm, NULL, NULL, tokens, NULL);
    multiply(run, (Product){.w = &layer->qkv, .bias = layer->qkv_bias, .x = x, .rows = tokens, .out = OUT_STORE,
                            .target = BUFFER(float, B_QKV), .target_stride = layer->qkv.n});
    place_tokens(run, layer);
    const int wide = layer->output.format == FORMAT_INT8 || values % 2;
    attend_all(run, layer, wide ? BUFFER(float, B_ATTENDED) : NULL, wide ? NULL : BUFFER(bf16, B_ATTENDED));
    x = (Rows){BUFFER(bf16, B_ATTENDED), NULL, values, NULL};
    if (wide) x = prepare(run, BUFFER(float, B_ATTENDED), &layer->output, NULL, NULL, NULL, tokens, NULL);
    const float *post = layer->attention_post_norm;
    multiply(run, (Product){.w = &layer->output, .bias = layer->output_bias, .x = x, .rows = tokens,
                            .out = post ? OUT_STORE : OUT_ADD, .target = post ? BUFFER(float, B_OUT) : run->hidden,
                            .target_stride = hidden});
    const float *joined = post ? BUFFER(float, B_OUT) : NULL;
    const float *mlp_post = layer->mlp_post_norm;
    if (layer->experts) {
        mixture(run, layer, joined, post);
        return;
    }
    x = prepare(run, run->hidden, &layer->gate_up, layer->mlp_norm, joined, post, tokens, NULL);
    x = gate(run, layer, &layer->gate_up, layer->gate_up_bias, x, &layer->down, tokens);
    multiply(run, (Product){.w = &layer->down, .bias = layer->down_bias, .x = x, .rows = tokens,
                            .out = mlp_post ? OUT_STORE : OUT_ADD,
                            .target = mlp_post ? BUFFER(float, B_OUT) : run->hidden, .target_stride = hidden});
    if (mlp_post) {
        const float *out = BUFFER(float, B_OUT);
        const int threads = context->pool->threads;
        const int64_t to = share_start(tokens, run->thread + 1, threads);
        for (int64_t t = share_start(tokens, run->thread, threads); t < to; t++) {
            const float factor = inverse_rms(out + t * hidden, hidden, context->model->eps);
            for (int64_t i = 0; i < hidden; i++)
                run->hidden[t * hidden + i] += out[t * hidden + i] * factor * mlp_post[i];
        }
        meet(run);
    }
}

static void forward(void *given, int thread) {
    Context *context = given;
    const Model *model = context->model;
    const Step *step = context->step;
    const int threads = context->pool->threads;
    Run run = {context, thread, 0, BUFFER(float, B_HIDDEN), BUFFER(float, B_OTHER_HIDDEN)};
    const int64_t from = share_start(step->tokens, thread, threads), to = share_start(step->tokens, thread + 1, threads);
    embed(context, from, to);
    fill_rotary(context, from, to);
    meet(&run);
    for (int32_t index = 0; index < model->layer_count; index++) layer_forward(&run, &model->layers[index]);
    float *normed = (float *)((char *)context->own[thread] + context->own_attention);
    for (int64_t t = from; t < to; t++) {
        norm_row(run.hidden + t * model->hidden, model->final_norm, model->eps, normed, model->hidden);
        row_to_bf16(normed, step->out + t * model->hidden, model->hidden);
    }
    count_bytes(context);
}

#include "sampling.h"
#include "api.h"
