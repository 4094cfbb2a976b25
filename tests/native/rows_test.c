// Norms, rotary embedding and activations.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

// Sums of a row run over four vectors of at least four lanes, then over the lanes, then over what is left.
static double row_sum_error(int64_t width) { return (double)(width / 16 + 40) * UNIT; }

typedef struct {
    int64_t rows, width, ldx, ldr;
    float *x, *residual, *normed, *weight, *bias, *y;
} norm_case;

static norm_case make_case(int with_residual, float mean) {
    norm_case c = {.rows = random_between(1, 12), .width = random_between(1, 300)};
    if (random_between(0, 9) == 0) c.rows = 70, c.width = 600;  // more than one unit of work
    c.ldx = c.width + random_between(0, 5);
    c.ldr = c.width + random_between(0, 5);
    int64_t num_x = (c.rows - 1) * c.ldx + c.width, num_residual = (c.rows - 1) * c.ldr + c.width;
    c.x = random_floats(num_x, 3);
    for (int64_t i = 0; i < num_x; i++) c.x[i] += mean;
    c.residual = with_residual ? random_floats(num_residual, 3) : NULL;
    c.weight = random_floats(c.width, 2);
    c.bias = random_floats(c.width, 2);
    c.y = guarded_floats(c.rows * c.width);
    c.normed = guarded_floats(c.rows * c.width);  // what the norm sees: a sum that is rounded once
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t i = 0; i < c.width; i++) {
            float sum = with_residual ? c.residual[row * c.ldr + i] + c.x[row * c.ldx + i] : c.x[row * c.ldx + i];
            c.normed[row * c.width + i] = sum;
        }
    return c;
}

static void expect_sums_in_residual(const norm_case *c) {
    for (int64_t row = 0; c->residual && row < c->rows; row++)
        for (int64_t i = 0; i < c->width; i++)
            expect_true(same_bits(c->residual[row * c->ldr + i], c->normed[row * c->width + i]), "the residual is the sum", row, i);
}

static void compare_rms_norm(void) {
    norm_case c = make_case((int)random_between(0, 1), 0);
    ratoon_rms_norm(c.x, c.ldx, c.residual, c.ldr, c.weight, 1e-5f, c.y, c.rows, c.width);
    expect_sums_in_residual(&c);
    for (int64_t row = 0; row < c.rows; row++) {
        const float *x = c.normed + row * c.width;
        double squares = 0;
        for (int64_t i = 0; i < c.width; i++) squares += (double)x[i] * x[i];
        double scale = 1 / sqrt(squares / (double)c.width + 1e-5f);
        for (int64_t i = 0; i < c.width; i++) {
            double expected = x[i] * scale * c.weight[i];
            expect(c.y[row * c.width + i], expected, fabs(expected) * (row_sum_error(c.width) + 7 * UNIT), "rms norm", row, i);
        }
    }
    release_all();
}

