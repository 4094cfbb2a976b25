"""The rules over tokens by themselves: immutable values, with a cost independent of the text's length."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.params import SamplingParams, TimestampRules
from ratoon.execution.rules.bad_words import BadWords
from ratoon.execution.rules.base import RowRules, Stage, apply_rules
from ratoon.execution.rules.build import rules_of
from ratoon.execution.rules.forced_end import ForcedEnd
from ratoon.execution.rules.ngrams import NoNGramsOf, NoRepeatedNGrams, index_of
from ratoon.execution.rules.penalties import Penalties
from ratoon.execution.rules.persistent_map import PersistentMap
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import Needs, SamplingRows

VOCAB_SIZE = 20


def forbidden(rules: RowRules) -> set[int]:
    logits = torch.zeros(1, VOCAB_SIZE)
    apply_rules(logits, [rules.active()])
    return set(np.flatnonzero(~logits[0].isfinite()).tolist())


class SameHash(tuple):
    def __hash__(self) -> int:
        return 7


def test_a_persistent_map_is_a_dict_that_forks():
    chance = random.Random(1)
    maps: list[tuple[PersistentMap, dict]] = [(PersistentMap(), {})]
    for step in range(3000):
        ours, theirs = chance.choice(maps[-20:])
        key = chance.choice([(chance.randrange(300), step % 3), SameHash((chance.randrange(9),))])
        maps.append((ours.set(key, step), {**theirs, key: step}))
    for ours, theirs in maps[::50]:
        assert all(ours.get(key) == value for key, value in theirs.items())
        assert ours.get((300, 0)) is None and ours.get(SameHash((9,)), "default") == "default"


def test_forks_of_a_rule_do_not_see_each_other():
    rule = NoRepeatedNGrams.behind(2, [1, 2, 1])
    left, right = rule.after(5).after(1), rule.after(6).after(1)
    assert set(rule.forbidden()) == {2}
    assert (set(left.forbidden()), set(right.forbidden())) == ({2, 5}, {2, 6})
    words = BadWords.behind([[1, 2, 3], [4]], [1])
    assert (words.forbidden(), words.after(2).forbidden(), words.after(5).after(2).forbidden()) == ([4], [4, 3], [4])


def test_words_of_a_caller_begin_in_the_output_and_those_in_token_ids_in_the_prompt():
    params = SamplingParams(bad_words_token_ids=[[7, 8]], bad_words_ids=[[7, 9]])
    rules = rules_of(params, [5, 7])
    assert forbidden(rules) == {9}
    assert forbidden(rules.after(7)) == {8, 9}


def test_an_end_is_forced_once_and_at_the_last_place():
    rules = RowRules([ForcedEnd((2,), 3)])
    active = [bool(rules.after_all(text).active()) for text in ([], [1], [1, 1], [1, 1, 2])]
    assert active == [False, False, True, False]
    assert forbidden(rules.after_all([1, 1])) == {*range(VOCAB_SIZE)} - {2}


def test_the_encoder_s_ngrams_come_from_its_input_or_else_from_the_prompt():
    params = SamplingParams(encoder_no_repeat_ngram_size=2)
    with_encoder, without = rules_of(params, [1], [8, 1, 9]), rules_of(params, [1, 4, 1])
    assert (forbidden(with_encoder), forbidden(without)) == ({9}, {4})
    assert isinstance(with_encoder[0], NoNGramsOf)


def test_choices_over_one_prompt_share_its_index():
    prompt = list(range(50))
    assert index_of(3, prompt) is not index_of(2, prompt)
    first, second = NoRepeatedNGrams.behind(3, prompt), NoRepeatedNGrams.behind(3, tuple(prompt))
    assert first.prompt is second.prompt


def test_a_row_is_edited_only_in_steps_in_which_a_rule_says_something():
    rows = SamplingRows(1)
    params = SamplingParams(temperature=0.0, max_tokens=4, no_repeat_ngram_size=2, forced_eos_token_id=[9])
    rows.add(0, params, 0, [1, 2], [])
    needed = []
    for token in (1, 3, 4):
        needed.append(bool(rows.needs[0] & Needs.EDITS))
        rows.append_tokens(np.array([0]), np.array([token]))
    # behind 2 nothing stood before, behind 1 there was 2; the fourth token is the last
    assert needed == [False, True, False] and rows.needs[0] & Needs.EDITS
    logits = torch.zeros(1, 10)
    logits[0, 5] = 3.0
    assert Sampler(rows).sample(logits, np.array([0]), rows.seeds[:1]).to_numpy().tolist() == [9]


def test_a_row_without_rules_has_none():
    assert not rules_of(SamplingParams(no_repeat_ngram_size=0, forced_eos_token_id=[], bad_words_ids=[]), [1, 2])


def test_a_batch_without_rules_looks_at_none(monkeypatch):
    rows = SamplingRows(3)
    for slot in range(3):
        rows.add(slot, SamplingParams(temperature=0.5 * slot), 0, [1, 2], [])
    monkeypatch.setattr(rows, "rules", None)  # to read them would raise
    monkeypatch.setattr(rows, "active_rules", None)
    Sampler(rows).sample(torch.zeros(3, VOCAB_SIZE), np.arange(3), rows.seeds)
    rows.append_tokens(np.arange(3), np.arange(3))


# ---- what all rules have in common ----

FIELDS: list[dict[str, Any]] = [
    {"allowed_token_ids": [0, 1, 2, 3, 4, 7, 19]},
    {"logit_bias": {1: 2.5, 3: -1.0}},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": -0.25},
    {"typical_p": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_token_ids": [[1, 2], [3]]},
    {"bad_words_token_ids": [[5]]},
    {"bad_words_ids": [[2, 4], [4, 4, 1]]},
    {"min_tokens": 3, "eos_token_ids": [0]},
    {"suppressed_token_ids": [6, 2]},
    {"suppressed_first_token_ids": [1, 5]},
    {"forced_eos_token_id": [0], "max_tokens": 5},
    {"timestamps": TimestampRules(first_token_id=12, no_timestamps_token_id=11, end_token_id=8)},
]
PROMPT = [3, 1, 2, 1]


def random_params(chance: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {}
    for some in chance.sample(FIELDS, chance.randint(0, 4)):
        fields |= some
    return SamplingParams(**fields)


def edited(rules: RowRules) -> list[float]:
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None].sin()
    apply_rules(logits, [rules.active()])
    return logits[0].tolist()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.one_in(3)
def test_a_rule_depends_on_its_tokens_and_on_no_fork_of_it(seed):
    """Forks, beams, rejected drafts and replay: states that come from one another in any order, each asked at any time,
    are those that are built from the prompt and the tokens alone."""
    chance = random.Random(seed)
    params = random_params(chance)
    states: list[tuple[list[int], RowRules]] = [([], rules_of(params, PROMPT))]
    for _ in range(40):
        text, rules = chance.choice(states[-8:])
        token = chance.randrange(VOCAB_SIZE)
        states.append(([*text, token], rules.after(token)))
        text, rules = chance.choice(states)
        assert edited(rules) == edited(rules_of(params, PROMPT).after_all(text)), (params, text)
    for text, rules in states:
        assert edited(rules) == edited(rules_of(params, PROMPT).after_all(text)), (params, text)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(map(str, fields)))
def test_rules_tell_whether_they_need_the_token_on_the_host(fields):
    rules = rules_of(SamplingParams(**fields), PROMPT)
    assert len(rules) >= 1
    texts = ([], [1], [1, 2], [4, 2, 1], [9, 9, 9, 9], [2, 4, 4, 13, 4])
    by_length = [edited(rules.after_all([-1] * len(text))) == edited(rules.after_all(text)) for text in texts]
    assert all(by_length) == (not rules.needs_token_on_host)


def test_every_stage_has_a_rule_and_every_rule_a_stage():
    rules = [rule for fields in FIELDS for rule in rules_of(SamplingParams(**fields), PROMPT)]
    assert {rule.stage for rule in rules} == {*Stage} - {Stage.GRAMMAR}  # which needs a tokenizer: test_grammar_rule


def test_penalties_of_a_text_with_forks_copy_only_at_forks():
    trunk = rules_of(SamplingParams(repetition_penalty=2.0), PROMPT)[0]
    assert isinstance(trunk, Penalties)
    line = trunk.after(7).after(8)
    assert line.counts is trunk.counts
    fork = trunk.after(9)
    assert fork.counts is not trunk.counts and fork.after(9).counts is fork.counts
