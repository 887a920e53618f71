/* bf16 weights in 12 bits, without loss.
 *
 * The weights of a trained matrix have few different exponents. So a panel keeps the low byte of each as it is (the
 * exponent's last bit and the mantissa), and instead of the high byte (the sign and seven bits of the exponent) a code
 * of four bits: the sign, and which of the panel's eight high exponents it has. Weights beyond the seven most frequent
 * ones and zero, fewer than one in a thousand, are escapes: a zero stands in the panel, and the weight in a list beside
 * it. A product with few rows reads a quarter less memory for it, which is what it waits for; with more rows it costs
 * one per cent.
 *
 * For four inputs (two pairs) a panel has three blocks of 64 bytes, 64 weights of a pair being 32 outputs times 2:
 *     codes      of the first pair | of the second << 4
 *     low bytes  of the first pair
 *     low bytes  of the second
 * Within 64 bytes the weights lie so that unpacking bytes of a 128-bit lane with those of the codes gives the pairs of
 * outputs 0-15 from the lower halves of the lanes and 16-31 from the upper ones.
 * Included by gemm.h.
 */
#define QUAD 4
#define QUAD_BYTES 192
#define CODES 16
#define ZERO_CODE 7 /* numbers below 2^-125, zeros, and what stands for an escape */
#define NO_CODE 255

/* A weight whose high exponent the panel's table does not have. */
typedef struct {
    uint32_t at;    /* k * PANEL + output within the panel */
    uint32_t value; /* bf16 */
} Escape;

INLINE int64_t quads_of(int64_t k) { return CEIL_DIV(k, QUAD); }

/* Where in 64 bytes a weight of a pair lies. */
INLINE int byte_of(int output, int k) {
    const int word = 2 * (output % 16) + k % 2;
    return word / 8 * 16 + output / 16 * 8 + word % 8;
}

INLINE bf16 unpacked(const uint8_t *quad, const uint8_t *table, int output, int k) {
    const int byte = byte_of(output, k), second = k % QUAD / 2;
    return (bf16)(table[quad[byte] >> 4 * second & 15] << 8 | quad[64 * (1 + second) + byte]);
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* The table [16] for rows [count][k], high bytes by their codes, and the code of every high byte: NO_CODE for one that
 * is not there. */
static void choose_codes(const bf16 *rows, int count, int64_t k, uint8_t *table, uint8_t *codes) {
    int64_t counts[4][256] = {{0}}, found[128]; /* four, so that a count need not wait for the one before it */
    const int64_t weights = count * k;
    for (int64_t i = 0; i < weights / 4 * 4; i += 4)
        for (int part = 0; part < 4; part++) counts[part][rows[i + part] >> 8]++;
    for (int64_t i = weights / 4 * 4; i < weights; i++) counts[0][rows[i] >> 8]++;
    for (int high = 0; high < 128; high++) {
        found[high] = 0;
        for (int part = 0; part < 4; part++) found[high] += counts[part][high] + counts[part][high + 128];
    }
    memset(codes, NO_CODE, 256);
    found[0] = 0;
    for (int code = 0; code <= ZERO_CODE; code++) {
        int best = 0;
        for (int high = 1; high < 128; high++)
            if (found[high] > found[best]) best = high;
        if (code == ZERO_CODE) best = 0;
        table[code] = (uint8_t)best, table[code + 8] = (uint8_t)(best | 128);
        if (best || code == ZERO_CODE) codes[best] = (uint8_t)code, codes[best | 128] = (uint8_t)(code | 8);
        found[best] = 0;
    }
}

/* One panel: rows [count <= 32][k]; data, all zero before, [quads][192], table [16]. Returns how many escapes it has;
 * at most `room` are written. */
static int64_t pack_panel(const bf16 *rows, int count, int64_t k, uint8_t *data, uint8_t *table, Escape *escapes,
                          int64_t room) {
    uint8_t codes[256];
    int64_t escaped = 0;
    choose_codes(rows, count, k, table, codes);
    for (int64_t q = 0; q < quads_of(k); q++) {
        uint8_t *quad = data + q * QUAD_BYTES;
        for (int output = 0; output < PANEL; output++)
            for (int i = 0; i < QUAD; i++) {
                const int64_t at = q * QUAD + i;
                bf16 value = output < count && at < k ? rows[output * k + at] : 0;
                if (codes[value >> 8] == NO_CODE) {
                    if (escaped < room) escapes[escaped] = (Escape){(uint32_t)(at * PANEL + output), value};
                    escaped++;
                    value = 0;
                }
                const int byte = byte_of(output, i), second = i / 2;
                quad[byte] |= (uint8_t)(codes[value >> 8] << 4 * second);
                quad[64 * (1 + second) + byte] = (uint8_t)value;
            }
    }
    return escaped;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

#if TP_BF12

/* The table, so often that of an index only its low four bits count. */
INLINE __m512i table_of_codes(const uint8_t *table) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
}

/* pairs: outputs 0-15 and 16-31 of the first pair of k, then of the second. */
INLINE void unpack_quad(const void *quad, __m512i table, __m512i *pairs) {
    const __m512i codes = _mm512_loadu_si512(quad);
    for (int second = 0; second < 2; second++) {
        const __m512i low = _mm512_loadu_si512((const char *)quad + 64 * (1 + second));
        const __m512i high = _mm512_permutexvar_epi8(second ? _mm512_srli_epi16(codes, 4) : codes, table);
        pairs[2 * second] = _mm512_unpacklo_epi8(low, high);
        pairs[2 * second + 1] = _mm512_unpackhi_epi8(low, high);
    }
}

#endif

/* A panel as bf16 pairs, escapes left as zeros: `multiply_bf16` of it has the bits of `multiply_bf12`. */
static void spread_bf12(const uint8_t *data, const uint8_t *table, int64_t k, bf16 *out) {
    for (int64_t q = 0; q < quads_of(k); q++, data += QUAD_BYTES, out += QUAD * PANEL) {
#if TP_BF12
        __m512i pairs[QUAD];
        unpack_quad(data, table_of_codes(table), pairs);
        for (int i = 0; i < QUAD; i++) _mm512_storeu_si512(out + PANEL * i, pairs[i]);
#else
        for (int output = 0; output < PANEL; output++)
            for (int i = 0; i < QUAD; i++)
                out[i / 2 * 2 * PANEL + 2 * output + i % 2] = unpacked(data, table, output, i);
#endif
    }
}

/* tile [rows][32] += what the escapes of a panel give. One copy, so that every row rounds alike. */
UNIQUE void add_escapes(const Escape *escapes, int64_t count, const void *const *x, int rows, float *tile) {
    for (int64_t e = 0; e < count; e++) {
        const uint32_t k = escapes[e].at / PANEL, output = escapes[e].at % PANEL;
        const float weight = bf16_to_f32((bf16)escapes[e].value);
        for (int i = 0; i < rows; i++) {
            float *sum = tile + i * PANEL + output;
            *sum = multiply_add(bf16_to_f32(((const bf16 *)x[i])[k]), weight, *sum);
        }
    }
}
