// A pool of threads that share one loop at a time. The caller works too.
#pragma once
#include <stdint.h>

// Runs body(context, unit) for every unit in [0, units), each once, on any thread. Returns when all are done.
typedef void (*unit_body)(void *context, int64_t unit);
void parallel_units(unit_body body, void *context, int64_t units);

int thread_count(void);
