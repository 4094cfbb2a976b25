// Weights in panels of 16 output columns, as linear.c packs them: [panel][k][16], zeros behind the last column.
#pragma once
#include <string.h>

#include "tile.h"

// A packed weight begins with what its panels are of; they follow at the next 64 bytes.
typedef union {
    int32_t format;
    float line[16];
} packed_header;

INLINE int64_t panels_of(int64_t out) { return (out + TILE - 1) / TILE; }

// A vector of a row that may end before the vector does.
INLINE vec read_part(const float *p, int64_t count) {
    if (count >= W) return load(p);
    float part[W] = {0};
    memcpy(part, p, (size_t)count * sizeof(float));
    return load(part);
}

INLINE void write_part(float *p, int64_t count, vec v) {
    if (count >= W) {
        store(p, v);
        return;
    }
    float part[W];
    store(part, v);
    memcpy(p, part, (size_t)count * sizeof(float));
}

// ratoon_linear, and an activation by the numbers of ratoon_activation behind the bias; -1: none.
void linear_with_activation(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                            const float *bias, int activation, float *y, int64_t ldy);
