// Rows of a table, by their numbers: the vocabulary's, in the format of its file, or one of floats.
//
// A row of blocks is decoded as models/gguf_quants.py does it, to the bit: a code times its scale, rounded, and the offset
// added to that.
#include "blocks.h"
#include "dot.h"
#include "kernels.h"
#include "threads.h"

#define ROWS_PER_UNIT 16
#define FIRST_OF_FLOATS ((int64_t)(sizeof block_formats / sizeof *block_formats))  // then halves, and bf16
#define GROUP 16  // inputs that have one scale, in every format

typedef struct {
    int64_t format;
    const uint8_t *table;
    int64_t row_bytes, count, first;
    const int64_t *ids;
    int64_t rows, width;
    float *y;
} embed_call;

static float float_of_half(const uint8_t *bytes) {
    uint16_t halves[W] = {0};
    memcpy(halves, bytes, 2);
    return load_halves(halves)[0];
}

// The scale and the minimum of a part of Q4_K or Q5_K: 6 bits each in 12 bytes, times a half each.
static void read_small_scales(const uint8_t *block, int part, float *scale, float *offset) {
    const uint8_t *first = block + 4, *second = first + 4, *high = first + 8;
    int i = part % 4, small, minimum;
    if (part < 4) {
        small = first[i] & 63;
        minimum = second[i] & 63;
    } else {
        small = (high[i] & 15) | first[i] >> 6 << 4;
        minimum = high[i] >> 4 | second[i] >> 6 << 4;
    }
    *scale = (float)small * float_of_half(block);
    *offset = -((float)minimum * float_of_half(block + 2));
}

// Of the two groups of a part.
static void read_scales(int64_t format, const uint8_t *block, int part, float scales[2], float *offset) {
    *offset = 0;
    switch (format) {
        case 5: case 6:
            read_small_scales(block, part, scales, offset);
            break;
        case 7:
            for (int g = 0; g < 2; g++) scales[g] = (float)(int8_t)block[192 + 2 * part + g] * float_of_half(block + 208);
            return;
        default:
            scales[0] = float_of_half(block);
            if (format == 1 || format == 3) *offset = float_of_half(block + 2);
    }
    scales[1] = scales[0];
}

static void decode_part(int64_t format, const uint8_t *block, int part, float *y) {
    const int has_offset = format == 1 || format == 3 || format == 5 || format == 6;
    uint8_t codes[QUANTISED_BLOCK];
    float scales[2], offset;
    int zero = 128;
    block_formats[format].unpack(block, part, codes);
    if (block_formats[format].code_bytes == HALF) {
        zero = format == 0 ? 8 : 0;
        for (int i = 0; i < HALF; i++) {
            codes[HALF + i] = codes[i] >> 4;
            codes[i] &= 15;
        }
    }
    read_scales(format, block, part, scales, &offset);
    for (int i = 0; i < QUANTISED_BLOCK; i++) y[i] = (float)(codes[i] - zero) * scales[i / GROUP];
    if (!has_offset) return;
    __asm__ volatile("" ::: "memory");  // the products are rounded before the sums
    for (int i = 0; i < QUANTISED_BLOCK; i++) y[i] += offset;
}

static void decode_blocks(const embed_call *c, const uint8_t *row, float *y) {
    const block_format *format = &block_formats[c->format];
    const int64_t blocks = c->width / (QUANTISED_BLOCK * format->parts);
    for (int64_t b = 0; b < blocks; b++, row += format->bytes)
        for (int part = 0; part < format->parts; part++, y += QUANTISED_BLOCK) decode_part(c->format, row, part, y);
}

static void widen_row(int is_bf16, const uint16_t *row, int64_t width, float *y) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(y + i, is_bf16 ? load_bf16(row + i) : load_halves(row + i));
    if (i == width) return;
    uint16_t rest[W] = {0};
    float numbers[W];
    memcpy(rest, row + i, (size_t)(width - i) * 2);
    store(numbers, is_bf16 ? load_bf16(rest) : load_halves(rest));
    memcpy(y + i, numbers, (size_t)(width - i) * 4);
}

static void embed_unit(void *context, int64_t unit) {
    const embed_call *c = context;
    const int64_t end = (unit + 1) * ROWS_PER_UNIT < c->rows ? (unit + 1) * ROWS_PER_UNIT : c->rows;
    for (int64_t i = unit * ROWS_PER_UNIT; i < end; i++) {
        const int64_t place = c->ids[i] - c->first;
        float *y = c->y + i * c->width;
        if (place < 0 || place >= c->count) {
            memset(y, 0, (size_t)c->width * 4);
            continue;
        }
        const uint8_t *row = c->table + place * c->row_bytes;
        if (c->format < FIRST_OF_FLOATS)
            decode_blocks(c, row, y);
        else if (c->format == FIRST_OF_FLOATS)
            memcpy(y, row, (size_t)c->width * 4);
        else
            widen_row(c->format == FIRST_OF_FLOATS + 2, (const uint16_t *)row, c->width, y);
    }
}

int ratoon_embed_part(int64_t format, const void *table, int64_t row_bytes, int64_t count, int64_t first, int64_t total,
                      const int64_t *ids, int64_t rows, int64_t width, float *y) {
    for (int64_t i = 0; i < rows; i++)
        if (ids[i] < 0 || ids[i] >= total) return -1;
    embed_call c = {format, table, row_bytes, count, first, ids, rows, width, y};
    parallel_units(embed_unit, &c, (rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT);
    return 0;
}

int ratoon_embed(int64_t format, const void *table, int64_t row_bytes, int64_t count, const int64_t *ids, int64_t rows,
                 int64_t width, float *y) {
    return ratoon_embed_part(format, table, row_bytes, count, 0, count, ids, rows, width, y);
}
