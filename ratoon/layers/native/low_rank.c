// The products of adapters: y += (x · Aᵀ) · B for each row, with the matrices of the adapter in the row's slot.
//
// A product has parts, side by side in its columns (query, key and value), each with matrices of its own: in floats or bf16, or in
// whole numbers (low_rank_whole.c). Rows of the same slot are multiplied together, so that a matrix is read once for all of them;
// every row has a chain of its own for each sum, in stretches as in tile.h, and comes out the same whatever rows are beside it.
//
// Where there are enough groups of rows for the threads, a group with all its matrices is a unit. Else first all low products
// are divided, by slot and panel, and then all columns.
//
// An adapter has few rows in a step, which takes as long as its matrices take to arrive. They lie in the order in which they are
// read, and are fetched ahead; and a tile of few rows computes two stretches of a sum at a time, or two panels, since a chain
// alone waits for each of its sums.
#include <string.h>

#include "kernels.h"
#include "low_rank.h"
#include "room.h"
#include "threads.h"

#define MOST_GROUP_ROWS 32  // of one slot that a unit multiplies, where rows are many
#define LEAST_GROUP_ROWS 4   // for which reading the matrices once more is worth it, where rows of a slot are divided
#define GROUPS_PER_THREAD 2
#define UNIT_PANELS 16      // of columns in a unit
#define FETCH_BYTES 4096    // that are fetched ahead
#define CACHE_LINE 64
#define PAIRED_STRETCHES(rows) ((rows) * TILE_VECS <= 4)  // chains that leave multiply-adds idle
#define PANELS_TOGETHER (W == 16 ? 2 : 1)

static int64_t panels_of(int64_t width) { return (width + TILE - 1) / TILE; }

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

INLINE void add_tile(int rows, vec total[][TILE_VECS], vec acc[][TILE_VECS]) {
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) total[i][j] += acc[i][j];
}

// out[i] [TILE] = scale · A · B, in stretches.
INLINE void low_product(int rows, int format, const float *const *a, int64_t depth, const char *b, float scale,
                        float *const *out) {
    const int64_t stretch_bytes = STRETCH_K * TILE * bytes_of(format);
    vec total[MAX_TILE_ROWS][TILE_VECS];
    clear_tile(rows, total);
    for (int64_t k = 0; k < depth;) {
        vec acc[2][MAX_TILE_ROWS][TILE_VECS];
        const int paired = PAIRED_STRETCHES(rows) && k + 2 * STRETCH_K <= depth, count = paired ? 2 : 1;
        fetch(b + FETCH_BYTES, count * stretch_bytes);
        clear_tile(rows, acc[0]);
        if (paired) {
            clear_tile(rows, acc[1]);
            rows_chains(rows, 2, format, a, k, STRETCH_K, STRETCH_K, b, STRETCH_K * TILE, acc);
            add_tile(rows, total, acc[0]);
            add_tile(rows, total, acc[1]);
        } else {
            rows_chains(rows, 1, format, a, k, depth - k < STRETCH_K ? depth - k : STRETCH_K, 0, b, 0, acc);
            add_tile(rows, total, acc[0]);
        }
        k += count * STRETCH_K;
        b += count * stretch_bytes;
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < TILE_VECS; j++) store(out[i] + j * W, total[i][j] * splat(scale));
}

