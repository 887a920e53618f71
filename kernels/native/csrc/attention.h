/* Attention over pages: blocks of keys are laid out for the matrix product of gemm.h, softmax is kept running.
 *
 * Keys are cut at absolute positions (blocks of 64, segments of 256), each segment is summed on its own and segments
 * are joined in order. So a query's result depends on its own keys alone: not on the chunk it came in, the queries
 * beside it or who computed it. Source of the running softmax: Milakov and Gimelshein, arXiv 1805.02867; of tiling it:
 * Dao et al., arXiv 2205.14135.
 */
#ifndef TP_ATTENTION_H
#define TP_ATTENTION_H

#include "gemm.h"

#define BLOCK 64          /* keys */
#define SEGMENT 256       /* keys that one partial result covers */
#define QUERY_ROWS 96     /* query rows (tokens x heads that share a KV head) of one task */
#define LEAST_QUERY_ROWS 24 /* cut finer for more threads, tasks have no fewer: keys are laid out anew for each */
#define TASKS_EACH 3      /* so many of the longest tasks for each thread, at least */
#define FEW_ROWS 16       /* query rows up to which the next block is fetched ahead: memory is what they wait for */
#define NEVER (-INFINITY)

/* K [page][KV heads][page_tokens][dim] in one kind's pages: page p starts at (p / per_slab) * slab_stride +
 * (p % per_slab) * page_stride, counted in values. */
typedef struct {
    bf16 *k, *v;
    int64_t slab_stride, page_stride;
    int32_t per_slab, page_tokens;
} Pages;

typedef struct {
    int32_t heads, kv_heads, dim, value_dim;
    int32_t window; /* keys a query sees, itself included; 0: all */
    float scale;
    const float *sinks; /* [heads] or NULL */
} Shape;

INLINE int64_t page_start(const Pages *pages, int32_t page) {
    return (page / pages->per_slab) * pages->slab_stride + (page % pages->per_slab) * pages->page_stride;
}

INLINE bf16 *key_at(const Pages *pages, const int32_t *table, int32_t head, int64_t position, int32_t dim) {
    const int64_t page = position / pages->page_tokens, offset = position % pages->page_tokens;
    return pages->k + page_start(pages, table[page]) + ((int64_t)head * pages->page_tokens + offset) * dim;
}

INLINE bf16 *value_at(const Pages *pages, const int32_t *table, int32_t head, int64_t position, int32_t dim) {
    const int64_t page = position / pages->page_tokens, offset = position % pages->page_tokens;
    return pages->v + page_start(pages, table[page]) + ((int64_t)head * pages->page_tokens + offset) * dim;
}

/* ---- keys and values of a block in the layout of gemm.h ------------------------------------------------------- */

#if TP_AVX512

/* 16 rows of 16 words -> 16 columns. */
INLINE void transpose16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#endif

/* rows: 32 keys of `dim` values, NULL for none -> panel [dim / 2][32][2]. */
static void lay_keys(const bf16 *const *rows, int32_t dim, bf16 *panel) {
    const int32_t pairs = CEIL_DIV(dim, 2);
    int32_t done = 0;
#if TP_AVX512
    for (; done + 16 <= dim / 2; done += 16)
        for (int half = 0; half < 2; half++) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const bf16 *row = rows[16 * half + i];
                r[i] = row ? _mm512_loadu_si512(row + 2 * done) : _mm512_setzero_si512();
            }
            transpose16(r);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(panel + ((int64_t)(done + i) * PANEL + 16 * half) * 2, r[i]);
        }
#endif
    for (int32_t pair = done; pair < pairs; pair++)
        for (int j = 0; j < PANEL; j++) {
            const bf16 *row = rows[j];
            panel[(pair * PANEL + j) * 2] = row ? row[2 * pair] : 0;
            panel[(pair * PANEL + j) * 2 + 1] = row && 2 * pair + 1 < dim ? row[2 * pair + 1] : 0;
        }
}

