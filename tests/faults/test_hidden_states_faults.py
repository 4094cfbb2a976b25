"""Engines that die while hidden states are read: they are read again, the same, and no text is lost to it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy
import pytest

from ratoon import LLM, AsyncLLM, EngineError, HiddenStatesParams, SamplingParams
from ratoon.core.outputs import HiddenStatesOutput, RequestOutput
from tests.depths import both_depths
from tests.faults.executors import HALTING_AT_READING, KILL_TOKEN, Halt
from tests.faults.processes import PYTHONPATH, SETTINGS, engine_settings, model_name
from tests.faults.reading_executors import DEADLY
from tests.golden.tiny_models import random_token_ids
from tests.waiting import until, wait_until

PROMPT = [token for token in random_token_ids(60, seed=3) if token != KILL_TOKEN]
EVERYTHING = HiddenStatesParams(positions="all", layers="all")
IN_PARTS = {"max_num_batched_tokens": 8}  # rows in a step


@pytest.fixture(autouse=True)
def executors_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **changes)


async def generate(llm: AsyncLLM, prompt: list[int], **changes: Any) -> RequestOutput:
    async for output in llm.generate(prompt, greedy(**changes)):
        last = output
    return last


async def kill_when_rows_have_come(llm: AsyncLLM, halt: Halt) -> None:
    processor = llm.engine.output_processor
    await until("it stands still", lambda: halt.is_reached)
    await until(
        "rows have come", lambda: any(getattr(state.answer, "num_rows_run", 0) for state in processor._states.values())
    )
    os.kill(llm.health().engines[0].pid, signal.SIGKILL)


def assert_same(one: HiddenStatesOutput, other: HiddenStatesOutput) -> None:
    assert one.error is None and other.error is None
    numpy.testing.assert_array_equal(one.tensor, other.tensor)
    assert (one.positions, one.layers, one.token_ids) == (other.positions, other.layers, other.token_ids)


@both_depths
@pytest.mark.slow
def test_an_engine_that_dies_in_the_middle_of_an_extraction_costs_time_and_nothing_else(halt):
    async def run() -> None:
        async with AsyncLLM(model_name(), executor=HALTING_AT_READING, **engine_settings(**IN_PARTS)) as llm:
            alone = await llm.extract_hidden_states(PROMPT, EVERYTHING)
            text = await generate(llm, PROMPT, return_hidden_states=EVERYTHING)
            assert text.hidden_states[0].source == "lease"
            halt.after(3)  # steps of the eight that it takes
            killing = asyncio.create_task(kill_when_rows_have_come(llm, halt))
            assert_same(await llm.extract_hidden_states(PROMPT, EVERYTHING, cache_salt="another"), alone)
            await killing
            halt.after(3)
            killing = asyncio.create_task(kill_when_rows_have_come(llm, halt))
            again = await generate(llm, PROMPT, return_hidden_states=EVERYTHING)
            await killing
            assert again.outputs[0].token_ids == text.outputs[0].token_ids and again.error is None
            assert_same(again.hidden_states[0], text.hidden_states[0])
            assert again.hidden_states[0].source == "recomputed", "its memory died with the engine"
            assert llm.health().engines[0].num_restarts == 2
            (books,) = await llm._client.call_utility("check")
            assert books["num_requests"] == 0 and len(llm._client._ledger) == 0

    asyncio.run(run())


@pytest.mark.slow
def test_a_sequence_that_kills_who_reads_it_is_given_up_and_its_text_is_delivered():
    deadly = [*PROMPT[:20], KILL_TOKEN]

    async def run() -> None:
        async with AsyncLLM(model_name(), executor=DEADLY, **SETTINGS) as llm:
            everything = HiddenStatesParams(positions="all")
            text, bystander = await asyncio.gather(
                generate(llm, deadly, return_hidden_states=everything),
                generate(llm, PROMPT, return_hidden_states=everything),
            )
            assert text.error is None and len(text.outputs[0].token_ids) == 6
            assert "died 3 times" in text.hidden_states[0].error and text.hidden_states[0].tensor is None
            assert bystander.hidden_states[0].error is None
            with pytest.raises(EngineError, match="died 3 times"):
                await llm.extract_hidden_states(deadly, everything)
            fine = await llm.extract_hidden_states(original_request_id=bystander.request_id)
            assert_same(fine, await llm.extract_hidden_states([*PROMPT, *bystander.outputs[0].token_ids]))

    asyncio.run(run())


@both_depths
@pytest.mark.slow
def test_a_caller_who_waits_gets_the_same_states_from_the_next_process(halt):
    with LLM(model_name(), process=True, executor=HALTING_AT_READING, **engine_settings(**IN_PARTS)) as llm:
        alone = llm.extract_hidden_states(PROMPT, EVERYTHING, progress=False)
        halt.after(3)
        run = llm.engine.run([llm.engine.prepare_extraction("again", PROMPT, EVERYTHING, cache_salt="another salt")])
        processor = llm.engine.output_processor
        step = llm.engine.step

        def step_and_kill() -> None:
            step()
            if any(getattr(state.answer, "num_rows_run", 0) for state in processor._states.values()):
                llm.engine.step = step
                wait_until("it stands still", lambda: halt.is_reached)
                os.kill(llm._client.health().engines[0].pid, signal.SIGKILL)

        llm.engine.step = step_and_kill
        (again,) = run
        assert llm._client.health().engines[0].num_restarts == 1
        assert_same(again, alone)
