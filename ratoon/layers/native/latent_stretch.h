// Stretches of vectors (kv_cache.h), a part of attention.c where it is compiled for latent attention (latent.c).
//
// Vectors are kept as the panels that values are read in. As keys they are needed transposed: each tile of 16 tokens and 16
// numbers is turned in registers, once for all rows of a unit, which costs a few percent of what 16 heads compute with it.
// `kv_heads` are groups of heads here, and all of them read the same vectors.
#define LANE_BELOW(lane, d) ((lane) & (d) ? W + (lane) - (d) : (lane))
#define LANE_ABOVE(lane, d) ((lane) & (d) ? W + (lane) : (lane) + (d))
#define FOUR_LANES(F, from, d) F(from, d), F(from + 1, d), F(from + 2, d), F(from + 3, d)
#if W == 16
#define ALL_LANES(F, d) FOUR_LANES(F, 0, d), FOUR_LANES(F, 4, d), FOUR_LANES(F, 8, d), FOUR_LANES(F, 12, d)
#elif W == 8
#define ALL_LANES(F, d) FOUR_LANES(F, 0, d), FOUR_LANES(F, 4, d)
#else
#define ALL_LANES(F, d) FOUR_LANES(F, 0, d)
#endif

// Rows whose numbers differ in one bit exchange the lanes that differ in it.
#define EXCHANGE(d)                                                                  \
    UNROLLED for (int i = 0; i < W; i++) {                                           \
        if (i & (d)) continue;                                                       \
        const vec one = v[i], other = v[i + (d)];                                    \
        v[i] = __builtin_shufflevector(one, other, ALL_LANES(LANE_BELOW, d));        \
        v[i + (d)] = __builtin_shufflevector(one, other, ALL_LANES(LANE_ABOVE, d));  \
    }

INLINE void turn(vec *v) {
    EXCHANGE(1)
    EXCHANGE(2)
#if W >= 8
    EXCHANGE(4)
#endif
#if W == 16
    EXCHANGE(8)
#endif
}

// A tile [token][number] becomes [number][token]; with `values`, the tile is copied to it, too.
INLINE void turn_tile(int kind, const char *from, float *keys, float *values) {
    for (int64_t token = 0; token < TILE; token += W)
        for (int64_t column = 0; column < TILE; column += W) {
            vec v[W];
            UNROLLED for (int i = 0; i < W; i++) {
                v[i] = load_kept(kind, from + ((token + i) * TILE + column) * size_of(kind));
                if (values) store(values + (token + i) * TILE + column, v[i]);
            }
            turn(v);
            UNROLLED for (int i = 0; i < W; i++) store(keys + (column + i) * TILE + token, v[i]);
        }
}

INLINE const char *block_of(const attention_call *c, const row_run *run, int64_t key) {
    return c->cache + run->table[key / c->block_size] * c->block_bytes;
}

static void read_scales(const attention_call *c, scratch *s, const row_run *run, const stretch *t) {
    for (int64_t i = t->first_run * TILE; i < t->keys; i += TILE) {
        const int64_t key = t->first_key + i;
        const char *of_block = c->scales + run->table[key / c->block_size] * c->scale_block_bytes;
        memcpy(s->key_scales + i, (const float *)of_block + key % c->block_size, TILE * sizeof(float));
        memcpy(s->value_scales + i, s->key_scales + i, TILE * sizeof(float));
    }
}

static void find_stretch(const attention_call *c, const scratch *s, const row_run *run, int64_t first_key, int64_t keys_end,
                         stretch *t) {
    const int64_t size = size_of(c->kind);
    t->first_key = first_key;
    t->keys = run->keys - first_key < STRETCH ? run->keys - first_key : STRETCH;
    t->first_run = 0;
    t->panel_bytes = c->block_size * TILE * size;
    const int goes_on = first_key + STRETCH < keys_end && first_key + STRETCH < run->keys;
    const row_run *next_run = goes_on ? run : &s->next;
    const int64_t next_key = goes_on ? first_key + STRETCH : s->next.first_key;
    t->fetches = goes_on || s->next.table;
    for (int64_t i = 0; i * TILE < t->keys; i++) {
        const int64_t key = first_key + i * TILE;
        t->keys_of[i] = block_of(c, run, key) + key % c->block_size * TILE * size;
        if (!t->fetches) continue;
        const int64_t ahead = next_key + i * TILE < next_run->keys ? next_key + i * TILE : next_run->keys - 1;
        t->next_keys[i] = block_of(c, next_run, ahead) + ahead % c->block_size / TILE * TILE * TILE * size;
    }
}

// Keys and values as floats, as tiles of rows read them. Meanwhile the next stretch is fetched into the second-level cache.
INLINE void turn_stretch(int kind, const attention_call *c, scratch *s, stretch *t) {
    const int64_t size = size_of(kind), panels = c->head_dim / TILE, first_value = panels - c->value_dim / TILE;
    for (int64_t run = 0; run < RUNS; run++) {
        float *keys = s->keys + run * TILE * c->head_dim, *values = s->values + run * TILE * TILE;
        const int is_there = run * TILE < t->keys;
        for (int64_t panel = 0; panel < panels && is_there; panel++) {
            if (t->fetches)
                for (int64_t i = 0; i < TILE * TILE * size; i += 64)
                    __builtin_prefetch(t->next_keys[run] + panel * t->panel_bytes + i, 0, 2);
            turn_tile(kind, t->keys_of[run] + panel * t->panel_bytes, keys + panel * TILE * TILE,
                      panel < first_value ? NULL : values + (panel - first_value) * STRETCH * TILE);
        }
        t->keys_of[run] = (const char *)(is_there ? keys : s->keys);  // scores of what is not there are masked
        t->values_of[run] = (const char *)values;
    }
    t->key_step = TILE;
    t->panel_bytes = STRETCH * TILE * sizeof(float);
    t->fetches = 0;
}

static void attend_turned(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    attend_tiles(FLOATS, c, s, run, t);
}

static void attend_floats(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    turn_stretch(FLOATS, c, s, t);
    attend_turned(c, s, run, t);
}

static void attend_halves(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    turn_stretch(HALVES, c, s, t);
    attend_turned(c, s, run, t);
}

static void attend_bytes(const attention_call *c, scratch *s, const row_run *run, stretch *t) {
    read_scales(c, s, run, t);
    turn_stretch(BYTES, c, s, t);
    attend_turned(c, s, run, t);
}
