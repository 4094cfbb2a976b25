// One token for each row: the one with the largest logit, or one drawn by probabilities, after min_p, top_k and top_p: what
// layers/sampling.py does by sorting.
//
// Probabilities are rounded to multiples of 2^-52 first, so that sums in double precision are exact in any order: a row has
// the same token here, there, and in any batch. Nothing is sorted. Each filter asks for the least value up to which the row
// holds more than some number of tokens, or more than some mass. Numbers that are not negative are in the order of their bits,
// so bisection finds it, in passes over the row that read vectors and have no branches.
#include <string.h>

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#define CHUNK 256           // columns whose sum is kept, at least
#define MOST_CHUNKS 1024
#define ROOM 4096           // values that are taken out of a row, at most
#define HALF (W / 2)        // doubles that a vector has

typedef float half_vec __attribute__((vector_size(4 * HALF), aligned(4)));
typedef int32_t half_ivec __attribute__((vector_size(4 * HALF), aligned(4)));
typedef double double_vec __attribute__((vector_size(8 * HALF), aligned(8)));

typedef struct {
    int64_t count;
    double mass;
} weight;

typedef struct {
    float *probabilities;
    const int64_t *top_k;
    const double *top_p;
    const float *min_p;
    const double *uniforms;
    int64_t *token_ids;
    uint8_t *bad;
    int64_t columns;
} draw_call;

// Rounds to multiples of 2^-52: floats in [2^-29, 2^-28) have steps of that size, larger ones have larger steps. Returns the
// largest.
static float round_row(float *p, int64_t n) {
    const float lift = 0x1p-29f;
    vec top = {};
    float largest = 0;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vec v = (load(p + i) + splat(lift)) - splat(lift);
        store(p + i, v);
        top = max_(top, v);
    }
    for (; i < n; i++) {
        p[i] = (p[i] + lift) - lift;
        largest = p[i] > largest ? p[i] : largest;
    }
    return max_lanes(top) > largest ? max_lanes(top) : largest;
}

// The sum of the values that are not below the threshold.
static double sum_from(const float *p, int64_t n, float threshold) {
    const half_vec least = threshold - (half_vec){};
    double_vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * HALF <= n; i += 4 * HALF)
        for (int j = 0; j < 4; j++) {
            half_vec v = *(const half_vec *)(p + i + j * HALF);
            v = (half_vec)((half_ivec)v & ~(half_ivec)(v < least));  // NaN stays
            sums[j] += __builtin_convertvector(v, double_vec);
        }
    double_vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0;
    for (int j = 0; j < HALF; j++) sum += all[j];
    for (; i < n; i++) sum += p[i] < threshold ? 0 : p[i];
    return sum;
}

// How many values are not above v, and their sum.
static weight weight_up_to(const float *p, int64_t n, float v) {
    const half_vec most = v - (half_vec){};
    double_vec sums[4] = {};
    half_ivec counts[4] = {};
    int64_t i = 0;
    for (; i + 4 * HALF <= n; i += 4 * HALF)
        for (int j = 0; j < 4; j++) {
            half_vec x = *(const half_vec *)(p + i + j * HALF);
            half_ivec is_in = x <= most;  // -1 where it is
            counts[j] -= is_in;
            sums[j] += __builtin_convertvector((half_vec)((half_ivec)x & is_in), double_vec);
        }
    double_vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    half_ivec count = (counts[0] + counts[1]) + (counts[2] + counts[3]);
    weight w = {0, 0};
    for (int j = 0; j < HALF; j++) {
        w.count += count[j];
        w.mass += all[j];
    }
    for (; i < n; i++)
        if (p[i] <= v) {
            w.count++;
            w.mass += p[i];
        }
    return w;
}

static float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// The values in (low, high], by their bits; there is room for one more than there are.
static void gather(const float *p, int64_t n, int32_t low, int32_t high, float *values) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = bits_of(p[i]);
        values[count] = p[i];
        count += bits > low && bits <= high;
    }
}

// The least value v of the row for which the values up to v are more than `limit`, by number or by mass; the largest one if
// there is none such. By bisection of the bits; once few values are left in question they are taken out of the row.
static float least_above(const float *p, int64_t n, int by_mass, double limit, double total, float largest) {
    float values[ROOM + 1];
    int32_t low = -1, high = bits_of(largest);
    weight up_to_low = {0, 0}, outside = {0, 0};  // `outside`: the weight of what is below the values taken out
    int64_t count_to_high = n;
    if (!(total > limit)) return largest;
    while (high - low > 1) {
        if (n > ROOM && count_to_high - up_to_low.count <= ROOM) {
            gather(p, n, low, high, values);
            p = values;
            n = count_to_high - up_to_low.count;
            outside = up_to_low;
        }
        int32_t middle = low + (high - low) / 2;
        weight w = weight_up_to(p, n, from_bits(middle));
        w.count += outside.count;
        w.mass += outside.mass;
        if ((by_mass ? w.mass : (double)w.count) > limit) {
            high = middle;
            count_to_high = w.count;
        } else {
            low = middle;
            up_to_low = w;
        }
    }
    return from_bits(high);
}

