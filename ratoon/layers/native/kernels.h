// The kernels of a forward pass, as Python calls them and as recorded passes replay them (program.c). Those of quantised
// weights are in quantised.h. ldx is the distance of two rows of x, in floats.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

const char *ratoon_sources(void);  // the digest of the C files that the library was built from, or "unknown"

int ratoon_set_threads(int threads);  // how many there are then

int64_t ratoon_packed_size(int64_t out, int64_t in);  // floats
void ratoon_pack_weight(const float *weight, int64_t out, int64_t in, float *packed);
// The same for weights in bf16, or else fp16; a product with them has the bits of one with the same numbers as floats.
int64_t ratoon_packed_size_16(int64_t out, int64_t in);  // floats
void ratoon_pack_weight_16(const uint16_t *weight, int64_t out, int64_t in, int64_t is_bf16, float *packed);
void ratoon_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out,
                   const float *bias, float *y, int64_t ldy);
// The same for encoders, whose sequences run whole, with an activation behind the bias, by the numbers of ratoon_activation; -1: none.
// Where the processor multiplies matrices in bf16 it is faster for more than a few rows, and takes 16 bits of each number
// (encoder_linear.c); elsewhere the results are those of ratoon_linear. Returns 0, or -1 when there is no memory.
int ratoon_encoder_linear(const float *x, int64_t ldx, int64_t rows, const float *packed, int64_t in, int64_t out, const float *bias,
                          int activation, float *y, int64_t ldy);
int ratoon_has_encoder_matrices(void);  // whether it multiplies by the matrix unit
void ratoon_gated_mlp(const float *x, int64_t ldx, int64_t rows, const float *gate_up, const float *gate_up_bias, int64_t in,
                      const float *down, const float *down_bias, int64_t inner, int64_t out, float *between, float *y);

// The matrices of an adapter for one part of a product, in panels of 16 columns: a [rank][in] as [panel][in][16], b [rank][out]
// as [panel][rank][16], with zeros behind the last column. Without `a`, b [in][out] is the part's whole weight, which the result
// of the product is replaced by. rank 0: the adapter has nothing for this part.
typedef struct {
    const void *a, *b;
    int64_t rank, column, out;  // the part's columns of the product
    float scale;
    int32_t format;  // of the numbers: 0 floats, 1 bf16, 3 whole numbers of 8 bits
} low_rank_part;

// A matrix [columns][depth] of bf16 for that format, of floats for others, in panels of so many bytes: whole numbers are the
// nearest ones, with a scale for each 64 of a column (low_rank.h). Returns 0, or -1 if one of those is not finite.
int64_t ratoon_low_rank_bytes(int64_t columns, int64_t depth, int64_t format);
int ratoon_pack_low_rank(const void *matrix, int64_t columns, int64_t depth, int64_t format, void *packed);

// y += scale · (x · aᵀ) · b, in place. entries [num_slots][parts]; slots: of each row; -1: nothing is added. Returns 0, or -1 when
// there is no memory.
int ratoon_add_low_rank(const float *x, int64_t ldx, int64_t rows, int64_t in, const low_rank_part *entries, int64_t num_slots,
                        int64_t parts, const int32_t *slots, float *y, int64_t ldy);

typedef struct {  // a table of an adapter, or a rank's rows of it
    const void *numbers;  // NULL: the adapter has none
    int64_t rows;
    int64_t format;  // 0 floats, 1 bf16
} saved_table;

// y [rows, width]: rows whose adapter has a table get that of their id, which begins with row `first` of the vocabulary.
void ratoon_replace_rows(const saved_table *tables, int64_t num_slots, const int32_t *slots, const int64_t *ids, int64_t first,
                         int64_t rows, int64_t width, float *y);

void ratoon_rms_norm(const float *x, int64_t ldx, float *residual, int64_t ldr, const float *weight, float eps, float *y,
                     int64_t rows, int64_t width);
void ratoon_layer_norm(const float *x, int64_t ldx, float *residual, int64_t ldr, const float *weight, const float *bias,
                       float eps, float *y, int64_t rows, int64_t width);
// ldw: between the weights of a head and those of the next; 0: all heads have the same.
void ratoon_head_rms_norm(float *x, int64_t ldx, const float *weight, int64_t ldw, float eps, int64_t rows, int64_t heads,
                          int64_t head_dim);
