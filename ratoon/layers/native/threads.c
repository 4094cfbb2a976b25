// The pool behind parallel_units. Units are handed out by an atomic counter, so that a core which is slowed down by
// something else takes fewer of them. Idle workers spin for a moment (the next call usually follows within microseconds)
// and then sleep, so that an idle engine costs nothing.
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sched.h>
#endif

#define MAX_THREADS 128
#define SPINS_BEFORE_SLEEP 500000

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_uint_fast64_t generation;  // counts calls; a worker that sees a new value may join
    atomic_uint_fast64_t open;        // the call that may be joined now; 0: none
    atomic_int joined;                // workers inside the open call
    atomic_int sleeping;
    unit_body body;
    void *context;
    int64_t units;
    atomic_int_fast64_t next_unit;
    int threads;  // the caller included
    int started;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .threads = 1};

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

static void work(void) {
    for (;;) {
        int64_t unit = atomic_fetch_add_explicit(&pool.next_unit, 1, memory_order_relaxed);
        if (unit >= pool.units) return;
        pool.body(pool.context, unit);
    }
}

static void *worker(void *argument) {
    const int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&pool.generation, memory_order_acquire) == seen) {
            if (++spins < SPINS_BEFORE_SLEEP) {
                relax();
                continue;
            }
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load_explicit(&pool.generation, memory_order_acquire);
        // Announce first, look second: either the caller sees this worker and waits, or this worker sees the call closed.
        atomic_fetch_add(&pool.joined, 1);
        if (atomic_load(&pool.open) == seen && index < pool.threads) work();
        atomic_fetch_sub_explicit(&pool.joined, 1, memory_order_release);
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

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;  // engines in several threads of a process take turns

void parallel_units(unit_body body, void *context, int64_t units) {
    if (pool.threads == 1 || units == 1) {
        for (int64_t unit = 0; unit < units; unit++) body(context, unit);
        return;
    }
    pthread_mutex_lock(&one_caller);
    pool.body = body;
    pool.context = context;
    pool.units = units;
    atomic_store_explicit(&pool.next_unit, 0, memory_order_relaxed);
    uint64_t generation = atomic_load_explicit(&pool.generation, memory_order_relaxed) + 1;
    atomic_store(&pool.open, generation);
    atomic_store(&pool.generation, generation);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work();
    // Only workers that joined are waited for: one that lost its core in between is not needed.
    atomic_store(&pool.open, 0);
    int spins = 0;
    while (atomic_load(&pool.joined) > 0) {
        relax();
#if defined(__linux__)
        if (++spins > SPINS_BEFORE_SLEEP) sched_yield();  // a worker lost its core: let it have this one
#else
        (void)spins;
#endif
    }
    pthread_mutex_unlock(&one_caller);
}
