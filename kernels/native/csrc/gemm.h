/* Matrix products: few or many rows of activations times a packed weight matrix.
 *
 * A packed matrix [n, k] is cut into panels of 32 outputs. In a panel the inputs come in pairs: for each pair of k, 32
 * outputs times 2 values, so that one vector instruction multiplies a pair and adds it to 16 outputs, and a product
 * with one row reads memory from front to end. Whatever the number of rows, an output is summed in the same order:
 * a row's result does not depend on the rows beside it, bit for bit.
 */
#ifndef TP_GEMM_H
#define TP_GEMM_H

#include "common.h"
#include "pool.h"

enum { FORMAT_BF16 = 0, FORMAT_INT8 = 1, FORMAT_MXFP4 = 2, FORMAT_FP8 = 3, FORMAT_BF12 = 4 };

#define PANEL 32
#define MAX_ROWS 10       /* rows that one inner loop holds in registers; more and the compiler spills */
#define MAX_INT8_ROWS 8
#define BF12_AHEAD 4096   /* bytes */
#define BF12_ROWS 128     /* beyond, a panel is spread once and read again for every block of rows */
#define INT8_BLOCK 1024   /* pairs of k after which int32 sums go to fp32: 2 * 8191 * 127 * 1024 < 2^31 */
#define INT16_LIMIT 8191  /* activations beside int8 weights are rounded to this many steps */
#define FP8_BLOCK 128
#define MXFP4_BLOCK 32

/* Said and not left to the compiler, which may contract the loop for one number of rows otherwise than for another. */
INLINE float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#include "bf12.h"

/* data: [panels][k / 2][32][2] of bf16, int8 or fp8 codes, or [panels][k / 2][32] bytes of two mxfp4 codes, low first;
 * bf12 as bf12.h says, [panels][ceil(k / 4)][192] bytes.
 * scales: int8 float [panels * 32]; fp8 float [panels][ceil(k / 128)][32]; mxfp4 uint8 e8m0 [panels][k / 32][32]; bf12
 * the tables, uint8 [panels][16].
 * escapes of bf12: those of panel p are escapes[starts[p]] to escapes[starts[p + 1]].
 * Rows are padded with zeros to whole panels, k to a whole pair or quad. */
typedef struct {
    const void *data;
    const void *scales;
    const Escape *escapes;
    const int64_t *escape_starts; /* [panels + 1] */
    int64_t n;
    int64_t k;
    int32_t format;
} Matrix;

INLINE int64_t panels_of(const Matrix *w) { return CEIL_DIV(w->n, PANEL); }
INLINE int64_t pairs_of(const Matrix *w) { return CEIL_DIV(w->k, 2); }

/* Bytes of weights, keys and values that this thread has asked memory for: what a step must read, not what caches
 * give again. */
static _Thread_local int64_t bytes_read;

INLINE int64_t escape_count(const Matrix *w, int64_t panel) {
    return w->escape_starts[panel + 1] - w->escape_starts[panel];
}

INLINE const uint8_t *quads(const Matrix *w, int64_t panel) {
    return (const uint8_t *)w->data + panel * quads_of(w->k) * QUAD_BYTES;
}

INLINE const uint8_t *codes(const Matrix *w, int64_t panel) { return (const uint8_t *)w->scales + panel * CODES; }

INLINE int64_t panel_bytes(const Matrix *w, int64_t panel) {
    static const int64_t of_pair[] = {4, 2, 1, 2}; /* by format */
    if (w->format == FORMAT_BF12)
        return quads_of(w->k) * QUAD_BYTES + CODES + escape_count(w, panel) * (int64_t)sizeof(Escape);
    return pairs_of(w) * PANEL * of_pair[w->format];
}

/* ---- inner loops: mr rows x 32 outputs over `pairs` pairs of k ----------------------------------------------- */

#if TP_AVX512

INLINE void inner_bf16(const int mr, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                       int add) {
    __m512 sum[MAX_ROWS][2];
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++) {
        sum[i][0] = add ? _mm512_loadu_ps(tile + i * ld) : _mm512_setzero_ps();
        sum[i][1] = add ? _mm512_loadu_ps(tile + i * ld + 16) : _mm512_setzero_ps();
    }
    const char *panel = w;
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + 64);
        if (mr <= 2) _mm_prefetch(panel + 2048, _MM_HINT_T0), _mm_prefetch(panel + 2112, _MM_HINT_T0);
        panel += 128;
