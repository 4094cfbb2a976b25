/* What a machine can do at best with a number of threads: bytes read a second, float32 and int8 operations a second.
 *
 *     cc -O3 -march=native -pthread limits.c -o limits && ./limits THREADS MEBIBYTES
 *
 * One JSON line. A read is of MEBIBYTES altogether, again and again: what fits into the caches is read from there, as a
 * model's weights are in every step. int8 operations use the widest dot products that the compiler is told of (AMX,
 * VNNI, i8mm, dotprod). Each thread stays on one of the cores that the process may use. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { READ, FLOATS, BYTES };
#define MAX_THREADS 256
#define REPEATS 5         /* the best counts */
#define SECONDS 0.15      /* of a repeat, about */
/* All loops over sums: an index that is not a constant would put them into memory. Products of bytes are assembly, since a
 * compiler may copy each sum before and behind one. */
#define UNROLLED _Pragma("GCC unroll 16")
#if defined(__AVX512F__)  /* bytes of a register, and how assembly names its kind */
#define VECTOR 64
#define REGISTER "+v"
#elif defined(__x86_64__)
#if defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define REGISTER "+x"
#else
#define VECTOR 16
#define REGISTER "+w"
#endif
typedef uint32_t words __attribute__((vector_size(VECTOR)));
typedef float floats __attribute__((vector_size(VECTOR)));

struct job {
    int mode, core;
    size_t num_bytes;
    const char *bytes;
    long rounds;
};
static pthread_barrier_t barrier;
static volatile uint32_t sink;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void read_bytes(const struct job *job) {
    words sums[8];
    memset(sums, 0, sizeof sums);
    for (long round = 0; round < job->rounds; round++)
        for (size_t at = 0; at + sizeof sums <= job->num_bytes; at += sizeof sums)
            UNROLLED for (int i = 0; i < 8; i++) sums[i] ^= *(const words *)(job->bytes + at + VECTOR * i);
    UNROLLED for (int i = 1; i < 8; i++) sums[0] ^= sums[i];
    sink += sums[0][0];
}

#define FLOATS_PER_ROUND (12 * (VECTOR / 4) * 2)
static void multiply_floats(const struct job *job) {
    floats sums[12], a = {0}, b = {0};
    memset(sums, 0, sizeof sums);
    a += 1.0001f, b += 0.9999f;
    for (long round = 0; round < job->rounds; round++) {
        UNROLLED for (int i = 0; i < 12; i++) {
            sums[i] += a * b; /* one instruction, with -ffp-contract=fast */
            __asm__ volatile("" : REGISTER(a)); /* another value, as far as the compiler knows: no product is kept */
        }
    }
    UNROLLED for (int i = 1; i < 12; i++) sums[0] += sums[i];
    sink += (uint32_t)sums[0][0];
}

#if defined(__AMX_INT8__)
#define KIND "AMX"
#define BYTES_PER_ROUND (4 * 16 * 16 * 64 * 2)
static void multiply_bytes(const struct job *job) {
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    static char zeros[1024] __attribute__((aligned(64)));
    _tile_loadconfig(&shape);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
    for (long round = 0; round < job->rounds; round++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
}
static int prepare(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); } /* ask the kernel for tile registers */
#elif defined(__AVX512VNNI__)
#define KIND "AVX-512 VNNI"
#define BYTES_PER_ROUND (12 * 64 * 2)
static void multiply_bytes(const struct job *job) {
    __m512i sums[12], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2);
    UNROLLED for (int i = 0; i < 12; i++) sums[i] = _mm512_set1_epi32(i);
    for (long round = 0; round < job->rounds; round++) {
        UNROLLED for (int i = 0; i < 12; i++) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(a), "v"(b));
    }
    UNROLLED for (int i = 1; i < 12; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    sink += _mm512_reduce_add_epi32(sums[0]);
}
static int prepare(void) { return 0; }
#elif defined(__AVX2__)
#define KIND "AVX2"
#define BYTES_PER_ROUND (8 * 32 * 2)
static void multiply_bytes(const struct job *job) {
    __m256i sums[8], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(2), ones = _mm256_set1_epi16(1), pairs;
    UNROLLED for (int i = 0; i < 8; i++) sums[i] = _mm256_set1_epi32(i);
    for (long round = 0; round < job->rounds; round++)
        UNROLLED for (int i = 0; i < 8; i++)
            __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
                             : "+x"(sums[i]), "=&x"(pairs) : "x"(a), "x"(b), "x"(ones));
    UNROLLED for (int i = 1; i < 8; i++) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
    sink += _mm256_extract_epi32(sums[0], 0);
}
static int prepare(void) { return 0; }
#elif defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define KIND "i8mm"
#define BYTES_PER_ROUND (16 * 32 * 2)
#define PRODUCT "smmla"
#else
#define KIND "dotprod"
#define BYTES_PER_ROUND (16 * 16 * 2)
#define PRODUCT "sdot"
#endif
static void multiply_bytes(const struct job *job) {
    int32x4_t sums[16];
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(2);
    UNROLLED for (int i = 0; i < 16; i++) sums[i] = vdupq_n_s32(i);
    for (long round = 0; round < job->rounds; round++)
        UNROLLED for (int i = 0; i < 16; i++)
            __asm__ volatile(PRODUCT " %0.4s, %1.16b, %2.16b" : "+w"(sums[i]) : "w"(a), "w"(b));
    UNROLLED for (int i = 1; i < 16; i++) sums[0] = vaddq_s32(sums[0], sums[i]);
    sink += vaddvq_s32(sums[0]);
}
static int prepare(void) { return 0; }
#else
#define KIND "none"
#define BYTES_PER_ROUND 0
static void multiply_bytes(const struct job *job) { (void)job; }
static int prepare(void) { return 0; }
#endif

