// Recorded passes: the calls of kernels that one pass made, replayed without Python between them.
//
// A call is a function and its arguments, a word of 64 bits each in the order of the kernel's own parameters: a pointer or
// an integer as it is, a float in the low half. Kernels that can be recorded have such a function, NAME_words; it returns 0,
// or -1 if the kernel failed. ratoon_copy has no other form.
#define _POSIX_C_SOURCE 200809L  // clock_gettime
#include <string.h>

#include "kernels.h"
#include "quantised.h"
#include "spin.h"

typedef int (*words_function)(const int64_t *words);

typedef struct {
    words_function function;
    const int64_t *words;
} recorded_call;

// Returns -1, or the index of the call that failed; those behind it are not made.
int64_t ratoon_run_program(const recorded_call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].function(calls[i].words)) return i;
    return -1;
}

// The same, and how long each call took: ends[i] is when call i had ended, in nanoseconds after the begin.
int64_t ratoon_time_program(const recorded_call *calls, int64_t count, int64_t *ends) {
    int64_t begin = nanoseconds();
    for (int64_t i = 0; i < count; i++) {
        if (calls[i].function(calls[i].words)) return i;
        ends[i] = nanoseconds() - begin;
    }
    return -1;
}

static void *pointer(int64_t word) { return (void *)(intptr_t)word; }

