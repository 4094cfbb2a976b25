// Products of many rows with a quantised weight by the matrix unit of x86 (AMX): 16 rows by 16 columns by 32 inputs in one
// instruction. A tile's integers go through memory to the vector unit, which scales and adds them.
//
// Every result is the chain of operations of quantised.c. Rows behind the last are computed too (the activations have room
// for them) and not written.
#if defined(__linux__)
#define _GNU_SOURCE  // syscall
#endif
#include "unpack.h"

#if !defined(__AMX_INT8__)
int ratoon_kernels_usable(void) { return 1; }
#else
#include <sys/syscall.h>
#include <unistd.h>

#include "matrix_unit.h"

#define TILE_ROWS STRIP
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_TILE_DATA 18

// Linux gives a process the registers of the matrix unit when it asks for them.
int ratoon_kernels_usable(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0; }

// Registers 0 and 1 hold sums, 4 and 5 activations, 6 and 7 weights of a block.
static void configure(void) {
    tile_config config = {.palette = TILE_PALETTE};
    set_shape(&config, 0, 2, TILE_ROWS, 4 * TILE);
    set_shape(&config, 4, 6, TILE_ROWS, QUANTISED_BLOCK);
    set_shape(&config, 6, 8, QUADS, 4 * TILE);
    _tile_loadconfig(&config);
}

typedef struct {
    const quantised_call *call;
    const unpacked *stretch;
    const stretch_ahead *ahead;  // NULL: another tile fetches it
    int64_t row, rows, panel, first_block, blocks;
    int is_last;
} tile_place;

typedef int32_t block_sums[TILE_ROWS][TILE];

// The sums of one block, and those of rests where there are any, by registers of the matrix unit.
#define MULTIPLY_CODES(SUMS, INPUTS, WEIGHTS, FROM, TARGET)                                                                    \
    {                                                                                                                          \
        _tile_loadd(INPUTS, FROM, QUANTISED_BLOCK);                                                                            \
        _tile_zero(SUMS);                                                                                                      \
        _tile_dpbssd(SUMS, INPUTS, WEIGHTS);                                                                                   \
        _tile_stored(SUMS, (TARGET)[0], 4 * TILE);                                                                             \
    }
#define MULTIPLY(SUMS, INPUTS, WEIGHTS, INDEX, TARGET)                                                                         \
    {                                                                                                                          \
        _tile_loadd(WEIGHTS, codes + (INDEX) * BLOCK_CODES, 4 * TILE);                                                         \
        MULTIPLY_CODES(SUMS, INPUTS, WEIGHTS, x + (INDEX) * block_bytes, sums[TARGET])                                         \
        if (__builtin_expect(with_rests[INDEX], 0))                                                                            \
            MULTIPLY_CODES(SUMS, INPUTS, WEIGHTS, rests_of(c, p->row, p->first_block + (INDEX)).codes[0], rests[TARGET])       \
    }

// `rests`: NULL, if the block has none.
INLINE void add_block(int has_offsets, const float *x_scales, const float *scales, const float *offsets, const block_sums sums,
                      const int32_t (*rests)[TILE], vec acc[TILE_ROWS]) {
    vec scale = load(scales), offset = has_offsets ? load(offsets) : (vec){};
    UNROLLED for (int i = 0; i < TILE_ROWS; i++) {
        const ivec sum = *(const ivec *)sums[i];
        const vec value = rests ? value_with_rest(sum, *(const ivec *)rests[i]) : __builtin_convertvector(sum, vec);
        acc[i] = fma_(value, scale * splat(x_scales[i]), acc[i]);
        if (has_offsets) acc[i] = fma_(splat(x_scales[STRIP + i]), offset, acc[i]);
    }
}

