// Work that is done row by row: norms, activations, rotary embedding. A row's result depends on nothing but the row.
#include <math.h>

#include "activations.h"
#include "kernels.h"
#include "threads.h"
#include "vector.h"

#define FLOATS_PER_UNIT 16384  // below this, handing work to another thread costs more than doing it

typedef void (*row_body)(const void *call, int64_t row);

typedef struct {
    row_body body;
    const void *call;
    int64_t rows, rows_per_unit;
} row_loop;

static void row_unit(void *context, int64_t unit) {
    const row_loop *loop = context;
    int64_t last = (unit + 1) * loop->rows_per_unit;
    if (last > loop->rows) last = loop->rows;
    for (int64_t row = unit * loop->rows_per_unit; row < last; row++) loop->body(loop->call, row);
}

static void for_rows(row_body body, const void *call, int64_t rows, int64_t floats_per_row) {
    int64_t per_unit = FLOATS_PER_UNIT / (floats_per_row + 1) + 1;
    row_loop loop = {body, call, rows, per_unit};
    if (rows > 0) parallel_units(row_unit, &loop, (rows + per_unit - 1) / per_unit);
}

// Sums run over four vectors and then the lanes, in a fixed order.
INLINE float sum_of_squares(const float *x, int64_t n) {
    vec s[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) s[j] = fma_(load(x + i + j * W), load(x + i + j * W), s[j]);
    float total = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

INLINE float sum_of(const float *x, int64_t n) {
    vec s[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) s[j] += load(x + i + j * W);
    float total = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
    for (; i < n; i++) total += x[i];
    return total;
}

INLINE void add_into(float *residual, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(residual + i, load(residual + i) + load(x + i));
    for (; i < n; i++) residual[i] += x[i];
}

typedef struct {
    const float *x;
    float *residual;  // NULL, or x is added to it first and the sum is what is normed
    const float *weight, *bias;
    float *y;
    int64_t ldx, ldr, width;
    float eps;
} norm_call;

INLINE const float *row_to_norm(const norm_call *c, int64_t row) {
    const float *x = c->x + row * c->ldx;
    if (!c->residual) return x;
    add_into(c->residual + row * c->ldr, x, c->width);
    return c->residual + row * c->ldr;
}

static void rms_norm_row(const void *context, int64_t row) {
    const norm_call *c = context;
    const float *x = row_to_norm(c, row);
    float *y = c->y + row * c->width;
    float scale = 1.0f / sqrtf(sum_of_squares(x, c->width) / (float)c->width + c->eps);
    int64_t i = 0;
    for (; i + W <= c->width; i += W) store(y + i, load(x + i) * splat(scale) * load(c->weight + i));
    for (; i < c->width; i++) y[i] = x[i] * scale * c->weight[i];
}

void ratoon_rms_norm(const float *x, int64_t ldx, float *residual, int64_t ldr, const float *weight, float eps, float *y,
                     int64_t rows, int64_t width) {
    norm_call c = {x, residual, weight, NULL, y, ldx, ldr, width, eps};
    for_rows(rms_norm_row, &c, rows, width * 2);
}

static void layer_norm_row(const void *context, int64_t row) {
    const norm_call *c = context;
    const float *x = row_to_norm(c, row);
    float *y = c->y + row * c->width;
    // The rounded mean of a row whose mean is large is off by more than the norm's own rounding: what is left of it after
    // the first subtraction is taken away too.
    float mean = sum_of(x, c->width) / (float)c->width;
    for (int64_t i = 0; i < c->width; i++) y[i] = x[i] - mean;
    float rest = sum_of(y, c->width) / (float)c->width;
    for (int64_t i = 0; i < c->width; i++) y[i] -= rest;
    float scale = 1.0f / sqrtf(sum_of_squares(y, c->width) / (float)c->width + c->eps);
    for (int64_t i = 0; i < c->width; i++) {
        float value = y[i] * scale * c->weight[i];
        y[i] = c->bias ? value + c->bias[i] : value;
    }
}

void ratoon_layer_norm(const float *x, int64_t ldx, float *residual, int64_t ldr, const float *weight, const float *bias,
                       float eps, float *y, int64_t rows, int64_t width) {
    norm_call c = {x, residual, weight, bias, y, ldx, ldr, width, eps};
    for_rows(layer_norm_row, &c, rows, width * 3);
}

typedef struct {
    float *x;
    const float *weight;
    int64_t ldx, ldw, heads, head_dim;
    float eps;
} head_norm_call;

static void head_norm_row(const void *context, int64_t row) {
    const head_norm_call *c = context;
    for (int64_t h = 0; h < c->heads; h++) {
        float *x = c->x + row * c->ldx + h * c->head_dim;
        float scale = 1.0f / sqrtf(sum_of_squares(x, c->head_dim) / (float)c->head_dim + c->eps);
        const float *weight = c->weight + h * c->ldw;
        for (int64_t i = 0; i < c->head_dim; i++) x[i] = x[i] * scale * weight[i];
    }
}

// In place; the heads of a token lie side by side, tokens are ldx floats apart.
void ratoon_head_rms_norm(float *x, int64_t ldx, const float *weight, int64_t ldw, float eps, int64_t rows, int64_t heads,
                          int64_t head_dim) {
    head_norm_call c = {x, weight, ldx, ldw, heads, head_dim, eps};
    for_rows(head_norm_row, &c, rows, heads * head_dim);
}

typedef struct {
    float *q, *k;
    int64_t ldq, ldk, heads, kv_heads, head_dim, rotary_dim;
    const int64_t *positions;
    const float *cos_sin;
    const int32_t *axes;  // of each pair; NULL: positions have one axis
    int64_t axis_stride;
} rotary_call;

enum { PAIRS = 64 };  // whose angles are gathered at a time, where positions have several axes

// The first `count` pairs of each head, whose parts lie `half` apart.
INLINE void rotate_heads(float *x, int64_t heads, int64_t head_dim, const float *cosine, const float *sine, int64_t half,
                         int64_t count) {
    for (int64_t h = 0; h < heads; h++, x += head_dim) {
        int64_t i = 0;
        for (; i + W <= count; i += W) {
            vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
            store(x + i, fma_(a, c, -(b * s)));
            store(x + half + i, fma_(b, c, a * s));
        }
        for (; i < count; i++) {
            float a = x[i], b = x[half + i];
            x[i] = fmaf(a, cosine[i], -(b * sine[i]));
            x[half + i] = fmaf(b, cosine[i], a * sine[i]);
        }
    }
}

static void rotary_row(const void *context, int64_t row) {
    const rotary_call *c = context;
    int64_t half = c->rotary_dim / 2;
    float *q = c->q + row * c->ldq, *k = c->k + row * c->ldk;
    if (!c->axes) {
        const float *cosine = c->cos_sin + c->positions[row] * c->rotary_dim, *sine = cosine + half;
        rotate_heads(q, c->heads, c->head_dim, cosine, sine, half, half);
        rotate_heads(k, c->kv_heads, c->head_dim, cosine, sine, half, half);
        return;
    }
    for (int64_t first = 0; first < half; first += PAIRS) {
        float cosine[PAIRS], sine[PAIRS];
        const int64_t count = half - first < PAIRS ? half - first : PAIRS;
        for (int64_t i = 0; i < count; i++) {
            const int64_t position = c->positions[c->axes[first + i] * c->axis_stride + row];
            cosine[i] = c->cos_sin[position * c->rotary_dim + first + i];
            sine[i] = c->cos_sin[position * c->rotary_dim + half + first + i];
        }
        rotate_heads(q + first, c->heads, c->head_dim, cosine, sine, half, count);
        rotate_heads(k + first, c->kv_heads, c->head_dim, cosine, sine, half, count);
    }
}

void ratoon_rotary(float *q, int64_t ldq, int64_t heads, float *k, int64_t ldk, int64_t kv_heads, int64_t head_dim,
                   int64_t rotary_dim, const int64_t *positions, const float *cos_sin, const int32_t *axes,
                   int64_t axis_stride, int64_t rows) {
    rotary_call c = {q, k, ldq, ldk, heads, kv_heads, head_dim, rotary_dim, positions, cos_sin, axes, axis_stride};
    for_rows(rotary_row, &c, rows, (heads + kv_heads) * head_dim);
}

typedef struct {
    const float *x;
    float *y;
    int64_t ldx, width;
} activation_call;

#define GATED(NAME)                                                                                  \
    static void NAME##_and_mul_row(const void *context, int64_t row) {                               \
        const activation_call *c = context;                                                          \
        const float *gate = c->x + row * c->ldx, *up = gate + c->width;                              \
        float *y = c->y + row * c->width;                                                            \
        int64_t i = 0;                                                                               \
        for (; i + W <= c->width; i += W) store(y + i, NAME(load(gate + i)) * load(up + i));         \
        if (i < c->width) {                                                                          \
            vec v = NAME(load_some(gate + i, c->width - i)) * load_some(up + i, c->width - i);       \
            for (int64_t j = 0; i + j < c->width; j++) y[i + j] = v[j];                              \
        }                                                                                            \
    }
