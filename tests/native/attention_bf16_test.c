// Attention of whole sequences by the matrix unit, in bf16. A processor without one has nothing to check.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define HEAD 64
#define MOST_REQUESTS 4
#define BF16_UNIT 0x1p-8   // of a rounding to bf16, at most
#define WEIGHT_ERROR 0x1p-13  // of a power of two, before it is rounded

typedef struct {
    int64_t requests, heads, rows, width;
    int32_t starts[MOST_REQUESTS + 1];
    float *q, *k, *v, *out;
    float scale;
} batch;

static void make_batch(batch *b) {
    b->requests = random_between(1, MOST_REQUESTS);
    b->heads = random_between(1, 3);
    b->starts[0] = 0;
    for (int64_t i = 0; i < b->requests; i++)
        b->starts[i + 1] = b->starts[i] + (int32_t)(random_between(0, 1) ? random_between(1, 40) : random_between(1, 600));
    b->rows = b->starts[b->requests];
    b->width = b->heads * HEAD + random_between(0, 8);
    b->q = random_floats(b->rows * b->width, 4), b->k = random_floats(b->rows * b->width, 4);
    b->v = random_floats(b->rows * b->width, 1), b->out = guarded_floats(b->rows * b->width);
    b->scale = 0.125f;
}

static void attend(const batch *b, const int32_t *starts, int64_t requests, int64_t first_row, float *out) {
    int64_t bytes = ratoon_attention_bf16_scratch(starts[requests], requests, b->heads, HEAD), offset = first_row * b->width;
    ratoon_attention_bf16(b->q + offset, b->width, b->k + offset, b->width, b->v + offset, b->width, out, b->width, starts,
                          requests, b->heads, b->scale, guarded(bytes));
}

// Scores differ by two roundings of each product, weights by that many times their own size, and by their own roundings.
static void check_row(const batch *b, int64_t request, int64_t row, int64_t head) {
    const int64_t first = b->starts[request], last = b->starts[request + 1];
    double *scores = malloc((size_t)(last - first) * sizeof(double)), *errors = malloc((size_t)(last - first) * sizeof(double));
    double highest = -1e300, total = 0;
    for (int64_t key = first; key < last; key++) {
        double score = 0, size = 0;
        for (int64_t i = 0; i < HEAD; i++) {
            double product = (double)b->q[row * b->width + head * HEAD + i] * b->k[key * b->width + head * HEAD + i] * b->scale;
            score += product, size += fabs(product);
        }
        scores[key - first] = score;
        errors[key - first] = size * (2 * BF16_UNIT + HEAD * UNIT);
        highest = fmax(highest, score);
    }
    for (int64_t key = 0; key < last - first; key++) {
        scores[key] = exp(scores[key] - highest);
        errors[key] = scores[key] * (expm1(errors[key]) + BF16_UNIT + 2 * WEIGHT_ERROR) + 0x1p-100;
        total += scores[key];
    }
    double total_error = 0;
    for (int64_t key = 0; key < last - first; key++) total_error += errors[key];
    for (int64_t i = 0; i < HEAD; i++) {
        double sum = 0, error = 0, size = 0;
        for (int64_t key = first; key < last; key++) {
            double value = b->v[key * b->width + head * HEAD + i];
            sum += scores[key - first] * value;
            size += scores[key - first] * fabs(value);
            error += errors[key - first] * fabs(value);
        }
        error = error / total + size / total * (BF16_UNIT + total_error / total + (double)(last - first) * UNIT);
        expect(b->out[row * b->width + head * HEAD + i], sum / total, error, "attention in bf16", row, i);
    }
    free(scores), free(errors);
}

void check_attention_bf16(void) {
    expect_true(ratoon_attention_bf16_scratch(10, 1, 1, HEAD + 16) == 0, "heads without a kernel", 0, 0);
    if (!ratoon_attention_bf16_scratch(1, 1, 1, HEAD)) return;
    for (int round = 0; round < 12; round++) {
        batch b;
        make_batch(&b);
        attend(&b, b.starts, b.requests, 0, b.out);
        for (int64_t request = 0; request < b.requests; request++)
            for (int64_t row = b.starts[request]; row < b.starts[request + 1]; row += random_between(1, 20))
                check_row(&b, request, row, random_between(0, b.heads - 1));
        // By itself a request has the same bits, and nothing is written beside the heads.
        int64_t request = random_between(0, b.requests - 1), first = b.starts[request], rows = b.starts[request + 1] - first;
        int32_t alone[2] = {0, (int32_t)rows};
        float *out = guarded_floats(rows * b.width);
        attend(&b, alone, 1, first, out);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < b.width; i++) {
                float together = b.out[(first + row) * b.width + i];
                expect_true(i < b.heads * HEAD ? same_bits(out[row * b.width + i], together) : is_poison(together),
                            "a request alone", row, i);
            }
        release_all();
    }
}
