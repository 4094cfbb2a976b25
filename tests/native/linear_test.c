// Products with float32 weights.
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

void check_linear(void) {
    compare(1, 1, 1, 0);
    compare(2, 1537, 19, 1);  // more than one block of depth
    compare(97, 66, 17, 1);   // more than one block of rows
    compare(98, 770, 3, 0);
    for (int i = 0; i < 24; i++)
        compare(random_between(1, 30), random_between(1, 200), random_between(1, 70), (int)random_between(0, 1));
}
