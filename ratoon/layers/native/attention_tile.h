// One stretch of keys for a tile of rows: scores, weights, and the sums of values by these weights.
//
// What rows have of some keys are `sums`, relative to the highest score among these keys. Those of different keys are put
// together by `merged`. The sums of a stretch do not depend on other stretches, so that it makes no difference to the bits of
// a result which thread computed which stretch.
#pragma once
#include "kv_cache.h"

#define STRETCH 64
#define RUNS (STRETCH / TILE)  // of keys in a stretch: a block of the cache has one or more of them
#ifndef UNIT_ROWS
#define UNIT_ROWS 96
#endif
#define Q_STRIDE (MAX_HEAD_DIM + TILE)
#define LOG2_E 1.4426950408889634
#define NOTHING -1e30f  // the highest score of no keys. A finite number, so that differences of two are numbers too

#if W == 16
#define TALLEST 6  // rows of a tile: 24 sums, 4 columns and a value of A in 32 registers, 10 loads for 24 multiply-adds
#define WIDEST 4   // panels
#elif W == 8
#define TALLEST 6
#define WIDEST 1
#else
#define TALLEST 4
#define WIDEST 1
#endif

typedef struct {
    const float *q;
    float *out;
    const char *cache, *scales;
    int64_t kind, block_bytes, scale_block_bytes;  // of a block, to the next one
    const int32_t *block_table, *query_start, *seq_lens, *shared;
    int64_t ldq, ldo, table_width, requests;
    int64_t heads, kv_heads, head_dim, block_size, window, causal;
    const int32_t *ends;  // [tokens] the last key that a token sees where it is behind its own, or NULL
    const float *bias;  // [heads][2 · reach + 1], or NULL: a key at distance d from the row has [d + reach]
    int64_t reach;
    float scale;  // of scores, whose weights are powers of two
    float cap;    // that scores approach, in both directions, in the same unit; 0: they have none
    const float *sinks;  // [heads]: a score that takes its share of the weights, and has no value; or NULL
    int64_t value_dim;   // of a head, and of what it gives
} attention_call;

typedef struct {
    float *sum;      // [rows][value_dim] of weight · value
    float *total;    // [rows][W] of weights, those of a lane's keys in a lane
    float *highest;  // [rows] score
} sums;

// What the sums so far and new ones are multiplied by when they are put together: W rows.
typedef struct {
    float keep[W], take[W], highest[W];
} weights_of_sums;

// A tile's scores, and then weights, and what they do to the sums.
typedef struct {
    _Alignas(64) float p[TALLEST * STRETCH];
    weights_of_sums w;
} tile;

// Rows of the scratch that go through a stretch together, with the table that all of them have there.
typedef struct {
    const int32_t *table;
    int64_t kv_head, first_row, rows;
    int64_t first_position, keys;  // the first row's; how many keys its last row sees
    int64_t first_key;             // that is read
    const int32_t *ends;           // those of the unit's tokens, or NULL
} row_run;

typedef struct {
    _Alignas(64) float q[UNIT_ROWS * Q_STRIDE];
    tile tiles[(UNIT_ROWS + TALLEST - 1) / TALLEST];
    _Alignas(64) float keys[MAX_HEAD_DIM * STRETCH], values[MAX_HEAD_DIM * STRETCH];  // of halves and bytes, as floats
    float key_scales[STRETCH], value_scales[STRETCH];
    int32_t token_of_row[UNIT_ROWS], head_of_row[UNIT_ROWS];  // counted from the first of the unit
    row_run next;       // what is fetched meanwhile, behind the last keys of a unit; without a table: nothing
    sums open, closed;  // of the group of stretches that is in work, and of those before it
    _Alignas(64) float memory[2 * (UNIT_ROWS * (MAX_HEAD_DIM + W) + UNIT_ROWS + W)];  // of the sums
} scratch;

// Where the keys and values of a stretch lie.
typedef struct {
    int64_t first_key, keys, first_run;  // runs before the first are in no row's window
    int64_t key_step, panel_bytes;       // numbers between two rows of keys; bytes between two panels of values
    int fetches;                         // whether there is a stretch behind it that is to be fetched meanwhile
    const char *keys_of[RUNS], *values_of[RUNS], *next_keys[RUNS], *next_values[RUNS];
} stretch;

