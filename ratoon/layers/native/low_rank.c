// The products of adapters: y += (x · Aᵀ) · B for each row, with the matrices of the adapter in the row's slot.
//
// A product has parts, side by side in its columns (query, key and value), each with matrices of its own. Rows of the same
// slot are multiplied together, so that a matrix is read once for all of them; every row has a chain of its own for each sum,
// in stretches as in tile.h, and comes out the same whatever rows are beside it. First all low products of all rows, then all
// columns: both are divided among the threads by slot and by panels of 16 columns.
//
// An adapter has few rows in a step, which takes as long as its matrices take to arrive. So they are fetched ahead, also those
// of the next unit; and a tile of few rows computes two stretches of a sum at a time, or two panels, since a chain alone waits
// for each of its sums.
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "room.h"
#include "threads.h"
#include "tile.h"

#define GROUP_ROWS 32    // of one slot that a unit multiplies
#define UNIT_PANELS 16   // of columns in a unit
#define FETCH_BYTES 4096 // that are fetched ahead
#define CACHE_LINE 64
#define PAIRED_STRETCHES(rows) ((rows) * TILE_VECS <= 4)  // chains that leave multiply-adds idle
#define PAIRED_PANELS (W == 16)
#define SMALLEST_LARGEST 1e-30f  // of a column's numbers in a stretch: 127 / it would overflow

#define STRETCHES_OF(depth) (((depth) + STRETCH_K - 1) / STRETCH_K)

static int64_t panels_of(int64_t width) { return (width + TILE - 1) / TILE; }

// Memory that is read next: what lies behind the numbers that are being read, or the beginning of others.
INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(from + i, 0, 3);
}

// acc[c] += A · B of rows that lie anywhere: a chain for each element and c. Chain c reads A from `k` + c · a_step on, and B
// from there + c · b_step.
INLINE void rows_chains(int rows, int chains, int format, const float *const *a, int64_t k, int64_t depth, int64_t a_step,
                        const void *b, int64_t b_step, vec acc[][MAX_TILE_ROWS][TILE_VECS]) {
    int64_t s = 0;
#if W == 4
    for (; s + 4 <= depth; s += 4)
        UNROLLED for (int c = 0; c < chains; c++) {
            vec a4[MAX_TILE_ROWS];
            UNROLLED for (int i = 0; i < rows; i++) a4[i] = load(a[i] + k + c * a_step + s);
            UNROLLED for (int lane = 0; lane < 4; lane++)
                UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                    vec column = load_as(format, b, c * b_step + (s + lane) * TILE + j * W);
                    UNROLLED for (int i = 0; i < rows; i++) acc[c][i][j] = fma_(column, splat(a4[i][lane]), acc[c][i][j]);
                }
        }
#endif
    for (; s < depth; s++)
        UNROLLED for (int c = 0; c < chains; c++) {
            vec column[TILE_VECS];
            UNROLLED for (int j = 0; j < TILE_VECS; j++) column[j] = load_as(format, b, c * b_step + s * TILE + j * W);
            UNROLLED for (int i = 0; i < rows; i++) {
                vec value = splat(a[i][k + c * a_step + s]);
                UNROLLED for (int j = 0; j < TILE_VECS; j++) acc[c][i][j] = fma_(column[j], value, acc[c][i][j]);
            }
        }
}

// total += a stretch's sums, times their columns' scales if B has some.
INLINE void add_tile(int rows, int format, vec total[][TILE_VECS], vec acc[][TILE_VECS], const float *scales) {
    UNROLLED for (int j = 0; j < TILE_VECS; j++) {
        const vec scale = format == INT8 ? load(scales + j * W) : (vec){};
        UNROLLED for (int i = 0; i < rows; i++)
            total[i][j] = format == INT8 ? fma_(acc[i][j], scale, total[i][j]) : total[i][j] + acc[i][j];
    }
}

