// y = x · Wᵀ + bias with W in 4 or 8 bits (quantised.h) and x rounded to 8 bits.
//
// The products of a group are summed as integers, exactly; then groups are added in order, each by one fused multiply-add
// (and another one for its offset). So a row comes out the same, to the bit, in a tile of any height, on any number of
// threads, and with every instruction set.
#include "quantised_call.h"

#include <math.h>

#include "threads.h"

#define MAX_TILE_ROWS (W == 16 ? 8 : 4)
#define VECS_OF(rows) ((rows) == 1 ? TILE_VECS : (rows) == 2 && W < 16 ? 2 : 1)  // of columns, in a tile of so many rows
#define FETCH_AHEAD 4096  // bytes of codes
#define CACHE_LINE 64
#define UNITS_PER_THREAD 8
#define ROW_BLOCK 96            // rows that are multiplied with a panel while they are in the second-level cache
#define ROWS_PER_QUANTISING STRIP  // rows of activations that a thread takes at once
#define SMALLEST_MAXIMUM 1e-30f  // a group below this is zero: 127 / maximum would overflow

void ratoon_silu_and_mul(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width);

int64_t ratoon_quantised_scratch(int64_t in) { return in / QUANTISED_BLOCK * (int64_t)ROW_BYTES; }

static int zero_of(const quantised_weight *w) { return w->bits == 8 ? ZERO_OF_8 : w->offsets ? 0 : 8; }

