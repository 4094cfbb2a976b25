"""Data-parallel engines as processes: settings that mean the same, the clients, and engines that step together."""

import asyncio
import os
import signal

import pytest

from ratoon import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from ratoon.engine.processes.async_client import AsyncMPClient, DPAsyncMPClient, DPLBAsyncMPClient
from ratoon.engine.processes.sync_dp_client import SyncDPClient, combine
from tests.counting_executor import FOLDER, NAME, passes_of
from tests.faults.processes import SETTINGS, model_name
from tests.forked_engines import forked_engines
from tests.golden.tiny_models import random_token_ids

PROMPT = random_token_ids(17, seed=17)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def _forked_engines():
    with forked_engines():
        yield


forked = pytest.mark.usefixtures("_forked_engines")


async def collect(llm: AsyncLLM, **options) -> list[list[int]]:
    result = None
    async for output in llm.generate(PROMPT, LONG, **options):
        result = output
    return [list(choice.token_ids) for choice in result.outputs]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, AsyncMPClient),
        ({"data_parallel_size": 2}, DPLBAsyncMPClient),
        ({"num_replicas": 2, "data_parallel_size": 2}, DPLBAsyncMPClient),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, DPAsyncMPClient),
    ],
)
@forked
def test_settings_choose_the_client(settings, kind):
    async def run() -> None:
        async with AsyncLLM(model_name(), **settings, **SETTINGS) as llm:
            assert type(llm._client) is kind
            answers = [await collect(llm) for _ in range(2)]
            assert answers[0] == answers[1]
            steps = [stats.num_steps for stats in await llm.stats()]
            assert len(steps) == settings.get("data_parallel_size", 1)
            if kind is DPAsyncMPClient:
                assert all(steps), "without a rank, engines take turns"

    asyncio.run(run())


@forked
def test_an_llm_has_several_engines_too():
    prompts = [random_token_ids(length, seed=length) for length in (3, 17, 40, 9)]
    with LLM(model_name(), **SETTINGS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, LONG, progress=False)]
    with LLM(model_name(), data_parallel_size=2, **SETTINGS) as llm:
        assert type(llm._client) is SyncDPClient and len(llm.health().engines) == 2
        outputs = llm.generate(prompts, LONG, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert len({llm.find_parent(output.request_id).engine for output in outputs}) == 2, "both have worked"
        rest = llm.generate_continuation(outputs[2], [5], LONG)
        assert rest.continuation.inherited_tokens > 0, "it goes to the engine that has its parent"
        assert llm.stats().num_steps > 0 and llm.reset_prefix_cache() is True
        os.kill(llm.health().engines[0].pid, signal.SIGKILL)
        outputs = llm.generate(prompts, LONG, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        with pytest.raises(RequestError, match="data_parallel_rank"):
            llm.generate(prompts[0], LONG, data_parallel_rank=2)


def test_results_of_several_engines_are_combined():
    assert combine([None, None]) is None and combine([True, False]) is False and combine([2, 3]) == 5
    assert combine([{"kv_usage": 0.5, "leases": {"n": 1}}, {"kv_usage": 0.1, "leases": {"n": 2}}]) == {
        "kv_usage": pytest.approx(0.3),
        "leases": {"n": 3},
    }
    assert combine(["a", "b"]) == "a, b" and combine(["a"]) == "a"


def test_two_names_of_one_setting_with_different_values_are_refused():
    with pytest.raises(ConfigError, match="data_parallel_size: and num_replicas are the same setting"):
        AsyncLLM("fake", data_parallel_size=2, num_replicas=3)


@forked
def test_queue_figures_are_published():
    async def run() -> None:
        async with AsyncLLM(model_name(), data_parallel_size=2, **SETTINGS) as llm:
            outputs = llm.generate(PROMPT, LONG, data_parallel_rank=1)
            seen = [[engine.num_running for engine in llm.health().engines] async for _ in outputs]
            assert [0, 1] in seen and [1, 0] not in seen

    asyncio.run(run())


@pytest.mark.parametrize("lockstep", [True, False])
@forked
def test_an_idle_engine_steps_beside_the_others_only_where_the_model_needs_it(tmp_path, monkeypatch, lockstep):
    monkeypatch.setenv(FOLDER, str(tmp_path))

    async def run() -> None:
        settings = {**SETTINGS, "executor": NAME, "data_parallel_size": 2, "data_parallel_lockstep": lockstep}
        async with AsyncLLM(model_name(), **settings) as llm:
            pids = [engine.pid for engine in llm.health().engines]
            alone = await collect(llm)
            for rank in (0, 1):
                assert await collect(llm, data_parallel_rank=rank) == alone, "empty steps change nothing"
            if not lockstep:
                passes = [passes_of(tmp_path, pid) for pid in pids]
                assert sum(passes) == 3 * LONG.max_tokens, "no engine steps without work"
                return
            while llm._client.coordinator.wave_is_on:
                await asyncio.sleep(0.01)
            passes = [passes_of(tmp_path, pid) for pid in pids]
            assert passes[0] == passes[1] and passes[0] > LONG.max_tokens
            await asyncio.sleep(0.2)
            assert [passes_of(tmp_path, pid) for pid in pids] == passes, "no wave, no steps"

    asyncio.run(run())
