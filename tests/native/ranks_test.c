// Ranks, here threads over one memory: sums in the order of ranks, to the bit, columns side by side, and rows that go from each
// to each; and a rank that does not come.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"

#define MOST_RANKS 4
#define SECOND 1000000000ll
#define CALLS 4  // more than there are buffers

typedef struct {
    void *memory;
    int64_t rank, world, limit;
    // Of a sum: [CALLS][count] in place. Of a concatenation: x [rows, width] with rows of ldx floats, y [rows, total].
    float *x, *y;
    int64_t count, rows, ldx, total;
    // Of an exchange: counts [world, world] of rows of `total` floats
    const int64_t *counts;
    int failed;
} rank_work;

static void *sum(void *argument) {
    rank_work *w = argument;
    struct rank_group *group = ratoon_open_group(w->memory, w->rank, w->world, w->limit);
    for (int64_t call = 0; call < CALLS; call++) w->failed |= ratoon_all_reduce(group, w->x + call * w->count, w->count);
    ratoon_close_group(group);
    return NULL;
}

static void *gather(void *argument) {
    rank_work *w = argument;
    struct rank_group *group = ratoon_open_group(w->memory, w->rank, w->world, w->limit);
    for (int call = 0; call < CALLS; call++)
        w->failed |= ratoon_all_gather(group, w->x, w->ldx, w->rows, w->total, w->y);
    ratoon_close_group(group);
    return NULL;
}

static void *exchange(void *argument) {
    rank_work *w = argument;
    struct rank_group *group = ratoon_open_group(w->memory, w->rank, w->world, w->limit);
    for (int call = 0; call < CALLS; call++) w->failed |= ratoon_all_to_all(group, w->x, w->total, w->counts, w->y);
    ratoon_close_group(group);
    return NULL;
}

static void *new_memory(int64_t world) {
    void *memory = aligned_alloc(128, (size_t)ratoon_group_bytes(world));
    memset(memory, 0, (size_t)ratoon_group_bytes(world));
    return memory;
}

static void run_ranks(rank_work *ranks, int64_t world, void *(*work)(void *)) {
    pthread_t threads[MOST_RANKS];
    void *memory = new_memory(world);
    for (int64_t r = 0; r < world; r++) {
        ranks[r].memory = memory;
        ranks[r].rank = r;
        ranks[r].world = world;
        ranks[r].limit = 60 * SECOND;
        pthread_create(&threads[r], NULL, work, &ranks[r]);
    }
    for (int64_t r = 0; r < world; r++) pthread_join(threads[r], NULL);
    for (int64_t r = 0; r < world; r++) expect_true(!ranks[r].failed, "a call of a rank has ended", r, world);
    free(memory);
}

static void check_sum(int64_t world, int64_t count) {
    rank_work ranks[MOST_RANKS] = {{0}};
    float *expected = malloc((size_t)(CALLS * count) * sizeof(float) + 1);
    for (int64_t r = 0; r < world; r++) {
        ranks[r].count = count;
        ranks[r].x = random_floats(CALLS * count, 1);
        for (int64_t i = 0; i < CALLS * count; i++) expected[i] = r ? expected[i] + ranks[r].x[i] : ranks[r].x[i];
    }
    run_ranks(ranks, world, sum);
    int64_t wrong = 0;
    for (int64_t r = 0; r < world; r++)
        for (int64_t i = 0; i < CALLS * count; i++) wrong += !same_bits(ranks[r].x[i], expected[i]);
    expect_true(wrong == 0, "every rank has the sum in the order of ranks", world, count);
    free(expected);
    release_all();
}

