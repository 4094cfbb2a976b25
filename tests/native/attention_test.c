// Attention over the paged cache, and writing to it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define TILE 16
#define STRETCH 64  // keys whose weights and sums are taken together
#define MOST_REQUESTS 8

typedef struct {
    int64_t requests, heads, kv_heads, head_dim, block_size, window, causal, table_width, num_blocks, block_floats, reach;
    int64_t num_tokens, ldq, ldo;
    int32_t query_start[MOST_REQUESTS + 1], seq_lens[MOST_REQUESTS], shared[MOST_REQUESTS];
    int32_t *table;
    float *cache, *q, *out, *bias;
    float scale;
} batch;

static int64_t key_index(const batch *b, int64_t slot, int64_t head, int64_t i) {
    return slot / b->block_size * b->block_floats + (head * b->head_dim + i) * b->block_size + slot % b->block_size;
}

static int64_t value_index(const batch *b, int64_t slot, int64_t head, int64_t i) {
    int64_t panel = head * (b->head_dim / TILE) + i / TILE;
    return slot / b->block_size * b->block_floats + b->kv_heads * b->head_dim * b->block_size +
           (panel * b->block_size + slot % b->block_size) * TILE + i % TILE;
}

static int64_t slot_of(const batch *b, int64_t request, int64_t key) {
    return b->table[request * b->table_width + key / b->block_size] * b->block_size + key % b->block_size;
}

// Block 0 belongs to no request. A request may begin with the blocks of the one before it.
static void lay_out(batch *b, int decode) {
    int64_t next_block = 1;
    b->query_start[0] = 0;
    for (int64_t r = 0; r < b->requests; r++) {
        int64_t length = random_between(1, 3 * STRETCH), query = decode ? 1 : random_between(1, length < 40 ? length : 40);
        if (random_between(0, 5) == 0) length = 9 * STRETCH + random_between(0, STRETCH);  // more than a group of stretches
        b->seq_lens[r] = (int32_t)length;
        b->query_start[r + 1] = b->query_start[r] + (int32_t)query;
        int64_t common = 0;
        if (r > 0 && decode && random_between(0, 3) > 0) {
            int64_t shorter = length < b->seq_lens[r - 1] ? length : b->seq_lens[r - 1];
            common = random_between(0, (shorter + b->block_size - 1) / b->block_size);
            int64_t keys = common * b->block_size;
            b->shared[r] = (int32_t)(keys < shorter ? keys : shorter);
        } else {
            b->shared[r] = 0;
        }
        for (int64_t i = 0; i < b->table_width; i++) {
            int32_t *entry = &b->table[r * b->table_width + i];
            if (i * b->block_size >= length)
                *entry = 0;
            else
                *entry = i < common ? b->table[(r - 1) * b->table_width + i] : (int32_t)next_block++;
        }
    }
    b->num_blocks = next_block;
    b->num_tokens = b->query_start[b->requests];
}

// Fills the slots of all requests by the kernel that stores, checks that each value is where it belongs and that nothing
// else was written.
static void store_all(batch *b) {
    int64_t slots_in_all = b->num_blocks * b->block_size, rows = 0, width = b->kv_heads * b->head_dim, ldk = width + 3, ldv = width + 1;
    char *used = calloc((size_t)slots_in_all, 1);
    int64_t *slots = malloc((size_t)slots_in_all * 8);
    for (int64_t r = 0; r < b->requests; r++)
        for (int64_t key = 0; key < b->seq_lens[r]; key++) {
            int64_t slot = slot_of(b, r, key);
            if (!used[slot]) slots[rows++] = slot;
            used[slot] = 1;
        }
    float *k = random_floats((rows - 1) * ldk + width, 2), *v = random_floats((rows - 1) * ldv + width, 2);
    float *expected = guarded_floats(b->num_blocks * b->block_floats);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i++) {
            expected[key_index(b, slots[row], i / b->head_dim, i % b->head_dim)] = k[row * ldk + i];
            expected[value_index(b, slots[row], i / b->head_dim, i % b->head_dim)] = v[row * ldv + i];
        }
    ratoon_store_kv(k, ldk, v, ldv, b->cache, b->block_floats, slots, rows, b->kv_heads, b->head_dim, b->block_size);
    expect_true(memcmp(b->cache, expected, (size_t)(b->num_blocks * b->block_floats) * 4) == 0, "keys and values are stored", rows, 0);
    free(used);
    free(slots);
}

