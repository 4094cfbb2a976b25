// Waiting for another thread: spin for a moment, then let others run, then sleep.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <time.h>

#define SPINS_BETWEEN_LOOKS 64  // at the clock
#define YIELD_AFTER 50000       // nanoseconds

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

static inline int64_t nanoseconds(void) {
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
    int64_t passed = nanoseconds() - spin->began;
    if (passed > YIELD_AFTER) sched_yield();
    return passed < longest;
}