// The larger of two. A NaN in b stays.
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    ivec m = a > b;
    return (vec)(((ivec)a & m) | ((ivec)b & ~m));
#endif
}

INLINE float largest_lane(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#elif defined(__ARM_NEON)
    return vmaxvq_f32((float32x4_t)v);
#else
    return max_lanes(v);
#endif
}

// In a fixed order.
INLINE float sum_of_lanes(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__ARM_NEON)
    return vaddvq_f32((float32x4_t)v);
#else
    return sum_lanes(v);
#endif
}

// 2^x for x of at most 0: n + r with |r| ≤ 1/2, a polynomial for 2^r, and n becomes an exponent. About 1 ulp; 2^0 is 1.
// Below -100 it is 2^-100: nothing beside the weight of 1 that the highest score has, and no subnormal number, which is slow.
INLINE vec power_of_two(vec x) {
    const vec shift = splat(12582912.0f + 127.0f);  // rounds to the nearest whole number, in the lowest bits
    x = larger(splat(-100.0f), x);
    vec shifted = x + shift, r = x - (shifted - shift);
    vec p = splat(0x1.444000p-13f);
    p = fma_(p, r, splat(0x1.5f48c0p-10f));
    p = fma_(p, r, splat(0x1.3b2a1cp-7f));
    p = fma_(p, r, splat(0x1.c6aeccp-5f));
    p = fma_(p, r, splat(0x1.ebfbe0p-3f));
    p = fma_(p, r, splat(0x1.62e430p-1f));
    p = fma_(p, r, splat(1.0f));
    return p * (vec)((ivec)shifted << 23);
}

INLINE void weigh_sums(const float *before, const float *added, weights_of_sums *w) {
    vec old = load(before), new = load(added), highest = larger(old, new);
    store(w->keep, power_of_two(old - highest));
    store(w->take, power_of_two(new - highest));
    store(w->highest, highest);
}

INLINE vec merged(vec before, vec added, float keep, float take) { return fma_(added, splat(take), before * splat(keep)); }

// W numbers of the cache as floats. `kind` is a constant wherever this is inlined.
INLINE vec load_kept(int kind, const char *p) {
    if (kind == FLOATS) return load((const float *)p);
    if (kind == HALVES) return load_halves((const uint16_t *)p);
    return __builtin_convertvector(*(const signed_bytes *)p, vec);
}

#define STEPS 4  // of a chain between two looks at what is to be fetched

// One step of a chain: a row of each panel.
INLINE void chain_step(int rows, int panels, int kind, const float *a, int64_t lda, const char *const *b, int64_t offset,
                       vec acc[][WIDEST * TILE_VECS]) {
    vec column[WIDEST * TILE_VECS];
    UNROLLED for (int j = 0; j < panels * TILE_VECS; j++)
        column[j] = load_kept(kind, b[j / TILE_VECS] + (offset + j % TILE_VECS * W) * size_of(kind));
    UNROLLED for (int i = 0; i < rows; i++) {
        vec value = splat(a[i * lda]);
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) acc[i][j] = fma_(column[j], value, acc[i][j]);
    }
}

#if W == 4
// NEON multiplies by a lane, so four values of A come with one load.
INLINE void four_steps(int rows, int kind, const float *a, int64_t lda, const char *b, int64_t ldb, vec acc[][TILE_VECS]) {
    vec a4[TALLEST];
    UNROLLED for (int i = 0; i < rows; i++) a4[i] = load(a + i * lda);
    UNROLLED for (int s = 0; s < 4; s++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) {
            vec column = load_kept(kind, b + (s * ldb + j * W) * size_of(kind));
            UNROLLED for (int i = 0; i < rows; i++) acc[i][j] = fma_(column, splat(a4[i][s]), acc[i][j]);
        }
}
#endif

