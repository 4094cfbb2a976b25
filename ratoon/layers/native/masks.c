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

static bool are_alike(const match_calls *calls, const uint32_t *mask) {
    const int64_t words = (calls->tokens + 31) / 32;
    int64_t count = 0;
    int first = -1;
    for (int64_t word = 0; word < words; word++) {
        uint32_t bits = mask[word];
        if (word == words - 1 && calls->tokens % 32) bits &= (1u << calls->tokens % 32) - 1;
        for (; bits; bits &= bits - 1) {
            const int byte = calls->first_bytes[32 * word + __builtin_ctz(bits)];
            if (++count > calls->most_alike || (first >= 0 && byte != first)) return false;
            first = byte;
        }
    }
    return count > 0;
}

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
    if (calls->is_accepting(matcher)) {
        step->found[text] = MATCH_ACCEPTING;
        return;
    }
    step->found[text] = are_alike(calls, mask) ? MATCH_ALIKE : 0;
}

// The texts share nothing but locks of the library, so any thread may take any of them.
void ratoon_match_texts(const match_calls *calls, void *const *matchers, const int32_t *tokens, const int32_t *rows,
                        int64_t texts, uint32_t *table, int64_t row_words, uint8_t *found) {
    match_step step = {calls, matchers, tokens, rows, table, row_words, found};
    parallel_units(match_text, &step, texts);
}