// out[i] [panels · TILE] = A · B from a column on, in stretches; with `adds`, out[i] += A · B.
INLINE void panels_product(int rows, int panels, int format, const float *const *a, int64_t depth, const char *b, int adds,
                           float *const *out, int64_t column) {
    vec total[2][MAX_TILE_ROWS][TILE_VECS];
    fetch(b + FETCH_BYTES, panels * depth * TILE * bytes_of(format));
    UNROLLED for (int p = 0; p < panels; p++) clear_tile(rows, total[p]);
    rows_chains(rows, panels, format, a, 0, depth < STRETCH_K ? depth : STRETCH_K, 0, b, depth * TILE, total);
    for (int64_t k = STRETCH_K; k < depth; k += STRETCH_K) {
        vec acc[2][MAX_TILE_ROWS][TILE_VECS];
        UNROLLED for (int p = 0; p < panels; p++) clear_tile(rows, acc[p]);
        rows_chains(rows, panels, format, a, k, depth - k < STRETCH_K ? depth - k : STRETCH_K, 0,
                    b + k * TILE * bytes_of(format), depth * TILE, acc);
        UNROLLED for (int p = 0; p < panels; p++) add_tile(rows, total[p], acc[p]);
    }
    UNROLLED for (int p = 0; p < panels; p++)
        UNROLLED for (int i = 0; i < rows; i++)
            UNROLLED for (int j = 0; j < TILE_VECS; j++) {
                float *to = out[i] + column + p * TILE + j * W;
                store(to, adds ? load(to) + total[p][i][j] : total[p][i][j]);
            }
}

// Columns of whole panels, one after the other in B and in out[i].
INLINE void columns_product(int rows, int format, const float *const *a, int64_t depth, const char *b, int64_t panels, int adds,
                            float *const *out) {
    const int64_t step = depth * TILE * bytes_of(format);
    int64_t p = 0;
    for (; p + PANELS_TOGETHER <= panels; p += PANELS_TOGETHER)
        panels_product(rows, PANELS_TOGETHER, format, a, depth, b + p * step, adds, out, p * TILE);
    for (; p < panels; p++) panels_product(rows, 1, format, a, depth, b + p * step, adds, out, p * TILE);
}

static void float_low(int rows, int format, const float *const *a, int64_t depth, const char *b, float scale,
                      float *const *out) {
#define HEIGHT(ROWS)                                                                                                           \
    case ROWS:                                                                                                                 \
        if (format == FLOATS) low_product(ROWS, FLOATS, a, depth, b, scale, out);                                              \
        else low_product(ROWS, BF16, a, depth, b, scale, out);                                                                 \
        break;
    switch (rows) { EVERY_HEIGHT }
#undef HEIGHT
}

static void float_columns(int rows, int format, const float *const *a, int64_t depth, const char *b, int64_t panels, int adds,
                          float *const *out) {
#define HEIGHT(ROWS)                                                                                                           \
    case ROWS:                                                                                                                 \
        if (format == FLOATS) columns_product(ROWS, FLOATS, a, depth, b, panels, adds, out);                                   \
        else columns_product(ROWS, BF16, a, depth, b, panels, adds, out);                                                      \
        break;
    switch (rows) { EVERY_HEIGHT }
#undef HEIGHT
}

typedef struct {  // rows of one slot: `order` has them from `first` on
    int32_t slot, first, rows;
} row_group;

typedef struct {  // panels of one part, for one group
    int32_t group, part, first, panels;
} panel_unit;

typedef struct {  // rows in whole numbers: each `width` codes, and a scale for `together` of them
    int16_t *codes;
    float *scales;
    int64_t width, together;
} whole_rows;

typedef struct {
    const float *x;
    float *y;
    int64_t ldx, ldy, in, parts;
    const low_rank_part *entries;  // [slots][parts]
    const int32_t *order;
    const row_group *groups;
    const panel_unit *units;
    int64_t count;       // of ordered rows
    float *low;          // of each tile [parts][rows][low_width]
    int64_t low_width;
    int has_whole;       // whether there are matrices in whole numbers: then there are rows of x and of low products, too
    whole_rows whole_x;  // [ordered rows]
    whole_rows whole_low;  // of each tile [parts][low_width / 2][rows][2], scales [parts][low_width / TILE][rows]
} low_rank_call;

INLINE const low_rank_part *entry_of(const low_rank_call *c, const row_group *g, int64_t part) {
    return c->entries + g->slot * c->parts + part;
}

static int64_t panel_bytes(int64_t format, int64_t depth) {
    return format == WHOLE ? whole_panel_bytes(depth) : depth * TILE * bytes_of((int)format);
}

