// Attention over the paged cache (kv_cache.h), with an online softmax: causal, where a row sees earlier keys and its own (and,
// in an image, those up to the image's end), or not, where it sees all keys of its request. Scores may have a soft cap, and a bias
// by distance may be added to them. Halves and bytes are widened; the scales of keys multiply scores, those of values weights.
//
// A part of the batch is a few tokens of one request, or the one token of each of a few requests whose block tables share a
// prefix (beams, choices, one prompt). For a KV head it has the rows of all query heads that share the head, so that keys and
// values are read once for them. Requests that begin alike go through what they have in common together, then in smaller
// groups as their tables part:
//
//     keys         0          64         128        192
//     request 0    │ together │ together │   own    │ own
//     request 1    │ together │ together │   own    │ own ───
//     request 2    │ together │   own    │   own    │
//
// Keys are taken in stretches of 64 that start at multiples of 64, whatever the batch or the chunk; a stretch that is
// masked for a row changes nothing in it, and a row does the same arithmetic in a tile of any height. The sums of a stretch
// are put together with those of the stretches before it in a group of GROUP, in order, and the sums of groups likewise, so
// that errors do not grow with a long context. Where there are fewer parts than threads could work on, the keys of a part
// are shared between units of work. Each keeps the sums of its stretches, or of its groups, and the last one to finish puts
// them together in the same order. So a row comes out the same, to the bit, in any batch and with any number of threads.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "attention_tile.h"
#include "kernels.h"
#include "room.h"
#include "threads.h"

#define GROUP (8 * STRETCH)  // keys
#define READING_ROWS 2  // reading a stretch takes about as long as computing it for so many rows
#define COPYING_ROWS 24     // of a stretch in floats
#define FEWEST_ROWS 24      // of a part with many tokens
#define UNITS_PER_THREAD 4  // so many at least, where the keys allow it: threads then end at about the same time

typedef struct {
    int32_t first_request, requests;
    int32_t first_token, tokens;  // rows of the batch; with several requests one token each
    int32_t first_key, keys_end;
    int32_t unit_keys;  // that a unit has
    int32_t piece;      // keys whose sums are kept: GROUP or STRETCH. 0: one unit has all keys of the part, and keeps none
    int32_t units;      // for each KV head
    int64_t room;       // where the pieces lie, in floats
} part;

typedef struct {
    int32_t part, first_key, keys_end;
} unit;

typedef struct {
    attention_call call;
    part *parts;
    unit *units;  // each for each KV head
    float *pieces;
    atomic_int *units_left;  // of a part and KV head
    int64_t num_parts, num_units;
} plan;

static _Thread_local scratch *own_scratch;

// Sums of `rows` rows, one array behind another.
INLINE sums place_sums(float *memory, int64_t rows, int64_t value_dim) {
    return (sums){memory, memory + rows * value_dim, memory + rows * (value_dim + W)};
}

INLINE int64_t floats_of_sums(int64_t rows, int64_t value_dim) { return rows * (value_dim + W) + (rows + W - 1) / W * W; }

static scratch *get_scratch(void) {
    if (!own_scratch) {
        own_scratch = aligned_alloc(64, (sizeof(scratch) + 63) / 64 * 64);
        const int64_t half = sizeof own_scratch->memory / sizeof(float) / 2;
        own_scratch->open = place_sums(own_scratch->memory, UNIT_ROWS, MAX_HEAD_DIM);
        own_scratch->closed = place_sums(own_scratch->memory + half, UNIT_ROWS, MAX_HEAD_DIM);
    }
    return own_scratch;
}

static void clear_sums(const attention_call *c, sums *to, int64_t rows) {
    memset(to->sum, 0, (size_t)(rows * c->value_dim) * sizeof(float));
    memset(to->total, 0, (size_t)(rows * W) * sizeof(float));
    for (int64_t i = 0; i < UNIT_ROWS + W; i++) to->highest[i] = NOTHING;
}

// The sums of later keys join those of earlier ones.
static void merge_sums(const attention_call *c, sums *to, const sums *from, int64_t rows) {
    for (int64_t row = 0; row < rows; row += W) {
        weights_of_sums w;
        weigh_sums(to->highest + row, from->highest + row, &w);
        store(to->highest + row, load(w.highest));
        for (int64_t i = 0; i < W && row + i < rows; i++) {
            if (from->highest[row + i] == NOTHING) continue;
            float *total = to->total + (row + i) * W, *sum = to->sum + (row + i) * c->value_dim;
            const float *added = from->sum + (row + i) * c->value_dim;
            store(total, merged(load(total), load(from->total + (row + i) * W), w.keep[i], w.take[i]));
            for (int64_t k = 0; k < c->value_dim; k += W)
                store(sum + k, merged(load(sum + k), load(added + k), w.keep[i], w.take[i]));
        }
    }
}

