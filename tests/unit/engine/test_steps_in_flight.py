"""EngineCore with several steps in flight: what is planned ahead, and what an end, an abort or a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.config import EngineConfig, SchedulerConfig
from ratoon.core.errors import DeviceLostError, StepSkippedError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.engine.core import EngineCore
from tests.unit.engine.test_engine_core import (
    BLOCK_SIZE,
    FakeExecutor,
    ends_of,
    fail_once,
    fail_with,
    make_core,
    request,
    run,
    tokens_of,
)


class Gate:
    """Holds the steps of an executor back until they are let through, one by one."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.began: list[int] = []
        self._turns = threading.Semaphore(0)
        executor.before_everything = self._wait

    def _wait(self, plan: SchedulerOutput) -> None:
        self._turns.acquire()
        self.began.append(plan.step)

    def open(self, count: int = 1000) -> None:
        self._turns.release(count)


def test_the_next_step_is_planned_before_the_token_of_this_one_is_known() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        core.add_request(request("a", 6, max_tokens=4))
        first = core.step()
        assert [output.new_token_ids for output in first.outputs] == [[6]]
        branch = core.scheduler.state.branches["a"]
        assert (branch.num_tokens, branch.num_pending, branch.num_computed_tokens) == (7, 1, 7)
        (ahead,) = core.scheduler.state.in_flight
        assert ahead.scheduled_cached_reqs.num_computed_tokens == [6] and ahead.step == 2
        assert tokens_of(run(core)["a"]) == [7, 8, 9]
        assert len([plan for plan in executor.plans if plan.num_scheduled_tokens]) == 4, "no row behind the last token"


def test_one_in_flight_plans_nothing_ahead() -> None:
    with make_core(max_steps_in_flight=1) as (core, _):
        core.add_request(request("a", 6, max_tokens=4))
        core.step()
        assert core.scheduler.state.in_flight == [] and core.scheduler.state.branches["a"].num_pending == 0


