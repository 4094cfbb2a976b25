// The pool behind parallel_units.
//
// Each thread of a call has a share of the units, one run of them, so that it finds the same part of a weight in its caches
// and its memory from call to call. It takes them one by one from its own counter, and then those of other threads: a core
// that is slowed down by other load keeps less of its share. Every thread writes to cache lines of its own. Those that all
// read are written by the caller alone, once when a call opens and once when it closes: the cost of a call hardly grows with
// the number of threads.
//
// An idle thread spins for a moment (the next call, or the end of the last unit, usually follows within microseconds), gives
// its core to other threads that wait for one, and then sleeps: an idle engine uses no CPU time, and a thread that lost its
// core to another process can run on the core of one that sleeps.
#define _POSIX_C_SOURCE 200809L  // clock_gettime
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "spin.h"

#define MAX_THREADS 128
#define WORKER_SPIN 1000000  // nanoseconds
#define CALLER_SPIN 200000
#define OWN_LINE _Alignas(128)  // processors fetch cache lines in pairs
#define COUNT_BITS 24
#define MOST_UNITS ((int64_t)1 << COUNT_BITS)

// Of one thread; the caller has the first.
typedef struct {
    // The call in the upper bits, and how many units of this thread's share were taken in it. A value of an earlier call
    // means none: so nothing has to be cleared for a call, and the share of a thread that is not there yet can be taken.
    OWN_LINE atomic_uint_fast64_t taken;
    OWN_LINE atomic_uint_fast64_t inside;  // the call that the thread works in; 0: none
} seat;

static struct {
    // Odd: the number of a call that may be joined. Even: none may be.
    OWN_LINE atomic_uint_fast64_t call;
    unit_body body;
    void *context;
    int64_t units;
    atomic_int sharers;  // threads that have a share; the caller included
    OWN_LINE atomic_int sleeping;  // workers
    atomic_int caller_sleeps;
    OWN_LINE pthread_mutex_t lock;
    pthread_cond_t wake;  // workers: there is a call to join
    pthread_cond_t done;  // the caller: no worker is inside any more
    int threads;          // the caller included
    int started;
    seat seats[MAX_THREADS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER, .threads = 1};

// Takes a unit of a thread's share of `size` units. Returns its place there, or -1 when all are taken.
static inline int64_t take_unit(seat *seat, uint64_t call, int64_t size) {
    uint64_t before = atomic_load_explicit(&seat->taken, memory_order_relaxed);
    for (;;) {
        int64_t taken = before >> COUNT_BITS == call ? (int64_t)(before & (MOST_UNITS - 1)) : 0;
        if (taken >= size) return -1;
        uint64_t after = call << COUNT_BITS | (uint64_t)(taken + 1);
        if (atomic_compare_exchange_weak_explicit(&seat->taken, &before, after, memory_order_relaxed, memory_order_relaxed))
            return taken;
    }
}

// The thread's own share first, then what is left of the others'.
static void work(int index, uint64_t call) {
    const int sharers = atomic_load_explicit(&pool.sharers, memory_order_relaxed);
    const int64_t units = pool.units;
    for (int i = 0, owner = index; i < sharers; i++, owner = owner + 1 < sharers ? owner + 1 : 0) {
        const int64_t first = units * owner / sharers, size = units * (owner + 1) / sharers - first;
        for (int64_t place; (place = take_unit(&pool.seats[owner], call, size)) >= 0;) pool.body(pool.context, first + place);
    }
}

static void *worker(void *argument) {
    const int index = (int)(intptr_t)argument;
    seat *own = &pool.seats[index];
    uint64_t seen = 0;
    for (;;) {
        struct spin spin = {0};
        uint64_t call;
        while ((call = atomic_load_explicit(&pool.call, memory_order_acquire)) == seen || call % 2 == 0) {
            if (keep_spinning(&spin, WORKER_SPIN)) continue;
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while ((call = atomic_load(&pool.call)) == seen || call % 2 == 0) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = call;
        if (index >= atomic_load_explicit(&pool.sharers, memory_order_relaxed)) continue;  // of this call or of a later one
        // Announce first, look second: either the caller sees this worker and waits, or this worker sees the call closed.
        atomic_store(&own->inside, call);
        if (atomic_load(&pool.call) == call && index < atomic_load_explicit(&pool.sharers, memory_order_relaxed))
            work(index, call);
        atomic_store(&own->inside, 0);
        if (atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return NULL;
}

int thread_count(void) { return pool.threads; }

// Not safe while a parallel_units call runs: set once, at start-up, by the thread that computes.
int ratoon_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (pool.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.started + 1)) != 0) break;
        pthread_detach(thread);
        pool.started++;
    }
    pool.threads = pool.started + 1 < threads ? pool.started + 1 : threads;
    return pool.threads;
}

static int workers_inside(void) {
    const int sharers = atomic_load_explicit(&pool.sharers, memory_order_relaxed);
    for (int i = 1; i < sharers; i++)
        if (atomic_load(&pool.seats[i].inside)) return 1;
    return 0;
}

// Only workers that joined are waited for: one that lost its core before is not needed.
static void wait_for_workers(void) {
    struct spin spin = {0};
    while (workers_inside()) {
        if (keep_spinning(&spin, CALLER_SPIN)) continue;
        pthread_mutex_lock(&pool.lock);
        atomic_store(&pool.caller_sleeps, 1);
        while (workers_inside()) pthread_cond_wait(&pool.done, &pool.lock);
        atomic_store(&pool.caller_sleeps, 0);
        pthread_mutex_unlock(&pool.lock);
    }
}

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;  // engines in several threads of a process take turns

void parallel_units(unit_body body, void *context, int64_t units) {
    if (pool.threads == 1 || units <= 1 || units >= MOST_UNITS) {
        for (int64_t unit = 0; unit < units; unit++) body(context, unit);
        return;
    }
    pthread_mutex_lock(&one_caller);
    pool.body = body;
    pool.context = context;
    pool.units = units;
    atomic_store_explicit(&pool.sharers, units < pool.threads ? (int)units : pool.threads, memory_order_relaxed);
    uint64_t call = atomic_load_explicit(&pool.call, memory_order_relaxed) + 1;
    atomic_store(&pool.call, call);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work(0, call);
    atomic_store(&pool.call, call + 1);
    wait_for_workers();
    pthread_mutex_unlock(&one_caller);
}
