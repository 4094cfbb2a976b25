// A block of the KV cache is read from its file (ratoon/distributed/kv_files.py): its bytes go to their places, and the checksum is
// computed strip by strip, while a strip is in the cache of the processor.
//
// Only what the system has in memory of an open file is read, so that nothing here waits for a device. The checksum is XXH3 with 128 bits,
// as its specification has it for inputs of more than 240 bytes, over the key and the content. Numbers are little-endian.
#define _GNU_SOURCE
#include <string.h>

#include "kernels.h"
#include "vector.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define STRIP (1 << 17)       // bytes that are read at once: they stay in the second-level cache
#define HEAD 40               // bytes before the key: what kv_files.py calls HEADER
#define CHECKSUM 24           // where the checksum of 16 bytes begins
#define MOST_KEY_BYTES 256
#define LEAST_CONTENT 256     // shorter inputs have another checksum
#define NO_WAIT 8             // RWF_NOWAIT

#define STRIPE 64             // bytes that are added to the sums at once
#define STRIPES_IN_ROUND 16
#define LOW 0xffffffffull

static const uint64_t PRIME_32_1 = 0x9e3779b1u, PRIME_32_2 = 0x85ebca77u, PRIME_32_3 = 0xc2b2ae3du;
static const uint64_t PRIME_64_1 = 0x9e3779b185ebca87u, PRIME_64_2 = 0xc2b2ae3d27d4eb4fu, PRIME_64_3 = 0x165667b19e3779f9u;
static const uint64_t PRIME_64_4 = 0x85ebca77c2b2ae63u, PRIME_64_5 = 0x27d4eb2f165667c5u;

// The constant that the specification calls the default secret.
static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define LAST_STRIPE_FROM 121  // in the secret
#define LOW_HALF_FROM 11
#define HIGH_HALF_FROM 117
#define SCRAMBLE_FROM 128

typedef uint64_t lanes __attribute__((vector_size(STRIPE), aligned(1)));

// A checksum of an input that comes piece by piece. The numbers of the input are added to the neighbours of the products that they
// are in; here they have sums of their own until a round ends.
typedef struct {
    lanes products, numbers;
    int64_t stripes_left;     // but the last one, which may overlap the one before it
    int stripes_in_round;
    int num_left;             // bytes of a stripe that has not come whole
    uint8_t left[STRIPE], last[STRIPE];
    uint64_t bytes;
} checksum;

static void begin_checksum(checksum *c, int64_t bytes) {
    c->products = (lanes){PRIME_32_3, PRIME_64_1, PRIME_64_2, PRIME_64_3, PRIME_64_4, PRIME_32_2, PRIME_64_5, PRIME_32_1};
    c->numbers = (lanes){};
    c->stripes_left = (bytes - 1) / STRIPE;
    c->stripes_in_round = c->num_left = 0;
    c->bytes = (uint64_t)bytes;
}

INLINE void add_stripe(lanes *products, lanes *numbers, const uint8_t *from, const uint8_t *secret) {
    const lanes number = *(const lanes *)from, mixed = number ^ *(const lanes *)secret;
    *products += (mixed & LOW) * (mixed >> 32);
    *numbers += number;
}

static lanes sums_of(const checksum *c) {
    lanes sums = c->products;
    for (int i = 0; i < 8; i++) sums[i] += c->numbers[i ^ 1];
    return sums;
}

static void end_round(checksum *c) {
    const lanes sums = sums_of(c);
    c->products = (sums ^ (sums >> 47) ^ *(const lanes *)(SECRET + SCRAMBLE_FROM)) * PRIME_32_1;
    c->numbers = (lanes){};
    c->stripes_in_round = 0;
}

static void add_stripes(checksum *c, const uint8_t *from, int64_t stripes) {
    c->stripes_left -= stripes;
    while (stripes) {
        const int64_t room = STRIPES_IN_ROUND - c->stripes_in_round, now = stripes < room ? stripes : room;
        const uint8_t *secret = SECRET + 8 * c->stripes_in_round;
        lanes products = c->products, numbers = c->numbers;
        for (int64_t i = 0; i < now; i++) add_stripe(&products, &numbers, from + i * STRIPE, secret + 8 * i);
        c->products = products;
        c->numbers = numbers;
        from += now * STRIPE;
        stripes -= now;
        c->stripes_in_round += (int)now;
        if (c->stripes_in_round == STRIPES_IN_ROUND) end_round(c);
    }
}

