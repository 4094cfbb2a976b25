// Products with quantised weights have the bits of a plain loop that follows their definition: sums of codes are exact, and
// what is rounded is rounded in one order. Blocks with outliers have finer codes.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"
#include "quantised.h"

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

static float scale_of(const float *x, float *maximum) {
    int bad = 0;
    *maximum = 0;
    for (int k = 0; k < 32; k++) {
        bad |= !(fabsf(x[k]) <= 3.402823466e38f);
        *maximum = fabsf(x[k]) > *maximum ? fabsf(x[k]) : *maximum;
    }
    return bad ? NAN : *maximum < 1e-30f ? 0 : *maximum / 127.0f;
}

// The definition, for one result.
static float product(const quantised_weight *w, const float *x, int64_t column) {
    int zero = w->bits == 8 ? 128 : w->offsets ? 0 : 8;
    int64_t groups_of_row = w->in / w->group;
    float acc = 0, squares = 0;
    for (int64_t block = 0; block < w->in / 32; block++) {
        float maximum, scale = scale_of(x + block * 32, &maximum);
        squares = fmaf(scale, scale, squares);
    }
    volatile float share = QUANTISED_LARGE / (float)(w->in / 32), limit = squares * share;
    for (int64_t block = 0; block < w->in / 32; block++) {
        float maximum, scale = scale_of(x + block * 32, &maximum), factor = 127.0f / maximum;
        volatile float square = scale * scale;
        int codes[32], sum = 0;  // in units of 1 / 128
        for (int k = 0; k < 32; k++) {
            volatile float scaled = isnan(scale) || scale == 0 ? 0 : x[block * 32 + k] * factor;
            codes[k] = 128 * (int)nearbyintf(scaled);
            if (square > limit) codes[k] += (int)nearbyintf(fmaf(x[block * 32 + k], factor, -nearbyintf(scaled)) * 128);
            sum += codes[k];
        }
        for (int first = 0; first < 32; first += w->group) {
            int dot = 0;
            for (int k = first; k < first + w->group; k++) dot += codes[k] * (code_at(w, column, block * 32 + k) - zero);
            int64_t index = ((column / 16) * groups_of_row + (block * 32 + first) / w->group) * 16 + column % 16;
            volatile float both = half_to_float(w->scales[index]) * scale;
            acc = fmaf((float)dot / 128, both, acc);
        }
        if (w->offsets) {
            volatile float scaled_sum = scale * ((float)sum / 128);
            acc = fmaf(scaled_sum, half_to_float(w->offsets[((column / 16) * groups_of_row + block) * 16 + column % 16]), acc);
        }
    }
    return fmaf(acc, w->multiplier, w->bias ? w->bias[column] : 0.0f);
}

static int same(float a, float b) { return same_bits(a, b) || (isnan(a) && isnan(b) && !is_poison(a)); }

static quantised_weight random_weight(form f, int64_t in, int64_t out) {
    int64_t panels = (out + 15) / 16, code_bytes = panels * 16 * in * f.bits / 8, num_scales = panels * 16 * (in / f.group);
    uint8_t *codes = guarded(code_bytes);
    uint16_t *scales = guarded(num_scales * 2), *offsets = f.offsets ? guarded(num_scales * 2) : NULL;
    for (int64_t i = 0; i < code_bytes; i++) codes[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < num_scales; i++) {
        scales[i] = (uint16_t)(random_bits() % 0x7000 | (random_bits() & 0x8000));  // subnormal ones too
        if (offsets) offsets[i] = (uint16_t)(random_bits() % 0x7000 | (random_bits() & 0x8000));
    }
    float *bias = f.bias ? random_floats(out, 1) : NULL;
    return (quantised_weight){codes, scales, offsets, bias, in, out, f.bits, f.group, f.multiplier};
}

// Every kernel gives the bits of the one that is chosen by default, whatever the number of rows.
static void compare_kernels(quantised_weight w, const float *x, int64_t ldx, int64_t rows, void *scratch, const float *y,
                            int64_t ldy) {
    static const int32_t never = INT32_MAX, choices[][2] = {{never, never}, {1, never}, {never, 1}, {3, 5}, {2, 16}, {never, 17}};
    for (int i = 0; i < 6; i++) {
        float *other = guarded_floats(rows * ldy);
        w.unpack_from = choices[i][0], w.matrices_from = choices[i][1];
        const int64_t kernel = ratoon_quantised_kernel(&w, rows);
        expect_true(i == 0 ? kernel == 0 : i == 1 ? kernel == 1 : i == 2 ? kernel != 1 : kernel <= 2, "a kernel is chosen", i, kernel);
        ratoon_quantised_linear(&w, x, ldx, rows, scratch, other, ldy);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < w.out; column++)
                if (!same(other[row * ldy + column], y[row * ldy + column]))
                    expect(other[row * ldy + column], y[row * ldy + column], -1, "product by another kernel", row, column);
    }
}

