// y = x · Wᵀ + bias with W in 4 or 8 bits (quantised.h) and x rounded to 8 bits.
//
// The products of a group are summed as integers, exactly; then groups are added in order, each by one fused multiply-add
// (and another one for its offset). So a row comes out the same, to the bit, in a tile of any height, on any number of
// threads, and with every instruction set.
#include "quantised_call.h"

#include <math.h>

#include "jobs.h"
#include "room.h"
#include "threads.h"

#define MAX_TILE_ROWS (W == 16 ? 8 : 4)
#define VECS_OF(rows) ((rows) == 1 ? TILE_VECS : (rows) == 2 && W < 16 ? 2 : 1)  // of columns, in a tile of so many rows
#define FETCH_AHEAD 4096  // bytes of codes
#define CACHE_LINE 64
#define UNITS_PER_THREAD 8
#define ROW_BLOCK 96            // rows that are multiplied with a panel while they are in the second-level cache
#define SMALLEST_MAXIMUM 1e-30f  // a group below this is zero: 127 / maximum would overflow

void ratoon_silu_and_mul(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width);

int64_t ratoon_quantised_scratch(int64_t in) {
    const int64_t flags = sizeof(int32_t);  // more than has_rests needs, so that a row's bytes stay aligned
    return in / QUANTISED_BLOCK * ((int64_t)(ROW_BYTES + REST_BYTES) + flags);
}

static int zero_of(const quantised_weight *w) { return w->bits == 8 ? ZERO_OF_8 : w->offsets ? 0 : 8; }

// Sums of the first and the second half of a block.
static void sum_halves(const int8_t *codes, int32_t sums[2]) {
    sums[0] = sums[1] = 0;
    for (int k = 0; k < QUANTISED_BLOCK / 2; k++) sums[0] += codes[k];
    for (int k = QUANTISED_BLOCK / 2; k < QUANTISED_BLOCK; k++) sums[1] += codes[k];
}

// A block's numbers times a factor, rounded, and the sums of its halves.
INLINE void round_block(const float *x, float factor, int8_t *codes, int32_t sums[2]) {
#if defined(__AVX512F__)
    UNROLLED for (int half = 0; half < 2; half++) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * half), _mm512_set1_ps(factor)));
        _mm_storeu_si128((__m128i *)(codes + 16 * half), _mm512_cvtepi32_epi8(rounded));
        sums[half] = _mm512_reduce_add_epi32(rounded);
    }
#else
    for (int k = 0; k < QUANTISED_BLOCK; k++) codes[k] = (int8_t)rintf(x[k] * factor);
    sum_halves(codes, sums);
#endif
}

static void write_shifts(const int32_t sums[2], int zero, int64_t groups, int64_t height, int32_t *shifts) {
    shifts[0] = -zero * (groups == 2 ? sums[0] : sums[0] + sums[1]);
    shifts[height] = -zero * sums[1];  // of the second group, if there is one
}

// One row of a block; returns the scale. With a NaN or an infinity in it the scale is NaN, and so are the row's results.
INLINE float quantise_block(const float *x, int zero, int64_t groups, int64_t height, const activation_block *to) {
    const uint32_t largest = largest_of(x, QUANTISED_BLOCK);
    const float maximum = float_of(largest);
    const int usable = largest < 0x7f800000 && maximum >= SMALLEST_MAXIMUM;
    const float factor = usable ? 127.0f / maximum : 0.0f;
    const float scale = usable ? maximum / 127.0f : largest < 0x7f800000 ? 0.0f : NAN;
    int32_t sums[2] = {0, 0};
    if (usable)
        round_block(x, factor, to->codes[0], sums);
    else
        memset(to->codes[0], 0, QUANTISED_BLOCK);
    *to->scales = scale;
    *to->scaled_sums = scale * (float)(sums[0] + sums[1]);
    write_shifts(sums, zero, groups, height, to->shifts);
    return scale;
}

#if defined(__AVX512F__)
#define TOGETHER 4  // blocks of a row that are rounded together: what takes long for one, its maximum and sums, is done for all

// Lane i of the result is vector i, its lanes put together by OP: within 128 bits first, then those.
#define REDUCE_FOUR(NAME, OP_512, OP_256, OP_128)                                                                              \
    INLINE __m128i NAME(const __m512i v[TOGETHER]) {                                                                           \
        const __m512i a = OP_512(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));                        \
        const __m512i b = OP_512(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));                        \
        const __m512i all = OP_512(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                                  \
        const __m256i half = OP_256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));                           \
        return OP_128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));                                        \
    }