// out[i] [TILE] = scale · A · B, in stretches. `next`: what is read behind B.
INLINE void low_product(int rows, int format, const float *const *a, int64_t depth, const char *b, const float *scales,
                        const char *next, float scale, float *const *out) {
    const int64_t stretch_bytes = STRETCH_K * TILE * bytes_of(format);
    const char *end = b + depth * TILE * bytes_of(format);
    vec total[MAX_TILE_ROWS][TILE_VECS];
    clear_tile(rows, total);
    for (int64_t k = 0; k < depth;) {
        vec acc[2][MAX_TILE_ROWS][TILE_VECS];
        const int paired = PAIRED_STRETCHES(rows) && k + 2 * STRETCH_K <= depth;
        const int64_t bytes = paired ? 2 * stretch_bytes : stretch_bytes;
        fetch(b + bytes < end ? b + bytes : next, bytes);
        clear_tile(rows, acc[0]);
        if (paired) {
            clear_tile(rows, acc[1]);
            rows_chains(rows, 2, format, a, k, STRETCH_K, STRETCH_K, b, STRETCH_K * TILE, acc);
            add_tile(rows, format, total, acc[0], scales);
            add_tile(rows, format, total, acc[1], scales + TILE);
            k += 2 * STRETCH_K;
            scales += 2 * TILE;
        } else {
            rows_chains(rows, 1, format, a, k, depth - k < STRETCH_K ? depth - k : STRETCH_K, 0, b, 0, acc);
            add_tile(rows, format, total, acc[0], scales);
            k += STRETCH_K;
            scales += TILE;
        }
        b += bytes;
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) store(out[i] + j * W, total[i][j] * splat(scale));
}

// out[i] [panels · TILE] = A · B, in stretches; with `adds`, out[i] += A · B.
INLINE void panels_product(int rows, int panels, int format, const float *const *a, int64_t depth, const char *b,
                           const float *scales, int adds, float *const *out) {
    const int64_t stretches = STRETCHES_OF(depth);
    vec total[2][MAX_TILE_ROWS][TILE_VECS];
    UNROLLED for (int p = 0; p < panels; p++) clear_tile(rows, total[p]);
    rows_chains(rows, panels, format, a, 0, depth < STRETCH_K ? depth : STRETCH_K, 0, b, depth * TILE, total);
    if (format == INT8)
        UNROLLED for (int p = 0; p < panels; p++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                const vec scale = load(scales + p * stretches * TILE + j * W);
                UNROLLED for (int i = 0; i < rows; i++) total[p][i][j] *= scale;
            }
    for (int64_t k = STRETCH_K; k < depth; k += STRETCH_K) {
        vec acc[2][MAX_TILE_ROWS][TILE_VECS];
        UNROLLED for (int p = 0; p < panels; p++) clear_tile(rows, acc[p]);
        rows_chains(rows, panels, format, a, k, depth - k < STRETCH_K ? depth - k : STRETCH_K, 0,
                    b + k * TILE * bytes_of(format), depth * TILE, acc);
        UNROLLED for (int p = 0; p < panels; p++)
            add_tile(rows, format, total[p], acc[p], scales + (p * stretches + k / STRETCH_K) * TILE);
    }
    UNROLLED for (int p = 0; p < panels; p++)
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                float *to = out[i] + p * TILE + j * W;
                store(to, adds ? load(to) + total[p][i][j] : total[p][i][j]);
            }
}

// Columns of `panels` whole panels, one after the other in B and in out[i].
INLINE void columns_product(int rows, int format, const float *const *a, int64_t depth, const char *b, const float *scales,
                            int64_t panels, const char *next, int adds, float *const *out) {
    const int64_t panel_bytes = depth * TILE * bytes_of(format);
    const char *end = b + panels * panel_bytes;
    const int together = PAIRED_PANELS ? 2 : 1;
    float *at[MAX_TILE_ROWS];
    UNROLLED for (int i = 0; i < rows; i++) at[i] = out[i];
    for (; panels > 0;) {
        const int64_t count = panels < together ? 1 : together, bytes = count * panel_bytes;
        if (b + FETCH_BYTES < end)
            fetch(b + FETCH_BYTES, bytes);
        else
            fetch(next + FETCH_BYTES - (end - b), bytes);
        if (PAIRED_PANELS && count == 2)
            panels_product(rows, 2, format, a, depth, b, scales, adds, at);
        else
            panels_product(rows, 1, format, a, depth, b, scales, adds, at);
        UNROLLED for (int i = 0; i < rows; i++) at[i] += count * TILE;
        b += bytes;
        if (format == INT8) scales += count * STRETCHES_OF(depth) * TILE;
        panels -= count;
    }
}

typedef void (*low_function)(const float *const *a, int64_t depth, const char *b, const float *scales, const char *next,
                             float scale, float *const *out);
typedef void (*columns_function)(const float *const *a, int64_t depth, const char *b, const float *scales, int64_t panels,
                                 const char *next, int adds, float *const *out);