/* rows: `keys` rows (even) of `dim` values, NULL for none -> panels [dim / 32][keys / 2][32][2]. */
static void lay_values(const bf16 *const *rows, int keys, int32_t dim, bf16 *panels) {
    for (int32_t first = 0; first < dim; first += PANEL) {
        bf16 *panel = panels + (int64_t)(first / PANEL) * keys * PANEL;
        for (int pair = 0; pair < keys / 2; pair++, panel += 2 * PANEL) {
            const bf16 *even = rows[2 * pair], *odd = rows[2 * pair + 1];
#if TP_AVX512
            if (first + PANEL <= dim) {
                const __m512i zero = _mm512_setzero_si512();
                __m512i a = even ? _mm512_loadu_si512(even + first) : zero;
                __m512i b = odd ? _mm512_loadu_si512(odd + first) : zero;
                /* Words of a and b by turns: unpacking works in 128-bit lanes, so lanes are put in order after it. */
                __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
                const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
                _mm512_storeu_si512(panel, _mm512_permutex2var_epi64(low, first_half, high));
                _mm512_storeu_si512(panel + PANEL, _mm512_permutex2var_epi64(low, second_half, high));
                continue;
            }
#endif
            for (int j = 0; j < PANEL; j++) {
                const int inside = first + j < dim;
                panel[2 * j] = inside && even ? even[first + j] : 0;
                panel[2 * j + 1] = inside && odd ? odd[first + j] : 0;
            }
        }
    }
}

/* ---- one task ------------------------------------------------------------------------------------------------- */

/* What a thread needs: values are padded to whole panels, `padded`. */
typedef struct {
    float *scores;      /* [QUERY_ROWS][BLOCK] */
    bf16 *shares;       /* [QUERY_ROWS][BLOCK] */
    bf16 *keys;         /* [2][dim / 2][32][2] */
    bf16 *values;       /* [padded / 32][BLOCK / 2][32][2] */
    float *partial;     /* [QUERY_ROWS][padded]: of a segment */
    float *whole;       /* [QUERY_ROWS][padded]: of all segments so far */
    float *maxima;      /* [QUERY_ROWS] */
    float *sums;        /* [QUERY_ROWS] */
    float *all_maxima;  /* [QUERY_ROWS] */
    float *all_sums;    /* [QUERY_ROWS] */
} Scratch;

INLINE int64_t scratch_bytes(int32_t dim, int32_t value_dim) {
    const int64_t padded = CEIL_DIV(value_dim, PANEL) * PANEL;
    return QUERY_ROWS * BLOCK * 6 + (dim + 2) * BLOCK * 2 + padded * BLOCK * 2 + QUERY_ROWS * padded * 8 +
           QUERY_ROWS * 16 + 10 * TP_PAD;
}

static Scratch lay_scratch(char *memory, int32_t dim, int32_t value_dim) {
    const int64_t padded = CEIL_DIV(value_dim, PANEL) * PANEL;
    Scratch s;
#define TAKE(field, bytes)                                                                                            \
    s.field = (void *)memory;                                                                                         \
    memory += CEIL_DIV(bytes, TP_PAD) * TP_PAD
    TAKE(scores, QUERY_ROWS * BLOCK * 4);
    TAKE(shares, QUERY_ROWS * BLOCK * 2);
    TAKE(keys, (dim + 2) * BLOCK * 2);
    TAKE(values, padded * BLOCK * 2);
    TAKE(partial, QUERY_ROWS * padded * 4);
    TAKE(whole, QUERY_ROWS * padded * 4);
    TAKE(maxima, QUERY_ROWS * 4);
    TAKE(sums, QUERY_ROWS * 4);
    TAKE(all_maxima, QUERY_ROWS * 4);
    TAKE(all_sums, QUERY_ROWS * 4);
#undef TAKE
    return s;
}

/* Join a segment's (maximum, sum, values) to what came before it. A segment of NaN has no maximum, but a sum. */
UNIQUE void join(float *maximum, float *sum, float *values, float other_maximum, float other_sum,
                 const float *other_values, int64_t count) {
    if (other_maximum == NEVER && other_sum == 0.0f) return;
    const float top = MAX(*maximum, other_maximum);
    const float mine = *maximum == NEVER ? 0.0f : fast_exp(*maximum - top), its = fast_exp(other_maximum - top);
    for (int64_t i = 0; i < count; i++) values[i] = values[i] * mine + other_values[i] * its;
    *sum = *sum * mine + other_sum * its;
    *maximum = top;
}

#if TP_AVX512

