// Causal attention over the paged cache, with an online softmax.
//
// A block of the cache holds, for each KV head, the keys transposed and the values in panels:
//     keys   [kv_heads][head_dim][block_size]              a run of 16 tokens is a ready-made tile of B for q · kᵀ
//     values [kv_heads][head_dim / 16][block_size][16]     and so is a run of tokens here, for p · v
//
// A unit of work is one KV head and a few tokens of one request: all query heads that share the KV head, so that keys and
// values are read once for them. Keys are taken in stretches of 64 that start at multiples of 64, whatever the batch or the
// chunk; a stretch that is masked for a row changes nothing in it. So a row comes out the same, to the bit, in any batch.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "tile.h"

#define STRETCH 64
#define UNIT_ROWS 32
#define MAX_HEAD_DIM 256

typedef struct {
    const float *q;
    float *out;
    const float *cache;
    const int32_t *block_table, *query_start, *seq_lens;
    const int64_t *first_unit;  // [requests + 1]: a request's units are consecutive
    int64_t ldq, ldo, block_floats, table_width, requests;
    int64_t heads, kv_heads, head_dim, block_size, window, tokens_per_unit;
    float scale;
} attention_call;

typedef struct {
    float q[UNIT_ROWS * MAX_HEAD_DIM];
    float sum[UNIT_ROWS * MAX_HEAD_DIM];  // of p · v, not yet divided
    float p[UNIT_ROWS * STRETCH];
    float highest[UNIT_ROWS], total[UNIT_ROWS];
} scratch;

static _Thread_local scratch *own_scratch;

static scratch *get_scratch(void) {
    if (!own_scratch) own_scratch = aligned_alloc(64, (sizeof(scratch) + 63) / 64 * 64);
    return own_scratch;
}

// c[rows][16 of ldc] = a · b, rows in tiles; with `add`, c += a · b. b comes in `pieces` of up to 16 rows each: together
// they have `depth` rows.
static void product(int64_t rows, const float *a, int64_t lda, const float *const *pieces, int64_t offset, int64_t ldb,
                    int64_t piece_depth, int64_t depth, float *c, int64_t ldc, int add) {
#define PRODUCT_TILE(ROWS)                                                                             \
    {                                                                                                  \
        vec acc[ROWS][TILE_VECS];                                                                      \
        for (int i = 0; i < ROWS; i++)                                                                 \
            for (int j = 0; j < TILE_VECS; j++) acc[i][j] = add ? load(c + i * ldc + j * W) : (vec){}; \
        for (int64_t k = 0; k < depth; k += piece_depth)                                               \
            tile_product(ROWS, a + k, lda, pieces[k / piece_depth] + offset, ldb,                      \
                         depth - k < piece_depth ? depth - k : piece_depth, acc);                      \
        for (int i = 0; i < ROWS; i++)                                                                 \
            for (int j = 0; j < TILE_VECS; j++) store(c + i * ldc + j * W, acc[i][j]);                 \
        a += ROWS * lda;                                                                               \
        c += ROWS * ldc;                                                                               \
        rows -= ROWS;                                                                                  \
    }
    while (rows >= 4) PRODUCT_TILE(4)
    if (rows == 3) PRODUCT_TILE(3)
    else if (rows == 2) PRODUCT_TILE(2)
    else if (rows == 1) PRODUCT_TILE(1)
}

// Scores of one row turn into weights; the row's running maximum, total and sum follow.
INLINE void softmax_row(const attention_call *c, scratch *s, int64_t row, int64_t position, int64_t first_key,
                        int64_t keys) {
    float *p = s->p + row * STRETCH;
    int64_t lowest = c->window > 0 && position - c->window + 1 > 0 ? position - c->window + 1 : 0;
    int64_t begin = lowest > first_key ? lowest - first_key : 0;  // visible: [begin, end)
    int64_t end = position + 1 - first_key < keys ? position + 1 - first_key : keys;
    for (int64_t i = 0; i < begin && i < keys; i++) p[i] = -INFINITY;
    const int64_t width = (keys + TILE - 1) / TILE * TILE;
    for (int64_t i = end > 0 ? end : 0; i < width; i++) p[i] = -INFINITY;
    vec top = load(p);
    for (int64_t i = W; i < width; i += W) top = max_(top, load(p + i));
    float highest = max_lanes(top);
    if (s->highest[row] > highest) highest = s->highest[row];
    if (highest == -INFINITY) {  // nothing visible yet
        memset(p, 0, (size_t)width * sizeof(float));
        return;
    }
    vec total = {};
    for (int64_t i = 0; i < width; i += W) {
        vec weight = exp_(load(p + i) - splat(highest));
        store(p + i, weight);
        total += weight;
    }
    if (highest > s->highest[row]) {
        float shrink = s->highest[row] == -INFINITY ? 0.0f : exp_scalar(s->highest[row] - highest);
        s->total[row] *= shrink;
        float *sum = s->sum + row * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i += W) store(sum + i, load(sum + i) * splat(shrink));
        s->highest[row] = highest;
    }
    s->total[row] += sum_lanes(total);
}

