// The products of adapters in whole numbers of 8 bits: rows are rounded to 16 bits, so that what they lose is far below what the
// matrices have lost, and the sums of a stretch are exact.
#include "low_rank.h"

#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pairs.h"

#define PAIR_BYTES (2 * TILE)
#define STRETCH_PAIRS (STRETCH_K / 2)
#define SCALE_BYTES (TILE * (int64_t)sizeof(float))
#define STRETCH_BYTES (SCALE_BYTES + STRETCH_PAIRS * PAIR_BYTES)
#define FETCH_BYTES 4096  // that are fetched ahead
#define CACHE_LINE 64
#define COLUMNS_AHEAD 128   // of results that are fetched
#define LARGEST_CODE 32767.0f
#define SMALLEST_LARGEST 1e-30f  // of the numbers that share a scale: one divided by it would overflow
#define TO_WHOLE 12582912.0f     // behind its addition the lower half of a float is the nearest whole number

int64_t whole_panel_bytes(int64_t depth) { return STRETCHES_OF(depth) * SCALE_BYTES + (depth + 1) / 2 * PAIR_BYTES; }

INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(from + i, 0, 3);
}

// `count` numbers, whole vectors, with one scale; which is returned.
INLINE float round_together(const float *x, int count, int16_t *codes) {
    const uint32_t largest = largest_of(x, count);
    const float maximum = float_of(largest);
    if (largest >= 0x7f800000 || maximum < SMALLEST_LARGEST) {
        memset(codes, 0, (size_t)count * sizeof *codes);
        return largest >= 0x7f800000 ? NAN : 0;
    }
    const vec factor = splat(LARGEST_CODE / maximum);
    typedef int16_t short_vec __attribute__((vector_size(2 * W), aligned(2)));
    for (int k = 0; k < count; k += W) {
        const ivec bits = (ivec)fma_(load(x + k), factor, splat(TO_WHOLE));
        *(short_vec *)(codes + k) = __builtin_convertvector(bits, short_vec);
    }
    return maximum / LARGEST_CODE;
}

void round_whole(const float *x, int64_t depth, int16_t *codes, float *scales) {
    int64_t k = 0;
    for (; k + STRETCH_K <= depth; k += STRETCH_K) scales[k / STRETCH_K] = round_together(x + k, STRETCH_K, codes + k);
    if (k == depth) return;
    float last[STRETCH_K] = {0};
    memcpy(last, x + k, (size_t)(depth - k) * sizeof(float));
    scales[k / STRETCH_K] = round_together(last, STRETCH_K, codes + k);
}

// Of few rows, sums are made in several chains, since one alone waits for each of its sums. They are exact in any order.
#define CHAINS(sums) ((sums) <= 2 ? 4 : (sums) <= 4 ? 2 : 1)

// Sums of `pairs` pairs of the rows x, whose numbers follow one another, and of a panel.
INLINE void sum_rows(int rows, const int16_t *const *x, int64_t pairs, const char *b, ivec sums[][TILE_VECS]) {
    const int chains = CHAINS(rows * TILE_VECS);
    ivec chain[4][MAX_TILE_ROWS][TILE_VECS];
    UNROLLED for (int c = 0; c < chains; c++)
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) chain[c][i][j] = (ivec){};
    int64_t s = 0;
    for (; s + 4 <= pairs; s += 4)
        UNROLLED for (int u = 0; u < 4; u++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                const byte_pairs column = load_pairs((const int8_t *)b + (s + u) * PAIR_BYTES + j * 2 * W);
                UNROLLED for (int i = 0; i < rows; i++)
                    chain[u % chains][i][j] = add_pairs(chain[u % chains][i][j], column, x[i] + 2 * (s + u));
            }
    for (; s < pairs; s++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            const byte_pairs column = load_pairs((const int8_t *)b + s * PAIR_BYTES + j * 2 * W);
            UNROLLED for (int i = 0; i < rows; i++) chain[0][i][j] = add_pairs(chain[0][i][j], column, x[i] + 2 * s);
        }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            sums[i][j] = chain[0][i][j];
            UNROLLED for (int c = 1; c < chains; c++) sums[i][j] += chain[c][i][j];
        }
}

