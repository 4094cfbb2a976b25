"""What the thread of the steps does in moments without steps, and that a step never waits for more than one piece."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.distributed import uniproc as module
from ratoon.distributed.uniproc import ThreadedExecutor

LONG = 60.0  # a test that waited for it would be seen


class Idler(ThreadedExecutor):
    """Has so many pieces of work for moments without steps; `log` tells what was done."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.log: list[str] = []
        self.done = Event()

    @property
    def has_idle_work(self) -> bool:
        return self.pieces > 0

    @property
    def has_work_of_steps(self) -> bool:
        return self.pieces > 1  # the last one is for other steps

    def work_when_idle(self) -> bool:
        if self.pieces == 0:
            self.done.set()
            return False
        self.pieces -= 1
        self.log.append("piece")
        return True

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.log.append("step")

    def sample_tokens(self) -> ModelRunnerOutput:
        return ModelRunnerOutput()


@pytest.fixture
def made() -> Iterator[list[Idler]]:
    executors: list[Idler] = []
    yield executors
    for executor in executors:
        executor.close()


def make(made: list[Idler], monkeypatch: pytest.MonkeyPatch, seconds: float, pieces: int) -> Idler:
    monkeypatch.setattr(module, "IDLE_SECONDS", seconds)
    made.append(Idler(pieces))
    made[-1].allow_idle_work()
    return made[-1]


def test_work_is_done_in_advance_when_there_are_no_steps(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(made, monkeypatch, 0.001, 3)
    executor.submit(SchedulerOutput()).result()
    assert executor.done.wait(LONG)
    assert executor.log == ["step", "piece", "piece", "piece"]
    executor.submit(SchedulerOutput()).result()
    assert executor.log[-1] == "step"


def test_nothing_is_done_in_advance_where_others_may_use_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    executor = Idler(3)
    executor.submit(SchedulerOutput()).result()
    executor.close()
    assert executor.log == ["step"]


def test_a_step_ends_the_wait_for_idleness(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(made, monkeypatch, LONG, 3)
    for _ in range(3):
        executor.submit(SchedulerOutput()).result()
    executor.run_on_thread(lambda: executor.log.append("call"))
    assert executor.log == ["step"] * 3 + ["call"]


def test_a_step_waits_for_one_piece_only(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(made, monkeypatch, 0.001, 5)
    begun, may_end = Event(), Event()
    work = executor.work_when_idle

    def slow_work() -> bool:
        begun.set()
        may_end.wait(LONG)
        return work()

    monkeypatch.setattr(executor, "work_when_idle", slow_work)
    executor.submit(SchedulerOutput()).result()
    assert begun.wait(LONG)
    second = executor.submit(SchedulerOutput())
    may_end.set()
    second.result()
    assert executor.log[:3] == ["step", "piece", "step"]


def test_a_device_that_is_still_busy_with_the_last_step_is_waited_for(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(made, monkeypatch, 0.001, 2)
    answers = [True, True, False]
    monkeypatch.setattr(Idler, "is_busy", property(lambda self: answers.pop(0)))
    executor.submit(SchedulerOutput()).result()
    assert executor.done.wait(LONG)
    assert executor.log == ["step", "piece", "piece"] and answers == []


def test_work_is_done_in_advance_of_the_first_step_after_a_longer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request is likely to come as soon as the port is open."""
    for at_start, expected in ((LONG, []), (0.001, ["piece"] * 3)):
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
        monkeypatch.setattr(module, "IDLE_SECONDS_AT_START", at_start)
        executor = Idler(3)
        executor.collective_rpc("allow_idle_work").result()
        assert executor.done.wait(0.05 if at_start == LONG else LONG) == bool(expected)
        executor.close()
        assert executor.log == expected


def test_shutdown_ends_the_wait_for_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make([], monkeypatch, LONG, 1)
    executor.submit(SchedulerOutput()).result()
    executor.close()
    assert executor.log == ["step"]


def test_a_caller_with_its_results_waits_for_the_work_that_its_steps_have_left() -> None:
    executor = Idler(3)
    executor.submit(SchedulerOutput()).result()
    executor.collective_rpc("work_between_calls").result()
    executor.close()
    assert executor.log == ["step", "piece", "piece"]


def test_a_caller_waits_no_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS_BETWEEN_CALLS", 0.0)
    executor = Idler(9)
    executor.collective_rpc("work_between_calls").result()
    executor.close()
    assert executor.log == ["piece"]


def test_a_caller_waits_for_nothing_where_the_work_is_done_when_idle(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(made, monkeypatch, LONG, 3)
    executor.collective_rpc("work_between_calls").result()
    assert executor.log == []
