// Several products of one shape, each with some rows: what the experts of a layer multiply (experts.c).
#pragma once
#include <stdint.h>

#include "quantised.h"

typedef struct {
    const float *x;
    float *y;
    int64_t ldx, ldy, rows;
    const float *packed;  // as ratoon_pack_weight makes it, with its bias or NULL
    const float *bias;
    const quantised_weight *quantised;  // or this, which has its bias itself
} linear_job;

#define MOST_GROUPED_ROWS 16  // products of more rows are made one after the other, by all threads each

// Both return 0, or -1 when there is no memory. `scratch`: as of ratoon_quantised_linear, for the rows of all jobs.
int linear_jobs(const linear_job *jobs, int64_t count, int64_t in, int64_t out);
int quantised_jobs(const linear_job *jobs, int64_t count, void *scratch);