#pragma GCC unroll 10
        for (int i = 0; i < mr; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int32_t)((const two_values *)x[i])[pair]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, low);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, high);
        }
    }
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++) {
        _mm512_storeu_ps(tile + i * ld, sum[i][0]);
        _mm512_storeu_ps(tile + i * ld + 16, sum[i][1]);
    }
}

#if TP_BF12

/* As inner_bf16 of the panel that is spread, to the bit. */
INLINE void inner_bf12(const int mr, int64_t pairs, const void *const *x, const void *w, const uint8_t *table,
                       float *tile) {
    __m512 sum[MAX_ROWS][2];
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    const __m512i high_bytes = table_of_codes(table);
    const char *panel = w;
    const int64_t next = CEIL_DIV(pairs, 2) * QUAD_BYTES; /* many rows read a panel from the cache until they are done */
    for (int64_t pair = 0; pair < pairs; pair += 2) {
        __m512i parts[QUAD];
        unpack_quad(panel, high_bytes, parts);
        for (int line = 0; line < 3; line++) {
            if (mr <= 4)
                _mm_prefetch(panel + BF12_AHEAD + 64 * line, _MM_HINT_T0);
            else
                _mm_prefetch(panel + next + 64 * line, _MM_HINT_T1);
        }
        panel += QUAD_BYTES;
#pragma GCC unroll 10
        for (int i = 0; i < mr; i++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int32_t)((const two_values *)x[i])[pair]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, (__m512bh)parts[0]);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, (__m512bh)parts[1]);
        }
        if (pair + 1 == pairs) break; /* x has no more */
#pragma GCC unroll 10
        for (int i = 0; i < mr; i++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int32_t)((const two_values *)x[i])[pair + 1]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, (__m512bh)parts[2]);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, (__m512bh)parts[3]);
        }
    }
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++) {
        _mm512_storeu_ps(tile + i * PANEL, sum[i][0]);
        _mm512_storeu_ps(tile + i * PANEL + 16, sum[i][1]);
    }
}

#endif

INLINE void inner_int8(const int mr, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                       int add) {
    __m512i sum[MAX_ROWS][2];
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
    const char *panel = w;
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)panel));
        __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(panel + 32)));
        if (mr <= 2) _mm_prefetch(panel + 1024, _MM_HINT_T0);
        panel += 64;
#pragma GCC unroll 10
        for (int i = 0; i < mr; i++) {
            __m512i both = _mm512_set1_epi32((int32_t)((const two_values *)x[i])[pair]);
            sum[i][0] = _mm512_dpwssd_epi32(sum[i][0], both, low);
            sum[i][1] = _mm512_dpwssd_epi32(sum[i][1], both, high);
        }
    }
#pragma GCC unroll 10
    for (int i = 0; i < mr; i++)
        for (int half = 0; half < 2; half++) {
            float *at = tile + i * ld + 16 * half;
            __m512 value = _mm512_cvtepi32_ps(sum[i][half]);
            _mm512_storeu_ps(at, add ? _mm512_add_ps(_mm512_loadu_ps(at), value) : value);
        }
}

#else

INLINE void inner_bf16(const int mr, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                       int add) {
    for (int i = 0; i < mr; i++) {
        float sum[PANEL];
        float *out = tile + i * ld;
        for (int j = 0; j < PANEL; j++) sum[j] = add ? out[j] : 0.0f;
        for (int64_t pair = 0; pair < pairs; pair++) {
            const two_values *panel = (const two_values *)w + pair * PANEL;
            uint32_t both = ((const two_values *)x[i])[pair];
            float even = from_bits(both << 16), odd = from_bits(both & 0xffff0000u);
            for (int j = 0; j < PANEL; j++)
                sum[j] += multiply_add(odd, from_bits(panel[j] & 0xffff0000u), even * from_bits(panel[j] << 16));
        }
        for (int j = 0; j < PANEL; j++) out[j] = sum[j];
    }
}

INLINE void inner_int8(const int mr, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                       int add) {
    for (int i = 0; i < mr; i++) {
        int32_t sum[PANEL] = {0};
        float *out = tile + i * ld;
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int8_t *panel = (const int8_t *)w + pair * PANEL * 2;
            const int16_t *both = (const int16_t *)x[i] + pair * 2;
            for (int j = 0; j < PANEL; j++) sum[j] += both[0] * panel[2 * j] + both[1] * panel[2 * j + 1];
        }
        for (int j = 0; j < PANEL; j++) out[j] = (add ? out[j] : 0.0f) + (float)sum[j];
    }
}

#endif