static void compare_layer_norm(void) {
    norm_case c = make_case((int)random_between(0, 1), (float)random_between(0, 1) * 30);
    if (random_between(0, 1)) c.bias = NULL;
    ratoon_layer_norm(c.x, c.ldx, c.residual, c.ldr, c.weight, c.bias, 1e-5f, c.y, c.rows, c.width);
    expect_sums_in_residual(&c);
    double sums = row_sum_error(c.width);
    for (int64_t row = 0; row < c.rows; row++) {
        const float *x = c.normed + row * c.width;
        double mean = 0, size = 0, spread = 0, squares = 0, error_squares = 0, width = (double)c.width;
        for (int64_t i = 0; i < c.width; i++) mean += x[i] / width, size += fabs((double)x[i]) / width;
        // After the first subtraction, of a mean that is off by up to `first`, numbers have a size of up to |x - mean| + first.
        double first = (sums + 2 * UNIT) * size;
        for (int64_t i = 0; i < c.width; i++) spread += (fabs(x[i] - mean) + first) / width;
        for (int64_t i = 0; i < c.width; i++) {
            double error = (sums + 2 * UNIT) * spread + 3 * UNIT * (fabs(x[i] - mean) + first);
            squares += (x[i] - mean) * (x[i] - mean) / width;
            error_squares += error * error / width;
        }
        double scale = 1 / sqrt(squares + 1e-5f);
        double scale_error = sqrt(error_squares) * scale + sums + 6 * UNIT;  // of its size
        for (int64_t i = 0; i < c.width; i++) {
            double error = (sums + 2 * UNIT) * spread + 3 * UNIT * (fabs(x[i] - mean) + first);
            double product = (x[i] - mean) * scale * c.weight[i], bias = c.bias ? c.bias[i] : 0;
            double allowed = error * scale * fabs((double)c.weight[i]) * (1 + scale_error) + fabs(product) * (scale_error + 2 * UNIT) +
                             fabs(product + bias) * UNIT;
            expect(c.y[row * c.width + i], product + bias, allowed, "layer norm", row, i);
        }
    }
    release_all();
}

static void compare_head_norm(void) {
    int64_t rows = random_between(1, 20), heads = random_between(1, 5), dim = random_between(1, 70);
    int64_t ldx = heads * dim + random_between(0, 5), count = (rows - 1) * ldx + heads * dim;
    int64_t ldw = random_between(0, 1) * dim;
    float *x = random_floats(count, 2), *weight = random_floats(ldw ? heads * dim : dim, 2), *before = guarded_floats(count);
    for (int64_t i = 0; i < count; i++) before[i] = x[i];
    ratoon_head_rms_norm(x, ldx, weight, ldw, 1e-6f, rows, heads, dim);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < ldx && row * ldx + column < count; column++) {
            float found = x[row * ldx + column], old = before[row * ldx + column];
            if (column >= heads * dim) {
                expect_true(same_bits(found, old), "a head norm leaves what is between its rows", row, column);
                continue;
            }
            const float *head = before + row * ldx + column / dim * dim;
            double squares = 0;
            for (int64_t i = 0; i < dim; i++) squares += (double)head[i] * head[i];
            double expected = old / sqrt(squares / (double)dim + 1e-6f) * weight[column / dim * ldw + column % dim];
            expect(found, expected, fabs(expected) * (row_sum_error(dim) + 7 * UNIT), "head norm", row, column);
        }
    release_all();
}

static void expect_rotated(const float *x, const float *before, int64_t rows, int64_t ld, int64_t heads, int64_t dim,
                           int64_t rotary_dim, const int64_t *positions, const float *cos_sin, const int32_t *axes, int64_t stride) {
    int64_t half = rotary_dim / 2;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < heads * dim; column++) {
            int64_t place = column % dim, index = row * ld + column;
            if (place >= rotary_dim) {
                expect_true(same_bits(x[index], before[index]), "what is not rotated stays", row, column);
                continue;
            }
            const int64_t axis = axes ? axes[place % half] : 0;
            const float *angles = cos_sin + positions[axis * stride + row] * rotary_dim + place % half;
            double sign = place < half ? -1 : 1, other = before[place < half ? index + half : index - half];
            double straight = (double)before[index] * angles[0], crossed = sign * other * angles[half];
            expect(x[index], straight + crossed, 2 * UNIT * (fabs(straight) + fabs(crossed)), "rotary", row, column);
        }
}