REDUCE_FOUR(largest_of_four, _mm512_max_epu32, _mm256_max_epu32, _mm_max_epu32)
REDUCE_FOUR(sums_of_four, _mm512_add_epi32, _mm256_add_epi32, _mm_add_epi32)

// The same as quantise_block for each of them. Leaves `to` behind them, and writes their scales.
INLINE void quantise_blocks(const float *x, int zero, int64_t groups, int64_t height, int64_t step, activation_block *to,
                            float scales[TOGETHER]) {
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    __m512i sizes[TOGETHER], first[TOGETHER], second[TOGETHER];
    UNROLLED for (int i = 0; i < TOGETHER; i++) {
        const float *block = x + i * QUANTISED_BLOCK;
        const __m512i a = _mm512_loadu_si512(block), b = _mm512_loadu_si512(block + 16);
        sizes[i] = _mm512_max_epu32(_mm512_and_si512(a, sign), _mm512_and_si512(b, sign));
    }
    const __m128i largest = largest_of_four(sizes);
    const __m128 maximum = _mm_castsi128_ps(largest), full = _mm_set1_ps(127.0f);
    const __mmask8 finite = _mm_cmplt_epi32_mask(largest, _mm_set1_epi32(0x7f800000));
    const __mmask8 usable = _mm_mask_cmp_ps_mask(finite, maximum, _mm_set1_ps(SMALLEST_MAXIMUM), _CMP_GE_OQ);
    const __m128 scale = _mm_mask_div_ps(_mm_maskz_mov_ps((__mmask8)~finite, _mm_set1_ps(NAN)), usable, maximum, full);
    float factors[TOGETHER];
    _mm_storeu_ps(factors, _mm_maskz_div_ps(usable, full, maximum));
    UNROLLED for (int i = 0; i < TOGETHER; i++) {
        const float *block = x + i * QUANTISED_BLOCK;
        const __m512 factor = _mm512_set1_ps(factors[i]);
        const __mmask16 keep = (__mmask16)-(usable >> i & 1);
        first[i] = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(_mm512_loadu_ps(block), factor));
        second[i] = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(_mm512_loadu_ps(block + 16), factor));
    }
    const __m128i of_first = sums_of_four(first), of_second = sums_of_four(second), sum = _mm_add_epi32(of_first, of_second);
    const __m128i shift = _mm_set1_epi32(-zero);
    float scaled_sums[TOGETHER];
    int32_t shifts[2][TOGETHER];
    _mm_storeu_ps(scales, scale);
    _mm_storeu_ps(scaled_sums, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum)));
    _mm_storeu_si128((__m128i *)shifts[0], _mm_mullo_epi32(groups == 2 ? of_first : sum, shift));
    _mm_storeu_si128((__m128i *)shifts[1], _mm_mullo_epi32(of_second, shift));
    UNROLLED for (int i = 0; i < TOGETHER; i++) {
        _mm_storeu_si128((__m128i *)to->codes[0], _mm512_cvtepi32_epi8(first[i]));
        _mm_storeu_si128((__m128i *)(to->codes[0] + 16), _mm512_cvtepi32_epi8(second[i]));
        *to->scales = scales[i];
        *to->scaled_sums = scaled_sums[i];
        to->shifts[0] = shifts[0][i];
        to->shifts[height] = shifts[1][i];
        go_on(to, step);
    }
}
#endif

// What the codes of a row's block left, for a block whose numbers are not all zero.
static void quantise_rest(const quantised_call *c, int64_t row, int64_t block) {
    uint8_t *flag = c->has_rests + row / c->height * c->blocks + block;
    if (!c->shares_strips && !*flag)
        memset(rests_of(c, row / c->height * c->height, block).shifts, 0, (size_t)c->height * REST_BYTES);
    __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
    const float *x = c->x + row * c->ldx + block * QUANTISED_BLOCK;
    const activation_block from = block_of(c, row, block);
    const rest_block to = rests_of(c, row, block);
    const float factor = 127.0f / float_of(largest_of(x, QUANTISED_BLOCK));
    int32_t sums[2], rest_sums[2];
    for (int k = 0; k < QUANTISED_BLOCK; k++)
        to.codes[0][k] = (int8_t)rintf(__builtin_fmaf(x[k], factor, -(float)from.codes[0][k]) * REST_STEPS);
    sum_halves(from.codes[0], sums);
    sum_halves(to.codes[0], rest_sums);
    const int32_t sum = (sums[0] + sums[1]) * REST_STEPS + rest_sums[0] + rest_sums[1];
    *from.scaled_sums = *from.scales * ((float)sum * (1.0f / REST_STEPS));
    write_shifts(rest_sums, zero_of(c->weight), c->groups, c->height, to.shifts);
}

