"""A text that a beam search has found is a root like any other: requests that continue it get the numbers of the whole
text sent afresh, to the bit, and compute only what is new."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from ratoon import LLM, AsyncLLM, BeamSearchParams, RequestError, RequestOutput, SamplingParams
from ratoon.core.errors import UnknownParentError
from ratoon.core.params import GenerationParams
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import both_depths
from tests.faults.processes import SETTINGS, model_name
from tests.golden.answers import afresh, num_computed, numbers_of, open_search, start, whole
from tests.golden.engines import engine, scheduler_of
from tests.golden.pressure import step_without_free_memory
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
WIDTH = 4
# Texts end at different steps, so that what they hold is kept while others go on.
STOPS = list(range(0, 97, 7))
PARENT = BeamSearchParams(beam_width=WIDTH, n=WIDTH, max_tokens=9, stop_token_ids=STOPS, early_stopping="never")
MAX_TOKENS, CHILD_WIDTH = 4, 3
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=CHILD_WIDTH, n=CHILD_WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True)


def check_children(llm: LLM, parent: RequestOutput, kinds: list[GenerationParams]) -> list[str]:
    """Continue every choice in every way. Where it all came from."""
    children = []
    for choice in range(len(parent.outputs)):
        for params in kinds:
            before = num_computed(llm)
            child = llm.generate_continuation(parent, SUFFIX, params, choice=choice)
            assert child.continuation is not None
            num_rows = CHILD_WIDTH if params is BEAMS else 1
            num_behind_the_prompt = num_computed(llm) - before - child.continuation.computed_tokens
            assert num_behind_the_prompt == num_rows * (MAX_TOKENS - 1)
            if child.continuation.source == "lease":
                assert child.continuation.computed_tokens == len(SUFFIX) + 1
            children.append((whole(parent, choice) + SUFFIX, params, child))
    for tokens, params, child in children:
        assert child.prompt_token_ids == tokens
        assert numbers_of(child) == afresh(llm, tokens, params)
    return [child.continuation.source for _, _, child in children if child.continuation is not None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [12, 15, 16, 17])
@pytest.mark.one_in(3)
def test_every_choice_of_a_leased_search_is_continued_by_sampling_and_by_beams(family: str, length: int) -> None:
    with engine(family, num_blocks=300) as llm:
        parent = start(llm, random_token_ids(length, seed=length), PARENT, retain_kv=60)
        scheduler_of(llm).check()
        assert set(check_children(llm, parent, [SAMPLED, BEAMS])) == {"lease"}


def test_texts_of_every_length_at_every_offset_in_a_block() -> None:
    lengths = set()
    with engine(LLAMA, num_blocks=300) as llm:
        for length in range(3, 3 + BLOCK_SIZE):
            parent = start(llm, random_token_ids(length, seed=100 + length), PARENT, retain_kv=60)
            lengths |= {len(choice.token_ids) for choice in parent.outputs}
            assert set(check_children(llm, parent, [BEAMS])) == {"lease"}
    assert len(lengths) > 4


def test_what_is_behind_the_best_texts_is_not_kept() -> None:
    with engine(LLAMA, num_blocks=300) as llm:
        prompt = random_token_ids(20, seed=1)
        start(llm, prompt, BeamSearchParams(beam_width=8, n=2, max_tokens=20, ignore_eos=True), retain_kv=60)
        leases = llm.stats().leases
        assert leases.num_active == 2
        # The prompt's first block for both, and at most two more for each.
        assert scheduler_of(llm).kv_cache.num_usable_blocks - scheduler_of(llm).kv_cache.num_free_blocks <= 5
        assert llm.reset_prefix_cache()


@both_depths
def test_a_search_of_a_search_of_a_search() -> None:
    with engine(LLAMA, num_blocks=300) as llm:
        generations = [start(llm, random_token_ids(13, seed=2), PARENT, retain_kv=60)]
        for choice in (1, 2, 3, 0):
            child = llm.generate_continuation(generations[-1], SUFFIX, PARENT, choice=choice, retain_kv=60)
            assert child.continuation is not None and child.continuation.source == "lease"
            assert child.continuation.computed_tokens == len(SUFFIX) + 1
            assert child.prompt_token_ids == whole(generations[-1], choice) + SUFFIX
            generations.append(child)
        for generation in generations[1:]:
            assert numbers_of(generation) == afresh(llm, generation.prompt_token_ids or (), PARENT)


def test_a_place_inside_a_text_that_a_search_found() -> None:
    with engine(LLAMA, num_blocks=300) as llm:
        parent = start(llm, random_token_ids(14, seed=3), BEAMS, retain_kv=60)
        children = {
            (choice, at): llm.generate_continuation(parent, SUFFIX, BEAMS, choice=choice, at=at)
            for choice in range(3)
            for at in range(13, 19)
        }
        for (choice, at), child in children.items():
            assert child.continuation is not None
            assert (child.continuation.source, child.continuation.inherited_tokens) == ("lease", min(at, 17))
            assert numbers_of(child) == afresh(llm, whole(parent, choice)[:at] + SUFFIX, BEAMS), (choice, at)


@both_depths
def test_without_a_lease_the_prompt_is_found_and_the_rest_is_computed_again() -> None:
    with engine(LLAMA, num_blocks=300) as llm:
        parent = start(llm, random_token_ids(35, seed=1), PARENT)
        assert set(check_children(llm, parent, [SAMPLED])) <= {"prefix_cache", "recomputed"}
        parent = start(llm, random_token_ids(35, seed=1), PARENT)
        assert llm.reset_prefix_cache()
        child = llm.generate_continuation(parent, SUFFIX, BEAMS, choice=2)
        assert child.continuation is not None and child.continuation.source == "recomputed"
        assert numbers_of(child) == afresh(llm, whole(parent, 2) + SUFFIX, BEAMS)


@both_depths
@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.one_in(3)
def test_a_search_that_lost_its_memory_on_the_way_is_a_good_parent_too(num_tokens: int) -> None:
    """Texts that ended before are not leased any more, those that end afterwards are."""
    with engine(LLAMA, num_blocks=300) as llm:
        stream = open_search(llm, "parent", random_token_ids(15, seed=6), PARENT, retain_kv=60)
        for _ in range(num_tokens):
            next(stream)
        step_without_free_memory(llm)
        *_, parent = stream
        scheduler_of(llm).check()
        assert set(check_children(llm, parent, [SAMPLED])) <= {"lease", "prefix_cache", "recomputed"}


@both_depths
def test_what_a_search_keeps_for_later_gives_way_before_the_search_does() -> None:
    """A pool that holds the search and hardly more: what ended early is dropped, what ends late is leased."""
    prompt = random_token_ids(13, seed=2)
    params = msgspec.structs.replace(PARENT, length_penalty=0.0)
    with engine(LLAMA) as llm:
        expected = afresh(llm, prompt, params)
    with engine(LLAMA, num_blocks=10) as llm:
        parent = start(llm, prompt, params, retain_kv=60)
        assert numbers_of(parent) == expected
        assert llm.stats().num_preemptions == 0
        assert check_children(llm, parent, [SAMPLED]) == ["recomputed", "recomputed", "lease", "lease"]


@both_depths
def test_a_running_search_can_only_be_waited_for() -> None:
    with engine(LLAMA) as llm:
        stream = llm.stream(random_token_ids(9, seed=5), PARENT)
        request_id = next(stream).request_id
        with pytest.raises(RequestError):
            llm.generate_continuation(request_id, SUFFIX, BEAMS, wait=False)
        waited = llm.generate_continuation(request_id, SUFFIX, BEAMS, choice=1)
        *_, parent = stream
        assert waited.prompt_token_ids == whole(parent, 1) + SUFFIX
        assert numbers_of(waited) == afresh(llm, whole(parent, 1) + SUFFIX, BEAMS)


@both_depths
def test_a_search_that_was_taken_back_is_no_parent_and_leaves_no_lease() -> None:
    with engine(LLAMA) as llm:
        stream = open_search(llm, "parent", random_token_ids(9, seed=5), PARENT, retain_kv=60)
        for _ in range(6):
            next(stream)
        stream.close()
        with pytest.raises(UnknownParentError):
            llm.generate_continuation("parent", SUFFIX, BEAMS)
        while llm._client.has_work():
            llm.engine.step()
        assert llm.stats().leases.num_active == 0


# ---- in another process ----


async def ended(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        last = output
    return last


@pytest.mark.slow
def test_choices_are_continued_over_the_process_border_and_outlive_the_process() -> None:
    async def continued(llm: AsyncLLM) -> list[RequestOutput]:
        searches = [llm.generate_continuation("p", SUFFIX, BEAMS, choice=choice) for choice in range(WIDTH)]
        return await asyncio.gather(*map(ended, searches))

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            parent = await ended(llm.generate(random_token_ids(20, seed=1), PARENT, "p", retain_kv=60))
            leased = await continued(llm)
            os.kill(llm.health().engines[0].pid, signal.SIGKILL)
            recomputed = await continued(llm)
            for output in leased:
                assert output.continuation is not None
                assert (output.continuation.source, output.continuation.computed_tokens) == ("lease", len(SUFFIX) + 1)
            assert recomputed[0].continuation is not None and recomputed[0].continuation.source == "recomputed"
            assert [*map(numbers_of, recomputed)] == [*map(numbers_of, leased)]
            for choice, output in enumerate(leased):
                fresh = llm.generate(whole(parent, choice) + SUFFIX, BEAMS, cache_salt="other")
                assert numbers_of(output) == numbers_of(await ended(fresh))

    asyncio.run(run())
