"""A request waits for its grammar outside the queues: others run meanwhile, and it may end before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.core.structured import StructuredOutput
from ratoon.engine.core import EngineCore
from ratoon.engine.input.prepared_requests import MAX_SECONDS
from tests.unit.engine.test_engine_core import ends_of, make_core, request, run, tokens_of

ASKED = StructuredOutput(regex="a")


class Desk:
    """A core whose grammars are done when a test says so."""

    def __init__(self, core: EngineCore, executor: Any) -> None:
        self.core = core
        self.grammar: Future[Any] = Future()
        self.now = 0.0
        executor.prepare_grammar = lambda asked, owner: self.grammar
        core._clock = lambda: self.now

    def step(self) -> list[EngineCoreOutput]:
        return self.core.step().outputs


@pytest.fixture
def desk() -> Iterator[Desk]:
    with make_core() as (core, executor):
        yield Desk(core, executor)


def structured(name: str, **params: Any) -> EngineCoreRequest:
    return request(name, structured_output=ASKED, **params)


def test_others_run_while_a_grammar_is_compiled(desk: Desk) -> None:
    desk.core.add_request(structured("slow"))
    desk.core.add_request(request("fast"))
    outputs = [desk.step() for _ in range(4)]  # the last drops its row
    assert [output.request_id for step in outputs for output in step] == ["fast"] * 3
    assert desk.core.has_work() and not desk.core.can_step and desk.core.stats().num_waiting == 1
    desk.grammar.set_result(None)
    assert desk.core.can_step
    assert len(tokens_of(run(desk.core)["slow"])) == 3


def test_a_grammar_that_is_there_delays_nothing(desk: Desk) -> None:
    desk.grammar.set_result(None)
    desk.core.add_request(structured("r"))
    assert len(desk.core.preparing) == 0
    assert len(tokens_of(run(desk.core)["r"])) == 3


def test_a_caller_in_this_process_waits_without_spinning(desk: Desk) -> None:
    desk.core.add_request(structured("r"))
    assert desk.step() == [] and desk.core.has_work()
    desk.grammar.set_result(None)
    run(desk.core)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_it_can_be_aborted_while_it_waits(desk: Desk, num_choices: int) -> None:
    desk.core.add_request(structured("r", n=num_choices))
    desk.core.abort_requests(["r"])
    assert ends_of(desk.step()) == [(choice, FinishReason.ABORT) for choice in range(num_choices)]
    assert desk.grammar.cancelled(), "no request waits for it any longer"
    assert not desk.core.has_work()


def test_what_is_wrong_with_a_grammar_ends_its_request_alone(desk: Desk) -> None:
    desk.core.add_request(structured("bad", n=2))
    desk.core.add_request(request("good"))
    desk.grammar.set_exception(RequestError("structured_output.regex", "is too large", "a smaller one"))
    outputs = run(desk.core)
    assert ends_of(outputs["bad"]) == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    refusal = outputs["bad"][0].refusal
    assert refusal is not None and (refusal.kind, refusal.subject) == ("RequestError", "structured_output.regex")
    assert len(tokens_of(outputs["good"])) == 3


def test_an_error_of_the_library_is_told(desk: Desk) -> None:
    desk.core.add_request(structured("r"))
    desk.grammar.set_exception(ValueError("out of luck"))
    (output,) = run(desk.core)["r"]
    assert output.error == "structured_output: can't be used: out of luck; leave it out"


def test_one_that_takes_too_long_is_given_up(desk: Desk) -> None:
    desk.core.add_request(structured("r"))
    assert desk.core.seconds_to_expiry() == MAX_SECONDS
    desk.now = MAX_SECONDS + 1
    (output,) = run(desk.core)["r"]
    assert output.error is not None and "could not be compiled in" in output.error
    assert desk.grammar.cancelled(), "the work is given up, too"


def test_a_request_that_can_t_be_served_fails_when_its_grammar_is_there(desk: Desk) -> None:
    desk.core.add_request(structured("r", length=5000))
    desk.grammar.set_result(None)
    (output,) = run(desk.core)["r"]
    assert output.finish_reason == FinishReason.ERROR and output.refusal is not None


def test_an_engine_with_a_waiting_request_does_not_sleep(desk: Desk) -> None:
    desk.core.add_request(structured("r"))
    with pytest.raises(RequestError, match="requests are under way"):
        desk.core.sleep()
    desk.grammar.set_result(None)