// The least probability that passes all filters.
static float threshold_of(const draw_call *c, int64_t row, const float *p, double total, float largest) {
    const int64_t n = c->columns, top_k = c->top_k[row];
    const double top_p = c->top_p[row];
    float floor = c->min_p[row] * largest;
    if (top_k > 0 && top_k <= n) {
        float kth = least_above(p, n, 0, (double)(n - top_k), (double)n, largest);
        floor = kth > floor ? kth : floor;
    }
    if (top_p >= 1) return floor;
    // A token is kept while the mass of the larger ones is below top_p: while its place in the ascending sum is above the
    // rest. The product is rounded by itself, as it is where torch computes it.
    volatile double kept = top_p * (floor > 0 ? sum_from(p, n, floor) : total);
    float threshold = least_above(p, n, 1, total - kept, total, largest);
    return threshold > floor ? threshold : floor;
}

// The first column at which the sum of what is kept is above the target; where rounding brought the target up to the total,
// the last one that adds something.
static int64_t column_at(const float *p, int64_t n, float threshold, double before, double target) {
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (p[i] < threshold || p[i] == 0) continue;
        last = i;
        before += p[i];
        if (before > target) break;
    }
    return last;
}

static void draw_row(void *context, int64_t row) {
    const draw_call *c = context;
    const int64_t n = c->columns;
    float *p = c->probabilities + row * n;
    double sums[MOST_CHUNKS], before = 0, total = 0;
    int64_t chunk = (n + MOST_CHUNKS - 1) / MOST_CHUNKS, found = 0;
    if (chunk < CHUNK) chunk = CHUNK;
    const float largest = round_row(p, n);
    const double whole = sum_from(p, n, 0);
    c->token_ids[row] = 0;
    c->bad[row] = !(whole > 0);  // a row with a NaN has a NaN total
    if (c->bad[row]) return;
    const float threshold = c->top_k ? threshold_of(c, row, p, whole, largest) : 0;
    const int64_t chunks = (n + chunk - 1) / chunk;
    for (int64_t i = 0; i < chunks; i++) {
        sums[i] = sum_from(p + i * chunk, n - i * chunk < chunk ? n - i * chunk : chunk, threshold);
        total += sums[i];
    }
    const double target = c->uniforms[row] * total;
    double sum = 0;
    for (int64_t i = 0; i < chunks; i++) {
        if (sums[i] == 0) continue;
        found = i;
        before = sum;
        sum += sums[i];
        if (sum > target) break;
    }
    int64_t first = found * chunk;
    c->token_ids[row] = first + column_at(p + first, n - first < chunk ? n - first : chunk, threshold, before, target);
}

void ratoon_draw(float *probabilities, int64_t rows, int64_t columns, const int64_t *top_k, const double *top_p,
                 const float *min_p, const double *uniforms, int64_t *token_ids, uint8_t *bad) {
    draw_call c = {probabilities, top_k, top_p, min_p, uniforms, token_ids, bad, columns};
    if (rows > 0 && columns > 0) parallel_units(draw_row, &c, rows);
}

typedef struct {
    const float *logits;
    int64_t *token_ids;
    uint8_t *bad;
    int64_t columns;
} greedy_call;

// The largest of some columns, NaN if one is.
static float largest_of(const float *p, int64_t n) {
    vec tops[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())};
    ivec is_nan = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int j = 0; j < 2; j++) {
            vec v = load(p + i + j * W);
            is_nan |= v != v;
            tops[j] = max_(tops[j], v);
        }
    int any_nan = 0;
    for (int j = 0; j < W; j++) any_nan |= is_nan[j];
    float largest = max_lanes(max_(tops[0], tops[1]));
    for (; i < n; i++) {
        any_nan |= p[i] != p[i];
        largest = p[i] > largest ? p[i] : largest;
    }
    return any_nan ? __builtin_nanf("") : largest;
}

static void greedy_row(void *context, int64_t row) {
    const greedy_call *c = context;
    const float *p = c->logits + row * c->columns;
    float largest = -__builtin_inff();
    int64_t chunk = 0;
    for (int64_t first = 0; first < c->columns; first += CHUNK) {
        float value = largest_of(p + first, c->columns - first < CHUNK ? c->columns - first : CHUNK);
        if (value <= largest) continue;
        largest = value;
        chunk = first;
        if (value != value) break;
    }
    int64_t column = chunk;
    while (column < c->columns - 1 && p[column] != largest && p[column] == p[column]) column++;
    c->token_ids[row] = column;
    c->bad[row] = !(largest - largest == 0);
}

void ratoon_greedy(const float *logits, int64_t rows, int64_t columns, int64_t *token_ids, uint8_t *bad) {
    greedy_call c = {logits, token_ids, bad, columns};
    if (columns > 0) parallel_units(greedy_row, &c, rows);
}

typedef struct {
    float *logits;
    const int64_t *rows;
    const uint32_t *words;
    int64_t columns, words_per_row;
} allow_call;

// Most words of a mask allow all of their tokens or none: neither reads a logit.
static void allow_row(void *context, int64_t place) {
    const allow_call *c = context;
    float *p = c->logits + c->rows[place] * c->columns;
    const uint32_t *words = c->words + place * c->words_per_row;
    for (int64_t first = 0, i = 0; first < c->columns; first += 32, i++) {
        const int64_t n = c->columns - first < 32 ? c->columns - first : 32;
        const uint32_t word = words[i];
        if (word == UINT32_MAX) continue;
        for (int64_t j = 0; j < n; j++) p[first + j] = word >> j & 1 ? p[first + j] : -__builtin_inff();
    }
}

void ratoon_allow_bits(float *logits, int64_t columns, const int64_t *rows, int64_t count, const uint32_t *words,
                       int64_t words_per_row) {
    allow_call c = {logits, rows, words, columns, words_per_row};
    if (count > 0 && columns > 0) parallel_units(allow_row, &c, count);
}
