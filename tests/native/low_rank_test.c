// The products of adapters beside a product, and rows of their tables.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define WHOLE_NUMBERS 3  // the format
#define HALF_STEP (0.51 / 32767)  // of rows, which are rounded beside whole numbers
#define SLOTS 3
#define PARTS 2

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

// [columns][depth] as panels; the matrix gets the numbers that the panels have.
static void *pack(float *matrix, int64_t columns, int64_t depth, int32_t format) {
    const int64_t panels = (columns + 15) / 16, bytes = panels * depth * 16 * (format ? 2 : 4);
    char *packed = guarded(bytes);
    uint16_t *halves = guarded(columns * depth * 2);
    for (int64_t i = 0; format && i < columns * depth; i++) matrix[i] = from_bf16(halves[i] = to_bf16(matrix[i]));
    expect_true(ratoon_low_rank_bytes(columns, depth, format) == bytes, "bytes of floats", columns, depth);
    expect_true(ratoon_pack_low_rank(format ? (const void *)halves : matrix, columns, depth, format, packed) == 0, "floats", 0, 0);
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < 16; j++) {
                const int64_t column = p * 16 + j, place = (p * depth + k) * 16 + j;
                const float kept = format ? from_bf16(((uint16_t *)packed)[place]) : ((float *)packed)[place];
                expect_true(same_bits(kept, column < columns ? matrix[column * depth + k] : 0), "a panel", column, k);
            }
    return packed;
}

// The same in whole numbers: of each panel and 64 numbers of its columns 16 scales, then pairs of numbers.
static void *pack_whole(float *matrix, int64_t columns, int64_t depth) {
    const int64_t bytes = ratoon_low_rank_bytes(columns, depth, WHOLE_NUMBERS), panels = (columns + 15) / 16;
    char *packed = guarded(bytes), *at = packed;
    expect_true(ratoon_pack_low_rank(matrix, columns, depth, WHOLE_NUMBERS, packed) == 0, "finite numbers", 0, 0);
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0; first < depth; first += 64) {
            const int64_t count = depth - first < 64 ? depth - first : 64;
            const float *scales = (const float *)at;
            const int8_t *codes = (const int8_t *)at + 64;
            for (int64_t j = 0; j < 16 && panel * 16 + j < columns; j++)
                for (int64_t k = 0; k < count; k++) {
                    float *value = matrix + (panel * 16 + j) * depth + first + k;
                    const float kept = (float)codes[k / 2 * 32 + 2 * j + k % 2] * scales[j];
                    expect(kept, *value, scales[j] * (0.5 + 256 * UNIT), "the nearest whole number", panel * 16 + j, first + k);
                    *value = kept;
                }
            at += 64 + (count + 1) / 2 * 32;
        }
    expect_true(at == packed + bytes, "bytes of whole numbers", columns, depth);
    return packed;
}

static void refuse_what_is_not_finite(void) {
    float matrix[70] = {1};
    char *packed = guarded(ratoon_low_rank_bytes(1, 70, WHOLE_NUMBERS));
    expect_true(ratoon_pack_low_rank(matrix, 1, 70, WHOLE_NUMBERS, packed) == 0, "finite numbers", 0, 0);
    matrix[69] = INFINITY;
    expect_true(ratoon_pack_low_rank(matrix, 1, 70, WHOLE_NUMBERS, packed) == -1, "an infinity", 0, 0);
    matrix[69] = NAN;
    expect_true(ratoon_pack_low_rank(matrix, 1, 70, WHOLE_NUMBERS, packed) == -1, "no number", 0, 0);
    release_all();
}

static double largest_of(const float *numbers, int64_t count) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(numbers[i]));
    return largest;
}

