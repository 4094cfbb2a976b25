// The inner loop of every matrix product here: a tile of C[rows][16] += A[rows][K] · B[K][16], or of several panels of B.
//
// Sums over K are taken in fixed stretches: STRETCH_K products in one chain of fused multiply-adds in order of k, then the
// chains are added up in order. A chain's error grows with its length, so short chains keep a long sum as exact as a short
// one; and because stretches start at multiples of STRETCH_K in every tile, a row comes out the same, to the bit, in a tile
// of any height and width. B's rows are `ldb` floats apart (16 in packed weights).
#pragma once
#include "dot.h"

#define TILE 16            // columns of a panel
#define TILE_VECS (TILE / W)
#define STRETCH_K 64

#if W == 4
#define MAX_TILE_ROWS 4  // 16 accumulators and 4 rows of A in 32 registers: 95 % of the peak; taller tiles spill
#define MAX_TILE_PANELS 1
#elif W == 8
#define MAX_TILE_ROWS 6  // 12 accumulators, 2 columns and a value of A in 16 registers
#define MAX_TILE_PANELS 1
#else
#define MAX_TILE_ROWS 8  // 24 accumulators, 3 columns and a value of A in 32 registers: 11 loads for 24 multiply-adds
#define MAX_TILE_PANELS 3
#endif
#define TILE_WIDTH (MAX_TILE_PANELS * TILE)

// What B is made of.
enum { FLOATS, BF16, FP16 };

INLINE int64_t bytes_of(int format) { return format == FLOATS ? 4 : 2; }

INLINE const void *number_at(int format, const void *numbers, int64_t index) {
    return (const char *)numbers + index * bytes_of(format);
}

// W numbers as floats.
INLINE vec load_as(int format, const void *numbers, int64_t index) {
    const void *p = number_at(format, numbers, index);
    return format == FLOATS ? load(p) : format == BF16 ? load_bf16(p) : load_halves(p);
}

INLINE void clear_tile(int rows, vec acc[][TILE_VECS]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < TILE_VECS; j++) acc[i][j] = (vec){};
}

// acc += A · B, one chain for each element.
// `rows` and `format` are constants wherever this is inlined: the accumulators then live in registers.
INLINE void tile_chain_of(int rows, int format, const float *a, int64_t lda, const void *b, int64_t ldb, int64_t depth,
                          vec acc[][TILE_VECS]) {
    int64_t k = 0;
#if W == 4
    // NEON multiplies by a lane, so four values of A come with one load.
    for (; k + 4 <= depth; k += 4) {
        vec a4[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++) a4[i] = load(a + i * lda + k);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            for (int j = 0; j < TILE_VECS; j++) {
                vec column = load_as(format, b, (k + s) * ldb + j * W);
                for (int i = 0; i < rows; i++) acc[i][j] = fma_(column, splat(a4[i][s]), acc[i][j]);
            }
        }
    }
#endif
    for (; k < depth; k++) {
        vec column[TILE_VECS];
        for (int j = 0; j < TILE_VECS; j++) column[j] = load_as(format, b, k * ldb + j * W);
        for (int i = 0; i < rows; i++) {
            vec value = splat(a[i * lda + k]);
            for (int j = 0; j < TILE_VECS; j++) acc[i][j] = fma_(column[j], value, acc[i][j]);
        }
    }
}

INLINE void tile_chain(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth,
                       vec acc[][TILE_VECS]) {
    tile_chain_of(rows, FLOATS, a, lda, b, ldb, depth, acc);
}

// Where a tile reads A: a value of its first row; those of other rows are `row_step` floats apart, those of other k `step`.
typedef struct {
    const float *at;
    int64_t row_step, step;
} tile_rows;

// Rows that multiply-adds read from memory one by one, where one instruction does both: three of eight, as few instructions as
// the two reads of a cycle allow. Addresses with a variable distance take an instruction of their own, so not for those.
INLINE int is_read_again(int row, const tile_rows *a) { return W == 16 && a->step > 1 && row * 3 / 8 < (row + 1) * 3 / 8; }

// Step s of a chain with panels side by side.
INLINE void panels_step(int rows, int panels, int format, tile_rows *a, const char *const *b, int s, vec acc[][TILE_WIDTH / W]) {
    vec column[TILE_WIDTH / W];
    UNROLLED for (int p = 0; p < panels; p++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) column[p * TILE_VECS + j] = load_as(format, b[p], s * TILE + j * W);
    UNROLLED for (int i = 0; i < rows; i++) {
        READ_FROM_HERE(a->at);
        vec value = splat(a->at[i * a->row_step + s * a->step]);
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) {
            if (j && is_read_again(i, a)) {
                READ_FROM_HERE(a->at);
                value = splat(a->at[i * a->row_step + s * a->step]);
            }
            acc[i][j] = fma_(column[j], value, acc[i][j]);
            SUM_IS_HERE(acc[i][j]);
        }
    }
}

#define STEPS_PER_FETCH 4
#define STREAMING_ROWS 4  // tiles of so few rows wait for memory
#define LINES_AHEAD 32    // that they fetch, in every panel: across the page on which the processor's own fetching ends

// Memory that a tile of more rows fetches into the second-level cache: `step` cache lines in STEPS_PER_FETCH steps of its chains.
typedef struct {
    const float *from;
    int64_t step;
} memory_ahead;

// Fetches ahead of a chain: what the same panels have further on, for few rows. For more, which have the panels in the
// first-level cache, as many lines as there are panels: some of them twice if fewer are wanted.
INLINE void fetch_ahead(int rows, int panels, int format, const char *const *b, const float *from) {
    UNROLLED for (int p = 0; p < panels; p++)
        if (rows > STREAMING_ROWS)
            __builtin_prefetch(from + p * 16, 0, 2);
        else
            UNROLLED for (int i = 0; i < STEPS_PER_FETCH * TILE * bytes_of(format) / 64; i++)
                __builtin_prefetch(b[p] + 64 * (LINES_AHEAD + i), 0, 3);
}

// The same chains for up to MAX_TILE_PANELS panels with packed rows, each `panel_size` numbers behind the one before it.
INLINE void panels_chain(int rows, int panels, int format, tile_rows a, const void *first_panel, int64_t panel_size, int64_t depth,
                         memory_ahead ahead, vec acc[][TILE_WIDTH / W]) {
#if W == 4
    (void)panels, (void)panel_size, (void)ahead;
    tile_chain_of(rows, format, a.at, a.row_step, first_panel, TILE, depth, acc);
#else
    const char *b[MAX_TILE_PANELS];
    UNROLLED for (int p = 0; p < panels; p++) b[p] = number_at(format, first_panel, p * panel_size);
    for (; depth >= STEPS_PER_FETCH; depth -= STEPS_PER_FETCH) {
        fetch_ahead(rows, panels, format, b, ahead.from);
        UNROLLED for (int s = 0; s < STEPS_PER_FETCH; s++) panels_step(rows, panels, format, &a, b, s, acc);
        a.at += STEPS_PER_FETCH * a.step;
        ahead.from += 16 * ahead.step;
        UNROLLED for (int p = 0; p < panels; p++) {
            b[p] = number_at(format, b[p], STEPS_PER_FETCH * TILE);
            READ_FROM_HERE(b[p]);
        }
    }
    for (; depth > 0; depth--, a.at += a.step) {
        panels_step(rows, panels, format, &a, b, 0, acc);
        UNROLLED for (int p = 0; p < panels; p++) b[p] = number_at(format, b[p], TILE);
    }
#endif
}
