// Activations of a vector, number by number.
#pragma once
#include "vector.h"

INLINE vec silu(vec x) { return x / (splat(1.0f) + exp_(-x)); }

// tanh form: x/2 · (1 + tanh u) = x · σ(2u), with u = √(2/π)·(x + 0.044715·x³)
INLINE vec gelu_tanh(vec x) {
    vec u2 = x * fma_(x * x, splat(2 * 0.7978845608f * 0.044715f), splat(2 * 0.7978845608f));
    return x / (splat(1.0f) + exp_(-u2));
}

// x · σ(1.702·x)
INLINE vec gelu_quick(vec x) { return x / (splat(1.0f) + exp_(x * splat(-1.702f))); }

INLINE vec relu(vec x) { return max_(x, splat(0.0f)); }

// x · Φ(x), Φ the normal distribution. Of |x| the upper tail is taken, a polynomial of 1 / (1 + p·|x|/√2) times e^(-x²/2)
// (Abramowitz and Stegun 7.1.26): so what is small for a negative x is as exact, for its size, as the rest.
INLINE vec gelu_exact(vec x) {
    vec size = max_(x, -x);
    vec t = splat(1.0f) / fma_(size, splat(0.3275911f * 0.70710678f), splat(1.0f));
    vec p = splat(0.5f * 1.061405429f);
    p = fma_(p, t, splat(0.5f * -1.453152027f));
    p = fma_(p, t, splat(0.5f * 1.421413741f));
    p = fma_(p, t, splat(0.5f * -0.284496736f));
    p = fma_(p, t, splat(0.5f * 0.254829592f));
    vec tail = p * t * exp_(x * x * splat(-0.5f));  // 1 - Φ(|x|)
    ivec negative = x < splat(0.0f);
    vec upper = splat(1.0f) - tail;
    return x * (vec)(((ivec)tail & negative) | ((ivec)upper & ~negative));
}

// By the numbers of ratoon_activation; -1: x itself.
INLINE vec activate(int kind, vec x) {
    switch (kind) {
        case 0: return silu(x);
        case 1: return relu(x);
        case 2: return gelu_tanh(x);
        case 3: return gelu_exact(x);
        case 4: return gelu_quick(x);
        default: return x;
    }
}
