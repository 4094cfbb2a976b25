// Recorded passes: a call whose arguments are words does what the call itself does, in order, until one fails.
#include <string.h>

#include "checking.h"
#include "kernels.h"
#include "quantised.h"

#define ROWS 3
#define WIDTH 32  // of every matrix
#define SIZE (ROWS * 2 * WIDTH)

typedef int (*words_function)(const int64_t *words);
typedef struct {
    words_function function;
    const int64_t *words;
} recorded_call;
int64_t ratoon_run_program(const recorded_call *calls, int64_t count);
int64_t ratoon_time_program(const recorded_call *calls, int64_t count, int64_t *ends);

#define WORDS(NAME) int NAME##_words(const int64_t *words);
WORDS(ratoon_copy) WORDS(ratoon_linear) WORDS(ratoon_gated_mlp) WORDS(ratoon_quantised_linear) WORDS(ratoon_quantised_gated_mlp)
WORDS(ratoon_rms_norm) WORDS(ratoon_layer_norm) WORDS(ratoon_head_rms_norm) WORDS(ratoon_rotary) WORDS(ratoon_silu_and_mul)
WORDS(ratoon_add_low_rank) WORDS(ratoon_replace_rows) WORDS(ratoon_embed) WORDS(ratoon_greedy) WORDS(ratoon_activation) WORDS(ratoon_gated_activation) WORDS(ratoon_scale) WORDS(ratoon_add) WORDS(ratoon_soft_cap) WORDS(ratoon_attention) WORDS(ratoon_store_kv)