// One row of a block. With a NaN or an infinity in it the scale is NaN, and so are the row's results.
static void quantise_block(const float *x, int zero, int64_t groups, int64_t height, activation_block to) {
    uint32_t largest = 0;
    for (int k = 0; k < QUANTISED_BLOCK; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float maximum;
    memcpy(&maximum, &largest, 4);
    int usable = largest < 0x7f800000 && maximum >= SMALLEST_MAXIMUM;
    float factor = usable ? 127.0f / maximum : 0.0f;
    int32_t sums[2] = {0, 0};
    int8_t *codes = to.codes[0];
    if (usable)
        for (int k = 0; k < QUANTISED_BLOCK; k++) codes[k] = (int8_t)rintf(x[k] * factor);
    else
        memset(codes, 0, QUANTISED_BLOCK);
    for (int k = 0; k < QUANTISED_BLOCK / 2; k++) sums[0] += codes[k];
    for (int k = QUANTISED_BLOCK / 2; k < QUANTISED_BLOCK; k++) sums[1] += codes[k];
    *to.scales = usable ? maximum / 127.0f : largest < 0x7f800000 ? 0.0f : NAN;
    *to.scaled_sums = *to.scales * (float)(sums[0] + sums[1]);
    to.shifts[0] = -zero * (groups == 2 ? sums[0] : sums[0] + sums[1]);
    to.shifts[height] = -zero * sums[1];  // of the second group, if there is one
}

static void quantise_unit(void *context, int64_t unit) {
    const quantised_call *c = context;
    int64_t last = (unit + 1) * ROWS_PER_QUANTISING < c->rows ? (unit + 1) * ROWS_PER_QUANTISING : c->rows;
    for (int64_t row = unit * ROWS_PER_QUANTISING; row < last; row++)
        for (int64_t block = 0; block < c->blocks; block++)
            quantise_block(c->x + row * c->ldx + block * QUANTISED_BLOCK, zero_of(c->weight), c->groups, c->height,
                           block_of(c, row, block));
}

// The quads of a block, for the columns of vector `j`.
INLINE void load_block(int bits, const uint8_t *codes, int j, bvec quads[QUADS]) {
    if (bits == 4) {
        UNROLLED for (int b = 0; b < QUADS / 2; b++) {
            bvec both = load_bytes(codes + b * 4 * TILE + j * 4 * W);
            quads[b] = both & 15;
            quads[b + QUADS / 2] = both >> 4;
        }
    } else {
        UNROLLED for (int b = 0; b < QUADS; b++) quads[b] = prepare_8(load_bytes(codes + b * 4 * TILE + j * 4 * W));
    }
}

// Asks for what a tile reads FETCH_AHEAD bytes of codes later: a core has many more requests to memory under way than by
// waiting for each block, and panels follow one another in memory.
INLINE void fetch_ahead(int block_bytes, int groups, int has_offsets, const uint8_t *codes, const uint16_t *scales,
                        const uint16_t *offsets) {
    const int halves = FETCH_AHEAD / block_bytes * TILE;
    for (int i = 0; i < block_bytes; i += CACHE_LINE) __builtin_prefetch(codes + FETCH_AHEAD + i);
    __builtin_prefetch(scales + halves * groups);
    if (has_offsets) __builtin_prefetch(offsets + halves);
}

// A tile [rows][16] of y. All but the last three arguments are constants wherever this is inlined.
INLINE void tile_of(int rows, int bits, int group, int has_offsets, const quantised_call *c, int64_t row, int64_t panel) {
    const quantised_weight *w = c->weight;
    const int groups = QUANTISED_BLOCK / group, block_bytes = BLOCK_CODES * bits / 8, vecs = VECS_OF(rows);
    const int64_t blocks = c->blocks, height = c->height;
    const uint8_t *codes = w->codes + panel * blocks * block_bytes;
    const uint16_t *scales = w->scales + panel * blocks * groups * TILE;
    const uint16_t *offsets = has_offsets ? w->offsets + panel * blocks * TILE : NULL;
    for (int j = 0; j < TILE_VECS; j += vecs) {
        vec acc[MAX_TILE_ROWS][TILE_VECS];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vecs; v++) acc[i][v] = (vec){};
        for (int64_t block = 0; block < blocks; block++) {
            const activation_block x = block_of(c, row, block);
            const uint16_t *block_scales = scales + block * groups * TILE + j * W;
            const uint16_t *block_offsets = offsets + block * TILE + j * W;
            if (j == 0)
                fetch_ahead(block_bytes, groups, has_offsets, codes + block * block_bytes, block_scales, block_offsets);
            UNROLLED for (int v = 0; v < vecs; v++) {
                bvec quads[QUADS];
                load_block(bits, codes + block * block_bytes, j + v, quads);
                UNROLLED for (int g = 0; g < groups; g++) {
                    vec scale = load_halves(block_scales + g * TILE + v * W);
                    ivec sums[MAX_TILE_ROWS];
                    UNROLLED for (int i = 0; i < rows; i++) sums[i] = begin_sum(bits, x.shifts[g * height + i]);
                    UNROLLED for (int b = g * group / 4; b < (g + 1) * group / 4; b++)
                        UNROLLED for (int i = 0; i < rows; i++)
                            sums[i] = dot(bits, sums[i], quads[b], load_quads(x.codes[i] + b / 4 * 16), b % 4);
                    UNROLLED for (int i = 0; i < rows; i++) {
                        ivec sum = end_sum(bits, sums[i], x.shifts[g * height + i]);
                        acc[i][v] = fma_(__builtin_convertvector(sum, vec), scale * splat(x.scales[i]), acc[i][v]);
                    }
                }
                if (has_offsets) {
                    vec offset = load_halves(block_offsets + v * W);
                    UNROLLED for (int i = 0; i < rows; i++) acc[i][v] = fma_(splat(x.scaled_sums[i]), offset, acc[i][v]);
                }
            }
        }
        for (int v = 0; v < vecs; v++) {
            int64_t first = panel * TILE + (j + v) * W;
            for (int i = 0; i < rows; i++)
                write_part(c->y + (row + i) * c->ldy + first, w->out - first, finish(w, first, acc[i][v]));
        }
    }
}

// Functions for the forms of a weight, each for every height of a tile.
#define TILE_FUNCTION(ROWS, NAME, BITS, GROUP, OFFSETS)                                            \
    static void NAME##_##ROWS(const quantised_call *c, int64_t row, int64_t panel) {               \
        tile_of(ROWS, BITS, GROUP, OFFSETS, c, row, panel);                                        \
    }
