// Products of many rows with a quantised weight: a stretch of a panel is unpacked once, to bytes and float scales that stay
// in the first-level cache, and all rows are multiplied with it. The sums over earlier stretches wait in y.
//
// Every result is the chain of operations of quantised.c.
#include "unpack.h"

#if W == 16
#define PANELS 2  // that are unpacked together
#define TILE_ROWS 8
#define VECS 2  // of columns, in a tile
#elif W == 8
#define PANELS 1
#define TILE_ROWS 4
#define VECS 1
#else
#define PANELS 1
#define TILE_ROWS 4
#define VECS 2
#endif

typedef struct {
    const quantised_call *call;
    const unpacked *panels;
    const stretch_ahead *ahead;  // of the same panels; NULL: another tile fetches it
    int64_t row, panel, first_block, blocks;
    int vector;  // the first of the tile, among those of the panels
    int is_last;
} tile_place;

// The columns of vector `v` of a tile.
#define PANEL_OF(v) ((p->vector + (v)) / TILE_VECS)
#define LANES_OF(v) ((p->vector + (v)) % TILE_VECS * W)

// Sums of a group of the rows and columns of a tile: codes or rests, and their shifts. `weights`: where the block's codes of
// each vector begin. A quad is read when it is multiplied: with all quads of a block in registers, the tile's sums would be on
// the stack.
INLINE void sum_group(int rows, int bits, int first, int last, const uint8_t *const weights[VECS], const int8_t *codes,
                      const int32_t *shifts, ivec sums[TILE_ROWS][VECS]) {
    const uint8_t *from[VECS];
    UNROLLED for (int v = 0; v < VECS; v++) from[v] = weights[v];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int v = 0; v < VECS; v++) sums[i][v] = begin_sum(bits, shifts[i]);
    UNROLLED for (int b = first; b < last; b++) {
        bvec quads[VECS];
        UNROLLED for (int v = 0; v < VECS; v++) {
            READ_FROM_HERE(from[v]);
            quads[v] = load_bytes(from[v] + b * TILE * 4);
        }
        READ_FROM_HERE(codes);
        UNROLLED for (int i = 0; i < rows; i++) {
            quads_of_x quads_of_row = load_quads(codes + i * QUANTISED_BLOCK + b / 4 * 16);
            UNROLLED for (int v = 0; v < VECS; v++) sums[i][v] = dot(bits, sums[i][v], quads[v], quads_of_row, b % 4);
        }
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int v = 0; v < VECS; v++) sums[i][v] = end_sum(bits, sums[i][v], shifts[i]);
}

// Adds a stretch to a tile [rows][VECS · W] of y. The first four arguments are constants.
INLINE void add_stretch(int rows, int bits, int group, int has_offsets, const tile_place *p) {
    const quantised_call *c = p->call;
    const quantised_weight *w = c->weight;
    const int groups = QUANTISED_BLOCK / group;
    float *y[VECS];
    int64_t first[VECS];
    vec acc[TILE_ROWS][VECS];
    for (int v = 0; v < VECS; v++) {
        first[v] = (p->panel + PANEL_OF(v)) * TILE + LANES_OF(v);
        y[v] = c->y + p->row * c->ldy + first[v];
        if (p->is_last)  // results are on their way to the cache while the sums are made
            for (int i = 0; i < rows; i++) __builtin_prefetch(y[v] + i * c->ldy, 1);
        for (int i = 0; i < rows; i++)
            acc[i][v] = p->first_block ? read_part(y[v] + i * c->ldy, w->out - first[v]) : (vec){};
    }
    const uint8_t *weights[VECS];
    for (int v = 0; v < VECS; v++) weights[v] = p->panels[PANEL_OF(v)].codes[0][0][LANES_OF(v)];
    activation_block x = block_of(c, p->row, p->first_block);
    rest_block rest = rests_of(c, p->row, p->first_block);
    const uint8_t *flags = has_rests_at(c, p->row, p->first_block);
    for (int64_t block = 0; block < p->blocks; block++) {
        if (p->ahead)
            for (int i = 0; i < PANELS; i++) fetch_block(p->ahead + i, block);
        const int with_rests = __builtin_expect(flags[block], 0);
        UNROLLED for (int g = 0; g < groups; g++) {
            const int first_quad = g * group / 4, last_quad = (g + 1) * group / 4;
            ivec sums[TILE_ROWS][VECS], rests[TILE_ROWS][VECS];
            vec values[TILE_ROWS][VECS];
            sum_group(rows, bits, first_quad, last_quad, weights, x.codes[0], x.shifts + g * STRIP, sums);
            UNROLLED for (int i = 0; i < rows; i++)
                UNROLLED for (int v = 0; v < VECS; v++) values[i][v] = __builtin_convertvector(sums[i][v], vec);
            if (with_rests) {
                sum_group(rows, bits, first_quad, last_quad, weights, rest.codes[0], rest.shifts + g * STRIP, rests);
                UNROLLED for (int i = 0; i < rows; i++)
                    UNROLLED for (int v = 0; v < VECS; v++) values[i][v] = value_with_rest(sums[i][v], rests[i][v]);
            }
            UNROLLED for (int v = 0; v < VECS; v++) {
                vec scale = load(p->panels[PANEL_OF(v)].scales[block * groups + g] + LANES_OF(v));
                UNROLLED for (int i = 0; i < rows; i++)
                    acc[i][v] = fma_(values[i][v], scale * splat(x.scales[i]), acc[i][v]);
            }
        }
        if (has_offsets)
            UNROLLED for (int v = 0; v < VECS; v++) {
                vec offset = load(p->panels[PANEL_OF(v)].offsets[block] + LANES_OF(v));
                UNROLLED for (int i = 0; i < rows; i++) acc[i][v] = fma_(splat(x.scaled_sums[i]), offset, acc[i][v]);
            }
        go_on(&x, STRIP * (int64_t)ROW_BYTES);
        go_on_rests(&rest, STRIP * (int64_t)REST_BYTES);
        UNROLLED for (int v = 0; v < VECS; v++) weights[v] += BLOCK_CODES;
    }
    for (int v = 0; v < VECS; v++)
        for (int i = 0; i < rows; i++)
            write_part(y[v] + i * c->ldy, w->out - first[v], p->is_last ? finish(w, first[v], acc[i][v]) : acc[i][v]);
}

