// y = x · Wᵀ + bias, with W packed once into panels of 16 output columns: [panel][k][16], zeros behind the last column.
//
// Panels are of floats, or of numbers in 16 bits (bf16, fp16), which are widened when they are multiplied: the results are
// those of the same numbers as floats, to the bit.
//
// Many rows go by in blocks. A group of panels is taken in pieces of CACHE_DEPTH, which stay in the first-level cache while
// the rows of a block, which are in the second-level one, are multiplied with it tile by tile; the next piece is fetched
// meanwhile. With AVX-512 these rows are laid out first as tiles read them: what a tile has of a row would otherwise be on a page
// of its own, and where rows are 4 KiB apart, in the same places of the first-level cache. Sums over K have three levels, the same for any number of rows: within a stretch (tile.h), over the stretches
// of SUM_DEPTH, and over those.
#include "activations.h"
#include "jobs.h"
#include "kernels.h"
#include "packed.h"
#include "room.h"
#include "threads.h"
#include "tile.h"

#define SUM_DEPTH 768
#define CACHE_DEPTH (W == 16 ? 128 : W == 8 ? 384 : 768)  // 24 KB of panels; 48 KB for NEON, whose cores have 64 KB
#define WIDENED_DEPTH (CACHE_DEPTH < 384 ? CACHE_DEPTH : 384)  // what is widened and its widened form are there together
#define ROW_BLOCK 96
#define SMALLEST_ROW_BLOCK 16
#define UNITS_PER_THREAD 8
#define WIDENING_TILES 2  // up to so many tiles widen numbers themselves, while memory streams; for more it is done once
#define FETCHING_TILES 3  // with fewer tiles in a block the processor's own fetching ahead is as good
#define LAYS_OUT_ROWS (W == 16)
#define LAID_OUT_FROM 17          // rows
#define FEWEST_OWN_PANELS 24      // of a unit that lays out its rows itself: it then takes a fiftieth of the time
#define MOST_LAID_OUT (16 << 20)  // bytes that are laid out for all units at once; of more rows, some after the others

_Static_assert(SUM_DEPTH % CACHE_DEPTH == 0 && CACHE_DEPTH % STRETCH_K == 0, "pieces end where sums end");
_Static_assert(CACHE_DEPTH % WIDENED_DEPTH == 0 && WIDENED_DEPTH % STRETCH_K == 0, "pieces end where sums end");

enum { LAID_OUT = FP16 + 1 };  // a table of tiles beside those of formats: floats, with rows that are laid out

int64_t ratoon_packed_size(int64_t out, int64_t in) { return panels_of(out) * TILE * in + 16; }
int64_t ratoon_packed_size_16(int64_t out, int64_t in) { return panels_of(out) * TILE / 2 * in + 16; }

typedef struct {
    const void *weight;
    void *panels;
    int64_t out, in;
} pack_call;

#define PACK_PANEL(NAME, TYPE)                                                                     \
    static void NAME(void *context, int64_t panel) {                                               \
        const pack_call *c = context;                                                              \
        const TYPE *weight = c->weight;                                                            \
        TYPE *target = (TYPE *)c->panels + panel * TILE * c->in;                                   \
        for (int64_t k = 0; k < c->in; k++)                                                        \
            for (int64_t j = 0; j < TILE; j++) {                                                   \
                int64_t column = panel * TILE + j;                                                 \
                target[k * TILE + j] = column < c->out ? weight[column * c->in + k] : 0;           \
            }                                                                                      \
    }
PACK_PANEL(pack_floats, float)
PACK_PANEL(pack_halves, uint16_t)

static void pack(const void *weight, int64_t out, int64_t in, int format, float *packed) {
    *(packed_header *)packed = (packed_header){.format = format};
    pack_call c = {weight, (packed_header *)packed + 1, out, in};
    parallel_units(format == FLOATS ? pack_floats : pack_halves, &c, panels_of(out));
}

