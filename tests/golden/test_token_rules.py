"""Suppressed tokens and timestamps through the engine give the texts of transformers with its own processors."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from ratoon import BeamSearchParams, RequestOutput
from ratoon.core.params import TimestampRules
from tests.depths import both_depths
from tests.golden.beam_oracle import assert_same_texts, oracle_search, texts_of
from tests.golden.engines import engine, greedy, oracle_tokens, run, tiny_model, tokens_of
from tests.golden.pressure import step_without_free_memory
from tests.golden.tiny_models import VOCAB_SIZE, random_token_ids
from tests.unit.execution.test_token_rules import oracle

FAMILY = "llama with grouped heads"
# Of the tiny vocabulary, the last fifth are timestamps.
TIMESTAMPS = TimestampRules(first_token_id=78, no_timestamps_token_id=77, end_token_id=60, max_initial_index=12)
MAX_TOKENS = 14

Search = tuple[list[int], BeamSearchParams, dict[str, Any]]


def some_rules(chance: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "suppressed_token_ids": chance.sample(range(VOCAB_SIZE), 12),
        "suppressed_first_token_ids": chance.sample(range(VOCAB_SIZE), 3),
        "timestamps": TIMESTAMPS,
    }
    for name in chance.sample(list(fields), chance.randint(0, 1)):
        del fields[name]
    return fields


def greedy_by_transformers(prompt: list[int], fields: dict[str, Any]) -> list[int]:
    with torch.inference_mode():
        generated = tiny_model(FAMILY).oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=MAX_TOKENS, pad_token_id=0, logits_processor=oracle(fields, len(prompt)),
        )  # fmt: skip
    found: list[int] = generated[0, len(prompt) :].tolist()
    return found


def some_search(chance: random.Random) -> Search:
    prompt = random_token_ids(chance.choice([1, 5, 15, 16, 17, 30]), seed=chance.randrange(8))
    fields = some_rules(chance)
    width = chance.choice([1, 2, 4, 5])
    params = BeamSearchParams(
        beam_width=width,
        n=width,
        max_tokens=MAX_TOKENS,
        min_tokens=chance.choice([0, 3]),
        stop_token_ids=[60],
        ignore_eos=True,
        **fields,
    )
    return prompt, params, fields


def check_search(search: Search, output: RequestOutput) -> None:
    prompt, params, fields = search
    theirs = oracle_search(tiny_model(FAMILY).oracle, prompt, params, [60], oracle(fields, len(prompt)))
    assert_same_texts(texts_of(output), theirs, (prompt, fields))


def test_greedy_texts_are_those_of_transformers_and_others_beside_them_their_own() -> None:
    chance = random.Random(1)
    prompts = [random_token_ids(length, seed=length) for length in (1, 4, 15, 16, 17, 30, 33, 40)]
    kinds: list[dict[str, Any]] = [{} if place % 4 == 3 else some_rules(chance) for place in range(len(prompts))]
    with engine(FAMILY) as llm:
        found = tokens_of(run(llm, prompts, [greedy(MAX_TOKENS, **fields) for fields in kinds]))
    for prompt, fields, tokens in zip(prompts, kinds, found):
        assert tokens == greedy_by_transformers(prompt, fields), fields
        if not fields:
            assert tokens == oracle_tokens(FAMILY, prompt, MAX_TOKENS)


@pytest.mark.parametrize("seed", range(3))
def test_beams_are_those_of_transformers(seed: int) -> None:
    chance = random.Random(seed)
    searches = [some_search(chance) for _ in range(5)]
    with engine(FAMILY) as llm:
        prompts, params = [prompt for prompt, _, _ in searches], [params for _, params, _ in searches]
        for search, output in zip(searches, llm.beam_search(prompts, params, progress=False), strict=True):
            check_search(search, output)


# Fields of params, and what `generate` calls the same. `min_length` counts the prompt, as there.
BEAM_RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    ({"bad_words_ids": [[7], [30, 31], [8, 9, 10]]}, {"bad_words_ids": [[7], [30, 31], [8, 9, 10]]}),
    ({"suppressed_token_ids": [11, 12, 13, 40]}, {"suppress_tokens": [11, 12, 13, 40]}),
    ({"suppressed_first_token_ids": [14, 60, 3]}, {"begin_suppress_tokens": [14, 60, 3]}),
    ({"min_length": 24}, {"min_length": 24}),
    ({"logit_bias": {60: 2.5, 5: -3.0}}, {"sequence_bias": [[[60], 2.5], [[5], -3.0]]}),
    ({"forced_eos_token_id": [60]}, {"forced_eos_token_id": [60]}),
]


def ruled_search(chance: random.Random, num_rules: int) -> tuple[list[int], BeamSearchParams, dict[str, Any]]:
    """With rules that `generate` of transformers builds itself, in its own order."""
    ours, theirs = {}, {}
    for name, other in chance.sample(BEAM_RULES, num_rules):
        if not ("forced_eos_token_id" in {*ours, *name} and "logit_bias" in {*ours, *name}):  # the order is another
            ours |= name
            theirs |= other
    width = chance.choice([1, 3, 5])
    params = BeamSearchParams(
        beam_width=width, n=width, max_tokens=MAX_TOKENS, stop_token_ids=[60], ignore_eos=True, **ours
    )
    return random_token_ids(chance.choice([5, 16, 21]), seed=chance.randrange(8)), params, theirs


def test_beams_take_every_rule_that_transformers_has() -> None:
    chance = random.Random(4)
    searches = [ruled_search(chance, num_rules) for num_rules in (1, 1, 2, 2, 3, 3, 4, 5, 6)]
    searches += [ruled_search(random.Random(seed), 1) for seed in range(8)]
    with engine(FAMILY) as llm:
        prompts, params = [prompt for prompt, _, _ in searches], [params for _, params, _ in searches]
        outputs = llm.beam_search(prompts, params, progress=False)
    for (prompt, asked, settings), output in zip(searches, outputs, strict=True):
        theirs = oracle_search(tiny_model(FAMILY).oracle, prompt, asked, [60], **settings)
        assert_same_texts(texts_of(output), theirs, (prompt, settings))


@both_depths
def test_penalties_of_beams_outlive_the_loss_of_memory() -> None:
    prompt, fields = random_token_ids(17, seed=3), {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=MAX_TOKENS, ignore_eos=True, **fields)
    with engine(FAMILY, max_num_batched_tokens=16) as llm:
        stream = llm.stream(prompt, params)
        outputs = [next(stream) for _ in range(5)]
        assert step_without_free_memory(llm)
        outputs += stream
    theirs = oracle_search(tiny_model(FAMILY).oracle, prompt, params, None, **fields)
    assert_same_texts(texts_of(outputs[-1]), theirs, fields)


@both_depths
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
def test_beams_that_lose_their_memory_keep_the_rules(num_tokens: int) -> None:
    chance = random.Random(num_tokens)
    prompt, params, fields = some_search(chance)
    params = msgspec.structs.replace(params, timestamps=TIMESTAMPS, min_tokens=MAX_TOKENS)
    fields = {**fields, "timestamps": TIMESTAMPS}
    with engine(FAMILY, max_num_batched_tokens=16) as llm:
        stream = llm.stream(prompt, params)
        outputs = [next(stream) for _ in range(num_tokens)]
        assert step_without_free_memory(llm)
        outputs += stream
    check_search((prompt, params, fields), outputs[-1])


def test_a_branch_that_loses_its_memory_keeps_the_rules() -> None:
    prompt, fields = random_token_ids(15, seed=1), {"timestamps": TIMESTAMPS}
    with engine(FAMILY, max_steps_in_flight=1) as llm:  # so that the next step needs a block
        stream = llm.stream(prompt, greedy(MAX_TOKENS, **fields))
        outputs = [next(stream) for _ in range(2)]
        assert step_without_free_memory(llm)
        outputs += stream
    found = [token for output in outputs for token in output.outputs[0].token_ids]
    assert found == greedy_by_transformers(prompt, fields)


@both_depths
def test_a_continuation_has_a_first_token_of_its_own() -> None:
    prompt = random_token_ids(9, seed=2)
    with engine(FAMILY) as llm:
        [parent] = run(llm, [prompt], greedy(4))
        text = [*prompt, *parent.outputs[0].token_ids]
        [next_token] = oracle_tokens(FAMILY, text, 1)
        fields: dict[str, Any] = {"suppressed_first_token_ids": [next_token]}
        output = llm.generate_continuation(parent, [], greedy(MAX_TOKENS, **fields))
    assert list(output.outputs[0].token_ids) == greedy_by_transformers(text, fields)