static void check_gather(int64_t world, int64_t rows, int64_t total) {
    rank_work ranks[MOST_RANKS] = {{0}};
    const int64_t each = (total + world - 1) / world;
    for (int64_t r = 0; r < world; r++) {
        const int64_t left = total - r * each, width = left < 0 ? 0 : left < each ? left : each;
        ranks[r] = (rank_work){.rows = rows, .ldx = width + r, .total = total};
        ranks[r].x = random_floats(rows * ranks[r].ldx, 1);
        ranks[r].y = guarded_floats(rows * total);
    }
    run_ranks(ranks, world, gather);
    int64_t wrong = 0;
    for (int64_t r = 0; r < world; r++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < total; j++) {
                const rank_work *owner = &ranks[j / each];
                wrong += !same_bits(ranks[r].y[i * total + j], owner->x[i * owner->ldx + j % each]);
            }
    expect_true(wrong == 0, "every rank has all columns", world, total);
    release_all();
}

// Rows that a rank has before those for `target`, or that it gets before those from `source`.
static int64_t rows_ahead(const int64_t *counts, int64_t world, int64_t source, int64_t target, int is_sent) {
    int64_t rows = 0;
    for (int64_t i = 0; i < (is_sent ? target : source); i++) rows += counts[is_sent ? source * world + i : i * world + target];
    return rows;
}

static void check_exchange(int64_t world, int64_t most_rows, int64_t width) {
    rank_work ranks[MOST_RANKS] = {{0}};
    int64_t counts[MOST_RANKS * MOST_RANKS];
    for (int64_t i = 0; i < world * world; i++) counts[i] = random_between(0, most_rows);
    for (int64_t r = 0; r < world; r++) {
        ranks[r] = (rank_work){.total = width, .counts = counts};
        ranks[r].x = random_floats(rows_ahead(counts, world, r, world, 1) * width + 1, 1);
        ranks[r].y = guarded_floats(rows_ahead(counts, world, world, r, 0) * width);
    }
    run_ranks(ranks, world, exchange);
    int64_t wrong = 0;
    for (int64_t s = 0; s < world; s++)
        for (int64_t t = 0; t < world; t++) {
            const float *sent = ranks[s].x + rows_ahead(counts, world, s, t, 1) * width;
            const float *taken = ranks[t].y + rows_ahead(counts, world, s, t, 0) * width;
            for (int64_t i = 0; i < counts[s * world + t] * width; i++) wrong += !same_bits(sent[i], taken[i]);
        }
    expect_true(wrong == 0, "every rank has the rows for it in the order of ranks", world, width);
    release_all();
}

// The first of two ranks waits in vain; the other one comes afterwards.
static void check_absence(void) {
    rank_work rank = {.memory = new_memory(2), .world = 2, .limit = SECOND / 20, .count = 10, .x = random_floats(10 * CALLS, 1)};
    sum(&rank);
    expect_true(rank.failed, "a rank that waits in vain gives up", 0, 0);
    rank.rank = 1;
    rank.failed = 0;
    rank.limit = 600 * SECOND;
    sum(&rank);
    expect_true(rank.failed, "a rank that comes too late is told at once", 0, 0);
    free(rank.memory);
    release_all();
}

void check_ranks(void) {
    const int64_t counts[] = {1, 31, 4097, 8192, 8193, random_between(8194, 70000), (1 << 18) + 5};
    for (int64_t world = 1; world <= MOST_RANKS; world++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) check_sum(world, counts[i]);
        check_gather(world, 1, 1000);
        check_gather(world, 3, random_between(world, 20000));
        check_gather(world, 70, 4 * 4099 + 1);      // rows in several calls' worth of a buffer
        check_gather(world, 2, 4 * (1 << 18) + 7);  // a row that no buffer holds
        check_exchange(world, 0, 8);
        check_exchange(world, 3, 5);
        check_exchange(world, 40, random_between(1, 3000));
        check_exchange(world, 2, (1 << 18) + 3);  // parts that begin in the midst of a buffer
    }
    check_gather(4, 2, 5);  // the last rank has no column
    check_absence();
    void *memory = new_memory(1);
    expect_true(ratoon_open_group(memory, 1, 1, SECOND) == NULL, "a rank that is none of the group is refused", 0, 0);
    free(memory);
}
