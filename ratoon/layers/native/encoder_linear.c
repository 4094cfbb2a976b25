// y = activation(x · Wᵀ + bias) for encoders, whose sequences run whole: by the matrix unit of x86 (AMX), where there is one.
//
// The matrix unit multiplies numbers in bf16, which have 8 bits, and sums in float32. So a float becomes a sum of two numbers in bf16,
// its parts: the nearest one, and the one nearest to what is left. Together they have 16 of its 24 bits. Of the four products of
// parts three are made; the one of both second parts is as small as what was left out. A result differs from that of float32 by some
// 2^-19 of the size of its terms, and takes half the time or less. Weights in bf16 have one part, and are multiplied as they are.
//
// A result is a sum over stretches of MOST_DEPTH inputs, each of which is summed by the matrix unit in the order of the inputs, whatever
// rows are beside it and however many: a row has the same bits in any batch. They are not the bits of ratoon_linear, which is the
// faster one for a row or two; so a weight is multiplied by one of both, always.
#include <stdatomic.h>

#include "activations.h"
#include "kernels.h"
#include "packed.h"
#include "room.h"
#include "threads.h"

#define SIDE 16  // rows of a tile, and columns of 4 bytes

#if defined(__AMX_TILE__) && W == SIDE
#include <cpuid.h>

#include "matrix_unit.h"

#define WITH_BF16 __attribute__((target("amx-bf16")))
#define DEPTH 32        // numbers of a tile's row in bf16: a step
#define MOST_DEPTH 512  // inputs that are multiplied at a time
#define MOST_STEPS (MOST_DEPTH / DEPTH)
#define PARTS 2
#define ROW_BLOCK 256  // rows whose parts are in the second-level cache, 512 KB, while all columns of a unit are multiplied
#define SMALLEST_ROW_BLOCK 128
#define UNITS_PER_THREAD 2
#define SMALLEST_UNIT 6  // panels: fewer would not be worth the making of the parts of rows

typedef uint32_t pairs[SIDE][SIDE];    // of numbers in bf16: a tile
typedef pairs parts_of_step[PARTS];

typedef struct {
    const float *x;
    const char *weight;  // panels
    const float *bias;
    float *y;
    int64_t ldx, ldy, rows, in, out, panels, block_rows, panels_per_unit, units_per_block;
    int format, activation;
    atomic_int failed;
} encoder_call;

// The parts of numbers, in the upper halves, each rounded to the nearest.
INLINE void split(vec x, uvec parts[PARTS]) {
    parts[0] = ((uvec)x + 0x8000u) & 0xffff0000u;
    parts[1] = ((uvec)(x - (vec)parts[0]) + 0x8000u) & 0xffff0000u;
}

// The upper halves of 32 numbers, in their order.
INLINE uvec halves_of(uvec first, uvec second) {
    const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                           19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (uvec)_mm512_permutex2var_epi16((__m512i)first, order, (__m512i)second);
}

INLINE int64_t steps_of(int64_t depth) { return (depth + DEPTH - 1) / DEPTH; }

// Rows of x as tiles of [row][two inputs], from input `first` on; zeros behind the last row and the last input.
static void split_rows(const encoder_call *c, int64_t row, int64_t rows, int64_t first, int64_t depth, parts_of_step *to) {
    const int64_t steps = steps_of(depth);
    for (int64_t i = 0; i < (rows + SIDE - 1) / SIDE * SIDE; i++) {
        const float *x = c->x + (row + i) * c->ldx + first;
        for (int64_t step = 0; step < steps; step++) {
            const int64_t left = i < rows ? depth - step * DEPTH : 0;
            uvec low[PARTS], high[PARTS];
            split(left > 0 ? read_part(x + step * DEPTH, left) : (vec){}, low);
            split(left > W ? read_part(x + step * DEPTH + W, left - W) : (vec){}, high);
            UNROLLED for (int p = 0; p < PARTS; p++)
                *(uvec *)to[i / SIDE * steps + step][p][i % SIDE] = halves_of(low[p], high[p]);
        }
    }
}

// A panel as tiles of [two inputs][column].
INLINE void split_panel_of(int format, const char *panel, int64_t depth, parts_of_step *to) {
    for (int64_t k = 0; k < steps_of(depth) * DEPTH; k += 2) {
        uvec even[PARTS], odd[PARTS];
        split(k < depth ? load_as(format, panel, k * TILE) : (vec){}, even);
        split(k + 1 < depth ? load_as(format, panel, (k + 1) * TILE) : (vec){}, odd);
        UNROLLED for (int p = 0; p < PARTS; p++) *(uvec *)to[k / DEPTH][p][k % DEPTH / 2] = even[p] >> 16 | odd[p];
    }
}