static void compare_rotary(void) {
    int64_t rows = random_between(1, 30), heads = random_between(1, 5), kv_heads = random_between(1, 3), rotary_dim = 2 * random_between(1, 35);
    int64_t dim = rotary_dim + random_between(0, 9), ldq = heads * dim + 3, ldk = kv_heads * dim + 2, num_positions = 50;
    int64_t num_q = (rows - 1) * ldq + heads * dim, num_k = (rows - 1) * ldk + kv_heads * dim;
    float *q = random_floats(num_q, 2), *k = random_floats(num_k, 2), *cos_sin = random_floats(num_positions * rotary_dim, 1);
    float *old_q = guarded_floats(num_q), *old_k = guarded_floats(num_k);
    const int64_t num_axes = random_between(1, 3), stride = rows + random_between(0, 2);
    int64_t *positions = guarded(((num_axes - 1) * stride + rows) * 8);
    int32_t *axes = num_axes == 1 ? NULL : guarded(rotary_dim / 2 * 4);
    for (int64_t i = 0; i < num_q; i++) old_q[i] = q[i];
    for (int64_t i = 0; i < num_k; i++) old_k[i] = k[i];
    for (int64_t i = 0; i < (num_axes - 1) * stride + rows; i++) positions[i] = random_between(0, num_positions - 1);
    for (int64_t i = 0; axes && i < rotary_dim / 2; i++) axes[i] = (int32_t)random_between(0, num_axes - 1);
    ratoon_rotary(q, ldq, heads, k, ldk, kv_heads, dim, rotary_dim, positions, cos_sin, axes, stride, rows);
    expect_rotated(q, old_q, rows, ldq, heads, dim, rotary_dim, positions, cos_sin, axes, stride);
    expect_rotated(k, old_k, rows, ldk, kv_heads, dim, rotary_dim, positions, cos_sin, axes, stride);
    release_all();
}

#define SMALLEST 1e-36  // results below this may be 0: e^x is cut off where it leaves the range of floats

static double silu(double x, double *allowed) {
    double y = x / (1 + exp(-x));
    *allowed = fabs(y) * (EXP_ERROR + 3 * UNIT) + SMALLEST;
    return y;
}

static double relu(double x, double *allowed) {
    *allowed = 0;
    return x > 0 ? x : 0;
}

// The argument of the exponential has four roundings (its constants are rounded too), which count by its size.
static double gelu_tanh(double x, double *allowed) {
    double u = 2 * 0.7978845608028654 * (x + 0.044715 * x * x * x), y = x / (1 + exp(-u));
    *allowed = fabs(y) * (EXP_ERROR + 3 * UNIT + 5 * UNIT * fabs(u)) + SMALLEST;
    return y;
}

// The polynomial (Abramowitz and Stegun 7.1.26) is off by up to 1.5e-7 in erf, half of that in the distribution.
static double gelu(double x, double *allowed) {
    double tail = erfc(fabs(x) / sqrt(2)) / 2, y = x * (x < 0 ? tail : 1 - tail);
    *allowed = fabs(x) * (0.76e-7 + tail * (EXP_ERROR + (12 + x * x) * UNIT) + UNIT) + fabs(y) * UNIT + SMALLEST;
    return y;
}

static float random_argument(void) {
    static const float special[] = {0, -0.0f, 1e-30f, -1e-30f, 30, -30, 87, -87, 89, -89, 120, -120};
    return random_between(0, 4) ? random_float() * 8 : special[random_between(0, 11)];
}

// The argument of the exponential has two roundings.
static double gelu_quick(double x, double *allowed) {
    double u = 1.702 * x, y = x / (1 + exp(-u));
    *allowed = fabs(y) * (EXP_ERROR + 3 * UNIT + 2 * UNIT * fabs(u)) + SMALLEST;
    return y;
}

static double (*const references[])(double, double *) = {silu, relu, gelu_tanh, gelu, gelu_quick};
static const char *const names[] = {"silu", "relu", "gelu, tanh form", "gelu", "gelu, sigmoid form"};
#define NUM_KINDS 5

