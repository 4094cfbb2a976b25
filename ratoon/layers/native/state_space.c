// The scan of state-space layers (Mamba-2), over pages of states.
//
// First rows are mixed by the convolution, each with the rows before it, and time steps are computed: all rows are independent of
// each other then. Then each head of each request goes on with its state, token after token. A head's state lies in its page as
// [state_size][head_dim], so that a vector has numbers of one column and nothing has to be summed across lanes.
//
// A token's result is one fixed chain of operations on the state before it. So results are the same to the bit in any batch, for
// any cut of a prompt into steps, and with any number of threads.
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "activations.h"
#include "kernels.h"
#include "room.h"
#include "threads.h"
#include "vector.h"

#define ROWS_PER_UNIT 4  // of the convolution
#define MOST_VECTORS 4   // of a state that are computed at once

typedef struct {
    const float *projected;  // [rows][inner + channels + heads]: gate, inputs of the convolution, time steps
    int64_t ldx;
    float *out;
    int64_t ldo;
    const float *conv_weight, *conv_bias, *decay, *skip, *step_bias;
    float least_step, most_step;
    char *states, *histories;
    int64_t state_bytes, history_bytes;
    const int32_t *block_table;
    int64_t table_width;
    const int32_t *query_start, *seq_lens;
    const int64_t *slots;
    int64_t requests, heads, head_dim, state_size, groups, width, block_size;
    int64_t inner, channels, rows;
    float *mixed;         // [rows][channels]
    float *steps, *kept;  // [rows][heads]
    atomic_int failed;
} scan_call;

// log(1 + e^x), to about 3 ulp; a NaN stays one. Of 1 + u with u in (0, 1] the logarithm is 2 · artanh(u / (2 + u)), a series of
// odd powers of at most a third.
INLINE vec softplus(vec x) {
    const vec size = (vec)((ivec)x & 0x7fffffff), u = exp_(-size), z = u / (splat(2.0f) + u), square = z * z;
    vec p = splat(2.0f / 17.0f);
    p = fma_(p, square, splat(2.0f / 15.0f));
    p = fma_(p, square, splat(2.0f / 13.0f));
    p = fma_(p, square, splat(2.0f / 11.0f));
    p = fma_(p, square, splat(2.0f / 9.0f));
    p = fma_(p, square, splat(2.0f / 7.0f));
    p = fma_(p, square, splat(2.0f / 5.0f));
    p = fma_(p, square, splat(2.0f / 3.0f));
    const vec logarithm = fma_(p * square, z, z + z);
    const vec sum = (vec)((ivec)x & (x > splat(0.0f))) + logarithm;
    const ivec is_number = x == x;
    return (vec)(((ivec)sum & is_number) | ((ivec)x & ~is_number));
}

INLINE vec between(vec x, float least, float most) {  // a NaN stays one
    const ivec below = x < splat(least), above = x > splat(most);
    return (vec)(((ivec)splat(least) & below) | ((ivec)splat(most) & above) | ((ivec)x & ~below & ~above));
}

// Tokens of a request that were computed before this step.
INLINE int64_t tokens_before(const scan_call *c, int64_t request) {
    return c->seq_lens[request] - (c->query_start[request + 1] - c->query_start[request]);
}

// The page that a request of `before` computed tokens goes on from.
INLINE int64_t page_before(const scan_call *c, int64_t request, int64_t before) {
    return c->block_table[request * c->table_width + (before - 1) / c->block_size];
}

INLINE float *history_of(const scan_call *c, int64_t page) { return (float *)(c->histories + page * c->history_bytes); }

// Where the inputs of the convolution of a request are: its rows in this step, and what was kept from earlier ones, or NULL.
typedef struct {
    const float *rows, *kept;
} conv_inputs;

INLINE conv_inputs inputs_of(const scan_call *c, int64_t request, int64_t before) {
    const float *rows = c->projected + c->query_start[request] * c->ldx + c->inner;
    return (conv_inputs){rows, before > 0 ? history_of(c, page_before(c, request, before)) : NULL};
}

// Place `index` of them, counted from the request's first row in this step. NULL: it is before the beginning of the sequence,
// where all inputs are zeros.
INLINE const float *input_at(const scan_call *c, conv_inputs inputs, int64_t index) {
    if (index >= 0) return inputs.rows + index * c->ldx;
    return inputs.kept ? inputs.kept + (c->width - 1 + index) * c->channels : NULL;
}

// The first `count` of W channels, from `channel` on.
INLINE vec mix(const scan_call *c, conv_inputs inputs, int64_t index, int64_t channel, int64_t count) {
    vec sum = {};
    if (c->conv_bias) sum = load_up_to(c->conv_bias + channel, count);
    for (int64_t tap = 0; tap < c->width; tap++) {
        const float *input = input_at(c, inputs, index - (c->width - 1) + tap);
        if (!input) continue;
        sum = fma_(load_up_to(input + channel, count), load_up_to(c->conv_weight + tap * c->channels + channel, count), sum);
    }
    return silu(sum);
}