// With few rows the time goes into waiting for memory: ask for a run of keys or values before it is needed.
INLINE void fetch(const float *p, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(p + i, 0, 3);
}

INLINE const float *keys_at(const attention_call *c, const int32_t *table, int64_t kv_head, int64_t key) {
    return c->cache + table[key / c->block_size] * c->block_floats + kv_head * c->head_dim * c->block_size;
}

static void attend_stretch(const attention_call *c, scratch *s, const int32_t *table, int64_t kv_head, int64_t rows,
                           int64_t group, int64_t first_position, int64_t first_key, int64_t keys, int64_t last_key) {
    const int few = rows <= 8;
    const int64_t to_values = c->kv_heads * c->head_dim * c->block_size;
    const float *values[STRETCH / TILE], *next_values[STRETCH / TILE];
    int64_t num_next = 0;
    // Runs that lie before the window of every row are not touched: their blocks may belong to somebody else by now, and
    // zero times what stands there need not be zero.
    int64_t lowest = c->window > 0 ? first_position - c->window + 1 : 0;
    int64_t skipped = lowest > first_key ? (lowest - first_key) / TILE * TILE : 0;
    for (int64_t i = skipped; i < keys; i += TILE) {
        const float *block = keys_at(c, table, kv_head, first_key + i);
        int64_t offset = (first_key + i) % c->block_size;
        const float *run = block + offset;
        values[i / TILE] = block + to_values + offset * TILE;
        int64_t ahead = first_key + STRETCH + i;
        if (few && ahead <= last_key) {
            const float *next = keys_at(c, table, kv_head, ahead);
            next_values[num_next++] = next + to_values + ahead % c->block_size * TILE;
            fetch(next + ahead % c->block_size * c->head_dim, TILE * c->head_dim);
        }
        product(rows, s->q, c->head_dim, &run, 0, c->block_size, c->head_dim, c->head_dim, s->p + i, STRETCH, 0);
    }
    for (int64_t row = 0; row < rows; row++) softmax_row(c, s, row, first_position + row / group, first_key, keys);
    for (int64_t column = 0; column < c->head_dim; column += TILE) {
        for (int64_t i = 0; i < num_next; i++) fetch(next_values[i] + column * c->block_size, TILE * TILE);
        product(rows, s->p + skipped, STRETCH, values + skipped / TILE, column * c->block_size, TILE, TILE, keys - skipped,
                s->sum + column, c->head_dim, 1);
    }
}

