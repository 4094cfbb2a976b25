"""Engines that are killed while they answer over an image: the answer is the same, and so are continuations of it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from tests.depths import both_depths
from tests.faults.executors import HALTING, Halt
from tests.faults.processes import engine_settings
from tests.golden.image_readers import IMAGE_FAMILIES, image_reader
from tests.waiting import until

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
SUFFIX = [10, 11]


async def last_of(outputs: Any) -> RequestOutput:
    found: list[RequestOutput] = [output async for output in outputs]
    assert found[-1].finished and found[-1].error is None, found[-1]
    return found[-1]


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@both_depths
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
@pytest.mark.one_in(7)
def test_an_answer_over_an_image_goes_on_with_the_same_tokens_in_a_new_engine(family: str, halt: Halt) -> None:
    reader = image_reader(family)
    shown, other = reader.prompt(0), reader.prompt(1)

    async def run() -> None:
        async with AsyncLLM(str(reader.folder), executor=HALTING, **engine_settings(dtype="float32")) as llm:
            right = tokens_of(await last_of(llm.generate(shown, PARAMS)))
            assert right != tokens_of(await last_of(llm.generate(other, PARAMS)))
            for num_restarts, num_steps in enumerate((0, 4), 1):  # before and after the encoder runs
                assert await llm.reset_prefix_cache()
                halt.after(num_steps)
                answering = asyncio.create_task(last_of(llm.generate(shown, PARAMS)))
                await until("it is under way", lambda: halt.is_reached)
                pid = llm.health().engines[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                answer = await answering
                assert tokens_of(answer) == right
                assert llm.health().engines[0].num_restarts == num_restarts
            # The new engine has forgotten the image, and gets it again from the front end
            child = tokens_of(await last_of(llm.generate_continuation(answer, SUFFIX, PARAMS)))
            assert child == tokens_of(await last_of(llm.generate_continuation(answer, SUFFIX, PARAMS)))
            pid = llm.health().engines[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until("it is back", lambda: llm.health().ok and llm.health().engines[0].num_restarts == 3)
            assert tokens_of(await last_of(llm.generate_continuation(answer, SUFFIX, PARAMS))) == child
            # A continuation that brings an image of its own, in an engine that dies after it has encoded both
            seen = tokens_of(await last_of(llm.generate_continuation(answer, other, PARAMS)))
            assert seen != tokens_of(await last_of(llm.generate_continuation(answer, reader.prompt(2), PARAMS)))
            assert await llm.reset_prefix_cache()
            halt.after(6)
            continuing = asyncio.create_task(last_of(llm.generate_continuation(answer, other, PARAMS)))
            await until("it is under way", lambda: halt.is_reached)
            pid = llm.health().engines[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert tokens_of(await continuing) == seen
            assert llm.health().engines[0].num_restarts == 4

    asyncio.run(run())