static const char *panel_of(const low_rank_part *e, const void *numbers, int64_t panel, int64_t depth) {
    return (const char *)numbers + panel * panel_bytes(e->format, depth);
}

INLINE int16_t *codes_of(const whole_rows *rows, int64_t row) { return rows->codes + row * rows->width; }
INLINE float *scales_of(const whole_rows *rows, int64_t row) { return rows->scales + row * (rows->width / rows->together); }

static void round_rows(const low_rank_call *c, int64_t first, int64_t rows) {
    for (int64_t place = first; place < first + rows; place++)
        round_whole(c->x + c->order[place] * c->ldx, c->in, codes_of(&c->whole_x, place), scales_of(&c->whole_x, place));
}

// Where a tile has its low products of a part: [low_width][rows].
INLINE int64_t low_place(const low_rank_call *c, const row_group *g, int64_t row, int rows, int64_t part) {
    return (g->first + row) * c->parts + part * rows;
}

static void low_panel(const low_rank_call *c, const row_group *g, int64_t part, int64_t panel) {
    const low_rank_part *e = entry_of(c, g, part);
    const char *numbers = panel_of(e, e->a, panel, c->in);
    for (int64_t row = 0; row < g->rows; row += MAX_TILE_ROWS) {
        const int rows = g->rows - row < MAX_TILE_ROWS ? (int)(g->rows - row) : MAX_TILE_ROWS;
        const int64_t place = g->first + row, low = low_place(c, g, row, rows, part);
        if (e->format == WHOLE) {
            const int16_t *x[MAX_TILE_ROWS];
            const float *x_scales[MAX_TILE_ROWS];
            for (int i = 0; i < rows; i++) x[i] = codes_of(&c->whole_x, place + i), x_scales[i] = scales_of(&c->whole_x, place + i);
            whole_low(rows, x, x_scales, c->in, numbers, e->scale, codes_of(&c->whole_low, low) + panel * TILE * rows,
                      scales_of(&c->whole_low, low) + panel * rows);
        } else {
            const float *x[MAX_TILE_ROWS];
            float *out[MAX_TILE_ROWS];
            for (int i = 0; i < rows; i++) {
                x[i] = c->x + c->order[place + i] * c->ldx;
                out[i] = c->low + (low + i) * c->low_width + panel * TILE;
            }
            float_low(rows, e->format, x, c->in, numbers, e->scale, out);
        }
    }
}

static void columns_of_tile(const low_rank_call *c, const row_group *g, int64_t row, int rows, int64_t part, int64_t first,
                            int64_t panels, float *const *y) {
    const low_rank_part *e = entry_of(c, g, part);
    const char *numbers = panel_of(e, e->b, first, e->rank);
    const int64_t low = low_place(c, g, row, rows, part);
    if (e->format == WHOLE) {
        whole_columns(rows, codes_of(&c->whole_low, low), scales_of(&c->whole_low, low), e->rank, numbers, panels, y);
        return;
    }
    const float *a[MAX_TILE_ROWS];
    for (int i = 0; i < rows; i++)
        a[i] = e->a ? c->low + (low + i) * c->low_width : c->x + c->order[g->first + row + i] * c->ldx;
    float_columns(rows, e->format, a, e->rank, numbers, panels, e->a != NULL, y);
}

