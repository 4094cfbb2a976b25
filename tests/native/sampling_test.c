// Draws with filters, beside a reference that sorts. Sums are exact, so tokens are equal, not close.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double sum_of_those_from(const float *values, int64_t n, float least) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += values[i] >= least ? values[i] : 0;
    return sum;
}

static float threshold_by_sorting(const float *p, int64_t n, int64_t top_k, double top_p, float min_p) {
    float *sorted = malloc((size_t)n * 4);
    memcpy(sorted, p, (size_t)n * 4);
    qsort(sorted, (size_t)n, 4, ascending);
    float largest = sorted[n - 1], floor = min_p * largest;
    if (top_k > 0 && top_k <= n && sorted[n - top_k] > floor) floor = sorted[n - top_k];
    double total = sum_of_those_from(sorted, n, 0), kept = top_p * sum_of_those_from(sorted, n, floor), mass = 0;
    int64_t i = 0;
    for (; i < n - 1; i++)
        if ((mass += sorted[i]) > total - kept) break;
    float threshold = sorted[i];
    free(sorted);
    return threshold;
}

static int64_t draw_by_adding(const float *p, int64_t n, float threshold, double uniform) {
    double target = uniform * sum_of_those_from(p, n, threshold), sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (p[i] < threshold || p[i] == 0) continue;
        last = i;
        if ((sum += p[i]) > target) break;
    }
    return last;
}

// Of some sizes, rounded so that some are equal, with zeros; together about 1.
static void fill_row(float *p, int64_t n) {
    double sum = 0, steepness = (double)random_between(0, 12), steps = random_between(0, 1) ? 4 : 1e6;
    for (int64_t i = 0; i < n; i++) {
        p[i] = (float)exp(steepness * round(random_float() * steps) / steps);
        if (random_between(0, 9) == 0) p[i] = 0;
        sum += p[i];
    }
    for (int64_t i = 0; i < n; i++) p[i] = sum > 0 ? (float)(p[i] / sum) : 1 / (float)n;
}

static void compare(int64_t rows, int64_t columns, int with_filters) {
    float *p = guarded_floats(rows * columns), *min_p = guarded_floats(rows);
    int64_t *top_k = guarded(rows * 8), *token_ids = guarded(rows * 8);
    double *top_p = guarded(rows * 8), *uniforms = guarded(rows * 8);
    uint8_t *bad = guarded(rows);
    float *exact = guarded_floats(rows * columns);
    for (int64_t row = 0; row < rows; row++) {
        fill_row(p + row * columns, columns);
        for (int64_t i = row * columns; i < (row + 1) * columns; i++) exact[i] = (float)(rint(p[i] * 0x1p52) * 0x1p-52);
        top_k[row] = random_between(0, 1) * random_between(0, columns + 2);
        top_p[row] = random_between(0, 2) ? (random_float() + 1) / 2 : 1;
        min_p[row] = random_between(0, 1) ? powf((random_float() + 1) / 2, 3) : 0;
        uniforms[row] = row == 0 ? 0 : row == 1 ? 1 - 0x1p-53 : random_bits() * 0x1p-32;
        token_ids[row] = -1;
        bad[row] = 2;
    }
    int64_t poor = rows > 2 ? 2 : -1, empty = rows > 3 ? 3 : -1;
    if (poor >= 0) p[poor * columns + random_between(0, columns - 1)] = NAN;
    for (int64_t i = 0; empty >= 0 && i < columns; i++) p[empty * columns + i] = 0;
    ratoon_draw(p, rows, columns, with_filters ? top_k : NULL, with_filters ? top_p : NULL, with_filters ? min_p : NULL, uniforms,
                token_ids, bad);
    for (int64_t row = 0; row < rows; row++) {
        const float *values = exact + row * columns;
        float threshold = with_filters ? threshold_by_sorting(values, columns, top_k[row], top_p[row], min_p[row]) : 0;
        expect_true(bad[row] == (row == poor || row == empty), "rows without a draw are marked", row, bad[row]);
        expect_true(token_ids[row] >= 0 && token_ids[row] < columns, "a token is one of the row", row, token_ids[row]);
        if (!bad[row]) expect((double)token_ids[row], (double)draw_by_adding(values, columns, threshold, uniforms[row]), 0, "draw", row, columns);
    }
    release_all();
}

static void take_largest(int64_t rows, int64_t columns) {
    float *logits = guarded_floats(rows * columns);
    int64_t *token_ids = guarded(rows * 8);
    uint8_t *bad = guarded(rows);
    for (int64_t i = 0; i < rows * columns; i++) logits[i] = floorf(random_float() * 20);  // equal ones, too
    float *poor = logits + random_between(0, rows - 1) * columns;
    switch (random_between(0, 3)) {
        case 0: poor[random_between(0, columns - 1)] = NAN; break;
        case 1: poor[random_between(0, columns - 1)] = INFINITY; break;
        case 2: for (int64_t i = 0; i < columns; i++) poor[i] = -INFINITY;
    }
    ratoon_greedy(logits, rows, columns, token_ids, bad);
    for (int64_t row = 0; row < rows; row++) {
        const float *p = logits + row * columns;
        int64_t first = 0;
        int is_bad = p[0] != p[0];
        for (int64_t i = 1; i < columns; i++) {
            first = p[i] > p[first] ? i : first;
            is_bad |= p[i] != p[i];
        }
        is_bad |= isinf(p[first]) != 0;
        expect_true(bad[row] == is_bad, "a row without a finite largest is marked", row, bad[row]);
        expect_true(token_ids[row] >= 0 && token_ids[row] < columns, "the largest is one of the row", row, token_ids[row]);
        if (!is_bad) expect_true(token_ids[row] == first, "the first of the largest", row, token_ids[row]);
    }
    release_all();
}