// axes: NULL, and positions [rows]; or the axis by which each pair of a head turns, and positions [axes][axis_stride].
void ratoon_rotary(float *q, int64_t ldq, int64_t heads, float *k, int64_t ldk, int64_t kv_heads, int64_t head_dim,
                   int64_t rotary_dim, const int64_t *positions, const float *cos_sin, const int32_t *axes,
                   int64_t axis_stride, int64_t rows);
// Rows of a table [count, width], as floats. format: as of ratoon_repack_codes (quantised.h); 8 floats, 9 halves, 10 bf16. Returns
// 0, or -1 when an id is not one of the table's rows: then nothing is written.
int ratoon_embed(int64_t format, const void *table, int64_t row_bytes, int64_t count, const int64_t *ids, int64_t rows,
                 int64_t width, float *y);
// The same with `count` rows from `first` on of a table that has `total`; other rows are zeros.
int ratoon_embed_part(int64_t format, const void *table, int64_t row_bytes, int64_t count, int64_t first, int64_t total,
                      const int64_t *ids, int64_t rows, int64_t width, float *y);
void ratoon_silu_and_mul(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width);
void ratoon_activation(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, int kind);
void ratoon_gated_activation(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, int kind);
void ratoon_scale(float *x, int64_t ldx, int64_t rows, int64_t width, float factor);
void ratoon_add(float *x, int64_t ldx, const float *y, int64_t ldy, int64_t rows, int64_t width);  // x += y
void ratoon_soft_cap(float *x, int64_t ldx, int64_t rows, int64_t width, float cap);  // cap · tanh(x / cap), in place

// silu with 1.702 of the first half of a row, at most `limit`, times 1 + the second, from -limit to limit.
void ratoon_clamped_swiglu(const float *x, int64_t ldx, float *y, int64_t rows, int64_t width, float limit);

// Mixtures of experts (experts.c).
#define MOST_EXPERTS 1024
enum { ROUTE_SOFTMAX, ROUTE_SIGMOID };
typedef struct {
    int64_t experts, top_k, scoring, renormalise;
    int64_t groups, top_groups;  // experts are chosen from the best groups alone; groups of neighbours divide them evenly
    const float *bias;           // [experts]: added to scores for the choice, not for the weights; NULL: none
    float scale;                 // of the weights
} route_rule;

// The experts of each row, the best first, and their weights: [rows][top_k] each. counts [experts], or NULL: goes up by the rows of
// each expert.
void ratoon_route(const route_rule *rule, const float *logits, int64_t ldl, int64_t rows, int32_t *chosen, float *weights,
                  int64_t *counts);

typedef struct {
    const float *packed;      // of ratoon_pack_weight; NULL: quantised
    const float *bias;        // of the former
    const void *quantised;    // a quantised_weight
} expert_weight;

enum { CLAMPED_SWIGLU = 5 };
typedef struct {
    int64_t experts, first;   // those that are here, and the number of the first: other ranks have the others
    int64_t in, inner, out;
    int64_t parts;            // 1: gate and up are one product of 2 · inner columns; 2: each is one
    const expert_weight *gate_up;  // [parts][experts]
    const expert_weight *down;     // [experts]
    int64_t activation;       // as of ratoon_activation, or CLAMPED_SWIGLU
    int64_t has_quantised;    // whether one of the weights is
    float limit;              // of CLAMPED_SWIGLU
} expert_layer;

// y [rows, out]: the sum of down(activation(gate(x)) · up(x)) of a row's experts, times their weights. `scratch` has so many bytes
// as the first function says. Returns 0, or -1 when there is no memory.
int64_t ratoon_experts_scratch(const expert_layer *layer, int64_t rows, int64_t top_k);
int ratoon_experts(const expert_layer *layer, const float *x, int64_t ldx, int64_t rows, const int32_t *chosen,
                   const float *weights, int64_t top_k, void *scratch, float *y);
void ratoon_add_gated(float *y, const float *x, const float *gates, int64_t ldg, int64_t rows, int64_t width);  // y += sigmoid(g) · x

int ratoon_attention(const float *q, int64_t ldq, float *out, int64_t ldo, int64_t kind, const void *cache, int64_t block_bytes,
                     const void *scales, int64_t scale_block_bytes, const int32_t *block_table, int64_t table_width,
                     const int32_t *query_start, const int32_t *seq_lens, const int32_t *shared, int64_t requests,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int64_t causal,
                     const int32_t *ends, const float *bias, int64_t reach, float scale, float cap, const float *sinks);
void ratoon_store_kv(const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t kind, void *cache, int64_t block_bytes,
                     void *scales, int64_t scale_block_bytes, const int64_t *slots, int64_t rows, int64_t kv_heads,
                     int64_t head_dim, int64_t block_size);

