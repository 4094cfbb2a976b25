// The pool: each unit runs once, whatever the number of units, of threads and of callers.
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "checking.h"
#include "kernels.h"
#include "threads.h"

#define MOST_UNITS 1000
#define CALLERS 2

typedef struct {
    atomic_int runs[MOST_UNITS];
    int64_t outside;  // units that do not exist
    int64_t units;
} tally;

static void count(void *context, int64_t unit) {
    tally *t = context;
    if (unit < 0 || unit >= t->units)
        __atomic_fetch_add(&t->outside, 1, __ATOMIC_RELAXED);
    else
        atomic_fetch_add(&t->runs[unit], 1);
}

static int run_units(int64_t units) {
    tally *t = calloc(1, sizeof(tally));
    t->units = units;
    parallel_units(count, t, units);
    int wrong = t->outside != 0;
    for (int64_t unit = 0; unit < MOST_UNITS; unit++) wrong |= t->runs[unit] != (unit < units);
    free(t);
    return wrong;
}

static void *call_often(void *argument) {
    intptr_t wrong = 0;
    for (int64_t units = 1; units <= 60; units++) wrong += run_units(units);
    (void)argument;
    return (void *)wrong;
}

void check_threads(void) {
    int threads = thread_count();
    for (int64_t units = 0; units <= 40; units++) expect_true(run_units(units) == 0, "each unit runs once", threads, units);
    expect_true(run_units(MOST_UNITS) == 0, "each of many units runs once", threads, MOST_UNITS);
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, call_often, NULL);
    for (int i = 0; i < CALLERS; i++) {
        void *wrong;
        pthread_join(callers[i], &wrong);
        expect_true(wrong == NULL, "each unit runs once when two threads call", threads, i);
    }
    for (int more = 1; more <= 5; more++) {  // fewer again at the end
        expect_true(ratoon_set_threads(more) == more && thread_count() == more, "the number of threads is as asked", more, 0);
        expect_true(run_units(97) == 0, "each unit runs once after the number of threads changed", more, 0);
    }
    ratoon_set_threads(threads);
}
