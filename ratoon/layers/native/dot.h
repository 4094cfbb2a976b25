// Dot products of quads: each lane of a vector adds four products of a byte of a weight and a byte of an activation.
//
// A group's sum is begun by `begin_sum`, given its quads by `dot` and ended by `end_sum`; `shift` is added to it. Sums are
// exact integers, so every instruction set gives the same bits. Codes of 4 bits are 0…15, activations -127…127. Codes of 8
// bits are what `prepare_8` makes of those of a file; ZERO_OF_8 is then the code of zero.
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

#if defined(__ARM_NEON)
typedef int8x16_t quads_of_x;  // four quads of a row's codes
INLINE quads_of_x load_quads(const int8_t *x) { return vld1q_s8(x); }
INLINE int8x16_t spread_quad(quads_of_x x, int lane) {
    return vreinterpretq_s8_s32(vdupq_n_s32(((int32x4_t)x)[lane]));
}
#else
typedef const int8_t *quads_of_x;
INLINE quads_of_x load_quads(const int8_t *x) { return x; }
INLINE ivec spread_quad(quads_of_x x, int lane) {
    int32_t quad;
    memcpy(&quad, x + 4 * lane, 4);
    return splat_int(quad);
}
#endif

#if defined(__AVX512VNNI__)
#define ZERO_OF_8 128
INLINE bvec prepare_8(bvec codes) { return codes; }
INLINE ivec begin_sum(int bits, int32_t shift) { return splat_int(shift); }
INLINE ivec dot(int bits, ivec sum, bvec codes, quads_of_x x, int lane) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)spread_quad(x, lane));
}
INLINE ivec end_sum(int bits, ivec sum, int32_t shift) { return sum; }

#elif defined(__AVX2__)
// Pairs of products are added in 16 bits with saturation. Of codes of 4 bits a whole group stays below it, 32 / 2 · 2 · 15 ·
// 127 = 30,480 for the eight quads of a lane, so that they are widened once. Of 8 bits a pair stays below it, 2 · 128 · 127 =
// 32,512: sizes of codes by activations that take over their signs.
#define ZERO_OF_8 0
#if defined(__AVX512BW__)
#define MADDUBS(a, b) ((ivec)_mm512_maddubs_epi16((__m512i)(a), (__m512i)(b)))
#define MADD(a, b) ((ivec)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#define ADD_16(a, b) ((ivec)_mm512_add_epi16((__m512i)(a), (__m512i)(b)))
#define SIZE_OF(codes) _mm512_abs_epi8((__m512i)(codes))
#define WITH_SIGN_OF(codes, x)                                                                                                 \
    _mm512_mask_sub_epi8((__m512i)(x), _mm512_movepi8_mask((__m512i)(codes)), _mm512_setzero_si512(), (__m512i)(x))
#else
#define MADDUBS(a, b) ((ivec)_mm256_maddubs_epi16((__m256i)(a), (__m256i)(b)))
#define MADD(a, b) ((ivec)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define ADD_16(a, b) ((ivec)_mm256_add_epi16((__m256i)(a), (__m256i)(b)))
#define SIZE_OF(codes) _mm256_abs_epi8((__m256i)(codes))
#define WITH_SIGN_OF(codes, x) _mm256_sign_epi8((__m256i)(x), (__m256i)(codes))
#endif
INLINE bvec prepare_8(bvec codes) { return codes ^ 0x80; }
INLINE ivec begin_sum(int bits, int32_t shift) { return bits == 4 ? (ivec){} : splat_int(shift); }
INLINE ivec dot(int bits, ivec sum, bvec codes, quads_of_x x, int lane) {
    ivec quad = spread_quad(x, lane);
    if (bits == 4) return ADD_16(sum, MADDUBS(codes, quad));
    return sum + MADD(MADDUBS(SIZE_OF(codes), WITH_SIGN_OF(codes, quad)), splat_int(0x00010001));
}
INLINE ivec end_sum(int bits, ivec sum, int32_t shift) {
    return bits == 4 ? splat_int(shift) + MADD(sum, splat_int(0x00010001)) : sum;
}

#elif defined(__ARM_NEON)
#define ZERO_OF_8 0
INLINE bvec prepare_8(bvec codes) { return codes ^ 0x80; }
INLINE ivec begin_sum(int bits, int32_t shift) { return splat_int(shift); }
INLINE ivec dot(int bits, ivec sum, bvec codes, quads_of_x x, int lane) {
    int8x16_t quad = spread_quad(x, lane), signed_codes = (int8x16_t)codes;
#if defined(__ARM_FEATURE_DOTPROD)
    return (ivec)vdotq_s32((int32x4_t)sum, signed_codes, quad);
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(signed_codes), vget_low_s8(quad)));
    int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(signed_codes), vget_high_s8(quad)));
    return sum + (ivec)vpaddq_s32(low, high);
#endif
}
INLINE ivec end_sum(int bits, ivec sum, int32_t shift) { return sum; }

#else
#define ZERO_OF_8 128
INLINE bvec prepare_8(bvec codes) { return codes; }
INLINE ivec begin_sum(int bits, int32_t shift) { return splat_int(shift); }
INLINE ivec dot(int bits, ivec sum, bvec codes, quads_of_x x, int lane) {
    for (int column = 0; column < W; column++)
        for (int k = 0; k < 4; k++) sum[column] += (int32_t)codes[4 * column + k] * x[4 * lane + k];
    return sum;
}
INLINE ivec end_sum(int bits, ivec sum, int32_t shift) { return sum; }
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

// The largest size of `count` numbers, which is a multiple of 16, as the bits of a float: in their order, NaN above infinity.
INLINE uint32_t largest_of(const float *x, int count) {
#if defined(__AVX512F__)
    __m512i largest = _mm512_setzero_si512();
    for (int k = 0; k < count; k += 16)
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epu32(largest);
#else
    uint32_t largest = 0;
    for (int k = 0; k < count; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
#endif
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
