"""EngineCore over an executor that plays a model: steps, failures, aborts, and that no block is ever left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.config import CacheConfig, EngineConfig, SchedulerConfig, SchedulingPolicy
from ratoon.core.errors import RequestError
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.core.worker import WorkerFacts
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.engine.core import EngineCore, StepDepth

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


class FakeExecutor(ThreadedExecutor):
    """Every branch gets its number of tokens so far as its next token. Holds plans against the rows that it knows."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        spec = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32")
        kv = KVCacheConfig(num_blocks, BLOCK_SIZE, (KVCacheGroup(spec, (0,)),))
        self.facts = WorkerFacts(kv, MAX_MODEL_LEN, "cpu", "float32", "fake", [], 1, 0, 0)
        self.rows: dict[str, int] = {}  # branch id → number of tokens
        self.plans: list[SchedulerOutput] = []
        self.before_forward: Callable[[SchedulerOutput], None] = lambda plan: None
        self.before_sampling: Callable[[SchedulerOutput], None] = lambda plan: None
        self.change_result: Callable[[ModelRunnerOutput], None] = lambda result: None
        self.closed = False
        self.before_everything: Callable[[SchedulerOutput], None] = lambda plan: None

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)
        self.before_everything(plan)
        for req_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self.rows.pop(req_id, None)  # after a failed step it is told again
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.rows
            self.rows[new.req_id] = len(new.token_ids)
        assert set(plan.num_scheduled_tokens) <= set(self.rows)
        self.before_forward(plan)

    def sample_tokens(self) -> ModelRunnerOutput:
        plan = self.plans[-1]
        self.before_sampling(plan)
        result = ModelRunnerOutput()
        for req_id in plan.sampled_req_ids:
            for name in (req_id, *(child for child, _ in plan.fanout.get(req_id, []))):
                result.req_ids.append(name)
                result.sampled_token_ids.append([self.rows[req_id]])
            self.rows[req_id] += 1
        self.change_result(result)
        return result

    def close(self) -> None:
        super().close()
        self.closed = True


@contextmanager
def make_core(num_blocks: int = 33, **scheduler: Any) -> Iterator[tuple[EngineCore, FakeExecutor]]:
    """Afterwards everything must have gone back, on both sides. Unless told otherwise, each step ends before the next
    is planned: then it is known which request is in which."""
    executor = FakeExecutor(num_blocks)
    config = SchedulerConfig(**({"max_steps_in_flight": 1} | scheduler))
    core = EngineCore(EngineConfig("fake", cache=CacheConfig(), scheduler=config), executor)
    yield core, executor
    run(core)
    assert not core.has_work()
    core.scheduler.check()
    kv_cache = core.scheduler.kv_cache
    assert kv_cache.num_free_blocks == kv_cache.num_usable_blocks == num_blocks - 1
    assert executor.rows == {}
    assert core.stats().kv_usage == 0