// One row of one head. A score is off by what its sum of products is off. A weight is off by that, by the subtraction of the
// largest score, by the exponential, and by being scaled down whenever a stretch brings a larger score. The error of the
// largest score itself is in all weights alike and falls out of the quotient.
static void expect_row(const batch *b, int64_t r, int64_t token, int64_t head) {
    int64_t kv_head = head / (b->heads / b->kv_heads), length = b->seq_lens[r];
    int64_t position = length - (b->query_start[r + 1] - token);
    int64_t first = b->window > 0 && position - b->window + 1 > 0 ? position - b->window + 1 : 0;
    int64_t end = b->causal ? position + 1 : length;
    const float *q = b->q + token * b->ldq + head * b->head_dim;
    double *scores = malloc((size_t)length * 8), highest = -INFINITY, lowest = INFINITY, score_error = 0, total = 0;
    for (int64_t key = first; key < end; key++) {
        double score = 0, sizes = 0, bias = b->bias ? b->bias[head * (2 * b->reach + 1) + b->reach + key - position] : 0;
        for (int64_t i = 0; i < b->head_dim; i++) {
            double term = (double)q[i] * b->cache[key_index(b, slot_of(b, r, key), kv_head, i)] * b->scale;
            score += term;
            sizes += fabs(term);
        }
        double error = (double)(b->head_dim + 2) * UNIT * sizes + UNIT * fabs(score + bias);
        if (error > score_error) score_error = error;
        scores[key] = score + bias;
        if (scores[key] > highest) highest = scores[key];
        if (scores[key] < lowest) lowest = scores[key];
    }
    double stretches = (double)(length / STRETCH + 1), spread = highest - lowest + 2 * score_error;
    double weight_error = score_error + (UNIT * spread + EXP_ERROR) + stretches * (2 * EXP_ERROR + UNIT) + UNIT * spread;
    double sum_roundings = (STRETCH + stretches + 4) * UNIT;
    for (int64_t key = first; key < end; key++) total += scores[key] = exp(scores[key] - highest);
    for (int64_t i = 0; i < b->head_dim; i++) {
        double sum = 0, sizes = 0;
        for (int64_t key = first; key < end; key++) {
            double term = scores[key] / total * b->cache[value_index(b, slot_of(b, r, key), kv_head, i)];
            sum += term;
            sizes += fabs(term);
        }
        expect(b->out[token * b->ldo + head * b->head_dim + i], sum, sizes * 2 * (weight_error + sum_roundings) * 1.01, "attention",
               token, head * b->head_dim + i);
    }
    free(scores);
}

static void compare(int decode) {
    batch b = {.requests = random_between(1, decode ? MOST_REQUESTS : 3), .kv_heads = random_between(1, 2), .head_dim = TILE * random_between(1, 4)};
    b.heads = b.kv_heads * random_between(1, 4);
    b.block_size = TILE << random_between(0, 2);
    b.causal = random_between(0, 3) > 0;
    b.window = b.causal && random_between(0, 3) == 0 ? random_between(1, 100) : 0;
    b.table_width = 10 * STRETCH / b.block_size + 2;
    b.block_floats = 2 * b.kv_heads * b.head_dim * b.block_size;
    b.scale = 1 / sqrtf((float)b.head_dim);
    b.ldq = b.heads * b.head_dim + 5;
    b.ldo = b.heads * b.head_dim + 3;
    b.reach = 10 * STRETCH + 1;
    b.table = guarded(b.requests * b.table_width * 4);
    lay_out(&b, decode);
    b.cache = guarded_floats(b.num_blocks * b.block_floats);
    b.q = random_floats((b.num_tokens - 1) * b.ldq + b.heads * b.head_dim, 3);
    b.out = guarded_floats(b.num_tokens * b.ldo);
    b.bias = random_between(0, 3) == 0 ? random_floats(b.heads * (2 * b.reach + 1), 2) : NULL;
    store_all(&b);
    int result = ratoon_attention(b.q, b.ldq, b.out, b.ldo, b.cache, b.block_floats, b.table, b.table_width, b.query_start, b.seq_lens,
                                  b.shared, b.requests, b.heads, b.kv_heads, b.head_dim, b.block_size, b.window, b.causal,
                                  b.bias, b.reach, b.scale);
    expect_true(result == 0, "attention has memory", 0, 0);
    for (int64_t r = 0; r < b.requests; r++)
        for (int64_t token = b.query_start[r]; token < b.query_start[r + 1]; token++) {
            expect_row(&b, r, token, random_between(0, b.heads - 1));
            for (int64_t i = 0; i < b.heads * b.head_dim; i++)
                expect_true(!is_poison(b.out[token * b.ldo + i]), "every head is written", token, i);
            for (int64_t i = b.heads * b.head_dim; i < b.ldo; i++)
                expect_true(is_poison(b.out[token * b.ldo + i]), "attention leaves what is between its rows", token, i);
        }
    release_all();
}

void check_attention(void) {
    for (int i = 0; i < 10; i++) compare(1);
    for (int i = 0; i < 4; i++) compare(0);
}
