// Sums, concatenations and exchanges of rows over ranks, which are processes of one host, through memory that all of them have
// mapped.
//
// Every rank has a line of its own in that memory and two buffers. A call is: write to the own buffer, announce it, wait until
// all others have announced theirs, read all buffers. Calls take turns between the two buffers, so that one wait is enough: a
// rank that writes for call k + 2 has seen all ranks announce call k + 1, and so all of them have read what call k left.
//
// A sum adds the ranks' numbers in the order of ranks, for each element by itself: it has the same bits on every rank, in any
// batch, and however a call is cut. Small sums are made by every rank in full. Of larger ones each rank makes a part, and the
// others take it from there: a rank then reads each number twice instead of once for every rank, and waits twice.
//
// A rank that waits spins, lets other threads run, and then sleeps on the other's line (a futex). It does not wait forever: when
// the time of the group is over, it marks the group as broken, and all ranks' calls fail from then on.
#define _GNU_SOURCE  // syscall
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "spin.h"
#include "threads.h"

#define MAX_RANKS 64
#define WAIT_SPIN 1000000        // nanoseconds
#define LONGEST_SLEEP 100000000  // then the clock and the group are looked at
#define BUFFER_FLOATS ((int64_t)1 << 18)
#define SMALL_SUM 8192    // floats: more are made in parts
#define UNIT_FLOATS 4096  // of a copy or a sum that threads share
#define TILE_FLOATS 512

typedef struct {
    _Alignas(128) atomic_uint announced;  // the number of the rank's last announcement
    atomic_uint sleepers;                 // ranks that sleep until it changes
    _Alignas(128) atomic_uint broken;
} rank_line;

struct rank_group {
    rank_line *lines;  // [world]
    float *buffers;    // [world][2][BUFFER_FLOATS]
    int64_t rank, world, limit;
    uint32_t announced;  // by this rank
    int turn;            // which of the two buffers is next
};

static int64_t lines_bytes(int64_t world) { return world * (int64_t)sizeof(rank_line); }

int64_t ratoon_group_bytes(int64_t world) { return lines_bytes(world) + world * 2 * BUFFER_FLOATS * (int64_t)sizeof(float); }

struct rank_group *ratoon_open_group(void *memory, int64_t rank, int64_t world, int64_t limit) {
    if (world < 1 || world > MAX_RANKS || rank < 0 || rank >= world) return NULL;
    struct rank_group *group = malloc(sizeof *group);
    if (group == NULL) return NULL;
    float *buffers = (float *)((char *)memory + lines_bytes(world));
    *group = (struct rank_group){.lines = memory, .buffers = buffers, .rank = rank, .world = world, .limit = limit};
    return group;
}

void ratoon_close_group(struct rank_group *group) { free(group); }

static float *buffer_of(const struct rank_group *g, int64_t rank, int turn) {
    return g->buffers + (2 * rank + turn) * BUFFER_FLOATS;
}

// ---- waiting ----

static void sleep_until_changed(atomic_uint *word, uint32_t value) {
    struct timespec longest = {.tv_nsec = LONGEST_SLEEP};
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, value, &longest, NULL, 0);  // not the private form: other processes wake
#else
    (void)word, (void)value;
    longest.tv_nsec = YIELD_AFTER;
    nanosleep(&longest, NULL);
#endif
}