static void allow(int64_t rows, int64_t columns) {
    const int64_t count = (rows + 1) / 2, width = (columns + 31) / 32;  // of every other row
    float *logits = guarded_floats(rows * columns);
    int64_t *chosen = guarded(count * 8);
    uint32_t *words = guarded(count * width * 4);
    for (int64_t i = 0; i < rows * columns; i++) logits[i] = 1;
    for (int64_t i = 0; i < count; i++) chosen[i] = 2 * i;
    for (int64_t i = 0; i < count * width; i++) words[i] = i % 3 == 0 ? 0 : i % 3 == 1 ? UINT32_MAX : random_bits();
    ratoon_allow_bits(logits, columns, chosen, count, words, width);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++) {
            int kept = row % 2 || words[row / 2 * width + i / 32] >> i % 32 & 1;
            expect_true(logits[row * columns + i] == (kept ? 1 : -INFINITY), "a token without its bit is forbidden", row, i);
        }
    release_all();
}

// A grammar that allows rising tokens below 64: what was consumed last, and how often it was asked.
typedef struct {
    uint32_t last;
    int64_t consumed, filled;
} rising;

static int32_t consume_rising(void *matcher, uint32_t token) {
    rising *text = matcher;
    text->consumed++;
    if (token <= text->last) return -1;
    text->last = token;
    return 0;
}

static int32_t fill_rising(void *matcher, uint32_t *mask, size_t mask_bytes) {
    rising *text = matcher;
    text->filled++;
    for (size_t i = 0; i < mask_bytes / 4; i++) mask[i] = i < 2 ? UINT32_MAX : 0;
    for (uint32_t token = 0; token <= text->last; token++) mask[token / 32] &= ~(1u << token % 32);
    return text->last == 63 ? -1 : 0;
}

static bool accepts_rising(void *matcher) { return ((rising *)matcher)->last % 2; }

static void match(int64_t texts) {
    const int64_t width = 3, row_words = 4;
    rising *state = guarded(texts * (int64_t)sizeof(rising));
    void **matchers = guarded(texts * (int64_t)sizeof(void *));
    int32_t *tokens = guarded(texts * 4), *rows = guarded(texts * 4);
    uint32_t *table = guarded(texts * row_words * 4);
    uint8_t *found = guarded(texts), *expected = guarded(texts);
    uint8_t *first_bytes = guarded(63);
    for (int i = 0; i < 63; i++) first_bytes[i] = i >= 55 ? 7 : (uint8_t)i;
    const match_calls calls = {consume_rising, fill_rising, accepts_rising, width * 4, first_bytes, 63, 6};
    for (int64_t i = 0; i < texts; i++) {
        state[i] = (rising){(uint32_t)random_between(0, 62), 0, 0};
        matchers[i] = &state[i];
        tokens[i] = (int32_t)random_between(-1, 63);
        rows[i] = (int32_t)(texts - 1 - i);
        const uint32_t last = tokens[i] < 0 ? state[i].last : (uint32_t)tokens[i];
        // Tokens from 55 on begin alike, the last one is none of the model, and more than six are too many
        const uint8_t alike = last >= 56 && last < 62 ? MATCH_ALIKE : 0;
        expected[i] = tokens[i] >= 0 && last <= state[i].last ? MATCH_REFUSED : last == 63 ? MATCH_FAILED : last % 2 ? 1 : alike;
    }
    memset(table, 0x55, (size_t)(texts * row_words * 4));
    ratoon_match_texts(&calls, matchers, tokens, rows, texts, table, row_words, found);
    for (int64_t i = 0; i < texts; i++) {
        const uint32_t *mask = table + rows[i] * row_words;
        expect_true(found[i] == expected[i], "what is true of a text", i, found[i]);
        expect_true(state[i].consumed == (tokens[i] >= 0), "a text consumes its token once", i, state[i].consumed);
        expect_true(state[i].filled == (expected[i] != MATCH_REFUSED), "a mask is filled once", i, state[i].filled);
        expect_true(mask[3] == 0x55555555, "nothing is written behind a mask", i, mask[3]);
        for (uint32_t token = 0; token < 64 && !(expected[i] & (MATCH_REFUSED | MATCH_FAILED)); token++)
            expect_true((mask[token / 32] >> token % 32 & 1) == (token > state[i].last), "a bit of a mask", i, token);
    }
    release_all();
}

void check_sampling(void) {
    for (int i = 0; i < 20; i++) match(random_between(i > 0, 40));
    for (int i = 0; i < 10; i++) allow(random_between(1, 5), random_between(1, 200));
    for (int i = 0; i < 40; i++) take_largest(random_between(1, 5), random_between(1, i < 30 ? 100 : 2000));
    compare(1, 1, 1);
    compare(5, 9001, 1);  // more than are taken out of a row at once
    compare(5, 3000, 0);
    for (int i = 0; i < 30; i++) compare(random_between(1, 8), random_between(1, 700), i % 4 > 0);
}
