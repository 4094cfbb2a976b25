// Compares products with quantised weights with a plain loop that follows their definition, bit by bit, and prints one
// checksum of all results: it is the same for every instruction set. Built with
// quantised*.c, rows.c and threads.c.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quantised.h"

int ratoon_set_threads(int threads);

static uint64_t state = 1;
static uint32_t random_bits(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}
static float random_float(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

static float half_to_float(uint16_t half) {  // no infinities or NaNs here
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    float value = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return half & 0x8000 ? -value : value;
}

typedef struct {
    int bits, group, offsets, bias;
    float multiplier;
} form;

static int code_at(const quantised_weight *w, int64_t column, int64_t k) {
    int64_t panel = column / 16, lane = column % 16, block = k / 32, quad = k % 32 / 4, byte = k % 4;
    if (w->bits == 8) return w->codes[((panel * (w->in / 32) + block) * 8 + quad) * 64 + lane * 4 + byte];
    uint8_t both = w->codes[((panel * (w->in / 32) + block) * 4 + quad % 4) * 64 + lane * 4 + byte];
    return quad < 4 ? both & 15 : both >> 4;
}

// The definition, for one result.
static float product(const quantised_weight *w, const float *x, int64_t column) {
    int zero = w->bits == 8 ? 128 : w->offsets ? 0 : 8;
    int64_t groups_of_row = w->in / w->group;
    float acc = 0;
    for (int64_t block = 0; block < w->in / 32; block++) {
        float maximum = 0;
        int bad = 0, codes[32], sum = 0;
        for (int k = 0; k < 32; k++) {
            float value = fabsf(x[block * 32 + k]);
            bad |= !(value <= 3.402823466e38f);
            maximum = value > maximum ? value : maximum;
        }
        float scale = bad ? NAN : maximum < 1e-30f ? 0 : maximum / 127.0f;
        for (int k = 0; k < 32; k++) {
            volatile float scaled = bad || scale == 0 ? 0 : x[block * 32 + k] * (127.0f / maximum);
            codes[k] = (int)nearbyintf(scaled);
            sum += codes[k];
        }
        for (int first = 0; first < 32; first += w->group) {
            int dot = 0;
            for (int k = first; k < first + w->group; k++) dot += codes[k] * (code_at(w, column, block * 32 + k) - zero);
            int64_t index = ((column / 16) * groups_of_row + (block * 32 + first) / w->group) * 16 + column % 16;
            volatile float both = half_to_float(w->scales[index]) * scale;
            acc = fmaf((float)dot, both, acc);
        }
        if (w->offsets) {
            volatile float scaled_sum = scale * (float)sum;
            acc = fmaf(scaled_sum, half_to_float(w->offsets[((column / 16) * groups_of_row + block) * 16 + column % 16]), acc);
        }
    }
    return fmaf(acc, w->multiplier, w->bias ? w->bias[column] : 0.0f);
}

static uint64_t checksum = 14695981039346656037ull;

static int same(float a, float b) { return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b)); }

static int run(form f, int64_t rows, int64_t in, int64_t out, int special) {
    int64_t panels = (out + 15) / 16, ldx = in + 5, ldy = out + 3;
    size_t code_bytes = (size_t)(panels * 16 * in * f.bits / 8), num_scales = (size_t)(panels * 16 * (in / f.group));
    uint8_t *codes = malloc(code_bytes);
    uint16_t *scales = malloc(num_scales * 2), *offsets = malloc(num_scales * 2);
    float *bias = malloc((size_t)out * 4), *x = malloc((size_t)(rows * ldx) * 4), *y = malloc((size_t)(rows * ldy) * 4);
    void *scratch = malloc((size_t)((rows + QUANTISED_ROOM) * ratoon_quantised_scratch(in)));
    for (size_t i = 0; i < code_bytes; i++) codes[i] = (uint8_t)random_bits();
    for (size_t i = 0; i < num_scales; i++) {
        scales[i] = (uint16_t)(random_bits() % 0x7000 | (random_bits() & 0x8000));  // subnormal ones too
        offsets[i] = (uint16_t)(random_bits() % 0x7000 | (random_bits() & 0x8000));
    }
    for (int64_t i = 0; i < out; i++) bias[i] = random_float();
    for (int64_t i = 0; i < rows * ldx; i++) x[i] = random_float() * ldexpf(1, (int)(random_bits() % 8));
    if (special) {  // a block of zeros, a tiny one, the largest floats; a NaN and an infinity in rows of their own
        for (int k = 0; k < 32; k++) x[k] = 0, x[ldx + k] = 1e-35f, x[2 * ldx + k] *= 1e35f;
        x[3 * ldx + 1] = NAN, x[4 * ldx + 2] = INFINITY;
    }
    for (int64_t i = 0; i < rows * ldy; i++) y[i] = 12345.0f;
    quantised_weight w = {codes, scales, f.offsets ? offsets : NULL, f.bias ? bias : NULL, in, out, f.bits, f.group, f.multiplier};
    ratoon_quantised_linear(&w, x, ldx, rows, scratch, y, ldy);
    int wrong = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < ldy; column++) {
            float found = y[row * ldy + column];
            float expected = column < out ? product(&w, x + row * ldx, column) : 12345.0f;
            if (!same(found, expected) && wrong++ == 0)
                printf("bits %d group %d offsets %d, %lld x %lld x %lld: row %lld column %lld is %a, not %a\n", f.bits, f.group,
                       f.offsets, (long long)rows, (long long)in, (long long)out, (long long)row, (long long)column, found,
                       expected);
            uint32_t bits;
            memcpy(&bits, &found, 4);
            checksum = (checksum ^ (isnan(found) ? 0x7fc00000 : bits)) * 1099511628211ull;
        }
    free(codes), free(scales), free(offsets), free(bias), free(x), free(y), free(scratch);
    return wrong;
}

int main(void) {
    static const form forms[] = {{4, 32, 0, 0, 1}, {4, 32, 1, 1, 1}, {8, 32, 0, 1, 1}, {8, 32, 1, 0, 0x1p-9f}, {8, 16, 0, 1, 0x1p-7f}};
    int wrong = 0;
    for (int threads = 1; threads <= 2; threads++) {
        ratoon_set_threads(threads);
        for (int i = 0; i < 5; i++) {
            for (int64_t rows = 1; rows <= 19; rows += rows < 9 ? 1 : 5) wrong += run(forms[i], rows, 96, 1 + 13 * rows % 70, 0);
            wrong += run(forms[i], 101, 32, 33, 0);
            wrong += run(forms[i], 2, 1600, 17, 0);
            wrong += run(forms[i], 29, 1600, 55, 0);
            wrong += run(forms[i], 230, 64, 16, 0);
            wrong += run(forms[i], 7, 64, 30, 1);
            wrong += run(forms[i], 21, 64, 30, 1);
        }
    }
    printf("checksum %016llx\n", (unsigned long long)checksum);
    return wrong != 0;
}
