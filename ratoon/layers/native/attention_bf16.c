// Attention of whole sequences to themselves, as encoders have it, by the matrix unit of x86 (AMX): queries, keys, values and
// weights are rounded to bf16, sums are floats. For engines that round weights to 8 bits or fewer anyway.
//
// Everything is computed transposed, [keys][queries], so that a query is a lane: the highest score and the sum of weights are
// taken lane by lane, and two rows of weights, rounded, are the pairs that the next product reads.
//
//     scores  [16 keys][16 queries]  +=  keys [16 keys][32 dims]     · queries [32 dims][16 queries]
//     sums    [16 dims][16 queries]  +=  values [16 dims][32 keys]   · weights [32 keys][16 queries]
//
// Keys are taken in stretches that start at multiples of KEYS, so that a row comes out the same, to the bit, in any batch and
// with any number of threads.
#include <string.h>

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#define HEAD 64       // dims of a head: others have no kernel
#define SIDE 16       // rows of a tile, and columns of 4 bytes
#define DEPTH 32      // numbers of a tile's row in bf16
#define KEYS 256      // whose scores are kept at a time
#define TOGETHER 2    // tiles of queries
#define MOST_QUERIES 256  // of a unit: they read the same keys and values
#define UNITS_PER_THREAD 4

#if !defined(__AMX_TILE__) || W != SIDE
int64_t ratoon_attention_bf16_scratch(int64_t rows, int64_t requests, int64_t heads, int64_t head_dim) {
    (void)rows, (void)requests, (void)heads, (void)head_dim;
    return 0;
}

void ratoon_attention_bf16(const float *q, int64_t ldq, const float *k, int64_t ldk, const float *v, int64_t ldv, float *out,
                           int64_t ldo, const int32_t *starts, int64_t requests, int64_t heads, float scale, void *scratch) {
    (void)q, (void)ldq, (void)k, (void)ldk, (void)v, (void)ldv, (void)out, (void)ldo;
    (void)starts, (void)requests, (void)heads, (void)scale, (void)scratch;
}
#else
#include "matrix_unit.h"

#define WITH_BF16 __attribute__((target("amx-bf16")))

typedef uint32_t pairs[SIDE][SIDE];  // of numbers in bf16: a tile

// Keys and values of DEPTH tokens and one head.
typedef struct {
    pairs keys[DEPTH / SIDE][HEAD / DEPTH];  // [key][two dims]
    pairs values[HEAD / SIDE];               // [dim][two keys]
} token_group;

typedef struct {
    const float *q, *k, *v;
    float *out;
    int64_t ldq, ldk, ldv, ldo, requests, heads, chunk;  // `chunk`: queries of a unit
    const int32_t *starts;  // [requests + 1]
    float scale;
    token_group *groups;  // [request][head][group]
} bf16_call;

// What is kept of SIDE · TOGETHER queries.
typedef struct {
    _Alignas(64) pairs q[TOGETHER][HEAD / DEPTH];      // [two dims][query]
    float scores[TOGETHER][KEYS][SIDE];                // [key][query]
    pairs weights[TOGETHER][KEYS / DEPTH];             // [two keys][query]
    float sums[HEAD / SIDE][TOGETHER][SIDE][SIDE];     // [dim][query]
    vec highest[TOGETHER], total[TOGETHER];
} query_group;

static void configure(void) {
    tile_config config = {.palette = TILE_PALETTE};
    set_shape(&config, 0, 8, SIDE, 4 * SIDE);
    _tile_loadconfig(&config);
}

INLINE int64_t groups_of(int64_t tokens) { return (tokens + DEPTH - 1) / DEPTH; }

int64_t ratoon_attention_bf16_scratch(int64_t rows, int64_t requests, int64_t heads, int64_t head_dim) {
    return head_dim == HEAD ? (rows / DEPTH + requests) * heads * (int64_t)sizeof(token_group) + 64 : 0;
}

// The nearest numbers in bf16, in the upper halves.
INLINE uvec rounded(vec x) { return (uvec)x + (((uvec)x >> 16 & 1) + 0x7fff); }

// Rounded numbers as pairs of bf16, lane by lane.
INLINE uvec as_pairs(uvec first, uvec second) { return first >> 16 | (second & 0xffff0000u); }

