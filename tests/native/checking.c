#define _DEFAULT_SOURCE  // mmap, sysconf
#include "checking.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"
#include "quantised.h"

#define MAX_PRINTED 5
#define MAX_MAPPED 256

int failures;
const char *expected_sources = "unknown";
static uint64_t state;
static int64_t padding;  // bytes between the end of memory and the page that can't be touched

uint32_t random_bits(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}

int64_t random_between(int64_t least, int64_t largest) { return least + random_bits() % (largest - least + 1); }

float random_float(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

void fill_random(float *p, int64_t count, float size) {
    for (int64_t i = 0; i < count; i++) p[i] = random_float() * size;
}

static struct {
    void *start;
    size_t bytes;
} mapped[MAX_MAPPED];
static int num_mapped;

void *guarded(int64_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = ((size_t)(bytes + padding) + page - 1) / page * page;
    char *start = mmap(NULL, inside + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + inside, page, PROT_NONE) != 0 || num_mapped == MAX_MAPPED) {
        printf("no memory for %" PRId64 " bytes\n", bytes);
        exit(2);
    }
    mapped[num_mapped].start = start;
    mapped[num_mapped++].bytes = inside + page;
    return start + inside - bytes - padding;
}

float *guarded_floats(int64_t count) {
    uint32_t *p = guarded(count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = POISON;
    return (float *)p;
}

float *random_floats(int64_t count, float size) {
    float *p = guarded(count * 4);
    fill_random(p, count, size);
    return p;
}

void release_all(void) {
    while (num_mapped > 0) {
        num_mapped--;
        munmap(mapped[num_mapped].start, mapped[num_mapped].bytes);
    }
}

int is_poison(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits == POISON;
}

int same_bits(float a, float b) { return memcmp(&a, &b, 4) == 0; }

void expect(double found, double expected, double allowed, const char *what, int64_t row, int64_t column) {
    if (fabs(found - expected) <= allowed || failures++ >= MAX_PRINTED) return;
    printf("%s, row %" PRId64 ", column %" PRId64 ": %.9g, expected %.9g within %.3g\n", what, row, column, found, expected,
           allowed);
}

void expect_true(int holds, const char *what, int64_t row, int64_t column) {
    if (holds || failures++ >= MAX_PRINTED) return;
    printf("not true: %s; row %" PRId64 ", column %" PRId64 "\n", what, row, column);
}

double sum_error(int64_t terms) {
    int64_t chain = terms < 64 ? terms : 64;
    return (double)(chain + (terms + 63) / 64 + 1) * UNIT;
}

// Arguments: the seed, how many bytes behind the end of memory may be read, and the digest that the kernels were built with.
int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*check)(void);
    } sections[] = {
        {"threads", check_threads},     {"linear", check_linear}, {"mlp", check_mlp},             {"rows", check_rows},
        {"attention", check_attention}, {"encode", check_encode}, {"quantised", check_quantised}, {"program", check_program},
        {"sampling", check_sampling},   {"repack", check_repack}, {"attention in bf16", check_attention_bf16},
        {"embed", check_embed},         {"inputs", check_inputs}, {"ranks", check_ranks},           {"low rank", check_low_rank},
        {"experts", check_experts},     {"latent", check_latent},
        {"resize", check_resize},       {"states", check_states}, {"block file", check_block_file},
    };
    if (!ratoon_kernels_usable()) {
        printf("the system refuses these kernels\n");
        return 2;
    }
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    padding = argc > 2 ? atol(argv[2]) : 0;
    if (argc > 3) expected_sources = argv[3];
    int total = 0;
    for (size_t i = 0; i < sizeof(sections) / sizeof(*sections); i++) {
        state = seed * 0x9e3779b97f4a7c15ull + i;  // so that a section's numbers do not depend on the sections before
        failures = 0;
        for (int threads = 1; threads <= 3; threads += 2) {
            ratoon_set_threads(threads);
            sections[i].check();
        }
        printf("%s: %d wrong\n", sections[i].name, failures);
        fflush(stdout);
        total += failures;
    }
    return total != 0;
}
