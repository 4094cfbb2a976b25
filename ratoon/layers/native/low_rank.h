// Matrices of adapters in whole numbers (low_rank_whole.c), and rows that are multiplied with them.
//
// A matrix [columns][depth] is kept in panels of 16 columns, and a panel in stretches of STRETCH_K numbers of each column: 16
// scales, then the numbers as pairs [k / 2][16][2] (pairs.h), with a zero behind an odd number of them.
#pragma once
#include "tile.h"

// HEIGHT(rows) for each height of a tile.
#if MAX_TILE_ROWS == 4
#define EVERY_HEIGHT HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4)
#elif MAX_TILE_ROWS == 6
#define EVERY_HEIGHT HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
#else
#define EVERY_HEIGHT HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6) HEIGHT(7) HEIGHT(8)
#endif

#define STRETCHES_OF(depth) (((depth) + STRETCH_K - 1) / STRETCH_K)

enum { WHOLE = 3 };  // the format, beside those of tile.h

int64_t whole_panel_bytes(int64_t depth);

// Returns 0, or -1 if a number is not finite.
int pack_whole(const float *matrix, int64_t columns, int64_t depth, void *packed);

// A row of x: codes [STRETCHES_OF(depth)][STRETCH_K], filled up with zeros. A scale is NaN where a number is not finite.
void round_whole(const float *x, int64_t depth, int16_t *codes, float *scales);

// scale · x · A for a panel of A and a tile of rows, rounded: codes [TILE / 2][rows][2], as pairs of each row, and a scale of each row.
void whole_low(int rows, const int16_t *const *x, const float *const *x_scales, int64_t depth, const char *panel, float scale,
               int16_t *codes, float *scales);

// y[i] [panels · TILE] += low · B. low and scales: of one panel of A after the other.
void whole_columns(int rows, const int16_t *low, const float *scales, int64_t depth, const char *b, int64_t panels,
                   float *const *y);
