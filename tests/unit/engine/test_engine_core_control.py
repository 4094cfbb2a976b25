"""Aborts while a step runs, from this thread and from others, and pauses of an engine in this process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequestType, Extraction, FinishReason
from ratoon.core.wire import encode
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.processes.client import InprocClient
from ratoon.engine.processes.core_process import EngineCoreProcess
from ratoon.engine.utilities import EngineUtilities
from tests.unit.engine.fakes import model_config
from tests.unit.engine.test_engine_core import ends_of, fail_once, make_core, request, run, tokens_of

LONG_ENOUGH = 120.0  # seconds until a test gives up waiting for another thread


def in_another_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG_ENOUGH)
    assert not thread.is_alive()


# ---- aborts ----


@pytest.mark.parametrize("phase", ["before_forward", "before_sampling"])
def test_an_abort_during_a_step_takes_effect_before_its_outputs_go_out(phase: str) -> None:
    with make_core() as (core, executor):
        core.add_request(request("a"))
        core.add_request(request("b", first=500))
        setattr(executor, phase, lambda plan: in_another_thread(lambda: core.abort_requests(["a"])))
        outputs = core.step().outputs
        assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs] == [
            ("a", [], FinishReason.ABORT), ("b", [6], None),
        ]  # fmt: skip
        setattr(executor, phase, lambda plan: None)
        assert "a" not in run(core)


def test_one_choice_is_aborted_during_a_step_and_the_others_go_on() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", n=2))
        core.step()
        executor.before_sampling = lambda plan: core.note_abort(["a#1"])
        outputs = core.step().outputs
        assert tokens_of(outputs) == [7] and tokens_of(outputs, 1) == []
        assert ends_of(outputs) == [(1, FinishReason.ABORT)]


def test_a_request_that_a_stop_string_ended_during_a_step_keeps_its_lease() -> None:
    with make_core() as (core, executor):
        asked = request("a")
        asked.retain_kv = 60.0
        core.add_request(asked)
        executor.before_sampling = lambda plan: core.note_abort({"a": None})
        assert ends_of(core.step().outputs) == [(0, FinishReason.ABORT)]
        assert core.stats().leases.num_active == 1
        core.end_leases(["a"])


def test_an_abort_during_a_step_that_fails_leaves_nothing_spoilt_in_the_cache() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a", 10))
        core.add_request(request("b", first=500))
        executor.before_sampling = fail_once()
        executor.before_forward = lambda plan: core.note_abort(["a"])
        assert ends_of(core.step().outputs) == [(0, FinishReason.ABORT)]
        executor.before_forward = lambda plan: None
        core.add_request(request("again", 10))
        assert run(core)["again"][0].num_cached_tokens == 0


def test_aborts_from_many_threads_are_all_carried_out() -> None:
    with make_core(num_blocks=200, max_num_seqs=64) as (core, _):
        for index in range(40):
            core.add_request(request(str(index), max_tokens=None, first=100 * index))
        threads = [threading.Thread(target=core.abort_requests, args=([str(index)],)) for index in range(40)]
        ended = []
        for thread in threads:
            thread.start()
            ended += [output.request_id for output in core.step().outputs if output.finished]
        for thread in threads:
            thread.join()
        ended += [output.request_id for output in core.step().outputs if output.finished]
        assert sorted(ended, key=int) == [str(index) for index in range(40)]
        assert not core.scheduler.has_unfinished_requests()


def test_an_engine_process_tells_the_step_under_way_of_an_abort() -> None:
    """Messages as its input thread takes them, while its loop is inside a step."""
    with make_core() as (core, executor):
        process = EngineCoreProcess(SimpleNamespace(index=0))  # type: ignore[arg-type]
        process._core = core
        messages = [
            (EngineCoreRequestType.ABORT, ["a"]),
            (EngineCoreRequestType.STOP, {"b": 3}),
            (EngineCoreRequestType.OUTPUTS_TAKEN, 1),
        ]

        class Closed(Exception):
            pass

        class Socket:
            def recv_multipart(self) -> list[bytes]:
                if not messages:
                    raise Closed
                kind, message = messages.pop(0)
                return [kind.value, *encode(message)]

            setsockopt = connect = send = lambda self, *args: None

        def input_thread(plan: SchedulerOutput) -> None:
            if messages:
                with pytest.raises(Closed):
                    process._read_messages()

        process._context = SimpleNamespace(socket=lambda kind: Socket())  # type: ignore[assignment]
        launch = SimpleNamespace(index=0, identity=b"", input_address="", secret=b"", keys=None)
        process._launch = launch  # type: ignore[assignment]
        core.add_request(request("a"))
        core.add_request(request("b", first=500))
        executor.before_sampling = input_thread
        outputs = core.step().outputs
        assert all(output.new_token_ids == [] and output.finish_reason == FinishReason.ABORT for output in outputs)
        assert {output.request_id for output in outputs} == {"a", "b"}
        assert process._take_messages(core, EngineUtilities(core))  # they come again, and nothing is left to end


# ---- times ----


def test_a_step_says_when_it_was_done_and_what_became_of_its_requests_when() -> None:
    with make_core() as (core, _):
        now = 10.0
        core._clock = lambda: now
        core.add_request(request("a"))
        now = 11.0

        def later(plan: SchedulerOutput) -> None:
            nonlocal now
            now = 11.5

        core.executor.before_sampling = later  # type: ignore[attr-defined]
        outputs = core.step()
        assert outputs.timestamp == 11.5
        (output,) = outputs.outputs
        assert [(event.type.name, event.timestamp) for event in output.events or []] == [
            ("QUEUED", 10.0), ("SCHEDULED", 11.0),
        ]  # fmt: skip


def test_a_deadline_counts_from_the_arrival_and_not_from_the_last_step() -> None:
    with make_core() as (core, _):
        now = 10.0
        core._clock = lambda: now
        core.step()
        now = 100.0  # the engine had nothing to do meanwhile
        asked = request("a")
        asked.params = Extraction([5], [1], deadline=5.0)
        core.add_request(asked)
        assert core.seconds_to_expiry() == 5.0
        core.abort_requests(["a"])


# ---- pauses ----


def test_a_paused_core_plans_nothing_and_still_tells_of_aborts() -> None:
    with make_core() as (core, executor):
        core.add_request(request("a"))
        core.add_request(request("b", first=500))
        core.step()
        core.pause()
        assert core.paused and core.has_work() and not core.can_step
        assert core.step().outputs == [] and len(executor.plans) == 1
        core.abort_requests(["a"])
        assert core.can_step
        assert ends_of(core.step().outputs) == [(0, FinishReason.ABORT)]
        assert len(executor.plans) == 1
        core.resume()
        assert tokens_of(run(core)["b"]) == [7, 8]


def test_a_pause_does_not_keep_an_engine_from_falling_asleep() -> None:
    with make_core() as (core, executor):
        executor.sleep = lambda level: None  # type: ignore[attr-defined]
        executor.wake_up = lambda: None  # type: ignore[attr-defined]
        core.add_request(request("a", max_tokens=1))
        core.step()
        core.pause()
        core.sleep()
        assert core.asleep and executor.rows == {}
        core.wake_up()
        core.resume()


def test_an_engine_that_ends_tells_of_ended_requests_although_a_step_is_in_flight() -> None:
    """Or their last blocks would not get to the files that outlive it."""
    with make_core(max_steps_in_flight=2) as (core, executor):
        executor.close = lambda: None  # type: ignore[attr-defined]
        core._index = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        core.add_request(request("a", max_tokens=1))
        core.add_request(request("b", max_tokens=2, first=500))
        outputs = core.step().outputs
        while not any(output.finish_reason for output in outputs if output.request_id == "b"):
            outputs = core.step().outputs
        core._fill_queue()
        assert core._in_flight
        core.shutdown()
        assert not core._in_flight and executor.rows == {}


def test_a_call_on_an_engine_in_this_process_waits_until_another_thread_resumes_it() -> None:
    with make_core() as (core, executor):
        client = object.__new__(InprocClient)  # without a model
        client.core, client._utilities = core, EngineUtilities(core)
        engine = make_engine(client)
        client.call_utility("pause")
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2, detokenize=False))
        began = time.monotonic()
        assert engine.step() == [] and executor.plans == []
        assert time.monotonic() - began > 0.01  # it did not spin
        threading.Timer(0.1, client.call_utility, ["resume"]).start()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == [3, 4]


def test_a_request_is_aborted_from_another_thread_while_its_step_runs() -> None:
    with make_core() as (core, executor):
        client = object.__new__(InprocClient)
        client.core = core
        engine = make_engine(client)
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9, detokenize=False))
        engine.add_request("b", [4, 5, 6], SamplingParams(max_tokens=1, detokenize=False))
        ends: list[Any] = []
        executor.before_sampling = lambda plan: in_another_thread(lambda: ends.extend(engine.abort_request(["a"])))
        (output,) = engine.step()
        assert output.request_id == "b" and output.finished
        assert [(end.request_id, end.outputs[0].finish_reason) for end in ends] == [("a", "abort")]
        assert not engine.has_unfinished_requests()


def make_engine(client: Any) -> LLMEngine:
    from ratoon.engine.input.input_processor import InputProcessor
    from ratoon.engine.output.output_processor import OutputProcessor

    return LLMEngine(client, InputProcessor(model_config(), None), OutputProcessor(None))