#define PRODUCT(ROWS, FORMAT)                                                                                                  \
    static void low_##ROWS##_##FORMAT(const float *const *a, int64_t depth, const char *b, const float *scales,               \
                                      const char *next, float scale, float *const *out) {                                      \
        low_product(ROWS, FORMAT, a, depth, b, scales, next, scale, out);                                                      \
    }                                                                                                                          \
    static void columns_##ROWS##_##FORMAT(const float *const *a, int64_t depth, const char *b, const float *scales,           \
                                          int64_t panels, const char *next, int adds, float *const *out) {                     \
        columns_product(ROWS, FORMAT, a, depth, b, scales, panels, next, adds, out);                                           \
    }
#define PRODUCTS(ROWS) PRODUCT(ROWS, FLOATS) PRODUCT(ROWS, BF16) PRODUCT(ROWS, INT8)
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(3)
PRODUCTS(4)
#if MAX_TILE_ROWS > 4
PRODUCTS(5)
PRODUCTS(6)
#endif
#if MAX_TILE_ROWS > 6
PRODUCTS(7)
PRODUCTS(8)
#endif

#define OF_FORMAT(NAME, ROWS)                                                                                                  \
    {[FLOATS] = NAME##_##ROWS##_FLOATS, [BF16] = NAME##_##ROWS##_BF16, [INT8] = NAME##_##ROWS##_INT8}
#if MAX_TILE_ROWS == 4
#define OF_ROWS(NAME) OF_FORMAT(NAME, 1), OF_FORMAT(NAME, 2), OF_FORMAT(NAME, 3), OF_FORMAT(NAME, 4)
#elif MAX_TILE_ROWS == 6
#define OF_ROWS(NAME)                                                                                                          \
    OF_FORMAT(NAME, 1), OF_FORMAT(NAME, 2), OF_FORMAT(NAME, 3), OF_FORMAT(NAME, 4), OF_FORMAT(NAME, 5), OF_FORMAT(NAME, 6)
#else
#define OF_ROWS(NAME)                                                                                                          \
    OF_FORMAT(NAME, 1), OF_FORMAT(NAME, 2), OF_FORMAT(NAME, 3), OF_FORMAT(NAME, 4), OF_FORMAT(NAME, 5), OF_FORMAT(NAME, 6),    \
        OF_FORMAT(NAME, 7), OF_FORMAT(NAME, 8)
#endif
static const low_function low_products[MAX_TILE_ROWS][INT8 + 1] = {OF_ROWS(low)};
static const columns_function columns_products[MAX_TILE_ROWS][INT8 + 1] = {OF_ROWS(columns)};

typedef struct {  // rows of one slot: `order` has them from `first` on
    int32_t slot, first, rows;
} row_group;

typedef struct {  // panels of one part, for one group
    int32_t group, part, first, panels;
} panel_unit;

typedef struct {
    const float *x;
    float *y;
    int64_t ldx, ldy, in, parts;
    const low_rank_part *entries;  // [slots][parts]
    const int32_t *order;
    const row_group *groups;
    const panel_unit *units;
    int64_t num_units;
    float *low;  // [ordered rows][parts][low_width]
    int64_t low_width;
} low_rank_call;

INLINE float *low_of(const low_rank_call *c, int64_t place, int64_t part) {
    return c->low + (place * c->parts + part) * c->low_width;
}

INLINE const char *panel_of(const low_rank_part *e, const void *numbers, int64_t panel, int64_t depth) {
    return number_at(e->format, numbers, panel * depth * TILE);
}

// The scales of a panel's whole numbers.
INLINE const float *scales_of(const low_rank_part *e, const float *scales, int64_t panel, int64_t depth) {
    return e->format == INT8 ? scales + panel * STRETCHES_OF(depth) * TILE : NULL;
}

// The first numbers that a unit reads; those of the last one itself where there is no other.
INLINE const char *begin_of(const low_rank_call *c, int64_t index, int of_columns) {
    const panel_unit u = c->units[index < c->num_units ? index : c->num_units - 1];
    const low_rank_part *e = c->entries + c->groups[u.group].slot * c->parts + u.part;
    return of_columns ? panel_of(e, e->b, u.first, e->rank) : panel_of(e, e->a, u.first, c->in);
}

static void low_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    const row_group g = c->groups[u.group];
    const low_rank_part *e = c->entries + g.slot * c->parts + u.part;
    const char *panel = panel_of(e, e->a, u.first, c->in), *next = begin_of(c, index + 1, 0);
    for (int64_t row = 0; row < g.rows; row += MAX_TILE_ROWS) {
        const int rows = g.rows - row < MAX_TILE_ROWS ? (int)(g.rows - row) : MAX_TILE_ROWS;
        const float *a[MAX_TILE_ROWS];
        float *out[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++) {
            a[i] = c->x + c->order[g.first + row + i] * c->ldx;
            out[i] = low_of(c, g.first + row + i, u.part) + u.first * TILE;
        }
        low_products[rows - 1][e->format](a, c->in, panel, scales_of(e, e->a_scales, u.first, c->in), next, e->scale, out);
    }
}