#define EACH_COUNT(call)                                                                                             \
    switch (rows) {                                                                                                   \
        case 1: call(1); break;                                                                                       \
        case 2: call(2); break;                                                                                       \
        case 3: call(3); break;                                                                                       \
        case 4: call(4); break;                                                                                       \
        case 5: call(5); break;                                                                                       \
        case 6: call(6); break;                                                                                       \
        case 7: call(7); break;                                                                                       \
        case 8: call(8); break;                                                                                       \
        case 9: call(9); break;                                                                                       \
        default: call(10); break;                                                                                     \
    }

static void multiply_bf16(int rows, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                          int add) {
#define CALL(count) inner_bf16(count, pairs, x, w, tile, ld, add)
    EACH_COUNT(CALL)
#undef CALL
}

static void multiply_int8(int rows, int64_t pairs, const void *const *x, const void *w, float *tile, int64_t ld,
                          int add) {
#define CALL(count) inner_int8(count, pairs, x, w, tile, ld, add)
    EACH_COUNT(CALL)
#undef CALL
}

#if TP_BF12
static void multiply_bf12(int rows, int64_t pairs, const void *const *x, const void *w, const uint8_t *table,
                          float *tile) {
#define CALL(count) inner_bf12(count, pairs, x, w, table, tile)
    EACH_COUNT(CALL)
#undef CALL
}
#endif

/* ---- 4 and 8 bit floating point: a panel is spread to bf16, which holds every code exactly ---------------------- */

/* e2m1: sign, two exponent bits with bias 1, one mantissa bit. Source: OCP Microscaling Formats specification 1.0. */
static const bf16 E2M1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                              0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

/* e4m3 without infinities: sign, four exponent bits with bias 7, three mantissa bits, 0x7f is NaN. Source: OCP 8-bit
 * Floating Point Specification 1.0. */
static bf16 e4m3_to_bf16(uint8_t code) {
    int exponent = (code >> 3) & 15, mantissa = code & 7;
    float value = exponent ? ldexpf(1.0f + (float)mantissa / 8.0f, exponent - 7) : ldexpf((float)mantissa / 8.0f, -6);
    if ((code & 0x7f) == 0x7f) value = NAN;
    return f32_to_bf16(code & 0x80 ? -value : value);
}

static bf16 E4M3[256];

static void fill_tables(void) {
    for (int code = 0; code < 256; code++) E4M3[code] = e4m3_to_bf16((uint8_t)code);
}

static void spread_fp8(const Matrix *w, int64_t panel, bf16 *out) {
    const uint8_t *codes = (const uint8_t *)w->data + panel * pairs_of(w) * PANEL * 2;
    for (int64_t i = 0; i < pairs_of(w) * PANEL * 2; i++) out[i] = E4M3[codes[i]];
}

/* The codes alone; scales are applied to sums of 32 inputs. */
static void spread_mxfp4(const Matrix *w, int64_t panel, bf16 *out) {
    const uint8_t *codes = (const uint8_t *)w->data + panel * pairs_of(w) * PANEL;
    for (int64_t i = 0; i < pairs_of(w) * PANEL; i++) {
        out[2 * i] = E2M1[codes[i] & 15];
        out[2 * i + 1] = E2M1[codes[i] >> 4];
    }
}

/* e8m0: a power of two with bias 127; 255 is NaN. */
INLINE float e8m0(uint8_t code) {
    if (code == 255) return NAN;
    return code ? from_bits((uint32_t)code << 23) : from_bits(0x00400000u);
}

/* Sums over blocks of k, each times the scale of its block. */
static void multiply_blocks(const Matrix *w, int64_t panel, const bf16 *spread, int rows, const void *const *x,
                            float *tile, int64_t ld) {
    const int64_t pairs = pairs_of(w);
    const int64_t block = (w->format == FORMAT_FP8 ? FP8_BLOCK : MXFP4_BLOCK) / 2;
    const int64_t blocks = CEIL_DIV(pairs, block);
    float part[MAX_ROWS * PANEL];
    const void *at[MAX_ROWS];
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = b * block, count = MIN(block, pairs - first);
        float scale[PANEL];
        for (int j = 0; j < PANEL; j++) {
            int64_t index = (panel * blocks + b) * PANEL + j;
            scale[j] = w->format == FORMAT_FP8 ? ((const float *)w->scales)[index]
                                               : e8m0(((const uint8_t *)w->scales)[index]);
        }
        for (int i = 0; i < rows; i++) at[i] = (const bf16 *)x[i] + 2 * first;
        multiply_bf16(rows, count, at, spread + first * PANEL * 2, part, PANEL, 0);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < PANEL; j++)
                tile[i * ld + j] = (b ? tile[i * ld + j] : 0.0f) + part[i * PANEL + j] * scale[j];
    }
}

