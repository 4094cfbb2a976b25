"""Requests of one call, or of one turn of an event loop, begin in one step of an engine in another process.

Else each of the first steps would have some more of them, and every size of a step costs a preparation of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from ratoon.core.errors import RequestError
from tests.counting_executor import FOLDER, NOTING, begun_in
from tests.faults.processes import SETTINGS, model_name
from tests.forked_engines import forked_engines
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE

PROMPTS = [random_token_ids(5, seed=seed) for seed in range(12)]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ENGINE = {**SETTINGS, "executor": NOTING, "max_num_seqs": 32, "num_blocks": 200}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with forked_engines():
        yield tmp_path


def test_requests_of_a_call_begin_in_one_step_of_the_engine_s_process(folder: Path):
    with LLM(model_name(), process=True, **ENGINE) as llm:
        begun_in(folder)
        outputs = llm.generate(PROMPTS, PARAMS, progress=False)
        assert begun_in(folder) == [[len(PROMPTS)]]
        llm.beam_search(PROMPTS[:3], BeamSearchParams(beam_width=2, max_tokens=2))
        assert begun_in(folder) == [[3]]
    with LLM(model_name(), **SETTINGS) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, progress=False)] == [
            one.outputs[0].token_ids for one in outputs
        ]


def test_requests_of_a_call_begin_in_one_step_of_each_of_several_engines(folder: Path):
    with LLM(model_name(), num_replicas=2, **ENGINE) as llm:
        begun_in(folder)
        llm.generate(PROMPTS, PARAMS, progress=False)
        found = begun_in(folder)
        assert len(found) == 2 and all(len(steps) == 1 for steps in found), found
        assert sum(map(sum, found)) == len(PROMPTS)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_requests_of_one_turn_of_the_event_loop_begin_in_one_step(folder: Path, num_engines: int):
    async def ask(llm: AsyncLLM, prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, PARAMS):
            pass

    async def run() -> None:
        async with AsyncLLM(model_name(), data_parallel_size=num_engines, **ENGINE) as llm:
            begun_in(folder)
            await asyncio.gather(*(ask(llm, prompt) for prompt in PROMPTS))

    asyncio.run(run())
    found = begun_in(folder)
    assert len(found) == num_engines and all(len(steps) == 1 for steps in found), found
    assert sum(map(sum, found)) == len(PROMPTS)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_request_that_no_message_can_hold_is_refused_and_those_beside_it_are_answered(num_engines: int):
    async def ask(llm: AsyncLLM, prompt: list[int], salt: str | None = None) -> list[int]:
        async for output in llm.generate({"prompt_token_ids": prompt}, PARAMS, cache_salt=salt):
            last = output
        return list(last.outputs[0].token_ids)

    async def run() -> None:
        async with AsyncLLM(model_name(), data_parallel_size=num_engines, **SETTINGS) as llm:
            alone = [await ask(llm, prompt) for prompt in PROMPTS[:3]]
            asked = [*(ask(llm, prompt) for prompt in PROMPTS[:3]), ask(llm, PROMPTS[3], "half a pair: \ud800")]
            *found, refused = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
            assert found == alone
            assert isinstance(refused, RequestError) and refused.field == "cache_salt"

    with forked_engines():
        asyncio.run(run())


def test_a_request_of_a_call_that_no_message_can_hold_is_refused_alone():
    bad = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop=["half a pair: \ud800"])
    with forked_engines(), LLM(model_name(), process=True, **SETTINGS) as llm:
        first, refused, last = llm.generate(PROMPTS[:3], [PARAMS, bad, PARAMS], progress=False)
        assert refused.error is not None and refused.error.startswith("stop: can't be sent")
        assert [len(one.outputs[0].token_ids) for one in (first, last)] == [3, 3]
        assert not llm.engine.has_unfinished_requests()


def test_requests_of_an_engine_that_died_begin_together_in_the_next(folder: Path):
    with LLM(model_name(), process=True, **ENGINE) as llm:
        begun_in(folder)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, progress=False)]
        begun_in(folder)
        found: dict[str, list[int]] = {}
        for name, output in enumerate(PROMPTS):
            llm.engine.submit(llm.engine.prepare(str(name), {"prompt_token_ids": output}, params))
        pid = llm.engine.client.health().engines[0].pid
        assert pid is not None
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                if output.outputs[0].token_ids:
                    found[output.request_id] = list(output.outputs[0].token_ids)
            if len(found) == len(PROMPTS) and pid:
                os.kill(pid, signal.SIGKILL)
                pid = None
        assert [found[str(name)] for name in range(len(PROMPTS))] == expected
        assert [len(PROMPTS)] in begun_in(folder)
