// GGUF's blocks → panels of 16 columns, as quantised.h says: once for each weight, when it is loaded. Reads the file's bytes
// in order and writes each panel once, so that it takes about as long as copying them.
#include "blocks.h"
#include "threads.h"

#define PANEL 16  // output columns

typedef struct {
    const block_format *format;
    const uint8_t *blocks;
    int64_t rows, row_blocks;
    uint8_t *codes;
} codes_task;

static void repack_panel(void *context, int64_t panel) {
    const codes_task *task = context;
    const block_format *format = task->format;
    int64_t first = panel * PANEL, count = task->rows - first, code_bytes = format->code_bytes;
    int64_t panel_bytes = task->row_blocks * format->parts * PANEL * code_bytes;
    uint8_t *to = task->codes + panel * panel_bytes, codes[QUANTISED_BLOCK];
    if (count < PANEL) memset(to, 0, (size_t)panel_bytes);
    else count = PANEL;
    for (int64_t b = 0; b < task->row_blocks; b++)
        for (int part = 0; part < format->parts; part++, to += PANEL * code_bytes)
            for (int64_t row = 0; row < count; row++) {
                format->unpack(task->blocks + ((first + row) * task->row_blocks + b) * format->bytes, part, codes);
                for (int64_t quad = 0; quad < code_bytes / 4; quad++)
                    memcpy(to + (quad * PANEL + row) * 4, codes + quad * 4, 4);
            }
}

void ratoon_repack_codes(int64_t format, const uint8_t *blocks, int64_t rows, int64_t row_blocks, uint8_t *codes) {
    codes_task task = {&block_formats[format], blocks, rows, row_blocks, codes};
    parallel_units(repack_panel, &task, (rows + PANEL - 1) / PANEL);
}

typedef struct {
    const uint8_t *from;
    int64_t rows, groups, stride;
    uint16_t *to;
} halves_task;

static void repack_halves(void *context, int64_t panel) {
    const halves_task *task = context;
    int64_t first = panel * PANEL, count = task->rows - first;
    uint16_t *to = task->to + panel * PANEL * task->groups;
    if (count < PANEL) memset(to, 0, sizeof *to * (size_t)(PANEL * task->groups));
    else count = PANEL;
    for (int64_t row = 0; row < count; row++)
        for (int64_t group = 0; group < task->groups; group++)
            memcpy(to + group * PANEL + row, task->from + ((first + row) * task->groups + group) * task->stride, 2);
}

void ratoon_repack_halves(const void *halves, int64_t rows, int64_t groups, int64_t stride, uint16_t *packed) {
    halves_task task = {halves, rows, groups, stride, packed};
    parallel_units(repack_halves, &task, (rows + PANEL - 1) / PANEL);
}