#define FEW_ROWS(NAME, BITS, GROUP, OFFSETS)                                                       \
    TILE_FUNCTION(1, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(2, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(3, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(4, NAME, BITS, GROUP, OFFSETS)
#if W == 16
#define FORM(NAME, BITS, GROUP, OFFSETS)                                                           \
    FEW_ROWS(NAME, BITS, GROUP, OFFSETS)                                                           \
    TILE_FUNCTION(5, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(6, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(7, NAME, BITS, GROUP, OFFSETS)                                                   \
    TILE_FUNCTION(8, NAME, BITS, GROUP, OFFSETS)                                                   \
    static const tile_function NAME[] = {NULL,     NAME##_1, NAME##_2, NAME##_3, NAME##_4,         \
                                         NAME##_5, NAME##_6, NAME##_7, NAME##_8};
#else
#define FORM(NAME, BITS, GROUP, OFFSETS)                                                           \
    FEW_ROWS(NAME, BITS, GROUP, OFFSETS)                                                           \
    static const tile_function NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};
#endif
typedef void (*tile_function)(const quantised_call *, int64_t, int64_t);
FORM(tiles_4, 4, 32, 0)
FORM(tiles_4_offsets, 4, 32, 1)
FORM(tiles_8, 8, 32, 0)
FORM(tiles_8_offsets, 8, 32, 1)
FORM(tiles_8_of_16, 8, 16, 0)

static const tile_function *tiles_of(const quantised_weight *w) {
    if (w->bits == 4) return w->offsets ? tiles_4_offsets : tiles_4;
    if (w->group == 16) return tiles_8_of_16;
    return w->offsets ? tiles_8_offsets : tiles_8;
}

static void multiply_few_rows(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
    const tile_function *tiles = tiles_of(c->weight);
    for (int64_t panel = first_panel; panel < last_panel; panel++)
        for (int64_t row = first; row < last;) {
            // Even heights: 9 rows go as 5 + 4, not as 8 + 1.
            int64_t left = last - row;
            int64_t tiles_left = (left + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
            int64_t height = (left + tiles_left - 1) / tiles_left;
            tiles[height](c, row, panel);
            row += height;
        }
}

// Where block `index` of rows begins: with a strip, and blocks have nearly the same number of rows.
static int64_t first_row_of(const quantised_call *c, int64_t index) {
    return index == c->row_blocks ? c->rows : c->rows * index / c->row_blocks / STRIP * STRIP;
}

static void product_unit(void *context, int64_t unit) {
    const quantised_call *c = context;
    int64_t first_row = first_row_of(c, unit / c->units_per_block), last_row = first_row_of(c, unit / c->units_per_block + 1);
    int64_t first = unit % c->units_per_block * c->panels_per_unit;
    int64_t last = first + c->panels_per_unit < c->panels ? first + c->panels_per_unit : c->panels;
    if (c->rows < MANY_ROWS)
        multiply_few_rows(c, first_row, last_row, first, last);
    else
        multiply_many_rows(c, first_row, last_row, first, last);
}

void ratoon_quantised_linear(const quantised_weight *weight, const float *x, int64_t ldx, int64_t rows, void *scratch, float *y,
                             int64_t ldy) {
    if (rows <= 0) return;
    quantised_call c = {.weight = weight, .x = x, .y = y, .ldx = ldx, .ldy = ldy, .rows = rows};
    c.blocks = weight->in / QUANTISED_BLOCK;
    c.groups = QUANTISED_BLOCK / weight->group;
    c.height = rows < MANY_ROWS ? rows : STRIP;
    c.activations = scratch;
    parallel_units(quantise_unit, &c, (rows + ROWS_PER_QUANTISING - 1) / ROWS_PER_QUANTISING);
    c.panels = (weight->out + TILE - 1) / TILE;
    // Long runs of panels keep the memory streaming; several runs for each thread keep one from waiting for another.
    c.panels_per_unit = c.panels / (UNITS_PER_THREAD * thread_count());
    if (c.panels_per_unit < 1) c.panels_per_unit = 1;
    if (rows >= MANY_ROWS) c.panels_per_unit += c.panels_per_unit % 2;
    c.units_per_block = (c.panels + c.panels_per_unit - 1) / c.panels_per_unit;
    c.row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    parallel_units(product_unit, &c, c.units_per_block * c.row_blocks);
}

void ratoon_quantised_gated_mlp(const quantised_weight *gate_up, const quantised_weight *down, const float *x, int64_t ldx,
                                int64_t rows, void *scratch, float *between, float *y) {
    int64_t inner = down->in;
    float *activated = between + 2 * inner * rows;
    ratoon_quantised_linear(gate_up, x, ldx, rows, scratch, between, 2 * inner);
    ratoon_silu_and_mul(between, 2 * inner, activated, rows, inner);
    ratoon_quantised_linear(down, activated, inner, rows, scratch, y, down->out);
}