static void split_panel(const encoder_call *c, int64_t panel, int64_t first, int64_t depth, parts_of_step *to) {
    const char *from = c->weight + (panel * c->in + first) * TILE * bytes_of(c->format);
    if (c->format == FLOATS)
        split_panel_of(FLOATS, from, depth, to);
    else if (c->format == BF16)
        split_panel_of(BF16, from, depth, to);
    else
        split_panel_of(FP16, from, depth, to);
}

// What is fetched while a tile is multiplied: the next panel, so many cache lines in a step, and where the results go, so many rows.
typedef struct {
    const char *from;
    int64_t lines;
    const float *results;
    int64_t ldy, rows;
} fetching;

static void configure(void) {
    tile_config config = {.palette = TILE_PALETTE};
    set_shape(&config, 0, 8, SIDE, 4 * SIDE);
    _tile_loadconfig(&config);
}

// Registers 0 to 3 hold sums [row tile][panel], 4 and 5 parts of rows, 6 and 7 those of panels. A register is loaded anew once its last
// product is under way, and other products are made before its next one: with two threads on a core there is no other register to
// load into meanwhile, and a product would wait for each load.
#define ROW(TILE_OF_ROWS, STEP, PART) \
    if ((TILE_OF_ROWS) < tiles) _tile_loadd(4 + (TILE_OF_ROWS), rows[TILE_OF_ROWS][STEP][PART], 4 * SIDE);
#define PANEL(NUMBER, STEP, PART) _tile_loadd(6 + (NUMBER), panels[NUMBER][STEP][PART], 4 * SIDE);
#define MULTIPLY(TILE_OF_ROWS, NUMBER) \
    if ((TILE_OF_ROWS) < tiles) _tile_dpbf16ps(2 * (TILE_OF_ROWS) + (NUMBER), 4 + (TILE_OF_ROWS), 6 + (NUMBER));
// All products of what is loaded, and then other parts of the same panels, of the same rows, or of the next step.
#define MULTIPLY_THEN_PANELS(PART) \
    MULTIPLY(0, 0) MULTIPLY(1, 0) PANEL(0, step, PART) MULTIPLY(0, 1) MULTIPLY(1, 1) PANEL(1, step, PART)
#define MULTIPLY_THEN_ROWS(PART) MULTIPLY(0, 0) MULTIPLY(0, 1) ROW(0, step, PART) MULTIPLY(1, 0) MULTIPLY(1, 1) ROW(1, step, PART)
#define MULTIPLY_THEN_STEP(STEP, PART)                                                                                   \
    MULTIPLY(0, 0) MULTIPLY(0, 1) ROW(0, STEP, 0) MULTIPLY(1, 0) PANEL(0, STEP, PART) MULTIPLY(1, 1) ROW(1, STEP, 0)      \
        PANEL(1, STEP, PART)

// sums [row tile][panel] of one or two tiles of rows with two panels. `tiles` and `weight_parts` are constants.
INLINE WITH_BF16 void multiply_of(int tiles, int weight_parts, const parts_of_step *const rows[2],
                                  const parts_of_step *const panels[2], int64_t steps, fetching *ahead,
                                  float sums[2][2][SIDE][SIDE]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    ROW(0, 0, 0) ROW(1, 0, 0) PANEL(0, 0, weight_parts - 1) PANEL(1, 0, weight_parts - 1)
    for (int64_t step = 0; step < steps; step++) {
        for (int64_t i = 0; i < ahead->lines; i++, ahead->from += 64) __builtin_prefetch(ahead->from, 0, 2);
        for (int64_t i = 0; i < ahead->rows; i++, ahead->results += ahead->ldy) {
            __builtin_prefetch(ahead->results, 1, 3);
            __builtin_prefetch(ahead->results + TILE, 1, 3);
        }
        const int64_t next = step + 1 < steps ? step + 1 : step;
        if (weight_parts > 1) {
            MULTIPLY_THEN_PANELS(0)
        }
        MULTIPLY_THEN_ROWS(1)
        MULTIPLY_THEN_STEP(next, weight_parts - 1)
    }
    _tile_stored(0, sums[0][0], 4 * SIDE);
    _tile_stored(1, sums[0][1], 4 * SIDE);
    if (tiles == 2) _tile_stored(2, sums[1][0], 4 * SIDE);
    if (tiles == 2) _tile_stored(3, sums[1][1], 4 * SIDE);
}

