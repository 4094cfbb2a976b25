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

void check_sampling(void) {
    for (int i = 0; i < 10; i++) allow(random_between(1, 5), random_between(1, 200));
    for (int i = 0; i < 40; i++) take_largest(random_between(1, 5), random_between(1, i < 30 ? 100 : 2000));
    compare(1, 1, 1);
    compare(5, 9001, 1);  // more than are taken out of a row at once
    compare(5, 3000, 0);
    for (int i = 0; i < 30; i++) compare(random_between(1, 8), random_between(1, 700), i % 4 > 0);
}