/* ---- one panel ------------------------------------------------------------------------------------------------ */

/* x: rows that a product reads: bf16, or int16 with one scale a row beside int8 weights. */
typedef struct {
    const void *values;
    const float *scales;  /* [rows], int8 weights only */
    int64_t stride;       /* values from row to row */
    const int32_t *index; /* which row to take, or NULL for all in order */
} Rows;

INLINE int64_t row_number(const Rows *x, int64_t row) { return x->index ? x->index[row] : row; }

/* tile [rows][32] = rows [first, first + rows) of x times panel. spread: what `spread_panel` gave. */
static void multiply_panel(const Matrix *w, int64_t panel, const bf16 *spread, const Rows *x, int64_t first, int rows,
                           float *tile) {
    const void *at[MAX_ROWS];
    const int64_t pairs = pairs_of(w);
    for (int i = 0; i < rows; i++) at[i] = (const uint16_t *)x->values + row_number(x, first + i) * x->stride;
    if (w->format == FORMAT_BF16) {
        multiply_bf16(rows, pairs, at, (const bf16 *)w->data + panel * pairs * PANEL * 2, tile, PANEL, 0);
    } else if (w->format == FORMAT_INT8) {
        const int8_t *codes = (const int8_t *)w->data + panel * pairs * PANEL * 2;
        const float *scale = (const float *)w->scales + panel * PANEL;
        for (int64_t done = 0; done < pairs; done += INT8_BLOCK) {
            const void *from[MAX_ROWS];
            for (int i = 0; i < rows; i++) from[i] = (const int16_t *)at[i] + 2 * done;
            multiply_int8(rows, MIN(INT8_BLOCK, pairs - done), from, codes + done * PANEL * 2, tile, PANEL, done > 0);
        }
        for (int i = 0; i < rows; i++) {
            const float row_scale = x->scales[row_number(x, first + i)];
            for (int j = 0; j < PANEL; j++) tile[i * PANEL + j] *= scale[j] * row_scale;
        }
    } else if (w->format == FORMAT_BF12) {
        if (spread) multiply_bf16(rows, pairs, at, spread, tile, PANEL, 0);
#if TP_BF12
        else multiply_bf12(rows, pairs, at, quads(w, panel), codes(w, panel), tile);
#endif
        add_escapes(w->escapes + w->escape_starts[panel], escape_count(w, panel), at, rows, tile);
    } else {
        multiply_blocks(w, panel, spread, rows, at, tile, PANEL);
    }
}

/* Values that the room for a spread panel holds. */
INLINE int64_t spread_values(const Matrix *w) {
    return w->format >= FORMAT_MXFP4 ? PANEL * QUAD * quads_of(w->k) : 0;
}

/* The panel as bf16, NULL if a product of so many rows reads it as it is. */
INLINE const bf16 *spread_panel(const Matrix *w, int64_t panel, int64_t rows, bf16 *scratch) {
    if (w->format == FORMAT_FP8) {
        spread_fp8(w, panel, scratch);
    } else if (w->format == FORMAT_MXFP4) {
        spread_mxfp4(w, panel, scratch);
    } else if (w->format == FORMAT_BF12 && !(TP_BF12 && rows <= BF12_ROWS)) {
        spread_bf12(quads(w, panel), codes(w, panel), w->k, scratch);
    } else {
        return NULL;
    }
    return scratch;
}

/* ---- what becomes of the products ------------------------------------------------------------------------------- */

enum { OUT_STORE = 0, OUT_ADD = 1, OUT_GATED = 2 };

/* STORE: target [rows, n] fp32 = product + bias. ADD: target += product + bias.
 * GATED: w holds gate rows, then up rows; inner [rows, n / 2] = act(gate) * up, as fp32 in target or bf16 in narrow. */
typedef struct {
    const Matrix *w;
    const float *bias;
    Rows x;
    int64_t rows;
    int64_t target_stride;
    float *target;
    bf16 *narrow;
    float limit; /* of the clamped SwiGLU */
    float alpha;
    int32_t out;
    int32_t activation;
} Product;

/* Clamped SwiGLU: gate at most limit, up within +-limit; (up + 1) * gate * sigmoid(alpha * gate). Source: the gpt-oss
 * model card and its released reference implementation. */