typedef void (*stretch_function)(const tile_place *);
#define STRETCH_FUNCTION(ROWS, NAME, BITS, GROUP, OFFSETS)                                                                     \
    static void NAME##_##ROWS(const tile_place *p) { add_stretch(ROWS, BITS, GROUP, OFFSETS, p); }
#define FEW_HEIGHTS(NAME, BITS, GROUP, OFFSETS)                                                                                \
    STRETCH_FUNCTION(1, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(2, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(3, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(4, NAME, BITS, GROUP, OFFSETS)
#if TILE_ROWS == 8
#define FORM(NAME, BITS, GROUP, OFFSETS)                                                                                       \
    FEW_HEIGHTS(NAME, BITS, GROUP, OFFSETS)                                                                                    \
    STRETCH_FUNCTION(5, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(6, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(7, NAME, BITS, GROUP, OFFSETS)                                                                            \
    STRETCH_FUNCTION(8, NAME, BITS, GROUP, OFFSETS)                                                                            \
    static const stretch_function NAME[] = {NULL,     NAME##_1, NAME##_2, NAME##_3, NAME##_4,                                  \
                                            NAME##_5, NAME##_6, NAME##_7, NAME##_8};
#else
#define FORM(NAME, BITS, GROUP, OFFSETS)                                                                                       \
    FEW_HEIGHTS(NAME, BITS, GROUP, OFFSETS)                                                                                    \
    static const stretch_function NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};
#endif
FORM(add_4, 4, 32, 0)
FORM(add_4_offsets, 4, 32, 1)
FORM(add_8, 8, 32, 0)
FORM(add_8_offsets, 8, 32, 1)
FORM(add_8_of_16, 8, 16, 0)

static const stretch_function *functions_of(const quantised_weight *w) {
    if (w->bits == 4) return w->offsets ? add_4_offsets : add_4;
    if (w->group == 16) return add_8_of_16;
    return w->offsets ? add_8_offsets : add_8;
}

// The height of the tile that begins at a row: all those of a strip are about equal.
static int64_t height_at(int64_t row, int64_t last, int64_t highest) {
    int64_t left = STRIP - row % STRIP < last - row ? STRIP - row % STRIP : last - row;
    int64_t tiles = (left + highest - 1) / highest;
    return (left + tiles - 1) / tiles;
}

void multiply_many_rows(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
    const stretch_function *functions = functions_of(c->weight);
    const int64_t highest = c->weight->offsets && TILE_ROWS > 6 ? 6 : TILE_ROWS;  // offsets need registers, too
    unpacked panels[PANELS];
    tile_place place = {.call = c, .panels = panels};
    for (place.panel = first_panel; place.panel < last_panel; place.panel += PANELS)
        for (place.first_block = 0; place.first_block < c->blocks; place.first_block += STRETCH) {
            int64_t left = c->blocks - place.first_block;
            place.blocks = left < STRETCH ? left : STRETCH;
            place.is_last = left <= STRETCH;
            for (int i = 0; i < PANELS; i++) unpack(0, c, place.panel + i, place.first_block, place.blocks, panels + i);
            stretch_ahead ahead[PANELS];
            for (int i = 0; i < PANELS; i++)
                ahead[i] = place.is_last ? find_ahead(c, place.panel + PANELS + i, 0)
                                         : find_ahead(c, place.panel + i, place.first_block + place.blocks);
            for (place.row = first; place.row < last;) {
                int64_t height = height_at(place.row, last, highest);
                for (place.vector = 0; place.vector < PANELS * TILE_VECS; place.vector += VECS) {
                    place.ahead = place.row == first && place.vector == 0 ? ahead : NULL;
                    functions[height](&place);
                }
                place.row += height;
            }
        }
}
