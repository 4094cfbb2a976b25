// GGUF's blocks, by format: how many bytes they have, and the codes of 32 inputs as a panel has them (quantised.h).
#pragma once
#include <string.h>

#include "quantised.h"

#define HALF (QUANTISED_BLOCK / 2)

// Codes of 32 inputs: 16 bytes with two codes each (i and 16 + i), or 32 with one.
typedef void (*unpack_codes)(const uint8_t *block, int part, uint8_t *codes);

typedef struct {
    int bytes, parts;  // of a block in the file; 32 inputs each
    int code_bytes;    // of 32 inputs in a panel
    unpack_codes unpack;
} block_format;

static void unpack_q4_0(const uint8_t *block, int part, uint8_t *codes) {
    (void)part;
    memcpy(codes, block + 2, HALF);
}

static void unpack_q4_1(const uint8_t *block, int part, uint8_t *codes) {
    (void)part;
    memcpy(codes, block + 4, HALF);
}

static void unpack_q8_0(const uint8_t *block, int part, uint8_t *codes) {
    (void)part;
    for (int i = 0; i < QUANTISED_BLOCK; i++) codes[i] = block[2 + i] ^ 128;
}

// 32 high bits, then 16 bytes of two low halves. zero: the byte that the code 0 becomes.
static void unpack_five_bits(const uint8_t *data, int zero, uint8_t *codes) {
    uint32_t high = (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
    for (int i = 0; i < HALF; i++) {
        codes[i] = (uint8_t)(((data[4 + i] & 15) | (high >> i & 1) << 4) + zero);
        codes[HALF + i] = (uint8_t)((data[4 + i] >> 4 | (high >> (HALF + i) & 1) << 4) + zero);
    }
}

static void unpack_q5_0(const uint8_t *block, int part, uint8_t *codes) {
    (void)part;
    unpack_five_bits(block + 2, 128 - 16, codes);
}

static void unpack_q5_1(const uint8_t *block, int part, uint8_t *codes) {
    (void)part;
    unpack_five_bits(block + 4, 128, codes);
}

// Parts 2p and 2p + 1 are the low and the high halves of the same 32 bytes.
static void unpack_q4_k(const uint8_t *block, int part, uint8_t *codes) {
    const uint8_t *pair = block + 16 + part / 2 * QUANTISED_BLOCK;
    int shift = part % 2 * 4;
    for (int i = 0; i < HALF; i++) codes[i] = (uint8_t)((pair[i] >> shift & 15) | (pair[HALF + i] >> shift & 15) << 4);
}

static void unpack_q5_k(const uint8_t *block, int part, uint8_t *codes) {
    const uint8_t *high = block + 16, *pair = block + 48 + part / 2 * QUANTISED_BLOCK;
    int shift = part % 2 * 4;
    for (int i = 0; i < QUANTISED_BLOCK; i++)
        codes[i] = (uint8_t)(((pair[i] >> shift & 15) | (high[i] >> part & 1) << 4) + 128);
}

// Codes from -32 to 31. Of 128 inputs: 64 bytes of low halves, 32 bytes of four times two high bits.
static void unpack_q6_k(const uint8_t *block, int part, uint8_t *codes) {
    int of_four = part % 4;
    const uint8_t *low = block + part / 4 * 64 + of_four % 2 * QUANTISED_BLOCK, *high = block + 128 + part / 4 * QUANTISED_BLOCK;
    for (int i = 0; i < QUANTISED_BLOCK; i++)
        codes[i] = (uint8_t)(((low[i] >> of_four / 2 * 4 & 15) | (high[i] >> 2 * of_four & 3) << 4) + 128 - 32);
}

// In the order of BLOCK_NAMES in native_formats.py
static const block_format block_formats[] = {
    {18, 1, 16, unpack_q4_0}, {20, 1, 16, unpack_q4_1}, {22, 1, 32, unpack_q5_0}, {24, 1, 32, unpack_q5_1},
    {34, 1, 32, unpack_q8_0}, {144, 8, 16, unpack_q4_k}, {176, 8, 32, unpack_q5_k}, {210, 8, 32, unpack_q6_k},
};
