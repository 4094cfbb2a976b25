// Attention over the paged cache, and writing to it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define TILE 16
#define STRETCH 64  // keys whose weights and sums are taken together
#define LONGEST (36 * STRETCH)
#define MOST_REQUESTS 8

#define UNTOUCHED 0xa5  // bytes of the cache that nothing was stored in

enum { FLOATS, HALVES, BYTES };
static const int64_t size_of[] = {4, 2, 1};

typedef struct {
    int64_t kind, requests, heads, kv_heads, head_dim, block_size, window, causal, table_width, num_blocks, block_bytes, reach;
    int64_t num_tokens, ldq, ldo, scale_block_bytes;
    int32_t query_start[MOST_REQUESTS + 1], seq_lens[MOST_REQUESTS], shared[MOST_REQUESTS];
    int32_t *table, *ends;
    unsigned char *cache, *scales;
    float *q, *out, *bias, *sinks;
    float scale, cap;  // 0: scores have no cap
} batch;

static const unsigned char *key_place(const batch *b, int64_t slot, int64_t head, int64_t i) {
    int64_t index = (head * b->head_dim + i) * b->block_size + slot % b->block_size;
    return b->cache + slot / b->block_size * b->block_bytes + index * size_of[b->kind];
}

static const unsigned char *value_place(const batch *b, int64_t slot, int64_t head, int64_t i) {
    int64_t panel = head * (b->head_dim / TILE) + i / TILE;
    int64_t index = b->kv_heads * b->head_dim * b->block_size + (panel * b->block_size + slot % b->block_size) * TILE + i % TILE;
    return b->cache + slot / b->block_size * b->block_bytes + index * size_of[b->kind];
}

// `part`: 0 for keys, 1 for values
static float scale_at(const batch *b, int64_t slot, int64_t head, int64_t part) {
    const float *scales = (const float *)(b->scales + slot / b->block_size * b->scale_block_bytes);
    return scales[(part * b->kv_heads + head) * b->block_size + slot % b->block_size];
}

// The number that is kept at a place.
static double kept(const batch *b, const unsigned char *place, int64_t slot, int64_t head, int64_t part) {
    if (b->kind == FLOATS) {
        float number;
        memcpy(&number, place, 4);
        return number;
    }
    if (b->kind == BYTES) return (double)*(const int8_t *)place * scale_at(b, slot, head, part);
    uint16_t bits;
    memcpy(&bits, place, 2);
    int exponent = bits >> 10 & 31;
    double size = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits & 1023, -24);
    return bits & 0x8000 ? -size : size;
}

static double key_at(const batch *b, int64_t slot, int64_t head, int64_t i) {
    return kept(b, key_place(b, slot, head, i), slot, head, 0);
}

static double value_at(const batch *b, int64_t slot, int64_t head, int64_t i) {
    return kept(b, value_place(b, slot, head, i), slot, head, 1);
}

static int is_untouched(const batch *b, const unsigned char *place) {
    for (int64_t i = 0; i < size_of[b->kind]; i++)
        if (place[i] != UNTOUCHED) return 0;
    return 1;
}