static void attention_unit(void *context, int64_t unit) {
    const attention_call *c = context;
    scratch *s = get_scratch();
    int64_t low = 0, high = c->requests;  // the request that this unit belongs to
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (c->first_unit[middle] <= unit) low = middle;
        else high = middle;
    }
    int64_t kv_head = (unit - c->first_unit[low]) % c->kv_heads;
    int64_t start = (unit - c->first_unit[low]) / c->kv_heads * c->tokens_per_unit;
    int64_t query_len = c->query_start[low + 1] - c->query_start[low];
    int64_t tokens = query_len - start < c->tokens_per_unit ? query_len - start : c->tokens_per_unit;
    int64_t group = c->heads / c->kv_heads, rows = tokens * group;
    int64_t first_position = c->seq_lens[low] - query_len + start, last_position = first_position + tokens - 1;

    for (int64_t row = 0; row < rows; row++) {
        const float *q = c->q + (c->query_start[low] + start + row / group) * c->ldq + (kv_head * group + row % group) * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i += W) store(s->q + row * c->head_dim + i, load(q + i) * splat(c->scale));
        s->highest[row] = -INFINITY;
        s->total[row] = 0.0f;
    }
    memset(s->sum, 0, (size_t)(rows * c->head_dim) * sizeof(float));

    int64_t first_key = 0;
    if (c->window > 0 && first_position - c->window + 1 > 0) first_key = (first_position - c->window + 1) / STRETCH * STRETCH;
    for (; first_key <= last_position; first_key += STRETCH) {
        int64_t keys = last_position + 1 - first_key < STRETCH ? last_position + 1 - first_key : STRETCH;
        attend_stretch(c, s, c->block_table + low * c->table_width, kv_head, rows, group, first_position, first_key, keys,
                       last_position);
    }
    for (int64_t row = 0; row < rows; row++) {
        float *out = c->out + (c->query_start[low] + start + row / group) * c->ldo + (kv_head * group + row % group) * c->head_dim;
        vec scale = splat(1.0f / s->total[row]);
        for (int64_t i = 0; i < c->head_dim; i += W) store(out + i, load(s->sum + row * c->head_dim + i) * scale);
    }
}

// Returns 0, or -1 when memory ran out.
int ratoon_attention(const float *q, int64_t ldq, float *out, int64_t ldo, const float *cache, int64_t block_floats,
                     const int32_t *block_table, int64_t table_width, const int32_t *query_start, const int32_t *seq_lens,
                     int64_t requests, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                     int64_t window, float scale) {
    int64_t group = heads / kv_heads;
    int64_t tokens_per_unit = UNIT_ROWS / group;
    int64_t *first_unit = malloc((size_t)(requests + 1) * sizeof(int64_t));
    if (!first_unit) return -1;
    first_unit[0] = 0;
    for (int64_t r = 0; r < requests; r++) {
        int64_t tokens = query_start[r + 1] - query_start[r];
        first_unit[r + 1] = first_unit[r] + (tokens + tokens_per_unit - 1) / tokens_per_unit * kv_heads;
    }
    attention_call c = {q, out, cache, block_table, query_start, seq_lens, first_unit, ldq, ldo, block_floats,
                        table_width, requests, heads, kv_heads, head_dim, block_size, window, tokens_per_unit, scale};
    if (first_unit[requests] > 0) parallel_units(attention_unit, &c, first_unit[requests]);
    free(first_unit);
    return 0;
}

typedef struct {
    const float *k, *v;
    float *cache;
    const int64_t *slots;
    int64_t ldk, ldv, rows, rows_per_unit, block_floats, kv_heads, head_dim, block_size;
} store_call;

static void store_unit(void *context, int64_t unit) {
    const store_call *c = context;
    int64_t last = (unit + 1) * c->rows_per_unit < c->rows ? (unit + 1) * c->rows_per_unit : c->rows;
    for (int64_t row = unit * c->rows_per_unit; row < last; row++) {
        int64_t offset = c->slots[row] % c->block_size;
        float *keys = c->cache + c->slots[row] / c->block_size * c->block_floats;
        float *values = keys + c->kv_heads * c->head_dim * c->block_size;
        for (int64_t h = 0; h < c->kv_heads; h++) {
            const float *k = c->k + row * c->ldk + h * c->head_dim;
            float *target = keys + h * c->head_dim * c->block_size + offset;
            for (int64_t i = 0; i < c->head_dim; i++) target[i * c->block_size] = k[i];
            const float *v = c->v + row * c->ldv + h * c->head_dim;
            target = values + h * c->head_dim * c->block_size + offset * TILE;
            for (int64_t i = 0; i < c->head_dim; i += TILE)
                memcpy(target + i * c->block_size, v + i, TILE * sizeof(float));
        }
    }
}

void ratoon_store_kv(const float *k, int64_t ldk, const float *v, int64_t ldv, float *cache, int64_t block_floats,
                     const int64_t *slots, int64_t rows, int64_t kv_heads, int64_t head_dim, int64_t block_size) {
    store_call c = {k, v, cache, slots, ldk, ldv, rows, 32, block_floats, kv_heads, head_dim, block_size};
    if (rows > 0) parallel_units(store_unit, &c, (rows + c.rows_per_unit - 1) / c.rows_per_unit);
}
