// The matrix unit of x86 (AMX): the shapes of its tile registers. Which register holds what is up to each kernel. For files
// that are compiled with AMX.
#pragma once
#include <immintrin.h>

#include "vector.h"

// As the processor reads it. A register without a shape can't be used.
typedef struct {
    _Alignas(64) uint8_t palette;  // 64: within one cache line
    uint8_t start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "the processor reads 64 bytes");

#define TILE_PALETTE 1  // eight registers of up to 16 rows of 64 bytes: the only palette so far

// Registers `first` … `last` - 1.
INLINE void set_shape(tile_config *config, int first, int last, int rows, int bytes_of_row) {
    for (int i = first; i < last; i++) config->rows[i] = rows, config->bytes_of_row[i] = bytes_of_row;
}
