// Writing keys and values, or latent vectors, to the paged cache (kv_cache.h).
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "kv_cache.h"
#include "threads.h"

#define MOST_ROWS 32             // of a unit
#define SMALLEST_MAXIMUM 1e-30f  // of a head in bytes: 127 / maximum would overflow below it

typedef struct {
    const float *k, *v;
    char *cache, *scales;
    const int64_t *slots;
    int64_t kind, ldk, ldv, rows, rows_per_unit, block_bytes, scale_block_bytes, kv_heads, head_dim, block_size;
} store_call;

INLINE uint16_t half_of(float x) {
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

// The codes of one head of a token, and their scale: codes of -127…127 times it. A number that is infinite or none makes the
// scale NaN, so that results show it.
INLINE float round_to_bytes(const float *x, int64_t count, int8_t *codes) {
    const vec to_integer = splat(12582912.0f);  // rounds to the nearest whole number, in the lowest bits
    vec sizes = {}, nothing = {};
    for (int64_t i = 0; i < count; i += W) {
        sizes = max_(sizes, (vec)((ivec)load(x + i) & 0x7fffffff));
        nothing += load(x + i) * splat(0.0f);
    }
    const float largest = max_lanes(sizes), inverse = largest > SMALLEST_MAXIMUM ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < count; i += W) {
        vec rounded = min_(max_(load(x + i) * splat(inverse), splat(-127.0f)), splat(127.0f)) + to_integer;
        *(signed_bytes *)(codes + i) = __builtin_convertvector((ivec)rounded - (ivec)to_integer, signed_bytes);
    }
    return largest / 127.0f + sum_lanes(nothing);
}

// Keys of a head are head_dim rows of block_size, its values panels of 16 columns.
INLINE void store_head(const store_call *c, const float *k, const float *v, char *keys, char *values, int64_t offset, int kind) {
    for (int64_t i = 0; i < c->head_dim; i++) {
        const int64_t place = i * c->block_size + offset;
        if (kind == FLOATS) ((float *)keys)[place] = k[i];
        else ((uint16_t *)keys)[place] = half_of(k[i]);
    }
    for (int64_t i = 0; i < c->head_dim; i += TILE) {
        char *panel = values + (i * c->block_size + offset * TILE) * size_of(kind);
        if (kind == FLOATS) memcpy(panel, v + i, TILE * sizeof(float));
        else
            for (int64_t j = 0; j < TILE; j++) ((uint16_t *)panel)[j] = half_of(v[i + j]);
    }
}

static void store_head_as_bytes(const store_call *c, const float *k, const float *v, char *keys, char *values, int64_t offset,
                                float *scales) {
    int8_t key_codes[MAX_HEAD_DIM], value_codes[MAX_HEAD_DIM];
    scales[0] = round_to_bytes(k, c->head_dim, key_codes);
    scales[c->kv_heads * c->block_size] = round_to_bytes(v, c->head_dim, value_codes);
    for (int64_t i = 0; i < c->head_dim; i++) {
        keys[i * c->block_size + offset] = (char)key_codes[i];
        values[(i / TILE * c->block_size + offset) * TILE + i % TILE] = (char)value_codes[i];
    }
}

INLINE void store_tokens(const store_call *c, int64_t h, int64_t first, int64_t last, int kind) {
    const int64_t head_bytes = c->head_dim * c->block_size * size_of(kind);
    for (int64_t row = first; row < last; row++) {
        const int64_t block = c->slots[row] / c->block_size, offset = c->slots[row] % c->block_size;
        char *keys = c->cache + block * c->block_bytes + h * head_bytes, *values = keys + c->kv_heads * head_bytes;
        const float *k = c->k + row * c->ldk + h * c->head_dim, *v = c->v + row * c->ldv + h * c->head_dim;
        if (kind != BYTES) store_head(c, k, v, keys, values, offset, kind);
        else {
            float *scales = (float *)(c->scales + block * c->scale_block_bytes) + h * c->block_size + offset;
            store_head_as_bytes(c, k, v, keys, values, offset, scales);
        }
    }
}