void ratoon_pack_weight(const float *weight, int64_t out, int64_t in, float *packed) { pack(weight, out, in, FLOATS, packed); }

void ratoon_pack_weight_16(const uint16_t *weight, int64_t out, int64_t in, int64_t is_bf16, float *packed) {
    pack(weight, out, in, is_bf16 ? BF16 : FP16, packed);
}

typedef struct {
    const float *x;
    const char *weight;  // panels
    const float *bias;
    float *y;
    int64_t ldx, ldy, rows, in, out, panels;
    int64_t block_rows, panels_per_unit, units_per_block;
    int format, activation;  // `activation`: -1, or of the results, by the numbers of ratoon_activation
    int lays_out;         // each unit its own rows, stretch by stretch of the depth
    float *laid_out;      // all rows as tiles read them, [tile][k][MAX_TILE_ROWS]; NULL: there are none
} linear_call;

// Panel by panel, from `depth` numbers on.
INLINE const char *panel_at(const linear_call *c, int64_t panel, int64_t depth) {
    return c->weight + (panel * c->in + depth) * TILE * bytes_of(c->format);
}

// What becomes of the totals of a tile with which a sum ends: y = totals, or y += totals, and then the bias.
typedef struct {
    float *y;     // NULL: the sum goes on
    int writes;   // otherwise finish_sum does it, with the totals of all tiles of a piece
    int adds;
    const float *bias;  // or NULL
    int64_t ldy;
} tile_end;

// Fetches what is written behind the last stretch, in the last two: the half of a tile is as much as a core waits for at a time.
INLINE void fetch_results(int rows, int panels, const tile_end *end, int64_t k, int64_t depth) {
    const int64_t behind = (depth - k - 1) / STRETCH_K, first = behind || !k ? 0 : rows / 2, last = behind ? rows / 2 : rows;
    if (!end->y || behind > 1) return;
    for (int64_t i = first; i < last; i++)
        UNROLLED for (int j = 0; j < panels; j++) __builtin_prefetch(end->y + i * end->ldy + j * TILE, 1, 3);
}

INLINE void write_results(int rows, int panels, const tile_end *end, vec acc[][TILE_WIDTH / W]) {
    if (end->adds)
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) acc[i][j] += load(end->y + i * end->ldy + j * W);
    if (end->bias)
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) {
            const vec bias = load(end->bias + j * W);
            UNROLLED for (int i = 0; i < rows; i++) acc[i][j] += bias;
        }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) store(end->y + i * end->ldy + j * W, acc[i][j]);
}

// totals [rows][TILE_WIDTH] = A · B in stretches; with `add`, they are added to what is there.
INLINE void tile_of(int rows, int panels, int format, tile_rows a, const void *b, int64_t panel_size, int64_t depth,
                    memory_ahead ahead, int add, float *totals, const tile_end *end) {
    for (int64_t k = 0; k < depth; k += STRETCH_K, add = 1) {
        fetch_results(rows, panels, end, k, depth);
        vec acc[MAX_TILE_ROWS][TILE_WIDTH / W];
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) acc[i][j] = (vec){};
        panels_chain(rows, panels, format, a, number_at(format, b, k * TILE), panel_size,
                     depth - k < STRETCH_K ? depth - k : STRETCH_K, ahead, acc);
        a.at += STRETCH_K * a.step;
        ahead.from += STRETCH_K / STEPS_PER_FETCH * ahead.step * 16;
        if (add)
            UNROLLED for (int i = 0; i < rows; i++)
                UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) acc[i][j] += load(totals + i * TILE_WIDTH + j * W);
        if (end->writes && depth - k <= STRETCH_K) {
            write_results(rows, panels, end, acc);
            return;
        }
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < panels * TILE_VECS; j++) store(totals + i * TILE_WIDTH + j * W, acc[i][j]);
    }
}

