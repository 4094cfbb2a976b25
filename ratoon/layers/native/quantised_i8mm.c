// Products of many rows with a quantised weight by the matrix instruction of ARM (i8mm): 2 rows by 2 columns by 8 inputs.
//
// Every result is the chain of operations of quantised.c. Rows behind the last are computed too (the activations have room
// for them) and not written.
#include "unpack.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define TILE_ROWS 8
#define ROW_PAIRS (TILE_ROWS / 2)
#define COLUMN_PAIRS 2              // of a tile
#define PIECE 8                     // inputs of an instruction
#define PIECES (QUANTISED_BLOCK / PIECE)

// Of an operand [2 rows or columns][8], 16 bytes.
INLINE int8x16_t load_pair(const int8_t *p) { return vld1q_s8(p); }

// [first 2 lanes of a, first 2 lanes of b], and the last ones: from two rows of 4 columns to two pairs of columns, and back.
INLINE vec first_halves(vec a, vec b) { return (vec)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
INLINE vec last_halves(vec a, vec b) { return (vec)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }

// Numbers of two rows, or of two columns, where a sum of 2 rows by 2 columns has them.
INLINE vec spread_rows(const float *p) { return (vec){p[0], p[0], p[1], p[1]}; }
INLINE vec spread_columns(const float *p) { return (vec){p[0], p[1], p[0], p[1]}; }

void pair_rows(int8_t (*codes)[QUANTISED_BLOCK], int64_t rows) {
    for (int64_t i = 0; i < rows; i += 2) {
        int8_t *pair = codes[i];
        const int64x2_t a = (int64x2_t)vld1q_s8(pair), b = (int64x2_t)vld1q_s8(pair + 16);
        const int64x2_t c = (int64x2_t)vld1q_s8(pair + 32), d = (int64x2_t)vld1q_s8(pair + 48);
        vst1q_s8(pair, (int8x16_t)vzip1q_s64(a, c));
        vst1q_s8(pair + 16, (int8x16_t)vzip2q_s64(a, c));
        vst1q_s8(pair + 32, (int8x16_t)vzip1q_s64(b, d));
        vst1q_s8(pair + 48, (int8x16_t)vzip2q_s64(b, d));
    }
}

// From [quads][16 columns][4] to [pieces][pairs of columns][2][8].
static void pair_columns(unpacked *stretch, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block++)
        for (int piece = 0; piece < PIECES; piece++) {
            int32_t *quads = (int32_t *)stretch->codes[block][2 * piece];
            int32x4_t first[TILE / 4], second[TILE / 4];
            for (int j = 0; j < TILE / 4; j++) first[j] = vld1q_s32(quads + 4 * j), second[j] = vld1q_s32(quads + TILE + 4 * j);
            for (int j = 0; j < TILE / 4; j++) {
                vst1q_s32(quads + 8 * j, vzip1q_s32(first[j], second[j]));
                vst1q_s32(quads + 8 * j + 4, vzip2q_s32(first[j], second[j]));
            }
        }
}

typedef struct {
    const quantised_call *call;
    const unpacked *stretch;
    int64_t row, rows, panel, first_block, blocks;
    int vector;  // of 4 columns, among those of the panel
    int is_last;
} tile_place;

typedef ivec tile_sums[ROW_PAIRS][COLUMN_PAIRS];

INLINE void sum_group(int first, int last, const int8_t *rows, const int8_t *columns, tile_sums sums) {
    UNROLLED for (int i = 0; i < ROW_PAIRS; i++)
        UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++) sums[i][j] = (ivec){};
    UNROLLED for (int piece = first; piece < last; piece++) {
        int8x16_t weights[COLUMN_PAIRS];
        UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++) weights[j] = load_pair(columns + piece * PIECE * TILE + j * 2 * PIECE);
        UNROLLED for (int i = 0; i < ROW_PAIRS; i++) {
            const int8x16_t inputs = load_pair(rows + i * 2 * QUANTISED_BLOCK + piece * 2 * PIECE);
            UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++)
                sums[i][j] = (ivec)vmmlaq_s32((int32x4_t)sums[i][j], inputs, weights[j]);
        }
    }
}

