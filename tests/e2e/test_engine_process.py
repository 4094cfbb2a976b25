"""The engine in a process of its own, through LLM and through the asynchronous clients: same answers, same errors."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ratoon import LLM, AsyncLLM, ConfigError, ModelError, RequestError, SamplingParams
from ratoon.core.health import EngineState
from ratoon.core.outputs import RequestOutput
from ratoon.core.settings import engine_config
from ratoon.engine.processes.async_client import DPAsyncMPClient, DPLBAsyncMPClient, make_async_client
from ratoon.engine.processes.ledger import Entry
from ratoon.observe.startup import StartupTimer
from tests.faults.processes import SETTINGS, is_running, model_name
from tests.forked_engines import forked_engines
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE, until, wait_until

PROMPTS = [random_token_ids(length, seed=length) for length in (3, 17, 40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, seed=7, n=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=1, max_tokens=5, ignore_eos=True, prompt_logprobs=1),
]


def answers(llm: LLM) -> list[tuple]:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    return [(output.prompt_logprobs, [vars_of(choice) for choice in output.outputs]) for output in outputs]


def vars_of(choice) -> tuple:
    return choice.text, list(choice.token_ids), choice.logprobs, choice.finish_reason, choice.stop_reason


@pytest.fixture
def _forked_engines():
    with forked_engines():
        yield


# Where engines are many, or their start does not matter.
forked = pytest.mark.usefixtures("_forked_engines")


@pytest.fixture(scope="module")
def in_process():
    with LLM(model_name(), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def other_process():
    with LLM(model_name(), process=True, **SETTINGS) as llm:
        yield llm


def test_answers_are_the_same_on_both_sides_of_the_border(in_process, other_process):
    assert answers(other_process) == answers(in_process)


@forked
def test_an_engine_refuses_across_the_border_with_the_same_error(in_process, other_process):
    too_much = SamplingParams(max_tokens=200)
    small = {**SETTINGS, "num_blocks": 4}
    with LLM(model_name(), process=True, **small) as llm:
        with pytest.raises(RequestError) as refused:
            llm.generate(PROMPTS[0], too_much, progress=False)
        assert refused.value.field == "max_tokens" and "blocks" in refused.value.problem
        outputs = llm.generate(PROMPTS[:2], [too_much, SamplingParams(max_tokens=2)], progress=False)
        assert outputs[0].outputs[0].finish_reason == "error" and "blocks" in outputs[0].error
        assert outputs[1].outputs[0].finish_reason == "length"


def test_utilities_reach_the_engine(other_process):
    answers(other_process)
    assert other_process.stats().prefix_cache.queries > 0
    assert other_process.reset_prefix_cache() is True
    assert other_process.describe()["num_blocks"] == SETTINGS["num_blocks"]
    client = other_process._client
    with pytest.raises(RequestError, match="unknown"):
        client.call_utility("shutdown")
    with pytest.raises(RequestError, match="level"):
        client.call_utility("sleep", 3)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_answers_as_before(in_process, other_process, level):
    client = other_process._client
    client.call_utility("sleep", level)
    client.call_utility("sleep", level)
    client.call_utility("wake_up")
    assert answers(other_process) == answers(in_process)


def test_a_profile_names_the_functions_of_a_step(other_process, tmp_path):
    client = other_process._client
    with pytest.raises(RequestError, match="not under way"):
        client.call_utility("stop_profile")
    client.call_utility("start_profile")
    answers(other_process)
    path = Path(client.call_utility("stop_profile"))
    try:
        import pstats

        assert any(function == "execute_model" for _, _, function in pstats.Stats(str(path)).stats)
    finally:
        path.unlink()
        if path.parent.name.startswith("ratoon-profile-"):  # no folder was named
            path.parent.rmdir()


def test_sockets_lie_in_a_private_directory_that_is_removed():
    with LLM(model_name(), process=True, **SETTINGS) as llm:
        folder = llm._client._directory.path
        pid = llm._client.health().engines[0].pid
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(list(folder.glob("0-*"))) == 2
    assert not folder.exists()
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"device": "cuda:77"}, ConfigError, "device"),
        ({"kv_memory": "1KiB", "num_blocks": None}, ConfigError, "kv_memory"),
        ({"executor": "no.such:Thing"}, ConfigError, "executor"),
    ],
)
@pytest.mark.one_in(2)
def test_what_keeps_an_engine_from_starting_is_raised_as_if_it_were_here(settings, error, text):
    with pytest.raises(error, match=text):
        LLM(model_name(), process=True, **{**SETTINGS, **settings})


def test_a_model_that_breaks_in_the_other_process_is_a_model_error(tmp_path):
    import shutil

    folder = shutil.copytree(model_name(), tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError):
        LLM(str(folder), process=True, **SETTINGS)


def test_the_engine_ends_when_its_parent_is_killed(tmp_path):
    script = f"""
