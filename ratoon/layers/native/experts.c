// A mixture of experts: which experts each row goes to, and the sum of what they make of it.
//
// Pairs of a row and one of its experts are sorted by expert, so that an expert's weight is read once for all rows that it has;
// experts without rows are not read. A row's result is the sum over its experts in the order in which they were chosen, whatever
// else is in the batch: with the products of linear.c and quantised.c it has the same bits in any batch.
#include <math.h>
#include <string.h>

#include "jobs.h"
#include "kernels.h"
#include "threads.h"
#include "vector.h"

#define MOST_SCRATCH (256ll << 20)  // bytes; more rows are computed some after the others
#define LEAST_ROWS 16               // at a time
#define FLOATS_PER_UNIT 16384       // below this, handing work to another thread costs more than doing it
#define LINE 64

// ---- routes ----

typedef struct {
    const route_rule *rule;
    const float *logits;
    int64_t ldl, rows, rows_per_unit;
    int32_t *chosen;
    float *weights;
} route_call;

// The scores of a row's experts.
static void score_row(const route_rule *r, const float *logits, float *scores) {
    if (r->scoring == ROUTE_SIGMOID) {
        for (int64_t e = 0; e < r->experts; e++) scores[e] = 1.0f / (1.0f + exp_scalar(-logits[e]));
        return;
    }
    float largest = logits[0], sum = 0.0f;
    for (int64_t e = 1; e < r->experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    int64_t e = 0;
    for (; e + W <= r->experts; e += W) store(scores + e, exp_(load(logits + e) - splat(largest)));
    for (; e < r->experts; e++) scores[e] = exp_scalar(logits[e] - largest);
    for (e = 0; e < r->experts; e++) sum += scores[e];
    for (e = 0; e < r->experts; e++) scores[e] /= sum;
}

// What groups are compared by: the sum of the two largest of their experts, or, without a bias, the largest.
static float score_of_group(const float *choice, int64_t size, int sums_two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = 0; e < size; e++) {
        if (choice[e] > first)
            second = first, first = choice[e];
        else if (choice[e] > second)
            second = choice[e];
    }
    return sums_two && size > 1 ? first + second : first;
}

// The index of the largest, the first of equals; NaN is never chosen before a number.
static int64_t largest_of(const float *values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
    return best;
}

// Experts of all groups but the best ones get the lowest score.
static void keep_best_groups(const route_rule *r, float *choice) {
    float groups[MOST_EXPERTS];
    const int64_t size = r->experts / r->groups;
    for (int64_t g = 0; g < r->groups; g++) groups[g] = score_of_group(choice + g * size, size, r->bias != NULL);
    uint8_t kept[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < r->top_groups; i++) {
        const int64_t best = largest_of(groups, r->groups);
        kept[best] = 1, groups[best] = -INFINITY;
    }
    for (int64_t e = 0; e < r->experts; e++)
        if (!kept[e / size]) choice[e] = -INFINITY;
}

static void route_row(const route_rule *r, const float *logits, int32_t *chosen, float *weights) {
    float scores[MOST_EXPERTS], choice[MOST_EXPERTS], sum = 0.0f;
    score_row(r, logits, scores);
    for (int64_t e = 0; e < r->experts; e++) choice[e] = r->bias ? scores[e] + r->bias[e] : scores[e];
    if (r->groups > 1) keep_best_groups(r, choice);
    uint8_t taken[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < r->top_k; i++) {
        int64_t best = largest_of(choice, r->experts);
        if (taken[best])  // none is left but those of other groups, or all are NaN
            for (best = 0; taken[best]; best++) {}
        taken[best] = 1, choice[best] = -INFINITY;
        chosen[i] = (int32_t)best;
        weights[i] = scores[best];
        sum += scores[best];
    }
    const float factor = r->renormalise ? r->scale / (sum + 1e-20f) : r->scale;
    for (int64_t i = 0; i < r->top_k; i++) weights[i] *= factor;
}

static void route_unit(void *context, int64_t unit) {
    const route_call *c = context;
    const int64_t first = unit * c->rows_per_unit, left = c->rows - first, k = c->rule->top_k;
    for (int64_t i = first; i < first + (left < c->rows_per_unit ? left : c->rows_per_unit); i++)
        route_row(c->rule, c->logits + i * c->ldl, c->chosen + i * k, c->weights + i * k);
}