static int64_t number(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

#define P(pointer) ((int64_t)(intptr_t)(pointer))

// Memory that calls write to, twice: once for a kernel that is called, once for its words.
static float *direct, *replayed;

static void begin(void) {
    direct = guarded_floats(SIZE);
    replayed = guarded_floats(SIZE);
    for (int i = 0; i < SIZE; i++) direct[i] = replayed[i] = random_float();
}

static void expect_equal(words_function function, const int64_t *words, const char *name) {
    const recorded_call call = {function, words};
    expect_true(ratoon_run_program(&call, 1) == -1, name, 0, 0);
    expect_true(memcmp(direct, replayed, SIZE * 4) == 0, name, 1, 0);
}

static void compare_row_kernels(const float *x, const float *weight) {
    const int64_t positions[ROWS + 1] = {2, 0, 1, 2};
    const int32_t axes[6] = {0, 1, 1, 0, 1, 0};
    begin();
    ratoon_rms_norm(x, WIDTH, direct + ROWS * WIDTH, WIDTH, weight, 0.25f, direct, ROWS, WIDTH);
    expect_equal(ratoon_rms_norm_words,
                 (int64_t[]){P(x), WIDTH, P(replayed + ROWS * WIDTH), WIDTH, P(weight), number(0.25f), P(replayed), ROWS, WIDTH}, "rms norm");
    ratoon_layer_norm(x, WIDTH, direct + ROWS * WIDTH, WIDTH, weight, x, 0.25f, direct, ROWS, WIDTH);
    expect_equal(ratoon_layer_norm_words,
                 (int64_t[]){P(x), WIDTH, P(replayed + ROWS * WIDTH), WIDTH, P(weight), P(x), number(0.25f), P(replayed), ROWS, WIDTH},
                 "layer norm");
    ratoon_head_rms_norm(direct, WIDTH, weight, WIDTH / 2, 0.25f, ROWS, 2, WIDTH / 2);
    expect_equal(ratoon_head_rms_norm_words,
                 (int64_t[]){P(replayed), WIDTH, P(weight), WIDTH / 2, number(0.25f), ROWS, 2, WIDTH / 2}, "head norm");
    ratoon_rotary(direct, WIDTH, 2, direct + ROWS * WIDTH, WIDTH, 1, 16, 12, positions, x, axes, 1, ROWS);
    expect_equal(ratoon_rotary_words,
                 (int64_t[]){P(replayed), WIDTH, 2, P(replayed + ROWS * WIDTH), WIDTH, 1, 16, 12, P(positions), P(x), P(axes), 1, ROWS}, "rotary");
    ratoon_silu_and_mul(x, WIDTH, direct, ROWS, WIDTH / 2);
    expect_equal(ratoon_silu_and_mul_words, (int64_t[]){P(x), WIDTH, P(replayed), ROWS, WIDTH / 2}, "silu and mul");
    for (int kind = 0; kind < 5; kind++) {
        ratoon_activation(x, WIDTH, direct, ROWS, WIDTH, kind);
        expect_equal(ratoon_activation_words, (int64_t[]){P(x), WIDTH, P(replayed), ROWS, WIDTH, kind}, "activation");
        ratoon_gated_activation(x, WIDTH, direct, ROWS, WIDTH / 2, kind);
        expect_equal(ratoon_gated_activation_words, (int64_t[]){P(x), WIDTH, P(replayed), ROWS, WIDTH / 2, kind}, "gated activation");
    }
    ratoon_scale(direct, WIDTH, ROWS, WIDTH, 0.75f);
    expect_equal(ratoon_scale_words, (int64_t[]){P(replayed), WIDTH, ROWS, WIDTH, number(0.75f)}, "scale");
    ratoon_add(direct, WIDTH, x, WIDTH, ROWS, WIDTH);
    expect_equal(ratoon_add_words, (int64_t[]){P(replayed), WIDTH, P(x), WIDTH, ROWS, WIDTH}, "add");
    ratoon_soft_cap(direct, WIDTH, ROWS, WIDTH, 0.75f);
    expect_equal(ratoon_soft_cap_words, (int64_t[]){P(replayed), WIDTH, ROWS, WIDTH, number(0.75f)}, "soft cap");
    const int32_t slots[ROWS] = {0, -1, 0};
    const low_rank_part part = {.a = x, .b = x, .rank = 3, .column = 1, .out = 16, .scale = 0.5f};
    ratoon_add_low_rank(weight, 4, ROWS, 5, &part, 1, 1, slots, direct, WIDTH);
    expect_equal(ratoon_add_low_rank_words, (int64_t[]){P(weight), 4, ROWS, 5, P(&part), 1, 1, P(slots), P(replayed), WIDTH},
                 "low rank");
    const saved_table table = {x, 3, 0};
    ratoon_replace_rows(&table, 1, slots, positions, 0, ROWS, WIDTH, direct);
    expect_equal(ratoon_replace_rows_words, (int64_t[]){P(&table), 1, P(slots), P(positions), 0, ROWS, WIDTH, P(replayed)},
                 "rows of tables");
    memcpy(direct, x, 5 * 4);
    expect_equal(ratoon_copy_words, (int64_t[]){P(replayed), P(x), 5 * 4}, "copy");
}

static void compare_products(const float *x, const float *weight) {
    static uint8_t codes[2 * WIDTH * WIDTH];
    static uint16_t scales[2 * WIDTH];
    float *first = guarded_floats(ratoon_packed_size(2 * WIDTH, WIDTH)), *last = guarded_floats(ratoon_packed_size(WIDTH, WIDTH));
    float *between = guarded_floats(3 * WIDTH * ROWS), *bias = random_floats(2 * WIDTH, 1);
    void *scratch = guarded((ROWS + QUANTISED_ROOM) * ratoon_quantised_scratch(WIDTH));
    begin();
    ratoon_pack_weight(weight, 2 * WIDTH, WIDTH, first);
    ratoon_pack_weight(weight, WIDTH, WIDTH, last);
    ratoon_linear(x, WIDTH, ROWS, first, WIDTH, 2 * WIDTH, bias, direct, 2 * WIDTH);
    expect_equal(ratoon_linear_words,
                 (int64_t[]){P(x), WIDTH, ROWS, P(first), WIDTH, 2 * WIDTH, P(bias), P(replayed), 2 * WIDTH}, "linear");
    ratoon_gated_mlp(x, WIDTH, ROWS, first, bias, WIDTH, last, NULL, WIDTH, WIDTH, between, direct);
    expect_equal(ratoon_gated_mlp_words,
                 (int64_t[]){P(x), WIDTH, ROWS, P(first), P(bias), WIDTH, P(last), 0, WIDTH, WIDTH, P(between), P(replayed)}, "gated mlp");
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)random_bits();
    for (int i = 0; i < 2 * WIDTH; i++) scales[i] = (uint16_t)(0x2c00 + random_bits() % 0x400);
    const quantised_weight gate_up = {codes, scales, NULL, bias, WIDTH, 2 * WIDTH, 8, 32, 1};
    const quantised_weight down = {codes, scales, NULL, NULL, WIDTH, WIDTH, 8, 32, 0.5f};
    ratoon_quantised_linear(&gate_up, x, WIDTH, ROWS, scratch, direct, 2 * WIDTH);
    expect_equal(ratoon_quantised_linear_words,
                 (int64_t[]){P(&gate_up), P(x), WIDTH, ROWS, P(scratch), P(replayed), 2 * WIDTH}, "quantised linear");
    ratoon_quantised_gated_mlp(&gate_up, &down, x, WIDTH, ROWS, scratch, between, direct);
    expect_equal(ratoon_quantised_gated_mlp_words,
                 (int64_t[]){P(&gate_up), P(&down), P(x), WIDTH, ROWS, P(scratch), P(between), P(replayed)}, "quantised gated mlp");
}