static void column_panels(const low_rank_call *c, const row_group *g, int64_t part, int64_t first, int64_t panels) {
    const low_rank_part *e = entry_of(c, g, part);
    const int64_t left = e->out - first * TILE, whole = left / TILE < panels ? left / TILE : panels, rest = left - whole * TILE;
    for (int64_t row = 0; row < g->rows; row += MAX_TILE_ROWS) {
        const int rows = g->rows - row < MAX_TILE_ROWS ? (int)(g->rows - row) : MAX_TILE_ROWS;
        float *y[MAX_TILE_ROWS], *out[MAX_TILE_ROWS], last[MAX_TILE_ROWS][TILE] = {0};
        for (int i = 0; i < rows; i++)
            y[i] = c->y + c->order[g->first + row + i] * c->ldy + e->column + first * TILE;
        columns_of_tile(c, g, row, rows, part, first, whole, y);
        if (whole == panels) continue;
        for (int i = 0; i < rows; i++)  // a panel that ends behind the columns
            out[i] = memcpy(last[i], y[i] + whole * TILE, (size_t)rest * sizeof(float));
        columns_of_tile(c, g, row, rows, part, first + whole, 1, out);
        for (int i = 0; i < rows; i++) memcpy(y[i] + whole * TILE, last[i], (size_t)rest * sizeof(float));
    }
}

static void group_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const row_group *g = c->groups + index;
    if (c->has_whole) round_rows(c, g->first, g->rows);
    for (int64_t part = 0; part < c->parts; part++) {
        const low_rank_part *e = entry_of(c, g, part);
        if (!e->rank) continue;
        for (int64_t panel = 0; e->a && panel < panels_of(e->rank); panel++) low_panel(c, g, part, panel);
        const int64_t panels = panels_of(e->out);
        for (int64_t first = 0; first < panels; first += UNIT_PANELS)
            column_panels(c, g, part, first, panels - first < UNIT_PANELS ? panels - first : UNIT_PANELS);
    }
}

static void round_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const int64_t first = index * MAX_TILE_ROWS, left = c->count - first;
    round_rows(c, first, left < MAX_TILE_ROWS ? left : MAX_TILE_ROWS);
}

static void low_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    low_panel(c, c->groups + u.group, u.part, u.first);
}

static void column_unit(void *context, int64_t index) {
    const low_rank_call *c = context;
    const panel_unit u = c->units[index];
    column_panels(c, c->groups + u.group, u.part, u.first, u.panels);
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
            const low_rank_part *e = entry_of(c, c->groups + g, part);
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

// The rows of each slot in groups of at most so many. Returns how many groups. ends: of the slots' rows.
static int64_t list_groups(const int32_t *ends, int64_t num_slots, int64_t most_rows, row_group *groups) {
    int64_t count = 0;
    for (int64_t s = 0, first = 0; s < num_slots; first = ends[s++])
        for (int64_t row = first; row < ends[s]; row += most_rows)
            groups[count++] = (row_group){(int32_t)s, (int32_t)row, (int32_t)(ends[s] - row < most_rows ? ends[s] - row : most_rows)};
    return count;
}

// What low products need: their width, and whether some are of whole numbers.
static void measure_low(low_rank_call *c, int64_t num_groups) {
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t part = 0; part < c->parts; part++) {
            const low_rank_part *e = entry_of(c, c->groups + g, part);
            if (!e->rank || !e->a) continue;
            const int64_t width = panels_of(e->rank) * TILE;
            c->low_width = width > c->low_width ? width : c->low_width;
            c->has_whole |= e->format == WHOLE;
        }
}

static int64_t bytes_of_whole(const whole_rows *rows, int64_t count) {
    return count * (rows->width * (int64_t)sizeof(int16_t) + rows->width / rows->together * (int64_t)sizeof(float));
}

static char *place_whole(whole_rows *rows, int64_t count, char *memory) {
    rows->scales = (float *)memory;
    rows->codes = (int16_t *)(rows->scales + count * (rows->width / rows->together));
    return memory + bytes_of_whole(rows, count);
}

// Returns 0, or -1 when there is no memory.
static int make_room(low_rank_call *c) {
    static _Thread_local room room_of_low;
    const int64_t lows = c->count * c->parts;
    int64_t bytes = lows * c->low_width * (int64_t)sizeof(float);
    if (c->has_whole) {
        c->whole_x = (whole_rows){.width = STRETCHES_OF(c->in) * STRETCH_K, .together = STRETCH_K};
        c->whole_low = (whole_rows){.width = c->low_width, .together = TILE};
        bytes += bytes_of_whole(&c->whole_x, c->count) + bytes_of_whole(&c->whole_low, lows);
    }
    char *memory = at_least(&room_of_low, (size_t)bytes + 64);
    if (!memory) return -1;
    c->low = (float *)memory;
    if (c->has_whole) {
        memory += lows * c->low_width * (int64_t)sizeof(float);
        place_whole(&c->whole_low, lows, place_whole(&c->whole_x, c->count, memory));
    }
    return 0;
}