static void mix_row(const scan_call *c, int64_t request, int64_t row) {
    const int64_t index = row - c->query_start[request];
    const conv_inputs inputs = inputs_of(c, request, tokens_before(c, request));
    float *mixed = c->mixed + row * c->channels;
    int64_t i = 0;
    for (; i + W <= c->channels; i += W) store(mixed + i, mix(c, inputs, index, i, W));
    if (i < c->channels) store_some(mixed + i, mix(c, inputs, index, i, c->channels - i), c->channels - i);

    const float *times = c->projected + row * c->ldx + c->inner + c->channels;
    for (i = 0; i < c->heads; i += W) {
        const int64_t count = c->heads - i < W ? c->heads - i : W;
        const vec step = between(softplus(load_up_to(times + i, count) + load_up_to(c->step_bias + i, count)), c->least_step,
                                 c->most_step);
        store_some(c->steps + row * c->heads + i, step, count);
        store_some(c->kept + row * c->heads + i, exp_(step * load_up_to(c->decay + i, count)), count);
    }
}

// The last request that begins at this row or before it: others that begin there are empty.
static int64_t request_of(const scan_call *c, int64_t row) {
    int64_t low = 0, high = c->requests;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (c->query_start[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

static void mix_unit(void *context, int64_t unit) {
    const scan_call *c = context;
    const int64_t last = (unit + 1) * ROWS_PER_UNIT < c->rows ? (unit + 1) * ROWS_PER_UNIT : c->rows;
    for (int64_t row = unit * ROWS_PER_UNIT; row < last; row++) mix_row(c, request_of(c, row), row);
}

// One row of a state: it decays, the token's input is written to it, and it is read.
INLINE void add_row(const float *from, float *to, const vec *scaled, float written, float read, vec keep, vec *sums,
                    const int vectors) {
    const vec write = splat(written), weight = splat(read);
    UNROLLED for (int v = 0; v < vectors; v++) {
        const vec state = fma_(load(from + v * W), keep, scaled[v] * write);
        store(to + v * W, state);
        sums[v] = fma_(state, weight, sums[v]);
    }
}

// One token of `vectors` · W numbers of a head: of its state [state_size], whose rows are head_dim apart and which goes from `from`
// to `to` (or stays where it is), of its input x and its gate, and of its result.
INLINE void advance(const scan_call *c, const float *from, float *to, const float *x, const float *gate, float *out,
                    const float *written, const float *read, float step, float kept, float skip, const int vectors) {
    const vec keep = splat(kept);
    vec scaled[MOST_VECTORS], even[MOST_VECTORS] = {}, odd[MOST_VECTORS] = {};
    UNROLLED for (int v = 0; v < vectors; v++) scaled[v] = load(x + v * W) * splat(step);
    int64_t i = 0;
    for (; i + 2 <= c->state_size; i += 2, from += 2 * c->head_dim, to += 2 * c->head_dim) {
        add_row(from, to, scaled, written[i], read[i], keep, even, vectors);
        add_row(from + c->head_dim, to + c->head_dim, scaled, written[i + 1], read[i + 1], keep, odd, vectors);
    }
    if (i < c->state_size) add_row(from, to, scaled, written[i], read[i], keep, even, vectors);
    UNROLLED for (int v = 0; v < vectors; v++)
        store(out + v * W, fma_(splat(skip), load(x + v * W), even[v] + odd[v]) * silu(load(gate + v * W)));
}

// The same of one number: what is left of heads that no whole vector has.
static void advance_one(const scan_call *c, const float *from, float *to, float x, float gate, float *out, const float *written,
                        const float *read, float step, float kept, float skip) {
    const float scaled = x * step;
    float sums[2] = {0, 0};
    for (int64_t i = 0; i < c->state_size; i++, from += c->head_dim, to += c->head_dim) {
        const float state = fmaf(*from, kept, scaled * written[i]);
        *to = state;
        sums[i & 1] = fmaf(state, read[i], sums[i & 1]);
    }
    *out = fmaf(skip, x, sums[0] + sums[1]) * silu(splat(gate))[0];
}

static void advance_head(const scan_call *c, int64_t head, int64_t row, const float *from, float *to) {
    const float *mixed = c->mixed + row * c->channels, *x = mixed + head * c->head_dim;
    const float *written = mixed + c->inner + head / (c->heads / c->groups) * c->state_size;
    const float *read = written + c->groups * c->state_size;
    const float *gate = c->projected + row * c->ldx + head * c->head_dim;
    float *out = c->out + row * c->ldo + head * c->head_dim;
    const float step = c->steps[row * c->heads + head], kept = c->kept[row * c->heads + head], skip = c->skip[head];
    int64_t i = 0;
    for (; i + 4 * W <= c->head_dim; i += 4 * W)
        advance(c, from + i, to + i, x + i, gate + i, out + i, written, read, step, kept, skip, 4);
    for (; i + 2 * W <= c->head_dim; i += 2 * W)
        advance(c, from + i, to + i, x + i, gate + i, out + i, written, read, step, kept, skip, 2);
    for (; i + W <= c->head_dim; i += W)
        advance(c, from + i, to + i, x + i, gate + i, out + i, written, read, step, kept, skip, 1);
    for (; i < c->head_dim; i++)
        advance_one(c, from + i, to + i, x[i], gate[i], out + i, written, read, step, kept, skip);
}

// How many of a request's rows, from `index` on, lie in the block of the first of them.
INLINE int64_t rows_in_block(const scan_call *c, int64_t before, int64_t index, int64_t count) {
    const int64_t left = c->block_size - (before + index) % c->block_size;
    return left < count - index ? left : count - index;
}

// One head of a request. A block's state is computed in the block's own page, or aside where nothing of it is kept.
static void scan_head(scan_call *c, int64_t request, int64_t head) {
    const int64_t first = c->query_start[request], count = c->query_start[request + 1] - first, before = tokens_before(c, request);
    const int64_t size = c->state_size * c->head_dim;
    static _Thread_local room room_of_state;
    const float *from = NULL;
    if (before > 0) from = (float *)(c->states + page_before(c, request, before) * c->state_bytes) + head * size;
    for (int64_t index = 0; index < count;) {
        const int64_t next = index + rows_in_block(c, before, index, count), page = c->slots[first + next - 1] / c->block_size;
        float *to = page ? (float *)(c->states + page * c->state_bytes) + head * size
                         : at_least(&room_of_state, (size_t)size * sizeof(float));
        if (!to) {
            atomic_store(&c->failed, 1);
            return;
        }
        if (!from) from = memset(to, 0, (size_t)size * sizeof(float));
        for (; index < next; index++, from = to) advance_head(c, head, first + index, from, to);
    }
}

// The last inputs of the convolution go to the pages of the blocks that a request's rows end in. The last block comes first: what
// it takes from the page that the request went on from is overwritten by the first one at most.
static void keep_histories(const scan_call *c, int64_t request) {
    const int64_t first = c->query_start[request], count = c->query_start[request + 1] - first, before = tokens_before(c, request);
    const conv_inputs inputs = inputs_of(c, request, before);
    const size_t bytes = (size_t)c->channels * sizeof(float);
    for (int64_t end = count; end > 0;) {  // behind the last row of a block
        const int64_t page = c->slots[first + end - 1] / c->block_size;
        for (int64_t i = 0; page && i < c->width - 1; i++) {
            const float *input = input_at(c, inputs, end - (c->width - 1) + i);
            float *to = history_of(c, page) + i * c->channels;
            if (!input) memset(to, 0, bytes);
            else if (input != to) memcpy(to, input, bytes);
        }
        end -= (before + end - 1) % c->block_size + 1;
    }
}

static void scan_unit(void *context, int64_t unit) {
    scan_call *c = context;
    const int64_t request = unit / c->heads, head = unit % c->heads;
    if (c->query_start[request + 1] <= c->query_start[request]) return;
    scan_head(c, request, head);
    if (head == 0) keep_histories(c, request);  // which only the convolution of this step has read
}

int ratoon_scan(const float *projected, int64_t ldx, float *out, int64_t ldo, const float *conv_weight, const float *conv_bias,
                const float *decay, const float *skip, const float *step_bias, float least_step, float most_step, void *states,
                int64_t state_bytes, void *histories, int64_t history_bytes, const int32_t *block_table, int64_t table_width,
                const int32_t *query_start, const int32_t *seq_lens, const int64_t *slots, int64_t requests, int64_t heads,
                int64_t head_dim, int64_t state_size, int64_t groups, int64_t width, int64_t block_size, float *scratch) {
    const int64_t inner = heads * head_dim, channels = inner + 2 * groups * state_size, rows = query_start[requests];
    float *steps = scratch + rows * channels;
    scan_call c = {projected,   ldx,       out,        ldo,           conv_weight, conv_bias,   decay,       skip,
                   step_bias,   least_step, most_step, states,        histories,   state_bytes, history_bytes, block_table,
                   table_width, query_start, seq_lens, slots,         requests,    heads,       head_dim,    state_size,
                   groups,      width,     block_size, inner,         channels,    rows,        scratch,     steps,
                   steps + rows * heads, 0};
    if (rows <= 0) return 0;
    parallel_units(mix_unit, &c, (rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT);
    parallel_units(scan_unit, &c, requests * heads);
    return atomic_load(&c.failed) ? -1 : 0;
}
