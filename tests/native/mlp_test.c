// The gated feed-forward half of a layer, with float32 weights. The bound follows the error of the first product through the
// activation, whose slope is below 1.1, and the second product.
#include <math.h>

#include "checking.h"
#include "kernels.h"

static double product(const float *x, const float *weight, double bias, int64_t terms, double *error) {
    double sum = bias, sizes = fabs(bias);
    for (int64_t k = 0; k < terms; k++) {
        sum += (double)x[k] * weight[k];
        sizes += fabs((double)x[k] * weight[k]);
    }
    *error = sum_error(terms) * sizes;
    return sum;
}

static void compare(int64_t rows, int64_t in, int64_t inner, int64_t out, int with_bias) {
    int64_t ldx = in + random_between(0, 5);
    float *x = random_floats((rows - 1) * ldx + in, 2), *gate_up = random_floats(2 * inner * in, 1);
    float *down = random_floats(out * inner, 1), *y = guarded_floats(rows * out), *between = guarded_floats(3 * inner * rows);
    float *first_bias = with_bias ? random_floats(2 * inner, 1) : NULL, *last_bias = with_bias ? random_floats(out, 1) : NULL;
    float *first = guarded_floats(ratoon_packed_size(2 * inner, in)), *last = guarded_floats(ratoon_packed_size(out, inner));
    double *activated = guarded(inner * 8), *errors = guarded(inner * 8);
    ratoon_pack_weight(gate_up, 2 * inner, in, first);
    ratoon_pack_weight(down, out, inner, last);
    ratoon_gated_mlp(x, ldx, rows, first, first_bias, in, last, last_bias, inner, out, between, y);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < inner; i++) {
            double gate_error, up_error;
            double gate = product(x + row * ldx, gate_up + i * in, with_bias ? first_bias[i] : 0, in, &gate_error);
            double up = product(x + row * ldx, gate_up + (inner + i) * in, with_bias ? first_bias[inner + i] : 0, in, &up_error);
            double silu = gate / (1 + exp(-gate)), silu_error = 1.1 * gate_error + fabs(silu) * (EXP_ERROR + 3 * UNIT);
            activated[i] = silu * up;
            errors[i] = silu_error * (fabs(up) + up_error) + fabs(silu) * up_error + fabs(activated[i]) * UNIT;
        }
        for (int64_t column = 0; column < out; column++) {
            double sum = with_bias ? last_bias[column] : 0, sizes = fabs(sum), error = 0;
            for (int64_t i = 0; i < inner; i++) {
                double weight = down[column * inner + i];
                sum += activated[i] * weight;
                sizes += (fabs(activated[i]) + errors[i]) * fabs(weight);
                error += errors[i] * fabs(weight);
            }
            expect(y[row * out + column], sum, error + sum_error(inner) * sizes, "gated mlp", row, column);
        }
    }
    release_all();
}

void check_mlp(void) {
    compare(1, 1, 1, 1, 0);
    compare(19, 70, 45, 33, 1);
    for (int i = 0; i < 10; i++)
        compare(random_between(1, 9), random_between(1, 90), random_between(1, 70), random_between(1, 40), i % 2);
}
