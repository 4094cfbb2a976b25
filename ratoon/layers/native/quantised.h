// Weights of 4 or 8 bits in groups, and rows of activations in 8 bits: what quantised.c reads, and its entry points.
//
// A weight [out, in] is kept in panels of 16 output columns, filled up with zeros behind the last one. A panel is a sequence
// of blocks of 32 inputs. Four consecutive inputs of a column (a quad) are the four bytes of a lane, and the lanes of the 16
// columns are 64 bytes, as the dot-product instructions read them:
//   4 bits: [4][16 columns][4] bytes; part b has quad b in the low halves and quad b + 4 in the high ones
//   8 bits: [8][16 columns][4] bytes; part b is quad b
// Scales, and offsets if there are any, are [panel][groups of a row][16] halves (fp16). A weight is
//   multiplier · (scale · (code - zero) + offset), zero = 128 for 8 bits; for 4 bits 8 without offsets, 0 with them.
#pragma once
#include <stdint.h>

#define QUANTISED_BLOCK 32

typedef struct {
    const uint8_t *codes;
    const uint16_t *scales;
    const uint16_t *offsets;  // NULL: none
    const float *bias;        // NULL: none
    int64_t in, out;          // `in` is a multiple of 32
    int32_t bits;             // 4 or 8
    int32_t group;            // inputs that share a scale: 32; or 16, with 8 bits and without offsets
    float multiplier;         // of all scales and offsets: a power of two
    // From how many rows on a product unpacks the weight into memory, and multiplies by the matrix unit where there is one.
    // The results are the same. 0: what is fastest for most weights with these instructions.
    int32_t unpack_from, matrices_from;
} quantised_weight;

// How a product with so many rows is made: 0 in registers, 1 from memory that the weight is unpacked into, 2 by the matrix unit,
// but rows behind the last 16 in the way of so many rows.
int64_t ratoon_quantised_kernel(const quantised_weight *weight, int64_t rows);

// Whether this set of kernels can run here, besides that the processor has the instructions. Called once, before all else.
int ratoon_kernels_usable(void);

// Bytes that a product needs for each row to keep its quantised activations, and for QUANTISED_ROOM rows more; aligned to 4.
#define QUANTISED_ROOM 15
int64_t ratoon_quantised_scratch(int64_t in);

// y = x · Wᵀ + bias. Activations are rounded to 8 bits in groups of 32 inputs of a row, each with its own scale; those of groups
// that are far larger than the others of their row (QUANTISED_LARGE) to 15 bits.
#define QUANTISED_LARGE 4.0f  // a group is, if the square of its scale is above so many times the mean of these squares
void ratoon_quantised_linear(const quantised_weight *weight, const float *x, int64_t ldx, int64_t rows, void *scratch, float *y,
                             int64_t ldy);

// down(silu(gate(x)) · up(x)). `between` has room for 3 · inner floats a row, `scratch` for the larger of both inputs.
void ratoon_quantised_gated_mlp(const quantised_weight *gate_up, const quantised_weight *down, const float *x, int64_t ldx,
                                int64_t rows, void *scratch, float *between, float *y);

// Of blocks of 32 floats, one after the other: the scales and, for 4 bits, the offsets that lose least. 8 bits have none.
void ratoon_fit_scales(const float *x, int64_t blocks, int32_t bits, float *scales, float *offsets);

// The codes that come nearest, with these scales and offsets, in GGUF's order: 32 bytes of -127…127 (8 bits), or 16 bytes with
// code i in the low half of byte i and code 16 + i in the high one (4 bits, 0…15).
void ratoon_encode(const float *x, int64_t blocks, int32_t bits, const float *scales, const float *offsets, uint8_t *codes);

// GGUF's blocks [rows][row_blocks] in the layout of a weight. format: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K are 0…7.
void ratoon_repack_codes(int64_t format, const uint8_t *blocks, int64_t rows, int64_t row_blocks, uint8_t *codes);

// Halves [rows][groups], `stride` bytes from each to the next, in the layout of a weight's scales.
void ratoon_repack_halves(const void *halves, int64_t rows, int64_t groups, int64_t stride, uint16_t *packed);
