// The inner loop of every matrix product here: a tile of C[rows][16] = A[rows][K] · B[K][16].
//
// Sums over K are taken in fixed stretches: STRETCH_K products in one chain of fused multiply-adds in order of k, then the
// chains are added up in order. A chain's error grows with its length, so short chains keep a long sum as exact as a short
// one; and because stretches start at multiples of STRETCH_K in every tile, a row comes out the same, to the bit, in a tile
// of any height. B's rows are `ldb` floats apart (16 in packed weights).
#pragma once
#include "vector.h"

#define TILE 16            // columns of a tile
#define TILE_VECS (TILE / W)

#if W == 4
// NEON multiplies by a lane, so four values of A come with one load.
#define STEP_K 4
#define MAX_TILE_ROWS 4  // 16 accumulators and 4 rows of A in 32 registers: 95 % of the peak; taller tiles spill
#else
#define STEP_K 1
#define MAX_TILE_ROWS (W == 8 ? 6 : 12)
#endif

#define STRETCH_K 64

// acc += A · B, one chain for each element.
// `rows` is a constant wherever this is inlined: the accumulators then live in registers.
INLINE void tile_chain(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth,
                         vec acc[][TILE_VECS]) {
    int64_t k = 0;
#if W == 4
    for (; k + 4 <= depth; k += 4) {
        vec a4[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++) a4[i] = load(a + i * lda + k);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            const float *row = b + (k + s) * ldb;
            for (int j = 0; j < TILE_VECS; j++) {
                vec column = load(row + j * W);
                for (int i = 0; i < rows; i++) acc[i][j] = fma_(column, splat(a4[i][s]), acc[i][j]);
            }
        }
    }
#endif
    for (; k < depth; k++) {
        vec column[TILE_VECS];
        for (int j = 0; j < TILE_VECS; j++) column[j] = load(b + k * ldb + j * W);
        for (int i = 0; i < rows; i++) {
            vec value = splat(a[i * lda + k]);
            for (int j = 0; j < TILE_VECS; j++) acc[i][j] = fma_(column[j], value, acc[i][j]);
        }
    }
}

INLINE void clear_tile(int rows, vec acc[][TILE_VECS]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < TILE_VECS; j++) acc[i][j] = (vec){};
}

INLINE void add_tile(int rows, vec total[][TILE_VECS], vec acc[][TILE_VECS]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < TILE_VECS; j++) total[i][j] += acc[i][j];
}

// total = A · B, in stretches. The totals are touched once a stretch and may leave the registers.
INLINE void tile_product(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth,
                         vec total[][TILE_VECS]) {
    clear_tile(rows, total);
    for (int64_t k = 0; k < depth; k += STRETCH_K) {
        vec acc[MAX_TILE_ROWS][TILE_VECS];
        clear_tile(rows, acc);
        tile_chain(rows, a + k, lda, b + k * ldb, ldb, depth - k < STRETCH_K ? depth - k : STRETCH_K, acc);
        add_tile(rows, total, acc);
    }
}