INLINE void low_tile(int rows, const int16_t *const *x, const float *const *x_scales, int64_t depth, const char *b, float scale,
                     int16_t *codes, float *scales) {
    const int16_t *at[MAX_TILE_ROWS];
    vec total[MAX_TILE_ROWS][TILE_VECS];
    UNROLLED for (int i = 0; i < rows; i++) at[i] = x[i];
    clear_tile(rows, total);
    for (int64_t k = 0; k < depth; k += STRETCH_K) {
        ivec sums[MAX_TILE_ROWS][TILE_VECS];
        fetch(b + FETCH_BYTES, STRETCH_BYTES);
        if (depth - k >= STRETCH_K)
            sum_rows(rows, at, STRETCH_PAIRS, b + SCALE_BYTES, sums);
        else
            sum_rows(rows, at, (depth - k + 1) / 2, b + SCALE_BYTES, sums);
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            const vec of_columns = load((const float *)b + j * W);
            UNROLLED for (int i = 0; i < rows; i++)
                total[i][j] = fma_(__builtin_convertvector(sums[i][j], vec), of_columns * splat(x_scales[i][k / STRETCH_K]),
                                   total[i][j]);
        }
        UNROLLED for (int i = 0; i < rows; i++) at[i] += STRETCH_K;
        b += STRETCH_BYTES;
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        float low[TILE];
        int16_t rounded[TILE];
        UNROLLED for (int j = 0; j < TILE_VECS; j++) store(low + j * W, total[i][j] * splat(scale));
        scales[i] = round_together(low, TILE, rounded);
        for (int s = 0; s < TILE / 2; s++) memcpy(codes + 2 * (s * rows + i), rounded + 2 * s, 2 * sizeof *codes);
    }
}

// Sums of `pairs` pairs of a tile of low products and of panels `step` bytes apart.
INLINE void sum_tile(int rows, int panels, const int16_t *low, int pairs, const char *b, int64_t step,
                     ivec sums[][MAX_TILE_ROWS][TILE_VECS]) {
    UNROLLED for (int p = 0; p < panels; p++)
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) sums[p][i][j] = (ivec){};
    UNROLLED for (int s = 0; s < pairs; s++)
        UNROLLED for (int p = 0; p < panels; p++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                const byte_pairs column = load_pairs((const int8_t *)b + p * step + s * PAIR_BYTES + j * 2 * W);
                UNROLLED for (int i = 0; i < rows; i++)
                    sums[p][i][j] = add_pairs(sums[p][i][j], column, low + 2 * (s * rows + i));
            }
}

// The same for those behind the last TILE numbers of a stretch.
INLINE void sum_last(int rows, const int16_t *low, int64_t pairs, const char *b, ivec sums[][TILE_VECS]) {
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) sums[i][j] = (ivec){};
    for (int64_t s = 0; s < pairs; s++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            const byte_pairs column = load_pairs((const int8_t *)b + s * PAIR_BYTES + j * 2 * W);
            UNROLLED for (int i = 0; i < rows; i++) sums[i][j] = add_pairs(sums[i][j], column, low + 2 * (s * rows + i));
        }
}

// y += a panel's columns, of any depth.
INLINE void add_panel(int rows, const int16_t *low, const float *scales, int64_t depth, const char *b, float *const *y,
                      int64_t column) {
    for (int64_t first = 0; first < depth; first += STRETCH_K, b += STRETCH_BYTES) {
        const int64_t last = depth - first < STRETCH_K ? depth : first + STRETCH_K;
        vec total[MAX_TILE_ROWS][TILE_VECS];
        clear_tile(rows, total);
        for (int64_t k = first; k < last; k += TILE) {
            ivec sums[1][MAX_TILE_ROWS][TILE_VECS];
            const char *pairs = b + SCALE_BYTES + (k - first) / 2 * PAIR_BYTES;
            if (last - k >= TILE)
                sum_tile(rows, 1, low + k * rows, TILE / 2, pairs, 0, sums);
            else
                sum_last(rows, low + k * rows, (last - k + 1) / 2, pairs, sums[0]);
            UNROLLED for (int i = 0; i < rows; i++)
                UNROLLED for (int j = 0; j < TILE_VECS; j++)
                    total[i][j] = fma_(__builtin_convertvector(sums[0][i][j], vec), splat(scales[k / TILE * rows + i]), total[i][j]);
        }
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            const vec of_columns = load((const float *)b + j * W);
            UNROLLED for (int i = 0; i < rows; i++) {
                float *to = y[i] + column + j * W;
                store(to, fma_(total[i][j], of_columns, load(to)));
            }
        }
    }
}

