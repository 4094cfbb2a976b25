// The products of adapters: y += (x · Aᵀ) · B for each row, with the matrices of the adapter in the row's slot.
//
// A product has parts, side by side in its columns (query, key and value), each with matrices of its own. Rows of the same
// slot are multiplied together, so that a matrix is read once for all of them; every row has a chain of its own for each sum,
// in stretches as in tile.h, and comes out the same whatever rows are beside it. First all low products of all rows, then all
// columns: both are divided among the threads by slot and by panels of 16 columns.
#include <string.h>

#include "kernels.h"
#include "room.h"
#include "threads.h"
#include "tile.h"

#define GROUP_ROWS 32    // of one slot that a unit multiplies
#define UNIT_PANELS 16   // of columns in a unit

static int64_t panels_of(int64_t width) { return (width + TILE - 1) / TILE; }

// acc += A · B of rows that lie anywhere: a chain for each element.
INLINE void rows_chain(int rows, int format, const float *const *a, int64_t k, int64_t end, const void *b,
                       vec acc[][TILE_VECS]) {
#if W == 4
    for (; k + 4 <= end; k += 4) {
        vec a4[MAX_TILE_ROWS];
        UNROLLED for (int i = 0; i < rows; i++) a4[i] = load(a[i] + k);
        UNROLLED for (int s = 0; s < 4; s++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                vec column = load_as(format, b, (k + s) * TILE + j * W);
                UNROLLED for (int i = 0; i < rows; i++) acc[i][j] = fma_(column, splat(a4[i][s]), acc[i][j]);
            }
    }
#endif
    for (; k < end; k++) {
        vec column[TILE_VECS];
        UNROLLED for (int j = 0; j < TILE_VECS; j++) column[j] = load_as(format, b, k * TILE + j * W);
        UNROLLED for (int i = 0; i < rows; i++) {
            vec value = splat(a[i][k]);
            UNROLLED for (int j = 0; j < TILE_VECS; j++) acc[i][j] = fma_(column[j], value, acc[i][j]);
        }
    }
}

// out[i] [TILE] = scale · A · B, in stretches; with `adds`, out[i] += A · B.
INLINE void rows_product(int rows, int format, const float *const *a, int64_t depth, const void *b, float scale, int adds,
                         float *const *out) {
    vec total[MAX_TILE_ROWS][TILE_VECS];
    clear_tile(rows, total);
    rows_chain(rows, format, a, 0, depth < STRETCH_K ? depth : STRETCH_K, b, total);
    for (int64_t k = STRETCH_K; k < depth; k += STRETCH_K) {
        vec acc[MAX_TILE_ROWS][TILE_VECS];
        clear_tile(rows, acc);
        rows_chain(rows, format, a, k, k + STRETCH_K < depth ? k + STRETCH_K : depth, b, acc);
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) total[i][j] += acc[i][j];
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++)
            store(out[i] + j * W, adds ? load(out[i] + j * W) + total[i][j] : total[i][j] * splat(scale));
}

typedef void (*product_function)(const float *const *a, int64_t depth, const void *b, float scale, int adds, float *const *out);

#define PRODUCT(ROWS, FORMAT)                                                                                            \
    static void product_##ROWS##_##FORMAT(const float *const *a, int64_t depth, const void *b, float scale, int adds,   \
                                          float *const *out) {                                                           \
        rows_product(ROWS, FORMAT, a, depth, b, scale, adds, out);                                                       \
    }
#define PRODUCTS(ROWS) PRODUCT(ROWS, FLOATS) PRODUCT(ROWS, BF16)
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

#define OF_FORMAT(ROWS) {product_##ROWS##_FLOATS, product_##ROWS##_BF16}
static const product_function products[MAX_TILE_ROWS][2] = {
    OF_FORMAT(1), OF_FORMAT(2), OF_FORMAT(3), OF_FORMAT(4),
#if MAX_TILE_ROWS > 4
    OF_FORMAT(5), OF_FORMAT(6),
#endif
#if MAX_TILE_ROWS > 6
    OF_FORMAT(7), OF_FORMAT(8),
#endif
};

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
    float *low;  // [ordered rows][parts][low_width]
    int64_t low_width;
} low_rank_call;

INLINE float *low_of(const low_rank_call *c, int64_t place, int64_t part) {
    return c->low + (place * c->parts + part) * c->low_width;
}

INLINE const void *panel_of(const low_rank_part *e, const void *numbers, int64_t panel, int64_t depth) {
    return number_at(e->format, numbers, panel * depth * TILE);
}

static void low_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    const row_group g = c->groups[u.group];
    const low_rank_part *e = c->entries + g.slot * c->parts + u.part;
    for (int64_t row = 0; row < g.rows; row += MAX_TILE_ROWS) {
        const int rows = g.rows - row < MAX_TILE_ROWS ? (int)(g.rows - row) : MAX_TILE_ROWS;
        const float *a[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++) a[i] = c->x + c->order[g.first + row + i] * c->ldx;
        for (int64_t panel = u.first; panel < u.first + u.panels; panel++) {
            float *out[MAX_TILE_ROWS];
            for (int i = 0; i < rows; i++) out[i] = low_of(c, g.first + row + i, u.part) + panel * TILE;
            products[rows - 1][e->format](a, c->in, panel_of(e, e->a, panel, c->in), e->scale, 0, out);
        }
    }
}

static void column_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    const row_group g = c->groups[u.group];
    const low_rank_part *e = c->entries + g.slot * c->parts + u.part;
    for (int64_t row = 0; row < g.rows; row += MAX_TILE_ROWS) {
        const int rows = g.rows - row < MAX_TILE_ROWS ? (int)(g.rows - row) : MAX_TILE_ROWS;
        const float *a[MAX_TILE_ROWS];
        for (int i = 0; i < rows; i++)
            a[i] = e->a ? low_of(c, g.first + row + i, u.part) : c->x + c->order[g.first + row + i] * c->ldx;
        for (int64_t panel = u.first; panel < u.first + u.panels; panel++) {
            const int64_t count = e->out - panel * TILE;
            float last[MAX_TILE_ROWS * TILE], *y[MAX_TILE_ROWS], *out[MAX_TILE_ROWS];
            for (int i = 0; i < rows; i++) {
                y[i] = c->y + c->order[g.first + row + i] * c->ldy + e->column + panel * TILE;
                out[i] = count >= TILE ? y[i] : last + i * TILE;  // a panel may end behind the columns
            }
            const int adds = e->a && count >= TILE;
            products[rows - 1][e->format](a, e->rank, panel_of(e, e->b, panel, e->rank), 1, adds, out);
            for (int i = 0; count < TILE && i < rows; i++)
                for (int64_t j = 0; j < count; j++) y[i][j] = e->a ? y[i][j] + out[i][j] : out[i][j];
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
    list_units(&c, num_groups, 0, units);
    parallel_units(low_unit, &c, num_low);
    list_units(&c, num_groups, 1, units);
    parallel_units(column_unit, &c, num_columns);
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
