/* bf16 weights in 12 bits, without loss.
 *
 * The weights of a trained matrix have few different exponents, so a panel keeps the sign and the seven mantissa bits of
 * each as they are, and instead of the exponent four bits that say which of sixteen it is. Exponents beyond the fifteen
 * most frequent ones of a panel, some one in ten thousand, are escapes: a zero stands in the panel, and the weight in a
 * list beside it. A product with few rows reads a quarter less memory for it, which is what it waits for.
 *
 * For four inputs (two pairs) a panel has three blocks of 32 words of 16 bits. With a, b the outputs 0-15 and 16-31 of
 * the first pair and c, d those of the second, each 32 weights:
 *     exponents   a | b << 4 | c << 8 | d << 12     indexes into the panel's table
 *     a and b     a's sign and mantissa where bf16 has them (0x807f), b's in the other bits, turned by 8
 *     c and d     likewise
 * Included by gemm.h.
 */
#define QUAD 4
#define QUAD_WORDS 96 /* of 16 bits */
#define EXPONENTS 16
#define ZERO_EXPONENT 15 /* the table's last: zeros, numbers below the normal ones, and what stands for an escape */
#define KEPT_BITS 0x807f

/* A weight whose exponent is not in its panel's table. */
typedef struct {
    uint32_t at;    /* k * PANEL + output within the panel */
    uint32_t value; /* bf16 */
} Escape;

INLINE int64_t quads_of(int64_t k) { return CEIL_DIV(k, QUAD); }

INLINE uint16_t turned(uint16_t word) { return (uint16_t)(word << 8 | word >> 8); }

/* Which word of a quad holds a weight, and which of its four exponents is the weight's. */
INLINE int word_of(int output, int k) { return 2 * (output % 16) + k % 2; }
INLINE int part_of(int output, int k) { return output / 16 + k % QUAD / 2 * 2; }

INLINE bf16 unpacked(const uint16_t *quad, const uint16_t *table, int output, int k) {
    const int word = word_of(output, k), part = part_of(output, k);
    const uint16_t kept = quad[PANEL + part / 2 * PANEL + word];
    return (bf16)(((part % 2 ? turned(kept) : kept) & KEPT_BITS) | table[quad[word] >> 4 * part & 15]);
}

/* ---- packing ------------------------------------------------------------------------------------------------------ */

/* The fifteen most frequent exponents of rows [count][k], the table [16] of them, and the place of every exponent in
 * it: EXPONENTS for one that is not there. */
static void choose_exponents(const bf16 *rows, int count, int64_t k, uint16_t *table, uint8_t *place) {
    int64_t found[256] = {0};
    for (int64_t i = 0; i < count * k; i++) found[rows[i] >> 7 & 255]++;
    memset(place, EXPONENTS, 256);
    found[0] = 0;
    for (int index = 0; index < ZERO_EXPONENT; index++) {
        int best = 0;
        for (int exponent = 1; exponent < 256; exponent++)
            if (found[exponent] > found[best]) best = exponent;
        table[index] = (uint16_t)(best << 7);
        if (best) place[best] = (uint8_t)index;
        found[best] = 0;
    }
    table[ZERO_EXPONENT] = 0;
    place[0] = ZERO_EXPONENT;
}

/* One panel: rows [count <= 32][k]; data, all zero before, [quads][96], table [16]. Returns how many escapes it has; at
 * most `room` are written. */
static int64_t pack_panel(const bf16 *rows, int count, int64_t k, uint16_t *data, uint16_t *table, Escape *escapes,
                          int64_t room) {
    uint8_t place[256];
    int64_t escaped = 0;
    choose_exponents(rows, count, k, table, place);
    for (int64_t q = 0; q < quads_of(k); q++) {
        uint16_t *quad = data + q * QUAD_WORDS;
        for (int output = 0; output < PANEL; output++)
            for (int i = 0; i < QUAD; i++) {
                const int64_t at = q * QUAD + i;
                const bf16 value = output < count && at < k ? rows[output * k + at] : 0;
                int index = place[value >> 7 & 255];
                uint16_t kept = value & KEPT_BITS;
                if (index == EXPONENTS) {
                    if (escaped < room) escapes[escaped] = (Escape){(uint32_t)(at * PANEL + output), value};
                    escaped++;
                    index = ZERO_EXPONENT, kept = 0;
                }
                const int word = word_of(output, i), part = part_of(output, i);
                quad[word] |= (uint16_t)(index << 4 * part);
                quad[PANEL + part / 2 * PANEL + word] |= part % 2 ? turned(kept) : kept;
            }
    }
    return escaped;
}

/* ---- reading ------------------------------------------------------------------------------------------------------ */

/* A panel as bf16 pairs, escapes left as zeros: `multiply_bf16` of it has the bits of `multiply_bf12`. */
static void spread_quads(const uint16_t *data, const uint16_t *table, int64_t k, bf16 *out) {
    for (int64_t q = 0; q < quads_of(k); q++, data += QUAD_WORDS, out += QUAD * PANEL) {
#if TP_AVX512
        __m512i parts[QUAD];
        unpack_quad(data, exponents_of(table), parts);
        for (int part = 0; part < QUAD; part++) _mm512_storeu_si512(out + PANEL * part, parts[part]);
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
