"""Beam searches that continue other requests: the numbers of the whole text sent afresh, to the bit, and only what is
new is computed."""

from __future__ import annotations

import pytest
import torch

from ratoon import BeamSearchParams, RequestOutput, SamplingParams
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import both_depths
from tests.golden.answers import afresh, num_computed, numbers_of, open_search, start, whole
from tests.golden.engines import engine, scheduler_of
from tests.golden.pressure import no_free_memory, step_without_free_memory
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)

LLAMA = "llama with grouped heads"
FAMILIES = [
    LLAMA,
    "mistral with a window wider than a block",
    "qwen2 with windows by layer type",
    "qwen3 untied with heads that the native kernels take",
    "gpt2",
]
BLOCK_SIZE = 16
SUFFIX = [7, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=6, ignore_eos=True)
WIDTH, MAX_TOKENS = 4, 5
BEAMS = BeamSearchParams(beam_width=WIDTH, n=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True)
STOPPING = BeamSearchParams(beam_width=WIDTH, n=WIDTH, max_tokens=8, stop_token_ids=list(range(0, 97, 8)))


def source_of(output: RequestOutput) -> tuple[str, int]:
    assert output.continuation is not None
    return output.continuation.source, output.continuation.inherited_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_a_search_from_a_leased_parent_equals_that_of_the_whole_text_at_every_offset(family: str) -> None:
    with engine(family, num_blocks=200) as llm:
        for length in range(3, 3 + BLOCK_SIZE):
            parent = start(llm, random_token_ids(length, seed=length), SEEDED, retain_kv=60)
            before = num_computed(llm)
            child = llm.generate_continuation(parent, SUFFIX, BEAMS)
            # The suffix and the parent's last token; then, of every beam, each new token but the last.
            assert num_computed(llm) - before == len(SUFFIX) + 1 + WIDTH * (MAX_TOKENS - 1)
            assert source_of(child) == ("lease", len(whole(parent)) - 1)
            assert child.continuation is not None and child.continuation.computed_tokens == len(SUFFIX) + 1
            assert numbers_of(child) == afresh(llm, whole(parent) + SUFFIX, BEAMS)


@pytest.mark.parametrize("suffix", [[], [5], list(range(BLOCK_SIZE + 1))], ids=["none", "one token", "over a block"])
def test_suffixes_of_any_length(suffix: list[int]) -> None:
    with engine(LLAMA) as llm:
        parent = start(llm, random_token_ids(20, seed=2), GREEDY, retain_kv=60)
        child = llm.generate_continuation(parent, suffix, STOPPING)
        assert child.continuation is not None and child.continuation.computed_tokens == len(suffix) + 1
        assert numbers_of(child) == afresh(llm, whole(parent) + suffix, STOPPING)


@both_depths
def test_a_search_from_any_choice_and_any_place_of_its_parent() -> None:
    several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=9, ignore_eos=True)
    with engine(LLAMA, num_blocks=200) as llm:
        parent = start(llm, random_token_ids(20, seed=1), several, retain_kv=60)
        places = [(0, 29), (1, 29), (2, 29), (2, 1), (2, 15), (2, 16), (2, 17), (2, 20), (1, 25), (1, 28)]
        children = [llm.generate_continuation(parent, SUFFIX, BEAMS, choice=choice, at=at) for choice, at in places]
        for (choice, at), child in zip(places, children):
            assert source_of(child) == ("lease", min(at, 28)), (choice, at)  # the 29th was never computed
            assert numbers_of(child) == afresh(llm, whole(parent, choice)[:at] + SUFFIX, BEAMS), (choice, at)


@both_depths
def test_many_searches_from_one_parent_run_together() -> None:
    with engine(LLAMA, num_blocks=200) as llm:
        parent = start(llm, random_token_ids(25, seed=1), SEEDED, retain_kv=60)
        searches = [open_search(llm, f"child {index}", [index], STOPPING, parent) for index in range(6)]
        for stream in searches:
            next(stream)  # all of them are under way
        results = [numbers_of([*stream][-1]) for stream in searches]
        assert results == [afresh(llm, [*whole(parent), index], STOPPING) for index in range(6)]


@both_depths
def test_a_search_from_a_running_parent_waits_for_it_or_forks_it() -> None:
    with engine(LLAMA) as llm:
        prompt = random_token_ids(14, seed=5)
        stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        outputs = [next(stream) for _ in range(5)]
        forked = llm.generate_continuation(outputs[0].request_id, SUFFIX, BEAMS, wait=False)
        waited = llm.generate_continuation(outputs[0].request_id, SUFFIX, BEAMS)
        outputs += stream
        text = [*prompt, *(token for output in outputs for token in output.outputs[0].token_ids)]
        assert source_of(forked)[0] == "lease"
        assert len(prompt) < len(forked.prompt_token_ids or ()) - len(SUFFIX) < len(text)
        assert waited.prompt_token_ids == text + SUFFIX
        for child in (forked, waited):
            assert numbers_of(child) == afresh(llm, child.prompt_token_ids or (), BEAMS)


@both_depths
def test_a_parent_that_is_gone_is_found_in_the_prefix_cache_or_computed_again() -> None:
    prompt = random_token_ids(30, seed=1)
    with engine(LLAMA, num_blocks=200) as llm:
        parent = start(llm, prompt, GREEDY)
        found = llm.generate_continuation(parent, SUFFIX, BEAMS)
        assert llm.reset_prefix_cache()
        gone = llm.generate_continuation(parent, SUFFIX, BEAMS)
        leased = start(llm, prompt, GREEDY, retain_kv=60)
        assert scheduler_of(llm).leases.evict_one()
        evicted = llm.generate_continuation(leased, SUFFIX, BEAMS)
        assert [*map(source_of, (found, gone, evicted))] == [
            ("prefix_cache", 32),
            ("recomputed", 0),
            ("prefix_cache", 32),
        ]
        expected = afresh(llm, whole(parent) + SUFFIX, BEAMS)
        assert [*map(numbers_of, (found, gone, evicted))] == [expected] * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep_cached", [True, False], ids=["still cached", "gone altogether"])
@pytest.mark.one_in(2)
def test_a_search_that_loses_what_it_inherited_at_any_step_finds_the_same(family: str, keep_cached: bool) -> None:
    """The parent's lease goes first, then the search loses what it holds itself."""
    prompt = random_token_ids(21, seed=4)
    num_lost = 0
    with engine(family) as llm:
        expected = afresh(llm, whole(start(llm, prompt, GREEDY)) + SUFFIX, BEAMS)
        for num_tokens in range(1, MAX_TOKENS):
            parent = start(llm, prompt, GREEDY, retain_kv=60)
            stream = open_search(llm, f"child {num_tokens}", SUFFIX, BEAMS, parent)
            outputs = [next(stream) for _ in range(num_tokens)]
            num_lost += step_without_free_memory(llm)
            if not keep_cached:
                with no_free_memory(llm):
                    pass
            outputs += stream
            assert source_of(outputs[0])[0] == "lease"
            assert numbers_of(outputs[-1]) == expected, num_tokens
        assert llm.stats().leases.evicted >= num_lost > 1
