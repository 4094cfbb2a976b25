// The pool behind parallel_units. Units are handed out by an atomic counter, so that a core which is slowed down by
// other load takes fewer of them. An idle thread spins for a moment (the next call, or the end of the last unit,
// usually follows within microseconds) and then sleeps: an idle engine uses no CPU time, and a thread that lost its
// core to another process can run on the core of one that sleeps.
#define _POSIX_C_SOURCE 200809L  // clock_gettime
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 128
#define WORKER_SPIN 1000000  // nanoseconds
#define CALLER_SPIN 200000
#define SPINS_BETWEEN_LOOKS 64  // at the clock

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;              // workers: there is a call to join
    pthread_cond_t done;              // the caller: no worker is inside any more
    atomic_uint_fast64_t generation;  // counts calls; a worker that sees a new value may join
    atomic_uint_fast64_t open;        // the call that may be joined now; 0: none
    atomic_int joined;                // workers inside the open call
    atomic_int sleeping;              // workers
    atomic_int caller_sleeps;
    unit_body body;
    void *context;
    int64_t units;
    atomic_int_fast64_t next_unit;
    int threads;  // the caller included
    int started;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER, .threads = 1};

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Spin timer: true until it is time to sleep.
struct spin {
    int count;
    int64_t began;
};

static inline int keep_spinning(struct spin *spin, int64_t longest) {
    relax();
    if (++spin->count % SPINS_BETWEEN_LOOKS) return 1;
    if (spin->began == 0) spin->began = nanoseconds();
    return nanoseconds() - spin->began < longest;
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
        struct spin spin = {0};
        while (atomic_load_explicit(&pool.generation, memory_order_acquire) == seen) {
            if (keep_spinning(&spin, WORKER_SPIN)) continue;
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
        if (atomic_fetch_sub(&pool.joined, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
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
    struct spin spin = {0};
    while (atomic_load(&pool.joined) > 0) {
        if (keep_spinning(&spin, CALLER_SPIN)) continue;
        pthread_mutex_lock(&pool.lock);
        atomic_store(&pool.caller_sleeps, 1);
        while (atomic_load(&pool.joined) > 0) pthread_cond_wait(&pool.done, &pool.lock);
        atomic_store(&pool.caller_sleeps, 0);
        pthread_mutex_unlock(&pool.lock);
    }
    pthread_mutex_unlock(&one_caller);
}
