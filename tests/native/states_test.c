// The scan of state-space layers, against the recurrence in double precision; cuts of prompts, pages, and the recorded form.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

int ratoon_scan_words(const int64_t *words);

#define P(pointer) ((int64_t)(intptr_t)(pointer))
#define REQUESTS 3
#define MOST_TOKENS 24  // of a request
#define MOST_BLOCKS 26  // of a request, with the null block before all

static struct {
    int64_t heads, head_dim, state_size, groups, width, block_size, inner, channels, line;  // line: numbers of a row
    float *weight, *bias, *decay, *skip, *step_bias;
    float least, most;
    int64_t state_floats, history_floats;  // from page to page
    int32_t table[REQUESTS][MOST_BLOCKS];
    float *rows[REQUESTS];       // what comes in, [tokens][line]
    int64_t tokens[REQUESTS];
    double expected[REQUESTS][MOST_TOKENS][512], allowed[REQUESTS][MOST_TOKENS][512];
} m;

static int64_t number(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double silu(double x) { return x / (1 + exp(-x)); }

static void draw_layer(void) {
    m.groups = random_between(1, 2);
    m.heads = m.groups * random_between(1, 3);
    m.head_dim = random_between(1, 80);
    m.state_size = random_between(1, 40);
    m.width = random_between(1, 5);
    m.block_size = random_between(1, 9);
    m.inner = m.heads * m.head_dim;
    m.channels = m.inner + 2 * m.groups * m.state_size;
    m.line = m.inner + m.channels + m.heads;
    m.weight = random_floats(m.width * m.channels, 1);
    m.bias = random_between(0, 1) ? random_floats(m.channels, 1) : NULL;
    m.decay = random_floats(m.heads, 2);
    for (int64_t i = 0; i < m.heads; i++) m.decay[i] = -fabsf(m.decay[i]);
    m.skip = random_floats(m.heads, 1);
    m.step_bias = random_floats(m.heads, 3);
    m.least = random_between(0, 1) ? 0.0f : 0.05f;
    m.most = random_between(0, 1) ? INFINITY : 1.0f;
    m.state_floats = m.inner * m.state_size + random_between(0, 3);
    m.history_floats = (m.width - 1) * m.channels + random_between(0, 3);
    for (int64_t r = 0; r < REQUESTS; r++) {
        m.tokens[r] = random_between(1, MOST_TOKENS);
        m.rows[r] = random_floats(m.tokens[r] * m.line, 2);
        for (int64_t i = 0; i < MOST_BLOCKS; i++) m.table[r][i] = (int32_t)(1 + (MOST_BLOCKS - 1 - i) * REQUESTS + r);
    }
}

// One head, in double precision. `size` is what the sums would be if nothing cancelled: errors are parts of it.
static void expect_head(int64_t request, int64_t head) {
    double state[80 * 40] = {0}, size[80 * 40] = {0};
    for (int64_t t = 0; t < m.tokens[request]; t++) {
        double mixed[80 + 2 * 40];  // x, written, read
        for (int64_t i = 0; i < m.head_dim + 2 * m.state_size; i++) {
            const int64_t group = head / (m.heads / m.groups), n = i - m.head_dim;
            const int64_t channel = n < 0 ? head * m.head_dim + i
                                          : m.inner + (n / m.state_size * m.groups + group) * m.state_size + n % m.state_size;
            double sum = m.bias ? m.bias[channel] : 0;
            for (int64_t tap = 0; tap < m.width; tap++) {
                const int64_t from = t - (m.width - 1) + tap;
                if (from >= 0) sum += (double)m.rows[request][from * m.line + m.inner + channel] * m.weight[tap * m.channels + channel];
            }
            mixed[i] = silu(sum);
        }
        const double time = (double)m.rows[request][t * m.line + m.inner + m.channels + head] + m.step_bias[head];
        const double step = fmin(fmax(log1p(exp(time)), m.least), m.most), kept = exp(step * m.decay[head]);
        for (int64_t p = 0; p < m.head_dim; p++) {
            double sum = m.skip[head] * mixed[p], sizes = fabs(sum);
            for (int64_t n = 0; n < m.state_size; n++) {
                double *s = state + p * m.state_size + n, *whole = size + p * m.state_size + n;
                const double write = mixed[m.head_dim + n], read = mixed[m.head_dim + m.state_size + n];
                *s = *s * kept + mixed[p] * step * write;
                // Mixed inputs reach 20; what is lost where taps cancel is a part of that.
                *whole = *whole * kept + (fabs(mixed[p]) + 1) * step * (fabs(write) + 1);
                sum += *s * read;
                sizes += *whole * (fabs(read) + 1);
            }
            const double gate = m.rows[request][t * m.line + head * m.head_dim + p];
            m.expected[request][t][head * m.head_dim + p] = sum * silu(gate);
            // For each token that the state has gone through: its decay, whose exponent is of about 10, and its sum. Then the sum
            // over the state, and the roundings of the convolution, which are parts of 20.
            const double roundings = (double)(t + 1) * 100 + (double)m.state_size + 1000;
            m.allowed[request][t][head * m.head_dim + p] = roundings * UNIT * sizes * (fabs(silu(gate)) + 1e-3);
        }
    }
}

typedef struct {
    float *states, *histories, *out[REQUESTS];
} run;

static run new_run(void) {
    run r = {guarded_floats((MOST_BLOCKS * REQUESTS + 1) * m.state_floats),
             guarded_floats((MOST_BLOCKS * REQUESTS + 1) * m.history_floats), {0}};
    for (int64_t i = 0; i < REQUESTS; i++) r.out[i] = guarded_floats(m.tokens[i] * m.inner);
    return r;
}

// One step in which each request goes on from token begins[r] to ends[r]. kept: whether the pages of request 0 are written.
static void step(run *to, const int64_t *begins, const int64_t *ends, int kept, int recorded) {
    int32_t starts[REQUESTS + 1] = {0}, lens[REQUESTS];
    for (int64_t r = 0; r < REQUESTS; r++) {
        starts[r + 1] = starts[r] + (int32_t)(ends[r] - begins[r]);
        lens[r] = (int32_t)ends[r];
    }
    const int64_t rows = starts[REQUESTS], ldx = m.line + 3, ldo = m.inner + 2;
    if (rows == 0) return;
    float *projected = guarded_floats((rows - 1) * ldx + m.line), *out = guarded_floats((rows - 1) * ldo + m.inner);
    float *scratch = guarded_floats(rows * (m.channels + 2 * m.heads));
    int64_t *slots = guarded(rows * 8);
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t t = begins[r]; t < ends[r]; t++) {
            const int64_t row = starts[r] + t - begins[r];
            memcpy(projected + row * ldx, m.rows[r] + t * m.line, (size_t)m.line * 4);
            slots[row] = r || kept ? m.table[r][t / m.block_size] * m.block_size + t % m.block_size : 0;
        }
    const int64_t words[] = {P(projected), ldx, P(out), ldo, P(m.weight), P(m.bias), P(m.decay), P(m.skip), P(m.step_bias),
                             number(m.least), number(m.most), P(to->states), m.state_floats * 4, P(to->histories),
                             m.history_floats * 4, P(m.table), MOST_BLOCKS, P(starts), P(lens), P(slots), REQUESTS, m.heads,
                             m.head_dim, m.state_size, m.groups, m.width, m.block_size, P(scratch)};
    const int failed = recorded ? ratoon_scan_words(words)
                                : ratoon_scan(projected, ldx, out, ldo, m.weight, m.bias, m.decay, m.skip, m.step_bias, m.least,
                                              m.most, to->states, m.state_floats * 4, to->histories, m.history_floats * 4,
                                              m.table[0], MOST_BLOCKS, starts, lens, slots, REQUESTS, m.heads, m.head_dim,
                                              m.state_size, m.groups, m.width, m.block_size, scratch);
    expect_true(failed == 0, "scan", 0, 0);
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t t = begins[r]; t < ends[r]; t++)
            memcpy(to->out[r] + t * m.inner, out + (starts[r] + t - begins[r]) * ldo, (size_t)m.inner * 4);
}

