// Attention over the paged cache (kv_cache.h), with an online softmax: causal, where a row sees earlier keys and its own, or not,
// where it sees all keys of its request. A bias by distance may be added to the scores.
// Halves and bytes are widened, a tile at a time; the scales of keys multiply scores, those of values weights.
//
// A unit of work is one KV head and a part of the batch: a few tokens of one request, or the one token of each of a few
// requests whose block tables share a prefix (beams, choices, one prompt). It has the rows of all query heads that share
// the KV head, so that keys and values are read once for them. Requests that begin alike go through what they have in
// common together, then in smaller groups as their tables part:
//
//     keys         0          64         128        192
//     request 0    │ together │ together │   own    │ own
//     request 1    │ together │ together │   own    │ own ───
//     request 2    │ together │   own    │   own    │
//
// Keys are taken in stretches of 64 that start at multiples of 64, whatever the batch or the chunk; a stretch that is
// masked for a row changes nothing in it, and a row does the same arithmetic in a tile of any height. So a row comes out
// the same, to the bit, in any batch. Sums over keys have three levels, so that their error does not grow with a long
// context: within a stretch, over GROUP stretches, over all groups.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "kv_cache.h"
#include "threads.h"

#define STRETCH 64
#define GROUP 8  // stretches
#define UNIT_ROWS 32
#define FETCH_ROWS 24   // with more, there is so much to compute that the processor's own fetching ahead is enough
#define READING_ROWS 2  // reading a stretch takes about as long as computing it for so many rows

typedef struct {
    int32_t first_request, requests;
    int32_t first_token, tokens;  // rows of the batch; with several requests one token each
} part;

typedef struct {
    const float *q;
    float *out;
    const char *cache, *scales;
    int64_t kind, block_bytes, scale_block_bytes;  // of a block, to the next one
    const int32_t *block_table, *query_start, *seq_lens, *shared;
    int64_t ldq, ldo, table_width, requests;
    int64_t heads, kv_heads, head_dim, block_size, window, causal;
    const float *bias;  // [heads][2 · reach + 1], or NULL: a key at distance d from the row has [d + reach]
    int64_t reach;
    float scale;
    const part *parts;  // each is a unit for each KV head
} attention_call;

typedef struct {
    float q[UNIT_ROWS * MAX_HEAD_DIM];
    float sum[UNIT_ROWS * MAX_HEAD_DIM];  // of p · v over the stretches of a group, not yet divided
    float grand_sum[UNIT_ROWS * MAX_HEAD_DIM];  // over the groups that are complete
    float p[UNIT_ROWS * STRETCH];
    float widened[(MAX_HEAD_DIM > STRETCH ? MAX_HEAD_DIM : STRETCH) * TILE];  // keys or values
    float key_scales[STRETCH], value_scales[STRETCH];
    float highest[UNIT_ROWS], total[UNIT_ROWS], grand_total[UNIT_ROWS];
} scratch;

// Rows of the scratch that go through a stretch together, with the table that all of them have there.
typedef struct {
    const int32_t *table;
    int64_t kv_head, first_row, rows;
    int64_t first_position, keys;  // the first row's; how many keys its last row sees
} row_run;

static _Thread_local scratch *own_scratch;

static scratch *get_scratch(void) {
    if (!own_scratch) own_scratch = aligned_alloc(64, (sizeof(scratch) + 63) / 64 * 64);
    return own_scratch;
}

// c[rows][16 of ldc] = a · b, rows in tiles; with `add`, c += a · b, where the product is summed by itself first. b comes in
// `pieces` of `piece_depth` rows each: together they have `depth` rows, at most 256.
static void product(int64_t rows, const float *a, int64_t lda, const float *const *pieces, int64_t offset, int64_t ldb,
                    int64_t piece_depth, int64_t depth, float *c, int64_t ldc, int add) {
#define PRODUCT_TILE(ROWS)                                                                          \
    {                                                                                               \
        vec acc[ROWS][TILE_VECS];                                                                   \
        clear_tile(ROWS, acc);                                                                      \
        for (int64_t k = 0; k < depth; k += piece_depth)                                            \
            tile_chain(ROWS, a + k, lda, pieces[k / piece_depth] + offset, ldb,                     \
                       depth - k < piece_depth ? depth - k : piece_depth, acc);                     \
        for (int i = 0; i < ROWS; i++)                                                              \
            for (int j = 0; j < TILE_VECS; j++) {                                                   \
                float *target = c + i * ldc + j * W;                                                \
                store(target, add ? load(target) + acc[i][j] : acc[i][j]);                          \
            }                                                                                       \
        a += ROWS * lda;                                                                            \
        c += ROWS * ldc;                                                                            \
        rows -= ROWS;                                                                               \
    }
#if W == 16  // a panel is one vector: fewer sums than this would wait for each other
    while (rows >= 8) PRODUCT_TILE(8)
#endif
    while (rows >= 4) PRODUCT_TILE(4)
    if (rows == 3) PRODUCT_TILE(3)
    else if (rows == 2) PRODUCT_TILE(2)
    else if (rows == 1) PRODUCT_TILE(1)
}

