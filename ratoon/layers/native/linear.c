// y = x · Wᵀ + bias, with W packed once into panels of 16 output columns: [panel][k][16], zeros behind the last column.
#include <string.h>

#include "threads.h"
#include "tile.h"

#define ROW_BLOCK 96  // rows of x that are multiplied with a panel while they are in the second-level cache

int64_t ratoon_packed_size(int64_t out, int64_t in) { return (out + TILE - 1) / TILE * TILE * in; }

void ratoon_pack_weight(const float *weight, int64_t out, int64_t in, float *packed) {
    for (int64_t panel = 0; panel * TILE < out; panel++) {
        float *target = packed + panel * TILE * in;
        for (int64_t k = 0; k < in; k++)
            for (int64_t j = 0; j < TILE; j++) {
                int64_t column = panel * TILE + j;
                target[k * TILE + j] = column < out ? weight[column * in + k] : 0.0f;
            }
    }
}

typedef struct {
    const float *x, *packed, *bias;
    float *y;
    int64_t ldx, ldy, rows, in, out, panels, panels_per_unit, units_per_block;
} linear_call;

INLINE void write_tile(int rows, const linear_call *c, int64_t row, int64_t panel, vec acc[][TILE_VECS]) {
    int64_t column = panel * TILE;
    if (c->bias)
        for (int j = 0; j < TILE_VECS; j++) {
            float b[W] = {0};
            for (int l = 0; l < W; l++)
                if (column + j * W + l < c->out) b[l] = c->bias[column + j * W + l];
            for (int i = 0; i < rows; i++) acc[i][j] += load(b);
        }
    for (int i = 0; i < rows; i++) {
        float *y = c->y + (row + i) * c->ldy + column;
        if (column + TILE <= c->out) {
            for (int j = 0; j < TILE_VECS; j++) store(y + j * W, acc[i][j]);
        } else {
            float whole[TILE];
            for (int j = 0; j < TILE_VECS; j++) store(whole + j * W, acc[i][j]);
            memcpy(y, whole, (size_t)(c->out - column) * sizeof(float));
        }
    }
}

#define TILE_OF(ROWS)                                                                              \
    static void tile_##ROWS(const linear_call *c, int64_t row, int64_t panel) {                    \
        vec acc[ROWS][TILE_VECS] = {};                                                             \
        tile_product(ROWS, c->x + row * c->ldx, c->ldx, c->packed + panel * TILE * c->in, TILE, c->in, acc); \
        write_tile(ROWS, c, row, panel, acc);                                                      \
    }
TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4)
#if MAX_TILE_ROWS > 4
TILE_OF(5) TILE_OF(6)
#endif
#if MAX_TILE_ROWS > 6
TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
#endif
typedef void (*tile_function)(const linear_call *, int64_t, int64_t);
static const tile_function tiles[] = {
    NULL, tile_1, tile_2, tile_3, tile_4,
#if MAX_TILE_ROWS > 4
    tile_5, tile_6,
#endif
#if MAX_TILE_ROWS > 6
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

static void linear_unit(void *context, int64_t unit) {
    const linear_call *c = context;
    int64_t first_row = unit / c->units_per_block * ROW_BLOCK;
    int64_t last_row = first_row + ROW_BLOCK < c->rows ? first_row + ROW_BLOCK : c->rows;
    int64_t first = unit % c->units_per_block * c->panels_per_unit;
    int64_t last = first + c->panels_per_unit < c->panels ? first + c->panels_per_unit : c->panels;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t row = first_row;
        while (row < last_row) {
            // Even heights: 5 rows go as 3 + 2, not as 4 + 1.
            int64_t left = last_row - row;
            int64_t tiles_left = (left + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
            int64_t height = (left + tiles_left - 1) / tiles_left;
            tiles[height](c, row, panel);
            row += height;
        }
    }
}

void ratoon_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                   const float *bias, float *y, int64_t ldy) {
    if (rows <= 0) return;
    linear_call c = {x, packed, bias, y, ldx, ldy, rows, in, out, (out + TILE - 1) / TILE, 0, 0};
    // Units small enough that no thread waits long for the last one, large enough that handing them out costs nothing.
    int64_t per_unit = (1 << 17) / (in * TILE * (rows < ROW_BLOCK ? rows : ROW_BLOCK) / 4 + 1);
    c.panels_per_unit = per_unit < 1 ? 1 : per_unit;
    c.units_per_block = (c.panels + c.panels_per_unit - 1) / c.panels_per_unit;
    parallel_units(linear_unit, &c, c.units_per_block * ((rows + ROW_BLOCK - 1) / ROW_BLOCK));
}