// The group in work joins those before it, of which there are none at first.
static void close_group(const attention_call *c, scratch *s, int64_t rows, int is_first) {
    if (!is_first) {
        merge_sums(c, &s->closed, &s->open, rows);
        return;
    }
    const sums open = s->open;
    s->open = s->closed;
    s->closed = open;
}

#ifdef LATENT
#include "latent_stretch.h"  // what differs where keys and values are one vector
#else
INLINE const char *block_of(const attention_call *c, const row_run *run, int64_t key) {
    const int64_t head_bytes = c->head_dim * c->block_size * size_of(c->kind);
    return c->cache + run->table[key / c->block_size] * c->block_bytes + run->kv_head * head_bytes;
}

static void read_scales(const attention_call *c, scratch *s, const row_run *run, const stretch *t) {
    for (int64_t i = t->first_run * TILE; i < t->keys; i += TILE) {
        const int64_t key = t->first_key + i;
        const float *keys = (const float *)(c->scales + run->table[key / c->block_size] * c->scale_block_bytes) +
                            run->kv_head * c->block_size + key % c->block_size;
        memcpy(s->key_scales + i, keys, TILE * sizeof(float));
        memcpy(s->value_scales + i, keys + c->kv_heads * c->block_size, TILE * sizeof(float));
    }
}

// Runs of keys before the window of every row are not read: their blocks may belong to another sequence by now, and zero
// times a NaN there is not zero. Tiles have the keys of all runs of a stretch; in the place of one that is not there they
// have another one, whose scores are masked.
static void find_stretch(const attention_call *c, const scratch *s, const row_run *run, int64_t first_key, int64_t keys_end,
                         stretch *t) {
    const int64_t size = size_of(c->kind), to_values = c->kv_heads * c->head_dim * c->block_size * size;
    const int64_t lowest = c->window > 0 ? run->first_position - c->window + 1 - first_key : 0;
    t->first_key = first_key;
    t->keys = run->keys - first_key < STRETCH ? run->keys - first_key : STRETCH;
    t->first_run = lowest > 0 ? lowest / TILE : 0;
    t->key_step = c->block_size;
    t->panel_bytes = c->block_size * TILE * size;
    const int goes_on = first_key + STRETCH < keys_end && first_key + STRETCH < run->keys;
    const row_run *next_run = goes_on ? run : &s->next;
    const int64_t next_key = goes_on ? first_key + STRETCH : s->next.first_key;
    t->fetches = goes_on || s->next.table;
    for (int64_t i = 0; i < RUNS; i++) {
        const int64_t last = (t->keys - 1) / TILE, there = i < t->first_run ? t->first_run : i > last ? last : i;
        const int64_t key = first_key + there * TILE, offset = key % c->block_size;
        const char *block = block_of(c, run, key);
        t->keys_of[i] = block + offset * size;
        t->values_of[i] = block + to_values + offset * TILE * size;
        if (!t->fetches) continue;
        const int64_t ahead = next_key + i * TILE < next_run->keys ? next_key + i * TILE : next_run->keys - 1;
        const char *next = block_of(c, next_run, ahead);
        // All runs of a block together fetch all of it.
        t->next_keys[i] = next + ahead % c->block_size / TILE * TILE * c->head_dim * size;
        t->next_values[i] = next + to_values + ahead % c->block_size / TILE * TILE * TILE * size;
    }
}