#define MULTIPLY_OF(TILES, WEIGHT_PARTS)                                                                                     \
    WITH_BF16 static void multiply_##TILES##_##WEIGHT_PARTS(const parts_of_step *const rows[2],                              \
                                                            const parts_of_step *const panels[2], int64_t steps,             \
                                                            fetching *ahead, float sums[2][2][SIDE][SIDE]) {                 \
        multiply_of(TILES, WEIGHT_PARTS, rows, panels, steps, ahead, sums);                                                  \
    }
MULTIPLY_OF(1, 1) MULTIPLY_OF(1, 2) MULTIPLY_OF(2, 1) MULTIPLY_OF(2, 2)

typedef void (*multiply_function)(const parts_of_step *const rows[2], const parts_of_step *const panels[2], int64_t steps,
                                  fetching *ahead, float sums[2][2][SIDE][SIDE]);

static multiply_function function_for(int tiles, int format) {
    if (format == BF16) return tiles == 2 ? multiply_2_1 : multiply_1_1;
    return tiles == 2 ? multiply_2_2 : multiply_1_2;
}

// What is done with the sums of a stretch of the inputs: they are added to those before it, and behind the last one come bias and
// activation.
INLINE void finish_rows(int activation, const encoder_call *c, int64_t row, int64_t rows, int64_t panel, int is_first, int is_last,
                        float sums[2][2][SIDE][SIDE]) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < 2; j++) {
            const int64_t column = (panel + j) * TILE, count = c->out - column;
            if (count <= 0) continue;
            float *y = c->y + (row + i) * c->ldy + column;
            vec v = load(sums[i / SIDE][j][i % SIDE]);
            if (!is_first) v += read_part(y, count);
            if (is_last && c->bias) v += read_part(c->bias + column, count);
            write_part(y, count, is_last ? activate(activation, v) : v);
        }
}

#define FINISH_OF(NAME, KIND)                                                                                                \
    static void finish_##NAME(const encoder_call *c, int64_t row, int64_t rows, int64_t panel, int is_first, int is_last,    \
                              float sums[2][2][SIDE][SIDE]) {                                                                \
        finish_rows(KIND, c, row, rows, panel, is_first, is_last, sums);                                                     \
    }
FINISH_OF(plain, -1) FINISH_OF(silu, 0) FINISH_OF(relu, 1) FINISH_OF(gelu_tanh, 2) FINISH_OF(gelu_exact, 3)
FINISH_OF(gelu_quick, 4)

typedef void (*finish_function)(const encoder_call *, int64_t, int64_t, int64_t, int, int, float[2][2][SIDE][SIDE]);

static finish_function finish_for(int activation) {
    static const finish_function functions[] = {finish_silu, finish_relu, finish_gelu_tanh, finish_gelu_exact, finish_gelu_quick};
    return activation < 0 ? finish_plain : functions[activation];
}

// All panels of a unit with the rows of a block and a stretch of the inputs, whose parts are in `rows`.
static void multiply_stretch(const encoder_call *c, int64_t row, int64_t num_rows, int64_t first_panel, int64_t last_panel,
                             int64_t first, int64_t depth, const parts_of_step *rows) {
    const finish_function finish = finish_for(c->activation);
    const int64_t steps = steps_of(depth), tiles = (num_rows + SIDE - 1) / SIDE, panel_bytes = c->in * TILE * bytes_of(c->format);
    const int is_first = first == 0, is_last = first + depth == c->in;
    _Alignas(64) parts_of_step panels[2][MOST_STEPS];
    _Alignas(64) float sums[2][2][SIDE][SIDE];
    const parts_of_step *const both[2] = {panels[0], panels[1]};
    for (int64_t panel = first_panel; panel < last_panel; panel += 2) {
        split_panel(c, panel, first, depth, panels[0]);
        if (panel + 1 < last_panel)
            split_panel(c, panel + 1, first, depth, panels[1]);
        else
            memset(panels[1], 0, sizeof panels[1]);
        for (int64_t tile = 0; tile < tiles; tile += 2) {
            // The first half of the tiles fetches the next panel, the second the one behind it.
            const int64_t half = (tiles + 3) / 4, next = panel + (tile / 2 < half ? 2 : 3);
            fetching ahead = {c->weight + first * TILE * bytes_of(c->format) + next * panel_bytes, 0,
                              c->y + (row + tile * SIDE) * c->ldy + panel * TILE, c->ldy, (2 * SIDE + steps - 1) / steps};
            if (next < last_panel) {
                const int64_t bytes = depth * TILE * bytes_of(c->format), slots = half * steps, own = tile / 2 % half;
                ahead.lines = (bytes / 64 + slots - 1) / slots;
                ahead.from += own * steps * ahead.lines * 64;
            }
            const parts_of_step *const own[2] = {rows + tile * steps, rows + (tile + 1) * steps};
            const int64_t left = num_rows - tile * SIDE;
            function_for(left > SIDE ? 2 : 1, c->format)(own, both, steps, &ahead, sums);
            finish(c, row + tile * SIDE, left < 2 * SIDE ? left : 2 * SIDE, panel, is_first, is_last, sums);
        }
    }
}