// The last STRIPE bytes of all that has come.
static void keep_last(checksum *c, const uint8_t *from, int64_t bytes) {
    const int64_t kept = bytes < STRIPE ? bytes : STRIPE;
    memmove(c->last, c->last + kept, (size_t)(STRIPE - kept));
    memcpy(c->last + STRIPE - kept, from + bytes - kept, (size_t)kept);
}

static void add_bytes(checksum *c, const uint8_t *from, int64_t bytes) {
    keep_last(c, from, bytes);
    if (c->num_left) {
        const int64_t missing = STRIPE - c->num_left, now = bytes < missing ? bytes : missing;
        memcpy(c->left + c->num_left, from, (size_t)now);
        c->num_left += (int)now;
        from += now;
        bytes -= now;
        if (c->num_left < STRIPE) return;
        if (c->stripes_left) add_stripes(c, c->left, 1);
        c->num_left = 0;
    }
    const int64_t whole = bytes / STRIPE, stripes = whole < c->stripes_left ? whole : c->stripes_left;
    add_stripes(c, from, stripes);
    c->num_left = (int)(bytes - whole * STRIPE);
    memcpy(c->left, from + whole * STRIPE, (size_t)c->num_left);
}

static uint64_t folded_product(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t half_of(lanes sums, const uint8_t *secret, uint64_t half) {
    for (int i = 0; i < 8; i += 2) {
        uint64_t keys[2];
        memcpy(keys, secret + 8 * i, 16);
        half += folded_product(sums[i] ^ keys[0], sums[i + 1] ^ keys[1]);
    }
    half = (half ^ (half >> 37)) * 0x165667919e3779f9u;
    return half ^ (half >> 32);
}

// The bytes of the result: the high half first, each half with its highest byte first.
static void end_checksum(checksum *c, uint8_t result[16]) {
    lanes products = c->products, numbers = c->numbers;
    add_stripe(&products, &numbers, c->last, SECRET + LAST_STRIPE_FROM);
    c->products = products;
    c->numbers = numbers;
    const lanes sums = sums_of(c);
    const uint64_t high = half_of(sums, SECRET + HIGH_HALF_FROM, ~(c->bytes * PRIME_64_2));
    const uint64_t low = half_of(sums, SECRET + LOW_HALF_FROM, c->bytes * PRIME_64_1);
    for (int i = 0; i < 8; i++) {
        result[i] = (uint8_t)(high >> (56 - 8 * i));
        result[8 + i] = (uint8_t)(low >> (56 - 8 * i));
    }
}

// 0: the system has not all of it in memory, or can't tell.
static int read_now(int file, void *to, int64_t bytes, int64_t from) {
    const struct iovec part = {to, (size_t)bytes};
    return syscall(SYS_preadv2, file, &part, 1L, (long)from, 0L, (long)NO_WAIT) == bytes;
}

int ratoon_read_block(int file, const uint8_t *head, int64_t key_bytes, const block_part *parts, int64_t num_parts) {
    uint8_t found[HEAD + MOST_KEY_BYTES], result[16];
    const int64_t head_bytes = HEAD + key_bytes;
    int64_t content = 0;
    checksum c;
    for (int64_t i = 0; i < num_parts; i++) content += parts[i].bytes;
    if (content < LEAST_CONTENT || key_bytes > MOST_KEY_BYTES) return BLOCK_UNKNOWN;
    if (!read_now(file, found, head_bytes, 0)) return BLOCK_UNKNOWN;
    if (memcmp(found, head, CHECKSUM) || memcmp(found + HEAD, head + HEAD, (size_t)key_bytes)) return BLOCK_DAMAGED;
    begin_checksum(&c, key_bytes + content);
    add_bytes(&c, found + HEAD, key_bytes);
    int64_t from = head_bytes;
    for (int64_t i = 0; i < num_parts; i++)
        for (int64_t begin = 0; begin < parts[i].bytes; begin += STRIP) {
            const int64_t left = parts[i].bytes - begin, bytes = left < STRIP ? left : STRIP;
            if (!read_now(file, parts[i].bytes_at + begin, bytes, from)) return BLOCK_UNKNOWN;
            add_bytes(&c, parts[i].bytes_at + begin, bytes);
            from += bytes;
        }
    end_checksum(&c, result);
    return memcmp(result, found + CHECKSUM, sizeof result) ? BLOCK_DAMAGED : BLOCK_READ;
}

#else

int ratoon_read_block(int file, const uint8_t *head, int64_t key_bytes, const block_part *parts, int64_t num_parts) {
    (void)file, (void)head, (void)key_bytes, (void)parts, (void)num_parts;
    return BLOCK_UNKNOWN;
}

#endif
