"""The rules over tokens by themselves: values that never change, whose work does not grow with the text."""

from __future__ import annotations

import random

import numpy as np
import torch

from ratoon.core.params import SamplingParams
from ratoon.execution.rules.bad_words import BadWords
from ratoon.execution.rules.base import RowRules
from ratoon.execution.rules.build import rules_of
from ratoon.execution.rules.forced_end import ForcedEnd
from ratoon.execution.rules.ngrams import NoNGramsOf, NoRepeatedNGrams, index_of
from ratoon.execution.rules.persistent_map import PersistentMap
from ratoon.execution.sampler import Sampler
from ratoon.execution.sampling_rows import Needs, SamplingRows


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
    assert rules is not None
    assert list(rules.verdict().forbidden) == [9]
    assert set(rules.after(7).verdict().forbidden) == {8, 9}


def test_an_end_is_forced_once_and_at_the_last_place():
    rule = ForcedEnd((2,), 3)
    assert [list(rule.forced()), list(rule.after(1).forced()), list(rule.after(1).after(1).forced())] == [[], [], [2]]
    assert not RowRules((rule.after(1).after(1).after(2),)).verdict()


def test_the_encoder_s_ngrams_come_from_its_input_or_else_from_the_prompt():
    params = SamplingParams(encoder_no_repeat_ngram_size=2)
    with_encoder, without = rules_of(params, [1], [8, 1, 9]), rules_of(params, [1, 4, 1])
    assert with_encoder is not None and without is not None
    assert (list(with_encoder.verdict().forbidden), list(without.verdict().forbidden)) == ([9], [4])
    assert isinstance(with_encoder.rules[0], NoNGramsOf)


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
        needed.append(bool(rows.needs[0] & Needs.VERDICT))
        rows.append_token(0, token)
    # behind 2 nothing stood before, behind 1 there was 2; the fourth token is the last
    assert needed == [False, True, False] and rows.needs[0] & Needs.VERDICT
    logits = torch.zeros(1, 10)
    logits[0, 5] = 3.0
    assert Sampler(rows).sample(logits, np.array([0]), rows.seeds[:1]).to_list() == [9]


def test_a_row_without_rules_has_none():
    assert rules_of(SamplingParams(no_repeat_ngram_size=0, forced_eos_token_id=[], bad_words_ids=[]), [1, 2]) is None