GATED(silu) GATED(relu) GATED(gelu_tanh) GATED(gelu_exact) GATED(gelu_quick)

// The activation of the first half of a row, by the numbers of ratoon_activation, times the second.
void ratoon_gated_activation(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, int kind) {
    static const row_body bodies[] = {silu_and_mul_row, relu_and_mul_row, gelu_tanh_and_mul_row, gelu_exact_and_mul_row,
                                      gelu_quick_and_mul_row};
    activation_call c = {x, y, ldx, width};
    for_rows(bodies[kind], &c, rows, width * 8);
}

void ratoon_silu_and_mul(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width) {
    ratoon_gated_activation(x, ldx, y, rows, width, 0);
}

typedef struct {
    const float *x;
    float *y;
    int64_t ldx, width;
    float limit;
} clamped_call;

INLINE vec clamped(vec gate, vec up, vec limit) {
    return gelu_quick(min_(gate, limit)) * (splat(1.0f) + min_(max_(up, -limit), limit));
}

static void clamped_row(const void *context, int64_t row) {
    const clamped_call *c = context;
    const float *gate = c->x + row * c->ldx, *up = gate + c->width;
    const vec limit = splat(c->limit);
    float *y = c->y + row * c->width;
    int64_t i = 0;
    for (; i + W <= c->width; i += W) store(y + i, clamped(load(gate + i), load(up + i), limit));
    if (i < c->width) {
        const vec v = clamped(load_some(gate + i, c->width - i), load_some(up + i, c->width - i), limit);
        for (int64_t j = 0; i + j < c->width; j++) y[i + j] = v[j];
    }
}

