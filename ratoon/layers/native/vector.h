// The vector type and what is done with it. One source for every instruction set: W floats a vector.
//
// Results must not depend on the shape of a batch: every output element is one chain of fused multiply-adds in a fixed
// order, whatever tile it was computed in. So the multiply-add is always written as `fma_`, never left to the compiler.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
// Loops over the registers of a tile must be unrolled wholly: an index that is not a constant would put them into memory.
#define UNROLLED _Pragma("GCC unroll 32")

// Marks in the inner loops of products, for a compiler that would otherwise read the values of all rows first and then have no
// register left for a sum. What is read through `pointer` is read behind the mark; `sum` is there at the mark.
#if defined(__x86_64__)
#define READ_FROM_HERE(pointer) __asm__ volatile("" : "+r"(pointer))
#define SUM_IS_HERE(sum) __asm__ volatile("" : "+v"(sum))
#else
#define READ_FROM_HERE(pointer) (void)(pointer)
#define SUM_IS_HERE(sum) (void)(sum)
#endif

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4)));
// W numbers in bf16: the upper halves of floats.
INLINE vec load_bf16(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16); }
INLINE vec splat(float x) { return x - (vec){}; }

// The tail of a row goes through the same vector code, so that a value never depends on where it stands.
INLINE vec load_some(const float *p, int64_t n) {
    vec v = {};
    for (int64_t i = 0; i < n; i++) v[i] = p[i];
    return v;
}

INLINE vec load_up_to(const float *p, int64_t n) { return n >= W ? load(p) : load_some(p, n); }

INLINE void store_some(float *p, vec v, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = v[i];
}

#if defined(__clang__)
INLINE vec fma_(vec a, vec b, vec c) { return __builtin_elementwise_fma(a, b, c); }
INLINE vec max_(vec a, vec b) { return __builtin_elementwise_max(a, b); }
INLINE vec min_(vec a, vec b) { return __builtin_elementwise_min(a, b); }
#else
INLINE vec fma_(vec a, vec b, vec c) { return a * b + c; }
INLINE vec max_(vec a, vec b) { ivec m = a > b; return (vec)(((ivec)a & m) | ((ivec)b & ~m)); }
INLINE vec min_(vec a, vec b) { ivec m = a < b; return (vec)(((ivec)a & m) | ((ivec)b & ~m)); }
#endif

// Lane sums in a fixed order.
INLINE float sum_lanes(vec v) {
    float s = 0;
    for (int i = 0; i < W; i++) s += v[i];
    return s;
}

INLINE float max_lanes(vec v) {
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// e^x: x = n·ln2 + r with |r| ≤ ln2/2, a polynomial for e^r, then n added to the exponent. About 2 ulp; 0 below -87.3.
INLINE vec exp_(vec x) {
    const float lowest = -87.33654f;
    ivec underflow = x < splat(lowest);
    x = min_(max_(x, splat(lowest)), splat(88.37626f));
    vec shifted = fma_(x, splat(1.44269504f), splat(12582912.0f));  // rounds to the nearest whole number
    vec n = shifted - splat(12582912.0f);
    vec r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r + splat(1.0f));
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec result = p * (vec)exponent;
    return (vec)((ivec)result & ~underflow);
}

// tanh x to about 2 ulp. Near zero a polynomial of x, elsewhere 1 - 2 / (e^2|x| + 1), which would lose the digits of a small x. A
// NaN stays one.
INLINE vec tanh_(vec x) {
    const ivec sign = (ivec)x & (ivec)splat(-0.0f);
    const vec size = (vec)((ivec)x ^ sign), square = x * x;
    vec p = splat(-5.70498872745e-3f);
    p = fma_(p, square, splat(2.06390887954e-2f));
    p = fma_(p, square, splat(-5.37397155531e-2f));
    p = fma_(p, square, splat(1.33314422036e-1f));
    p = fma_(p, square, splat(-3.33332819422e-1f));
    const vec near = fma_(p * square, x, x), far = splat(1.0f) - splat(2.0f) / (exp_(size + size) + splat(1.0f));
    const ivec is_far = size >= splat(0.625f);
    return (vec)((((ivec)far | sign) & is_far) | ((ivec)near & ~is_far));
}

INLINE float exp_scalar(float x) { return exp_(splat(x))[0]; }