// a: rows of x, `ldx` floats apart; for LAID_OUT, a tile of these.
typedef void (*tile_function)(const float *a, int64_t ldx, const void *b, int64_t panel_size, int64_t depth,
                              const memory_ahead *ahead, int add, float *totals, const tile_end *end);
#define TILE_OF(ROWS, PANELS, FORMAT)                                                                                      \
    static void tile_##ROWS##_##PANELS##_##FORMAT(const float *a, int64_t ldx, const void *b, int64_t panel_size,          \
                                                  int64_t depth, const memory_ahead *ahead, int add, float *totals,        \
                                                  const tile_end *end) {                                                   \
        const tile_rows x = {a, ldx, 1}, laid_out = {a, 1, MAX_TILE_ROWS};                                                 \
        tile_of(ROWS, PANELS, FORMAT == LAID_OUT ? FLOATS : FORMAT, FORMAT == LAID_OUT ? laid_out : x, b, panel_size,      \
                depth, *ahead, add, totals, end);                                                                          \
    }
#if W == 4
#define TILES_OF(P, F) TILE_OF(1, P, F) TILE_OF(2, P, F) TILE_OF(3, P, F) TILE_OF(4, P, F)
#define NAMES_OF(P, F) {NULL, tile_1_##P##_##F, tile_2_##P##_##F, tile_3_##P##_##F, tile_4_##P##_##F}
#elif W == 8
#define TILES_OF(P, F)                                                                                                     \
    TILE_OF(1, P, F) TILE_OF(2, P, F) TILE_OF(3, P, F) TILE_OF(4, P, F) TILE_OF(5, P, F) TILE_OF(6, P, F)
