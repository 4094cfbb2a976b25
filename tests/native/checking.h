// What the programs share that compare kernels with references in double precision: random numbers, memory that ends where a
// page begins that can't be touched, and comparisons. Tolerances are bounds: roundings that a result goes through, each of
// at most UNIT of a number's size. So they hold for any input and any instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define UNIT 0x1p-24
#define EXP_ERROR (8 * UNIT)  // of e^x, which promises about 2 units in the last place
#define POISON 0x7fa5a5a5u    // a NaN that no kernel makes

extern int failures;
extern const char *expected_sources;  // what ratoon_sources() gives

uint32_t random_bits(void);
int64_t random_between(int64_t least, int64_t largest);
float random_float(void);  // -1…1
void fill_random(float *p, int64_t count, float size);

// Memory that is freed by release_all. Reading or writing behind its end ends the program.
void *guarded(int64_t bytes);
float *guarded_floats(int64_t count);  // filled with POISON
float *random_floats(int64_t count, float size);
void release_all(void);

int is_poison(float value);
int same_bits(float a, float b);

// Counts a failure, and prints the first ones, unless `found` is within `allowed` of `expected`.
void expect(double found, double expected, double allowed, const char *what, int64_t row, int64_t column);
void expect_true(int holds, const char *what, int64_t row, int64_t column);

void check_threads(void);
void check_linear(void);
void check_mlp(void);
void check_experts(void);
void check_latent(void);
void check_states(void);
void check_low_rank(void);
void check_rows(void);
void check_attention(void);
void check_encode(void);
void check_quantised(void);
void check_program(void);
void check_repack(void);
void check_sampling(void);
void check_attention_bf16(void);
void check_embed(void);
void check_inputs(void);
void check_ranks(void);
void check_resize(void);
void check_block_file(void);

// A bound for a sum of `terms` products that is taken in chains of 64, whose sums are added up one after another: the number
// of roundings on the longest way to the result. It is to be multiplied by the sum of the sizes of the terms.
double sum_error(int64_t terms);
