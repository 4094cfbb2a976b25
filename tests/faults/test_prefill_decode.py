"""Engines that compute prompts, and engines that go on with them, killed and stopped under load: no answer is lost or
changed, and nothing waits for one that is gone. RATOON_KILLS=50 asks for more kills than a run of all tests has time
for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.health import EngineState
from ratoon.core.params import RequestOutputKind
from ratoon.engine.processes import replica
from ratoon.engine.processes.ledger import MAX_STRIKES
from ratoon.engine.processes.moving_client import MovingClient
from tests.faults.executors import HANG_TOKEN, KILL_TOKEN, RAISE_TOKEN
from tests.faults.kills import number_of_kills
from tests.faults.processes import engine_settings, model_name
from tests.golden.tiny_models import random_token_ids
from tests.waiting import until

NUM_KILLS = number_of_kills(3)
NUM_STREAMS = 6
PREFILL, DECODE = 0, (1, 2)
MARKS = (KILL_TOKEN, RAISE_TOKEN, HANG_TOKEN)


def settings(**changes: Any) -> dict[str, Any]:
    split = {"prefill_engines": 1, "decode_engines": 2, "prefill_threshold": 16, "swap_memory": "4MiB"}
    return engine_settings(**{**split, "max_num_batched_tokens": 32, **changes})


def client_of(llm: AsyncLLM) -> MovingClient:
    client = llm._client
    assert isinstance(client, MovingClient)
    return client


def pid_of(llm: AsyncLLM, index: int) -> int | None:
    return llm.health().engines[index].pid


async def read_answer(llm: AsyncLLM, seed: int, turn: int = 0) -> list[list[int]]:
    """Prompts of a stream differ from turn to turn in their first token, so that none is cached."""
    prompt = [token for token in random_token_ids(75, seed) if token not in MARKS]
    params = SamplingParams(
        temperature=0 if seed % 3 == 0 else 0.9,
        seed=seed,
        n=2 if seed % 5 == 0 else 1,
        max_tokens=30,
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    async for output in llm.generate([turn, *prompt], params):
        last = output
    assert last.error is None
    return [list(one.token_ids) for one in last.outputs]


def test_kills_of_either_side_under_load_change_no_answer():
    draws = random.Random(NUM_KILLS)
    kills: list[int] = []  # processes

    async def keep_asking(llm: AsyncLLM, seed: int, right: list[Any]) -> None:
        turn = 0
        while len(kills) < NUM_KILLS:
            assert await read_answer(llm, seed, turn % len(right)) == right[turn % len(right)]
            turn += 1

    async def keep_killing(llm: AsyncLLM) -> None:
        while len(kills) < NUM_KILLS:
            await asyncio.sleep(draws.uniform(0, 0.3))
            engine = (PREFILL, *DECODE)[len(kills) % 3]
            if any(pid_of(llm, one) in kills for one in (PREFILL, *DECODE)):
                continue  # it is dead, and what that means for its requests is not counted yet
            # A request that sees three deaths and no token counts as their cause: wait for its token.
            if any(entry.strikes >= MAX_STRIKES - 1 for entry in client_of(llm)._ledger._entries.values()):
                continue
            pid = pid_of(llm, engine)
            if pid is not None and llm.health().engines[engine].state == EngineState.OK:
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)

    async def run() -> None:
        async with AsyncLLM(model_name(), **settings()) as llm:
            right = [[await read_answer(llm, seed, turn) for turn in range(3)] for seed in range(NUM_STREAMS)]
            asking = (keep_asking(llm, seed, right[seed]) for seed in range(NUM_STREAMS))
            await asyncio.gather(*asking, keep_killing(llm))
            states = [EngineState.OK] * 3
            await until("all are well", lambda: [one.state for one in llm.health().engines] == states)
            assert not client_of(llm)._prefills and not client_of(llm)._num_prefills
            for books in await client_of(llm).call_utility("check"):
                assert books["num_requests"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("engine", [PREFILL, DECODE[0]], ids=["prompts", "answers"])
def test_an_engine_that_is_killed_before_a_prompt_is_handed_over(engine: int):
    async def run() -> None:
        async with AsyncLLM(model_name(), **settings()) as llm:
            pid, stopped = pid_of(llm, engine), pid_of(llm, PREFILL)
            assert pid is not None and stopped is not None
            os.kill(stopped, signal.SIGSTOP)  # so that no prompt is computed before the kill
            asking = [asyncio.create_task(read_answer(llm, seed, 1)) for seed in range(4)]
            await until("prompts are to be computed", lambda: len(client_of(llm)._prefills) == 4)
            targets = {one.target for one in client_of(llm)._prefills.values()}
            assert targets == set(DECODE)
            os.kill(pid, signal.SIGKILL)
            if engine != PREFILL:
                await until("it is gone", lambda: llm.health().engines[engine].num_restarts == 1)
                os.kill(stopped, signal.SIGCONT)
            found = await asyncio.gather(*asking)
            again = [await read_answer(llm, seed, 1) for seed in range(4)]
            assert found == again

    asyncio.run(run())


def test_prompts_in_an_engine_that_hangs_are_computed_by_others(monkeypatch):
    monkeypatch.setattr(replica, "SILENCE_IS_STALLED", 2.0)

    async def run() -> None:
        async with AsyncLLM(model_name(), **settings()) as llm:
            right = [await read_answer(llm, seed) for seed in range(3)]
            pid = pid_of(llm, PREFILL)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                asking = [asyncio.create_task(read_answer(llm, seed, 1)) for seed in range(3)]
                await until("prompts are to be computed", lambda: len(client_of(llm)._prefills) == 3)
                hung = await asyncio.gather(*asking)  # while it still hangs
            finally:
                os.kill(pid, signal.SIGCONT)
            await until("it is well", lambda: not client_of(llm).replicas[PREFILL].is_silent)
            assert hung == [await read_answer(llm, seed, 1) for seed in range(3)]
            assert right == [await read_answer(llm, seed) for seed in range(3)]
            assert pid_of(llm, PREFILL) == pid

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_that_is_stopped_for_ten_seconds_goes_on():
    async def run() -> None:
        async with AsyncLLM(model_name(), **settings(decode_engines=1)) as llm:
            right = [await read_answer(llm, seed, 1) for seed in range(3)]
            for engine in (PREFILL, DECODE[0]):
                pid = pid_of(llm, engine)
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                asking = [asyncio.create_task(read_answer(llm, seed, 1)) for seed in range(3)]
                await asyncio.sleep(10)
                os.kill(pid, signal.SIGCONT)
                assert await asyncio.gather(*asking) == right
                assert pid_of(llm, engine) == pid

    asyncio.run(run())


def test_aborted_requests_leave_nothing():
    async def run() -> None:
        async with AsyncLLM(model_name(), **settings()) as llm:
            await read_answer(llm, 0)
            pid = pid_of(llm, PREFILL)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            asking = [asyncio.create_task(read_answer(llm, seed, 1)) for seed in range(3)]
            await until("prompts are to be computed", lambda: len(client_of(llm)._prefills) == 3)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            os.kill(pid, signal.SIGCONT)
            await until("they are gone", lambda: not client_of(llm)._prefills and not client_of(llm)._num_prefills)
            await read_answer(llm, 1)
            for books in await client_of(llm).call_utility("check"):
                assert books["num_requests"] == 0

    asyncio.run(run())