static void expect_same(const run *a, const run *b, const char *what) {
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t i = 0; i < m.tokens[r] * m.inner; i++)
            expect_true(same_bits(a->out[r][i], b->out[r][i]), what, r, i);
}

// The pages of blocks that ended, and of the last token.
static void expect_same_pages(const run *a, const run *b) {
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t block = 0; block * m.block_size < m.tokens[r]; block++) {
            const int64_t page = m.table[r][block];
            for (int64_t i = 0; i < m.inner * m.state_size; i++)
                expect_true(same_bits(a->states[page * m.state_floats + i], b->states[page * m.state_floats + i]), "page", r, i);
            for (int64_t i = 0; i < (m.width - 1) * m.channels; i++)
                expect_true(same_bits(a->histories[page * m.history_floats + i], b->histories[page * m.history_floats + i]),
                            "history", r, i);
        }
}

static void compare_scan(void) {
    draw_layer();
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t head = 0; head < m.heads; head++) expect_head(r, head);
    const int64_t none[REQUESTS] = {0};
    run whole = new_run(), cut = new_run();
    step(&whole, none, m.tokens, 1, 0);
    for (int64_t r = 0; r < REQUESTS; r++)
        for (int64_t t = 0; t < m.tokens[r]; t++)
            for (int64_t i = 0; i < m.inner; i++)
                expect(whole.out[r][t * m.inner + i], m.expected[r][t][i], m.allowed[r][t][i], "state space", r * 100 + t, i);
    // In parts: some requests have no token in a step, and the steps of one that end are those of others that go on.
    int64_t done[REQUESTS] = {0}, left = 1;
    while (left) {
        int64_t next[REQUESTS];
        left = 0;
        for (int64_t r = 0; r < REQUESTS; r++) {
            const int64_t more = done[r] + random_between(0, random_between(0, 1) ? 1 : 9);
            next[r] = more < m.tokens[r] ? more : m.tokens[r];
            left += m.tokens[r] - next[r];
        }
        step(&cut, done, next, 1, (int)random_between(0, 1));
        memcpy(done, next, sizeof done);
    }
    expect_same(&whole, &cut, "a prompt that is cut");
    expect_same_pages(&whole, &cut);
    for (int64_t i = 0; i < m.state_floats; i++) expect_true(is_poison(whole.states[i]), "the null block", 0, i);
    // What is not kept: the last tokens of the first request once more, which must leave its pages as they are.
    run aside = new_run();
    const int64_t again[REQUESTS] = {m.tokens[0] - 1 - (m.tokens[0] - 1) % m.block_size, m.tokens[1], m.tokens[2]};
    const int64_t floats = MOST_BLOCKS * REQUESTS + 1;
    memcpy(aside.states, whole.states, (size_t)(floats * m.state_floats) * 4);
    memcpy(aside.histories, whole.histories, (size_t)(floats * m.history_floats) * 4);
    step(&aside, again, m.tokens, 0, 0);
    for (int64_t i = again[0] * m.inner; i < m.tokens[0] * m.inner; i++)
        expect_true(same_bits(aside.out[0][i], whole.out[0][i]), "tokens that are not kept", 0, i);
    expect_true(memcmp(aside.states, whole.states, (size_t)(floats * m.state_floats) * 4) == 0, "pages that stay", 0, 0);
    expect_true(memcmp(aside.histories, whole.histories, (size_t)(floats * m.history_floats) * 4) == 0, "histories that stay", 0, 0);
    release_all();
}

void check_states(void) {
    for (int i = 0; i < 12; i++) compare_scan();
}