#define NAMES_OF(P, F)                                                                                                     \
    {NULL,             tile_1_##P##_##F, tile_2_##P##_##F, tile_3_##P##_##F,                                               \
     tile_4_##P##_##F, tile_5_##P##_##F, tile_6_##P##_##F}
#else
#define TILES_OF(P, F)                                                                                                     \
    TILE_OF(1, P, F) TILE_OF(2, P, F) TILE_OF(3, P, F) TILE_OF(4, P, F)                                                    \
    TILE_OF(5, P, F) TILE_OF(6, P, F) TILE_OF(7, P, F) TILE_OF(8, P, F)
#define NAMES_OF(P, F)                                                                                                     \
    {NULL,             tile_1_##P##_##F, tile_2_##P##_##F, tile_3_##P##_##F, tile_4_##P##_##F,                             \
     tile_5_##P##_##F, tile_6_##P##_##F, tile_7_##P##_##F, tile_8_##P##_##F}
#endif
#if MAX_TILE_PANELS == 3
#define FORMAT_OF(F) TILES_OF(1, F) TILES_OF(2, F) TILES_OF(3, F)
#define TABLE_OF(F) {{NULL}, NAMES_OF(1, F), NAMES_OF(2, F), NAMES_OF(3, F)}
#else
#define FORMAT_OF(F) TILES_OF(1, F)
#define TABLE_OF(F) {{NULL}, NAMES_OF(1, F)}
#endif
FORMAT_OF(FLOATS) FORMAT_OF(BF16) FORMAT_OF(FP16) FORMAT_OF(LAID_OUT)
static const tile_function tiles[][MAX_TILE_PANELS + 1][MAX_TILE_ROWS + 1] = {
    [FLOATS] = TABLE_OF(FLOATS), [BF16] = TABLE_OF(BF16), [FP16] = TABLE_OF(FP16), [LAID_OUT] = TABLE_OF(LAID_OUT)};

// A group of up to MAX_TILE_PANELS panels, a block of rows, and the part of the depth that is multiplied now: a part of the
// span [begin, end), through which one group goes after the other.
typedef struct {
    int64_t panel, panels, row, rows, first, depth, begin, end;
    const float *laid_out;  // the rows as tiles read them, so many numbers of each from number `begin_laid_out` on; or NULL
    int64_t depth_laid_out, begin_laid_out;
} piece;

// What a tile fetches, so that the tiles of a block together fetch the next piece, and no more at a time than that takes: a read
// that misses the first-level cache waits behind what is fetched. Each panel's part of the piece is one run of memory, and each
// tile takes a run's beginning, or what follows it. `otherwise` is memory that needs no fetching.
INLINE memory_ahead fetch_of(const linear_call *c, const piece *p, int64_t tile, int64_t tiles, const void *otherwise) {
    const memory_ahead none = {otherwise, 0};
    int64_t panel = p->panel, first = p->first + p->depth;
    if (first == p->end) panel += p->panels, first = p->begin;
    const int64_t looks = p->depth / STEPS_PER_FETCH, turns = tiles / p->panels;
    const int64_t lines = c->format == FLOATS ? p->depth : p->depth / 2;  // of a run
    if (tiles < FETCHING_TILES || !looks || panel + tile % p->panels >= c->panels) return none;
    int64_t step = (lines + turns * looks - 1) / (turns * looks);
    if (step > p->panels) step = p->panels;
    const int64_t offset = tile / p->panels * looks * step * (c->format == FLOATS ? 1 : 2);
    if (offset >= p->depth) return none;
    return (memory_ahead){(const float *)panel_at(c, panel + tile % p->panels, first + offset), step};
}

// The piece's panels as floats, WIDENED_DEPTH · 16 from one to the next.
static void widen_piece(const linear_call *c, const piece *p, float *widened) {
    for (int64_t j = 0; j < p->panels; j++) {
        const uint16_t *from = (const uint16_t *)panel_at(c, p->panel + j, p->first);
        float *to = widened + j * WIDENED_DEPTH * TILE;
        if (c->format == BF16)
            for (int64_t i = 0; i < p->depth * TILE; i += W) store(to + i, load_bf16(from + i));
        else
            for (int64_t i = 0; i < p->depth * TILE; i += W) store(to + i, load_halves(from + i));
    }
}

// y = totals, or y += totals; with bias and activation at the end of the depth.
static void finish_sum(const linear_call *c, const piece *p, const float *totals) {
    const int64_t column = p->panel * TILE, width = p->panels * TILE;
    const int64_t count = c->out - column < width ? c->out - column : width;
    const int is_last = p->first + p->depth == c->in;
    const float *bias = c->bias && is_last ? c->bias + column : NULL;
    for (int64_t i = 0; i < p->rows; i++, totals += TILE_WIDTH) {
        float *y = c->y + (p->row + i) * c->ldy + column;
        for (int64_t j = 0; j < count; j += W) {
            vec v = load(totals + j);
            if (p->first >= SUM_DEPTH) v += read_part(y + j, count - j);
            if (bias) v += read_part(bias + j, count - j);
            write_part(y + j, count - j, is_last ? activate(c->activation, v) : v);
        }
    }
}

// The tile of the piece's first rows: what it does at its end. Columns that do not fill a panel, and activations, are left to
// finish_sum.
static tile_end end_of(const linear_call *c, const piece *p) {
    const int64_t column = p->panel * TILE, reached = p->first + p->depth;
    const int is_last = reached == c->in, is_whole = column + p->panels * TILE <= c->out;
    if (!is_last && reached % SUM_DEPTH) return (tile_end){0};
    return (tile_end){.y = c->y + p->row * c->ldy + column,
                      .writes = is_whole && !(is_last && c->activation >= 0),
                      .adds = p->first >= SUM_DEPTH,
                      .bias = c->bias && is_last ? c->bias + column : NULL,
                      .ldy = c->ldy};
}

static void multiply_piece(const linear_call *c, const piece *p, float *totals) {
    static _Thread_local float widened[MAX_TILE_PANELS * WIDENED_DEPTH * TILE] __attribute__((aligned(64)));
    const int64_t num_tiles = (p->rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    tile_end end = end_of(c, p);
    int format = c->format;
    const void *b = panel_at(c, p->panel, p->first);
    int64_t panel_size = c->in * TILE;
    if (format != FLOATS && num_tiles > WIDENING_TILES) {
        widen_piece(c, p, widened);
        format = FLOATS, b = widened, panel_size = WIDENED_DEPTH * TILE;
    }
    const int laid_out = format == FLOATS && p->laid_out;
    int64_t row = 0;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        // Even heights: 5 rows go as 3 + 2, not as 4 + 1. Rows that were laid out for tiles have theirs.
        int64_t height = (p->rows - row + num_tiles - tile - 1) / (num_tiles - tile);
        if (laid_out) height = p->rows - row < MAX_TILE_ROWS ? p->rows - row : MAX_TILE_ROWS;
        const float *a = laid_out ? p->laid_out + row * p->depth_laid_out + (p->first - p->begin_laid_out) * MAX_TILE_ROWS
                                  : c->x + (p->row + row) * c->ldx + p->first;
        const memory_ahead ahead = fetch_of(c, p, tile, num_tiles, b);
        tiles[laid_out ? LAID_OUT : format][p->panels][height](a, c->ldx, b, panel_size, p->depth, &ahead,
                                                               p->first % SUM_DEPTH > 0, totals + row * TILE_WIDTH, &end);
        row += height;
        if (end.y) end.y += height * c->ldy;
    }
    if (end.y && !end.writes) finish_sum(c, p, totals);
}

#if LAYS_OUT_ROWS
#define INTERLEAVED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// 16 numbers of eight rows, as eight of each k: single numbers of two rows side by side, then pairs, then fours.
INLINE void lay_out_16(const float *x, int64_t ldx, float *to) {
    vec a[8], b[8];
    UNROLLED for (int i = 0; i < 8; i++) a[i] = load(x + i * ldx);
    UNROLLED for (int i = 0; i < 8; i += 2) {
        b[i] = INTERLEAVED(a[i], a[i + 1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        b[i + 1] = INTERLEAVED(a[i], a[i + 1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    UNROLLED for (int i = 0; i < 8; i += 4)
        UNROLLED for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = INTERLEAVED(b[i + j], b[i + 2 + j], 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
            a[i + 2 * j + 1] = INTERLEAVED(b[i + j], b[i + 2 + j], 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
        }
    UNROLLED for (int j = 0; j < 4; j++) {
        store(to + 32 * j, INTERLEAVED(a[j], a[4 + j], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(to + 32 * j + 16, INTERLEAVED(a[j], a[4 + j], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

// Numbers [first, first + depth) of rows [row, row + MAX_TILE_ROWS), of which some may be behind the last, as a tile reads them.
static void lay_out_part(const linear_call *c, int64_t row, int64_t first, int64_t depth, float *to) {
    const float *x = c->x + row * c->ldx + first;
    const int64_t rows = c->rows - row;
    int64_t k = 0;
    for (; rows >= MAX_TILE_ROWS && k + 16 <= depth; k += 16) lay_out_16(x + k, c->ldx, to + k * MAX_TILE_ROWS);
    for (; k < depth; k++)
        for (int64_t i = 0; i < MAX_TILE_ROWS && i < rows; i++) to[k * MAX_TILE_ROWS + i] = x[i * c->ldx + k];
}

static void lay_out_tile(void *context, int64_t tile) {
    const linear_call *c = context;
    lay_out_part(c, tile * MAX_TILE_ROWS, 0, c->in, c->laid_out + tile * MAX_TILE_ROWS * c->in);
}

static room *rows_room(void) {
    static _Thread_local room room_of_rows;
    return &room_of_rows;
}

// For all units, where they have few panels. Without the memory for it, tiles read rows where they are.
static void lay_out(linear_call *c) {
    const int64_t tiles = (c->rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    if (c->rows < LAID_OUT_FROM || c->lays_out) return;
    c->laid_out = at_least(rows_room(), (size_t)(tiles * MAX_TILE_ROWS * c->in) * sizeof(float));
    if (c->laid_out) parallel_units(lay_out_tile, c, tiles);
}

// A unit's rows from p->begin to p->end, which stay in the second-level cache while they are multiplied with its panels.
static void lay_out_own(const linear_call *c, piece *p) {
    const int64_t depth = p->end - p->begin, tiles = (p->rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    float *own = at_least(rows_room(), (size_t)(tiles * MAX_TILE_ROWS * depth) * sizeof(float));
    p->laid_out = own, p->depth_laid_out = depth, p->begin_laid_out = p->begin;
    for (int64_t tile = 0; own && tile < tiles; tile++)
        lay_out_part(c, p->row + tile * MAX_TILE_ROWS, p->begin, depth, own + tile * MAX_TILE_ROWS * depth);
}
#else
static void lay_out(linear_call *c) { (void)c; }
static void lay_out_own(const linear_call *c, piece *p) { (void)c, (void)p; }
#endif

static void linear_unit(void *context, int64_t unit) {
    static _Thread_local float totals[ROW_BLOCK * TILE_WIDTH] __attribute__((aligned(64)));
    const linear_call *c = context;
    const int64_t first = unit % c->units_per_block * c->panels_per_unit;
    const int64_t last = first + c->panels_per_unit < c->panels ? first + c->panels_per_unit : c->panels;
    piece p = {.row = unit / c->units_per_block * c->block_rows};
    p.rows = c->rows - p.row < c->block_rows ? c->rows - p.row : c->block_rows;
    if (c->laid_out) p.laid_out = c->laid_out + p.row * c->in, p.depth_laid_out = c->in;
    // Of many rows, no more than fits the second-level cache is multiplied with all panels; few are, and memory streams.
    const int64_t deepest = c->format == FLOATS ? CACHE_DEPTH : WIDENED_DEPTH;
    const int64_t span = p.rows > MAX_TILE_ROWS ? SUM_DEPTH : c->in;
    for (p.begin = 0; p.begin < c->in; p.begin = p.end) {
        p.end = c->in - p.begin < span ? c->in : p.begin + span;
        if (c->lays_out) lay_out_own(c, &p);
        for (p.panel = first; p.panel < last; p.panel += p.panels) {
            p.panels = last - p.panel < MAX_TILE_PANELS ? last - p.panel : MAX_TILE_PANELS;
            for (p.first = p.begin; p.first < p.end; p.first += p.depth) {
                p.depth = p.end - p.first < deepest ? p.end - p.first : deepest;
                multiply_piece(c, &p, totals);
            }
        }
    }
}

// Long runs of panels keep the memory streaming; several runs for each thread keep one from waiting for another. Few rows
// take little computing, so that single panels may be units; many rows need whole tiles, and smaller blocks make more units.
static void divide(linear_call *c) {
    const int64_t wanted = UNITS_PER_THREAD * thread_count();
    int64_t blocks = (c->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t groups = (c->panels + MAX_TILE_PANELS - 1) / MAX_TILE_PANELS;
    while (thread_count() > 1 && groups * blocks < wanted / 2 && c->rows / (2 * blocks) >= SMALLEST_ROW_BLOCK) blocks *= 2;
    c->block_rows = (c->rows + blocks - 1) / blocks;
    c->block_rows = (c->block_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS * MAX_TILE_ROWS;
    blocks = (c->rows + c->block_rows - 1) / c->block_rows;
    c->panels_per_unit = c->panels * blocks / wanted;
    if (c->panels_per_unit >= MAX_TILE_PANELS || c->rows > MAX_TILE_ROWS)
        c->panels_per_unit = c->panels_per_unit / MAX_TILE_PANELS * MAX_TILE_PANELS;
    if (c->panels_per_unit < 1) c->panels_per_unit = c->rows > MAX_TILE_ROWS ? MAX_TILE_PANELS : 1;
    c->units_per_block = (c->panels + c->panels_per_unit - 1) / c->panels_per_unit;
    c->lays_out = LAYS_OUT_ROWS && c->rows >= LAID_OUT_FROM && c->panels_per_unit >= FEWEST_OWN_PANELS;
}

void linear_with_activation(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                            const float *bias, int activation, float *y, int64_t ldy) {
    const packed_header *header = (const packed_header *)packed;
    const int64_t blocks = MOST_LAID_OUT / (ROW_BLOCK * in * (int64_t)sizeof(float)), chunk = (blocks ? blocks : 1) * ROW_BLOCK;
    for (int64_t row = 0, next; row < rows; row = next) {
        linear_call c = {.x = x + row * ldx, .weight = (const char *)(header + 1), .bias = bias, .y = y + row * ldy, .ldx = ldx,
                         .ldy = ldy, .rows = rows - row, .in = in, .out = out, .panels = panels_of(out), .format = header->format,
                         .activation = activation};
        divide(&c);
        if (LAYS_OUT_ROWS && !c.lays_out && c.rows > chunk) c.rows = chunk, divide(&c);
        lay_out(&c);
        parallel_units(linear_unit, &c, c.units_per_block * ((c.rows + c.block_rows - 1) / c.block_rows));
        next = row + c.rows;
    }
}

void ratoon_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                   const float *bias, float *y, int64_t ldy) {
    linear_with_activation(x, ldx, rows, packed, in, out, bias, -1, y, ldy);
}

// Several products of one shape with few rows each. Their units are one loop: a product of its own, with a row or two, would leave
// threads waiting at its end. Rows are read where they are, so the results are those of ratoon_linear, to the bit.
typedef struct {
    linear_call *calls;
    int64_t units;  // of each
} linear_group;

static void group_unit(void *context, int64_t unit) {
    const linear_group *g = context;
    linear_unit(&g->calls[unit / g->units], unit % g->units);
}

int linear_jobs(const linear_job *jobs, int64_t count, int64_t in, int64_t out) {
    static _Thread_local room room_of_calls;
    linear_call *calls = at_least(&room_of_calls, (size_t)count * sizeof(linear_call));
    if (count && !calls) return -1;
    int64_t few = 0;
    const int64_t panels = panels_of(out), wanted = panels * count / (UNITS_PER_THREAD * thread_count());
    int64_t panels_per_unit = wanted < 1 ? 1 : wanted < panels ? wanted : panels;
    if (panels_per_unit >= MAX_TILE_PANELS) panels_per_unit = panels_per_unit / MAX_TILE_PANELS * MAX_TILE_PANELS;
    for (int64_t i = 0; i < count; i++) {
        const linear_job *j = &jobs[i];
        if (j->rows > MOST_GROUPED_ROWS) {
            ratoon_linear(j->x, j->ldx, j->rows, j->packed, in, out, j->bias, j->y, j->ldy);
            continue;
        }
        const packed_header *header = (const packed_header *)j->packed;
        calls[few++] = (linear_call){
            .x = j->x, .weight = (const char *)(header + 1), .bias = j->bias, .y = j->y, .ldx = j->ldx, .ldy = j->ldy,
            .rows = j->rows, .in = in, .out = out, .panels = panels, .block_rows = MOST_GROUPED_ROWS,
            .panels_per_unit = panels_per_unit, .units_per_block = (panels + panels_per_unit - 1) / panels_per_unit,
            .format = header->format, .activation = -1};
    }
    linear_group g = {calls, few ? calls[0].units_per_block : 0};
    if (few) parallel_units(group_unit, &g, few * g.units);
    return 0;
}