// The same of panels of depth TILE: numbers of rows are read once for all of them.
INLINE void add_panels(int rows, int panels, const int16_t *low, const float *scales, const char *b, float *const *y,
                       int64_t column) {
    const int64_t step = SCALE_BYTES + TILE / 2 * PAIR_BYTES;
    ivec sums[4][MAX_TILE_ROWS][TILE_VECS];
    fetch(b + FETCH_BYTES, panels * step);
    sum_tile(rows, panels, low, TILE / 2, b + SCALE_BYTES, step, sums);
    UNROLLED for (int p = 0; p < panels; p++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            const vec of_columns = load((const float *)(b + p * step) + j * W);
            UNROLLED for (int i = 0; i < rows; i++) {
                float *to = y[i] + column + p * TILE + j * W;
                const vec total = __builtin_convertvector(sums[p][i][j], vec) * splat(scales[i]);
                store(to, fma_(total, of_columns, load(to)));
                if (j == 0) __builtin_prefetch(to + COLUMNS_AHEAD, 1);
            }
        }
}

#define PANELS_TOGETHER(rows) (W < 16 ? 1 : (rows) <= 4 ? 4 : 2)
INLINE void columns_tile(int rows, const int16_t *low, const float *scales, int64_t depth, const char *b, int64_t panels,
                         float *const *y) {
    const int64_t step = whole_panel_bytes(depth);
    const int together = PANELS_TOGETHER(rows);
    int64_t p = 0;
    if (depth == TILE)
        for (; p + together <= panels; p += together) add_panels(rows, together, low, scales, b + p * step, y, p * TILE);
    for (; p < panels; p++) {
        fetch(b + p * step + FETCH_BYTES, step);
        add_panel(rows, low, scales, depth, b + p * step, y, p * TILE);
    }
}

void whole_low(int rows, const int16_t *const *x, const float *const *x_scales, int64_t depth, const char *panel, float scale,
               int16_t *codes, float *scales) {
#define HEIGHT(ROWS) case ROWS: low_tile(ROWS, x, x_scales, depth, panel, scale, codes, scales); break;
    switch (rows) { EVERY_HEIGHT }
#undef HEIGHT
}

void whole_columns(int rows, const int16_t *low, const float *scales, int64_t depth, const char *b, int64_t panels,
                   float *const *y) {
#define HEIGHT(ROWS) case ROWS: columns_tile(ROWS, low, scales, depth, b, panels, y); break;
    switch (rows) { EVERY_HEIGHT }
#undef HEIGHT
}

// A stretch of a column: its scale, and the nearest whole numbers, in whole vectors. Returns whether all are finite.
static int pack_column(const float *from, int64_t count, float *scale, int8_t *codes) {
    typedef int8_t byte_vec __attribute__((vector_size(W), aligned(1)));
    float padded[STRETCH_K];
    const int width = count <= TILE ? TILE : STRETCH_K;
    if (count < width) {
        memset(padded, 0, (size_t)width * sizeof(float));
        from = memcpy(padded, from, (size_t)count * sizeof(float));
    }
    const uint32_t bits = largest_of(from, width);
    const float largest = float_of(bits);
    const int usable = largest >= SMALLEST_LARGEST;  // otherwise all are zero
    const vec factor = splat(usable ? 127.0f / largest : 0.0f);
    *scale = usable ? largest / 127.0f : 0.0f;
    for (int k = 0; k < width; k += W)
        *(byte_vec *)(codes + k) = __builtin_convertvector((ivec)fma_(load(from + k), factor, splat(TO_WHOLE)), byte_vec);
    return bits < 0x7f800000;
}

int pack_whole(const float *matrix, int64_t columns, int64_t depth, void *packed) {
    char *to = packed;
    int8_t codes[TILE][STRETCH_K] = {0};
    for (int64_t first = 0; first < columns; first += TILE)
        for (int64_t k = 0; k < depth; k += STRETCH_K) {
            const int64_t count = depth - k < STRETCH_K ? depth - k : STRETCH_K, pairs = (count + 1) / 2;
            for (int64_t j = 0; j < TILE; j++) {
                float *scale = (float *)to + j;
                if (first + j < columns) {
                    if (!pack_column(matrix + (first + j) * depth + k, count, scale, codes[j])) return -1;
                } else {
                    *scale = 0;
                    memset(codes[j], 0, sizeof codes[j]);
                }
            }
            to += SCALE_BYTES;
            for (int64_t s = 0; s < pairs; s++)
                UNROLLED for (int64_t j = 0; j < TILE; j++) memcpy(to + s * PAIR_BYTES + 2 * j, codes[j] + 2 * s, 2);
            to += pairs * PAIR_BYTES;
        }
    return 0;
}
