// Blocks read from their files: the bytes that were written, and a checksum that another implementation of XXH3 (the package
// xxhash) has computed for the same bytes.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checking.h"
#include "kernels.h"

#define HEAD 40
#define CHECKSUM 24

static const struct {
    int64_t key, content;
    const char *checksum;
} cases[] = {
    {34, 256, "79e44d346d1536ba18306e0ce29e7dfa"},    {34, 990, "c2c5f91c3d9bd3c6cb7edddf7d56c6f7"},
    {34, 1054, "2e5e8399bacec2a38f98b9ca0f45c92d"},   {1, 5000, "8370610df92bccd981b8b1f72a621e36"},
    {256, 131849, "a458777d1097a23aa5f930c93f5e4ff5"}, {34, 400000, "9c055424b3becd95f3ccad6cb3231339"},
};

static uint8_t byte_of(int64_t i) { return (uint8_t)(i * 7 + (i >> 8) * 13 + (i >> 16) * 29 + 5); }

static int read_block(const char *path, const uint8_t *head, int64_t key, const block_part *parts, int64_t num_parts) {
    const int file = open(path, O_RDONLY);
    expect_true(file >= 0, "a file is opened", 0, 0);
    const int outcome = ratoon_read_block(file, head, key, parts, num_parts);
    close(file);
    return outcome;
}

static void write_file(const char *path, const uint8_t *bytes, int64_t count) {
    FILE *file = fopen(path, "wb");
    expect_true(file && fwrite(bytes, 1, (size_t)count, file) == (size_t)count, "a file is written", 0, count);
    if (file) fclose(file);
}

static void check_case(const char *path, int64_t key, int64_t content, const char *checksum) {
    const int64_t whole = HEAD + key + content, cut = random_between(1, content - 1);
    uint8_t *file = guarded(whole), *first = guarded(cut), *second = guarded(content - cut);
    for (int64_t i = 0; i < HEAD; i++) file[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < 16; i++) {
        const char digits[3] = {checksum[2 * i], checksum[2 * i + 1], 0};
        file[CHECKSUM + i] = (uint8_t)strtol(digits, NULL, 16);
    }
    for (int64_t i = 0; i < key + content; i++) file[HEAD + i] = byte_of(i);
    write_file(path, file, whole);
    const block_part parts[] = {{first, cut}, {second, content - cut}};
    const int outcome = read_block(path, file, key, parts, 2);
    if (outcome == BLOCK_UNKNOWN) return;  // this system can't tell what is in memory
    expect_true(outcome == BLOCK_READ, "a block is read", key, content);
    expect_true(!memcmp(first, file + HEAD + key, (size_t)cut), "its first part", key, content);
    expect_true(!memcmp(second, file + HEAD + key + cut, (size_t)(content - cut)), "its second part", key, content);
    for (int turn = 0; turn < 4; turn++) {
        const int64_t wrong = random_between(0, whole - 1);
        uint8_t *damaged = guarded(whole);
        memcpy(damaged, file, (size_t)whole);
        damaged[wrong] ^= (uint8_t)(1 << random_between(0, 7));
        write_file(path, damaged, whole);
        expect_true(read_block(path, file, key, parts, 2) == BLOCK_DAMAGED, "a wrong byte is found", key, wrong);
    }
    write_file(path, file, whole - 1);
    expect_true(read_block(path, file, key, parts, 2) == BLOCK_UNKNOWN, "a file that was cut", key, content);
    release_all();
}

void check_block_file(void) {
    char path[] = "/tmp/ratoon-block-XXXXXX";
    const int file = mkstemp(path);
    expect_true(file >= 0, "a file is made", 0, 0);
    if (file < 0) return;
    close(file);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_case(path, cases[i].key, cases[i].content, cases[i].checksum);
    unlink(path);
    const block_part none[] = {{(uint8_t *)path, 1}};
    expect_true(ratoon_read_block(-1, (const uint8_t *)path, 1, none, 1) == BLOCK_UNKNOWN, "no file", 0, 0);
}