static void encoder_unit(void *context, int64_t unit) {
    static _Thread_local room room_of_rows;
    encoder_call *c = context;
    const int64_t row = unit / c->units_per_block * c->block_rows, left = c->rows - row;
    const int64_t rows = left < c->block_rows ? left : c->block_rows;
    const int64_t first_panel = unit % c->units_per_block * c->panels_per_unit, end = first_panel + c->panels_per_unit;
    const int64_t tiles = (rows + SIDE - 1) / SIDE, deepest = c->in < MOST_DEPTH ? c->in : MOST_DEPTH;
    parts_of_step *parts = at_least(&room_of_rows, (size_t)(tiles * steps_of(deepest)) * sizeof(parts_of_step));
    if (!parts) {
        atomic_store(&c->failed, 1);
        return;
    }
    configure();
    for (int64_t first = 0; first < c->in; first += MOST_DEPTH) {
        const int64_t depth = c->in - first < MOST_DEPTH ? c->in - first : MOST_DEPTH;
        split_rows(c, row, rows, first, depth, parts);
        multiply_stretch(c, row, rows, first_panel, end < c->panels ? end : c->panels, first, depth, parts);
    }
    _tile_release();
}

// Large blocks of rows, since the parts of a panel are made for each; columns are divided only if there are too few blocks.
static void divide(encoder_call *c) {
    const int64_t wanted = thread_count() > 1 ? UNITS_PER_THREAD * thread_count() : 1;
    c->block_rows = ROW_BLOCK;
    while (c->block_rows > SMALLEST_ROW_BLOCK && (c->rows + c->block_rows - 1) / c->block_rows < wanted) c->block_rows /= 2;
    const int64_t blocks = (c->rows + c->block_rows - 1) / c->block_rows;
    const int64_t groups = (wanted + blocks - 1) / blocks;
    c->panels_per_unit = (c->panels + groups - 1) / groups;
    if (c->panels_per_unit < SMALLEST_UNIT) c->panels_per_unit = SMALLEST_UNIT;
    c->panels_per_unit += c->panels_per_unit % 2;
    c->units_per_block = (c->panels + c->panels_per_unit - 1) / c->panels_per_unit;
}

// The set of kernels was built for processors that multiply 8 bits by matrices; this asks for bf16.
static int has_matrices(void) {
    static atomic_int known;  // 1: no, 2: yes
    if (!atomic_load(&known)) {
        unsigned a, b, c, d = 0;
        atomic_store(&known, __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 ? 2 : 1);
    }
    return atomic_load(&known) == 2;
}

static int multiply_by_parts(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                             const float *bias, int activation, float *y, int64_t ldy) {
    const packed_header *header = (const packed_header *)packed;
    encoder_call c = {.x = x, .weight = (const char *)(header + 1), .bias = bias, .y = y, .ldx = ldx, .ldy = ldy, .rows = rows,
                      .in = in, .out = out, .panels = panels_of(out), .format = header->format, .activation = activation};
    divide(&c);
    parallel_units(encoder_unit, &c, c.units_per_block * ((rows + c.block_rows - 1) / c.block_rows));
    return atomic_load(&c.failed) ? -1 : 0;
}
#else
static int has_matrices(void) { return 0; }

static int multiply_by_parts(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                             const float *bias, int activation, float *y, int64_t ldy) {
    (void)x, (void)ldx, (void)rows, (void)packed, (void)in, (void)out, (void)bias, (void)activation, (void)y, (void)ldy;
    return -1;
}
#endif

int ratoon_encoder_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out, const float *bias,
                          int activation, float *y, int64_t ldy) {
    if (has_matrices()) return multiply_by_parts(x, ldx, rows, packed, in, out, bias, activation, y, ldy);
    linear_with_activation(x, ldx, rows, packed, in, out, bias, activation, y, ldy);
    return 0;
}

int ratoon_has_encoder_matrices(void) { return has_matrices(); }
