"""A worker in a process of its own answers as the worker in the engine's process does, and one that is gone ends the
engine's run, not its requests. Several ranks are in test_tensor_parallel.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import LLM, SamplingParams
from ratoon.core.errors import ConfigError, DeviceLostError, ModelError
from ratoon.core.params import HiddenStatesParams
from ratoon.core.worker import WORKER_METHODS
from ratoon.distributed import multiproc
from ratoon.distributed.multiproc import MultiprocExecutor
from tests.golden.engines import model_folder
from tests.golden.every_kind import answers
from tests.waiting import wait_until

PROMPTS = [[5, 9, 2, 40, 7], [3] * 11, list(range(30))]
FAMILY = "llama with grouped heads"


def open_engine(folder: Any, **settings: Any) -> LLM:
    common = {"device": "cpu", "num_threads": 1, "skip_tokenizer": True, "max_num_seqs": 8, "num_blocks": 96}
    return LLM(str(folder), **(common | settings))


def executor_of(llm: LLM) -> MultiprocExecutor:
    executor = llm._client.core.executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


def call_and_wait(executor: MultiprocExecutor, method: str, *arguments: Any) -> list[Any]:
    return executor.collective_rpc(method, *arguments).result()


def test_a_worker_in_a_process_answers_as_one_in_this_process() -> None:
    states = HiddenStatesParams(positions="all", layers=[0, -1])
    with open_engine(model_folder(FAMILY)) as llm:
        expected, expected_states = answers(llm, PROMPTS), llm.extract_hidden_states(PROMPTS[0], states).tensor
    with open_engine(model_folder(FAMILY), executor="mp") as llm:
        assert answers(llm, PROMPTS) == expected
        found = llm.extract_hidden_states(PROMPTS[0], states).tensor
        (root,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4), retain_kv=60, progress=False)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, PROMPTS) == expected
        assert root.error is None
    assert found == pytest.approx(expected_states, abs=1e-5)


def test_a_worker_that_is_killed_ends_the_executor_and_all_workers() -> None:
    before = set(os.listdir("/dev/shm"))
    with open_engine(model_folder(FAMILY), tensor_parallel_size=2) as llm:
        executor = executor_of(llm)
        pids = [worker.pid for worker in executor._workers]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=r"worker 1 has (ended|closed its socket)"):
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True), progress=False)
    wait_until("no worker is left behind", lambda: not any(is_running(pid) for pid in pids))
    assert set(os.listdir("/dev/shm")) <= before


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


RANKS: dict[str, dict[str, Any]] = {
    "one worker": {"executor": "mp"},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize(("what", "ranks"), [*(("step", ranks) for ranks in RANKS), ("call", "tensor parallel")])
def test_a_worker_that_stands_still_is_waited_for_until_its_time_is_over(
    what: str, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiproc, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(multiproc, "SECONDS_TO_ANSWER", 2.0)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with open_engine(model_folder(FAMILY), **RANKS[ranks]) as llm:
        llm.generate(PROMPTS, greedy, progress=False)
        executor = executor_of(llm)
        failures: list[str] = []
        executor.when_failed = failures.append
        pids = [worker.pid for worker in executor._workers]
        os.kill(pids[-1], signal.SIGSTOP)
        wait: Callable[[], Any]
        if what == "step":
            wait = partial(llm.generate, PROMPTS, greedy, progress=False)
            monkeypatch.setattr(multiproc, "SECONDS_OF_A_STEP", 0.5)
            expected = rf"worker {len(pids) - 1} has not ended step \d+ within 0.5 seconds, and not answered since"
        else:
            wait = partial(call_and_wait, executor, "sleep", 1)
            monkeypatch.setitem(WORKER_METHODS, "sleep", WORKER_METHODS["sleep"]._replace(seconds=2.0))
            # The other rank may be slow: then it is named too.
            expected = "(worker 1 has|workers 0 and 1 have) not answered 'sleep' within 2 seconds"
        with pytest.raises(DeviceLostError, match=f"^{expected}$") as lost:
            wait()
        assert failures == [str(lost.value)]
    wait_until("no worker is left behind", lambda: not any(is_running(pid) for pid in pids))


def test_what_can_not_be_divided_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ModelError, match="attention heads can't be cut into 3 equal parts"):
        open_engine(model_folder(FAMILY), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        open_engine(model_folder(FAMILY), tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="executor: uniproc has one worker, and tensor_parallel_size is 2"):
        open_engine(model_folder(FAMILY), tensor_parallel_size=2, executor="uniproc")
