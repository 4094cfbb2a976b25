// Latent attention: attention.c once more, for heads that read one vector of each token as key and as value (latent_stretch.h),
// and the products of each head with a weight of its own, which are before and behind it.
#include "kernels.h"

#define LATENT
#define MAX_HEAD_DIM MAX_LATENT
#define UNIT_ROWS MOST_LATENT_ROWS
#include "attention.c"
#include "jobs.h"

static _Thread_local room room_of_jobs;

int ratoon_head_products(const float *x, int64_t ldx, int64_t rows, int64_t heads, int64_t kept, int64_t in, int64_t out,
                         const float *packed, int64_t packed_size, float *y, int64_t ldy) {
    linear_job *jobs = at_least(&room_of_jobs, (size_t)heads * sizeof(linear_job));
    if (!jobs) return -1;
    for (int64_t row = 0; row < rows && kept; row++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(y + row * ldy + head * (kept + out), x + row * ldx + head * (kept + in), (size_t)kept * sizeof(float));
    for (int64_t head = 0; head < heads; head++)
        jobs[head] = (linear_job){.x = x + head * (kept + in) + kept, .y = y + head * (kept + out) + kept, .ldx = ldx,
                                  .ldy = ldy, .rows = rows, .packed = packed + head * packed_size};
    return linear_jobs(jobs, heads, in, out);
}
