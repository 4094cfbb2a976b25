// Dot products of quads: each lane of a vector adds four products of a byte of a weight and a byte of an activation.
//
// Sums are exact integers, so every instruction set gives the same bits. Codes are 0…15 or 0…255, activations -127…127. A
// set that multiplies signed bytes only (NEON) reads 8-bit codes less 128; then their zero is 0, and ZERO_OF_8 says so.
#pragma once
#include <string.h>

#include "vector.h"

typedef uint8_t bvec __attribute__((vector_size(4 * W), aligned(1)));

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

INLINE bvec load_bytes(const uint8_t *p) { return *(const bvec *)p; }
INLINE ivec splat_int(int32_t x) { return x - (ivec){}; }

INLINE int32_t load_quad(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return quad;
}

#if defined(__AVX512VNNI__)
#define ZERO_OF_8 128
INLINE ivec dot_4(ivec sum, bvec codes, const int8_t *x) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(load_quad(x)));
}
INLINE ivec dot_8(ivec sum, bvec codes, const int8_t *x) { return dot_4(sum, codes, x); }

#elif defined(__AVX2__)
#define ZERO_OF_8 128
#if defined(__AVX512BW__)
#define MADDUBS(a, b) ((ivec)_mm512_maddubs_epi16((__m512i)(a), (__m512i)(b)))
#define MADD(a, b) ((ivec)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#else
#define MADDUBS(a, b) ((ivec)_mm256_maddubs_epi16((__m256i)(a), (__m256i)(b)))
#define MADD(a, b) ((ivec)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#endif
// Pairs of products are added in 16 bits with saturation, which codes up to 15 do not reach: 2 · 15 · 127 = 3,810.
INLINE ivec dot_4(ivec sum, bvec codes, const int8_t *x) {
    return sum + MADD(MADDUBS(codes, splat_int(load_quad(x))), splat_int(0x00010001));
}
// So codes of 8 bits are taken as two of 4.
INLINE ivec dot_8(ivec sum, bvec codes, const int8_t *x) {
    ivec quads = splat_int(load_quad(x));
    ivec low = MADD(MADDUBS(codes & 15, quads), splat_int(0x00010001));
    return sum + low + MADD(MADDUBS(codes >> 4, quads), splat_int(0x00100010));
}

#elif defined(__ARM_NEON)
#define ZERO_OF_8 0
INLINE ivec dot_signed(ivec sum, int8x16_t codes, const int8_t *x) {
    int8x16_t quads = vreinterpretq_s8_s32(vdupq_n_s32(load_quad(x)));
#if defined(__ARM_FEATURE_DOTPROD)
    return (ivec)vdotq_s32((int32x4_t)sum, codes, quads);
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(quads)));
    int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(codes), vget_high_s8(quads)));
    return sum + (ivec)vpaddq_s32(low, high);
#endif
}
INLINE ivec dot_4(ivec sum, bvec codes, const int8_t *x) { return dot_signed(sum, (int8x16_t)codes, x); }
INLINE ivec dot_8(ivec sum, bvec codes, const int8_t *x) { return dot_signed(sum, (int8x16_t)(codes ^ 0x80), x); }

#else
#define ZERO_OF_8 128
INLINE ivec dot_4(ivec sum, bvec codes, const int8_t *x) {
    for (int lane = 0; lane < W; lane++)
        for (int k = 0; k < 4; k++) sum[lane] += (int32_t)codes[4 * lane + k] * x[k];
    return sum;
}
INLINE ivec dot_8(ivec sum, bvec codes, const int8_t *x) { return dot_4(sum, codes, x); }
#endif

// W halves as floats.
INLINE vec load_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vec v;
    for (int lane = 0; lane < W; lane++) {
        uint32_t half = p[lane], bits = (half & 0x7fff) << 13;
        float value;
        memcpy(&value, &bits, 4);
        value *= 0x1p112f;  // the exponent's bias is 127, that of halves 15; subnormal ones come out right too
        memcpy(&bits, &value, 4);
        bits |= (half & 0x8000) << 16 | ((half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
        memcpy(&value, &bits, 4);
        v[lane] = value;
    }
    return v;
#endif
}