// Adds a stretch to a tile [16][16] of y. The first argument is a constant.
INLINE void add_stretch(int has_offsets, const tile_place *p) {
    const quantised_call *c = p->call;
    const int64_t last = p->blocks, block_bytes = STRIP * (int64_t)ROW_BYTES;
    const int64_t column = p->panel * TILE, count = c->weight->out - column;
    if (p->is_last)  // results are on their way to the cache while the sums are made
        for (int i = 0; i < p->rows; i++) __builtin_prefetch(c->y + (p->row + i) * c->ldy + column, 1);
    const activation_block start = block_of(c, p->row, p->first_block);
    const int8_t *x = start.codes[0];
    const uint8_t *codes = p->stretch->codes[0][0][0];
    const float *scales = p->stretch->scales[0], *offsets = p->stretch->offsets[0];
    const uint8_t *with_rests = c->has_rests + p->row / STRIP * c->blocks + p->first_block;
    _Alignas(64) block_sums sums[2], rests[2];
    float *y = c->y + p->row * c->ldy + column;
    vec acc[TILE_ROWS];
    UNROLLED for (int i = 0; i < TILE_ROWS; i++)
        acc[i] = p->first_block && i < p->rows ? read_part(y + i * c->ldy, count) : (vec){};
#define ADD_BLOCK(INDEX, SUMS, RESTS)                                                                                          \
    add_block(has_offsets, (const float *)((const uint8_t *)start.scales + (INDEX) * block_bytes),                             \
              scales + (INDEX) * TILE, offsets + (INDEX) * TILE, SUMS, RESTS, acc);
#define ADD(INDEX, PLACE)                                                                                                      \
    if (__builtin_expect(with_rests[INDEX], 0))                                                                                \
        ADD_BLOCK(INDEX, sums[PLACE], rests[PLACE])                                                                            \
    else                                                                                                                       \
        ADD_BLOCK(INDEX, sums[PLACE], NULL)
    // While the vector unit adds one block, the matrix unit multiplies the next.
    MULTIPLY(0, 4, 6, 0, 0)
    int64_t index = 0;
    for (; index + 2 < last; index += 2) {
        if (p->ahead) fetch_block(p->ahead, index);
        if (p->ahead) fetch_block(p->ahead, index + 1);
        MULTIPLY(1, 5, 7, index + 1, 1)
        ADD(index, 0)
        MULTIPLY(0, 4, 6, index + 2, 0)
        ADD(index + 1, 1)
    }
    if (index + 1 < last) MULTIPLY(1, 5, 7, index + 1, 1)
    ADD(index, 0)
    if (index + 1 < last) {
        ADD(index + 1, 1)
    }
    UNROLLED for (int i = 0; i < TILE_ROWS; i++)
        if (i < p->rows) write_part(y + i * c->ldy, count, p->is_last ? finish(c->weight, column, acc[i]) : acc[i]);
}

static void add_plain(const tile_place *p) { add_stretch(0, p); }
static void add_with_offsets(const tile_place *p) { add_stretch(1, p); }

void multiply_by_matrices(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
    void (*add)(const tile_place *) = c->weight->offsets ? add_with_offsets : add_plain;
    unpacked stretch;
    tile_place place = {.call = c, .stretch = &stretch};
    configure();
    for (place.panel = first_panel; place.panel < last_panel; place.panel++)
        for (place.first_block = 0; place.first_block < c->blocks; place.first_block += STRETCH) {
            int64_t left = c->blocks - place.first_block;
            place.blocks = left < STRETCH ? left : STRETCH;
            place.is_last = left <= STRETCH;
            unpack(1, c, place.panel, place.first_block, place.blocks, &stretch);
            const stretch_ahead ahead = find_ahead(c, place.panel, place.first_block + place.blocks);
            for (place.row = first; place.row < last; place.row += TILE_ROWS) {
                place.ahead = place.row == first ? &ahead : NULL;
                place.rows = last - place.row < TILE_ROWS ? last - place.row : TILE_ROWS;
                add(&place);
            }
        }
    _tile_release();
}
#endif
