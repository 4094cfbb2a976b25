// Grammars of many texts at once: each goes on by a token, and writes the mask of the tokens that may follow.
//
// The grammar library is not linked to this one: its functions come as pointers.
#include "kernels.h"
#include "threads.h"

typedef struct {
    const match_calls *calls;
    void *const *matchers;
    const int32_t *tokens;
    const int32_t *rows;
    uint32_t *table;
    int64_t row_words;
    uint8_t *found;
} match_step;

static void match_text(void *context, int64_t text) {
    const match_step *step = context;
    const match_calls *calls = step->calls;
    void *matcher = step->matchers[text];
    if (step->tokens[text] >= 0 && calls->consume(matcher, (uint32_t)step->tokens[text]) != 0) {
        step->found[text] = MATCH_REFUSED;
        return;
    }
    uint32_t *mask = step->table + step->rows[text] * step->row_words;
    if (calls->fill(matcher, mask, (size_t)calls->mask_bytes) != 0) {
        step->found[text] = MATCH_FAILED;
        return;
    }
    step->found[text] = calls->is_accepting(matcher) ? MATCH_ACCEPTING : 0;
}

// The texts share nothing but locks of the library, so any thread may take any of them.
void ratoon_match_texts(const match_calls *calls, void *const *matchers, const int32_t *tokens, const int32_t *rows,
                        int64_t texts, uint32_t *table, int64_t row_words, uint8_t *found) {
    match_step step = {calls, matchers, tokens, rows, table, row_words, found};
    parallel_units(match_text, &step, texts);
}