static void compare(form f, int64_t rows, int64_t in, int64_t out, int special) {
    int64_t ldx = in + 5, ldy = out + 3;
    quantised_weight w = random_weight(f, in, out);
    float *x = guarded_floats((rows - 1) * ldx + in), *y = guarded_floats(rows * ldy);
    void *scratch = guarded((rows + QUANTISED_ROOM) * ratoon_quantised_scratch(in));
    for (int64_t i = 0; i < (rows - 1) * ldx + in; i++) x[i] = random_float() * ldexpf(1, (int)(random_bits() % 8));
    for (int64_t row = 0; row < rows; row++)  // outliers: most rows have some, in blocks of their own
        for (int k = (int)(random_bits() % 4); k > 0 && in > 96; k--) x[row * ldx + random_between(0, in - 1)] *= 64;
    if (special) {  // a block of zeros, a tiny one, the largest floats; a NaN and an infinity in rows of their own
        for (int k = 0; k < 32; k++) x[k] = 0, x[ldx + k] = 1e-35f, x[2 * ldx + k] *= 1e35f;
        x[3 * ldx + 1] = NAN, x[4 * ldx + 2] = INFINITY;
    }
    ratoon_quantised_linear(&w, x, ldx, rows, scratch, y, ldy);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < ldy; column++) {
            float found = y[row * ldy + column];
            if (column >= out)
                expect_true(is_poison(found), "a product leaves what is between its rows", row, column);
            else if (!same(found, product(&w, x + row * ldx, column)))
                expect(found, product(&w, x + row * ldx, column), -1, "quantised product", row, column);
        }
    compare_kernels(w, x, ldx, rows, scratch, y, ldy);
    release_all();
}

// The gated half of a layer is its parts, one after the other.
static void compare_mlp(form first, form last, int64_t rows, int64_t in, int64_t inner, int64_t out) {
    quantised_weight gate_up = random_weight(first, in, 2 * inner), down = random_weight(last, inner, out);
    float *x = random_floats(rows * in, 2), *between = guarded_floats(3 * inner * rows), *y = guarded_floats(rows * out);
    float *both = guarded_floats(2 * inner * rows), *activated = guarded_floats(inner * rows), *expected = guarded_floats(rows * out);
    void *scratch = guarded((rows + QUANTISED_ROOM) * ratoon_quantised_scratch(in > inner ? in : inner));
    ratoon_quantised_gated_mlp(&gate_up, &down, x, in, rows, scratch, between, y);
    ratoon_quantised_linear(&gate_up, x, in, rows, scratch, both, 2 * inner);
    ratoon_silu_and_mul(both, 2 * inner, activated, rows, inner);
    ratoon_quantised_linear(&down, activated, inner, rows, scratch, expected, out);
    for (int64_t i = 0; i < rows * out; i++)
        if (!same(y[i], expected[i])) expect(y[i], expected[i], -1, "quantised gated mlp", i / out, i % out);
    release_all();
}

void check_quantised(void) {
    static const form forms[] = {{4, 32, 0, 0, 1}, {4, 32, 1, 1, 1}, {8, 32, 0, 1, 1}, {8, 32, 1, 0, 0x1p-9f}, {8, 16, 0, 1, 0x1p-7f}};
    for (int i = 0; i < 5; i++) {
        for (int64_t rows = 1; rows <= 19; rows += rows < 9 ? 1 : 5) compare(forms[i], rows, 96, random_between(1, 70), 0);
        compare(forms[i], 101, 32, 33, 0);
        compare(forms[i], 2, 1600, 17, 0);
        compare(forms[i], 5, 320, 50, 0);
        compare(forms[i], 29, 1600, 55, 0);
        compare(forms[i], 230, 64, 16, 0);
        compare(forms[i], 7, 64, 30, 1);
        compare(forms[i], 21, 64, 30, 1);
        compare_mlp(forms[i], forms[(i + 1) % 5], random_between(1, 9), 64, 96, 35);
    }
}