void ratoon_clamped_swiglu(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, float limit) {
    clamped_call c = {x, y, ldx, width, limit};
    for_rows(clamped_row, &c, rows, width * 8);
}

#define ACTIVATION(NAME)                                                        \
    static void NAME##_row(const void *context, int64_t row) {                  \
        const activation_call *c = context;                                     \
        const float *x = c->x + row * c->ldx;                                   \
        float *y = c->y + row * c->width;                                       \
        int64_t i = 0;                                                          \
        for (; i + W <= c->width; i += W) store(y + i, NAME(load(x + i)));      \
        if (i < c->width) {                                                     \
            vec v = NAME(load_some(x + i, c->width - i));                       \
            for (int64_t j = 0; i + j < c->width; j++) y[i + j] = v[j];         \
        }                                                                       \
    }
ACTIVATION(silu) ACTIVATION(relu) ACTIVATION(gelu_tanh) ACTIVATION(gelu_exact)
ACTIVATION(gelu_quick)

// kind: 0 silu, 1 relu, 2 gelu in its tanh form, 3 gelu, 4 gelu in its sigmoid form
void ratoon_activation(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, int kind) {
    static const row_body bodies[] = {silu_row, relu_row, gelu_tanh_row, gelu_exact_row, gelu_quick_row};
    activation_call c = {x, y, ldx, width};
    for_rows(bodies[kind], &c, rows, width * 8);
}

typedef struct {
    float *x;
    int64_t ldx, width;
    float factor;  // or the cap
} scale_call;

static void scale_row(const void *context, int64_t row) {
    const scale_call *c = context;
    float *x = c->x + row * c->ldx;
    for (int64_t i = 0; i < c->width; i++) x[i] *= c->factor;
}

// In place.
void ratoon_scale(float *x, int64_t ldx, int64_t rows, int64_t width, float factor) {
    scale_call c = {x, ldx, width, factor};
    for_rows(scale_row, &c, rows, width);
}

static void soft_cap_row(const void *context, int64_t row) {
    const scale_call *c = context;
    float *x = c->x + row * c->ldx;
    const vec cap = splat(c->factor), share = splat(1.0f / c->factor);
    int64_t i = 0;
    for (; i + W <= c->width; i += W) store(x + i, cap * tanh_(load(x + i) * share));
    if (i < c->width) {
        const vec v = cap * tanh_(load_some(x + i, c->width - i) * share);
        for (int64_t j = 0; i + j < c->width; j++) x[i + j] = v[j];
    }
}

void ratoon_soft_cap(float *x, int64_t ldx, int64_t rows, int64_t width, float cap) {
    scale_call c = {x, ldx, width, cap};
    for_rows(soft_cap_row, &c, rows, width * 8);
}

typedef struct {
    float *x;
    const float *y;
    int64_t ldx, ldy, width;
} add_call;

static void add_row(const void *context, int64_t row) {
    const add_call *c = context;
    float *x = c->x + row * c->ldx;
    const float *y = c->y + row * c->ldy;
    for (int64_t i = 0; i < c->width; i++) x[i] += y[i];
}

void ratoon_add(float *x, int64_t ldx, const float *y, int64_t ldy, int64_t rows, int64_t width) {
    add_call c = {x, y, ldx, ldy, width};
    for_rows(add_row, &c, rows, width);
}