INLINE vec load_or_zero(const float *p, int is_there) { return is_there ? load(p) : (vec){}; }

INLINE void transpose(uvec m[SIDE]) {
    __m512i a[SIDE], b[SIDE];
    UNROLLED for (int i = 0; i < SIDE; i++) a[i] = (__m512i)m[i];
    UNROLLED for (int i = 0; i < SIDE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED for (int i = 0; i < SIDE; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 g + c] has, in its lane l of 128 bits, rows 4 g … 4 g + 3 of column 4 l + c.
    UNROLLED for (int c = 0; c < 4; c++) {
        const __m512i even = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
        b[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
        b[c + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        b[c + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        b[c + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    UNROLLED for (int i = 0; i < SIDE; i++) m[i] = (uvec)b[i];
}

// Numbers of a row as bf16, DEPTH of them, times `scale`.
INLINE uvec round_row(const float *x, float scale, int is_there) {
    const uvec low = rounded(load_or_zero(x, is_there) * splat(scale)) >> 16;
    const uvec high = rounded(load_or_zero(x + SIDE, is_there) * splat(scale)) >> 16;
    const __m512i both = _mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)low));
    return (uvec)_mm512_inserti64x4(both, _mm512_cvtepi32_epi16((__m512i)high), 1);
}

// Those behind the last token are zeros.
static void pack_group(const bf16_call *c, int64_t first, int64_t last, int64_t head, token_group *to) {
    for (int64_t i = 0; i < DEPTH; i++)
        for (int64_t part = 0; part < HEAD / DEPTH; part++)
            *(uvec *)to->keys[i / SIDE][part][i % SIDE] =
                round_row(c->k + (first + i) * c->ldk + head * HEAD + part * DEPTH, 1.0f, first + i < last);
    for (int64_t panel = 0; panel < HEAD / SIDE; panel++) {
        uvec m[SIDE];
        UNROLLED for (int i = 0; i < SIDE; i++) {
            const float *v = c->v + (first + 2 * i) * c->ldv + head * HEAD + panel * SIDE;
            m[i] = as_pairs(rounded(load_or_zero(v, first + 2 * i < last)),
                            rounded(load_or_zero(v + c->ldv, first + 2 * i + 1 < last)));
        }
        transpose(m);
        UNROLLED for (int i = 0; i < SIDE; i++) *(uvec *)to->values[panel][i] = m[i];
    }
}

static void load_queries(const bf16_call *c, int64_t first, int64_t last, int64_t head, query_group *to) {
    for (int64_t tile = 0; tile < TOGETHER; tile++) {
        for (int64_t part = 0; part < HEAD / DEPTH; part++) {
            uvec m[SIDE];
            UNROLLED for (int i = 0; i < SIDE; i++) {
                const int64_t row = first + tile * SIDE + i;
                m[i] = round_row(c->q + row * c->ldq + head * HEAD + part * DEPTH, c->scale, row < last);
            }
            transpose(m);
            UNROLLED for (int i = 0; i < SIDE; i++) *(uvec *)to->q[tile][part][i] = m[i];
        }
        to->highest[tile] = splat(-1e30f);
        to->total[tile] = (vec){};
    }
    memset(to->sums, 0, sizeof to->sums);
}

// 2^x for x of at most 0, to about 2^-13 of it: n + r with |r| ≤ 1/2, a polynomial for 2^r, and n is added to the exponent.
// Below -100 it is 2^-100.
INLINE vec power_of_two(vec x) {
    const vec shift = splat(12582912.0f);
    x = (vec)_mm512_max_ps((__m512)splat(-100.0f), (__m512)x);  // a NaN stays
    const vec shifted = x + shift, r = x - (shifted - shift);
    vec p = fma_(splat(0.05517167f), r, splat(0.24261112f));
    p = fma_(p, r, splat(0.69326099f));
    p = fma_(p, r, splat(0.99992807f));
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

// Scores of the keys of `count` groups.
WITH_BF16 static void score(query_group *to, const token_group *groups, int64_t count) {
    _tile_loadd(0, to->q[0][0], 4 * SIDE);
    _tile_loadd(1, to->q[0][1], 4 * SIDE);
    _tile_loadd(2, to->q[1][0], 4 * SIDE);
    _tile_loadd(3, to->q[1][1], 4 * SIDE);
    for (int64_t i = 0; i < count * (DEPTH / SIDE); i++) {
        const pairs *keys = groups[i / (DEPTH / SIDE)].keys[i % (DEPTH / SIDE)];
        _tile_loadd(4, keys[0], 4 * SIDE);
        _tile_loadd(5, keys[1], 4 * SIDE);
        _tile_zero(6);
        _tile_zero(7);
        _tile_dpbf16ps(6, 4, 0);
        _tile_dpbf16ps(7, 4, 2);
        _tile_dpbf16ps(6, 5, 1);
        _tile_dpbf16ps(7, 5, 3);
        _tile_stored(6, to->scores[0][i * SIDE], 4 * SIDE);
        _tile_stored(7, to->scores[1][i * SIDE], 4 * SIDE);
    }
}

// Scores turn into weights: those of `keys` keys, and zeros up to the next multiple of DEPTH. Sums so far are brought to the
// new highest scores.
static void weigh(query_group *to, int64_t tile, int64_t keys) {
    const float (*scores)[SIDE] = to->scores[tile];
    vec top[4] = {to->highest[tile], to->highest[tile], to->highest[tile], to->highest[tile]};
    int64_t i = 0;
    for (; i + 4 <= keys; i += 4)
        UNROLLED for (int j = 0; j < 4; j++) top[j] = (vec)_mm512_max_ps((__m512)load(scores[i + j]), (__m512)top[j]);
    for (; i < keys; i++) top[0] = (vec)_mm512_max_ps((__m512)load(scores[i]), (__m512)top[0]);
    UNROLLED for (int j = 1; j < 4; j++) top[0] = (vec)_mm512_max_ps((__m512)top[j], (__m512)top[0]);
    const vec highest = top[0], before = to->highest[tile];
    vec total[2] = {};
    uint32_t (*weights)[SIDE] = to->weights[tile][0];
    for (i = 0; i + 2 <= keys; i += 2) {
        const vec first = power_of_two(load(scores[i]) - highest), second = power_of_two(load(scores[i + 1]) - highest);
        total[0] += first;
        total[1] += second;
        *(uvec *)weights[i / 2] = as_pairs((uvec)first + 0x8000, (uvec)second + 0x8000);
    }
    if (i < keys) {
        const vec first = power_of_two(load(scores[i]) - highest);
        total[0] += first;
        *(uvec *)weights[i / 2] = as_pairs((uvec)first + 0x8000, (uvec){});
        i += 2;
    }
    for (; i % DEPTH; i += 2) memset(weights[i / 2], 0, sizeof weights[0]);
    const vec keep = power_of_two(before - highest);
    to->highest[tile] = highest;
    to->total[tile] = fma_(to->total[tile], keep, total[0] + total[1]);
    if (!_mm512_cmp_ps_mask((__m512)before, (__m512)highest, _CMP_NEQ_UQ)) return;
    for (int64_t panel = 0; panel < HEAD / SIDE; panel++)
        for (int64_t dim = 0; dim < SIDE; dim++) {
            float *sum = to->sums[panel][tile][dim];
            store(sum, load(sum) * keep);
        }
}

// Adds the values of `count` groups by their weights.
WITH_BF16 static void add_values(query_group *to, const token_group *groups, int64_t count) {
    for (int64_t panel = 0; panel < HEAD / SIDE; panel += 2) {
        _tile_loadd(0, to->sums[panel][0], 4 * SIDE);
        _tile_loadd(1, to->sums[panel][1], 4 * SIDE);
        _tile_loadd(2, to->sums[panel + 1][0], 4 * SIDE);
        _tile_loadd(3, to->sums[panel + 1][1], 4 * SIDE);
        for (int64_t i = 0; i < count; i++) {
            _tile_loadd(4, groups[i].values[panel], 4 * SIDE);
            _tile_loadd(5, groups[i].values[panel + 1], 4 * SIDE);
            _tile_loadd(6, to->weights[0][i], 4 * SIDE);
            _tile_loadd(7, to->weights[1][i], 4 * SIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to->sums[panel][0], 4 * SIDE);
        _tile_stored(1, to->sums[panel][1], 4 * SIDE);
        _tile_stored(2, to->sums[panel + 1][0], 4 * SIDE);
        _tile_stored(3, to->sums[panel + 1][1], 4 * SIDE);
    }
}

static void write_rows(const bf16_call *c, int64_t first, int64_t last, int64_t head, const query_group *from) {
    for (int64_t tile = 0; tile < TOGETHER; tile++) {
        const vec factor = splat(1.0f) / from->total[tile];
        for (int64_t panel = 0; panel < HEAD / SIDE; panel++) {
            uvec m[SIDE];
            UNROLLED for (int i = 0; i < SIDE; i++) m[i] = (uvec)(load(from->sums[panel][tile][i]) * factor);
            transpose(m);
            for (int64_t i = 0; i < SIDE && first + tile * SIDE + i < last; i++)
                memcpy(c->out + (first + tile * SIDE + i) * c->ldo + head * HEAD + panel * SIDE, &m[i], sizeof m[i]);
        }
    }
}

// Which request, head and part of it a unit has; `parts`: of a head, for so many tokens each.
typedef struct {
    int64_t request, head, part, first_group;  // the head's first group
} place;

static place find_place(const bf16_call *c, int64_t unit, int64_t tokens_per_part) {
    place p = {0};
    for (;; p.request++) {
        const int64_t tokens = c->starts[p.request + 1] - c->starts[p.request];
        const int64_t parts = (tokens + tokens_per_part - 1) / tokens_per_part;
        if (unit < parts * c->heads) {
            p.head = unit / parts, p.part = unit % parts;
            p.first_group += p.head * groups_of(tokens);
            return p;
        }
        unit -= parts * c->heads;
        p.first_group += c->heads * groups_of(tokens);
    }
}

static int64_t units_of(const bf16_call *c, int64_t tokens_per_part) {
    int64_t units = 0;
    for (int64_t i = 0; i < c->requests; i++)
        units += (c->starts[i + 1] - c->starts[i] + tokens_per_part - 1) / tokens_per_part * c->heads;
    return units;
}

static void pack_unit(void *context, int64_t unit) {
    const bf16_call *c = context;
    const place p = find_place(c, unit, MOST_QUERIES);
    const int64_t last = c->starts[p.request + 1];
    token_group *group = c->groups + p.first_group + p.part * (MOST_QUERIES / DEPTH);
    int64_t token = c->starts[p.request] + p.part * MOST_QUERIES;
    const int64_t end = token + MOST_QUERIES < last ? token + MOST_QUERIES : last;
    for (; token < end; token += DEPTH) pack_group(c, token, last, p.head, group++);
}

static void attend_unit(void *context, int64_t unit) {
    const bf16_call *c = context;
    const place p = find_place(c, unit, c->chunk);
    const int64_t begin = c->starts[p.request], last = c->starts[p.request + 1], tokens = last - begin;
    const int64_t first = begin + p.part * c->chunk, end = first + c->chunk < last ? first + c->chunk : last;
    query_group queries;
    configure();
    for (int64_t row = first; row < end; row += TOGETHER * SIDE) {
        load_queries(c, row, end, p.head, &queries);
        for (int64_t key = 0; key < tokens; key += KEYS) {
            const int64_t keys = tokens - key < KEYS ? tokens - key : KEYS;
            const token_group *groups = c->groups + p.first_group + key / DEPTH;
            score(&queries, groups, groups_of(keys));
            for (int64_t tile = 0; tile < TOGETHER; tile++) weigh(&queries, tile, keys);
            add_values(&queries, groups, groups_of(keys));
        }
        write_rows(c, row, end, p.head, &queries);
    }
    _tile_release();
}

void ratoon_attention_bf16(const float *q, int64_t ldq, const float *k, int64_t ldk, const float *v, int64_t ldv, float *out,
                           int64_t ldo, const int32_t *starts, int64_t requests, int64_t heads, float scale, void *scratch) {
    bf16_call c = {q, k, v, out, ldq, ldk, ldv, ldo, requests, heads, MOST_QUERIES, starts, scale * 1.4426950408889634f,
                   (token_group *)(((uintptr_t)scratch + 63) / 64 * 64)};
    parallel_units(pack_unit, &c, units_of(&c, MOST_QUERIES));
    while (c.chunk > TOGETHER * SIDE && units_of(&c, c.chunk) < UNITS_PER_THREAD * thread_count()) c.chunk /= 2;
    parallel_units(attend_unit, &c, units_of(&c, c.chunk));
}
#endif