// Into the second-level cache: the first-level one is full of the stretch in work.
INLINE void fetch(const char *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Keys and values as floats side by side, for several tiles.
INLINE void widen(int kind, const attention_call *c, scratch *s, stretch *t) {
    const int64_t size = size_of(kind), panels = c->head_dim / TILE;
    for (int64_t run = t->first_run; run * TILE < t->keys; run++) {
        float *keys = s->keys + run * TILE * c->head_dim, *values = s->values + run * TILE * TILE;
        if (t->fetches) fetch(t->next_keys[run], TILE * c->head_dim * size);
        for (int64_t k = 0; k < c->head_dim; k++)
            for (int64_t i = 0; i < TILE; i += W)
                store(keys + k * TILE + i, load_kept(kind, t->keys_of[run] + (k * t->key_step + i) * size));
        for (int64_t panel = 0; panel < panels; panel++) {
            if (t->fetches) fetch(t->next_values[run] + panel * t->panel_bytes, TILE * TILE * size);
            for (int64_t i = 0; i < TILE * TILE; i += W)
                store(values + panel * STRETCH * TILE + i,
                      load_kept(kind, t->values_of[run] + panel * t->panel_bytes + i * size));
        }
        t->keys_of[run] = (const char *)keys;
        t->values_of[run] = (const char *)values;
    }
    for (int64_t run = 0; run < RUNS; run++)
        if (run < t->first_run || run * TILE >= t->keys) t->keys_of[run] = t->keys_of[t->first_run];
    t->key_step = TILE;
    t->panel_bytes = STRETCH * TILE * sizeof(float);
    t->fetches = 0;
}

static void attend_widened(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    attend_tiles(FLOATS, c, s, run, t);
}

// Blocks of the cache lie at distances that the first-level cache has few places for: many tiles read a copy.
static void attend_floats(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    if (run->rows >= COPYING_ROWS) widen(FLOATS, c, s, t);
    attend_widened(c, s, run, t);
}

static void attend_halves(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    if (run->rows <= TALLEST) {
        attend_tiles(HALVES, c, s, run, t);
        return;
    }
    widen(HALVES, c, s, t);
    attend_widened(c, s, run, t);
}

static void attend_bytes(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    read_scales(c, s, run, t);
    if (run->rows <= TALLEST) {
        attend_tiles(BYTES, c, s, run, t);
        return;
    }
    widen(BYTES, c, s, t);
    attend_widened(c, s, run, t);
}

#endif

static void (*const attend[])(const attention_call *, scratch *, const row_run *, stretch *) = {attend_floats, attend_halves,
                                                                                               attend_bytes};

INLINE int64_t position_of(const attention_call *c, int64_t request, int64_t token) {
    return c->seq_lens[request] - (c->query_start[request + 1] - token);
}

// How many keys of its sequence a token sees, counted from the first.
INLINE int64_t keys_of_token(const attention_call *c, int64_t request, int64_t token) {
    const int64_t own = position_of(c, request, token), all = c->seq_lens[request];
    if (c->causal) return (c->ends && c->ends[token] > own ? c->ends[token] : own) + 1;
    return c->window > 0 && own + c->window < all ? own + c->window : all;
}

// Requests [begin, end) of a part, keys [first_key, keys_end): together while their tables are alike, then in smaller groups.
static void attend_requests(const attention_call *c, scratch *s, const part *part, int64_t kv_head, int64_t begin,
                            int64_t end, int64_t first_key, int64_t keys_end) {
    const int64_t group = c->heads / c->kv_heads, tokens = part->tokens / part->requests;  // of each request
    const int64_t request = part->first_request + begin;
    const int64_t first_position = position_of(c, request, part->first_token + begin);
    const int64_t last_token = part->first_token + begin + tokens - 1;
    const int64_t keys = keys_of_token(c, request, last_token);
    const row_run run = {c->block_table + request * c->table_width, kv_head, begin * group, (end - begin) * tokens * group,
                         first_position, keys, first_key, c->ends ? c->ends + part->first_token : NULL};
    const int32_t *shared = c->shared + part->first_request;
    int64_t together_end = keys;
    int all_alike = 1;  // they have the very same keys
    for (int64_t i = begin + 1; i < end; i++) {
        if (!c->causal && shared[i] == keys && c->seq_lens[part->first_request + i] == keys) continue;
        all_alike = 0;
        if (shared[i] / STRETCH * STRETCH < together_end) together_end = shared[i] / STRETCH * STRETCH;
    }
    for (; first_key < together_end && first_key < keys_end; first_key += STRETCH) {
        stretch t;
        find_stretch(c, s, &run, first_key, keys_end, &t);
        attend[c->kind](c, s, &run, &t);
    }
    if (all_alike || first_key >= keys_end) return;
    for (int64_t next; begin < end; begin = next) {
        for (next = begin + 1; next < end && shared[next] >= first_key + STRETCH;) next++;
        attend_requests(c, s, part, kv_head, begin, next, first_key, keys_end);
    }
}

static void load_queries(const attention_call *c, scratch *s, const part *part, int64_t kv_head, int64_t rows) {
    const int64_t group = c->heads / c->kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        const int32_t token = s->token_of_row[row] = (int32_t)(row / group), head = s->head_of_row[row] = (int32_t)(row % group);
        const float *q = c->q + (part->first_token + token) * c->ldq + (kv_head * group + head) * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i += W) store(s->q + row * Q_STRIDE + i, load(q + i) * splat(c->scale));
    }
}

