"""The rule of structured output: an immutable value, whose ends are possible exactly where the grammar is complete."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.grammar.interface import words_of
from ratoon.execution.grammar.llguidance_library import Llguidance
from ratoon.execution.rules.base import NO_RULES, RowRules, apply_rules
from ratoon.execution.rules.build import rules_of
from ratoon.execution.rules.grammar import FEW, Grammar, few_tokens_of, fill_ahead, forced_run
from ratoon.execution.rules.grammar_batch import GrammarBatch
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.layers import sampling
from ratoon.models.tokenizer import Tokenizer
from tests.golden.grammar_engines import END, THOUGHT, json_tokenizer
from tests.golden.tiny_models import VOCAB_SIZE
from tests.harmony import harmony_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(json_tokenizer(), {"eos_token": END})


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(lambda: Llguidance(tokenizer(), VOCAB_SIZE))


def end_token() -> int:
    found = tokenizer().eos_token_id
    assert found is not None
    return found


def rules_for(prompt: list[int] | None = None, **asked: object) -> RowRules:
    params = SamplingParams(structured_output=StructuredOutput(**asked), all_stop_token_ids=[end_token()])  # type: ignore[arg-type]
    return rules_of(params, prompt or [5], (), grammars())


def possible(rules: RowRules, vocab_size: int = VOCAB_SIZE) -> set[int]:
    logits = torch.zeros(2, vocab_size)
    apply_rules(logits, [rules.active(), ()])
    assert logits[1].isfinite().all()  # other rows are not touched
    return set(np.flatnonzero(logits[0].isfinite()).tolist())


def texts_of(tokens: set[int]) -> set[str]:
    return {tokenizer().id_to_token(token) or "" for token in tokens}


def tokens_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_a_choice_allows_its_letters_and_ends_only_when_it_is_complete() -> None:
    rules = rules_for(choice=["ab", "b"])
    assert texts_of(possible(rules)) == {"a", "ab", "b"}
    assert texts_of(possible(rules.after_all(tokens_of("b")))) == {END}
    assert texts_of(possible(rules.after(tokens_of("a")[0]))) == {"b"}
    assert rules.after_all([*tokens_of("b"), end_token()]) == NO_RULES


def test_a_text_may_end_where_it_could_also_go_on() -> None:
    rules = rules_for(regex="a[0-9]*")
    assert END not in texts_of(possible(rules))
    assert {END, "1", "12"} <= texts_of(possible(rules.after_all(tokens_of("a"))))


def test_a_stop_token_of_the_caller_is_an_end_and_no_text() -> None:
    (letter,) = tokens_of("b")
    params = SamplingParams(structured_output=StructuredOutput(regex="a[bc]*"), stop_token_ids=[letter])
    rules = rules_of(params, [5], (), grammars())
    assert letter not in possible(rules)
    assert letter in possible(rules.after_all(tokens_of("a")))
    assert rules.after_all([*tokens_of("a"), letter]) == NO_RULES


def test_nothing_is_possible_after_a_token_that_the_grammar_forbids() -> None:
    rules = rules_for(choice=["ab", "b"]).after_all(tokens_of("z"))
    assert possible(rules) == set()


@pytest.mark.parametrize("marker", ["ab:", THOUGHT])
def test_free_text_before_a_marker_never_ends(marker: str) -> None:
    rules = rules_for(regex="[0-9]", begins_after=marker)
    before = rules.after_all(tokens_of("x{a"))
    for free in (rules, before):
        assert possible(free) == {*range(VOCAB_SIZE)} - {end_token()}
    behind = before.after_all(tokens_of(marker))
    assert texts_of(possible(behind)) == set("0123456789")
    assert texts_of(possible(behind.after_all(tokens_of("7")))) == {END}


def test_a_marker_may_have_special_tokens_and_text() -> None:
    """The final message of gpt-oss: two special tokens, and a word between them that is text."""
    harmony = harmony_tokenizer()
    compiler = GrammarCompiler(lambda: Llguidance(harmony, harmony.vocab_size))
    asked = StructuredOutput(regex="[0-9]", begins_after="<|channel|>final<|message|>")
    (end,) = harmony.encode("<|return|>", False)
    params = SamplingParams(structured_output=asked, all_stop_token_ids=[end])
    rules = rules_of(params, [5], (), compiler)
    thoughts = "<|channel|>analysis<|message|>A final word.<|end|><|start|>assistant"
    thinking = rules.after_all(harmony.encode(thoughts, False))
    everything = set(range(harmony.vocab_size)) - {end}
    assert possible(thinking, harmony.vocab_size) == everything
    final = thinking.after_all(harmony.encode("<|channel|>final<|message|>", False))
    assert possible(final, harmony.vocab_size) == {harmony.encode(digit, False)[0] for digit in "0123456789"}
    assert possible(final.after(harmony.encode("7", False)[0]), harmony.vocab_size) == {end}


def test_a_marker_may_be_spread_over_tokens() -> None:
    rules = rules_for(regex="[0-9]", begins_after="xa").after_all(tokens_of("x"))
    assert texts_of(possible(rules.after_all(tokens_of("a")))) == set("0123456789")
    assert len(possible(rules.after_all(tokens_of("ba")))) == VOCAB_SIZE - 1


def test_what_follows_the_marker_in_its_last_token_belongs_to_the_grammar() -> None:
    (longer,) = tokens_of("abc")
    before = rules_for(regex="[0-9]", begins_after="xa").after_all(tokens_of("x"))
    assert longer not in possible(before)
    assert possible(before.after(longer)) == set()
    matching = rules_for(regex="bc[0-9]", begins_after="xa").after_all(tokens_of("x"))
    assert longer in possible(matching)
    assert texts_of(possible(matching.after(longer))) == set("0123456789")


def test_a_part_of_the_prompt_may_belong_to_the_text() -> None:
    prompt = [5, 6, *tokens_of('{"a":')]
    rules = rules_for(prompt, json_schema=json.dumps(SCHEMA), first_token=2)
    alone = rules_for(json_schema=json.dumps(SCHEMA)).after_all(tokens_of('{"a":'))
    assert possible(rules) == possible(alone)


def test_params_of_beams_have_the_same_rule() -> None:
    asked = StructuredOutput(choice=["ab", "b"])
    params = BeamSearchParams(beam_width=2, structured_output=asked, all_stop_token_ids=[end_token()])
    assert possible(rules_of(params, [5], (), grammars())) == possible(rules_for(choice=["ab", "b"]))


KINDS = (
    {"json_schema": json.dumps(SCHEMA)},
    {"json_object": True},
    {"regex": "(ab|c)*[0-9]{2,3}"},
    {"grammar": 'start: "{" start "}" | /[a-c]/'},
    {"choice": ["abc", "ab", "true", "trial"]},
    {"json_schema": json.dumps(SCHEMA), "begins_after": "a"},
)


@pytest.mark.parametrize("seed", range(18))
@pytest.mark.one_in(3)
def test_the_rule_depends_on_its_tokens_and_on_no_fork_of_it(seed: int) -> None:
    """As the test of all other rules (test_rules.py), over tokens that the grammar allows, and some others."""
    chance = random.Random(seed)
    asked = KINDS[seed % len(KINDS)]
    states: list[tuple[list[int], RowRules]] = [([], rules_for(**asked))]
    for _ in range(40):
        text, rules = chance.choice(states[-8:])
        tokens = sorted(possible(rules))
        token = chance.choice(tokens) if tokens and chance.random() < 0.95 else chance.randrange(VOCAB_SIZE)
        states.append(([*text, token], rules.after(token)))
        text, rules = chance.choice(states)
        assert possible(rules) == possible(rules_for(**asked).after_all(text)), text
    for text, rules in states:
        assert possible(rules) == possible(rules_for(**asked).after_all(text)), text
        run = forced_run(rules, 100)
        if run == [end_token()]:
            assert possible(rules) == {end_token()}
        elif run:  # whatever is possible begins the same text
            forced = tokenizer().decode(run).encode()
            for token in possible(rules):
                one = grammars().library.token_bytes(token)
                assert forced.startswith(one) or one.startswith(forced), text
            assert possible(rules.after_all(run)), text


def test_tokens_without_a_choice_are_those_of_the_tokenizer() -> None:
    rules = rules_for(choice=["abc12", "b"])
    assert forced_run(rules, 100) == []
    rules = rules.after_all(tokens_of("a"))
    run = forced_run(rules, 100)
    assert run == tokens_of("bc12") and forced_run(rules, 1) == run[:1]
    assert forced_run(rules.after_all(run), 100) == [end_token()]


def test_a_forced_text_of_any_length_is_found_in_pieces_of_bounded_size() -> None:
    rules, text = rules_for(regex="x(ab){5000}y|z"), b""
    assert forced_run(rules, 100) == []
    rules = rules.after_all(tokens_of("x"))
    while run := forced_run(rules, 1000):
        assert len(run) <= 300
        if run == [end_token()]:
            break
        text += b"".join(map(grammars().library.token_bytes, run))
        rules = rules.after_all(run)
    assert text == b"ab" * 5000 + b"y" or (b"ab" * 5000 + b"y").startswith(text)


@pytest.mark.parametrize("regex", ["a{99999}", "(a{1000}){1000}", "x(a{1000}){1000}"])
def test_long_forced_text_takes_no_longer_than_short_text(regex: str) -> None:
    """The library looks for all of it with each mask, unless it is told not to: for seconds."""
    rules = rules_for(regex=regex)
    start = time.process_time()
    for _ in range(20):
        run = forced_run(rules, 100)
        rules = rules.after_all(run or [min(possible(rules))])
    assert time.process_time() - start < 1


def test_a_text_that_takes_too_long_to_match_ends_and_its_grammar_is_not_kept() -> None:
    (grammar,) = rules_for(regex="[0-9]{1,9}x?")
    assert isinstance(grammar, Grammar)
    kept = grammars().get(StructuredOutput(regex="[0-9]{1,9}x?"))
    grammar.wait_or_fill()
    for _ in range(5):
        grammar.note_seconds(0.09)
        assert grammar.problem is None
    grammar.note_seconds(0.09)
    assert grammar.problem is not None and "takes longer to match than is allowed" in grammar.problem
    assert not grammar.mask().any() and grammar.cost.is_slow
    assert grammars().get(StructuredOutput(regex="[0-9]{1,9}x?")) is not kept


def test_an_end_among_others_and_a_stop_token_in_the_text_are_not_forced() -> None:
    assert forced_run(rules_for(regex="a[0-9]*").after_all(tokens_of("a")), 100) == []
    (letter,) = tokens_of("b")
    two_ends = StructuredOutput(choice=["ab"])
    params = SamplingParams(structured_output=two_ends, stop_token_ids=[letter], all_stop_token_ids=[letter, 7])
    rules = rules_of(params, [5], (), grammars()).after_all(tokens_of("a"))
    assert forced_run(rules, 100) == [] and possible(rules) == set()
    params = SamplingParams(structured_output=StructuredOutput(choice=["a"]), all_stop_token_ids=[letter, 7])
    assert forced_run(rules_of(params, [5], (), grammars()).after_all(tokens_of("a")), 100) == []


@pytest.mark.parametrize("vocab_size", [5, 32, 97, 1000])
def test_bits_forbid_what_is_not_set(vocab_size: int) -> None:
    chance = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(chance.standard_normal((5, vocab_size)).astype(np.float32))
    words = chance.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    words[0], words[1, 0] = -1, 0
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size] != 0
    rows = np.array([0, 2, 4])
    expected = logits.numpy().copy()
    expected[rows] = np.where(bits, expected[rows], -np.inf)
    for changed in (logits.clone(), logits.double()):  # by the kernel, where it was built, and by torch
        sampling.allow_bits(changed, torch.from_numpy(rows), torch.from_numpy(words))
        np.testing.assert_array_equal(changed.float().numpy(), expected)


def test_grammars_that_match_together_are_those_of_each() -> None:
    library = grammars().library
    texts = ['{"a":12,"b":[true,false]}', '{"a":7,"b":[', '{"a":0,"b":[true]}']
    alone = [rules_for(json_schema=json.dumps(SCHEMA)) for _ in texts]
    moving: list[Any] = [rules_for(json_schema=json.dumps(SCHEMA))[0] for _ in texts]
    rows = np.array([5, 1, 3])
    table = np.zeros((6, library.num_words), np.int32)
    batch = GrammarBatch(moving, library)
    for tokens in [None, *zip(*map(tokens_of, texts))]:
        alone = alone if tokens is None else [rules.after(token) for rules, token in zip(alone, tokens)]
        assert batch.match(None if tokens is None else np.array(tokens), table, rows) == []
        for place, (row, rules) in enumerate(zip(rows, alone)):
            words = rules[0].mask()  # type: ignore[attr-defined]
            np.testing.assert_array_equal(table[row, : len(words)], words)
            assert batch.forced.get(place, []) == rules[0].forced_tokens()  # type: ignore[attr-defined]
    batch.settle()
    assert [rule._num_tokens for rule in moving] == [rules[0]._num_tokens for rules in alone]  # type: ignore[attr-defined]
    assert possible(RowRules((moving[0],))) == possible(alone[0])
    moves = [np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0] for words in table[rows]]
    assert batch.has_end(np.array([5, end_token()])) and not batch.has_end(np.array(moves))
    moves[2] = library.vocab_size - 1
    assert batch.match(np.array(moves), table, rows) == [2] and not table[3].any() and table[5].any()
    assert moving[2].stuck().problem


def test_a_grammar_that_was_told_what_follows_goes_on_behind_it() -> None:
    library = grammars().library
    names = {"properties": {"longername": {"type": "boolean"}}, "required": ["longername"]}
    asked = json.dumps({"type": "object", "additionalProperties": False, **names})
    moving: list[Any] = [rules_for(json_schema=asked)[0] for _ in range(3)]
    plain = rules_for(json_schema=asked)
    table, rows = np.zeros((3, library.num_words), np.int32), np.arange(3)
    batch = GrammarBatch(moving, library)
    assert batch.match(None, table, rows) == []
    run = batch.forced[0]
    assert len(run) > 4 and run == plain[0].forced_tokens()  # type: ignore[attr-defined]
    # One is told all that is left, one a part, and one nothing
    told = {0: run[1:], 1: run[1:3]}
    assert batch.match(np.full(3, run[0]), table, rows, told) == []
    assert 0 not in batch.forced and batch.forced[1] == run[3:] and batch.forced[2] == run[1:]
    for row, num_tokens in zip(rows, (len(run), 3, 1)):
        words = plain.after_all(run[:num_tokens])[0].mask()  # type: ignore[attr-defined]
        np.testing.assert_array_equal(table[row, : len(words)], words)
    batch.settle()
    assert [rule._num_tokens for rule in moving] == [len(run), 3, 1]
    for rule, num_tokens in zip(moving, (len(run), 3, 1)):
        assert possible(RowRules((rule,))) == possible(plain.after_all(run[:num_tokens]))


def test_masks_that_are_filled_ahead_are_the_same() -> None:
    asked = {"json_schema": json.dumps(SCHEMA)}
    ahead, plain = rules_for(**asked), rules_for(**asked)
    for token in tokens_of('{"a":12,"b":[true,false]}'):
        fill_ahead(ahead)
        assert token in possible(plain)
        ahead, plain = ahead.after(token), plain.after(token)  # with and without its use
        if token % 2:
            assert possible(ahead) == possible(plain)
    assert texts_of(possible(ahead)) == {END}


@pytest.mark.parametrize("vocab_size", [40, 1000, 49152])
def test_few_tokens_are_those_of_the_mask(vocab_size: int) -> None:
    chance = np.random.default_rng(vocab_size)
    counts = [0, 1, 2, FEW - 1, FEW, FEW + 1, vocab_size]
    bits = np.zeros((len(counts), 32 * words_of(vocab_size)), np.uint8)
    for row, count in zip(bits, counts):
        row[chance.permutation(vocab_size)[:count]] = 1
    bits[:, vocab_size:] = 1  # a tokenizer may have more tokens than the model
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    for row, found in zip(bits[:, :vocab_size], few_tokens_of(masks, vocab_size), strict=True):
        allowed = row.nonzero()[0].tolist()
        assert (found is None) == (len(allowed) > FEW)
        assert found is None or found.tolist() == allowed + [-1] * (FEW - len(allowed))


SAMPLED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "logprobs": 2},
    {"temperature": 1.3, "seed": 5, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "seed": 6, "min_p": 0.05, "logit_bias": {3: 1.0}},  # which sees all logits
)


def test_a_choice_among_few_tokens_is_that_of_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SamplingRows(len(SAMPLED), grammars=grammars())
    for slot, fields in enumerate(SAMPLED):
        asked = StructuredOutput(regex="[a-z0-9]{2,30}" if slot else "[0-9]{3}")
        params = SamplingParams(**fields, structured_output=asked, all_stop_token_ids=[end_token()])  # type: ignore[arg-type]
        rows.add(slot, params, slot, [5], [])
    slots = np.arange(len(SAMPLED))
    assert len(rows.few_tokens(slots, slots)[0]) == len(SAMPLED) - 1
    for seed in range(40):
        logits = torch.randn(len(SAMPLED), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
        if seed % 8 == 0:
            logits[1, tokens_of("a")[0]] = torch.nan
        before, seeds = logits.clone(), np.arange(len(SAMPLED), dtype=np.uint64) + seed
        few = Sampler(rows).sample(logits, slots, seeds)
        alone = Sampler(rows).sample(logits[1:2], slots[1:2], seeds[1:2])
        with monkeypatch.context() as patch:
            patch.setattr(rows, "few_tokens", lambda *_: (np.empty(0, np.int64), np.empty((0, FEW), np.int64)))
            masked = Sampler(rows).sample(logits, slots, seeds)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        assert few.bad_rows == masked.bad_rows == ([1] if seed % 8 == 0 else [])
        good = [slot for slot in range(len(SAMPLED)) if slot not in few.bad_rows]
        assert few.to_numpy()[good].tolist() == masked.to_numpy()[good].tolist()
        together = Sampler(rows)._choose_together(logits.clone(), slots, seeds, rows.needs[slots])  # as on a GPU
        assert together.token_ids[good].tolist() == masked.to_numpy()[good].tolist()
        assert alone.to_numpy()[0] == few.to_numpy()[1]
        assert few.logprobs_lists() == masked.logprobs_lists()