// acc += A · B: one chain for each element. b: panels whose rows are ldb numbers apart. next: what is fetched meanwhile, as
// much for each panel, or NULL.
INLINE void chain(int rows, int panels, int kind, const float *a, int64_t lda, const char *const *b, int64_t ldb, int64_t depth,
                  const char *const *next, vec acc[][WIDEST * TILE_VECS]) {
    int64_t k = 0;
    for (; k + STEPS <= depth; k += STEPS) {
        if (next)
            UNROLLED for (int p = 0; p < panels; p++)
                UNROLLED for (int i = 0; i < STEPS * TILE * size_of(kind); i += 64)
                    __builtin_prefetch(next[p] + k * TILE * size_of(kind) + i, 0, 3);
#if W == 4
        four_steps(rows, kind, a + k, lda, b[0] + k * ldb * size_of(kind), ldb, acc);
#else
        UNROLLED for (int s = 0; s < STEPS; s++) chain_step(rows, panels, kind, a + k + s, lda, b, (k + s) * ldb, acc);
#endif
    }
    for (; k < depth; k++) chain_step(rows, panels, kind, a + k, lda, b, k * ldb, acc);
}

INLINE void clear(int rows, int panels, vec acc[][WIDEST * TILE_VECS]) {
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) acc[i][j] = (vec){};
}

// Scores of a tile with `panels` runs of keys.
INLINE void score_panels(int rows, int panels, int kind, const attention_call *c, const scratch *s, const stretch *t, int64_t row,
                         int64_t run, int fetches, tile *to) {
    vec acc[TALLEST][WIDEST * TILE_VECS];
    clear(rows, panels, acc);
    chain(rows, panels, kind, s->q + row * Q_STRIDE, Q_STRIDE, t->keys_of + run, t->key_step, c->head_dim,
          fetches ? t->next_keys + run : NULL, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) store(to->p + i * STRETCH + run * TILE + j * W, acc[i][j]);
}

INLINE void score_tile(int rows, int kind, const attention_call *c, const scratch *s, const stretch *t, int64_t row,
                       int64_t keys, int fetches, tile *to) {
    if (WIDEST > 1 && rows == TALLEST && !fetches && keys <= WIDEST / 2 * TILE) {
        score_panels(rows, WIDEST > 1 ? WIDEST / 2 : 1, kind, c, s, t, row, 0, 0, to);
        return;
    }
    for (int64_t run = 0; run * TILE < keys; run += WIDEST) score_panels(rows, WIDEST, kind, c, s, t, row, run, fetches, to);
}

// Sums of `panels` panels of values by the weights, from `panel` on.
INLINE void sum_panels(int rows, int panels, int kind, const attention_call *c, scratch *s, const stretch *t, int64_t row,
                       int64_t keys, int fetches, int64_t panel, const tile *from) {
    vec acc[TALLEST][WIDEST * TILE_VECS];
    clear(rows, panels, acc);
    for (int64_t run = t->first_run; run * TILE < keys; run++) {
        const char *b[WIDEST], *next[WIDEST];
        UNROLLED for (int p = 0; p < panels; p++) {
            b[p] = t->values_of[run] + (panel + p) * t->panel_bytes;
            next[p] = t->next_values[run] + (panel + p) * t->panel_bytes;
        }
        chain(rows, panels, kind, from->p + run * TILE, STRETCH, b, TILE, keys - run * TILE < TILE ? keys - run * TILE : TILE,
              fetches ? next : NULL, acc);
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) {
            float *sum = s->open.sum + (row + i) * c->value_dim + panel * TILE + j * W;
            store(sum, merged(load(sum), acc[i][j], from->w.keep[i], from->w.take[i]));
        }
}

INLINE void sum_tile(int rows, int kind, const attention_call *c, scratch *s, const stretch *t, int64_t row, int64_t keys,
                     int fetches, const tile *from) {
    const int64_t panels = c->value_dim / TILE;
    int64_t panel = 0;
    for (; panel + WIDEST <= panels; panel += WIDEST) sum_panels(rows, WIDEST, kind, c, s, t, row, keys, fetches, panel, from);
#if WIDEST > 1
    if (panels - panel >= 2) sum_panels(rows, 2, kind, c, s, t, row, keys, fetches, panel, from), panel += 2;
    if (panels - panel >= 1) sum_panels(rows, 1, kind, c, s, t, row, keys, fetches, panel, from);
#endif
}