static void write_rows(const attention_call *c, const part *part, int64_t kv_head, const sums *from, int64_t rows) {
    const int64_t group = c->heads / c->kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        float *out = c->out + (part->first_token + row / group) * c->ldo + (kv_head * group + row % group) * c->value_dim;
        float total = sum_of_lanes(load(from->total + row * W));
        if (c->sinks) {
            const float sink = c->sinks[kv_head * group + row % group] * (float)LOG2_E;
            total += exp_scalar((sink - from->highest[row]) * (float)(1 / LOG2_E));
        }
        vec scale = splat(1.0f / total);
        for (int64_t i = 0; i < c->value_dim; i += W) store(out + i, load(from->sum + row * c->value_dim + i) * scale);
    }
}

INLINE int64_t next_piece(int64_t key, int64_t piece, int64_t keys_end) {
    const int64_t next = (key / piece + 1) * piece;
    return next < keys_end ? next : keys_end;
}

static sums piece_at(const plan *plan, const part *part, int64_t kv_head, int64_t key, int64_t rows) {
    const int64_t value_dim = plan->call.value_dim, first = part->first_key / part->piece;
    const int64_t count = (part->keys_end - 1) / part->piece + 1 - first, index = kv_head * count + key / part->piece - first;
    return place_sums(plan->pieces + part->room + index * floats_of_sums(rows, value_dim), rows, value_dim);
}

// Puts the pieces of a part together: what one unit with all keys does while it computes them.
static void merge_pieces(const plan *plan, scratch *s, const part *part, int64_t kv_head, int64_t rows) {
    const attention_call *c = &plan->call;
    int is_first = 1;
    clear_sums(c, &s->open, rows);
    for (int64_t key = part->first_key, next; key < part->keys_end; key = next) {
        next = next_piece(key, part->piece, part->keys_end);
        const sums piece = piece_at(plan, part, kv_head, key, rows);
        merge_sums(c, &s->open, &piece, rows);
        if (next % GROUP && next < part->keys_end) continue;
        close_group(c, s, rows, is_first);
        clear_sums(c, &s->open, rows);
        is_first = 0;
    }
    write_rows(c, part, kv_head, &s->closed, rows);
}

// What a thread reads next, most likely: the first keys of the unit behind this one.
static row_run run_behind(const plan *plan, int64_t index) {
    const attention_call *c = &plan->call;
    if (index + 1 >= plan->num_units * c->kv_heads) return (row_run){0};
    const unit *unit = plan->units + (index + 1) / c->kv_heads;
    const part *part = plan->parts + unit->part;
    return (row_run){.table = c->block_table + part->first_request * c->table_width,
                     .kv_head = (index + 1) % c->kv_heads,
                     .first_key = unit->first_key,
                     .keys = unit->keys_end};
}

static void attention_unit(void *context, int64_t index) {
    const plan *plan = context;
    const attention_call *c = &plan->call;
    const unit *unit = plan->units + index / c->kv_heads;
    const part *part = plan->parts + unit->part;
    const int64_t kv_head = index % c->kv_heads, rows = part->tokens * (c->heads / c->kv_heads);
    scratch *s = get_scratch();
    load_queries(c, s, part, kv_head, rows);
    s->next = run_behind(plan, index);
    for (int64_t key = unit->first_key, next; key < unit->keys_end; key = next) {
        next = next_piece(key, part->piece ? part->piece : GROUP, unit->keys_end);
        clear_sums(c, &s->open, rows);
        attend_requests(c, s, part, kv_head, 0, part->requests, key, next);
        if (part->piece) {
            const sums piece = piece_at(plan, part, kv_head, key, rows);
            memcpy(piece.sum, s->open.sum, (size_t)(rows * c->value_dim) * sizeof(float));
            memcpy(piece.total, s->open.total, (size_t)(rows * W) * sizeof(float));
            memcpy(piece.highest, s->open.highest, (size_t)((rows + W - 1) / W * W) * sizeof(float));
        } else {
            close_group(c, s, rows, key == unit->first_key);
        }
    }
    if (!part->piece)
        write_rows(c, part, kv_head, &s->closed, rows);
    else if (atomic_fetch_sub(&plan->units_left[unit->part * c->kv_heads + kv_head], 1) == 1)
        merge_pieces(plan, s, part, kv_head, rows);
}

