// GGUF's blocks in the layout of the kernels: each code by the description of its format, and where quantised.h says.
#include <string.h>

#include "checking.h"
#include "quantised.h"

#define PANEL 16
#define BLOCK QUANTISED_BLOCK

static const int BLOCK_BYTES[] = {18, 20, 22, 24, 34, 144, 176, 210};
static const int INPUTS[] = {32, 32, 32, 32, 32, 256, 256, 256};
static const int BITS[] = {4, 4, 8, 8, 8, 4, 8, 8};

static int bit(const uint8_t *bytes, int i) { return bytes[i / 8] >> i % 8 & 1; }

static int nibble(const uint8_t *bytes, int i, int high) { return high ? bytes[i] >> 4 : bytes[i] & 15; }

// The code of input i of a block, as a panel has it.
static int code_of(int format, const uint8_t *block, int i) {
    int half = i % 32 % 16, is_second = i % 32 / 16, j = i % 128;
    switch (format) {
        case 0: return nibble(block + 2, half, is_second);
        case 1: return nibble(block + 4, half, is_second);
        case 2: return nibble(block + 6, half, is_second) + 16 * bit(block + 2, i) - 16 + 128;
        case 3: return nibble(block + 8, half, is_second) + 16 * bit(block + 4, i) + 128;
        case 4: return (int8_t)block[2 + i] + 128;
        case 5: return nibble(block + 16 + i / 64 * 32, i % 32, i / 32 % 2);
        case 6: return nibble(block + 48 + i / 64 * 32, i % 32, i / 32 % 2) + 16 * (block[16 + i % 32] >> i / 32 & 1) + 128;
        default:
            return nibble(block + i / 128 * 64, j % 64, j / 64) + 16 * (block[128 + i / 128 * 32 + j % 32] >> j / 32 * 2 & 3) - 32 + 128;
    }
}

static int packed_code(const uint8_t *codes, int64_t blocks, int bits, int64_t column, int64_t i) {
    int64_t bytes = BLOCK * bits / 8, quad = i % BLOCK / 4, is_high = bits == 4 && quad >= 4;
    const uint8_t *block = codes + ((column / PANEL * blocks + i / BLOCK) * bytes) * PANEL;
    uint8_t both = block[((quad - 4 * is_high) * PANEL + column % PANEL) * 4 + i % 4];
    return bits == 8 ? both : is_high ? both >> 4 : both & 15;
}

static void compare(int format, int64_t rows, int64_t row_blocks) {
    int64_t bytes = BLOCK_BYTES[format], inputs = INPUTS[format] * row_blocks, panels = (rows + PANEL - 1) / PANEL;
    int64_t packed_bytes = panels * PANEL * inputs * BITS[format] / 8;
    uint8_t *blocks = guarded(rows * row_blocks * bytes), *codes = guarded(packed_bytes);
    for (int64_t i = 0; i < rows * row_blocks * bytes; i++) blocks[i] = (uint8_t)random_bits();
    memset(codes, 0xa5, (size_t)packed_bytes);
    ratoon_repack_codes(format, blocks, rows, row_blocks, codes);
    for (int64_t row = 0; row < panels * PANEL; row++)
        for (int64_t i = 0; i < inputs; i++) {
            const uint8_t *block = blocks + (row * row_blocks + i / INPUTS[format]) * bytes;
            int expected = row < rows ? code_of(format, block, (int)(i % INPUTS[format])) : 0;
            expect_true(packed_code(codes, inputs / BLOCK, BITS[format], row, i) == expected, "code", row, i);
        }
    release_all();
}

static void compare_halves(int64_t rows, int64_t groups, int64_t stride) {
    int64_t panels = (rows + PANEL - 1) / PANEL;
    uint8_t *from = guarded((rows * groups - 1) * stride + 2);
    uint16_t *packed = guarded(panels * PANEL * groups * 2), half;
    for (int64_t i = 0; i < (rows * groups - 1) * stride + 2; i++) from[i] = (uint8_t)random_bits();
    memset(packed, 0xa5, (size_t)(panels * PANEL * groups * 2));
    ratoon_repack_halves(from, rows, groups, stride, packed);
    for (int64_t row = 0; row < panels * PANEL; row++)
        for (int64_t group = 0; group < groups; group++) {
            half = 0;
            if (row < rows) memcpy(&half, from + (row * groups + group) * stride, 2);
            expect_true(packed[(row / PANEL * groups + group) * PANEL + row % PANEL] == half, "half", row, group);
        }
    release_all();
}

void check_repack(void) {
    for (int format = 0; format < 8; format++) {
        compare(format, 1, 1);
        compare(format, 32, 2);
        for (int i = 0; i < 3; i++) compare(format, random_between(1, 70), random_between(1, 5));
        compare_halves(random_between(1, 40), random_between(1, 9), BLOCK_BYTES[format]);
    }
    compare_halves(33, 7, 2);
}