// A row that has none, in a strip where another thread may find one for another row.
static void clear_rests(const quantised_call *c, int64_t row) {
    const int64_t blocks = c->blocks, height = c->height, step = height * (int64_t)REST_BYTES;
    rest_block to = rests_of(c, row, 0);
    for (int64_t block = 0; block < blocks; block++) {
        to.shifts[0] = to.shifts[height] = 0;
        memset(to.codes[0], 0, QUANTISED_BLOCK);
        go_on_rests(&to, step);
    }
}

// Rounding errors follow the largest number of a block, so that few blocks with outliers make most of the error of a product:
// these get rests.
static void quantise_row(const quantised_call *c, int64_t row) {
    const int64_t blocks = c->blocks, groups = c->groups, height = c->height, step = height * (int64_t)ROW_BYTES;
    const float *x = c->x + row * c->ldx;
    const int zero = zero_of(c->weight);
    float squares = 0;
    if (c->shares_strips) clear_rests(c, row);
    activation_block to = block_of(c, row, 0);
    const char *scales = (const char *)to.scales;
    int64_t block = 0;
#if defined(TOGETHER)
    for (; block + TOGETHER <= blocks; block += TOGETHER) {
        float of_blocks[TOGETHER];
        quantise_blocks(x + block * QUANTISED_BLOCK, zero, groups, height, step, &to, of_blocks);
        UNROLLED for (int i = 0; i < TOGETHER; i++) squares = __builtin_fmaf(of_blocks[i], of_blocks[i], squares);
    }
#endif
    for (; block < blocks; block++) {
        const float scale = quantise_block(x + block * QUANTISED_BLOCK, zero, groups, height, &to);
        squares = __builtin_fmaf(scale, scale, squares);
        go_on(&to, step);
    }
    const float limit = squares * (QUANTISED_LARGE / (float)blocks);
    for (block = 0; block < blocks; block++, scales += step) {
        const float scale = *(const float *)scales;
        if (scale * scale > limit) quantise_rest(c, row, block);
    }
}

// Rows behind the last of a strip, which the matrix unit computes too: with numbers left there by other work, these sums might
// be subnormal, which processors take a hundred cycles for.
static void clear_rows(const quantised_call *c, int64_t row, int64_t count) {
    for (int64_t block = 0; block < c->blocks; block++) {
        const activation_block to = block_of(c, row, block);
        memset(to.scales, 0, (size_t)count * sizeof(float));
        memset(to.scaled_sums, 0, (size_t)count * sizeof(float));
    }
}

// Some rows of one strip.
static void quantise_unit(void *context, int64_t unit) {
    const quantised_call *c = context;
    const int64_t first = unit * c->rows_per_unit, left = c->rows - first;
    const int64_t last = first + (left < c->rows_per_unit ? left : c->rows_per_unit);
    for (int64_t row = first; row < last; row++) quantise_row(c, row);
    if (last > c->matrix_rows) return;
    if (last == c->rows && last % STRIP) clear_rows(c, last, STRIP - last % STRIP);
#if PAIRED_ROWS
    for (int64_t block = 0; block < c->blocks; block++) {
        pair_rows(block_of(c, first, block).codes, last - first);
        if (c->shares_strips || has_rests(c, first, block)) pair_rows(rests_of(c, first, block).codes, last - first);
    }
#endif
}

