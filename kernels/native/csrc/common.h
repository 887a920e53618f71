/* Number formats, small functions on them and the words shared by the other files.
 *
 * Everything is compiled as one unit (stack.c includes the others) for the processor it runs on. Where that processor
 * has AVX512-BF16 the inner loops are written with intrinsics; elsewhere the same loops are plain C in fp32, in a form
 * that compilers turn into vector code. TP_PORTABLE forces the plain form.
 */
#ifndef TP_COMMON_H
#define TP_COMMON_H

#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && !defined(TP_PORTABLE)
#define TP_AVX512 1
#include <immintrin.h>
#else
#define TP_AVX512 0
#endif

#if TP_AVX512 && defined(__AVX512VBMI__)
#define TP_BF12 1 /* 12 bits are unpacked faster than memory gives them */
#else
#define TP_BF12 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNIQUE static __attribute__((noinline)) /* one copy, so that all its callers round alike */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

typedef uint16_t bf16;

/* Two values of 16 bits, read at once: the compiler must know that they may have been written one by one. */
typedef uint32_t __attribute__((may_alias)) two_values;

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float bf16_to_f32(bf16 value) { return from_bits((uint32_t)value << 16); }

/* Round to nearest, ties to even; a NaN stays a NaN. */
INLINE bf16 f32_to_bf16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

static void row_to_bf16(const float *source, bf16 *target, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = f32_to_bf16(source[i]);
}

/* e^x to about 2 ulp for x <= 88; 0 for x below -87. The loop around it becomes vector code: no branch, no call.
 * 2^f on [-0.5, 0.5] by its Taylor polynomial of degree 6. */
INLINE float fast_exp(float x) {
    float clipped = x > -87.0f ? x : -87.0f; /* NaN, too: it must not become an int */
    clipped = clipped < 88.0f ? clipped : 88.0f;
    float scaled = clipped * 1.44269504088896341f;
    float whole = (scaled + 12582912.0f) - 12582912.0f;
    float f = clipped - whole * 0.693145751953125f;
    f = f - whole * 1.42860682030941723e-6f;
    float p = 1.0f / 720.0f;
    p = p * f + 1.0f / 120.0f;
    p = p * f + 1.0f / 24.0f;
    p = p * f + 1.0f / 6.0f;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    float power = from_bits((uint32_t)((int32_t)whole + 127) << 23);
    float result = p * power;
    result = x != x ? x : result;
    return x < -87.0f ? 0.0f : result;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

/* tanh(x) = 1 - 2 / (e^2x + 1) */
INLINE float fast_tanh(float x) { return 1.0f - 2.0f / (fast_exp(2.0f * x) + 1.0f); }

enum { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_CLAMPED_SWIGLU = 2 };

#define TP_PAD 64 /* bytes between things that different threads write */

static void *grow(void *old, int64_t *have, int64_t want) {
    if (want <= *have) return old;
    free(old);
    void *fresh = NULL;
    int64_t size = (want + want / 4 + 4095) / 4096 * 4096;
    if (posix_memalign(&fresh, 4096, (size_t)size) != 0) {
        *have = 0;
        return NULL;
    }
    *have = size;
    return fresh;
}

#endif
