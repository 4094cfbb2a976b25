"""Hidden states from an engine in a process of its own: the same bytes, the same errors, and nothing that is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from ratoon import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    DeadlineError,
    HiddenStatesOutput,
    HiddenStatesParams,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from ratoon.scheduling.extraction import MAX_WAITING
from tests.faults.processes import SETTINGS, model_name
from tests.forked_engines import forked_engines
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE

PROMPTS = [random_token_ids(length, seed=length) for length in (1, 16, 45)]
EVERYTHING = HiddenStatesParams(positions="all", layers="all")
ASKED = [
    HiddenStatesParams(),
    EVERYTHING,
    HiddenStatesParams(positions=[-1, 0, -1], layers=["norm", 0, -1], dtype="bfloat16"),
    HiddenStatesParams(positions=[[0, None]], layers=1, dtype="float16"),
]


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> Iterator[None]:
    with forked_engines():
        yield


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1, "seed": 5, "max_tokens": 9, "ignore_eos": True, **changes})


def all_ways(llm: LLM) -> list[HiddenStatesOutput]:
    """Everything that can be asked for, in one list."""
    found: list[HiddenStatesOutput] = []
    for asked in ASKED:
        found += llm.extract_hidden_states(PROMPTS, asked, progress=False)
        outputs = llm.generate(PROMPTS, sampled(n=2, return_hidden_states=asked), progress=False)
        search = BeamSearchParams(beam_width=3, n=2, max_tokens=5, ignore_eos=True, return_hidden_states=asked)
        outputs += llm.beam_search(PROMPTS[2], search, progress=False)
        found += [states for output in outputs for states in output.hidden_states]
        found += llm.extract_hidden_states(outputs, asked, choice=1, progress=False)
    return found


@pytest.mark.slow
def test_states_are_the_same_bits_on_both_sides_of_the_border():
    with LLM(model_name(), **SETTINGS) as here, LLM(model_name(), process=True, **SETTINGS) as there:
        mine, theirs = all_ways(here), all_ways(there)
        for one, other in zip(mine, theirs, strict=True):
            assert one.error is None and torch.equal(one.tensor, other.tensor)
            facts = ("request_id", "dtype", "layers", "positions", "token_ids", "computed_tokens", "source")
            assert [getattr(one, name) for name in facts] == [getattr(other, name) for name in facts]
        for llm in (here, there):
            assert llm.stats().leases.num_active == 0
            assert llm._client.call_utility("check")["num_used_blocks"] == 0


def test_the_last_token_of_a_text_costs_one_row():
    with LLM(model_name(), process=True, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPTS[2], sampled(return_hidden_states=True), progress=False)
        (states,) = output.hidden_states
        assert (states.computed_tokens, states.source, states.positions) == (1, "lease", [53])
        kept = llm.generate(PROMPTS[2], sampled(seed=8), retain_kv=60, progress=False)[0]
        assert llm.extract_hidden_states(kept, progress=False).computed_tokens == 1
        assert llm.stats().leases.num_active == 1, "the caller's lease goes on"


# ---- on an event loop ----


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def llm(runner) -> Iterator[AsyncLLM]:
    started = AsyncLLM(model_name(), num_replicas=2, **SETTINGS)
    runner.run(started.start())
    yield started
    runner.run(started.shutdown())


async def generate(llm: AsyncLLM, prompt: list[int], params: SamplingParams, **options: Any) -> RequestOutput:
    async for output in llm.generate(prompt, params, **options):
        last = output
    return last


async def assert_nothing_left(llm: AsyncLLM) -> None:
    """In neither engine, once it has seen what was aborted and the steps that were under way have ended."""
    end = time.monotonic() + PATIENCE
    while any(books["num_used_blocks"] or books["num_requests"] for books in await llm._client.call_utility("check")):
        assert time.monotonic() < end, "requests or blocks are left in an engine"
    assert len(llm._client._ledger) == 0 and llm.num_unfinished_requests() == 0
    assert not llm.engine.output_processor.has_unfinished_requests()


def test_with_several_replicas_states_are_read_where_the_text_was_made(runner, llm):
    async def run() -> None:
        prompts = [random_token_ids(40, seed) for seed in range(12)]
        outputs = await asyncio.gather(
            *(generate(llm, prompt, sampled(return_hidden_states=True)) for prompt in prompts)
        )
        engines = {llm.engine.output_processor.find_root(output.request_id).engine for output in outputs}
        assert engines == {0, 1}
        for prompt, output in zip(prompts, outputs):
            (states,) = output.hidden_states
            assert (states.source, states.computed_tokens) == ("lease", 1)
            whole = [*prompt, *output.outputs[0].token_ids]
            alone = await llm.extract_hidden_states(whole, cache_salt="another")
            numpy.testing.assert_array_equal(states.tensor, alone.tensor)
        await assert_nothing_left(llm)

    runner.run(run())


def test_a_stop_string_may_end_the_text_before_the_engine_does(runner, llm):
    """Found in the last words, it competes with the end in the engine."""

    async def run() -> None:
        first = await generate(llm, PROMPTS[1], sampled())
        words = first.outputs[0].text.split()
        asked = [
            sampled(stop=[words[place] + end], n=2, return_hidden_states=HiddenStatesParams(positions=[0, -1]))
            for place in range(len(words))
            for end in ("", " ")
        ]
        outputs = await asyncio.gather(*(generate(llm, PROMPTS[1], params) for params in asked))
        assert {choice.finish_reason for output in outputs for choice in output.outputs} == {"stop", "length"}
        for output in outputs:
            for choice, states in zip(output.outputs, output.hidden_states, strict=True):
                tokens = [*PROMPTS[1], *choice.token_ids]
                alone = await llm.extract_hidden_states(tokens, HiddenStatesParams(positions=[0, -1]), cache_salt="s")
                assert states.error is None and states.positions == [0, len(tokens) - 1]
                numpy.testing.assert_array_equal(states.tensor, alone.tensor)
        await assert_nothing_left(llm)

    runner.run(run())


def test_a_full_queue_turns_away_and_what_is_in_it_is_answered(runner, llm):
    async def run() -> None:
        await llm.pause()
        num_places = 2 * MAX_WAITING
        tasks = [asyncio.create_task(llm.extract_hidden_states([n % 60 + 1, 5])) for n in range(num_places + 40)]
        while sum(task.done() for task in tasks) < 20:
            await asyncio.sleep(0.01)
        await llm.resume()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, Exception)]
        assert 20 <= len(refused) <= 40 and {type(error) for error in refused} == {QueueFullError}
        assert all(result.token_ids == [5] for result in results if not isinstance(result, Exception))
        await assert_nothing_left(llm)

    runner.run(run())


def test_a_deadline_ends_the_extraction_and_not_the_text(runner, llm):
    async def run() -> None:
        at_once = HiddenStatesParams(positions="all", deadline=1e-9)
        with pytest.raises(DeadlineError) as over:
            await llm.extract_hidden_states(PROMPTS[2], at_once)
        assert over.value.field == "deadline" and "0 of 45 positions" in str(over.value)
        output = await generate(llm, PROMPTS[2], sampled(return_hidden_states=at_once))
        assert output.error is None and len(output.outputs[0].token_ids) == 9
        assert isinstance(output.hidden_states[0].refusal, DeadlineError) and output.hidden_states[0].tensor is None
        await llm.pause()
        with pytest.raises(DeadlineError):
            await llm.extract_hidden_states(PROMPTS[2], HiddenStatesParams(deadline=0.05))
        await llm.resume()
        await assert_nothing_left(llm)

    runner.run(run())


def test_a_text_that_still_runs_is_read_as_far_as_it_has_come(runner, llm):
    async def run() -> None:
        read: list[HiddenStatesOutput] = []
        tokens: list[int] = []
        async for output in llm.generate(PROMPTS[2], sampled(max_tokens=60), "running"):
            tokens = list(output.outputs[0].token_ids)
            if len(read) < 3:
                read.append(await llm.extract_hidden_states(original_request_id="running"))
                assert read[-1].positions[0] >= len(PROMPTS[2]) + len(tokens) - 1
        whole = await llm.extract_hidden_states([*PROMPTS[2], *tokens], HiddenStatesParams(positions="all"))
        for states in read:
            numpy.testing.assert_array_equal(states.tensor[0, 0], whole.tensor[0, states.positions[0]])
        await assert_nothing_left(llm)

    runner.run(run())


def test_what_is_aborted_while_it_is_read_leaves_nothing_in_the_engine(runner, llm):
    async def run() -> None:
        prompt = random_token_ids(100, seed=4)
        tasks = [asyncio.create_task(llm.extract_hidden_states(prompt, EVERYTHING, f"x{n}")) for n in range(8)]
        asked = sampled(max_tokens=1, n=3, return_hidden_states=EVERYTHING)
        streams = [asyncio.create_task(generate(llm, prompt, asked, request_id=f"r{n}")) for n in range(8)]
        for n in range(8):
            await asyncio.sleep(0.002)
            await llm.abort([f"x{n}", f"r{n}"])
        for task in tasks[:4]:
            task.cancel()
        outputs = await asyncio.gather(*streams)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(output.finished and output.error is None for output in outputs)
        await assert_nothing_left(llm)

    runner.run(run())
