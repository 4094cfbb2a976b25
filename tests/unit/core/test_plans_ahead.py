"""Which branches can be planned before their last token is known, told from their params alone."""

from __future__ import annotations

import pytest

from ratoon.core.params import SamplingParams, TimestampRules, plans_ahead

TIMESTAMPS = TimestampRules(first_token_id=20, no_timestamps_token_id=19, end_token_id=15)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "logprobs": 5, "stop": ["x"], "stop_token_ids": [4]},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "n": 4},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"suppressed_token_ids": [1], "suppressed_first_token_ids": [2]},
        {"min_tokens": 3, "eos_token_ids": [2]},
        {"forced_eos_token_id": [2], "max_tokens": 5},
        {"bad_words_ids": [[3], [4]], "bad_words_token_ids": [[5]]},
        {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": []},
        {"encoder_no_repeat_ngram_size": 1},
    ],
)
def test_a_branch_whose_rules_do_not_look_at_tokens_plans_ahead(fields):
    assert plans_ahead(SamplingParams(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"bad_words_token_ids": [[4, 5]]},
        {"timestamps": TIMESTAMPS},
        {"logit_bias": {3: 1.0}, "presence_penalty": 0.1},
    ],
)
def test_a_branch_with_a_rule_over_its_tokens_does_not(fields):
    assert not plans_ahead(SamplingParams(**fields))
