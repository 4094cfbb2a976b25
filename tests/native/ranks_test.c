// Ranks, here threads over one memory: sums in the order of ranks, to the bit, and columns side by side; and a rank that does
// not come.
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
    }
    check_gather(4, 2, 5);  // the last rank has no column
    check_absence();
    void *memory = new_memory(1);
    expect_true(ratoon_open_group(memory, 1, 1, SECOND) == NULL, "a rank that is none of the group is refused", 0, 0);
    free(memory);
}