INLINE void add_bias(const attention_call *c, float *p, int64_t head, int64_t position, int64_t first_key, int64_t keys) {
    const float *bias = c->bias + head * (2 * c->reach + 1) + c->reach + first_key - position;
    for (int64_t i = 0; i < keys; i++) p[i] += bias[i];
}

// Scores of one row turn into weights; the row's running maximum, total and sum follow.
INLINE void softmax_row(const attention_call *c, scratch *s, int64_t row, int64_t position, int64_t first_key,
                        int64_t keys) {
    float *p = s->p + row * STRETCH;
    int64_t lowest = c->window > 0 && position - c->window + 1 > 0 ? position - c->window + 1 : 0;
    int64_t begin = lowest > first_key ? lowest - first_key : 0;  // visible: [begin, end)
    int64_t end = c->causal && position + 1 - first_key < keys ? position + 1 - first_key : keys;
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
#pragma GCC unroll 2
    for (int64_t i = 0; i < width; i += W) {
        vec weight = exp_(load(p + i) - splat(highest));
        store(p + i, weight);
        total += weight;
    }
    if (highest > s->highest[row]) {
        float shrink = s->highest[row] == -INFINITY ? 0.0f : exp_scalar(s->highest[row] - highest);
        s->total[row] *= shrink;
        s->grand_total[row] *= shrink;
        float *sum = s->sum + row * c->head_dim, *grand_sum = s->grand_sum + row * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i += W) {
            store(sum + i, load(sum + i) * splat(shrink));
            store(grand_sum + i, load(grand_sum + i) * splat(shrink));
        }
        s->highest[row] = highest;
    }
    s->total[row] += sum_lanes(total);
}

// The sums of a group that is complete, or of the last one, go to those of all groups.
INLINE void close_group(const attention_call *c, scratch *s, int64_t first_row, int64_t rows) {
    float *sum = s->sum + first_row * c->head_dim, *grand_sum = s->grand_sum + first_row * c->head_dim;
    for (int64_t i = 0; i < rows * c->head_dim; i += W) {
        store(grand_sum + i, load(grand_sum + i) + load(sum + i));
        store(sum + i, (vec){});
    }
    for (int64_t row = first_row; row < first_row + rows; row++) {
        s->grand_total[row] += s->total[row];
        s->total[row] = 0.0f;
    }
}

// With few rows the time goes into waiting for memory: ask for a run of keys or values before it is needed.
INLINE void fetch(const char *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

INLINE const char *keys_at(const attention_call *c, const int32_t *table, int64_t kv_head, int64_t key, int kind) {
    return c->cache + table[key / c->block_size] * c->block_bytes + kv_head * c->head_dim * c->block_size * size_of(kind);
}

typedef int8_t signed_bytes __attribute__((vector_size(W), aligned(1)));

INLINE vec load_signed_bytes(const int8_t *p) { return __builtin_convertvector(*(const signed_bytes *)p, vec); }

// A run of 16 keys or values, as floats.
INLINE void widen_run(const char *from, float *to, int kind) {
    for (int64_t i = 0; i < TILE; i += W)
        store(to + i, kind == HALVES ? load_halves((const uint16_t *)from + i) : load_signed_bytes((const int8_t *)from + i));
}

INLINE void read_scales(const attention_call *c, scratch *s, const row_run *run, int64_t first_key, int64_t i) {
    const int64_t key = first_key + i;
    const float *keys = (const float *)(c->scales + run->table[key / c->block_size] * c->scale_block_bytes) +
                        run->kv_head * c->block_size + key % c->block_size;
    memcpy(s->key_scales + i, keys, TILE * sizeof(float));
    memcpy(s->value_scales + i, keys + c->kv_heads * c->block_size, TILE * sizeof(float));
}

// [rows][STRETCH], the columns [begin, end) of it
INLINE void scale_columns(float *p, int64_t rows, const float *scales, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < rows; row++, p += STRETCH)
        for (int64_t i = begin; i < end; i += W) store(p + i, load(p + i) * load(scales + i));
}