// is_alike: all rows have the same slot.
static void compare(int64_t rows, int64_t in, const int64_t *out, int64_t most_ranks, int is_alike) {
    const int64_t width = out[0] + out[1], ldx = in + random_between(0, 3), ldy = width + random_between(0, 3);
    low_rank_part entries[SLOTS * PARTS];
    float *a[SLOTS * PARTS], *b[SLOTS * PARTS];
    for (int e = 0; e < SLOTS * PARTS; e++) {
        const int part = e % PARTS;
        const int is_whole = random_between(0, 4) == 0;
        const int32_t format = (int32_t[]){0, 1, WHOLE_NUMBERS}[random_between(0, is_whole ? 1 : 2)];
        const int64_t rank = e == 2 ? 0 : is_whole ? in : random_between(1, most_ranks);
        a[e] = rank && !is_whole ? random_floats(rank * in, 1) : NULL;
        b[e] = rank ? random_floats(out[part] * rank, 1) : NULL;
        const int is_rounded = format == WHOLE_NUMBERS;
        void *packed_a = !a[e] ? NULL : is_rounded ? pack_whole(a[e], rank, in) : pack(a[e], rank, in, format);
        void *packed_b = !b[e] ? NULL : is_rounded ? pack_whole(b[e], out[part], rank) : pack(b[e], out[part], rank, format);
        entries[e] = (low_rank_part){.a = packed_a,
                                     .b = packed_b,
                                     .rank = rank,
                                     .column = part ? out[0] : 0,
                                     .out = out[part],
                                     .scale = 0.5f * (float)(1 + e),
                                     .format = format};
    }
    float *x = random_floats((rows - 1) * ldx + in, 2), *before = random_floats((rows - 1) * ldy + width, 1);
    float *y = guarded_floats((rows - 1) * ldy + width), *alone = guarded_floats(width);
    int32_t *slots = guarded(rows * 4);
    for (int64_t i = 0; i < rows; i++) slots[i] = is_alike ? 0 : (int32_t)random_between(-1, SLOTS - 1);
    memcpy(y, before, (size_t)((rows - 1) * ldy + width) * 4);
    expect_true(ratoon_add_low_rank(x, ldx, rows, in, entries, SLOTS, PARTS, slots, y, ldy) == 0, "low rank has memory", 0, 0);
    for (int64_t row = 0; row < rows; row++) {
        memcpy(alone, before + row * ldy, (size_t)width * 4);
        ratoon_add_low_rank(x + row * ldx, ldx, 1, in, entries, SLOTS, PARTS, slots + row, alone, width);
        for (int64_t column = 0; column < width; column++) {
            const float found = y[row * ldy + column], base = before[row * ldy + column];
            expect_true(same_bits(found, alone[column]), "low rank, a row alone", row, column);
            const int part = column >= out[0];
            const int64_t e = slots[row] * PARTS + part, own = column - (part ? out[0] : 0);
            if (slots[row] < 0 || !entries[e].rank) {
                expect_true(same_bits(found, base), "low rank, a row without", row, column);
                continue;
            }
            const int64_t rank = entries[e].rank;
            const int is_rounded = entries[e].format == WHOLE_NUMBERS;
            double sum = a[e] ? base : 0, sizes = fabs(sum), error = 0, largest_low = 0, b_sizes = 0;
            for (int64_t r = 0; r < rank; r++) {
                double low = a[e] ? 0 : x[row * ldx + r], low_sizes = fabs(low), low_error = 0;
                if (a[e]) {
                    for (int64_t k = 0; k < in; k++) {
                        low += (double)x[row * ldx + k] * a[e][r * in + k];
                        low_sizes += fabs((double)x[row * ldx + k] * a[e][r * in + k]);
                        if (is_rounded) low_error += HALF_STEP * largest_of(x + row * ldx, in) * fabs(a[e][r * in + k]);
                    }
                    low *= entries[e].scale;
                    low_sizes *= entries[e].scale;
                    low_error *= entries[e].scale;
                    low_error += (sum_error(in) + 4 * UNIT) * low_sizes;  // scales are rounded with them, too
                }
                sum += low * b[e][own * rank + r];
                sizes += low_sizes * fabs((double)b[e][own * rank + r]);
                error += low_error * fabs((double)b[e][own * rank + r]);
                largest_low = fmax(largest_low, fabs(low) + low_error);
                b_sizes += fabs(b[e][own * rank + r]);
            }
            if (is_rounded) error += HALF_STEP * largest_low * b_sizes;
            expect(found, sum, error + (sum_error(rank) + 4 * UNIT) * sizes, "low rank", row, column);
        }
    }
    release_all();
}

static void compare_tables(void) {
    const int64_t count = 7, width = 21, first = 4, rows = 9;
    float *floats = random_floats(count * width, 1);
    uint16_t *halves = guarded(count * width * 2);
    for (int64_t i = 0; i < count * width; i++) halves[i] = to_bf16(random_float());
    const saved_table tables[3] = {{floats, count, 0}, {NULL, 0, 0}, {halves, count, 1}};
    const int32_t slots[9] = {0, 1, 2, -1, 0, 2, 0, 2, 1};
    int64_t *ids = guarded(rows * 8);
    for (int64_t i = 0; i < rows; i++) ids[i] = random_between(0, first + count + 2);
    float *before = random_floats(rows * width, 1), *y = guarded_floats(rows * width);
    memcpy(y, before, (size_t)(rows * width) * 4);
    ratoon_replace_rows(tables, 3, slots, ids, first, rows, width, y);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) {
            const int64_t row = ids[i] - first;
            float expected = before[i * width + j];
            if (slots[i] == 0 || slots[i] == 2)
                expected = row < 0 || row >= count ? 0
                           : slots[i] == 0         ? floats[row * width + j]
                                                   : from_bf16(halves[row * width + j]);
            expect_true(same_bits(y[i * width + j], expected), "rows of tables", i, j);
        }
    release_all();
}

void check_low_rank(void) {
    compare(1, 1, (int64_t[]){1, 1}, 1, 0);
    compare(40, 130, (int64_t[]){300, 17}, 40, 0);
    compare(75, 70, (int64_t[]){16, 32}, 16, 0);
    for (int i = 0; i < 4; i++) compare(26, 64, (int64_t[]){48, 17}, 16, 1);  // fewer tiles than units for three threads
    for (int i = 0; i < 12; i++)
        compare(random_between(1, 20), random_between(1, 200), (int64_t[]){random_between(1, 90), random_between(1, 60)}, 70, 0);
    refuse_what_is_not_finite();
    for (int i = 0; i < 5; i++) compare_tables();
}