static float number(int64_t word) {
    int32_t bits = (int32_t)word;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define P(i) pointer(w[i])
#define F(i) number(w[i])

// (to, from, bytes): what torch's copy_ does to dense tensors.
int ratoon_copy_words(const int64_t *w) {
    memcpy(P(0), P(1), (size_t)w[2]);
    return 0;
}

int ratoon_linear_words(const int64_t *w) {
    ratoon_linear(P(0), w[1], w[2], P(3), w[4], w[5], P(6), P(7), w[8]);
    return 0;
}

int ratoon_encoder_linear_words(const int64_t *w) {
    return ratoon_encoder_linear(P(0), w[1], w[2], P(3), w[4], w[5], P(6), (int)w[7], P(8), w[9]);
}

int ratoon_gated_mlp_words(const int64_t *w) {
    ratoon_gated_mlp(P(0), w[1], w[2], P(3), P(4), w[5], P(6), P(7), w[8], w[9], P(10), P(11));
    return 0;
}

int ratoon_quantised_linear_words(const int64_t *w) {
    ratoon_quantised_linear(P(0), P(1), w[2], w[3], P(4), P(5), w[6]);
    return 0;
}

int ratoon_quantised_gated_mlp_words(const int64_t *w) {
    ratoon_quantised_gated_mlp(P(0), P(1), P(2), w[3], w[4], P(5), P(6), P(7));
    return 0;
}

int ratoon_add_low_rank_words(const int64_t *w) {
    return ratoon_add_low_rank(P(0), w[1], w[2], w[3], P(4), w[5], w[6], P(7), P(8), w[9]);
}

int ratoon_replace_rows_words(const int64_t *w) {
    ratoon_replace_rows(P(0), w[1], P(2), P(3), w[4], w[5], w[6], P(7));
    return 0;
}

int ratoon_rms_norm_words(const int64_t *w) {
    ratoon_rms_norm(P(0), w[1], P(2), w[3], P(4), F(5), P(6), w[7], w[8]);
    return 0;
}

int ratoon_layer_norm_words(const int64_t *w) {
    ratoon_layer_norm(P(0), w[1], P(2), w[3], P(4), P(5), F(6), P(7), w[8], w[9]);
    return 0;
}

int ratoon_head_rms_norm_words(const int64_t *w) {
    ratoon_head_rms_norm(P(0), w[1], P(2), w[3], F(4), w[5], w[6], w[7]);
    return 0;
}

int ratoon_rotary_words(const int64_t *w) {
    ratoon_rotary(P(0), w[1], w[2], P(3), w[4], w[5], w[6], w[7], P(8), P(9), P(10), w[11], w[12]);
    return 0;
}

int ratoon_embed_words(const int64_t *w) { return ratoon_embed(w[0], P(1), w[2], w[3], P(4), w[5], w[6], P(7)); }

int ratoon_embed_part_words(const int64_t *w) {
    return ratoon_embed_part(w[0], P(1), w[2], w[3], w[4], w[5], P(6), w[7], w[8], P(9));
}

int ratoon_all_reduce_words(const int64_t *w) { return ratoon_all_reduce(P(0), P(1), w[2]); }

int ratoon_all_gather_words(const int64_t *w) { return ratoon_all_gather(P(0), P(1), w[2], w[3], w[4], P(5)); }

int ratoon_greedy_words(const int64_t *w) {
    ratoon_greedy(P(0), w[1], w[2], P(3), P(4));
    return 0;
}

int ratoon_silu_and_mul_words(const int64_t *w) {
    ratoon_silu_and_mul(P(0), w[1], P(2), w[3], w[4]);
    return 0;
}

int ratoon_activation_words(const int64_t *w) {
    ratoon_activation(P(0), w[1], P(2), w[3], w[4], (int)w[5]);
    return 0;
}

int ratoon_gated_activation_words(const int64_t *w) {
    ratoon_gated_activation(P(0), w[1], P(2), w[3], w[4], (int)w[5]);
    return 0;
}

int ratoon_scale_words(const int64_t *w) {
    ratoon_scale(P(0), w[1], w[2], w[3], F(4));
    return 0;
}

int ratoon_add_words(const int64_t *w) {
    ratoon_add(P(0), w[1], P(2), w[3], w[4], w[5]);
    return 0;
}

int ratoon_soft_cap_words(const int64_t *w) {
    ratoon_soft_cap(P(0), w[1], w[2], w[3], F(4));
    return 0;
}

int ratoon_clamped_swiglu_words(const int64_t *w) {
    ratoon_clamped_swiglu(P(0), w[1], P(2), w[3], w[4], F(5));
    return 0;
}

int ratoon_route_words(const int64_t *w) {
    ratoon_route(P(0), P(1), w[2], w[3], P(4), P(5), P(6));
    return 0;
}

int ratoon_experts_words(const int64_t *w) { return ratoon_experts(P(0), P(1), w[2], w[3], P(4), P(5), w[6], P(7), P(8)); }

int ratoon_add_gated_words(const int64_t *w) {
    ratoon_add_gated(P(0), P(1), P(2), w[3], w[4], w[5]);
    return 0;
}

int ratoon_attention_words(const int64_t *w) {
    return ratoon_attention(P(0), w[1], P(2), w[3], w[4], P(5), w[6], P(7), w[8], P(9), w[10], P(11), P(12), P(13), w[14], w[15],
                            w[16], w[17], w[18], w[19], w[20], P(21), P(22), w[23], F(24), F(25), P(26));
}

int ratoon_store_kv_words(const int64_t *w) {
    ratoon_store_kv(P(0), w[1], P(2), w[3], w[4], P(5), w[6], P(7), w[8], P(9), w[10], w[11], w[12], w[13]);
    return 0;
}

int ratoon_latent_attention_words(const int64_t *w) {
    return ratoon_latent_attention(P(0), w[1], P(2), w[3], w[4], P(5), w[6], P(7), w[8], P(9), w[10], P(11), P(12), P(13), w[14],
                                   w[15], w[16], w[17], w[18], w[19], P(20), F(21), P(22));
}

int ratoon_store_latent_words(const int64_t *w) {
    ratoon_store_latent(P(0), w[1], w[2], P(3), w[4], P(5), w[6], P(7), w[8], w[9], w[10]);
    return 0;
}

int ratoon_head_products_words(const int64_t *w) {
    return ratoon_head_products(P(0), w[1], w[2], w[3], w[4], w[5], w[6], P(7), w[8], P(9), w[10]);
}

int ratoon_scan_words(const int64_t *w) {
    return ratoon_scan(P(0), w[1], P(2), w[3], P(4), P(5), P(6), P(7), P(8), F(9), F(10), P(11), w[12], P(13), w[14], P(15), w[16],
                       P(17), P(18), P(19), w[20], w[21], w[22], w[23], w[24], w[25], w[26], P(27));
}