// A strip for each unit, or parts of it where that leaves threads without work: an even number of rows, since the matrix
// instruction of ARM has pairs.
static void quantise(quantised_call *c, int64_t strips) {
    c->rows_per_unit = c->height;
    while (c->rows_per_unit > 2 && (c->rows + c->rows_per_unit - 1) / c->rows_per_unit < thread_count())
        c->rows_per_unit = (c->rows_per_unit / 2 + 1) / 2 * 2;
    c->shares_strips = c->rows_per_unit < c->height;
    memset(c->has_rests, 0, (size_t)(strips * c->blocks));
    parallel_units(quantise_unit, c, (c->rows + c->rows_per_unit - 1) / c->rows_per_unit);
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

// Sums of a group of the rows of a tile: codes or rests, and their shifts.
INLINE void sum_group(int rows, int bits, int first, int last, const bvec quads[QUADS], const int8_t (*codes)[QUANTISED_BLOCK],
                      const int32_t *shifts, ivec sums[MAX_TILE_ROWS]) {
    UNROLLED for (int i = 0; i < rows; i++) sums[i] = begin_sum(bits, shifts[i]);
    UNROLLED for (int b = first; b < last; b++)
        UNROLLED for (int i = 0; i < rows; i++)
            sums[i] = dot(bits, sums[i], quads[b], load_quads(codes[i] + b / 4 * 16), b % 4);
    UNROLLED for (int i = 0; i < rows; i++) sums[i] = end_sum(bits, sums[i], shifts[i]);
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
            const rest_block rest = rests_of(c, row, block);
            const int with_rests = has_rests(c, row, block);
            const uint16_t *block_scales = scales + block * groups * TILE + j * W;
            const uint16_t *block_offsets = offsets + block * TILE + j * W;
            if (j == 0)
                fetch_ahead(block_bytes, groups, has_offsets, codes + block * block_bytes, block_scales, block_offsets);
            UNROLLED for (int v = 0; v < vecs; v++) {
                bvec quads[QUADS];
                load_block(bits, codes + block * block_bytes, j + v, quads);
                UNROLLED for (int g = 0; g < groups; g++) {
                    const int first = g * group / 4, last = (g + 1) * group / 4;
                    vec scale = load_halves(block_scales + g * TILE + v * W), values[MAX_TILE_ROWS];
                    ivec sums[MAX_TILE_ROWS], rests[MAX_TILE_ROWS];
                    sum_group(rows, bits, first, last, quads, x.codes, x.shifts + g * height, sums);
                    UNROLLED for (int i = 0; i < rows; i++) values[i] = __builtin_convertvector(sums[i], vec);
                    if (with_rests) {
                        sum_group(rows, bits, first, last, quads, rest.codes, rest.shifts + g * height, rests);
                        UNROLLED for (int i = 0; i < rows; i++) values[i] = value_with_rest(sums[i], rests[i]);
                    }
                    UNROLLED for (int i = 0; i < rows; i++)
                        acc[i][v] = fma_(values[i], scale * splat(x.scales[i]), acc[i][v]);
                }
                if (has_offsets) {
                    vec offset = load_halves(block_offsets + v * W);
                    UNROLLED for (int i = 0; i < rows; i++)
                        acc[i][v] = fma_(splat(x.scaled_sums[i]), offset, acc[i][v]);
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
            int64_t end = row - row % c->height + c->height;  // of the strip
            int64_t left = (end < last ? end : last) - row;
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
    int64_t matrix_row = last_row < c->matrix_rows ? last_row : c->matrix_rows;
    if (first_row < matrix_row) {
#if defined(__AMX_INT8__)
        multiply_by_matrices(c, first_row, matrix_row, first, last);
#elif PAIRED_ROWS
        multiply_by_pairs(c, first_row, matrix_row, first, last);
#endif
        first_row = matrix_row;
    }
    if (first_row < last_row && c->kernel == UNPACKED)
        multiply_many_rows(c, first_row, last_row, first, last);
    else if (first_row < last_row)
        multiply_few_rows(c, first_row, last_row, first, last);
}

static int has_matrices(const quantised_weight *w) {
#if defined(__AMX_INT8__)
    return w->group == QUANTISED_BLOCK;  // with shorter groups most of the matrix unit would be idle
#else
    (void)w;
    return PAIRED_ROWS;
#endif
}

// From how many rows on, where nothing was measured.
#define MATRICES_FROM 9
#define UNPACK_FROM (W == 16 ? 49 : 9)  // three strips: registers have the tiles of half a strip, and few of them unpack again

int64_t ratoon_quantised_kernel(const quantised_weight *weight, int64_t rows) {
    const int64_t matrices_from = weight->matrices_from > 0 ? weight->matrices_from : MATRICES_FROM;
    const int64_t unpack_from = weight->unpack_from > 0 ? weight->unpack_from : UNPACK_FROM;
    if (has_matrices(weight) && rows >= matrices_from) return MATRICES;
    return rows >= unpack_from ? UNPACKED : IN_REGISTERS;
}

// The matrix unit takes as long for one row of a strip as for all. So rows behind the last whole strip are multiplied as so many
// rows are by themselves.
static void choose_kernel(quantised_call *c) {
    c->kernel = (int)ratoon_quantised_kernel(c->weight, c->rows);
    if (c->kernel != MATRICES) return;
    const int64_t behind = c->rows % STRIP;
    c->matrix_rows = c->rows;
    if (c->rows < STRIP || ratoon_quantised_kernel(c->weight, behind) == MATRICES) return;
    c->kernel = (int)ratoon_quantised_kernel(c->weight, behind);
    c->matrix_rows -= behind;
}

// The call of a product, before its panels are divided among units.
static quantised_call call_of(const quantised_weight *weight, const float *x, int64_t ldx, int64_t rows, void *scratch, float *y,
                              int64_t ldy) {
    quantised_call c = {.weight = weight, .x = x, .y = y, .ldx = ldx, .ldy = ldy, .rows = rows};
    c.blocks = weight->in / QUANTISED_BLOCK;
    c.groups = QUANTISED_BLOCK / weight->group;
    c.panels = (weight->out + TILE - 1) / TILE;
    choose_kernel(&c);
    c.height = c.kernel == IN_REGISTERS && rows < STRIP ? rows : STRIP;
    const int64_t row_blocks = (rows + c.height - 1) / c.height * c.height * c.blocks;
    c.activations = scratch;
    c.rests = c.activations + row_blocks * (int64_t)ROW_BYTES;
    c.has_rests = c.rests + row_blocks * (int64_t)REST_BYTES;
    return c;
}

void ratoon_quantised_linear(const quantised_weight *weight, const float *x, int64_t ldx, int64_t rows, void *scratch, float *y,
                             int64_t ldy) {
    if (rows <= 0) return;
    quantised_call c = call_of(weight, x, ldx, rows, scratch, y, ldy);
    quantise(&c, (rows + c.height - 1) / c.height);
    // Long runs of panels keep the memory streaming; several runs for each thread keep one from waiting for another.
    c.panels_per_unit = c.panels / (UNITS_PER_THREAD * thread_count());
    if (c.panels_per_unit < 1) c.panels_per_unit = 1;
    if (c.matrix_rows || c.kernel != IN_REGISTERS) c.panels_per_unit += c.panels_per_unit % 2;
    c.units_per_block = (c.panels + c.panels_per_unit - 1) / c.panels_per_unit;
    c.row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    parallel_units(product_unit, &c, c.units_per_block * c.row_blocks);
}

typedef struct {
    quantised_call *calls;
    int64_t units;  // of each
} quantised_group;

static void quantise_job(void *context, int64_t job) {
    const quantised_call *c = &((const quantised_group *)context)->calls[job];
    memset(c->has_rests, 0, (size_t)c->blocks);
    quantise_unit((void *)c, 0);
}

static void group_unit(void *context, int64_t unit) {
    const quantised_group *g = context;
    product_unit(&g->calls[unit / g->units], unit % g->units);
}

// Weights of one shape; their formats may differ. Products of few rows are one loop, others are made by themselves first.
int quantised_jobs(const linear_job *jobs, int64_t count, void *scratch) {
    static _Thread_local room room_of_calls;
    quantised_call *calls = at_least(&room_of_calls, (size_t)count * sizeof(quantised_call));
    if (count && !calls) return -1;
    int64_t few = 0;
    uint8_t *free_scratch = scratch;
    for (int64_t i = 0; i < count; i++) {
        const linear_job *j = &jobs[i];
        if (j->rows >= STRIP || ratoon_quantised_kernel(j->quantised, j->rows) != IN_REGISTERS)
            ratoon_quantised_linear(j->quantised, j->x, j->ldx, j->rows, scratch, j->y, j->ldy);
    }
    for (int64_t i = 0; i < count; i++) {
        const linear_job *j = &jobs[i];
        if (j->rows >= STRIP || ratoon_quantised_kernel(j->quantised, j->rows) != IN_REGISTERS) continue;
        calls[few] = call_of(j->quantised, j->x, j->ldx, j->rows, free_scratch, j->y, j->ldy);
        calls[few].rows_per_unit = j->rows;
        calls[few++].row_blocks = 1;
        free_scratch += j->rows * ratoon_quantised_scratch(j->quantised->in);
    }
    if (!few) return 0;
    const int64_t panels = calls[0].panels, wanted = panels * few / (UNITS_PER_THREAD * thread_count());
    const int64_t panels_per_unit = wanted < 1 ? 1 : wanted < panels ? wanted : panels;
    quantised_group g = {calls, (panels + panels_per_unit - 1) / panels_per_unit};
    for (int64_t i = 0; i < few; i++) calls[i].panels_per_unit = panels_per_unit, calls[i].units_per_block = g.units;
    parallel_units(quantise_job, &g, few);
    parallel_units(group_unit, &g, few * g.units);
    return 0;
}

void ratoon_quantised_gated_mlp(const quantised_weight *gate_up, const quantised_weight *down, const float *x, int64_t ldx,
                                int64_t rows, void *scratch, float *between, float *y) {
    int64_t inner = down->in;
    float *activated = between + 2 * inner * rows;
    ratoon_quantised_linear(gate_up, x, ldx, rows, scratch, between, 2 * inner);
    ratoon_silu_and_mul(between, 2 * inner, activated, rows, inner);
    ratoon_quantised_linear(down, activated, inner, rows, scratch, y, down->out);
}
