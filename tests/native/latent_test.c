// Latent attention and the products of heads, against sums in double precision; and their recorded forms.
#include <math.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

int ratoon_latent_attention_words(const int64_t *words);
int ratoon_store_latent_words(const int64_t *words);
int ratoon_head_products_words(const int64_t *words);

#define P(pointer) ((int64_t)(intptr_t)(pointer))
#define BLOCK 16
#define MOST_KEYS 200

static int64_t number(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// One request whose last tokens attend to all keys before them. Blocks lie in reverse order.
static void compare_latent(void) {
    const int64_t heads = random_between(1, 9) * (random_between(0, 3) ? 1 : 16), rope = 16 * random_between(1, 2);
    const int64_t value = 16 * random_between(1, 5), width = rope + value, keys = random_between(1, MOST_KEYS);
    const int64_t rows = random_between(1, keys < 20 ? keys : 20), blocks = (keys + BLOCK - 1) / BLOCK;
    const int64_t groups = heads > MOST_LATENT_ROWS ? heads / 16 : 1, bytes = BLOCK * width * 4, ldk = width + 3, ldq = heads * width + 5;
    float *k = random_floats((keys - 1) * ldk + width, 1), *q = random_floats((rows - 1) * ldq + heads * width, 1);
    float *cache = guarded_floats((blocks + 1) * BLOCK * width), *out = guarded_floats(rows * heads * value);
    float *again = guarded_floats(rows * heads * value);
    int32_t table[MOST_KEYS / BLOCK + 1];
    int64_t slots[MOST_KEYS];
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)(blocks - i);
    for (int64_t i = 0; i < keys; i++) slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    const int32_t starts[] = {0, (int32_t)rows}, lens[] = {(int32_t)keys}, shared[] = {0};
    const float scale = 0.3f, *sinks = random_between(0, 1) ? random_floats(heads, 6) : NULL;
    if (random_between(0, 1)) ratoon_store_latent(k, ldk, 0, cache, bytes, NULL, 0, slots, keys, width, BLOCK);
    else ratoon_store_latent_words((int64_t[]){P(k), ldk, 0, P(cache), bytes, 0, 0, P(slots), keys, width, BLOCK});
    expect_true(ratoon_latent_attention(q, ldq, out, heads * value, 0, cache, bytes, NULL, 0, table, blocks, starts, lens, shared, 1,
                                        heads, groups, width, value, BLOCK, NULL, scale, sinks) == 0, "latent attention", 0, 0);
    ratoon_latent_attention_words((int64_t[]){P(q), ldq, P(again), heads * value, 0, P(cache), bytes, 0, 0, P(table), blocks, P(starts),
                                              P(lens), P(shared), 1, heads, groups, width, value, BLOCK, 0, number(scale),
                                              P(sinks)});
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t seen = keys - rows + row + 1;
            double scores[MOST_KEYS], highest = -1e30, total = 0, most_size = 0;
            for (int64_t key = 0; key < seen; key++) {
                double sum = 0, size = 0;
                for (int64_t i = 0; i < width; i++) {
                    const double term = (double)q[row * ldq + head * width + i] * k[key * ldk + i];
                    sum += term, size += fabs(term);
                }
                scores[key] = sum * scale;
                highest = fmax(highest, scores[key]);
                most_size = fmax(most_size, size * scale);
            }
            for (int64_t key = 0; key < seen; key++) total += scores[key] = exp(scores[key] - highest);
            if (sinks) total += exp(sinks[head] - highest);
            // Of a weight: both scores, its power of two and the total; then the sum over keys. Values are at most 1.
            const double allowed = 4 * (sum_error(width) + 4 * UNIT) * most_size + 4 * EXP_ERROR + 2 * sum_error(seen) + 64 * UNIT;
            for (int64_t i = 0; i < value; i++) {
                double expected = 0;
                for (int64_t key = 0; key < seen; key++) expected += scores[key] / total * k[key * ldk + rope + i];
                const int64_t place = (row * heads + head) * value + i;
                expect(out[place], expected, allowed, "latent attention", row, head * value + i);
                expect_true(same_bits(out[place], again[place]), "recorded latent attention", row, head * value + i);
            }
        }
    release_all();
}

static void compare_head_products(void) {
    const int64_t rows = random_between(1, 30), heads = random_between(1, 5), kept = random_between(0, 9);
    const int64_t in = random_between(1, 70), out = random_between(1, 70), size = ratoon_packed_size(out, in);
    const int64_t ldx = heads * (kept + in) + 2, ldy = heads * (kept + out);
    float *x = random_floats((rows - 1) * ldx + heads * (kept + in), 1), *weight = random_floats(heads * out * in, 1);
    float *packed = guarded(heads * size * 4), *y = guarded_floats(rows * ldy), *again = guarded_floats(rows * ldy);
    for (int64_t head = 0; head < heads; head++) ratoon_pack_weight(weight + head * out * in, out, in, packed + head * size);
    ratoon_head_products(x, ldx, rows, heads, kept, in, out, packed, size, y, ldy);
    ratoon_head_products_words((int64_t[]){P(x), ldx, rows, heads, kept, in, out, P(packed), size, P(again), ldy});
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + row * ldx + head * (kept + in), *to = y + row * ldy + head * (kept + out);
            for (int64_t i = 0; i < kept; i++) expect_true(same_bits(from[i], to[i]), "numbers that are kept", row, i);
            for (int64_t i = 0; i < out; i++) {
                double sum = 0, sizes = 0;
                for (int64_t j = 0; j < in; j++) {
                    const double term = (double)from[kept + j] * weight[(head * out + i) * in + j];
                    sum += term, sizes += fabs(term);
                }
                expect(to[kept + i], sum, sum_error(in) * sizes, "product of a head", row, head * out + i);
            }
        }
    expect_true(memcmp(y, again, (size_t)(rows * ldy) * 4) == 0, "recorded products of heads", 0, 0);
    release_all();
}

void check_latent(void) {
    for (int i = 0; i < 12; i++) {
        compare_latent();
        compare_head_products();
    }
}
