// Products with weights in float32, bf16 and fp16.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

static void compare(int64_t rows, int64_t in, int64_t out, int with_bias) {
    int64_t ldx = in + random_between(0, 5), ldy = out + random_between(0, 5);
    float *x = random_floats((rows - 1) * ldx + in, 2), *weight = random_floats(out * in, 1);
    float *bias = with_bias ? random_floats(out, 3) : NULL;
    float *packed = guarded_floats(ratoon_packed_size(out, in)), *y = guarded_floats(rows * ldy), *alone = guarded_floats(out);
    ratoon_pack_weight(weight, out, in, packed);
    ratoon_linear(x, ldx, rows, packed, in, out, bias, y, ldy);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < ldy; column++) {
            float found = y[row * ldy + column];
            if (column >= out) {
                expect_true(is_poison(found), "a product leaves what is between its rows", row, column);
                continue;
            }
            double sum = bias ? bias[column] : 0, sizes = fabs(sum);
            for (int64_t k = 0; k < in; k++) {
                double term = (double)x[row * ldx + k] * weight[column * in + k];
                sum += term;
                sizes += fabs(term);
            }
            expect(found, sum, sum_error(in) * sizes, "product", row, column);
        }
    int64_t row = random_between(0, rows - 1);
    ratoon_linear(x + row * ldx, ldx, 1, packed, in, out, bias, alone, out);
    expect_true(memcmp(alone, y + row * ldy, (size_t)out * 4) == 0, "a row has the same bits alone", row, 0);
    release_all();
}

// Weights in 16 bits give the bits of the same numbers as floats. All numbers here are exact in bf16 and in fp16.
static void compare_16(int64_t rows, int64_t in, int64_t out, int is_bf16) {
    float *x = random_floats(rows * in, 1), *weight = guarded_floats(out * in);
    uint16_t *halves = (uint16_t *)guarded_floats((out * in + 1) / 2);
    for (int64_t i = 0; i < out * in; i++) {
        int64_t exponent = random_between(-14, 3), significand = random_between(0, 127), sign = random_between(0, 1);
        weight[i] = ldexpf((float)(128 + significand) / 128, (int)exponent) * (sign ? -1.0f : 1.0f);
        halves[i] = (uint16_t)(is_bf16 ? sign << 15 | (exponent + 127) << 7 | significand
                                       : sign << 15 | (exponent + 15) << 10 | significand << 3);
    }
    float *wide = guarded_floats(ratoon_packed_size(out, in)), *narrow = guarded_floats(ratoon_packed_size_16(out, in));
    float *expected = guarded_floats(rows * out), *found = guarded_floats(rows * out);
    ratoon_pack_weight(weight, out, in, wide);
    ratoon_pack_weight_16(halves, out, in, is_bf16, narrow);
    ratoon_linear(x, in, rows, wide, in, out, NULL, expected, out);
    ratoon_linear(x, in, rows, narrow, in, out, NULL, found, out);
    expect_true(memcmp(expected, found, (size_t)(rows * out) * 4) == 0, "16 bits give the bits of floats", rows, in);
    release_all();
}

// Products of encoders: within the error of numbers of 16 bits where the matrix unit makes them, and those of ratoon_linear elsewhere.
static void compare_encoder(int64_t rows, int64_t in, int64_t out, int with_bias, int activation) {
    int64_t ldx = in + random_between(0, 5), ldy = out + random_between(0, 5);
    float *x = random_floats((rows - 1) * ldx + in, 2), *weight = random_floats(out * in, 1);
    float *bias = with_bias ? random_floats(out, 3) : NULL;
    float *packed = guarded_floats(ratoon_packed_size(out, in)), *y = guarded_floats(rows * ldy), *alone = guarded_floats(out);
    float *plain = guarded_floats(rows * out), *activated = guarded_floats(rows * out);
    const double rounding = ratoon_has_encoder_matrices() ? ldexp(1, -16) : 0;
    ratoon_pack_weight(weight, out, in, packed);
    expect_true(ratoon_encoder_linear(x, ldx, rows, packed, in, out, bias, -1, plain, out) == 0, "there is memory", rows, in);
    expect_true(ratoon_encoder_linear(x, ldx, rows, packed, in, out, bias, activation, y, ldy) == 0, "there is memory", rows, in);
    if (activation >= 0) ratoon_activation(plain, out, activated, rows, out, activation);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < ldy; column++) {
            if (column >= out) {
                expect_true(is_poison(y[row * ldy + column]), "a product leaves what is between its rows", row, column);
                continue;
            }
            double sum = bias ? bias[column] : 0, sizes = fabs(sum);
            for (int64_t k = 0; k < in; k++) {
                double term = (double)x[row * ldx + k] * weight[column * in + k];
                sum += term;
                sizes += fabs(term);
            }
            expect(plain[row * out + column], sum, (sum_error(in) + rounding) * sizes, "product of an encoder", row, column);
            const float wanted = activation < 0 ? plain[row * out + column] : activated[row * out + column];
            expect_true(memcmp(&wanted, &y[row * ldy + column], 4) == 0, "the activation is that of its own kernel", row, column);
        }
    int64_t row = random_between(0, rows - 1);
    ratoon_encoder_linear(x + row * ldx, ldx, 1, packed, in, out, bias, -1, alone, out);
    expect_true(memcmp(alone, plain + row * out, (size_t)out * 4) == 0, "a row has the same bits alone", row, 0);
    release_all();
}

