"""Steps on the thread of the core, which lends it where nothing else is more urgent: when that is, and that it changes
nothing else."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import FinishReason
from ratoon.distributed import uniproc as module
from ratoon.distributed.uniproc import MAX_REQUESTS_OF_LENT_THREAD
from ratoon.memory import prefix_cache
from tests.unit.engine.test_engine_core import (
    FakeExecutor,
    ends_of,
    fail_once,
    fail_with,
    make_core,
    request,
    run,
    tokens_of,
)

LONG = 60.0  # a test that waited for it would be seen


class Lent:
    """An executor that takes a lent thread: which steps were launched on it."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.by_step: dict[int, bool] = {}
        executor.on_lent_thread = nullcontext  # type: ignore[method-assign]
        executor.before_everything = self._note

    def _note(self, plan: SchedulerOutput) -> None:
        self.by_step[plan.step] = threading.current_thread() is threading.main_thread()


def test_a_step_that_no_other_is_ahead_of_runs_on_the_thread_of_the_core() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        lent = Lent(executor)
        core.add_request(request("a", max_tokens=4))
        assert tokens_of(run(core)["a"]) == [6, 7, 8, 9]
        assert [lent.by_step[step] for step in (1, 2, 3, 4)] == [True, False, False, False]


def test_a_first_step_is_launched_before_the_next_one_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        log: list[str] = []
        schedule = core.scheduler.schedule
        monkeypatch.setattr(core.scheduler, "schedule", lambda: log.append("plan") or schedule())
        Lent(executor)
        executor.before_everything = lambda plan: log.append(f"launch {plan.step}")
        core.add_request(request("a", max_tokens=4))
        core.step()
        assert log[:3] == ["plan", "launch 1", "plan"]


def test_the_launch_of_many_requests_is_left_to_the_other_thread() -> None:
    with make_core(num_blocks=99) as (core, executor):
        lent = Lent(executor)
        for number in range(MAX_REQUESTS_OF_LENT_THREAD + 1):
            core.add_request(request(str(number), max_tokens=1, first=100 * number))
        core.step()
        assert list(lent.by_step.values()) == [False]


def test_an_executor_that_can_not_use_it_gets_no_thread() -> None:
    with make_core() as (core, executor):
        lent = Lent(executor)
        executor.on_lent_thread = lambda: None  # type: ignore[method-assign]
        core.add_request(request("a"))
        run(core)
        assert not any(lent.by_step.values())


@pytest.mark.parametrize("phase", ["before_forward", "before_sampling"])
def test_a_step_that_fails_on_a_lent_thread_fails_its_request_alone(phase: str) -> None:
    with make_core() as (core, executor):
        lent = Lent(executor)
        setattr(executor, phase, fail_with("bad"))
        core.add_request(request("bad"))
        core.add_request(request("good", first=500))
        outputs = run(core)
        assert ends_of(outputs["bad"]) == [(0, FinishReason.ERROR)]
        assert tokens_of(outputs["good"]) == [6, 7, 8]
        assert all(lent.by_step.values())


def test_steps_of_both_threads_follow_each_other_after_a_failure() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        Lent(executor)
        executor.before_forward = fail_once(lambda plan: plan.step == 1)
        core.add_request(request("a", max_tokens=5))
        core.add_request(request("b", max_tokens=1, first=500))
        outputs = run(core)
        assert tokens_of(outputs["a"]) == [6, 7, 8, 9, 10] and tokens_of(outputs["b"]) == [6]


def test_a_lent_thread_waits_for_a_call_that_runs_and_for_one_piece_of_idle_work(monkeypatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.001)
    with make_core() as (core, executor):
        log: list[str] = []
        begun, may_end = threading.Event(), threading.Event()

        def work() -> bool:
            log.append("piece")
            begun.set()
            may_end.wait(LONG)
            log.append("piece done")
            return True

        executor.on_lent_thread = nullcontext  # type: ignore[method-assign]
        executor.work_when_idle = work  # type: ignore[method-assign]
        executor.before_everything = lambda plan: log.append("step")
        monkeypatch.setattr(FakeExecutor, "has_idle_work", property(lambda executor: len(log) < 2))
        executor.allow_idle_work()
        executor.run_on_thread(lambda: log.append("call"))
        assert begun.wait(LONG)
        threading.Timer(0.05, may_end.set).start()
        core.add_request(request("a", max_tokens=1))
        core.step()
        assert log == ["call", "piece", "piece done", "step"]


def test_a_second_interrupt_leaves_an_engine_that_goes_on() -> None:
    """The first is held back to the end of a step; the second breaks into the launch."""
    with make_core() as (core, executor):
        Lent(executor)
        interrupts = [KeyboardInterrupt]

        def interrupt(plan: SchedulerOutput) -> None:
            if interrupts:
                raise interrupts.pop()

        executor.before_sampling = interrupt
        core.add_request(request("a"))
        core.add_request(request("b", first=500))
        with pytest.raises(KeyboardInterrupt):
            core.step()
        outputs = run(core)
        assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == [6, 7, 8]


def test_blocks_of_a_long_prompt_are_hashed_between_launch_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MANY_BLOCKS", 2)
    with make_core(num_blocks=99) as (core, executor):
        lent = Lent(executor)
        unregistered: list[bool] = []
        note = executor.before_everything

        def note_more(plan: SchedulerOutput) -> None:
            note(plan)
            unregistered.append(core.scheduler.has_work_beside_step)

        executor.before_everything = note_more
        work = core.scheduler.work_beside_step
        monkeypatch.setattr(
            core.scheduler, "work_beside_step", lambda: unregistered.append(len(lent.by_step) == 1) or work()
        )
        core.add_request(request("a", 40, max_tokens=1))
        core.step()
        assert unregistered == [True, True]  # while it is launched, and then it was
        assert not core.scheduler.has_work_beside_step
        core.scheduler.check()
