// Mixtures of experts: routes against scores in double precision, and the sum of experts against the gated MLP of each, with
// weights of floats and of 8 bits in one layer. What a row's experts are is drawn; some have no rows, some all.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"
#include "quantised.h"

#define EXPERTS 7
#define MOST_TOP_K 4

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// The weights of a row's experts add up as the rule says, and no expert that is left out has a larger score.
static void compare_routes(int64_t rows, int64_t top_k, int64_t scoring, int64_t renormalise, int64_t groups, int with_bias) {
    const int64_t experts = 8, ldl = experts + random_between(0, 3);
    float *logits = random_floats(rows * ldl, 3), *bias = random_floats(experts, 0.5f), *weights = guarded_floats(rows * top_k);
    int32_t *chosen = guarded(rows * top_k * 4);
    int64_t *counts = guarded(experts * 8), total = 0;
    memset(counts, 0, experts * 8);
    route_rule rule = {experts, top_k, scoring, renormalise, groups, groups > 1 ? groups / 2 : 1, with_bias ? bias : NULL, 1.5f};
    ratoon_route(&rule, logits, ldl, rows, chosen, weights, counts);
    for (int64_t row = 0; row < rows; row++) {
        double scores[8], sum = 0, chosen_sum = 0;
        int is_chosen[8] = {0};
        for (int64_t e = 0; e < experts; e++) sum += exp(logits[row * ldl + e]);
        for (int64_t e = 0; e < experts; e++)
            scores[e] = scoring == ROUTE_SIGMOID ? sigmoid(logits[row * ldl + e]) : exp(logits[row * ldl + e]) / sum;
        for (int64_t i = 0; i < top_k; i++) {
            const int32_t e = chosen[row * top_k + i];
            expect_true(e >= 0 && e < experts && !is_chosen[e], "chosen once", row, i);
            is_chosen[e] = 1, chosen_sum += scores[e];
        }
        for (int64_t i = 0; i < top_k; i++) {
            const double wanted = 1.5 * scores[chosen[row * top_k + i]] / (renormalise ? chosen_sum : 1);
            expect(weights[row * top_k + i], wanted, wanted * 40 * UNIT + 1e-9, "weight of an expert", row, i);
        }
        for (int64_t e = 0; groups == 1 && e < experts; e++)
            for (int64_t i = 0; i < top_k && !is_chosen[e]; i++) {
                const int32_t other = chosen[row * top_k + i];
                const double better = scores[other] + (with_bias ? bias[other] : 0), worse = scores[e] + (with_bias ? bias[e] : 0);
                expect_true(worse <= better + 1e-5, "the best are chosen", row, e);
            }
    }
    for (int64_t e = 0; e < experts; e++) total += counts[e];
    expect_true(total == rows * top_k, "counts", rows, top_k);
    release_all();
}

static quantised_weight eight_bits(int64_t out, int64_t in) {
    const int64_t panels = (out + 15) / 16, blocks = in / QUANTISED_BLOCK;
    uint8_t *codes = guarded(panels * blocks * 512);
    uint16_t *scales = guarded(panels * blocks * 32);
    for (int64_t i = 0; i < panels * blocks * 512; i++) codes[i] = (uint8_t)random_between(0, 255);
    for (int64_t i = 0; i < panels * blocks * 16; i++) scales[i] = 0x2000 + (uint16_t)random_between(0, 255);  // about 0.008
    return (quantised_weight){.codes = codes, .scales = scales, .in = in, .out = out, .bits = 8, .group = 32, .multiplier = 1};
}