// A few tokens head by head: the lines of a head, of which each token writes a number, stay in the first-level cache meanwhile.
static void store_unit(void *context, int64_t unit) {
    const store_call *c = context;
    const int64_t end = (unit + 1) * c->rows_per_unit < c->rows ? (unit + 1) * c->rows_per_unit : c->rows;
    for (int64_t row = unit * c->rows_per_unit, next; row < end; row = next) {
        next = row + TILE < end ? row + TILE : end;
        for (int64_t h = 0; h < c->kv_heads; h++) {
            if (c->kind == FLOATS) store_tokens(c, h, row, next, FLOATS);
            else if (c->kind == HALVES) store_tokens(c, h, row, next, HALVES);
            else store_tokens(c, h, row, next, BYTES);
        }
    }
}

void ratoon_store_kv(const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t kind, void *cache, int64_t block_bytes,
                     void *scales, int64_t scale_block_bytes, const int64_t *slots, int64_t rows, int64_t kv_heads,
                     int64_t head_dim, int64_t block_size) {
    // Long runs, since tokens that follow one another share cache lines; tokens of different requests do not.
    int64_t rows_per_unit = rows / (2 * thread_count());
    rows_per_unit = rows_per_unit < 2 ? 2 : rows_per_unit > MOST_ROWS ? MOST_ROWS : rows_per_unit;
    store_call c = {k,    v,    cache,         scales,      slots,             kind,     ldk,      ldv,
                    rows, rows_per_unit, block_bytes, scale_block_bytes, kv_heads, head_dim, block_size};
    if (rows > 0) parallel_units(store_unit, &c, (rows + c.rows_per_unit - 1) / c.rows_per_unit);
}

typedef struct {
    const float *k;
    char *cache, *scales;
    const int64_t *slots;
    int64_t kind, ldk, rows, rows_per_unit, block_bytes, scale_block_bytes, width, block_size;
} latent_call;

static void store_latent_unit(void *context, int64_t unit) {
    const latent_call *c = context;
    const int64_t panel = c->block_size * TILE;  // numbers
    int64_t last = (unit + 1) * c->rows_per_unit < c->rows ? (unit + 1) * c->rows_per_unit : c->rows;
    for (int64_t row = unit * c->rows_per_unit; row < last; row++) {
        const int64_t block = c->slots[row] / c->block_size, offset = c->slots[row] % c->block_size;
        const float *k = c->k + row * c->ldk;
        char *at = c->cache + block * c->block_bytes + offset * TILE * size_of(c->kind);
        int8_t codes[MAX_LATENT];
        if (c->kind == BYTES) {
            float *scales = (float *)(c->scales + block * c->scale_block_bytes);
            scales[offset] = round_to_bytes(k, c->width, codes);
        }
        for (int64_t i = 0; i < c->width; i += TILE) {
            char *to = at + i / TILE * panel * size_of(c->kind);
            if (c->kind == FLOATS) memcpy(to, k + i, TILE * sizeof(float));
            else if (c->kind == BYTES) memcpy(to, codes + i, TILE);
            else
                for (int64_t j = 0; j < TILE; j++) ((uint16_t *)to)[j] = half_of(k[i + j]);
        }
    }
}

void ratoon_store_latent(const float *k, int64_t ldk, int64_t kind, void *cache, int64_t block_bytes, void *scales,
                         int64_t scale_block_bytes, const int64_t *slots, int64_t rows, int64_t width, int64_t block_size) {
    int64_t rows_per_unit = rows / (2 * thread_count());
    rows_per_unit = rows_per_unit < 2 ? 2 : rows_per_unit > MOST_ROWS ? MOST_ROWS : rows_per_unit;
    latent_call c = {k, cache, scales, slots, kind, ldk, rows, rows_per_unit, block_bytes, scale_block_bytes, width, block_size};
    if (rows > 0) parallel_units(store_latent_unit, &c, (rows + c.rows_per_unit - 1) / c.rows_per_unit);
}