INLINE int64_t position_of(const attention_call *c, int64_t request, int64_t token) {
    return c->seq_lens[request] - (c->query_start[request + 1] - token);
}

// `kind` is a constant wherever this is inlined.
INLINE void attend_stretch(const attention_call *c, scratch *s, const row_run *run, int64_t first_key, int kind) {
    const int64_t group = c->heads / c->kv_heads, to_values = c->kv_heads * c->head_dim * c->block_size * size_of(kind);
    const int64_t keys = run->keys - first_key < STRETCH ? run->keys - first_key : STRETCH;
    const int64_t panel_bytes = c->block_size * size_of(kind);  // of one of the head_dim rows of keys, or columns of values
    const char *values[STRETCH / TILE], *next_values[STRETCH / TILE];
    float *p = s->p + run->first_row * STRETCH;
    int64_t num_next = 0;
    // Runs of keys before the window of every row are not read: their blocks may belong to another sequence by now, and
    // zero times a NaN there is not zero.
    int64_t lowest = c->window > 0 ? run->first_position - c->window + 1 : 0;
    int64_t skipped = lowest > first_key ? (lowest - first_key) / TILE * TILE : 0;
    for (int64_t i = skipped; i < keys; i += TILE) {
        const char *block = keys_at(c, run->table, run->kv_head, first_key + i, kind);
        int64_t offset = (first_key + i) % c->block_size;
        const float *tile = (const float *)block + offset;
        values[i / TILE] = block + to_values + offset * TILE * size_of(kind);
        int64_t ahead = first_key + STRETCH + i;
        if (run->rows <= FETCH_ROWS && ahead < run->keys) {
            const char *next = keys_at(c, run->table, run->kv_head, ahead, kind);
            next_values[num_next++] = next + to_values + ahead % c->block_size * TILE * size_of(kind);
            fetch(next + ahead % c->block_size * c->head_dim * size_of(kind), TILE * c->head_dim * size_of(kind));
        }
        if (kind != FLOATS) {
            for (int64_t k = 0; k < c->head_dim; k++)
                widen_run(block + k * panel_bytes + offset * size_of(kind), s->widened + k * TILE, kind);
            tile = s->widened;
        }
        if (kind == BYTES) read_scales(c, s, run, first_key, i);
        product(run->rows, s->q + run->first_row * c->head_dim, c->head_dim, &tile, 0, kind == FLOATS ? c->block_size : TILE,
                c->head_dim, c->head_dim, p + i, STRETCH, 0);
    }
    if (kind == BYTES) scale_columns(p, run->rows, s->key_scales, skipped, keys);
    for (int64_t row = 0; row < run->rows; row++) {
        int64_t position = run->first_position + row / group;
        if (c->bias) add_bias(c, p + row * STRETCH, run->kv_head * group + row % group, position, first_key, keys);
        softmax_row(c, s, run->first_row + row, position, first_key, keys);
    }
    if (kind == BYTES) scale_columns(p, run->rows, s->value_scales, skipped, keys);
    for (int64_t column = 0; column < c->head_dim; column += TILE) {
        const float *pieces[STRETCH / TILE];
        for (int64_t i = 0; i < num_next; i++) fetch(next_values[i] + column * panel_bytes, TILE * TILE * size_of(kind));
        for (int64_t i = skipped; i < keys; i += TILE) {
            const char *piece = values[i / TILE] + column * panel_bytes;
            float *room = s->widened + i * TILE;
            if (kind != FLOATS)
                for (int64_t k = 0; k < TILE * TILE; k += TILE) widen_run(piece + k * size_of(kind), room + k, kind);
            pieces[i / TILE] = kind == FLOATS ? (const float *)piece : room;
        }
        product(run->rows, p + skipped, STRETCH, pieces + skipped / TILE, 0, TILE, TILE, keys - skipped,
                s->sum + run->first_row * c->head_dim + column, c->head_dim, 1);
    }
    if ((first_key / STRETCH + 1) % GROUP == 0) close_group(c, s, run->first_row, run->rows);
}

