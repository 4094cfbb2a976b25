// Floats to codes of 4 or 8 bits in blocks of 32: the scales (and offsets) that lose least, and the codes by given ones.
//
// Apart, because the caller rounds scales and offsets to halves between the two, and codes must fit the rounded numbers.
#include <float.h>
#include <math.h>
#include <string.h>

#include "quantised.h"
#include "threads.h"
#include "vector.h"

#define BLOCKS_PER_UNIT 2048
#define LARGEST_4 15
#define TRIALS 12         // ranges that are tried for a block of 4 bits
#define NARROWEST 13.5f   // steps that the narrowest of them has from the least number to the largest
#define NARROWING 0.25f   // steps between two trials

typedef struct {
    const float *x;
    float *scales, *offsets;
    const float *given_scales, *given_offsets;
    uint8_t *codes;
    int64_t blocks;
    int32_t bits;
} encode_call;

static void largest_scale_8(const float *x, float *scale) {
    float largest = 0, nothing = 0;  // or NaN, if a number is infinite or NaN
    for (int k = 0; k < QUANTISED_BLOCK; k++) {
        largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        nothing += x[k] * 0.0f;
    }
    *scale = largest / 127.0f + nothing;
}

INLINE vec round_(vec x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }  // |x| < 2²²
INLINE vec select_(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }

// scale · code + offset with codes 0…15, for W blocks at once, one in each lane. For each of several ranges: round to codes,
// then fit the line through (code, x) with the least squared error, and keep the best. A range somewhat narrower than that
// of the numbers clips the outermost ones and is finer for the others; a wider one moves the grid.
static void fit_4(const float *x, float *scales, float *offsets) {
    vec numbers[QUANTISED_BLOCK], low, high, mean = {};
    for (int k = 0; k < QUANTISED_BLOCK; k++) {
        float column[W];
        for (int lane = 0; lane < W; lane++) column[lane] = x[lane * QUANTISED_BLOCK + k];
        numbers[k] = load(column);
        low = k ? min_(low, numbers[k]) : numbers[k];
        high = k ? max_(high, numbers[k]) : numbers[k];
        mean += numbers[k];
    }
    mean *= splat(1.0f / QUANTISED_BLOCK);
    const vec range = max_(high - low, splat(FLT_MIN));
    vec best = splat(FLT_MAX), scale = {}, offset = mean;
    for (int trial = 0; trial < TRIALS; trial++) {
        const vec inverse = splat(NARROWEST + NARROWING * (float)trial) / range;
        const vec start = splat(0.5f) * (low + high) - splat(0.5f * LARGEST_4) / inverse;
        vec codes[QUANTISED_BLOCK], code_mean = {}, squares = {}, products = {}, error = {};
        for (int k = 0; k < QUANTISED_BLOCK; k++) {
            codes[k] = min_(max_(round_((numbers[k] - start) * inverse), splat(0)), splat(LARGEST_4));
            code_mean += codes[k];
        }
        code_mean *= splat(1.0f / QUANTISED_BLOCK);
        for (int k = 0; k < QUANTISED_BLOCK; k++) {
            vec code = codes[k] - code_mean;
            squares = fma_(code, code, squares);
            products = fma_(code, numbers[k] - mean, products);
        }
        const vec slope = products / max_(squares, splat(FLT_MIN));
        for (int k = 0; k < QUANTISED_BLOCK; k++) {
            vec rest = fma_(-slope, codes[k] - code_mean, numbers[k] - mean);
            error = fma_(rest, rest, error);
        }
        const ivec better = error < best;
        best = select_(better, error, best);
        scale = select_(better, slope, scale);
        offset = select_(better, fma_(-slope, code_mean, mean), offset);
    }
    store(scales, scale);
    store(offsets, offset);
}

// The last blocks, fewer than a vector has lanes.
static void fit_few_4(const float *x, int64_t count, float *scales, float *offsets) {
    float numbers[W * QUANTISED_BLOCK] = {0}, some_scales[W], some_offsets[W];
    memcpy(numbers, x, (size_t)count * QUANTISED_BLOCK * sizeof(float));
    fit_4(numbers, some_scales, some_offsets);
    memcpy(scales, some_scales, (size_t)count * sizeof(float));
    memcpy(offsets, some_offsets, (size_t)count * sizeof(float));
}

static void fit_unit(void *context, int64_t unit) {
    const encode_call *c = context;
    int64_t last = (unit + 1) * BLOCKS_PER_UNIT < c->blocks ? (unit + 1) * BLOCKS_PER_UNIT : c->blocks;
    int64_t block = unit * BLOCKS_PER_UNIT;
    if (c->bits == 8)
        for (; block < last; block++) largest_scale_8(c->x + block * QUANTISED_BLOCK, c->scales + block);
    for (; block + W <= last; block += W) fit_4(c->x + block * QUANTISED_BLOCK, c->scales + block, c->offsets + block);
    if (block < last)
        fit_few_4(c->x + block * QUANTISED_BLOCK, last - block, c->scales + block, c->offsets + block);
}

static void encode_unit(void *context, int64_t unit) {
    const encode_call *c = context;
    int64_t last = (unit + 1) * BLOCKS_PER_UNIT < c->blocks ? (unit + 1) * BLOCKS_PER_UNIT : c->blocks;
    const float least = c->bits == 8 ? -127 : 0, largest = c->bits == 8 ? 127 : LARGEST_4;
    for (int64_t block = unit * BLOCKS_PER_UNIT; block < last; block++) {
        const float *x = c->x + block * QUANTISED_BLOCK, scale = c->given_scales[block];
        const float inverse = scale != 0 ? 1.0f / scale : 0, offset = c->given_offsets ? c->given_offsets[block] : 0;
        int8_t codes[QUANTISED_BLOCK];
        for (int k = 0; k < QUANTISED_BLOCK; k++) {
            float code = rintf((x[k] - offset) * inverse);
            code = code > least ? code : least;  // NaN too
            codes[k] = (int8_t)(code < largest ? code : largest);
        }
        uint8_t *target = c->codes + block * QUANTISED_BLOCK * c->bits / 8;
        if (c->bits == 8)
            for (int k = 0; k < QUANTISED_BLOCK; k++) target[k] = (uint8_t)codes[k];
        else
            for (int k = 0; k < QUANTISED_BLOCK / 2; k++)
                target[k] = (uint8_t)(codes[k] | codes[k + QUANTISED_BLOCK / 2] << 4);
    }
}

static int64_t units_of(int64_t blocks) { return (blocks + BLOCKS_PER_UNIT - 1) / BLOCKS_PER_UNIT; }

void ratoon_fit_scales(const float *x, int64_t blocks, int32_t bits, float *scales, float *offsets) {
    encode_call c = {.x = x, .scales = scales, .offsets = offsets, .blocks = blocks, .bits = bits};
    parallel_units(fit_unit, &c, units_of(blocks));
}

void ratoon_encode(const float *x, int64_t blocks, int32_t bits, const float *scales, const float *offsets, uint8_t *codes) {
    encode_call c = {.x = x, .given_scales = scales, .given_offsets = offsets, .codes = codes, .blocks = blocks, .bits = bits};
    parallel_units(encode_unit, &c, units_of(blocks));
}
