// Inputs of steps with one token of each request, beside their definition.
#include "checking.h"
#include "kernels.h"

#define ROWS 6
#define BLOCKS 5
#define BLOCK 4
#define LENGTH (BLOCKS * BLOCK)

static void compare(int64_t count) {
    int32_t *token_ids = guarded(ROWS * LENGTH * 4), *block_tables = guarded(ROWS * BLOCKS * 4);
    int32_t *tables = guarded(count * BLOCKS * 4), *seq_lens = guarded(count * 4), *query_start = guarded((count + 1) * 4);
    int64_t *num_computed = guarded(ROWS * 8), *input_ids = guarded(count * 8), *positions = guarded(count * 8);
    int64_t *slots = guarded(count * 8), *rows = guarded(count * 8), longest = 0;
    for (int i = 0; i < ROWS * LENGTH; i++) token_ids[i] = (int32_t)random_between(0, 1000);
    for (int i = 0; i < ROWS * BLOCKS; i++) block_tables[i] = (int32_t)random_between(1, 99);
    for (int i = 0; i < ROWS; i++) num_computed[i] = random_between(0, LENGTH - 1);
    for (int64_t i = 0; i < count; i++) {
        rows[i] = random_between(0, ROWS - 1);
        longest = num_computed[rows[i]] + 1 > longest ? num_computed[rows[i]] + 1 : longest;
    }
    const decode_inputs d = {token_ids, num_computed, LENGTH, BLOCKS, input_ids, positions, seq_lens, query_start};
    const decode_tables t = {block_tables, tables, slots, BLOCK};
    expect_true(ratoon_prepare_decodes(&d, rows, count) == longest, "the longest sequence", count, longest);
    ratoon_prepare_tables(&d, &t, rows, count, longest);
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = num_computed[rows[i]];
        expect_true(positions[i] == at && seq_lens[i] == at + 1, "position", i, at);
        expect_true(input_ids[i] == token_ids[rows[i] * LENGTH + at], "token", i, at);
        expect_true(query_start[i] == i && query_start[count] == count, "query start", i, at);
        expect_true(slots[i] == block_tables[rows[i] * BLOCKS + at / BLOCK] * BLOCK + at % BLOCK, "slot", i, at);
        for (int64_t b = 0; b * BLOCK < longest; b++)
            expect_true(tables[i * BLOCKS + b] == block_tables[rows[i] * BLOCKS + b], "block", i, b);
    }
    release_all();
}

void check_inputs(void) {
    for (int64_t count = 1; count <= 8; count++) compare(count);
}
