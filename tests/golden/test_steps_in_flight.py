"""However many steps are in flight, a caller gets the same: tokens, log-probabilities, scores and hidden states, and
leases that hold the same keys and values. All to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, RequestOutput, SamplingParams
from ratoon.core.params import GenerationParams
from tests.golden.answers import numbers_of
from tests.golden.engines import engine, scheduler_of
from tests.golden.marks import exact_on_cpu
from tests.golden.test_batch_independence import numbers_of as numbers_with_logprobs
from tests.golden.tiny_models import random_token_ids

pytestmark = exact_on_cpu

LLAMA = "llama with grouped heads"
WIDE_WINDOW = "mistral with a window wider than a block"
TWO_GROUPS = "qwen2 with windows by layer type"
SUFFIX = [7, 3]
EVERYTHING = HiddenStatesParams(positions="all", layers="all")
SOME_TOKENS = list(range(0, 97, 9))
SOME_WORDS = [f" w{token} " for token in range(4, 97, 9)]


def sampled(seed: int, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.1, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "seed": seed}
    return SamplingParams(**(values | changes))


def beams(width: int, **changes: Any) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, n=width, **({"max_tokens": 9} | changes))


# Answers that end by their length, by a token and by a string, at different steps.
REQUESTS: list[tuple[list[int], GenerationParams]] = [
    (random_token_ids(5, seed=1), sampled(1, temperature=0.0, prompt_logprobs=1)),
    (random_token_ids(16, seed=2), sampled(2, n=3)),
    (random_token_ids(33, seed=3), sampled(3, stop_token_ids=SOME_TOKENS)),
    (random_token_ids(14, seed=4), sampled(4, n=3, stop_token_ids=SOME_TOKENS, repetition_penalty=1.2)),
    (random_token_ids(20, seed=5), sampled(5, n=2, stop=SOME_WORDS)),
    (random_token_ids(28, seed=6), beams(4, stop_token_ids=SOME_TOKENS, early_stopping="never")),
    (random_token_ids(31, seed=7), beams(3, ignore_eos=True, no_repeat_ngram_size=2)),
    (random_token_ids(9, seed=8), sampled(8, stop=SOME_WORDS, return_hidden_states=EVERYTHING)),
]
AFTERWARDS: list[GenerationParams] = [sampled(9, max_tokens=5), beams(2, max_tokens=4)]


def ask(llm: LLM, retain_kv: float | None = None) -> list[RequestOutput]:
    prompts, params = zip(*REQUESTS)
    return llm.generate(list(prompts), list(params), retain_kv=retain_kv, progress=False)


def all_of(output: RequestOutput) -> tuple[Any, ...]:
    states = [one.tensor.numpy().tobytes() for one in output.hidden_states or ()]
    return numbers_of(output), numbers_with_logprobs(output), states


def leases_of(llm: LLM) -> list[tuple[Any, ...]]:
    """What each holds, in the order of their tokens: what was computed, the names of its blocks, and what is in them.
    Behind its last token the last block may hold anything."""
    scheduler, kv = scheduler_of(llm), llm._client.core.executor._worker.runner.kv
    found = []
    for sequence in scheduler.leases.sequences():
        num_full = sequence.num_computed_tokens // scheduler.kv_cache.block_size
        tables = [[block.block_hash for block in table] for table in sequence.block_tables]
        contents = []
        for layer, tensors in kv.of_layer.items():
            table = sequence.block_tables[kv.group_of_layer[layer]]
            full = [block.block_id for block in table[:num_full] if block.block_id]
            contents += [tensor[full].numpy().tobytes() for tensor in tensors]
        found.append((list(sequence.token_ids), sequence.num_computed_tokens, tables, contents))
    return sorted(found, key=lambda lease: lease[0])


@cache
def served(family: str, depth: int, **settings: Any) -> dict[str, Any]:
    with engine(family, max_steps_in_flight=depth, num_blocks=300, skip_tokenizer=False, **settings) as llm:
        parents = ask(llm, retain_kv=60)
        leases = leases_of(llm)
        extracted = [llm.extract_hidden_states(parent, EVERYTHING, progress=False) for parent in parents]
        children = [
            llm.generate_continuation(parent, SUFFIX, params, choice=choice.index)
            for params in AFTERWARDS
            for parent in parents
            for choice in parent.outputs
        ]
        assert llm.reset_prefix_cache()
    sources = [child.continuation.source for child in children if child.continuation is not None]
    assert len(leases) == len(sources) // len(AFTERWARDS) and set(sources) == {"lease"}
    return {
        "answers": [all_of(parent) for parent in parents],
        "leases": leases,
        "hidden states": [(one.source, one.tensor.numpy().tobytes()) for one in extracted],
        "continuations": [all_of(child) for child in children],
        "inherited": [child.continuation.inherited_tokens for child in children if child.continuation is not None],
    }


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("family", [LLAMA, WIDE_WINDOW, TWO_GROUPS])
@pytest.mark.one_in(5)
def test_answers_leases_continuations_and_hidden_states_are_the_same(family: str, depth: int) -> None:
    right = served(family, depth=1)
    for what, found in served(family, depth).items():
        assert found == right[what], what


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("swap_memory", [0, "1MiB"], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(("family", "num_blocks"), [(LLAMA, 14), (TWO_GROUPS, 26)])
@pytest.mark.one_in(5)
def test_answers_are_the_same_where_memory_is_short(
    family: str, num_blocks: int, swap_memory: int | str, depth: int
) -> None:
    settings: dict[str, Any] = {"num_blocks": num_blocks, "swap_memory": swap_memory, "skip_tokenizer": False}
    with engine(family, max_steps_in_flight=depth, max_num_batched_tokens=40, **settings) as llm:
        assert [all_of(output) for output in ask(llm)] == served(family, depth=1)["answers"]
        assert llm.stats().num_preemptions > 0