def stopping(name: str, length: int, stop: int, **rest: object) -> EngineCoreRequest:
    asked = request(name, length, max_tokens=20, **rest)  # type: ignore[arg-type]
    assert isinstance(asked.params, SamplingParams)
    asked.params.all_stop_token_ids = [stop]
    return asked


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", range(3, 12))
def test_a_stop_that_is_found_late_leaves_no_trace(length: int, depth: int) -> None:
    """At every offset in a block: the lease holds what one step at a time would have left, and nothing else is held."""
    with make_core(max_steps_in_flight=depth, max_num_seqs=4) as (core, _):
        asked = stopping("a", length, length + 3)
        asked.retain_kv = 1000.0
        core.add_request(asked)
        outputs = run(core)["a"]
        assert tokens_of(outputs) == list(range(length, length + 4))
        assert ends_of(outputs) == [(0, FinishReason.STOP)]
        (lease,) = core.scheduler.leases.sequences()
        num_computed = length + 3
        assert (len(lease.token_ids), lease.num_computed_tokens) == (length + 4, num_computed)
        assert [len(table) for table in lease.block_tables] == [-(-num_computed // BLOCK_SIZE)]
        assert lease.num_registered_tokens == num_computed // BLOCK_SIZE * BLOCK_SIZE
        kv_cache = core.scheduler.kv_cache
        assert kv_cache.num_usable_blocks - kv_cache.num_free_blocks == -(-num_computed // BLOCK_SIZE)
        assert len(kv_cache.pool.cached_blocks(0)) == num_computed // BLOCK_SIZE, "an unknown token was hashed"
        core.end_leases(["a"])


def test_an_abort_takes_effect_before_the_results_of_what_runs() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        gate = Gate(executor)
        for name, first in (("a", 100), ("b", 200)):
            core.add_request(request(name, first=first, max_tokens=5))
        gate.open(1)
        core.step()
        gate.open(1)
        executor.before_sampling = lambda plan: core.note_abort(["a"])
        outputs = core.step().outputs
        assert [(output.request_id, output.finish_reason) for output in outputs] == [
            ("a", FinishReason.ABORT), ("b", None),
        ]  # fmt: skip
        executor.before_sampling = lambda plan: None
        gate.open()
        assert set(run(core)) == {"b"}


def test_an_id_that_is_used_again_gets_no_result_of_the_request_before_it() -> None:
    with make_core(max_steps_in_flight=3) as (core, _):
        core.add_request(request("a", 6, max_tokens=9))
        core.step()
        core.abort_requests(["a"])
        core.add_request(request("a", 9, max_tokens=3, first=500))
        outputs = run(core)["a"]
        assert tokens_of(outputs) == [9, 10, 11]
        assert ends_of(outputs) == [(0, FinishReason.ABORT), (0, FinishReason.LENGTH)]


def test_a_paused_engine_ends_what_is_in_flight_and_plans_no_more() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        core.add_request(request("a", 6, max_tokens=9))
        core.step()
        core.pause()
        assert core.can_step
        assert len(core.step().outputs) == 1
        num_plans = len(executor.plans)
        assert not core.can_step and core.step().outputs == [] and len(executor.plans) == num_plans
        core.resume()
        assert len(tokens_of(run(core)["a"])) == 7


def test_sleep_waits_for_what_is_in_flight() -> None:
    with make_core(max_steps_in_flight=2) as (core, executor):
        core.add_request(stopping("a", 6, 7))
        while core.scheduler.has_unfinished_requests():
            core.step()
        executor.sleep = executor.wake_up = lambda *level: None  # type: ignore[attr-defined]
        core.sleep()
        assert executor.rows == {} and core.scheduler.state.in_flight == []
        core.wake_up()


def test_choices_come_into_being_before_anything_of_their_request_runs_ahead() -> None:
    with make_core(max_steps_in_flight=2) as (core, _):
        core.add_request(request("a", 6, max_tokens=4, n=3))
        core.step()
        assert core.scheduler.state.in_flight == []
        outputs = run(core)["a"]
        for choice in range(3):
            assert tokens_of(outputs, choice) == [7, 8, 9]


def test_what_must_give_way_waits_until_nothing_is_in_flight() -> None:
    with make_core(num_blocks=8, max_steps_in_flight=2) as (core, _):
        for index in range(4):
            core.add_request(request(str(index), 7, max_tokens=12, first=100 * index))
        preempt = core.scheduler.preemption.preempt

        def checked(*arguments: object) -> None:
            assert core.scheduler.state.in_flight == []
            preempt(*arguments)  # type: ignore[arg-type]

        core.scheduler.preemption.preempt = checked  # type: ignore[method-assign, assignment]
        outputs = run(core)
        for index in range(4):
            assert tokens_of(outputs[str(index)]) == list(range(7, 19))
        assert core.stats().num_preemptions > 0


# ---- steps that fail ----


def test_steps_behind_a_failed_one_are_not_carried_out() -> None:
    class Executor(ThreadedExecutor):
        def __init__(self) -> None:
            super().__init__()
            self.ran: list[int] = []

        def execute_model(self, plan: SchedulerOutput) -> None:
            self.ran.append(plan.step)
            if plan.step == 2:
                raise RuntimeError("device lost")

        def sample_tokens(self) -> ModelRunnerOutput:
            return ModelRunnerOutput()

    executor = Executor()
    handles = [executor.submit(SchedulerOutput(step)) for step in (1, 2, 3)]
    assert handles[0].result() == ModelRunnerOutput()
    with pytest.raises(RuntimeError, match="device lost"):
        handles[1].result()
    with pytest.raises(StepSkippedError):
        handles[2].result()
    with pytest.raises(StepSkippedError):
        executor.submit(SchedulerOutput(4)).result()
    executor.collective_rpc("recover").result()
    assert executor.submit(SchedulerOutput(5)).result() == ModelRunnerOutput()
    assert executor.ran == [1, 2, 5]
    executor.close()


@pytest.mark.parametrize("phase", ["before_everything", "before_forward", "before_sampling"])
@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_that_fails_once_costs_time_and_nothing_else(phase: str, num_steps: int, depth: int) -> None:
    with make_core(max_num_seqs=4, max_steps_in_flight=depth) as (core, executor):
        received: dict[str, list[EngineCoreOutput]] = {"a": [], "b": [], "late": []}
        core.add_request(request("a", max_tokens=8, n=2))
        core.add_request(request("b", 9, max_tokens=8, first=500))
        core.add_request(request("late", 9, max_tokens=8, first=900))

        def take(outputs: list[EngineCoreOutput]) -> None:
            for output in outputs:
                received[output.request_id].append(output)

        for _ in range(num_steps):
            take(core.step().outputs)
        setattr(executor, phase, fail_once(lambda plan: len(plan.num_scheduled_tokens) > 1))
        for outputs in run(core).values():
            take(outputs)
        assert tokens_of(received["a"]) == tokens_of(received["a"], 1) == [*range(6, 14)]
        assert tokens_of(received["b"]) == tokens_of(received["late"]) == [*range(9, 17)]


def test_one_at_fault_fails_alone_and_those_of_skipped_steps_are_planned_anew() -> None:
    with make_core(max_num_batched_tokens=20, max_steps_in_flight=2) as (core, executor):
        core.add_request(request("bad", 20, max_tokens=4))
        core.add_request(request("good", 9, max_tokens=4, first=500))
        executor.before_forward = fail_with("bad")
        outputs = run(core)
        assert ends_of(outputs["bad"]) == [(0, FinishReason.ERROR)]
        assert tokens_of(outputs["good"]) == [9, 10, 11, 12]
        assert "good" not in core.scheduler.state.quarantined


@given(
    depth=st.integers(1, 4),
    flaky=st.lists(st.booleans(), max_size=20),
    choices=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    stops=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    num_blocks=st.integers(16, 40),
)
def test_any_depth_gives_the_same_tokens(
    depth: int, flaky: list[bool], choices: list[int], stops: list[int], num_blocks: int
) -> None:
    dice = iter(flaky)

    def maybe_raise(plan: SchedulerOutput) -> None:
        inside = {branch_id.split("#")[0] for branch_id in plan.num_scheduled_tokens}
        if len(inside) > 1 and next(dice, False):
            raise RuntimeError("no")

    raising: Callable[[SchedulerOutput], None] = maybe_raise
    with make_core(num_blocks, max_num_batched_tokens=16, max_num_seqs=5, max_steps_in_flight=depth) as (
        core,
        executor,
    ):
        executor.before_sampling = raising
        for index, (n, stop) in enumerate(zip(choices, stops)):
            length = 3 + 4 * index
            core.add_request(stopping(str(index), length, length + stop, first=100 * index, n=n))
        outputs = run(core)
        for index, (n, stop) in enumerate(zip(choices, stops)):
            length = 3 + 4 * index
            for choice in range(n):
                assert tokens_of(outputs[str(index)], choice) == [*range(length, length + stop + 1)]


# ---- results that are pending on the device ----


class Pending:
    """An output that is there when the device is done."""

    def __init__(self, output: ModelRunnerOutput, done: threading.Event, error: Exception | None = None) -> None:
        self._output, self._done, self._error = output, done, error

    def get_output(self) -> ModelRunnerOutput:
        assert self._done.wait(60.0)
        if self._error is not None:
            raise self._error
        return self._output


class DeviceOfItsOwn(ThreadedExecutor):
    """Launches steps; their results come when `done` is set. Those of step 2 may be an error."""

    def __init__(self, error: Exception | None = None, is_lost: bool = False) -> None:
        super().__init__()
        self.done = threading.Event()
        self.launched: list[int] = []
        self._error, self._is_lost = error, is_lost

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.launched.append(plan.step)

    def sample_tokens(self) -> Pending:
        output = ModelRunnerOutput([f"step {self.launched[-1]}"])
        return Pending(output, self.done, self._error if self.launched[-1] == 2 else None)

    def examine_failure(self, error: Exception) -> None:
        if self._is_lost:
            raise DeviceLostError("gone") from error


def test_the_thread_of_steps_goes_on_while_results_are_pending() -> None:
    executor = DeviceOfItsOwn()
    handles = [executor.submit(SchedulerOutput(step)) for step in (1, 2, 3)]
    executor.run_on_thread(lambda: None)  # after them
    assert executor.launched == [1, 2, 3] and not executor.done.is_set()
    executor.done.set()
    assert [handle.result().req_ids for handle in handles] == [["step 1"], ["step 2"], ["step 3"]]
    executor.close()


def test_a_failure_that_is_found_while_waiting_is_a_failed_step() -> None:
    executor = DeviceOfItsOwn(RuntimeError("unreadable"))
    executor.done.set()
    handles = [executor.submit(SchedulerOutput(step)) for step in (1, 2, 3)]
    executor.run_on_thread(lambda: None)
    assert handles[0].result().req_ids == ["step 1"]
    with pytest.raises(RuntimeError, match="unreadable"):
        handles[1].result()
    with pytest.raises(StepSkippedError):
        executor.submit(SchedulerOutput(4)).result()
    executor.collective_rpc("recover").result()
    assert executor.submit(SchedulerOutput(5)).result().req_ids == ["step 5"]
    assert executor.launched == [1, 2, 3, 5]
    executor.close()


def test_a_lost_device_is_told_as_such() -> None:
    executor = DeviceOfItsOwn(RuntimeError("CUDA error"), is_lost=True)
    executor.done.set()
    handles = [executor.submit(SchedulerOutput(step)) for step in (1, 2)]
    assert handles[0].result().req_ids == ["step 1"]
    with pytest.raises(DeviceLostError, match="gone"):
        handles[1].result()
    executor.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_device_ends_the_core_and_blames_no_request(depth: int) -> None:
    executor = FakeExecutor(33)
    core = EngineCore(EngineConfig("fake", scheduler=SchedulerConfig(max_steps_in_flight=depth)), executor)
    core.add_request(request("a", max_tokens=4))
    core.add_request(request("b", 9, max_tokens=4, first=500))

    def lose(error: Exception) -> None:
        raise DeviceLostError("gone") from error

    executor.before_forward = fail_with("a")
    executor.examine_failure = lose  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError):
        core.step()
    assert not core.scheduler.state.quarantined
    core.shutdown()