// Weights in 16 bits give the bits of the same numbers as floats here, too.
static void compare_encoder_16(int64_t rows, int64_t in, int64_t out, int is_bf16) {
    float *x = random_floats(rows * in, 1), *weight = guarded_floats(out * in);
    uint16_t *halves = (uint16_t *)guarded_floats((out * in + 1) / 2);
    for (int64_t i = 0; i < out * in; i++) {
        int64_t exponent = random_between(-14, 3), significand = random_between(0, is_bf16 ? 127 : 1023), sign = random_between(0, 1);
        weight[i] = ldexpf(1 + (float)significand / (is_bf16 ? 128 : 1024), (int)exponent) * (sign ? -1.0f : 1.0f);
        halves[i] = (uint16_t)(is_bf16 ? sign << 15 | (exponent + 127) << 7 | significand
                                       : sign << 15 | (exponent + 15) << 10 | significand);
    }
    float *wide = guarded_floats(ratoon_packed_size(out, in)), *narrow = guarded_floats(ratoon_packed_size_16(out, in));
    float *expected = guarded_floats(rows * out), *found = guarded_floats(rows * out);
    ratoon_pack_weight(weight, out, in, wide);
    ratoon_pack_weight_16(halves, out, in, is_bf16, narrow);
    ratoon_encoder_linear(x, in, rows, wide, in, out, NULL, -1, expected, out);
    ratoon_encoder_linear(x, in, rows, narrow, in, out, NULL, -1, found, out);
    expect_true(memcmp(expected, found, (size_t)(rows * out) * 4) == 0, "16 bits give an encoder the bits of floats", rows, in);
    release_all();
}

static void check_encoders(void) {
    compare_encoder(1, 1, 1, 0, -1);
    compare_encoder(257, 70, 35, 1, 3);  // more than one block of rows
    compare_encoder(33, 1100, 50, 1, 3);  // more than one stretch of inputs
    compare_encoder(40, 800, 48, 1, 3);   // columns that fill their panels
    for (int i = 0; i < 16; i++)
        compare_encoder(random_between(1, 70), random_between(1, 300), random_between(1, 120), (int)random_between(0, 1),
                        (int)random_between(-1, 4));
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) compare_encoder_16(random_between(1, 60), 600, 40, is_bf16);
}

void check_linear(void) {
    check_encoders();
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++)
        for (int64_t rows = 1; rows < 40; rows += random_between(1, 7)) {
            compare_16(rows, random_between(1, 300), random_between(1, 70), is_bf16);
            compare_16(rows, 800, 33, is_bf16);
        }
    compare(1, 1, 1, 0);
    compare(2, 1537, 19, 1);  // more than one block of depth
    compare(97, 66, 17, 1);   // more than one block of rows
    compare(98, 770, 3, 0);
    compare(700, 780, 390, 1);  // units with so many panels that each lays out its own rows, in two stretches of the depth
    compare(40, 780, 48, 0);    // columns that fill their panels
    for (int i = 0; i < 24; i++)
        compare(random_between(1, 30), random_between(1, 200), random_between(1, 70), (int)random_between(0, 1));
}