static void attend_floats(const attention_call *c, scratch *s, const row_run *run, int64_t first_key) {
    attend_stretch(c, s, run, first_key, FLOATS);
}

static void attend_halves(const attention_call *c, scratch *s, const row_run *run, int64_t first_key) {
    attend_stretch(c, s, run, first_key, HALVES);
}

static void attend_bytes(const attention_call *c, scratch *s, const row_run *run, int64_t first_key) {
    attend_stretch(c, s, run, first_key, BYTES);
}

static void (*const attend[])(const attention_call *, scratch *, const row_run *, int64_t) = {attend_floats, attend_halves,
                                                                                            attend_bytes};

// Requests [begin, end) of a part, from first_key on: together while their tables are alike, then in smaller groups.
static void attend_requests(const attention_call *c, scratch *s, const part *part, int64_t kv_head, int64_t begin,
                            int64_t end, int64_t first_key) {
    const int64_t group = c->heads / c->kv_heads, tokens = part->tokens / part->requests;  // of each request
    const int64_t request = part->first_request + begin;
    const int64_t first_position = position_of(c, request, part->first_token + begin);
    const int64_t keys = c->causal ? first_position + tokens : c->seq_lens[request];
    const row_run run = {c->block_table + request * c->table_width, kv_head, begin * group, (end - begin) * tokens * group,
                         first_position, keys};
    const int32_t *shared = c->shared + part->first_request;
    int64_t keys_end = keys;
    int all_alike = 1;  // they have the very same keys
    for (int64_t i = begin + 1; i < end; i++) {
        if (!c->causal && shared[i] == keys && c->seq_lens[part->first_request + i] == keys) continue;
        all_alike = 0;
        if (shared[i] / STRETCH * STRETCH < keys_end) keys_end = shared[i] / STRETCH * STRETCH;
    }
    for (; first_key < keys_end; first_key += STRETCH) attend[c->kind](c, s, &run, first_key);
    if (all_alike) return;
    for (int64_t next; begin < end; begin = next) {
        for (next = begin + 1; next < end && shared[next] >= first_key + STRETCH;) next++;
        attend_requests(c, s, part, kv_head, begin, next, first_key);
    }
}

static void attention_unit(void *context, int64_t unit) {
    const attention_call *c = context;
    const part *part = c->parts + unit / c->kv_heads;
    const int64_t kv_head = unit % c->kv_heads, group = c->heads / c->kv_heads, rows = part->tokens * group;
    scratch *s = get_scratch();
    for (int64_t row = 0; row < rows; row++) {
        const float *q = c->q + (part->first_token + row / group) * c->ldq + (kv_head * group + row % group) * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i += W) store(s->q + row * c->head_dim + i, load(q + i) * splat(c->scale));
        s->highest[row] = -INFINITY;
        s->total[row] = s->grand_total[row] = 0.0f;
    }
    memset(s->sum, 0, (size_t)(rows * c->head_dim) * sizeof(float));
    memset(s->grand_sum, 0, (size_t)(rows * c->head_dim) * sizeof(float));

    int64_t first_visible = c->window > 0 ? position_of(c, part->first_request, part->first_token) - c->window + 1 : 0;
    int64_t first_key = first_visible > 0 ? first_visible / STRETCH * STRETCH : 0;
    attend_requests(c, s, part, kv_head, 0, part->requests, first_key);

    close_group(c, s, 0, rows);
    for (int64_t row = 0; row < rows; row++) {
        float *out = c->out + (part->first_token + row / group) * c->ldo + (kv_head * group + row % group) * c->head_dim;
        vec scale = splat(1.0f / s->grand_total[row]);
        for (int64_t i = 0; i < c->head_dim; i += W)
            store(out + i, load(s->grand_sum + row * c->head_dim + i) * scale);
    }
}

INLINE int64_t query_len(const attention_call *c, int64_t request) {
    return c->query_start[request + 1] - c->query_start[request];
}