// Adds a stretch to a tile [8][4] of y. The first two arguments are constants.
INLINE void add_stretch(int group, int has_offsets, const tile_place *p) {
    const quantised_call *c = p->call;
    const int groups = QUANTISED_BLOCK / group;
    const int64_t lanes = p->vector * W, column = p->panel * TILE + lanes, count = c->weight->out - column;
    float *y = c->y + p->row * c->ldy + column;
    vec acc[ROW_PAIRS][COLUMN_PAIRS];
    UNROLLED for (int i = 0; i < ROW_PAIRS; i++) {
        const vec first = p->first_block && 2 * i < p->rows ? read_part(y + 2 * i * c->ldy, count) : (vec){};
        const vec second = p->first_block && 2 * i + 1 < p->rows ? read_part(y + (2 * i + 1) * c->ldy, count) : (vec){};
        acc[i][0] = first_halves(first, second);
        acc[i][1] = last_halves(first, second);
    }
    for (int64_t block = 0; block < p->blocks; block++) {
        const activation_block x = block_of(c, p->row, p->first_block + block);
        const rest_block rest = rests_of(c, p->row, p->first_block + block);
        const int with_rests = has_rests(c, p->row, p->first_block + block);
        const int8_t *columns = (const int8_t *)p->stretch->codes[block] + lanes * PIECE;
        UNROLLED for (int g = 0; g < groups; g++) {
            const int first = g * group / PIECE, last = (g + 1) * group / PIECE;
            const float *scales = p->stretch->scales[block * groups + g] + lanes;
            tile_sums sums, rests;
            vec values[ROW_PAIRS][COLUMN_PAIRS];
            sum_group(first, last, x.codes[0], columns, sums);
            UNROLLED for (int i = 0; i < ROW_PAIRS; i++)
                UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++) values[i][j] = __builtin_convertvector(sums[i][j], vec);
            if (with_rests) {
                sum_group(first, last, rest.codes[0], columns, rests);
                UNROLLED for (int i = 0; i < ROW_PAIRS; i++)
                    UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++) values[i][j] = value_with_rest(sums[i][j], rests[i][j]);
            }
            UNROLLED for (int i = 0; i < ROW_PAIRS; i++) {
                const vec x_scales = spread_rows(x.scales + 2 * i);
                UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++)
                    acc[i][j] = fma_(values[i][j], spread_columns(scales + 2 * j) * x_scales, acc[i][j]);
            }
        }
        if (has_offsets)
            UNROLLED for (int i = 0; i < ROW_PAIRS; i++) {
                const vec x_sums = spread_rows(x.scaled_sums + 2 * i);
                UNROLLED for (int j = 0; j < COLUMN_PAIRS; j++)
                    acc[i][j] = fma_(x_sums, spread_columns(p->stretch->offsets[block] + lanes + 2 * j), acc[i][j]);
            }
    }
    UNROLLED for (int i = 0; i < TILE_ROWS; i++) {
        const vec *pair = acc[i / 2], sum = i % 2 ? last_halves(pair[0], pair[1]) : first_halves(pair[0], pair[1]);
        if (i < p->rows) write_part(y + i * c->ldy, count, p->is_last ? finish(c->weight, column, sum) : sum);
    }
}

static void add_plain(const tile_place *p) { add_stretch(32, 0, p); }
static void add_with_offsets(const tile_place *p) { add_stretch(32, 1, p); }
static void add_groups_of_16(const tile_place *p) { add_stretch(16, 0, p); }

void multiply_by_pairs(const quantised_call *c, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
    void (*add)(const tile_place *) = c->weight->offsets ? add_with_offsets : c->groups == 2 ? add_groups_of_16 : add_plain;
    unpacked stretch;
    tile_place place = {.call = c, .stretch = &stretch};
    for (place.panel = first_panel; place.panel < last_panel; place.panel++)
        for (place.first_block = 0; place.first_block < c->blocks; place.first_block += STRETCH) {
            int64_t left = c->blocks - place.first_block;
            place.blocks = left < STRETCH ? left : STRETCH;
            place.is_last = left <= STRETCH;
            unpack(1, c, place.panel, place.first_block, place.blocks, &stretch);
            pair_columns(&stretch, place.blocks);
            for (place.row = first; place.row < last; place.row += TILE_ROWS) {
                place.rows = last - place.row < TILE_ROWS ? last - place.row : TILE_ROWS;
                for (place.vector = 0; place.vector < TILE_VECS; place.vector++) add(&place);
            }
        }
}
#endif