// Latent attention (latent.c): heads read one vector [width] of each token as key, and its last `value_dim` numbers as value. They
// are computed in `groups` of equally many heads, at most MOST_LATENT_ROWS. `sinks` [heads] or NULL: as of the other. Returns 0, or -1 when memory ran out.
#define MOST_LATENT_ROWS 64
int ratoon_latent_attention(const float *q, int64_t ldq, float *out, int64_t ldo, int64_t kind, const void *cache,
                            int64_t block_bytes, const void *scales, int64_t scale_block_bytes, const int32_t *block_table,
                            int64_t table_width, const int32_t *query_start, const int32_t *seq_lens, const int32_t *shared,
                            int64_t requests, int64_t heads, int64_t groups, int64_t width, int64_t value_dim,
                            int64_t block_size, const int32_t *ends, float scale, const float *sinks);
void ratoon_store_latent(const float *k, int64_t ldk, int64_t kind, void *cache, int64_t block_bytes, void *scales,
                         int64_t scale_block_bytes, const int64_t *slots, int64_t rows, int64_t width, int64_t block_size);
// x [rows][heads][kept + in] → y [rows][heads][kept + out]: each head times a weight of its own, `packed_size` floats apart as
// ratoon_pack_weight makes them, behind numbers that are copied. Returns 0, or -1 when there is no memory.
int ratoon_head_products(const float *x, int64_t ldx, int64_t rows, int64_t heads, int64_t kept, int64_t in, int64_t out,
                         const float *packed, int64_t packed_size, float *y, int64_t ldy);

// The scan of a state-space layer (state_space.c). A row of `projected` has the gate [heads · head_dim], the inputs of the convolution
// [channels = heads · head_dim + 2 · groups · state_size], and time steps [heads]. conv_weight [width][channels]; conv_bias: or NULL.
// A page has a state [heads][state_size][head_dim], and a history [width - 1][channels]. Each request goes on from the page of the
// token before its first one, and writes those of blocks that end, and of its last token; block 0 stays as it is. `scratch` has
// channels + 2 · heads floats for each row. Returns 0, or -1 when there is no memory.
int ratoon_scan(const float *projected, int64_t ldx, float *out, int64_t ldo, const float *conv_weight, const float *conv_bias,
                const float *decay, const float *skip, const float *step_bias, float least_step, float most_step, void *states,
                int64_t state_bytes, void *histories, int64_t history_bytes, const int32_t *block_table, int64_t table_width,
                const int32_t *query_start, const int32_t *seq_lens, const int64_t *slots, int64_t requests, int64_t heads,
                int64_t head_dim, int64_t state_size, int64_t groups, int64_t width, int64_t block_size, float *scratch);

// Ranks that are processes of one host, and have mapped the same memory (ranks.c). It has so many bytes, all of them zero at
// first. Every rank makes the same calls in the same order. limit: nanoseconds that a call waits for another rank; then it and
// all calls that follow, of any rank, return -1, else 0.
struct rank_group;
int64_t ratoon_group_bytes(int64_t world);
struct rank_group *ratoon_open_group(void *memory, int64_t rank, int64_t world, int64_t limit);  // NULL: it can't be
void ratoon_close_group(struct rank_group *group);
int ratoon_all_reduce(struct rank_group *group, float *x, int64_t count);  // in place
// y [rows, total]: all ranks' x side by side. A rank has an equal part of the columns, rounded up; the last ones have the rest.
int ratoon_all_gather(struct rank_group *group, const float *x, int64_t ldx, int64_t rows, int64_t total, float *y);
// x: rows of `width` floats in the order of the ranks that they are for. y gets the rows for this rank, in the order of the ranks
// that they are from. counts [world, world]: the rows from each rank to each rank, the same numbers on all of them.
int ratoon_all_to_all(struct rank_group *group, const float *x, int64_t width, const int64_t *counts, float *y);

// Attention of whole sequences to themselves: request i has rows starts[i] … starts[i + 1] - 1, each of which sees all of them.
// Heads lie side by side in a row. What is multiplied is rounded to bf16. `scratch` has so many bytes as the first function
// says, for all rows; 0: there is no kernel for such heads, or on this processor.
int64_t ratoon_attention_bf16_scratch(int64_t rows, int64_t requests, int64_t heads, int64_t head_dim);
void ratoon_attention_bf16(const float *q, int64_t ldq, const float *k, int64_t ldk, const float *v, int64_t ldv, float *out,
                           int64_t ldo, const int32_t *starts, int64_t requests, int64_t heads, float scale, void *scratch);

