"""Requests are divided into messages to an engine, and an error of one leaves the others alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import SamplingParams
from ratoon.core.request import AddedTogether, EngineCoreRequest, EngineCoreRequestType, Extraction
from ratoon.core.wire import Decoder, encode
from ratoon.engine.processes import replica as module
from ratoon.engine.processes.core_process import EngineCoreProcess
from ratoon.engine.processes.replica import Replica


def request(name: str, num_tokens: int = 3, params: Any = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1] * num_tokens, params or SamplingParams())


def sent(requests: list[EngineCoreRequest]) -> list[tuple[EngineCoreRequestType, Any]]:
    found: list[tuple[EngineCoreRequestType, Any]] = []
    replica = Replica(None, 0, 1, None, None)  # type: ignore[arg-type]
    replica._process = SimpleNamespace(send=lambda *message: found.append(message))  # type: ignore[assignment]
    replica.send_requests(requests)
    return found


def test_several_requests_are_one_message_and_a_single_one_has_its_own_kind():
    reading = request("x", params=Extraction([0, 2], [1]))
    ((kind, message),) = sent([request("a"), reading, request("b")])
    assert kind == EngineCoreRequestType.ADD_TOGETHER
    decoded = Decoder(AddedTogether).decode([bytes(frame) for frame in encode(message)])
    assert [one.request_id for one in decoded.requests] == ["a", "x", "b"]
    assert sent([request("a")])[0][0] == EngineCoreRequestType.ADD
    assert sent([reading]) == [(EngineCoreRequestType.HIDDEN_STATES_EXTRACT, reading)]
    assert sent([]) == []


def test_a_message_has_no_more_tokens_than_an_engine_decodes_in_a_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_TOKENS_TOGETHER", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2, "f": 8}
    messages = [message for _, message in sent([request(name, size) for name, size in sizes.items()])]
    names = [[one.request_id for one in getattr(message, "requests", None) or [message]] for message in messages]
    assert names == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_of_requests_that_came_together_one_may_be_refused():
    process = EngineCoreProcess(SimpleNamespace(index=0))  # type: ignore[arg-type]
    outputs: list[Any] = []
    process._send_outputs = outputs.append  # type: ignore[method-assign]
    added: list[str] = []

    def add(one: EngineCoreRequest) -> None:
        if one.request_id == "b":
            raise RequestError("prompt", "is too long", "a shorter one")
        added.append(one.request_id)

    core: Any = SimpleNamespace(add_request=add)
    process._carry_out(AddedTogether([request("a"), request("b"), request("c")]), core, None)  # type: ignore[arg-type]
    assert added == ["a", "c"]
    ((refused,),) = [step.outputs for step in outputs]
    assert refused.request_id == "b" and "prompt" in refused.error