// The sum of experts has the bits of each expert's gated MLP by itself, added up in the order of the choice.
static void compare_experts(int64_t rows, int64_t top_k, int64_t first, int64_t own) {
    const int64_t in = 64, inner = 32, out = 50, ldx = in + random_between(0, 5);
    expert_weight gate_up[EXPERTS], down[EXPERTS];
    quantised_weight quantised[2][EXPERTS];
    for (int64_t e = 0; e < own; e++) {
        quantised[0][e] = eight_bits(2 * inner, in), quantised[1][e] = eight_bits(out, inner);
        float *packed[2] = {guarded_floats(ratoon_packed_size(2 * inner, in)), guarded_floats(ratoon_packed_size(out, inner))};
        ratoon_pack_weight(random_floats(2 * inner * in, 1), 2 * inner, in, packed[0]);
        ratoon_pack_weight(random_floats(out * inner, 1), out, inner, packed[1]);
        gate_up[e] = (expert_weight){e % 2 ? NULL : packed[0], NULL, e % 2 ? &quantised[0][e] : NULL};
        down[e] = (expert_weight){e % 3 ? NULL : packed[1], NULL, e % 3 ? &quantised[1][e] : NULL};
    }
    expert_layer layer = {own, first, in, inner, out, 1, gate_up, down, 0, 1, 0};
    float *x = random_floats((rows - 1) * ldx + in, 2), *weights = random_floats(rows * top_k, 1), *y = guarded_floats(rows * out);
    int32_t *chosen = guarded(rows * top_k * 4);
    for (int64_t i = 0; i < rows; i++) {
        const int32_t start = (int32_t)random_between(0, EXPERTS - 1);
        for (int64_t j = 0; j < top_k; j++) chosen[i * top_k + j] = (start + (int32_t)j) % EXPERTS;
    }
    expect_true(!ratoon_experts(&layer, x, ldx, rows, chosen, weights, top_k,
                                guarded(ratoon_experts_scratch(&layer, rows, top_k)), y), "experts", rows, top_k);
    float *between = guarded_floats(3 * inner), *result = guarded_floats(out), *sum = guarded_floats(out);
    void *scratch = guarded((1 + QUANTISED_ROOM) * ratoon_quantised_scratch(in));
    for (int64_t row = 0; row < rows; row++) {
        memset(sum, 0, out * sizeof(float));
        for (int64_t j = 0; j < top_k; j++) {
            const int64_t e = chosen[row * top_k + j] - first;
            if (e < 0 || e >= own) continue;
            if (gate_up[e].quantised)
                ratoon_quantised_linear(gate_up[e].quantised, x + row * ldx, ldx, 1, scratch, between, 2 * inner);
            else
                ratoon_linear(x + row * ldx, ldx, 1, gate_up[e].packed, in, 2 * inner, NULL, between, 2 * inner);
            ratoon_silu_and_mul(between, 2 * inner, between + 2 * inner, 1, inner);
            if (down[e].quantised)
                ratoon_quantised_linear(down[e].quantised, between + 2 * inner, inner, 1, scratch, result, out);
            else
                ratoon_linear(between + 2 * inner, inner, 1, down[e].packed, inner, out, NULL, result, out);
            for (int64_t i = 0; i < out; i++) sum[i] = fmaf(result[i], weights[row * top_k + j], sum[i]);
        }
        for (int64_t i = 0; i < out; i++) expect_true(same_bits(y[row * out + i], sum[i]), "sum of experts", row, i);
    }
    release_all();
}

static void compare_gates(int64_t rows, int64_t width) {
    float *x = random_floats(rows * 2 * width, 4), *y = guarded_floats(rows * width), *gates = random_floats(rows * 3, 4);
    ratoon_clamped_swiglu(x, 2 * width, y, rows, width, 1.5f);
    for (int64_t i = 0; i < rows * width; i++) {
        const double gate = fmin(x[i / width * 2 * width + i % width], 1.5);
        const double up = fmax(fmin(x[i / width * 2 * width + width + i % width], 1.5), -1.5);
        const double wanted = gate * sigmoid(1.702 * gate) * (up + 1);
        expect(y[i], wanted, fabs(wanted) * (EXP_ERROR + 8 * UNIT) + 4 * UNIT, "clamped swiglu", i / width, i % width);
    }
    float *added = random_floats(rows * width, 1), *before = guarded_floats(rows * width);
    memcpy(before, added, rows * width * sizeof(float));
    ratoon_add_gated(added, y, gates, 3, rows, width);
    for (int64_t i = 0; i < rows * width; i++) {
        const double wanted = before[i] + (double)y[i] * sigmoid(gates[i / width * 3]);
        expect(added[i], wanted, (fabs(wanted) + fabs(y[i])) * (EXP_ERROR + 8 * UNIT), "gated sum", i / width, i % width);
    }
    release_all();
}

void check_experts(void) {
    for (int i = 0; i < 16; i++)
        compare_routes(random_between(1, 40), random_between(1, MOST_TOP_K), i % 2, i / 2 % 2, i / 4 % 2 ? 4 : 1, i / 8);
    compare_experts(1, 1, 0, EXPERTS);
    compare_experts(90, 2, 0, EXPERTS);
    compare_experts(20, 3, 2, 3);
    for (int i = 0; i < 6; i++) compare_experts(random_between(1, 30), random_between(1, MOST_TOP_K), 0, EXPERTS);
    for (int i = 0; i < 5; i++) compare_gates(random_between(1, 9), random_between(1, 70));
}
