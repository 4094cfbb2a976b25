// Pictures of another size beside their definition, in whole numbers: the results are equal, bit for bit.
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define HALF (1 << 21)

static uint8_t *random_picture(int64_t bytes) {
    uint8_t *picture = guarded(bytes);
    for (int64_t i = 0; i < bytes; i++) picture[i] = random_bits() % 3 ? (uint8_t)random_bits() : random_bits() % 2 ? 0 : 255;
    return picture;
}

// Weights whose sum is 1, of which some are below 0, so that sums leave the range of a byte in both directions.
static void draw_weights(int64_t old_size, int64_t new_size, int64_t taps, int32_t *first, int32_t *weights) {
    for (int64_t i = 0; i < new_size; i++) {
        first[i] = (int32_t)random_between(0, old_size - taps);
        int32_t rest = 2 * HALF;
        for (int64_t tap = 0; tap < taps - 1; tap++) {
            weights[i * taps + tap] = (int32_t)random_between(-HALF / 4, HALF / 2);
            rest -= weights[i * taps + tap];
        }
        weights[i * taps + taps - 1] = rest;
    }
}

static uint8_t rounded_sum(const uint8_t *from, int64_t distance, const int32_t *weights, int64_t taps) {
    int64_t total = HALF;
    for (int64_t tap = 0; tap < taps; tap++) total += (int64_t)weights[tap] * from[tap * distance];
    total >>= 22;
    return total < 0 ? 0 : total > 255 ? 255 : (uint8_t)total;
}

static void compare(int64_t height, int64_t width, int64_t new_size, int64_t taps) {
    int32_t *first = guarded(new_size * 4), *weights = guarded(new_size * taps * 4);
    if (taps <= width) {
        uint8_t *picture = random_picture(height * width * 3), *beside = guarded(width * 16);
        uint8_t *resized = guarded(height * new_size * 3);
        draw_weights(width, new_size, taps, first, weights);
        ratoon_resize_width(picture, height, width, new_size, first, weights, taps, beside, resized);
        for (int64_t y = 0; y < height; y++)
            for (int64_t i = 0; i < new_size * 3; i++) {
                const uint8_t *from = picture + (y * width + first[i / 3]) * 3 + i % 3;
                const uint8_t expected = rounded_sum(from, 3, weights + i / 3 * taps, taps);
                expect_true(resized[y * new_size * 3 + i] == expected, "a new width", y, i);
            }
    }
    if (taps <= height) {
        const int64_t row_bytes = width * 3;
        uint8_t *picture = random_picture(height * row_bytes), *resized = guarded(new_size * row_bytes);
        draw_weights(height, new_size, taps, first, weights);
        ratoon_resize_height(picture, row_bytes, new_size, first, weights, taps, resized);
        for (int64_t y = 0; y < new_size; y++)
            for (int64_t i = 0; i < row_bytes; i++) {
                const uint8_t expected = rounded_sum(picture + first[y] * row_bytes + i, row_bytes, weights + y * taps, taps);
                expect_true(resized[y * row_bytes + i] == expected, "a new height", y, i);
            }
    }
    release_all();
}

void check_resize(void) {
    for (int64_t height = 1; height <= 9; height++)
        for (int64_t width = 1; width <= 9; width++) compare(height, width, random_between(1, 12), random_between(1, 5));
    compare(21, 40, 33, 7);
    compare(30, 17, 5, 13);
}
