// The inputs of a step in which every request has one token: execution/inputs/step_inputs.py computes the same by numpy,
// for all steps.
#include "kernels.h"

int64_t ratoon_prepare_decodes(const decode_inputs *d, const int64_t *rows, int64_t count) {
    int64_t longest = 0;
    d->query_start[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], position = d->num_computed[row];
        d->positions[i] = position;
        d->input_ids[i] = d->token_ids[row * d->max_model_len + position];
        d->seq_lens[i] = (int32_t)(position + 1);
        d->query_start[i + 1] = (int32_t)(i + 1);
        longest = position + 1 > longest ? position + 1 : longest;
    }
    return longest;
}

void ratoon_prepare_tables(const decode_inputs *d, const decode_tables *t, const int64_t *rows, int64_t count, int64_t longest) {
    const int64_t size = t->block_size, used = (longest + size - 1) / size;
    for (int64_t i = 0; i < count; i++) {
        const int64_t position = d->positions[i];
        const int32_t *from = t->block_tables + rows[i] * d->max_blocks;
        int32_t *to = t->tables + i * d->max_blocks;
        for (int64_t block = 0; block < used; block++) to[block] = from[block];
        t->slots[i] = from[position / size] * size + position % size;
    }
}