/* e^x for x <= 0, to about 3e-6: 2^f on [-0.5, 0.5] by a polynomial, the whole part by scaling the exponent. */
INLINE __m512 exp16(__m512 x) {
    const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(scaled, whole);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

#endif

/* Scores of one row in a block, columns [from, to) seen -> shares as bf16, maximum and sum updated, values rescaled. */
INLINE void soften(float *scores, bf16 *shares, int columns, int from, int to, float scale, float *maximum, float *sum,
                   float *values, int64_t count) {
    if (from >= to) {
        memset(shares, 0, (size_t)columns * 2);
        return;
    }
    for (int j = 0; j < from; j++) scores[j] = NEVER;
    for (int j = to; j < columns; j++) scores[j] = NEVER;
    float top = NEVER, total = 0.0f;
#if TP_AVX512
    __m512 tops = _mm512_loadu_ps(scores);
    for (int j = 16; j < columns; j += 16) tops = _mm512_max_ps(tops, _mm512_loadu_ps(scores + j));
    top = _mm512_reduce_max_ps(tops) * scale;
#else
#pragma omp simd reduction(max : top)
    for (int j = 0; j < columns; j++) top = scores[j] > top ? scores[j] : top;
    top *= scale;
#endif
    if (top > *maximum) {
        if (*maximum != NEVER) {
            const float shrink = fast_exp(*maximum - top);
            for (int64_t i = 0; i < count; i++) values[i] *= shrink;
            *sum *= shrink;
        }
        *maximum = top;
    }
    const float base = *maximum;
#if TP_AVX512
    __m512 totals = _mm512_setzero_ps();
    for (int j = 0; j < columns; j += 16) {
        const __m512 score = _mm512_loadu_ps(scores + j);
        const __m512 share = exp16(_mm512_fmsub_ps(score, _mm512_set1_ps(scale), _mm512_set1_ps(base)));
        totals = _mm512_add_ps(totals, share);
        _mm256_storeu_si256((__m256i *)(shares + j), (__m256i)_mm512_cvtneps_pbh(share));
    }
    total = _mm512_reduce_add_ps(totals);
#else
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < columns; j++) {
        const float share = fast_exp(scores[j] * scale - base);
        total += share;
        shares[j] = f32_to_bf16(share);
    }
#endif
    *sum += total;
}

/* Queries of `tokens` tokens from position `start` on, heads [head * group, (head + 1) * group) each, over the keys of
 * segment `segment`. queries: token t's heads at queries + t * stride, `dim` values each. Result in partial, maxima and
 * sums, row t * group + g. Only positions that some query sees are read. */
UNIQUE void attend_segment(const Shape *shape, const Pages *pages, const int32_t *table, int32_t head,
                           const bf16 *queries, int64_t stride, int64_t start, int32_t tokens, int64_t segment,
                           Scratch *s) {
    const int32_t group = shape->heads / shape->kv_heads, rows = tokens * group;
    const int64_t padded = CEIL_DIV(shape->value_dim, PANEL) * PANEL;
    const int64_t key_panel = CEIL_DIV(shape->dim, 2) * PANEL * 2;
    const int64_t lowest = shape->window ? MAX(0, start - shape->window + 1) : 0, end = start + tokens;
    memset(s->partial, 0, (size_t)(rows * padded) * 4);
    for (int i = 0; i < rows; i++) s->maxima[i] = NEVER, s->sums[i] = 0.0f;
    const int64_t from = MAX(segment * SEGMENT, lowest / BLOCK * BLOCK), to = MIN((segment + 1) * SEGMENT, end);
    const int odd = shape->dim % 2;
    for (int64_t block = from; block < to; block += BLOCK) {
        const bf16 *rows_k[BLOCK], *rows_v[BLOCK];
        const int used = (int)(CEIL_DIV(MIN(BLOCK, to - block), PANEL) * PANEL);
        for (int j = 0; j < used; j++) {
            const int64_t position = block + j;
            const int seen = position >= lowest && position < end;
            bytes_read += seen ? (shape->dim + shape->value_dim) * 2 : 0;
            rows_k[j] = seen ? key_at(pages, table, head, position, shape->dim) : NULL;
            rows_v[j] = seen ? value_at(pages, table, head, position, shape->value_dim) : NULL;
        }
        if (rows <= FEW_ROWS)
            for (int64_t position = MAX(block + BLOCK, lowest); position < MIN(block + 2 * BLOCK, to); position++) {
                const char *k = (const char *)key_at(pages, table, head, position, shape->dim);
                const char *v = (const char *)value_at(pages, table, head, position, shape->value_dim);
                for (int32_t byte = 0; byte < shape->dim * 2; byte += 64) __builtin_prefetch(k + byte, 0, 2);
                for (int32_t byte = 0; byte < shape->value_dim * 2; byte += 64) __builtin_prefetch(v + byte, 0, 2);
            }
        for (int j = 0; j < used; j += PANEL) lay_keys(rows_k + j, shape->dim, s->keys + j / PANEL * key_panel);
        lay_values(rows_v, used, shape->value_dim, s->values);
        for (int first = 0; first < rows;) {
            const int left = rows - first, count = CEIL_DIV(left, CEIL_DIV(left, MAX_ROWS));
            const void *at[MAX_ROWS];
            for (int i = 0; i < count; i++) {
                const int row = first + i;
                at[i] = queries + (row / group) * stride + (row % group) * (shape->dim + odd);
            }
            for (int j = 0; j < used; j += PANEL)
                multiply_bf16(count, CEIL_DIV(shape->dim, 2), at, s->keys + j / PANEL * key_panel,
                              s->scores + first * BLOCK + j, BLOCK, 0);
            for (int i = 0; i < count; i++) {
                const int row = first + i;
                const int64_t position = start + row / group;
                const int64_t low = shape->window ? MAX(0, position - shape->window + 1) : 0;
                const int seen_from = (int)MIN(used, MAX(0, low - block));
                const int seen_to = (int)MAX(0, MIN(used, position + 1 - block));
                soften(s->scores + row * BLOCK, s->shares + row * BLOCK, used, seen_from, seen_to, shape->scale,
                       s->maxima + row, s->sums + row, s->partial + row * padded, padded);
                at[i] = s->shares + row * BLOCK;
            }
            for (int64_t panel = 0; panel < padded / PANEL; panel++)
                multiply_bf16(count, used / 2, at, s->values + panel * used * PANEL,
                              s->partial + first * padded + panel * PANEL, padded, 1);
            first += count;
        }
    }
}