INLINE int64_t query_len(const attention_call *c, int64_t request) {
    return c->query_start[request + 1] - c->query_start[request];
}

// Whether a request is better computed together with the one before it. Where less than half is shared there is little to
// save. A window is short enough without; a bias needs every row's place.
INLINE int belongs_to_previous(const attention_call *c, int64_t request) {
    if (c->window > 0 || c->bias || query_len(c, request - 1) != 1 || query_len(c, request) != 1) return 0;
    const int64_t one = c->seq_lens[request - 1], other = c->seq_lens[request];
    return c->shared[request] >= STRETCH && 2 * (int64_t)c->shared[request] >= (one > other ? one : other);
}

static part make_part(const attention_call *c, int32_t first_request, int32_t requests, int32_t first_token, int32_t tokens) {
    part made = {.first_request = first_request, .requests = requests, .first_token = first_token, .tokens = tokens};
    const int64_t lowest = c->window > 0 ? position_of(c, first_request, first_token) - c->window + 1 : 0;
    made.first_key = (int32_t)(lowest > 0 ? lowest / STRETCH * STRETCH : 0);
    for (int32_t i = 0; i < requests; i++) {
        const int64_t request = first_request + i, last = requests > 1 ? first_token + i : first_token + tokens - 1;
        const int64_t keys = keys_of_token(c, request, last);
        if (keys > made.keys_end) made.keys_end = (int32_t)keys;
    }
    return made;
}

// Of one request. Many rows save reading; fewer make more parts, which spread over the threads.
static int32_t tokens_per_part(const attention_call *c) {
    const int64_t group = c->heads / c->kv_heads, rows = c->query_start[c->requests] * c->heads;
    int64_t most = UNIT_ROWS;
    while (most > FEWEST_ROWS && most > group && rows < most * UNITS_PER_THREAD * thread_count()) most /= 2;
    return (int32_t)(most > group ? most / group : 1);
}

// Fills parts, never more than there are tokens. Consecutive requests that belong together are in one part.
static void divide_batch(plan *plan) {
    const attention_call *c = &plan->call;
    const int32_t members = (int32_t)(UNIT_ROWS / (c->heads / c->kv_heads)), most = tokens_per_part(c);
    for (int32_t request = 0, next; request < c->requests; request = next) {
        for (next = request + 1; next < c->requests && next - request < members && belongs_to_previous(c, next);) next++;
        const int32_t requests = next - request, token_end = c->query_start[next], step = requests > 1 ? members : most;
        for (int32_t token = c->query_start[request]; token < token_end; token += step) {
            const int32_t tokens = token_end - token < step ? token_end - token : step;
            plan->parts[plan->num_parts++] = make_part(c, request, requests, token, tokens);
        }
    }
}

INLINE int64_t stretches_of(const part *part) { return (part->keys_end - part->first_key + STRETCH - 1) / STRETCH; }

INLINE int64_t cost_of_stretch(const attention_call *c, const part *part) {
    return part->tokens * (c->heads / c->kv_heads) + READING_ROWS;
}

// Keys of a part that one unit has: a power of two of stretches within a group, or whole groups, or all.
static int64_t keys_per_unit(int64_t stretches, int64_t wanted) {
    if (wanted >= stretches) return stretches * STRETCH;
    if (wanted >= GROUP / STRETCH) return wanted * STRETCH / GROUP * GROUP;
    int64_t run = 1;
    while (2 * run <= wanted) run *= 2;
    return run * STRETCH;
}

// Shares the keys of parts that are too much for one unit. Returns the floats that their pieces need.
static int64_t divide_parts(plan *plan) {
    const attention_call *c = &plan->call;
    const int64_t threads = thread_count(), group = c->heads / c->kv_heads;
    int64_t cost = 0, room = 0;
    for (int64_t i = 0; i < plan->num_parts; i++) cost += stretches_of(plan->parts + i) * cost_of_stretch(c, plan->parts + i);
    const int64_t most = threads > 1 ? cost * c->kv_heads / (threads * UNITS_PER_THREAD) : cost;
    for (part *part = plan->parts; part < plan->parts + plan->num_parts; part++) {
        const int64_t stretches = stretches_of(part), keys = keys_per_unit(stretches, most / cost_of_stretch(c, part));
        part->units = 1;
        if (keys < stretches * STRETCH) {
            part->unit_keys = (int32_t)keys;
            part->piece = keys < GROUP ? STRETCH : GROUP;
            part->units = (int32_t)((part->keys_end - 1) / keys + 1 - part->first_key / keys);
            part->room = room;
            const int64_t pieces = (part->keys_end - 1) / part->piece + 1 - part->first_key / part->piece;
            room += pieces * c->kv_heads * floats_of_sums(part->tokens * group, c->value_dim);
        }
        plan->num_units += part->units;
    }
    return room;
}

