// Rows of tables: floats, and blocks of every format. A number of a block goes through three roundings at most.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define FORMATS 8
#define FLOATS 8
#define HALVES 9
#define BF16 10

static const int BLOCK_BYTES[] = {18, 20, 22, 24, 34, 144, 176, 210};
static const int INPUTS[] = {32, 32, 32, 32, 32, 256, 256, 256};

static double half_at(const uint8_t *p) {
    int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}

static int bit(const uint8_t *bytes, int i) { return bytes[i / 8] >> i % 8 & 1; }

static int nibble(const uint8_t *bytes, int i, int high) { return high ? bytes[i] >> 4 : bytes[i] & 15; }

// Scale and minimum of group g of Q4_K and Q5_K, as llama.cpp has them in 12 bytes.
static void small_scales(const uint8_t *q, int g, int *scale, int *minimum) {
    *scale = g < 4 ? q[g] & 63 : (q[g + 4] & 15) | q[g - 4] >> 6 << 4;
    *minimum = g < 4 ? q[g + 4] & 63 : q[g + 4] >> 4 | q[g] >> 6 << 4;
}

// Input i of a block; `size`: the sum of the sizes of its terms.
static double number_of(int format, const uint8_t *b, int i, double *size) {
    int half = i % 32 % 16, is_second = i % 32 / 16, j = i % 128, scale = 0, minimum = 0;
    double product = 0, offset = 0;
    switch (format) {
        case 0: product = half_at(b) * (nibble(b + 2, half, is_second) - 8); break;
        case 1: product = half_at(b) * nibble(b + 4, half, is_second); offset = half_at(b + 2); break;
        case 2: product = half_at(b) * (nibble(b + 6, half, is_second) + 16 * bit(b + 2, i) - 16); break;
        case 3: product = half_at(b) * (nibble(b + 8, half, is_second) + 16 * bit(b + 4, i)); offset = half_at(b + 2); break;
        case 4: product = half_at(b) * (int8_t)b[2 + i]; break;
        case 5: case 6:
            small_scales(b + 4, i / 32, &scale, &minimum);
            product = half_at(b) * scale * (format == 5 ? nibble(b + 16 + i / 64 * 32, i % 32, i / 32 % 2)
                      : nibble(b + 48 + i / 64 * 32, i % 32, i / 32 % 2) + 16 * (b[16 + i % 32] >> i / 32 & 1));
            offset = -half_at(b + 2) * minimum;
            break;
        default:
            product = half_at(b + 208) * (int8_t)b[192 + i / 16] *
                      (nibble(b + i / 128 * 64, j % 64, j / 64) + 16 * (b[128 + i / 128 * 32 + j % 32] >> j / 32 * 2 & 3) - 32);
    }
    *size = fabs(product) + fabs(offset);
    return product + offset;
}

static void fill_blocks(int format, uint8_t *blocks, int64_t count) {
    for (int64_t i = 0; i < count * BLOCK_BYTES[format]; i++) blocks[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < count; i++) {  // halves that are finite
        uint8_t *halves = blocks + i * BLOCK_BYTES[format] + (format == 7 ? 208 : 0);
        halves[1] &= 0xbf;
        if (format != 0 && format != 2 && format != 4 && format != 7) halves[3] &= 0xbf;
    }
}

static void compare_blocks(int format, int64_t count, int64_t row_blocks, int64_t rows) {
    int64_t row_bytes = BLOCK_BYTES[format] * row_blocks, width = INPUTS[format] * row_blocks;
    uint8_t *table = guarded(count * row_bytes);
    int64_t *ids = guarded(rows * 8);
    float *y = guarded_floats(rows * width);
    fill_blocks(format, table, count * row_blocks);
    for (int64_t i = 0; i < rows; i++) ids[i] = random_between(0, count - 1);
    expect_true(ratoon_embed(format, table, row_bytes, count, ids, rows, width, y) == 0, "rows of a table", format, rows);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < width; k++) {
            const uint8_t *block = table + ids[i] * row_bytes + k / INPUTS[format] * BLOCK_BYTES[format];
            double size, expected = number_of(format, block, (int)(k % INPUTS[format]), &size);
            expect(y[i * width + k], expected, 3 * UNIT * size, "a number of a row", format, k);
        }
    release_all();
}

static void compare_floats(int format, int64_t count, int64_t width, int64_t rows) {
    int64_t item = format == FLOATS ? 4 : 2, row_bytes = (width + 3) * item;  // rows need not lie side by side
    uint8_t *table = guarded((count - 1) * row_bytes + width * item);
    int64_t *ids = guarded(rows * 8);
    float *y = guarded_floats(rows * width);
    for (int64_t i = 0; i < (count - 1) * row_bytes + width * item; i++) table[i] = (uint8_t)(random_bits() & 0x3f);  // finite
    for (int64_t i = 0; i < rows; i++) ids[i] = random_between(0, count - 1);
    expect_true(ratoon_embed(format, table, row_bytes, count, ids, rows, width, y) == 0, "rows of floats", format, rows);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < width; k++) {
            const uint8_t *p = table + ids[i] * row_bytes + k * item;
            uint8_t bytes[4] = {0, 0, p[0], p[1]};
            float number;
            memcpy(&number, format == FLOATS ? p : bytes, 4);
            expect(y[i * width + k], format == HALVES ? half_at(p) : number, 0, "a float of a row", format, k);
        }
    release_all();
}

// A rank's rows of a table: those of other ranks are zeros.
static void compare_parts(void) {
    float *table = random_floats(10 * 8, 1), *y = guarded_floats(10 * 8);
    int64_t ids[10];
    for (int i = 0; i < 10; i++) ids[i] = 9 - i;
    expect_true(ratoon_embed_part(FLOATS, table + 3 * 8, 8 * 4, 4, 3, 10, ids, 10, 8, y) == 0, "rows of a part", 0, 0);
    for (int i = 0; i < 10; i++)
        for (int k = 0; k < 8; k++) {
            float expected = ids[i] >= 3 && ids[i] < 7 ? table[ids[i] * 8 + k] : 0;
            expect(y[i * 8 + k], expected, 0, "a number of a part's row", i, k);
        }
    ids[5] = 10;
    expect_true(ratoon_embed_part(FLOATS, table + 3 * 8, 8 * 4, 4, 3, 10, ids, 10, 8, y) == -1, "an id outside of all", 5, 10);
    release_all();
}

static void refuse_unknown_rows(void) {
    float *table = random_floats(4 * 8, 1), *y = guarded_floats(2 * 8);
    int64_t ids[2] = {3, 0};
    for (int i = 0; i < 2; i++) {
        ids[1] = i ? -1 : 4;
        expect_true(ratoon_embed(FLOATS, table, 8 * 4, 4, ids, 2, 8, y) == -1, "an id outside of the table", i, ids[1]);
        expect_true(is_poison(y[0]) && is_poison(y[15]), "nothing is written then", i, 0);
    }
    release_all();
}

void check_embed(void) {
    for (int format = 0; format < FORMATS; format++)
        for (int i = 0; i < 3; i++) compare_blocks(format, random_between(1, 20), random_between(1, 4), random_between(1, 40));
    for (int format = FLOATS; format <= BF16; format++)
        for (int i = 0; i < 4; i++) compare_floats(format, random_between(1, 20), random_between(1, 70), random_between(1, 40));
    compare_parts();
    refuse_unknown_rows();
}