static void column_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    const row_group g = c->groups[u.group];
    const low_rank_part *e = c->entries + g.slot * c->parts + u.part;
    const char *panels = panel_of(e, e->b, u.first, e->rank), *next = begin_of(c, index + 1, 1);
    const int64_t left = e->out - u.first * TILE, whole = left / TILE < u.panels ? left / TILE : u.panels;
    const int adds = e->a != NULL;
    for (int64_t row = 0; row < g.rows; row += MAX_TILE_ROWS) {
        const int rows = g.rows - row < MAX_TILE_ROWS ? (int)(g.rows - row) : MAX_TILE_ROWS;
        const columns_function product = columns_products[rows - 1][e->format];
        const float *a[MAX_TILE_ROWS];
        float *y[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++) {
            const int64_t at = c->order[g.first + row + i];
            a[i] = adds ? low_of(c, g.first + row + i, u.part) : c->x + at * c->ldx;
            y[i] = c->y + at * c->ldy + e->column + u.first * TILE;
        }
        product(a, e->rank, panels, scales_of(e, e->b_scales, u.first, e->rank), whole, next, adds, y);
        if (whole == u.panels) continue;
        float last[MAX_TILE_ROWS * TILE], *out[MAX_TILE_ROWS];  // a panel that ends behind the columns
        for (int i = 0; i < rows; i++) out[i] = last + i * TILE;
        product(a, e->rank, panel_of(e, e->b, u.first + whole, e->rank),
                scales_of(e, e->b_scales, u.first + whole, e->rank), 1, next, 0, out);
        for (int i = 0; i < rows; i++)
            for (int64_t j = 0; j < left - whole * TILE; j++) {
                float *to = y[i] + whole * TILE + j;
                *to = adds ? *to + out[i][j] : out[i][j];
            }
    }
}

// Rows that have an adapter, in the order of their slots. Returns how many; `ends` has room for a number of each slot.
static int64_t order_rows(const int32_t *slots, int64_t rows, int64_t num_slots, int32_t *order, int32_t *ends) {
    memset(ends, 0, (size_t)num_slots * sizeof *ends);
    for (int64_t i = 0; i < rows; i++)
        if (slots[i] >= 0 && slots[i] < num_slots) ends[slots[i]]++;
    int32_t count = 0;
    for (int64_t s = 0; s < num_slots; s++) {
        int32_t of_slot = ends[s];
        ends[s] = count;
        count += of_slot;
    }
    for (int64_t i = 0; i < rows; i++)
        if (slots[i] >= 0 && slots[i] < num_slots) order[ends[slots[i]]++] = (int32_t)i;
    return count;
}

// The panels of all groups: of the low products, or of the columns. Returns how many units; with units == NULL they are counted.
static int64_t list_units(const low_rank_call *c, int64_t num_groups, int of_columns, panel_unit *units) {
    int64_t count = 0;
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t part = 0; part < c->parts; part++) {
            const low_rank_part *e = c->entries + c->groups[g].slot * c->parts + part;
            if (!e->rank || (!of_columns && !e->a)) continue;
            const int64_t panels = panels_of(of_columns ? e->out : e->rank);
            const int64_t most = of_columns ? UNIT_PANELS : 1;
            for (int64_t first = 0; first < panels; first += most, count++)
                if (units)
                    units[count] = (panel_unit){(int32_t)g, (int32_t)part, (int32_t)first,
                                                (int32_t)(panels - first < most ? panels - first : most)};
        }
    return count;
}