INLINE int32_t within_stretch(int64_t key) { return key < 0 ? 0 : key > STRETCH ? STRETCH : (int32_t)key; }

// Whether rows do not see all keys behind them: attention is causal, or has a window to both sides.
INLINE int is_bounded(const attention_call *c) { return c->causal || c->window > 0; }

// The last key that a row of the scratch sees where that is bounded: its own, or one behind it. Later rows of a run never see
// less. It may be behind the sequence's last.
INLINE int64_t last_key(const attention_call *c, const scratch *s, const row_run *run, int64_t row) {
    const int64_t token = s->token_of_row[row], own = run->first_position + token - s->token_of_row[run->first_row];
    if (!c->causal) return own + c->window - 1;
    return run->ends && run->ends[token] > own ? run->ends[token] : own;
}

// Scores of one row under a soft cap: cap · tanh(score / cap).
static void cap_row(float cap, float *p) {
    const vec most = splat(cap), share = splat(1.0f / cap);
    for (int i = 0; i < STRETCH; i += W) store(p + i, most * tanh_(load(p + i) * share));
}

// Scores of one row that are not all visible, or have a bias: those of other keys become NOTHING.
static void mask_row(const attention_call *c, const scratch *s, const row_run *run, const stretch *t, int64_t row,
                     int64_t position, float *p) {
    const int64_t seen = is_bounded(c) ? last_key(c, s, run, row) + 1 - t->first_key : t->keys, end = seen < t->keys ? seen : t->keys;
    const int64_t begin = c->window > 0 ? position - c->window + 1 - t->first_key : 0;
    if (c->bias) {
        const int64_t head = run->kv_head * (c->heads / c->kv_heads) + s->head_of_row[row];
        const float *bias = c->bias + head * (2 * c->reach + 1) + c->reach + t->first_key - position;
        for (int64_t i = 0; i < end; i++) p[i] = __builtin_fmaf(bias[i], (float)LOG2_E, p[i]);
    }
    for (int64_t i = 0; i < within_stretch(begin); i++) p[i] = NOTHING;
    for (int64_t i = within_stretch(end); i < STRETCH; i++) p[i] = NOTHING;
}

// Scores of a row turn into weights, and these are added up. `scaled` is a constant wherever this is inlined.
INLINE vec weigh_row(int scaled, const scratch *s, float *p, float highest) {
    vec total = {};
    UNROLLED for (int i = 0; i < STRETCH / W; i++) {
        vec weight = power_of_two(load(p + i * W) - splat(highest));
        total = i ? total + weight : weight;
        store(p + i * W, scaled ? weight * load(s->value_scales + i * W) : weight);
    }
    return total;
}

// The same where keys are masked: their weight is zero.
static vec weigh_masked_row(const scratch *s, int scaled, float *p, float highest) {
    vec total = {};
    for (int i = 0; i < STRETCH / W; i++) {
        ivec visible = load(p + i * W) != splat(NOTHING);
        vec weight = (vec)((ivec)power_of_two(load(p + i * W) - splat(highest)) & visible);
        total += weight;
        store(p + i * W, scaled ? weight * load(s->value_scales + i * W) : weight);
    }
    return total;
}

// `masked`: some row of the tile does not see all keys of the stretch.
INLINE void weigh_rows(int rows, int masked, int scaled, const attention_call *c, const scratch *s, const row_run *run,
                       const stretch *t, int64_t row, float *p, float *highest, vec *totals) {
    for (int i = 0; i < rows; i++) {
        float *scores = p + i * STRETCH;
        if (scaled)
            UNROLLED for (int j = 0; j < STRETCH; j += W) store(scores + j, load(scores + j) * load(s->key_scales + j));
        if (c->cap > 0) cap_row(c->cap, scores);
        const int64_t token = s->token_of_row[row + i] - s->token_of_row[run->first_row];
        if (masked) mask_row(c, s, run, t, row + i, run->first_position + token, scores);
        vec top = load(scores);
        UNROLLED for (int j = W; j < STRETCH; j += W) top = larger(top, load(scores + j));
        highest[i] = largest_lane(top);
    }
    for (int i = 0; i < rows; i++)
        totals[i] = masked ? weigh_masked_row(s, scaled, p + i * STRETCH, highest[i])
                           : weigh_row(scaled, s, p + i * STRETCH, highest[i]);
}