void ratoon_route(const route_rule *rule, const float *logits, int64_t ldl, int64_t rows, int32_t *chosen, float *weights,
                  int64_t *counts) {
    const int64_t per_unit = FLOATS_PER_UNIT / (rule->experts * (8 + rule->top_k)) + 1;
    route_call c = {rule, logits, ldl, rows, per_unit, chosen, weights};
    if (rows > 0) parallel_units(route_unit, &c, (rows + per_unit - 1) / per_unit);
    if (counts)
        for (int64_t i = 0; i < rows * rule->top_k; i++) counts[chosen[i]]++;
}

// ---- experts ----

typedef struct {
    const expert_layer *layer;
    const float *x;
    const int32_t *chosen;  // [rows][top_k]
    const float *weights;
    float *y;
    int64_t ldx, rows, top_k, pairs;  // those of the experts of this layer: another rank may have some
    int32_t *places;                  // [rows][top_k]: of a pair among those that are sorted, or -1
    int32_t *sources;                 // [pairs]: the row
    int64_t *starts;                  // [experts + 1]: the first pair of each
    linear_job *jobs;
    float *gathered, *between, *activated, *results;  // [pairs] rows each
    void *quantised;
} expert_call;

static int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static int64_t widest_scratch(const expert_layer *l) {
    return l->has_quantised ? ratoon_quantised_scratch(l->in > l->inner ? l->in : l->inner) : 0;
}

// Where the parts of the scratch begin, or, without a call, how many bytes they are.
static int64_t lay_out(const expert_layer *l, int64_t rows, int64_t top_k, expert_call *c, char *scratch) {
    const int64_t pairs = rows * top_k, floats = sizeof(float);
    const int64_t sizes[] = {pairs * (int64_t)sizeof(int32_t), pairs * (int64_t)sizeof(int32_t),
                             (l->experts + 1) * (int64_t)sizeof(int64_t), l->experts * (int64_t)sizeof(linear_job),
                             pairs * l->in * floats, pairs * 2 * l->inner * floats, pairs * l->inner * floats,
                             pairs * l->out * floats, (pairs + QUANTISED_ROOM) * widest_scratch(l)};
    char *parts[9];
    int64_t total = 0;
    for (int i = 0; i < 9; i++) {
        parts[i] = scratch + total;
        total += lines(sizes[i]);
    }
    if (c) {
        c->places = (int32_t *)parts[0], c->sources = (int32_t *)parts[1], c->starts = (int64_t *)parts[2];
        c->jobs = (linear_job *)parts[3], c->gathered = (float *)parts[4], c->between = (float *)parts[5];
        c->activated = (float *)parts[6], c->results = (float *)parts[7], c->quantised = parts[8];
    }
    return total;
}

static int64_t rows_at_a_time(const expert_layer *l, int64_t rows, int64_t top_k) {
    while (rows > LEAST_ROWS && lay_out(l, rows, top_k, NULL, NULL) > MOST_SCRATCH) rows = (rows + 1) / 2;
    return rows;
}

int64_t ratoon_experts_scratch(const expert_layer *layer, int64_t rows, int64_t top_k) {
    return lay_out(layer, rows_at_a_time(layer, rows, top_k), top_k, NULL, NULL);
}