// Returns 0, or -1 when there is no memory.
static int divide_panels(low_rank_call *c, int64_t num_groups) {
    static _Thread_local room room_of_units;
    const int64_t num_low = list_units(c, num_groups, 0, NULL), num_columns = list_units(c, num_groups, 1, NULL);
    panel_unit *units = at_least(&room_of_units, (size_t)(num_low > num_columns ? num_low : num_columns) * sizeof *units + 64);
    if (!units) return -1;
    c->units = units;
    if (c->has_whole) parallel_units(round_unit, c, (c->count + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS);
    list_units(c, num_groups, 0, units);
    parallel_units(low_unit, c, num_low);
    list_units(c, num_groups, 1, units);
    parallel_units(column_unit, c, num_columns);
    return 0;
}

int ratoon_add_low_rank(const float *x, int64_t ldx, int64_t rows, int64_t in, const low_rank_part *entries, int64_t num_slots,
                        int64_t parts, const int32_t *slots, float *y, int64_t ldy) {
    static _Thread_local room room_of_rows;
    int32_t *order = at_least(&room_of_rows, (size_t)(rows + num_slots) * sizeof(int32_t) +
                                                 (size_t)(rows + num_slots) * sizeof(row_group));
    if (!order) return -1;
    int32_t *ends = order + rows;
    row_group *groups = (row_group *)(ends + num_slots);
    const int64_t count = order_rows(slots, rows, num_slots, order, ends), wanted = GROUPS_PER_THREAD * thread_count();
    if (!count) return 0;
    const int64_t most_rows = count < wanted * MOST_GROUP_ROWS ? MAX_TILE_ROWS : MOST_GROUP_ROWS;
    int64_t num_groups = list_groups(ends, num_slots, most_rows, groups);
    if (num_groups < wanted && count >= wanted * LEAST_GROUP_ROWS)  // rows of few slots: a group for each of the units
        num_groups = list_groups(ends, num_slots, (count + wanted - 1) / wanted, groups);
    low_rank_call c = {.x = x, .y = y, .ldx = ldx, .ldy = ldy, .in = in, .parts = parts, .entries = entries,
                       .order = order, .groups = groups, .count = count};
    measure_low(&c, num_groups);
    if (make_room(&c)) return -1;
    if (num_groups < wanted) return divide_panels(&c, num_groups);
    parallel_units(group_unit, &c, num_groups);
    return 0;
}

int64_t ratoon_low_rank_bytes(int64_t columns, int64_t depth, int64_t format) {
    return panels_of(columns) * panel_bytes(format, depth);
}

// `size`: of a number in bytes.
INLINE void pack_panels(int size, const char *matrix, int64_t columns, int64_t depth, char *packed) {
    for (int64_t first = 0; first < columns; first += TILE, packed += depth * TILE * size) {
        const int64_t left = columns - first, count = left < TILE ? left : TILE;
        const char *from = matrix + first * depth * size;
        if (count < TILE) memset(packed, 0, (size_t)(depth * TILE * size));
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < count; j++)
                memcpy(packed + (k * TILE + j) * size, from + (j * depth + k) * size, (size_t)size);
    }
}

int ratoon_pack_low_rank(const void *matrix, int64_t columns, int64_t depth, int64_t format, void *packed) {
    if (format == WHOLE) return pack_whole(matrix, columns, depth, packed);
    if (format == BF16)
        pack_panels(2, matrix, columns, depth, packed);
    else
        pack_panels(4, matrix, columns, depth, packed);
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