import time
from ratoon import LLM
llm = LLM({model_name()!r}, process=True, **{SETTINGS!r})
print(llm._client.health().engines[0].pid, llm._client._directory.path, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    assert is_running(int(pid))
    parent.kill()
    parent.wait()
    wait_until("the engine ends", lambda: not is_running(int(pid)))
    wait_until("the directory is removed", lambda: not Path(folder).exists())


# ---- several engines ----


async def collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    result = None
    async for output in llm.generate(prompt, params):
        result = output
    return [list(choice.token_ids) for choice in result.outputs]


def expected(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@forked
@pytest.mark.parametrize("balanced", [True, False])
def test_two_engines_share_the_work_and_answer_as_one(in_process, balanced):
    async def run() -> None:
        client = make_async_client(engine_config(model_name(), **SETTINGS), 2, StartupTimer(), balanced)
        assert isinstance(client, DPLBAsyncMPClient if balanced else DPAsyncMPClient)
        async with AsyncLLM(model_name(), num_replicas=2, client=client, **SETTINGS) as llm:
            found = await asyncio.gather(*(collect(llm, prompt, params) for prompt, params in zip(PROMPTS, PARAMS)))
            assert list(found) == expected(in_process)
            assert all(stats.num_steps > 0 for stats in await llm.stats())
            assert llm.health().state == EngineState.OK and len(llm.health().engines) == 2

    asyncio.run(run())


@forked
def test_choices_that_stop_strings_ended_weigh_on_no_engine():
    """They end on this side, one by one; the books of the balancer must hear of the last."""

    async def run() -> None:
        async with AsyncLLM(model_name(), num_replicas=2, **SETTINGS) as llm:
            stopping = SamplingParams(temperature=1, seed=1, n=3, max_tokens=50, ignore_eos=True, stop=["w"])
            for prompt in PROMPTS:
                async for output in llm.generate(prompt, stopping):
                    last = output
                assert [choice.stop_reason for choice in last.outputs] == ["w"] * 3
            assert [(load.num_requests, load.num_tokens) for load in llm._client.balancer.loads] == [(0, 0), (0, 0)]

    asyncio.run(run())


@forked
def test_a_rank_that_is_asked_for_gets_the_request():
    async def run() -> None:
        async with AsyncLLM(model_name(), num_replicas=2, **SETTINGS) as llm:
            for _ in range(3):
                async for _ in llm.generate(PROMPTS[0], PARAMS[0], data_parallel_rank=1):
                    pass
            steps = [stats.num_steps for stats in await llm.stats()]
            assert steps[0] == 0 and steps[1] > 0
            with pytest.raises(RequestError, match="data_parallel_rank"):
                async for _ in llm.generate(PROMPTS[0], PARAMS[0], data_parallel_rank=2):
                    pass

    asyncio.run(run())


@forked
def test_a_paused_engine_keeps_requests_and_goes_on(in_process):
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            await llm.pause()
            waiting = asyncio.create_task(collect(llm, PROMPTS[0], PARAMS[0]))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await llm.resume()
            assert await waiting == expected(in_process)[0]

    asyncio.run(run())


@pytest.mark.parametrize("where", ["in_process", "other_process"])
def test_another_thread_pauses_resumes_and_aborts_what_a_call_waits_for(request, where):
    llm = request.getfixturevalue(where)
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first, second = "first", "second"
    got: list[RequestOutput] = []
    reader = threading.Thread(target=lambda: got.extend(llm.stream(PROMPTS[:2], long, [first, second])))
    llm.pause()
    reader.start()
    wait_until("the call to begin", lambda: llm.engine.num_unfinished_requests() == 2)
    time.sleep(0.2)
    assert not got
    llm.abort(second)
    llm.resume()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    ends = {output.request_id: output.outputs[0].finish_reason for output in got if output.finished}
    assert ends == {first: "length", second: "abort"}
    assert sum(len(output.outputs[0].token_ids) for output in got if output.request_id == first) == 100
    assert not llm.engine.has_unfinished_requests()


def entries_of(llm: AsyncLLM) -> list[Entry]:
    return list(llm._client._ledger._entries.values())


@forked
def test_a_cancelled_request_frees_its_blocks(in_process):
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, n=4)
            tasks = [asyncio.create_task(collect(llm, PROMPTS[1], long)) for _ in range(8)]
            await until("they are under way", lambda: any(entry.begun for entry in entries_of(llm)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            end = time.monotonic() + PATIENCE
            while (books := (await llm._client.call_utility("check"))[0])["num_used_blocks"] or books["num_requests"]:
                assert time.monotonic() < end, "requests or blocks are left in the engine"
            assert await collect(llm, PROMPTS[0], PARAMS[0]) == expected(in_process)[0]

    asyncio.run(run())


def test_no_torch_is_loaded_on_this_side():
    script = f"""
import sys
from ratoon import LLM, SamplingParams
with LLM({model_name()!r}, process=True, **{SETTINGS!r}) as llm:
    llm.generate([1, 2, 3], SamplingParams(max_tokens=2), progress=False)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ})