static void sort_pairs(expert_call *c) {
    const expert_layer *l = c->layer;
    memset(c->starts, 0, (size_t)(l->experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < c->rows * c->top_k; i++) {
        const int64_t expert = c->chosen[i] - l->first;
        if (expert >= 0 && expert < l->experts) c->starts[expert + 1]++;
    }
    for (int64_t e = 0; e < l->experts; e++) c->starts[e + 1] += c->starts[e];
    c->pairs = c->starts[l->experts];
    // starts[e] is where the next pair of e goes; behind the loop it is where those of e + 1 begin.
    for (int64_t i = 0; i < c->rows * c->top_k; i++) {
        const int64_t expert = c->chosen[i] - l->first;
        c->places[i] = -1;
        if (expert < 0 || expert >= l->experts) continue;
        c->places[i] = (int32_t)c->starts[expert]++;
        c->sources[c->places[i]] = (int32_t)(i / c->top_k);
    }
    memmove(c->starts + 1, c->starts, (size_t)l->experts * sizeof(int64_t));
    c->starts[0] = 0;
}

static void gather_pair(void *context, int64_t pair) {
    const expert_call *c = context;
    memcpy(c->gathered + pair * c->layer->in, c->x + c->sources[pair] * c->ldx, (size_t)c->layer->in * sizeof(float));
}

// One product of each expert that has rows: from `x`, whose rows are sorted, or where they are if it is NULL and there is one.
static int multiply(expert_call *c, const expert_weight *weights, const float *x, int64_t in, int64_t out, float *y, int64_t ldy) {
    for (int is_quantised = 0; is_quantised < 2; is_quantised++) {
        int64_t count = 0;
        for (int64_t e = 0; e < c->layer->experts; e++) {
            const int64_t first = c->starts[e], rows = c->starts[e + 1] - first;
            if (!rows || (weights[e].quantised != NULL) != is_quantised) continue;
            linear_job *job = &c->jobs[count++];
            *job = (linear_job){.y = y + first * ldy, .ldy = ldy, .rows = rows, .packed = weights[e].packed,
                                .bias = weights[e].bias, .quantised = weights[e].quantised};
            if (x)
                job->x = x + first * in, job->ldx = in;
            else if (rows == 1)
                job->x = c->x + c->sources[first] * c->ldx, job->ldx = c->ldx;
            else
                job->x = c->gathered + first * in, job->ldx = in;
        }
        if (is_quantised ? quantised_jobs(c->jobs, count, c->quantised) : linear_jobs(c->jobs, count, in, out)) return -1;
    }
    return 0;
}

// y of a row: the sum of its experts' results times their weights.
static void combine_row(void *context, int64_t row) {
    const expert_call *c = context;
    const int64_t out = c->layer->out;
    float *y = c->y + row * out;
    int started = 0;
    for (int64_t i = row * c->top_k; i < (row + 1) * c->top_k; i++) {
        if (c->places[i] < 0) continue;
        const float *result = c->results + c->places[i] * out;
        const float weight = c->weights[i];
        int64_t j = 0;
        for (; j + W <= out; j += W) store(y + j, fma_(load(result + j), splat(weight), started ? load(y + j) : (vec){}));
        for (; j < out; j++) y[j] = __builtin_fmaf(result[j], weight, started ? y[j] : 0.0f);
        started = 1;
    }
    if (!started) memset(y, 0, (size_t)out * sizeof(float));
}

static int experts_of_rows(expert_call *c) {
    const expert_layer *l = c->layer;
    sort_pairs(c);
    for (int64_t e = 0; e < l->experts; e++)
        if (c->starts[e + 1] - c->starts[e] > 1) {
            parallel_units(gather_pair, c, c->pairs);
            break;
        }
    const int64_t width = 2 * l->inner / l->parts;  // of a part of gate and up
    for (int64_t part = 0; part < l->parts; part++)
        if (multiply(c, l->gate_up + part * l->experts, NULL, l->in, width, c->between + part * width, 2 * l->inner)) return -1;
    if (l->activation == CLAMPED_SWIGLU)
        ratoon_clamped_swiglu(c->between, 2 * l->inner, c->activated, c->pairs, l->inner, l->limit);
    else
        ratoon_gated_activation(c->between, 2 * l->inner, c->activated, c->pairs, l->inner, (int)l->activation);
    if (multiply(c, l->down, c->activated, l->inner, l->out, c->results, l->out)) return -1;
    parallel_units(combine_row, c, c->rows);
    return 0;
}

int ratoon_experts(const expert_layer *layer, const float *x, int64_t ldx, int64_t rows, const int32_t *chosen,
                   const float *weights, int64_t top_k, void *scratch, float *y) {
    const int64_t most = rows_at_a_time(layer, rows, top_k);
    for (int64_t row = 0; row < rows; row += most) {
        expert_call c = {.layer = layer, .x = x + row * ldx, .ldx = ldx, .chosen = chosen + row * top_k, .top_k = top_k,
                         .weights = weights + row * top_k, .y = y + row * layer->out,
                         .rows = rows - row < most ? rows - row : most};
        lay_out(layer, c.rows, top_k, &c, scratch);
        if (experts_of_rows(&c)) return -1;
    }
    return 0;
}

// ---- a shared expert ----

void ratoon_add_gated(float *y, const float *x, const float *gates, int64_t ldg, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        const float gate = 1.0f / (1.0f + exp_scalar(-gates[i * ldg]));
        float *to = y + i * width;
        const float *from = x + i * width;
        int64_t j = 0;
        for (; j + W <= width; j += W) store(to + j, fma_(load(from + j), splat(gate), load(to + j)));
        for (; j < width; j++) to[j] = __builtin_fmaf(from[j], gate, to[j]);
    }
}
