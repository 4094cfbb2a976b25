// The gated feed-forward half of a layer: down(silu(gate(x)) · up(x)).
#include "kernels.h"

// `between` has room for 3 · inner floats a row.
void ratoon_gated_mlp(const float *x, int64_t ldx, int64_t rows, const float *gate_up, const float *gate_up_bias, int64_t in,
                      const float *down, const float *down_bias, int64_t inner, int64_t out, float *between, float *y) {
    float *activated = between + 2 * inner * rows;
    ratoon_linear(x, ldx, rows, gate_up, in, 2 * inner, gate_up_bias, between, 2 * inner);
    ratoon_silu_and_mul(between, 2 * inner, activated, rows, inner);
    ratoon_linear(activated, inner, rows, down, inner, out, down_bias, y, out);
}