INLINE int64_t first_segment(const Shape *shape, int64_t position) {
    return shape->window ? MAX(0, position - shape->window + 1) / SEGMENT : 0;
}

/* Divide by the sum, the sink included: exp(sink) joins the denominator. */
UNIQUE void finish(const Shape *shape, int32_t head, float maximum, float sum, const float *values, float *out,
                   bf16 *narrow) {
    float factor = 1.0f;
    if (shape->sinks) {
        const float sink = shape->sinks[head], top = MAX(maximum, sink);
        factor = fast_exp(maximum - top);
        sum = sum * factor + fast_exp(sink - top);
    }
    factor /= sum;
    if (narrow)
        for (int32_t i = 0; i < shape->value_dim; i++) narrow[i] = f32_to_bf16(values[i] * factor);
    else
        for (int32_t i = 0; i < shape->value_dim; i++) out[i] = values[i] * factor;
}

/* All segments of `tokens` tokens at once: out or narrow [tokens][heads][value_dim]. */
static void attend(const Shape *shape, const Pages *pages, const int32_t *table, int32_t head, const bf16 *queries,
                   int64_t stride, int64_t start, int32_t tokens, Scratch *s, float *out, bf16 *narrow) {
    const int32_t group = shape->heads / shape->kv_heads, rows = tokens * group;
    const int64_t padded = CEIL_DIV(shape->value_dim, PANEL) * PANEL;
    const int64_t first = first_segment(shape, start), last = (start + tokens - 1) / SEGMENT;
    for (int64_t segment = first; segment <= last; segment++) {
        attend_segment(shape, pages, table, head, queries, stride, start, tokens, segment, s);
        if (segment == first) {
            float *swap;
            swap = s->partial, s->partial = s->whole, s->whole = swap;
            swap = s->maxima, s->maxima = s->all_maxima, s->all_maxima = swap;
            swap = s->sums, s->sums = s->all_sums, s->all_sums = swap;
        } else {
            for (int i = 0; i < rows; i++)
                join(s->all_maxima + i, s->all_sums + i, s->whole + i * padded, s->maxima[i], s->sums[i],
                     s->partial + i * padded, padded);
        }
    }
    for (int i = 0; i < rows; i++) {
        const int32_t query_head = head * group + i % group;
        const int64_t at = ((int64_t)(i / group) * shape->heads + query_head) * shape->value_dim;
        finish(shape, query_head, s->all_maxima[i], s->all_sums[i], s->whole + i * padded, out ? out + at : NULL,
               narrow ? narrow + at : NULL);
    }
}

#endif