INLINE void activate(int activation, float limit, float alpha, const float *gate, const float *up, float *out,
                     int64_t count) {
    if (activation == ACT_SILU) {
        for (int64_t j = 0; j < count; j++) out[j] = gate[j] * sigmoid(gate[j]) * up[j];
    } else if (activation == ACT_GELU_TANH) {
        for (int64_t j = 0; j < count; j++) {
            const float g = gate[j];
            const float inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
            out[j] = 0.5f * g * (1.0f + fast_tanh(inner)) * up[j];
        }
    } else {
        for (int64_t j = 0; j < count; j++) {
            const float g = gate[j] > limit ? limit : gate[j];
            float u = up[j] > limit ? limit : up[j];
            u = u < -limit ? -limit : u;
            out[j] = (u + 1.0f) * g * sigmoid(alpha * g);
        }
    }
}

/* Whether gate and up of the same output lie in panels of their own, so that a product can be gated at once. */
INLINE int can_gate(const Matrix *w) { return w->n % (2 * PANEL) == 0; }

INLINE void add_bias(float *tile, int rows, const float *bias, int64_t first, int64_t width) {
    for (int i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) tile[i * PANEL + j] += bias[first + j];
}

static void product_panel(const Product *p, int64_t panel, bf16 *scratch) {
    const Matrix *w = p->w;
    const int64_t first_out = panel * PANEL;
    const int64_t width = MIN(PANEL, w->n - first_out);
    float tile[MAX_ROWS * PANEL], up[MAX_ROWS * PANEL], inner[PANEL];
    const int64_t up_panel = panel + panels_of(w) / 2;
    const int64_t most = w->format == FORMAT_INT8 ? MAX_INT8_ROWS : MAX_ROWS;
    const bf16 *spread = spread_panel(w, panel, p->rows, scratch), *spread_up = NULL;
    bytes_read += panel_bytes(w, panel);
    if (p->out == OUT_GATED) {
        bytes_read += panel_bytes(w, up_panel);
        spread_up = spread_panel(w, up_panel, p->rows, scratch + spread_values(w));
    }
    for (int64_t first = 0; first < p->rows;) {
        /* Blocks of nearly the same size: 32 rows are 4 times 8. */
        const int64_t left = p->rows - first;
        const int rows = (int)CEIL_DIV(left, CEIL_DIV(left, most));
        multiply_panel(w, panel, spread, &p->x, first, rows, tile);
        if (p->bias) add_bias(tile, rows, p->bias, first_out, width);
        if (p->out == OUT_GATED) {
            multiply_panel(w, up_panel, spread_up, &p->x, first, rows, up);
            if (p->bias) add_bias(up, rows, p->bias, up_panel * PANEL, PANEL);
            for (int i = 0; i < rows; i++) {
                const int64_t at = (first + i) * p->target_stride + first_out;
                float *out = p->narrow ? inner : p->target + at;
                activate(p->activation, p->limit, p->alpha, tile + i * PANEL, up + i * PANEL, out, PANEL);
                if (p->narrow) row_to_bf16(inner, p->narrow + at, PANEL);
            }
        } else {
            for (int i = 0; i < rows; i++) {
                float *out = p->target + (first + i) * p->target_stride + first_out;
                if (p->out == OUT_ADD)
                    for (int64_t j = 0; j < width; j++) out[j] += tile[i * PANEL + j];
                else
                    for (int64_t j = 0; j < width; j++) out[j] = tile[i * PANEL + j];
            }
        }
        first += rows;
    }
}

INLINE int64_t product_tasks(const Product *p) {
    return p->out == OUT_GATED ? panels_of(p->w) / 2 : panels_of(p->w);
}

/* One operation of a job. scratch: 2 * spread_values bf16 of the thread's own. */
static void product(const Product *p, Hand *hand, bf16 *scratch) {
    EACH_TASK(hand, product_tasks(p), 6, panel, product_panel(p, panel, scratch));
}

/* Round a row to int16 steps of one scale, for int8 weights. Returns the scale: NaN if the row is not finite. */
static float row_to_int16(const float *source, int16_t *target, int64_t count) {
    float largest = 0.0f, poison = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(source[i]);
        largest = size > largest ? size : largest;
        poison += source[i] * 0.0f;
    }
    /* Of much smaller numbers the inverse below would be infinite. */
    if (poison != 0.0f || !(largest > 1e-30f)) {
        memset(target, 0, (size_t)count * 2);
        return poison;
    }
    const float inverse = INT16_LIMIT / largest;
    for (int64_t i = 0; i < count; i++) target[i] = (int16_t)((source[i] * inverse + 12582912.0f) - 12582912.0f);
    return largest / INT16_LIMIT;
}

#endif
