// How keys and values lie in the paged cache.
//
// A block holds, for each KV head, the keys transposed and the values in panels:
//     keys   [kv_heads][head_dim][block_size]              a run of 16 tokens is a ready-made tile of B for q · kᵀ
//     values [kv_heads][head_dim / 16][block_size][16]     and so is a run of tokens here, for p · v
// as floats, as halves, or as bytes with a scale for each token and head ([2][kv_heads][block_size], keys first).
//
// Of latent attention a block holds one vector of each token, in panels [width / 16][block_size][16]. All of it is the key of all
// heads, and its last panels are their value. Bytes have a scale for each token ([block_size]).
#pragma once
#include "tile.h"

#define MAX_LATENT 640  // numbers of a vector
#ifndef MAX_HEAD_DIM
#define MAX_HEAD_DIM 256
#endif

enum { HALVES = FLOATS + 1, BYTES };  // what keys and values are kept as, if not as FLOATS (tile.h)

INLINE int64_t size_of(int64_t kind) { return kind == FLOATS ? 4 : kind == HALVES ? 2 : 1; }

typedef int8_t signed_bytes __attribute__((vector_size(W), aligned(1)));
