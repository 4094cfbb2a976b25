// y = x · Wᵀ + bias, with W packed once into panels of 16 output columns: [panel][k][16], zeros behind the last column.
#include <string.h>

#include "kernels.h"
#include "threads.h"
#include "tile.h"

// Depth of a panel that stays in the first-level cache while rows go by, and the second level of sums over K: the stretches
// of a block are added up, then the blocks. A multiple of STRETCH_K, and the same for any number of rows.
#define DEPTH_BLOCK 768
#define UNITS_PER_THREAD 8
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

// Sixteen values of a row of y, or of the bias, that may end before the panel does.
INLINE void read_part(const float *p, int64_t count, vec v[TILE_VECS]) {
    float part[TILE] = {0};
    if (count < TILE) {
        memcpy(part, p, (size_t)count * sizeof(float));
        p = part;
    }
    for (int j = 0; j < TILE_VECS; j++) v[j] = load(p + j * W);
}

INLINE void write_part(float *p, int64_t count, const vec v[TILE_VECS]) {
    float part[TILE];
    float *target = count < TILE ? part : p;
    for (int j = 0; j < TILE_VECS; j++) store(target + j * W, v[j]);
    if (count < TILE) memcpy(p, part, (size_t)count * sizeof(float));
}

// Adds depth [first, first + depth) of the sums to a tile of y, where they rest between two blocks of depth.
INLINE void add_block(int rows, const linear_call *c, int64_t row, int64_t panel, int64_t first, int64_t depth) {
    vec total[MAX_TILE_ROWS][TILE_VECS], part[TILE_VECS];
    float *y = c->y + row * c->ldy + panel * TILE;
    int64_t count = c->out - panel * TILE;
    tile_product(rows, c->x + row * c->ldx + first, c->ldx, c->packed + (panel * c->in + first) * TILE, TILE, depth, total);
    if (first > 0)
        for (int i = 0; i < rows; i++) {
            read_part(y + i * c->ldy, count, part);
            for (int j = 0; j < TILE_VECS; j++) total[i][j] += part[j];
        }
    if (c->bias && first + depth == c->in) {
        read_part(c->bias + panel * TILE, count, part);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < TILE_VECS; j++) total[i][j] += part[j];
    }
    for (int i = 0; i < rows; i++) write_part(y + i * c->ldy, count, total[i]);
}

#define TILE_OF(ROWS)                                                                                              \
    static void tile_##ROWS(const linear_call *c, int64_t row, int64_t panel, int64_t first, int64_t depth) {      \
        add_block(ROWS, c, row, panel, first, depth);                                                              \
    }
TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4)
#if MAX_TILE_ROWS > 4
TILE_OF(5) TILE_OF(6)
#endif
#if MAX_TILE_ROWS > 6
TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
#endif
typedef void (*tile_function)(const linear_call *, int64_t, int64_t, int64_t, int64_t);
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
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t k = 0; k < c->in; k += DEPTH_BLOCK) {
            int64_t depth = c->in - k < DEPTH_BLOCK ? c->in - k : DEPTH_BLOCK;
            for (int64_t row = first_row; row < last_row;) {
                // Even heights: 5 rows go as 3 + 2, not as 4 + 1.
                int64_t left = last_row - row;
                int64_t tiles_left = (left + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
                int64_t height = (left + tiles_left - 1) / tiles_left;
                tiles[height](c, row, panel, k, depth);
                row += height;
            }
        }
}

void ratoon_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                   const float *bias, float *y, int64_t ldy) {
    if (rows <= 0) return;
    linear_call c = {x, packed, bias, y, ldx, ldy, rows, in, out, (out + TILE - 1) / TILE, 0, 0};
    // Long runs of panels keep the memory streaming; several runs for each thread keep one from waiting for another.
    c.panels_per_unit = c.panels / (UNITS_PER_THREAD * thread_count());
    if (c.panels_per_unit < 1) c.panels_per_unit = 1;
    c.units_per_block = (c.panels + c.panels_per_unit - 1) / c.panels_per_unit;
    parallel_units(linear_unit, &c, c.units_per_block * ((rows + ROW_BLOCK - 1) / ROW_BLOCK));
}