static void compare_activations(void) {
    int64_t rows = random_between(1, 20), width = random_between(1, 90), ldx = width + random_between(0, 5);
    float *x = random_floats((rows - 1) * ldx + width, 1);
    for (int64_t i = 0; i < (rows - 1) * ldx + width; i++) x[i] = random_argument();
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        float *y = guarded_floats(rows * width);
        ratoon_activation(x, ldx, y, rows, width, kind);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < width; i++) {
                double allowed, expected = references[kind](x[row * ldx + i], &allowed);
                expect(y[row * width + i], expected, allowed, names[kind], row, i);
            }
    }
    release_all();
}

static void compare_gated_activation(void) {
    int64_t rows = random_between(1, 20), width = random_between(1, 90), ldx = 2 * width + random_between(0, 5);
    if (random_between(0, 9) == 0) rows = 70, width = 200, ldx = 401;  // more than one unit of work
    float *x = random_floats((rows - 1) * ldx + 2 * width, 1);
    for (int64_t i = 0; i < (rows - 1) * ldx + 2 * width; i++) x[i] = random_argument();
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        float *y = guarded_floats(rows * width);
        if (kind == 0) ratoon_silu_and_mul(x, ldx, y, rows, width);
        else ratoon_gated_activation(x, ldx, y, rows, width, kind);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < width; i++) {
                double allowed, up = x[row * ldx + width + i], expected = references[kind](x[row * ldx + i], &allowed) * up;
                expect(y[row * width + i], expected, allowed * fabs(up) + fabs(expected) * UNIT + SMALLEST, names[kind], row, i);
            }
    }
    release_all();
}

static void compare_scale(void) {
    int64_t rows = random_between(1, 20), width = random_between(1, 90), ldx = width + random_between(0, 5);
    const int64_t count = (rows - 1) * ldx + width;
    const float factor = random_argument();
    float *x = random_floats(count, 1), *y = guarded_floats(count);
    memcpy(y, x, (size_t)count * sizeof(float));
    ratoon_scale(y, ldx, rows, width, factor);
    for (int64_t i = 0; i < count; i++)
        expect(y[i], i % ldx < width ? x[i] * factor : x[i], 0, "scale", i / ldx, i % ldx);
    release_all();
}

static void compare_add(void) {
    int64_t rows = random_between(1, 20), width = random_between(1, 90), ldx = width + random_between(0, 5);
    const int64_t count = (rows - 1) * ldx + width;
    float *x = random_floats(count, 1), *y = random_floats(rows * width, 1), *z = guarded_floats(count);
    memcpy(z, x, (size_t)count * sizeof(float));
    ratoon_add(z, ldx, y, width, rows, width);
    for (int64_t i = 0; i < count; i++)
        expect(z[i], i % ldx < width ? x[i] + y[i / ldx * width + i % ldx] : x[i], 0, "add", i / ldx, i % ldx);
    release_all();
}

// The quotient, its divisor's reciprocal and the product round once each, tanh about three times.
static void compare_soft_cap(void) {
    int64_t rows = random_between(1, 20), width = random_between(1, 90), ldx = width + random_between(0, 5);
    const int64_t count = (rows - 1) * ldx + width;
    const float cap = (float)random_between(1, 400) / 8;
    float *x = random_floats(count, random_between(0, 1) ? 0.01f : 60.0f), *y = guarded_floats(count);
    memcpy(y, x, (size_t)count * sizeof(float));
    ratoon_soft_cap(y, ldx, rows, width, cap);
    for (int64_t i = 0; i < count; i++) {
        const double expected = i % ldx < width ? cap * tanh((double)x[i] / cap) : x[i];
        expect(y[i], expected, i % ldx < width ? 7 * UNIT * fabs(expected) : 0, "soft cap", i / ldx, i % ldx);
    }
    release_all();
}

void check_rows(void) {
    for (int i = 0; i < 20; i++) {
        compare_rms_norm();
        compare_layer_norm();
        compare_head_norm();
        compare_rotary();
        compare_activations();
        compare_gated_activation();
        compare_scale();
        compare_add();
        compare_soft_cap();
    }
}