static void list_units(plan *plan) {
    unit *next = plan->units;
    for (int64_t i = 0; i < plan->num_parts; i++) {
        const part *part = plan->parts + i;
        const int32_t keys_end = part->keys_end;
        for (int64_t h = 0; h < plan->call.kv_heads; h++) atomic_init(&plan->units_left[i * plan->call.kv_heads + h], part->units);
        for (int32_t key = part->first_key, end; key < keys_end; key = end) {
            end = part->piece ? (int32_t)next_piece(key, part->unit_keys, keys_end) : keys_end;
            *next++ = (unit){(int32_t)i, key, end};
        }
    }
}

static _Thread_local room room_of_parts, room_of_units, room_of_pieces;

static int make_plan(plan *plan) {
    const attention_call *c = &plan->call;
    plan->parts = at_least(&room_of_parts, (size_t)c->query_start[c->requests] * sizeof(part));
    if (!plan->parts) return -1;
    divide_batch(plan);
    const size_t floats = (size_t)divide_parts(plan), units = (size_t)plan->num_units * sizeof(unit);
    char *memory = at_least(&room_of_units, units + (size_t)(plan->num_parts * c->kv_heads) * sizeof(atomic_int));
    plan->pieces = floats ? at_least(&room_of_pieces, floats * sizeof(float)) : NULL;
    if (!memory || (floats && !plan->pieces)) return -1;
    plan->units = (unit *)memory;
    plan->units_left = (atomic_int *)(memory + units);
    list_units(plan);
    return 0;
}

static int run_plan(plan *plan) {
    if (plan->call.query_start[plan->call.requests] == 0) return 0;
    if (make_plan(plan)) return -1;
    parallel_units(attention_unit, plan, plan->num_units * plan->call.kv_heads);
    return 0;
}

#ifdef LATENT
int ratoon_latent_attention(const float *q, int64_t ldq, float *out, int64_t ldo, int64_t kind, const void *cache,
                            int64_t block_bytes, const void *scales, int64_t scale_block_bytes, const int32_t *block_table,
                            int64_t table_width, const int32_t *query_start, const int32_t *seq_lens, const int32_t *shared,
                            int64_t requests, int64_t heads, int64_t groups, int64_t width, int64_t value_dim,
                            int64_t block_size, const int32_t *ends, float scale, const float *sinks) {
    plan plan = {.call = {q, out, cache, scales, kind, block_bytes, scale_block_bytes, block_table, query_start, seq_lens,
                          shared, ldq, ldo, table_width, requests, heads, groups, width, block_size, 0, 1, ends, NULL, 0,
                          (float)(scale * LOG2_E), 0, sinks, value_dim}};
    return run_plan(&plan);
}
#else
// `kind`: 0 floats, 1 halves, 2 bytes, which have `scales`. `shared` [requests]: how many keys a request's table has in
// common with that of the request before it, all of them visible to both. `ends` [tokens]: the last key that a token sees,
// never falling within a request, where that is behind its own position; or NULL. `cap`: of scores, before the bias;
// 0: none. `sinks` [heads]: scores that are in every row's softmax and have no value; or NULL. Returns 0, or -1 when memory ran out.
int ratoon_attention(const float *q, int64_t ldq, float *out, int64_t ldo, int64_t kind, const void *cache, int64_t block_bytes,
                     const void *scales, int64_t scale_block_bytes, const int32_t *block_table, int64_t table_width,
                     const int32_t *query_start, const int32_t *seq_lens, const int32_t *shared, int64_t requests,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int64_t causal,
                     const int32_t *ends, const float *bias, int64_t reach, float scale, float cap, const float *sinks) {
    plan plan = {.call = {q, out, cache, scales, kind, block_bytes, scale_block_bytes, block_table, query_start, seq_lens,
                          shared, ldq, ldo, table_width, requests, heads, kv_heads, head_dim, block_size, window, causal, ends,
                          bias, reach, (float)(scale * LOG2_E), (float)(cap * LOG2_E), sinks, head_dim}};
    return run_plan(&plan);
}
#endif