// How far a number of a head may be from what was stored for it: half a step of its rounding.
static double rounding_of(const batch *b, float number, const float *head) {
    if (b->kind == FLOATS) return 0;
    if (b->kind == HALVES) return 0x1p-11 * fabs(number) + 0x1p-25;
    double largest = 0;
    for (int64_t i = 0; i < b->head_dim; i++) largest = fmax(largest, fabs(head[i]));
    return largest / 127 * (0.5 + 127 * 4 * UNIT);  // the step and the quotient are rounded themselves
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
        if (random_between(0, 15) == 0) length = LONGEST - random_between(0, 2 * STRETCH);  // several groups
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

// Images among the tokens: their rows see each other. Others have their own position, or none.
static void place_images(batch *b) {
    b->ends = guarded(b->num_tokens * 4);
    for (int64_t r = 0; r < b->requests; r++) {
        const int64_t context = b->seq_lens[r] - b->query_start[r + 1];  // the position of token 0 of the batch, if it had one
        for (int64_t token = b->query_start[r], next; token < b->query_start[r + 1]; token = next) {
            const int is_image = random_between(0, 2) == 0;
            next = is_image ? random_between(token + 1, b->query_start[r + 1]) : token + 1;
            for (int64_t i = token; i < next; i++) b->ends[i] = (int32_t)(is_image || random_between(0, 1) ? context + next - 1 : -1);
        }
    }
}

// Fills the slots of all requests by the kernel that stores, checks that each number is where it belongs and that nothing
// else was written.
static void store_all(batch *b) {
    int64_t slots_in_all = b->num_blocks * b->block_size, rows = 0, width = b->kv_heads * b->head_dim, ldk = width + 3, ldv = width + 1;
    int64_t *slots = malloc((size_t)slots_in_all * 8), *row_of = malloc((size_t)slots_in_all * 8);
    for (int64_t slot = 0; slot < slots_in_all; slot++) row_of[slot] = -1;
    for (int64_t r = 0; r < b->requests; r++)
        for (int64_t key = 0; key < b->seq_lens[r]; key++) {
            int64_t slot = slot_of(b, r, key);
            if (row_of[slot] >= 0) continue;
            row_of[slot] = rows;
            slots[rows++] = slot;
        }
    float *k = random_floats((rows - 1) * ldk + width, 2), *v = random_floats((rows - 1) * ldv + width, 2);
    ratoon_store_kv(k, ldk, v, ldv, b->kind, b->cache, b->block_bytes, b->scales, b->scale_block_bytes, slots, rows, b->kv_heads,
                    b->head_dim, b->block_size);
    for (int64_t slot = 0; slot < slots_in_all; slot++)
        for (int64_t i = 0; i < width; i++) {
            int64_t head = i / b->head_dim, place = i % b->head_dim, row = row_of[slot];
            if (row < 0) {
                expect_true(is_untouched(b, key_place(b, slot, head, place)), "other keys stay", slot, i);
                expect_true(is_untouched(b, value_place(b, slot, head, place)), "other values stay", slot, i);
                continue;
            }
            const float *key = k + row * ldk + head * b->head_dim, *value = v + row * ldv + head * b->head_dim;
            expect(key_at(b, slot, head, place), key[place], rounding_of(b, key[place], key), "a key is stored", slot, i);
            expect(value_at(b, slot, head, place), value[place], rounding_of(b, value[place], value), "a value is stored", slot, i);
        }
    free(row_of);
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
    if (b->causal && b->ends && b->ends[token] + 1 > end) end = b->ends[token] + 1;
    const float *q = b->q + token * b->ldq + head * b->head_dim;
    double *scores = malloc((size_t)length * 8), highest = -INFINITY, lowest = INFINITY, score_error = 0, total = 0;
    for (int64_t key = first; key < end; key++) {
        double score = 0, sizes = 0, bias = b->bias ? b->bias[head * (2 * b->reach + 1) + b->reach + key - position] : 0;
        for (int64_t i = 0; i < b->head_dim; i++) {
            double term = (double)q[i] * key_at(b, slot_of(b, r, key), kv_head, i) * b->scale;
            score += term;
            sizes += fabs(term);
        }
        double error = (double)(b->head_dim + 3) * UNIT * sizes;  // with a scale of the key
        if (b->cap > 0) {  // which brings scores together: an error of one never grows. Roundings of the cap and of tanh
            error += 8 * UNIT * fabs(score);
            score = b->cap * tanh(score / b->cap);
        }
        error += UNIT * fabs(score + bias);
        if (error > score_error) score_error = error;
        scores[key] = score + bias;
        if (scores[key] > highest) highest = scores[key];
        if (scores[key] < lowest) lowest = scores[key];
    }
    double stretches = (double)(length / STRETCH + 1), spread = highest - lowest + 2 * score_error;
    double weight_error = score_error + (UNIT * spread + EXP_ERROR) + stretches * (2 * EXP_ERROR + UNIT) + UNIT * spread;
    double sum_roundings = (STRETCH + stretches + 5) * UNIT;  // with a scale of the value
    for (int64_t key = first; key < end; key++) total += scores[key] = exp(scores[key] - highest);
    if (b->sinks) total += exp(b->sinks[head] - highest);
    for (int64_t i = 0; i < b->head_dim; i++) {
        double sum = 0, sizes = 0;
        for (int64_t key = first; key < end; key++) {
            double term = scores[key] / total * value_at(b, slot_of(b, r, key), kv_head, i);
            sum += term;
            sizes += fabs(term);
        }
        expect(b->out[token * b->ldo + head * b->head_dim + i], sum, sizes * 2 * (weight_error + sum_roundings) * 1.01, "attention",
               token, head * b->head_dim + i);
    }
    free(scores);
}

// Requests [first, end) of a batch, on their own.
static int run(const batch *b, int64_t first, int64_t end, float *out) {
    int32_t query_start[MOST_REQUESTS + 1], shared[MOST_REQUESTS];
    for (int64_t r = first; r <= end; r++) query_start[r - first] = b->query_start[r] - b->query_start[first];
    for (int64_t r = first; r < end; r++) shared[r - first] = r > first ? b->shared[r] : 0;
    return ratoon_attention(b->q + b->query_start[first] * b->ldq, b->ldq, out + b->query_start[first] * b->ldo, b->ldo, b->kind,
                            b->cache, b->block_bytes, b->scales, b->scale_block_bytes, b->table + first * b->table_width,
                            b->table_width, query_start, b->seq_lens + first, shared, end - first, b->heads, b->kv_heads,
                            b->head_dim, b->block_size, b->window, b->causal,
                            b->ends ? b->ends + b->query_start[first] : NULL, b->bias, b->reach, b->scale, b->cap, b->sinks);
}

// The bits of a row depend neither on the number of threads nor on the requests beside its own.
static void compare_bits(const batch *b) {
    float *alone = guarded_floats(b->num_tokens * b->ldo);
    for (int64_t r = 0; r < b->requests; r++) {
        ratoon_set_threads((int)random_between(1, 8));
        run(b, r, r + 1, alone);
    }
    for (int64_t token = 0; token < b->num_tokens; token++)
        for (int64_t i = 0; i < b->heads * b->head_dim; i++)
            expect_true(same_bits(alone[token * b->ldo + i], b->out[token * b->ldo + i]), "the same bits alone", token, i);
    ratoon_set_threads((int)random_between(1, 8));
}

static void compare(int kind, int decode) {
    batch b = {.kind = kind, .requests = random_between(1, decode ? MOST_REQUESTS : 3), .kv_heads = random_between(1, 2), .head_dim = TILE * random_between(1, 4)};
    b.heads = b.kv_heads * random_between(1, 4);
    b.block_size = TILE << random_between(0, 2);
    b.causal = random_between(0, 3) > 0;
    b.window = b.causal && random_between(0, 3) == 0 ? random_between(1, 100) : 0;
    b.table_width = LONGEST / b.block_size + 2;
    b.block_bytes = 2 * b.kv_heads * b.head_dim * b.block_size * size_of[kind] + 64 * random_between(0, 1);  // rows may be wider
    b.scale_block_bytes = 2 * b.kv_heads * b.block_size * 4 + 64 * random_between(0, 1);
    b.scale = 1 / sqrtf((float)b.head_dim);
    b.sinks = random_between(0, 2) == 0 ? random_floats(b.heads, 6) : NULL;
    b.cap = random_between(0, 2) == 0 ? (float)random_between(1, 40) / 8 : 0;
    b.ldq = b.heads * b.head_dim + 5;
    b.ldo = b.heads * b.head_dim + 3;
    b.reach = LONGEST + 1;
    b.table = guarded(b.requests * b.table_width * 4);
    lay_out(&b, decode);
    b.cache = guarded(b.num_blocks * b.block_bytes);
    memset(b.cache, UNTOUCHED, (size_t)(b.num_blocks * b.block_bytes));
    b.scales = kind == BYTES ? (unsigned char *)guarded_floats(b.num_blocks * b.scale_block_bytes / 4) : NULL;
    b.q = random_floats((b.num_tokens - 1) * b.ldq + b.heads * b.head_dim, 3);
    b.out = guarded_floats(b.num_tokens * b.ldo);
    b.bias = random_between(0, 3) == 0 ? random_floats(b.heads * (2 * b.reach + 1), 2) : NULL;
    if (!decode && b.causal && random_between(0, 2) > 0) place_images(&b);
    store_all(&b);
    expect_true(run(&b, 0, b.requests, b.out) == 0, "attention has memory", 0, 0);
    for (int64_t r = 0; r < b.requests; r++)
        for (int64_t token = b.query_start[r]; token < b.query_start[r + 1]; token++) {
            expect_row(&b, r, token, random_between(0, b.heads - 1));
            for (int64_t i = 0; i < b.heads * b.head_dim; i++)
                expect_true(!is_poison(b.out[token * b.ldo + i]), "every head is written", token, i);
            for (int64_t i = b.heads * b.head_dim; i < b.ldo; i++)
                expect_true(is_poison(b.out[token * b.ldo + i]), "attention leaves what is between its rows", token, i);
        }
    compare_bits(&b);
    release_all();
}

void check_attention(void) {
    for (int i = 0; i < 10; i++) compare(FLOATS, 1);
    for (int i = 0; i < 4; i++) compare(FLOATS, 0);
    for (int kind = HALVES; kind <= BYTES; kind++) {
        for (int i = 0; i < 6; i++) compare(kind, 1);
        for (int i = 0; i < 2; i++) compare(kind, 0);
    }
}
