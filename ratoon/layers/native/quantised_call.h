// What the parts of a product with quantised weights share: the call, and the steps that every tile takes.
#pragma once
#include <string.h>

#include "dot.h"
#include "quantised.h"

#define TILE 16  // columns of a panel
#define TILE_VECS (TILE / W)
#define QUADS (QUANTISED_BLOCK / 4)
#define BLOCK_CODES (TILE * QUANTISED_BLOCK)  // bytes of a block of a panel, a byte for each code

#define STRIP 16  // rows of activations that are kept together

enum { IN_REGISTERS, UNPACKED, MATRICES };  // kernels, as ratoon_quantised_kernel says

typedef struct {
    const quantised_weight *weight;
    const float *x;
    float *y;
    int64_t ldx, ldy, rows, blocks, groups, panels, panels_per_unit, units_per_block, row_blocks;
    uint8_t *activations;  // [strip][block]
    uint8_t *rests;        // [strip][block]
    uint8_t *has_rests;    // [strip][block]: whether a row of the strip has one there
    int64_t height;        // of a strip: STRIP, or all rows if they are fewer and multiplied in registers
    int64_t rows_per_unit; // that are rounded together
    int shares_strips;     // whether these are less than a strip
    int64_t matrix_rows;   // that the matrix unit multiplies: all, or those before the last strip, or none
    int kernel;            // for the others
} quantised_call;

// A block of 32 inputs of some rows of a strip: of row i the scale of its codes, that scale times their sum, -zero times the
// sum of those that group g of a weight multiplies (at g · height + i), and the codes.
typedef struct {
    float *scales, *scaled_sums;
    int32_t *shifts;
    int8_t (*codes)[QUANTISED_BLOCK];
} activation_block;

#define ROW_BYTES (QUANTISED_BLOCK + 4 * sizeof(float))  // of a row in a block

INLINE activation_block block_of(const quantised_call *c, int64_t row, int64_t block) {
    const int64_t height = c->height, strip = row / height, i = row % height;
    uint8_t *start = c->activations + (strip * c->blocks + block) * height * (int64_t)ROW_BYTES;
    float *numbers = (float *)start;
    return (activation_block){numbers + i, numbers + height + i, (int32_t *)numbers + 2 * height + i,
                              (int8_t (*)[QUANTISED_BLOCK])(numbers + 4 * height) + i};
}

// To the same row of the next block, `step` bytes further on: without the division by the height that block_of makes.
INLINE void go_on(activation_block *b, int64_t step) {
    b->scales = (float *)((char *)b->scales + step);
    b->scaled_sums = (float *)((char *)b->scaled_sums + step);
    b->shifts = (int32_t *)((char *)b->shifts + step);
    b->codes = (int8_t(*)[QUANTISED_BLOCK])((char *)b->codes + step);
}

// What rounding left of blocks that are far larger than others of their row, in units of 1 / REST_STEPS of a code: codes, and
// their shifts as above. Zeros in a row that has none, in a block where another row of the strip has one: such a row comes out
// as if there were no rests, since a sum is multiplied by REST_STEPS, a power of two, and divided by it.
#define REST_STEPS 128
typedef struct {
    int32_t *shifts;
    int8_t (*codes)[QUANTISED_BLOCK];
} rest_block;

#define REST_BYTES (QUANTISED_BLOCK + 2 * sizeof(int32_t))  // of a row in a block

// Where the flags of a row's strip are, from this block on: whether a row of the strip has rests there.
INLINE const uint8_t *has_rests_at(const quantised_call *c, int64_t row, int64_t block) {
    return c->has_rests + row / c->height * c->blocks + block;
}

INLINE int has_rests(const quantised_call *c, int64_t row, int64_t block) {
    return __builtin_expect(*has_rests_at(c, row, block), 0);
}

INLINE rest_block rests_of(const quantised_call *c, int64_t row, int64_t block) {
    const int64_t height = c->height, strip = row / height, i = row % height;
    int32_t *shifts = (int32_t *)(c->rests + (strip * c->blocks + block) * height * (int64_t)REST_BYTES);
    return (rest_block){shifts + i, (int8_t (*)[QUANTISED_BLOCK])(shifts + 2 * height) + i};
}

INLINE void go_on_rests(rest_block *b, int64_t step) {
    b->shifts = (int32_t *)((char *)b->shifts + step);
    b->codes = (int8_t(*)[QUANTISED_BLOCK])((char *)b->codes + step);
}

// A group's sum as floats, with that of rests.
INLINE vec value_with_rest(ivec sum, ivec rest) {
    return __builtin_convertvector(sum * REST_STEPS + rest, vec) * splat(1.0f / REST_STEPS);
}

// UNPACKED. Rows [first, last) of panels [first_panel, last_panel): all of their inputs. `first` is the first of a strip.
void multiply_many_rows(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);

// MATRICES: the same by the matrix unit of a processor that has one (quantised_amx.c), for groups of 32.
void multiply_by_matrices(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);

// The same by the matrix instruction of ARM (quantised_i8mm.c), whose operands are pairs of rows: of each pair of a strip the
// codes are [4][2][8] then.
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PAIRED_ROWS 1
#else
#define PAIRED_ROWS 0
#endif
void pair_rows(int8_t (*codes)[QUANTISED_BLOCK], int64_t rows);
void multiply_by_pairs(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);

INLINE void write_part(float *p, int64_t count, vec v) {
    if (count >= W) {
        store(p, v);
    } else if (count > 0) {
        float part[W];
        store(part, v);
        memcpy(p, part, (size_t)count * sizeof(float));
    }
}

INLINE vec read_part(const float *p, int64_t count) {
    if (count >= W) return load(p);
    float part[W] = {0};
    if (count > 0) memcpy(part, p, (size_t)count * sizeof(float));
    return load(part);
}

// The result of a column's sum over all groups.
INLINE vec finish(const quantised_weight *w, int64_t first, vec acc) {
    vec bias = w->bias ? read_part(w->bias + first, w->out - first) : (vec){};
    return fma_(acc, splat(w->multiplier), bias);
}