static void wake_all(atomic_uint *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static int is_broken(const struct rank_group *g) {
    return atomic_load_explicit(&g->lines[0].broken, memory_order_relaxed) != 0;
}

static int break_group(struct rank_group *g) {
    atomic_store(&g->lines[0].broken, 1);
    for (int64_t r = 0; r < g->world; r++) wake_all(&g->lines[r].announced);
    return -1;
}

// Numbers go round: a rank is ahead of this one or at the same announcement.
static int has_announced(const rank_line *line, uint32_t number) {
    return (int32_t)(atomic_load_explicit(&line->announced, memory_order_acquire) - number) >= 0;
}

static int wait_for_rank(struct rank_group *g, rank_line *line) {
    struct spin spin = {0};
    int64_t deadline = 0;
    while (!has_announced(line, g->announced)) {
        if (is_broken(g)) return -1;
        if (keep_spinning(&spin, WAIT_SPIN)) continue;
        if (deadline == 0) deadline = nanoseconds() + g->limit;
        // Count oneself first, look second: either the other rank sees a sleeper and wakes it, or its number has changed.
        atomic_fetch_add(&line->sleepers, 1);
        uint32_t seen = atomic_load(&line->announced);
        if ((int32_t)(seen - g->announced) < 0) sleep_until_changed(&line->announced, seen);
        atomic_fetch_sub(&line->sleepers, 1);
        if (nanoseconds() > deadline && !has_announced(line, g->announced)) return break_group(g);
    }
    return 0;
}

// Announces what this rank has written, and waits until all ranks have done as much. Returns 0, or -1: the group is broken.
static int meet(struct rank_group *g) {
    if (is_broken(g)) return -1;
    rank_line *own = &g->lines[g->rank];
    atomic_store(&own->announced, ++g->announced);
    if (atomic_load(&own->sleepers)) wake_all(&own->announced);
    for (int64_t i = 1; i < g->world; i++)
        if (wait_for_rank(g, &g->lines[(g->rank + i) % g->world])) return -1;
    return 0;
}

// ---- sums ----

typedef struct {
    const float *sources[MAX_RANKS];
    int64_t world;
    float *y;
    int64_t count;
} sum_call;

static void sum_unit(void *context, int64_t unit) {
    const sum_call *c = context;
    const int64_t end = (unit + 1) * UNIT_FLOATS < c->count ? (unit + 1) * UNIT_FLOATS : c->count;
    for (int64_t start = unit * UNIT_FLOATS; start < end; start += TILE_FLOATS) {
        const int64_t width = end - start < TILE_FLOATS ? end - start : TILE_FLOATS;
        float tile[TILE_FLOATS];
        memcpy(tile, c->sources[0] + start, (size_t)width * sizeof(float));
        for (int64_t r = 1; r < c->world; r++) {
            const float *source = c->sources[r] + start;
            for (int64_t i = 0; i < width; i++) tile[i] += source[i];
        }
        memcpy(c->y + start, tile, (size_t)width * sizeof(float));
    }
}

static int64_t units_of(int64_t count) { return (count + UNIT_FLOATS - 1) / UNIT_FLOATS; }

// y = the sum of all ranks' buffers of this turn, from `first` on. A source may be y itself.
static void sum_buffers(const struct rank_group *g, int64_t first, float *y, int64_t count) {
    sum_call c = {.world = g->world, .y = y, .count = count};
    for (int64_t r = 0; r < g->world; r++) c.sources[r] = buffer_of(g, r, g->turn) + first;
    parallel_units(sum_unit, &c, units_of(count));
}

typedef struct {
    const float *x;
    float *y;
    int64_t count;
} copy_call;

static void copy_unit(void *context, int64_t unit) {
    const copy_call *c = context;
    const int64_t start = unit * UNIT_FLOATS, left = c->count - start;
    memcpy(c->y + start, c->x + start, (size_t)(left < UNIT_FLOATS ? left : UNIT_FLOATS) * sizeof(float));
}

static void copy_floats(const float *x, float *y, int64_t count) {
    copy_call c = {x, y, count};
    parallel_units(copy_unit, &c, units_of(count));
}

// The elements of a sum that a rank makes: whole lines of the cache, so that no two ranks write to one.
static int64_t part_start(const struct rank_group *g, int64_t rank, int64_t count) {
    const int64_t each = ((count + g->world - 1) / g->world + 31) / 32 * 32;
    return rank * each < count ? rank * each : count;
}

static int reduce_in_parts(struct rank_group *g, float *x, int64_t count) {
    const int64_t first = part_start(g, g->rank, count), end = part_start(g, g->rank + 1, count);
    sum_buffers(g, first, buffer_of(g, g->rank, g->turn) + first, end - first);
    if (meet(g)) return -1;
    for (int64_t r = 0; r < g->world; r++) {
        const int64_t start = part_start(g, r, count);
        copy_floats(buffer_of(g, r, g->turn) + start, x + start, part_start(g, r + 1, count) - start);
    }
    return 0;
}

int ratoon_all_reduce(struct rank_group *g, float *x, int64_t count) {
    for (int64_t done = 0; done < count;) {
        const int64_t now = count - done < BUFFER_FLOATS ? count - done : BUFFER_FLOATS;
        copy_floats(x + done, buffer_of(g, g->rank, g->turn), now);
        if (meet(g)) return -1;
        if (now <= SMALL_SUM)
            sum_buffers(g, 0, x + done, now);
        else if (reduce_in_parts(g, x + done, now))
            return -1;
        g->turn ^= 1;
        done += now;
    }
    return 0;
}

// ---- concatenations ----

typedef struct {
    const float *x;
    int64_t ldx;
    float *y;
    int64_t ldy, rows, width;
} rows_call;

static void rows_unit(void *context, int64_t unit) {
    const rows_call *c = context;
    const int64_t pieces = units_of(c->width), row = unit / pieces, start = unit % pieces * UNIT_FLOATS;
    const int64_t left = c->width - start;
    memcpy(c->y + row * c->ldy + start, c->x + row * c->ldx + start,
           (size_t)(left < UNIT_FLOATS ? left : UNIT_FLOATS) * sizeof(float));
}

static void copy_rows(const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, int64_t width) {
    if (rows <= 0 || width <= 0) return;
    rows_call c = {x, ldx, y, ldy, rows, width};
    parallel_units(rows_unit, &c, rows * units_of(width));
}

static int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

// The columns of a rank, of `each`, that are in a buffer of `columns` from `first` on; the last ranks may have fewer, or none.
static int64_t columns_of(int64_t rank, int64_t each, int64_t first, int64_t columns, int64_t total) {
    return at_most(at_most(columns, each - first), total - rank * each - first);
}

int ratoon_all_gather(struct rank_group *g, const float *x, int64_t ldx, int64_t rows, int64_t total, float *y) {
    const int64_t each = (total + g->world - 1) / g->world;
    // All ranks cut a call alike, by the widest part.
    const int64_t columns = at_most(each, BUFFER_FLOATS), height = columns ? BUFFER_FLOATS / columns : rows;
    for (int64_t row = 0; row < rows; row += height) {
        const int64_t now = at_most(height, rows - row);
        for (int64_t first = 0; first < each; first += columns) {
            const float *own = x + row * ldx + first;
            const int64_t own_width = columns_of(g->rank, each, first, columns, total);
            copy_rows(own, ldx, buffer_of(g, g->rank, g->turn), columns, now, own_width);
            if (meet(g)) return -1;
            for (int64_t r = 0; r < g->world; r++) {
                const float *source = r == g->rank ? own : buffer_of(g, r, g->turn);
                float *target = y + row * total + r * each + first;
                copy_rows(source, r == g->rank ? ldx : columns, target, total, now,
                          columns_of(r, each, first, columns, total));
            }
            g->turn ^= 1;
        }
    }
    return 0;
}

// ---- exchanges ----

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

// The rows that a rank writes to its buffer for the ranks before `target`. It keeps those for itself.
static int64_t rows_before(const int64_t *counts, int64_t world, int64_t source, int64_t target) {
    int64_t rows = 0;
    for (int64_t t = 0; t < target; t++) rows += t == source ? 0 : counts[source * world + t];
    return rows;
}

// Copies what a buffer, which has the numbers of its rank's rows from `done` on, holds of those from `first` to `end`.
static void take_part(const float *buffer, int64_t done, int64_t first, int64_t end, float *y) {
    const int64_t from = larger_of(first, done), until = at_most(end, done + BUFFER_FLOATS);
    if (from < until) copy_floats(buffer + from - done, y + from - first, until - from);
}

int ratoon_all_to_all(struct rank_group *g, const float *x, int64_t width, const int64_t *counts, float *y) {
    const int64_t world = g->world, rank = g->rank, own = counts[rank * world + rank] * width;
    // Rows for this rank itself are in the midst of x: those for the ranks behind it are written as if they were not there.
    const int64_t before = rows_before(counts, world, rank, rank) * width, sent = rows_before(counts, world, rank, world) * width;
    int64_t longest = 0;  // all ranks cut a call alike, by the one that sends most
    for (int64_t r = 0; r < world; r++) longest = larger_of(longest, rows_before(counts, world, r, world) * width);
    for (int64_t done = 0; done < longest; done += BUFFER_FLOATS) {
        const int64_t end = at_most(done + BUFFER_FLOATS, sent), middle = at_most(larger_of(before, done), end);
        float *buffer = buffer_of(g, rank, g->turn);
        if (done < middle) copy_floats(x + done, buffer, middle - done);
        if (middle < end) copy_floats(x + own + middle, buffer + middle - done, end - middle);
        if (meet(g)) return -1;
        float *to = y;
        for (int64_t r = 0; r < world; r++) {
            const int64_t count = counts[r * world + rank] * width, first = rows_before(counts, world, r, rank) * width;
            if (r != rank) take_part(buffer_of(g, r, g->turn), done, first, first + count, to);
            to += count;
        }
        g->turn ^= 1;
    }
    for (int64_t r = 0; r < rank; r++) y += counts[r * world + rank] * width;
    copy_floats(x + before, y, own);
    return 0;
}