int ratoon_add_low_rank(const float *x, int64_t ldx, int64_t rows, int64_t in, const low_rank_part *entries, int64_t num_slots,
                        int64_t parts, const int32_t *slots, float *y, int64_t ldy) {
    static _Thread_local room room_of_rows, room_of_units, room_of_low;
    int32_t *order = at_least(&room_of_rows, (size_t)(rows + num_slots) * sizeof(int32_t) +
                                                 (size_t)(rows + num_slots) * sizeof(row_group));
    if (!order) return -1;
    int32_t *ends = order + rows;
    row_group *groups = (row_group *)(ends + num_slots);
    const int64_t count = order_rows(slots, rows, num_slots, order, ends);
    if (!count) return 0;
    int64_t num_groups = 0, low_width = 0;
    for (int64_t s = 0, first = 0; s < num_slots; first = ends[s++]) {
        for (int64_t row = first; row < ends[s]; row += GROUP_ROWS)
            groups[num_groups++] = (row_group){(int32_t)s, (int32_t)row,
                                               (int32_t)(ends[s] - row < GROUP_ROWS ? ends[s] - row : GROUP_ROWS)};
        if (first == ends[s]) continue;
        for (int64_t part = 0; part < parts; part++) {
            const low_rank_part *e = entries + s * parts + part;
            if (e->a && panels_of(e->rank) * TILE > low_width) low_width = panels_of(e->rank) * TILE;
        }
    }
    low_rank_call c = {.x = x, .y = y, .ldx = ldx, .ldy = ldy, .in = in, .parts = parts, .entries = entries,
                       .order = order, .groups = groups, .low_width = low_width};
    const int64_t num_low = list_units(&c, num_groups, 0, NULL), num_columns = list_units(&c, num_groups, 1, NULL);
    panel_unit *units = at_least(&room_of_units, (size_t)(num_low > num_columns ? num_low : num_columns) * sizeof *units);
    c.low = at_least(&room_of_low, (size_t)(count * parts * low_width) * sizeof(float) + 64);
    if ((num_columns && !units) || !c.low) return -1;
    c.units = units;
    c.num_units = list_units(&c, num_groups, 0, units);
    parallel_units(low_unit, &c, num_low);
    c.num_units = list_units(&c, num_groups, 1, units);
    parallel_units(column_unit, &c, num_columns);
    return 0;
}

int ratoon_pack_low_rank(const float *matrix, int64_t columns, int64_t depth, int8_t *codes, float *scales) {
    const int64_t stretches = STRETCHES_OF(depth);
    for (int64_t panel = 0; panel < panels_of(columns); panel++)
        for (int64_t stretch = 0; stretch < stretches; stretch++) {
            const int64_t first = stretch * STRETCH_K, count = depth - first < STRETCH_K ? depth - first : STRETCH_K;
            int8_t *to = codes + (panel * depth + first) * TILE;
            float *scale = scales + (panel * stretches + stretch) * TILE;
            for (int64_t j = 0; j < TILE; j++) {
                const int64_t column = panel * TILE + j;
                const float *from = matrix + column * depth + first;
                float largest = 0;
                for (int64_t k = 0; column < columns && k < count; k++) {
                    if (!isfinite(from[k])) return -1;
                    largest = fabsf(from[k]) > largest ? fabsf(from[k]) : largest;
                }
                const int usable = largest >= SMALLEST_LARGEST;  // otherwise all are zero
                const float factor = usable ? 127.0f / largest : 0.0f;
                scale[j] = usable ? largest / 127.0f : 0.0f;
                for (int64_t k = 0; k < count; k++) to[k * TILE + j] = usable ? (int8_t)rintf(from[k] * factor) : 0;
            }
        }
    return 0;
}

void ratoon_replace_rows(const saved_table *tables, int64_t num_slots, const int32_t *slots, const int64_t *ids, int64_t first,
                         int64_t rows, int64_t width, float *y) {
    for (int64_t i = 0; i < rows; i++) {
        if (slots[i] < 0 || slots[i] >= num_slots || !tables[slots[i]].numbers) continue;
        const saved_table *t = tables + slots[i];
        const int64_t row = ids[i] - first;
        float *to = y + i * width;
        if (row < 0 || row >= t->rows) {
            memset(to, 0, (size_t)width * sizeof(float));  // another rank has it
        } else if (t->format == FLOATS) {
            memcpy(to, (const float *)t->numbers + row * width, (size_t)width * sizeof(float));
        } else {
            const uint16_t *from = (const uint16_t *)t->numbers + row * width;
            for (int64_t j = 0; j < width; j++) {
                uint32_t bits = (uint32_t)from[j] << 16;
                memcpy(to + j, &bits, sizeof bits);
            }
        }
    }
}
