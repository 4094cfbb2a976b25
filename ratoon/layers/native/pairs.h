// Dot products of pairs: each lane of a vector adds two products of a byte, such as a weight, and a whole number of 16 bits.
//
// A lane is a column; its pair is two bytes that follow one another. Sums are exact integers, so every instruction set gives the
// same bits: up to STRETCH_K products of -127…127 and -32767…32767 stay below 2³¹.
#pragma once
#include "dot.h"

#if defined(__AVX512BW__)
typedef __m512i byte_pairs;
INLINE byte_pairs load_pairs(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
#elif defined(__AVX2__)
typedef __m256i byte_pairs;
INLINE byte_pairs load_pairs(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__ARM_NEON)
typedef struct {
    int16x4_t first, second;  // of each column
} byte_pairs;
INLINE byte_pairs load_pairs(const int8_t *p) {
    const int16x8_t both = vmovl_s8(vld1_s8(p));
    return (byte_pairs){vget_low_s16(vuzp1q_s16(both, both)), vget_low_s16(vuzp2q_s16(both, both))};
}
#else
typedef const int8_t *byte_pairs;
INLINE byte_pairs load_pairs(const int8_t *p) { return p; }
#endif

// sum + pairs · the two numbers at x, in each lane.
INLINE ivec add_pairs(ivec sum, byte_pairs pairs, const int16_t *x) {
#if defined(__AVX2__)
    int32_t both;
    memcpy(&both, x, sizeof both);
    const ivec numbers = splat_int(both);
#endif
#if defined(__AVX512VNNI__)
    // A compiler makes two instructions of the intrinsic where a chain then is shorter.
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(numbers));
    return sum;
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16(pairs, (__m512i)numbers);
#elif defined(__AVX2__)
    return sum + (ivec)_mm256_madd_epi16(pairs, (__m256i)numbers);
#elif defined(__ARM_NEON)
    return (ivec)vmlal_n_s16(vmlal_n_s16((int32x4_t)sum, pairs.first, x[0]), pairs.second, x[1]);
#else
    for (int lane = 0; lane < W; lane++) sum[lane] += pairs[2 * lane] * x[0] + pairs[2 * lane + 1] * x[1];
    return sum;
#endif
}