static void compare_attention(const float *x) {
    const int32_t table[] = {1, 0}, query_start[] = {0, ROWS}, seq_lens[] = {ROWS + 2}, shared[] = {0};
    const int32_t ends[ROWS] = {3, 3, -1};
    const int64_t slots[] = {16, 18, 20, 17, 19}, bytes = 2 * 16 * 16, scale_bytes = 2 * 16 * 4;
    unsigned char *cache = guarded(2 * bytes), *other = guarded(2 * bytes);
    float *scales = guarded_floats(2 * scale_bytes / 4), *other_scales = guarded_floats(2 * scale_bytes / 4);
    float *bias = random_floats(4 * (2 * 16 + 1), 1);
    memset(cache, 0, (size_t)(2 * bytes));
    memset(other, 0, (size_t)(2 * bytes));
    ratoon_store_kv(x, 16, x + 1, 16, 2, cache, bytes, scales, scale_bytes, slots, 5, 1, 16, 16);
    ratoon_store_kv_words((int64_t[]){P(x), 16, P(x + 1), 16, 2, P(other), bytes, P(other_scales), scale_bytes, P(slots), 5, 1, 16, 16});
    expect_true(memcmp(cache, other, (size_t)(2 * bytes)) == 0, "store", 0, 0);
    expect_true(memcmp(scales, other_scales, (size_t)(2 * scale_bytes)) == 0, "store of scales", 0, 0);
    begin();
    ratoon_attention(x, WIDTH, direct, WIDTH, 2, cache, bytes, scales, scale_bytes, table, 2, query_start, seq_lens, shared, 1, 2, 1,
                     16, 16, 2, 1, ends, bias, 16, 0.25f, 1.5f, bias);
    expect_equal(ratoon_attention_words,
                 (int64_t[]){P(x), WIDTH, P(replayed), WIDTH, 2, P(cache), bytes, P(scales), scale_bytes, P(table), 2, P(query_start),
                             P(seq_lens), P(shared), 1, 2, 1, 16, 16, 2, 1, P(ends), P(bias), 16, number(0.25f), number(1.5f), P(bias)},
                 "attention");
}

static void compare_ends(const float *x) {
    const int64_t ids[ROWS] = {2, 0, 2}, unknown[1] = {ROWS};
    int64_t tokens[2][ROWS];
    uint8_t bad[2][ROWS];
    begin();
    ratoon_embed(8, x, WIDTH * 4, ROWS, ids, ROWS, WIDTH, direct);
    expect_equal(ratoon_embed_words, (int64_t[]){8, P(x), WIDTH * 4, ROWS, P(ids), ROWS, WIDTH, P(replayed)}, "embed");
    const int64_t words[] = {8, P(x), WIDTH * 4, ROWS, P(unknown), 1, WIDTH, P(replayed)};
    expect_true(ratoon_embed_words(words) == -1, "a row that is not in the table", 0, 0);
    ratoon_greedy(x, ROWS, WIDTH, tokens[0], bad[0]);
    ratoon_greedy_words((int64_t[]){P(x), ROWS, WIDTH, P(tokens[1]), P(bad[1])});
    expect_true(memcmp(tokens[0], tokens[1], sizeof *tokens) == 0 && memcmp(bad[0], bad[1], sizeof *bad) == 0, "greedy", 0, 0);
}

static int fail(const int64_t *words) { return words ? -1 : 0; }

static void compare_order(void) {
    float values[3] = {1, 2, 3};
    const int64_t second_to_first[] = {P(values), P(values + 1), 4}, first_to_third[] = {P(values + 2), P(values), 4};
    const recorded_call calls[] = {{ratoon_copy_words, second_to_first}, {ratoon_copy_words, first_to_third},
                                   {fail, second_to_first}, {ratoon_copy_words, second_to_first}};
    expect_true(ratoon_run_program(calls, 0) == -1, "an empty program", 0, 0);
    expect_true(ratoon_run_program(calls, 4) == 2, "the call that failed", 0, 0);
    expect_true(values[0] == 2 && values[2] == 2, "calls in order", 0, 0);
    int64_t ends[4] = {-1, -1, -1, -1};
    values[0] = values[2] = 0;
    expect_true(ratoon_time_program(calls, 4, ends) == 2, "the timed call that failed", 0, 0);
    expect_true(values[0] == 2 && values[2] == 2, "timed calls in order", 0, 0);
    expect_true(0 <= ends[0] && ends[0] <= ends[1] && ends[2] == -1 && ends[3] == -1, "times in order", 0, 0);
    expect_true(ratoon_time_program(calls, 2, ends) == -1, "a timed program", 0, 0);
}

void check_program(void) {
    const float *x = random_floats(ROWS * WIDTH, 2), *weight = random_floats(2 * WIDTH * WIDTH, 1);
    compare_row_kernels(x, weight);
    compare_products(x, weight);
    compare_attention(x);
    compare_ends(x);
    compare_order();
    release_all();
    expect_true(strcmp(ratoon_sources(), expected_sources) == 0, "the digest of the build", 0, 0);
}
