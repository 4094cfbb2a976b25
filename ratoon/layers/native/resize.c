// Pictures of another width or height: every new pixel is a weighted sum of old ones, in whole numbers.
//
// The arithmetic is that of Pillow (weights of 22 bits behind the point, sums rounded to bytes after each direction), so that the
// result has its bits. The caller computes the weights. Nothing here runs on several threads: pictures do, beside each other.
#include <string.h>

#include "kernels.h"
#include "vector.h"

#define LANES 16
#define CHANNELS 3
#define PADDED 4                  // bytes that a pixel takes among those of other rows
#define ROWS (LANES / PADDED)     // that are resized at once
#define BITS 22                   // of a weight, behind the point
#define HALF (1 << (BITS - 1))

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int32_t sums __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE sums widened(const uint8_t *p) { return __builtin_convertvector(*(const bytes *)p, sums); }

INLINE bytes rounded(sums total) {
    total >>= BITS;
#if defined(__clang__)
    total = __builtin_elementwise_min(__builtin_elementwise_max(total, (sums){}), (sums){} + 255);
#else
    total &= total > 0;
    total = (total & (total < 255)) | (255 & (total >= 255));
#endif
    return __builtin_convertvector(total, bytes);
}

// The pixels of ROWS rows beside each other: [width][ROWS][PADDED].
static void interleave(const uint8_t *const rows[ROWS], int64_t width, uint8_t *beside) {
    for (int64_t x = 0; x < width - 1; x++)
        for (int row = 0; row < ROWS; row++) memcpy(beside + x * LANES + row * PADDED, rows[row] + x * CHANNELS, PADDED);
    for (int row = 0; row < ROWS; row++) {  // no byte is read behind a row's end
        uint8_t *last = beside + (width - 1) * LANES + row * PADDED;
        memcpy(last, rows[row] + (width - 1) * CHANNELS, CHANNELS);
        last[CHANNELS] = 0;
    }
}

// A new column of ROWS rows.
INLINE bytes column_of(const uint8_t *from, const int32_t *weights, int64_t taps) {
    sums total = (sums){} + HALF;
    for (int64_t tap = 0; tap < taps; tap++) total += weights[tap] * widened(from + tap * LANES);
    return rounded(total);
}

void ratoon_resize_width(const uint8_t *picture, int64_t height, int64_t width, int64_t new_width, const int32_t *first,
                         const int32_t *weights, int64_t taps, uint8_t *beside, uint8_t *resized) {
    for (int64_t top = 0; top < height; top += ROWS) {
        const uint8_t *rows[ROWS];
        uint8_t *to[ROWS];
        for (int row = 0; row < ROWS; row++) {  // behind the last row of a picture, that one again
            const int64_t y = top + row < height ? top + row : height - 1;
            rows[row] = picture + y * width * CHANNELS;
            to[row] = resized + y * new_width * CHANNELS;
        }
        interleave(rows, width, beside);
        for (int64_t x = 0; x < new_width - 1; x++) {  // a fourth byte goes into the next pixel, which is written next
            const bytes column = column_of(beside + (int64_t)first[x] * LANES, weights + x * taps, taps);
            for (int row = 0; row < ROWS; row++)
                memcpy(to[row] + x * CHANNELS, (const uint8_t *)&column + row * PADDED, PADDED);
        }
        const int64_t last = new_width - 1;
        const bytes column = column_of(beside + (int64_t)first[last] * LANES, weights + last * taps, taps);
        for (int row = 0; row < ROWS; row++)
            memcpy(to[row] + last * CHANNELS, (const uint8_t *)&column + row * PADDED, CHANNELS);
    }
}

void ratoon_resize_height(const uint8_t *picture, int64_t row_bytes, int64_t new_height, const int32_t *first,
                          const int32_t *weights, int64_t taps, uint8_t *resized) {
    for (int64_t y = 0; y < new_height; y++) {
        const uint8_t *from = picture + first[y] * row_bytes;
        const int32_t *of = weights + y * taps;
        uint8_t *to = resized + y * row_bytes;
        int64_t i = 0;
        for (; i + LANES <= row_bytes; i += LANES) {
            sums total = (sums){} + HALF;
            for (int64_t tap = 0; tap < taps; tap++) total += of[tap] * widened(from + tap * row_bytes + i);
            *(bytes *)(to + i) = rounded(total);
        }
        for (; i < row_bytes; i++) {
            int32_t total = HALF;
            for (int64_t tap = 0; tap < taps; tap++) total += of[tap] * from[tap * row_bytes + i];
            total >>= BITS;
            to[i] = total < 0 ? 0 : total > 255 ? 255 : (uint8_t)total;
        }
    }
}