static void *work(void *argument) {
    struct job *job = argument;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(job->core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
    pthread_barrier_wait(&barrier);
    if (job->mode == READ) read_bytes(job);
    else if (job->mode == FLOATS) multiply_floats(job);
    else multiply_bytes(job);
    return NULL;
}

static double run(struct job *jobs, int num_threads, long rounds) {
    pthread_t threads[MAX_THREADS];
    pthread_barrier_init(&barrier, NULL, num_threads + 1);
    for (int i = 0; i < num_threads; i++) {
        jobs[i].rounds = rounds;
        if (pthread_create(&threads[i], NULL, work, &jobs[i])) exit(1);
    }
    pthread_barrier_wait(&barrier);
    double begin = now();
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    return now() - begin;
}

/* Of `amount` a round and thread, a second. */
static double best_rate(struct job *jobs, int num_threads, int mode, double amount) {
    for (int i = 0; i < num_threads; i++) jobs[i].mode = mode;
    long rounds = 1;
    double seconds = run(jobs, num_threads, rounds);
    while (seconds < SECONDS / 4) seconds = run(jobs, num_threads, rounds *= 2);
    double best = 0;
    rounds = rounds * (SECONDS / seconds) + 1;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double rate = amount * num_threads * rounds / run(jobs, num_threads, rounds);
        if (rate > best) best = rate;
    }
    return best;
}

int main(int count, char **values) {
    int num_threads = count > 1 ? atoi(values[1]) : 1;
    size_t num_bytes = (size_t)(count > 2 ? atoi(values[2]) : 1024) << 20;
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    if (num_threads < 1 || num_threads > MAX_THREADS || num_threads > CPU_COUNT(&allowed) || !num_bytes) {
        fprintf(stderr, "limits THREADS MEBIBYTES: at most %d threads here\n", CPU_COUNT(&allowed));
        return 2;
    }
    char *bytes = aligned_alloc(4096, num_bytes);
    if (!bytes) return 1;
    memset(bytes, 1, num_bytes);
    struct job jobs[MAX_THREADS] = {0};
    size_t share = num_bytes / num_threads / 512 * 512;
    for (int i = 0, core = 0; i < num_threads; core++)
        if (CPU_ISSET(core, &allowed)) jobs[i] = (struct job){.core = core, .num_bytes = share, .bytes = bytes + share * i}, i++;
    int has_bytes = BYTES_PER_ROUND > 0 && prepare() == 0;
    double read = best_rate(jobs, num_threads, READ, (double)share);
    double flops = best_rate(jobs, num_threads, FLOATS, FLOATS_PER_ROUND);
    double ops = has_bytes ? best_rate(jobs, num_threads, BYTES, BYTES_PER_ROUND) : 0;
    printf("{\"read\": %.4g, \"float32\": %.4g, \"int8\": %.4g, \"int8_kind\": \"%s\"}\n", read, flops, ops, KIND);
    return 0;
}