// Whether a request is better computed together with the one before it. Where less than half is shared there is little to
// save, and units of unequal requests leave threads idle. A window is short enough without; a bias needs every row's place.
INLINE int belongs_to_previous(const attention_call *c, int64_t request) {
    if (c->window > 0 || c->bias || query_len(c, request - 1) != 1 || query_len(c, request) != 1) return 0;
    const int64_t one = c->seq_lens[request - 1], other = c->seq_lens[request];
    return c->shared[request] >= STRETCH && 2 * (int64_t)c->shared[request] >= (one > other ? one : other);
}

// Families are consecutive requests that belong together; most have one member. Family i is [starts[i], starts[i + 1]).
static int64_t find_families(const attention_call *c, int32_t *starts) {
    int64_t families = 0;
    for (int64_t request = 0; request < c->requests; request++)
        if (request == 0 || !belongs_to_previous(c, request)) starts[families++] = (int32_t)request;
    starts[families] = (int32_t)c->requests;
    return families;
}

// How many members of a family go into a unit. Many save reading; few make more units, which spread over the threads.
static int64_t members_per_unit(const attention_call *c, const int32_t *starts, int64_t families) {
    const int64_t group = c->heads / c->kv_heads, threads = thread_count();
    int64_t best = 1, least_time = INT64_MAX;
    for (int64_t size = 1; size <= UNIT_ROWS / group; size++) {
        int64_t units = 0;
        for (int64_t i = 0; i < families; i++) {
            int64_t members = starts[i + 1] - starts[i];
            if (members > 1) units += (members + size - 1) / size * c->kv_heads;
        }
        int64_t turns = (units + threads - 1) / threads, time = turns * (size * group + READING_ROWS);
        if (time < least_time) best = size, least_time = time;
    }
    return best;
}

// Fills `parts`, never more than there are tokens, and returns how many.
static int64_t divide_batch(const attention_call *c, const int32_t *starts, int64_t families, part *parts) {
    const int32_t tokens_per_unit = (int32_t)(UNIT_ROWS / (c->heads / c->kv_heads));
    const int32_t members = families < c->requests ? (int32_t)members_per_unit(c, starts, families) : 1;
    int64_t num_parts = 0;
    for (int64_t i = 0; i < families; i++) {
        const int32_t first = starts[i], first_token = c->query_start[first], token_end = c->query_start[starts[i + 1]];
        const int alone = starts[i + 1] - first == 1;
        const int32_t most = alone ? tokens_per_unit : members;
        for (int32_t token = first_token; token < token_end; token += most) {
            int32_t tokens = token_end - token < most ? token_end - token : most;
            parts[num_parts++] = alone ? (part){first, 1, token, tokens}
                                       : (part){first + token - first_token, tokens, token, tokens};
        }
    }
    return num_parts;
}

// `kind`: 0 floats, 1 halves, 2 bytes, which have `scales`. `shared` [requests]: how many keys a request's table has in
// common with that of the request before it, all of them visible to both. Returns 0, or -1 when memory ran out.
int ratoon_attention(const float *q, int64_t ldq, float *out, int64_t ldo, int64_t kind, const void *cache, int64_t block_bytes,
                     const void *scales, int64_t scale_block_bytes, const int32_t *block_table, int64_t table_width,
                     const int32_t *query_start, const int32_t *seq_lens, const int32_t *shared, int64_t requests,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int64_t causal,
                     const float *bias, int64_t reach, float scale) {
    attention_call c = {q, out, cache, scales, kind, block_bytes, scale_block_bytes, block_table, query_start, seq_lens, shared,
                        ldq, ldo, table_width, requests, heads, kv_heads, head_dim, block_size, window, causal, bias, reach,
                        scale, NULL};
    if (query_start[requests] == 0) return 0;
    part *parts = malloc((size_t)query_start[requests] * sizeof(part));
    int32_t *starts = malloc((size_t)(requests + 1) * sizeof(int32_t));
    if (!parts || !starts) {
        free(parts);
        free(starts);
        return -1;
    }
    c.parts = parts;
    int64_t num_parts = divide_batch(&c, starts, find_families(&c, starts), parts);
    parallel_units(attention_unit, &c, num_parts * kv_heads);
    free(parts);
    free(starts);
    return 0;
}