def request(
    name: str, length: int = 6, max_tokens: int | None = 3, first: int = 100, **params: object
) -> EngineCoreRequest:
    """Its prompt starts with `first`: requests share a prefix exactly when they share that."""
    prompt = list(range(first, first + length))
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, all_stop_token_ids=[], **params)  # type: ignore[arg-type]
    return EngineCoreRequest(name, prompt, sampling)


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    """Step until there is nothing to do; outputs by request."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(500):
        if not core.has_work():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        core.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: list[EngineCoreOutput], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.new_token_ids]


def ends_of(outputs: list[EngineCoreOutput]) -> list[tuple[int, FinishReason]]:
    return [(output.choice, output.finish_reason) for output in outputs if output.finish_reason is not None]


def fail_once(when: Callable[[SchedulerOutput], bool] = lambda plan: True) -> Callable[[SchedulerOutput], None]:
    done: list[bool] = []

    def raise_once(plan: SchedulerOutput) -> None:
        if not done and plan.num_scheduled_tokens and when(plan):
            done.append(True)
            raise RuntimeError("device lost")

    return raise_once


# ---- the loop ----


def test_requests_run_to_their_ends_and_every_step_says_how_it_stands() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", 6, max_tokens=3))
        core.add_request(request("b", 9, max_tokens=1, first=500))
        assert core.has_work()
        first = core.step()
        assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in first.outputs] == [
            ("a", [6], None), ("b", [9], FinishReason.LENGTH),
        ]  # fmt: skip
        stats = first.scheduler_stats
        assert stats is not None
        assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_scheduled_tokens) == (1, 0, 1, 15)
        assert stats.kv_usage == pytest.approx(2 / 32)
        assert (stats.prefix_cache.queries, stats.prefix_cache.hits) == (15, 0)
        second = core.step()
        assert second.scheduler_stats is not None and second.scheduler_stats.num_scheduled_tokens == 1
        assert [o.new_token_ids for o in second.outputs] == [[7]]
        assert executor.plans[1].finished_req_ids == ["b"]
        assert tokens_of(run(core)["a"]) == [8]


def test_a_step_without_work_does_not_bother_the_executor() -> None:
    with make_core() as (core, executor):
        assert not core.has_work()
        assert core.step().outputs == []
        assert executor.plans == []


def test_the_executor_hears_of_the_last_rows_before_the_engine_rests() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", max_tokens=1))
        core.step()
        assert executor.rows and core.has_work()
        assert core.step().outputs == []
        assert not executor.rows and not core.has_work()


def test_prefix_hits_are_counted_and_reported_with_the_request() -> None:
    with make_core() as (core, _):
        core.add_request(request("a", 10))
        run(core)
        core.add_request(request("b", 10))
        outputs = run(core)["b"]
        assert outputs[0].num_cached_tokens == 8
        assert (core.stats().prefix_cache.queries, core.stats().prefix_cache.hits) == (20, 8)
        assert core.reset_prefix_cache()
        core.add_request(request("c", 10))
        assert run(core)["c"][0].num_cached_tokens == 0


def test_the_prefix_cache_is_not_reset_under_a_request() -> None:
    with make_core() as (core, _):
        core.add_request(request("a", 10))
        core.step()
        assert not core.reset_prefix_cache()


def test_more_than_memory_holds_is_preempted_and_ends_all_the_same() -> None:
    with make_core(num_blocks=8) as (core, _):
        for index in range(4):
            core.add_request(request(str(index), 7, max_tokens=12, first=100 * index))
        outputs = run(core)
        assert core.stats().num_preemptions > 0
        for index in range(4):
            assert tokens_of(outputs[str(index)]) == list(range(7, 19))


def test_shutdown_reaches_the_executor() -> None:
    with make_core() as (core, executor):
        core.shutdown()
        assert executor.closed


# ---- steps that fail ----


def fail_with(name: str) -> Callable[[SchedulerOutput], None]:
    """Every step with this request in it fails."""

    def raise_always(plan: SchedulerOutput) -> None:
        if any(branch_id.split("#")[0] == name for branch_id in plan.num_scheduled_tokens):
            raise RuntimeError("device lost")

    return raise_always


@pytest.mark.parametrize("phase", ["before_forward", "before_sampling"])
def test_an_exception_fails_the_request_that_it_belongs_to_and_no_other(phase: str) -> None:
    with make_core(max_num_seqs=3) as (core, executor):
        for name, first in (("a", 100), ("bad", 200), ("b", 300), ("waits", 400)):
            core.add_request(request(name, first=first, n=2 if name == "b" else 1))
        setattr(executor, phase, fail_with("bad"))
        core.add_request(request("later", first=500))
        outputs = run(core)
        assert [(o.finish_reason, o.error) for o in outputs.pop("bad")] == [
            (FinishReason.ERROR, "RuntimeError: device lost")
        ]
        assert set(outputs) == {"a", "b", "waits", "later"}
        for name, given in outputs.items():
            assert tokens_of(given) == [6, 7, 8], name
            assert all(output.error is None for output in given)
        assert tokens_of(outputs["b"], choice=1) == [6, 7, 8]


@pytest.mark.parametrize("phase", ["before_forward", "before_sampling"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_step_that_fails_for_no_ones_fault_costs_time_and_nothing_else(phase: str, num_steps: int) -> None:
    with make_core(max_num_seqs=3) as (core, executor):
        before: dict[str, list[EngineCoreOutput]] = {"a": [], "b": []}
        core.add_request(request("a", max_tokens=6, n=2))
        core.add_request(request("b", 9, max_tokens=6, first=500))
        for _ in range(num_steps):
            for output in core.step().outputs:
                before[output.request_id].append(output)
        setattr(executor, phase, fail_once())
        outputs = run(core)
        assert tokens_of(before["a"] + outputs["a"]) == tokens_of(before["a"] + outputs["a"], 1) == [*range(6, 12)]
        assert tokens_of(before["b"] + outputs["b"]) == [*range(9, 15)]


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_are_too_many_for_the_devices_memory_are_answered_one_by_one(depth: int) -> None:
    """Together they run out of it in every step; alone they do not."""
    with make_core(max_steps_in_flight=depth) as (core, executor):

        def run_out(plan: SchedulerOutput) -> None:
            if len(plan.num_scheduled_tokens) > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        executor.before_forward = run_out
        for name, first in (("a", 100), ("b", 200), ("c", 300)):
            core.add_request(request(name, first=first))
        outputs = run(core)
        assert set(outputs) == {"a", "b", "c"}
        assert all(tokens_of(given) == [6, 7, 8] for given in outputs.values())


def test_on_trial_others_give_way_where_memory_is_short() -> None:
    with make_core(num_blocks=12) as (core, executor):
        core.add_request(request("old", 20, max_tokens=10))
        core.step()
        core.add_request(request("bad", 9, first=300))
        core.add_request(request("big", 30, max_tokens=10, first=400))
        executor.before_forward = fail_with("bad")
        outputs = run(core)
        assert ends_of(outputs["bad"]) == [(0, FinishReason.ERROR)]
        assert len(tokens_of(outputs["old"])) == 9 and len(tokens_of(outputs["big"])) == 10


def test_a_request_on_trial_can_be_aborted() -> None:
    with make_core() as (core, executor):
        for name, first in (("a", 100), ("b", 200), ("c", 300)):
            core.add_request(request(name, first=first))
        executor.before_forward = fail_once()
        assert core.step().outputs == []
        core.abort_requests(["a", "c"])
        outputs = run(core)
        assert ends_of(outputs["a"]) == ends_of(outputs["c"]) == [(0, FinishReason.ABORT)]
        assert tokens_of(outputs["b"]) == [6, 7, 8]


@given(
    bad=st.sets(st.integers(0, 7), max_size=3),
    flaky=st.lists(st.booleans(), max_size=30),
    choices=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    num_blocks=st.integers(12, 40),
    policy=st.sampled_from(SchedulingPolicy),
)
def test_whatever_fails_the_right_ones_fail(
    bad: set[int], flaky: list[bool], choices: list[int], num_blocks: int, policy: SchedulingPolicy
) -> None:
    """Steps with a bad request in them always fail, others now and then, when they hold several requests."""
    with make_core(num_blocks, max_num_batched_tokens=16, max_num_seqs=5, policy=policy) as (core, executor):
        dice = iter(flaky)

        def maybe_raise(plan: SchedulerOutput) -> None:
            inside = {int(branch_id.split("#")[0]) for branch_id in plan.num_scheduled_tokens}
            if inside & bad or (len(inside) > 1 and next(dice, False)):
                raise RuntimeError("no")

        executor.before_sampling = maybe_raise
        for index, n in enumerate(choices):
            core.add_request(request(str(index), 3 + 4 * index, max_tokens=4, first=100 * index, n=n))
        outputs = run(core)
        for index, n in enumerate(choices):
            for choice in range(n):
                ends = [end for number, end in ends_of(outputs[str(index)]) if number == choice]
                assert ends == [FinishReason.ERROR if index in bad else FinishReason.LENGTH]
                length = 3 + 4 * index
                expected = [] if index in bad else [*range(length, length + 4)]
                assert tokens_of(outputs[str(index)], choice) == expected


def test_an_exception_before_the_fork_ends_every_choice() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", n=3))
        executor.before_forward = fail_once()
        assert ends_of(core.step().outputs) == [(choice, FinishReason.ERROR) for choice in range(3)]


def test_an_exception_after_the_fork_ends_the_choices_that_were_left() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", max_tokens=5, n=3))
        core.step()
        core.abort_requests(["a#1"])
        executor.before_sampling = fail_once()
        outputs = core.step().outputs
        assert ends_of(outputs) == [(1, FinishReason.ABORT), (0, FinishReason.ERROR), (2, FinishReason.ERROR)]


def test_a_request_that_is_not_in_the_failing_step_is_not_touched() -> None:
    """A long prompt takes the whole budget of the step that fails; the other waits behind it."""
    with make_core(max_num_batched_tokens=8) as (core, executor):
        core.add_request(request("long", 20))
        core.add_request(request("other", 5, first=500))
        executor.before_forward = fail_once(lambda plan: len(executor.plans) == 2)
        outputs = run(core)
        assert ends_of(outputs["long"]) == [(0, FinishReason.ERROR)]
        assert tokens_of(outputs["other"]) == [5, 6, 7]


def test_rows_of_the_ended_are_dropped_although_the_step_that_should_have_told_so_never_began() -> None:
    with make_core() as (core, executor):
        core.add_request(request("short", max_tokens=1))
        core.add_request(request("long", max_tokens=3))
        core.step()
        executor.before_everything = fail_once(lambda plan: plan.finished_req_ids == ["short"])
        run(core)
        assert executor.rows == {}


def test_what_a_failed_step_left_in_its_blocks_is_never_found_again() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", 10))
        executor.before_forward = fail_once()
        run(core)
        core.add_request(request("b", 10))
        assert run(core)["b"][0].num_cached_tokens == 0


def test_steps_that_fail_again_and_again_leave_nothing_behind() -> None:
    with make_core(num_blocks=12, max_num_seqs=3) as (core, executor):
        failures = [0]

        def fail_every_third(plan: SchedulerOutput) -> None:
            failures[0] += 1
            if failures[0] % 3 == 0:
                raise ValueError("again")

        executor.before_sampling = fail_every_third
        for index in range(10):
            core.add_request(request(str(index), 5, max_tokens=2, first=50 * index, n=1 + index % 2))
        outputs = run(core)
        assert len(outputs) == 10
        assert sum(len(ends_of(request_outputs)) for request_outputs in outputs.values()) == 15


def test_an_error_that_the_runner_reports_for_one_branch_fails_that_request_alone() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a"))
        core.add_request(request("bad", first=500))

        def nan(result: ModelRunnerOutput) -> None:
            if "bad" in result.req_ids:
                place = result.req_ids.index("bad")
                del result.req_ids[place], result.sampled_token_ids[place]
                result.errors["bad"] = "NaN logits"

        executor.change_result = nan
        outputs = run(core)
        assert [(o.finish_reason, o.error) for o in outputs["bad"]] == [(FinishReason.ERROR, "NaN logits")]
        assert tokens_of(outputs["a"]) == [6, 7, 8]


def test_a_branch_that_the_runner_forgot_is_failed_and_does_not_wait_forever() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a"))
        core.add_request(request("b", first=500))

        def forget(result: ModelRunnerOutput) -> None:
            if result.req_ids and len(executor.plans) == 2:
                del result.req_ids[0], result.sampled_token_ids[0]

        executor.change_result = forget
        outputs = run(core)
        assert "no token" in (outputs["a"][-1].error or "")
        assert tokens_of(outputs["b"]) == [6, 7, 8]


# ---- aborts ----


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_request_says_so_once_and_the_others_go_on(num_steps: int) -> None:
    with make_core(max_num_batched_tokens=8) as (core, _):
        core.add_request(request("gone", 12, max_tokens=9))  # its prompt takes two steps
        core.add_request(request("stays", 5, first=500))
        before = {"gone": [], "stays": []}
        for _ in range(num_steps):
            for output in core.step().outputs:
                before[output.request_id] += output.new_token_ids
        core.abort_requests(["gone", "unknown", "gone"])
        core.scheduler.check()
        outputs = run(core)
        assert ends_of(outputs["gone"]) == [(0, FinishReason.ABORT)] and tokens_of(outputs["gone"]) == []
        assert before["stays"] + tokens_of(outputs["stays"]) == [5, 6, 7]


def test_an_abort_is_reported_even_when_nothing_else_is_to_be_done() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a"))
        core.abort_requests(["a"])
        assert core.has_work()
        assert ends_of(core.step().outputs) == [(0, FinishReason.ABORT)]
        assert executor.plans == []  # it never ran
        core.abort_requests(["a"])
        assert not core.has_work()


def test_one_choice_of_several_can_be_aborted_alone() -> None:
    """What the front end does when a stop string ends a choice; choice 0 goes by `id#0`, like the others."""
    with make_core() as (core, _):
        core.add_request(request("a", max_tokens=6, n=3))
        core.step()
        core.abort_requests(["a#0"])
        second = core.step().outputs
        assert ends_of(second) == [(0, FinishReason.ABORT)]
        assert sorted(output.choice for output in second if output.new_token_ids) == [1, 2]
        core.abort_requests(["a#2", "a#2", "a#7", "a#x", "b#1"])
        outputs = run(core)["a"]
        assert ends_of(outputs) == [(2, FinishReason.ABORT), (1, FinishReason.LENGTH)]
        assert tokens_of(outputs, choice=1) == [8, 9, 10, 11]


def test_when_its_last_choice_is_aborted_a_request_is_gone() -> None:
    with make_core() as (core, _):
        core.add_request(request("a", max_tokens=6, n=2))
        core.step()
        core.abort_requests(["a#0", "a#1"])
        assert ends_of(core.step().outputs) == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
        core.add_request(request("a", n=2))  # the id is free again
        assert len(ends_of(run(core)["a"])) == 2


# ---- requests that are refused ----


@pytest.mark.parametrize(
    ("bad", "field", "numbers"),
    [
        (request("bad", 0), "prompt", ["empty"]),
        (request("bad", MAX_MODEL_LEN), "prompt", ["64", "63"]),
        (request("bad", 10, max_tokens=40), "max_tokens", ["13 blocks", "10 of prompt", "40 to generate", "8", "22"]),
        (request("bad", 10, max_tokens=None), "max_tokens", ["16 blocks", "54 to generate", "8", "22"]),
        (request("bad", 40, max_tokens=1), "prompt", ["11 blocks", "8", "31"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_the_numbers(
    bad: EngineCoreRequest, field: str, numbers: list[str]
) -> None:
    with make_core(num_blocks=9) as (core, _):
        core.add_request(request("good"))
        core.step()
        with pytest.raises(RequestError) as caught:
            core.add_request(bad)
        assert caught.value.field == field
        assert all(number in str(caught.value) for number in numbers), str(caught.value)
        outputs = run(core)
        assert set(outputs) == {"good"}
        core.add_request(request("bad", 10, max_tokens=22))  # exactly what fits, and the id was not kept
        assert len(tokens_of(run(core)["bad"])) == 22


def test_an_id_that_is_in_use_is_refused_and_the_first_request_keeps_it() -> None:
    with make_core() as (core, _):
        core.add_request(request("a", n=2))
        for name in ("a", "a#1"):
            with pytest.raises(RequestError) as caught:
                core.add_request(request(name))
            assert caught.value.field == "request_id"
        assert len(ends_of(run(core)["a"])) == 2


def test_a_third_step_is_in_flight_only_while_steps_are_short() -> None:
    depth = StepDepth(2, may_grow=True)
    now = 0.0

    def results(seconds: float, count: int, is_last: bool = False) -> int:
        nonlocal now
        for _ in range(count):
            now += seconds
            depth.note_result(now, is_last)
        return depth.steps

    assert results(0.001, 1) == 2 and results(0.001, 1) == 3  # the first has none before it
    assert results(0.1, 1) == 2, "a long prompt"
    assert results(0.001, 60) == 3
    assert results(0.004, 60) == 2
    assert results(0.001, 60) == 3
    results(0.001, 1, is_last=True)
    assert results(100.0, 1) == 3, "a time without work is no step"
    fixed = StepDepth(2, may_grow=False)
    for number in range(5):
        fixed.note_result(0.001 * number, is_last=False)
    assert fixed.steps == 2