// Where the numbers of branches are, and where those of a step go. Every branch has a row: of max_model_len tokens, and of
// max_blocks entries of a block table.
typedef struct {
    const int32_t *token_ids;
    const int64_t *num_computed;
    int64_t max_model_len, max_blocks;
    int64_t *input_ids, *positions;
    int32_t *seq_lens, *query_start;
} decode_inputs;

typedef struct {  // the same of a KV group
    const int32_t *block_tables;
    int32_t *tables;
    int64_t *slots;
    int64_t block_size;
} decode_tables;

// The inputs of a step with one token of each of these rows. Returns the length of the longest sequence.
int64_t ratoon_prepare_decodes(const decode_inputs *d, const int64_t *rows, int64_t count);
// Behind it, for each group.
void ratoon_prepare_tables(const decode_inputs *d, const decode_tables *t, const int64_t *rows, int64_t count, int64_t longest);

// The largest of each row of [rows, columns], the first of equals. bad: 1 where it is a NaN, which counts as larger than all, or
// infinite.
void ratoon_greedy(const float *logits, int64_t rows, int64_t columns, int64_t *token_ids, uint8_t *bad);

// One token for each row of [rows, columns] probabilities, which are changed. The filters are all NULL, or one value a row: 0
// and 1 leave all tokens. bad: 1 where a row is not made of numbers, or has nothing to draw.
void ratoon_draw(float *probabilities, int64_t rows, int64_t columns, const int64_t *top_k, const double *top_p,
                 const float *min_p, const double *uniforms, int64_t *token_ids, uint8_t *bad);

// The functions of a grammar library. 0: it was done.
typedef struct {
    int32_t (*consume)(void *matcher, uint32_t token);
    int32_t (*fill)(void *matcher, uint32_t *mask, size_t mask_bytes);
    bool (*is_accepting)(void *matcher);
    int64_t mask_bytes;
    const uint8_t *first_bytes;  // the first byte of each token
    int64_t tokens;              // of the model: others are not looked at
    int64_t most_alike;          // see MATCH_ALIKE
} match_calls;

// MATCH_ALIKE: the text may not end here, and the tokens that may follow are few and begin with the same byte. Where that is
// not so, no text is forced.
enum { MATCH_ACCEPTING = 1, MATCH_REFUSED = 2, MATCH_FAILED = 4, MATCH_ALIKE = 8 };

// Each text goes on by its token, unless that is below 0, and writes its mask to its row of the table. found: what of the
// names above is true of it.
void ratoon_match_texts(const match_calls *calls, void *const *matchers, const int32_t *tokens, const int32_t *rows,
                        int64_t texts, uint32_t *table, int64_t row_words, uint8_t *found);

// Bits over tokens, `words_per_row` words of 32 for each of `count` rows: tokens whose bit is not set get -inf.
void ratoon_allow_bits(float *logits, int64_t columns, const int64_t *rows, int64_t count, const uint32_t *words,
                       int64_t words_per_row);

// Pictures [height][width][3] of bytes to another width, then those of `row_bytes` a row to another height. Of each new column, or
// row: the first old one that it is a sum of, and the weights of that and the following ones, `taps` in all, with 22 bits behind
// the point. All of them exist. beside: [width][16] bytes.
void ratoon_resize_width(const uint8_t *picture, int64_t height, int64_t width, int64_t new_width, const int32_t *first,
                         const int32_t *weights, int64_t taps, uint8_t *beside, uint8_t *resized);
void ratoon_resize_height(const uint8_t *picture, int64_t row_bytes, int64_t new_height, const int32_t *first,
                          const int32_t *weights, int64_t taps, uint8_t *resized);

// A part of a block in memory.
typedef struct {
    uint8_t *bytes_at;
    int64_t bytes;
} block_part;

// What became of a block that was to be read. Unknown: the system has not all of its file in memory, it has too few bytes, it is
// very small, or this system can't tell: parts may have been written.
enum { BLOCK_DAMAGED = 0, BLOCK_READ = 1, BLOCK_UNKNOWN = 2 };

// Fills the parts with the content of an open file of the right size, if no device has to be waited for. head: what the file must begin with, 40 bytes
// and the key; its checksum, 16 bytes from the 24th on, is not compared with that of the file.
int ratoon_read_block(int file, const uint8_t *head, int64_t key_bytes, const block_part *parts, int64_t num_parts);
