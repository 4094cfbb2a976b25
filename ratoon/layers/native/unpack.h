// A stretch of a panel as bytes and float scales, small enough for the first-level cache: what products of many rows read.
#pragma once
#include "quantised_call.h"

#define STRETCH 24  // blocks

typedef struct {
    _Alignas(64) uint8_t codes[STRETCH][QUADS][TILE][4];
    float scales[STRETCH * 2][TILE];  // of each group
    float offsets[STRETCH][TILE];
} unpacked;

// `is_signed`: less their zero. Otherwise as `dot` takes them.
INLINE void unpack_codes(int is_signed, const quantised_weight *w, int64_t first_block, int64_t count, unpacked *to) {
    const uint8_t *codes = w->codes + first_block * BLOCK_CODES * w->bits / 8;
    uint8_t *target = to->codes[0][0][0];
    if (w->bits == 8) {
        for (int64_t i = 0; i < count * BLOCK_CODES; i += 4 * W) {
            bvec some = load_bytes(codes + i);
            *(bvec *)(target + i) = is_signed ? some ^ 0x80 : prepare_8(some);
        }
        return;
    }
    const int half = BLOCK_CODES / 2;
    const bvec zero = (bvec){} + (uint8_t)(is_signed && !w->offsets ? 8 : 0);
    for (int64_t block = 0; block < count; block++)
        for (int i = 0; i < half; i += 4 * W) {
            bvec both = load_bytes(codes + block * half + i);
            *(bvec *)(target + block * BLOCK_CODES + i) = (both & 15) - zero;
            *(bvec *)(target + block * BLOCK_CODES + half + i) = (both >> 4) - zero;
        }
}

// Blocks [first, first + count) of a panel; of the last one in the place of one behind it, whose columns nothing reads.
INLINE void unpack(int is_signed, const quantised_call *c, int64_t panel, int64_t first, int64_t count, unpacked *to) {
    const quantised_weight *w = c->weight;
    panel = panel < c->panels ? panel : c->panels - 1;
    const int64_t block = panel * c->blocks + first, groups = c->groups;
    unpack_codes(is_signed, w, block, count, to);
    for (int64_t i = 0; i < count * groups * TILE; i += W)
        store(to->scales[0] + i, load_halves(w->scales + block * groups * TILE + i));
    if (w->offsets)
        for (int64_t i = 0; i < count * TILE; i += W) store(to->offsets[0] + i, load_halves(w->offsets + block * TILE + i));
}

// What is unpacked after a stretch: codes, scales and offsets that follow it in memory.
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *offsets;
    int64_t code_bytes;  // of a block
    int64_t groups;
} stretch_ahead;

INLINE stretch_ahead find_ahead(const quantised_call *c, int64_t panel, int64_t first) {
    const quantised_weight *w = c->weight;
    const int64_t block = panel * c->blocks + first, bytes = BLOCK_CODES * w->bits / 8;
    return (stretch_ahead){w->codes + block * bytes, w->scales + block * c->groups * TILE,
                           w->offsets ? w->offsets + block * TILE : NULL, bytes, c->groups};
}

// Asks for a block of it, so that it comes from memory while rows are multiplied. One behind the weight's end may be asked for.
INLINE void fetch_block(const stretch_ahead *ahead, int64_t block) {
    const uint8_t *codes = ahead->codes + block * ahead->code_bytes;
    for (int64_t i = 0; i < ahead->code_bytes; i += 256)
        UNROLLED for (int line = 0; line < 256; line += 64) __builtin_prefetch(codes + i + line, 0, 2);
    __builtin_prefetch(ahead->scales + block * ahead->groups * TILE, 0, 2);
    if (ahead->offsets) __builtin_prefetch(ahead->offsets + block * TILE, 0, 2);
}