// Scores of a tile turn into weights; the rows' highest scores and totals follow.
static void weigh_tile(const attention_call *c, scratch *s, const row_run *run, const stretch *t, int64_t row, int rows,
                       tile *tile) {
    const int32_t *token = s->token_of_row + row, first = s->token_of_row[run->first_row];
    const int64_t last_position = run->first_position + token[rows - 1] - first;
    const int masked = c->bias || t->keys < STRETCH || (is_bounded(c) && last_key(c, s, run, row) + 1 < t->first_key + STRETCH) ||
                       (c->window > 0 && last_position - c->window + 1 > t->first_key);
    float highest[W];
    vec totals[TALLEST];
    store(highest, splat(NOTHING));
    if (masked) weigh_rows(rows, 1, c->kind == BYTES, c, s, run, t, row, tile->p, highest, totals);
    else if (c->kind == BYTES) weigh_rows(rows, 0, 1, c, s, run, t, row, tile->p, highest, totals);
    else weigh_rows(rows, 0, 0, c, s, run, t, row, tile->p, highest, totals);
    weights_of_sums *w = &tile->w;
    weigh_sums(s->open.highest + row, highest, w);
    store(s->open.highest + row, load(w->highest));
    for (int i = 0; i < rows; i++) {
        float *total = s->open.total + (row + i) * W;
        store(total, merged(load(total), totals[i], w->keep[i], w->take[i]));
    }
}

// How many keys of a stretch the rows of a tile see, its last row most of them.
INLINE int64_t keys_seen(int rows, const attention_call *c, const scratch *s, const row_run *run, const stretch *t, int64_t row) {
    const int64_t seen = is_bounded(c) ? last_key(c, s, run, row + rows - 1) + 1 - t->first_key : t->keys;
    return seen < t->keys ? seen : t->keys;
}

// `rows` and `kind` are constants wherever these are inlined. row: of the scratch.
INLINE void begin_tile(int rows, int kind, const attention_call *c, scratch *s, const row_run *run, const stretch *t,
                       int64_t row) {
    const int64_t keys = keys_seen(rows, c, s, run, t, row);
    tile *tile = &s->tiles[(row - run->first_row) / TALLEST];
    if (keys <= 0) return;
    score_tile(rows, kind, c, s, t, row, keys, t->fetches && row == run->first_row, tile);
    weigh_tile(c, s, run, t, row, rows, tile);
}

INLINE void end_tile(int rows, int kind, const attention_call *c, scratch *s, const row_run *run, const stretch *t, int64_t row) {
    const int64_t keys = keys_seen(rows, c, s, run, t, row);
    const tile *tile = &s->tiles[(row - run->first_row) / TALLEST];
    if (keys > 0) sum_tile(rows, kind, c, s, t, row, keys, t->fetches && row == run->first_row, tile);
}

#define REST(ROWS)                                     \
    case ROWS:                                         \
        begin_tile(ROWS, kind, c, s, run, t, row);     \
        end_tile(ROWS, kind, c, s, run, t, row);       \
        break;

// The weights of all tiles, and then their sums: of a stretch the keys, and after them the values, stay in the first-level cache,
// which does not hold both.
INLINE void attend_tiles(int kind, const attention_call *c, scratch *s, const row_run *run, const stretch *t) {
    int64_t row = run->first_row, end = row + run->rows;
    for (; row + TALLEST <= end; row += TALLEST) begin_tile(TALLEST, kind, c, s, run, t, row);
    for (int64_t done = run->first_row; done < row; done += TALLEST) end_tile(TALLEST, kind, c, s, run, t, done);
    switch (end - row) {
#if TALLEST > 4
        REST(5)
        REST(4)
#endif
        REST(3)
        REST(2)
        REST(1)
    }
}
