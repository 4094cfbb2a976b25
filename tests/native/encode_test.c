// Floats to codes of 4 and 8 bits: scales that lose no more than the plain choice does, and the nearest codes.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "quantised.h"

#define BLOCK QUANTISED_BLOCK

static int code_at(const uint8_t *codes, int64_t block, int bits, int i) {
    if (bits == 8) return (int8_t)codes[block * BLOCK + i];
    uint8_t both = codes[block * BLOCK / 2 + i % (BLOCK / 2)];
    return i < BLOCK / 2 ? both & 15 : both >> 4;
}

// Codes are those of the nearest multiples; where two are equally near up to rounding, either.
static void expect_nearest(const float *x, int64_t block, int bits, double scale, double offset, const uint8_t *codes) {
    int least = bits == 8 ? -127 : 0, largest = bits == 8 ? 127 : 15;
    for (int i = 0; i < BLOCK; i++) {
        double exact = scale == 0 ? 0 : (x[i] - offset) / scale, roundings = 3 * UNIT * (fabs(exact) + fabs(offset / scale));
        int code = code_at(codes, block, bits, i);
        double clipped = exact < least ? least : exact > largest ? largest : exact;
        expect_true(code >= least && code <= largest, "a code is in its range", block, i);
        if (scale != 0) expect(code, clipped, 0.5 + roundings, "nearest code", block, i);
    }
}

static double squared_error(const float *x, int64_t block, int bits, double scale, double offset, const uint8_t *codes) {
    double sum = 0;
    for (int i = 0; i < BLOCK; i++) {
        double rest = x[i] - (scale * code_at(codes, block, bits, i) + offset);
        sum += rest * rest;
    }
    return sum;
}

// What is lost with 16 equal steps from the least number to the largest.
static double plain_error(const float *x, double *size) {
    double low = x[0], high = x[0], sum = 0;
    for (int i = 0; i < BLOCK; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    double step = (high - low) / 15;
    for (int i = 0; i < BLOCK; i++) {
        double code = step > 0 ? nearbyint((x[i] - low) / step) : 0, rest = x[i] - (low + code * step);
        sum += rest * rest;
    }
    *size = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
    return sum;
}

static void compare(int64_t blocks, int bits) {
    float *x = random_floats(blocks * BLOCK, 1), *scales = guarded_floats(blocks), *offsets = bits == 4 ? guarded_floats(blocks) : NULL;
    int64_t code_bytes = blocks * BLOCK * bits / 8;
    uint8_t *codes = guarded(code_bytes);
    memset(codes, 0xa5, (size_t)code_bytes);
    for (int64_t block = 0; block < blocks; block++) {  // of many sizes, with a mean; some of equal numbers, or of zeros
        float size = ldexpf(1, (int)random_between(-12, 3)), mean = random_float() * size, kind = (float)random_between(0, 11);
        for (int i = 0; i < BLOCK; i++) {
            float *number = &x[block * BLOCK + i];
            *number = kind == 0 ? 0 : kind == 1 ? mean : mean + size * *number;
        }
    }
    ratoon_fit_scales(x, blocks, bits, scales, offsets);
    ratoon_encode(x, blocks, bits, scales, offsets, codes);
    for (int64_t block = 0; block < blocks; block++) {
        const float *numbers = x + block * BLOCK;
        double offset = offsets ? offsets[block] : 0;
        expect_nearest(numbers, block, bits, scales[block], offset, codes);
        if (bits == 8) {
            double largest = 0;
            for (int i = 0; i < BLOCK; i++) largest = fabs(numbers[i]) > largest ? fabs(numbers[i]) : largest;
            expect(scales[block], largest / 127, largest / 127 * UNIT, "scale of 8 bits", block, 0);
        } else {
            // Each number, and each step of a fit over 32, is rounded: an error of up to some UNIT of the largest number, squared
            // and beside the error of the steps.
            double size, plain = plain_error(numbers, &size), slack = 64 * UNIT * size;
            double found = squared_error(numbers, block, bits, scales[block], offset, codes);
            expect_true(sqrt(found) <= sqrt(plain) + sqrt(BLOCK) * slack, "a fit loses no more than equal steps", block, 0);
        }
    }
    release_all();
}

// A number that is no number gives a scale that is none, so that loading can say so; codes stay in their range.
static void compare_not_finite(int bits) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int kind = 0; kind < 3; kind++) {
        float *x = random_floats(BLOCK, 1), *scale = guarded_floats(1), *offset = guarded_floats(1);
        uint8_t *codes = guarded(BLOCK * bits / 8);
        x[random_between(0, BLOCK - 1)] = bad[kind];
        ratoon_fit_scales(x, 1, bits, scale, offset);
        if (bits == 8) expect_true(!isfinite(*scale), "the scale of what is not finite", kind, 0);
        ratoon_encode(x, 1, bits, scale, bits == 4 ? offset : NULL, codes);
        for (int i = 0; bits == 8 && i < BLOCK; i++) expect_true(code_at(codes, 0, bits, i) >= -127, "a code is in its range", kind, i);
        release_all();
    }
}

void check_encode(void) {
    for (int bits = 4; bits <= 8; bits += 4) {
        compare(1, bits);
        compare(2051, bits);  // more than one unit of work, and fewer left than a vector has lanes
        for (int i = 0; i < 6; i++) compare(random_between(1, 70), bits);
        compare_not_finite(bits);
    }
}
