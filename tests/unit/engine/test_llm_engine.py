"""The step loop between a caller and an engine core."""

from __future__ import annotations

import pytest

from ratoon.core.errors import EngineError, RequestError
from ratoon.core.params import SamplingParams
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output.output_processor import OutputProcessor
from tests.unit.engine.fakes import FakeClient, byte_tokenizer, model_config

TOKENIZER = byte_tokenizer()


def make(client: FakeClient) -> LLMEngine:
    return LLMEngine(client, InputProcessor(model_config(), TOKENIZER), OutputProcessor(TOKENIZER))


def run_to_end(engine: LLMEngine) -> dict:
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return last


def test_requests_run_together_to_their_ends():
    engine = make(FakeClient())
    engine.add_request("one", "abc", SamplingParams())
    engine.add_request("two", "xy", SamplingParams())
    outputs = run_to_end(engine)
    assert {name: output.outputs[0].text for name, output in outputs.items()} == {"one": "cba", "two": "yx"}
    assert engine.step() == []


def test_a_stop_string_ends_its_choice_in_the_engine():
    client = FakeClient(lambda request, choice: list(b"a.bcdefgh" if choice else b"abcdefg."))
    engine = make(client)
    engine.add_request("one", "p", SamplingParams(n=2, stop=["."], max_tokens=20))
    output = run_to_end(engine)["one"]
    assert [choice.text for choice in output.outputs] == ["abcdefg", "a"]
    internal = client.added[0].request_id
    assert client.stopped == [f"{internal}#1", internal] and client.aborted == []


def test_a_request_that_the_engine_refuses_leaves_nothing_behind():
    client = FakeClient()
    client.refuse = lambda request: RequestError("prompt", "needs 9 blocks of 4")
    engine = make(client)
    with pytest.raises(RequestError):
        engine.add_request("one", "abc", SamplingParams())
    assert not engine.has_unfinished_requests()


def test_an_aborted_request_is_gone_on_both_sides():
    client = FakeClient()
    engine = make(client)
    engine.add_request("one", "abcdef", SamplingParams())
    engine.step()
    (output,) = engine.abort_request(["one"])
    assert output.outputs[0].finish_reason == "abort"
    assert client.aborted == [client.added[0].request_id]
    assert not engine.has_unfinished_requests() and not client.has_work()


def test_an_engine_that_loses_a_request_is_an_error_and_not_a_wait():
    client = FakeClient()
    engine = make(client)
    engine.add_request("one", "abc", SamplingParams())
    client._left.clear()
    with pytest.raises(EngineError):
        engine.step()


def test_a_refusal_from_another_process_comes_as_an_output():
    client = FakeClient()
    client.refuse = lambda request: RequestError("prompt", "needs 9 blocks of 4")
    client.refuses_by_output = True
    engine = make(client)
    engine.add_request("one", "abc", SamplingParams())
    (output,) = engine.step()
    assert isinstance(output.refusal, RequestError) and output.refusal.field == "prompt"
    assert output.outputs[0].finish_reason == "error"
    assert not engine.has_unfinished_requests()


def test_the_engine_gets_a_moment_after_each_call_but_the_first():
    client = FakeClient()
    engine = make(client)
    for number in range(3):
        outputs = engine.run([engine.prepare(str(number), "abc", SamplingParams())])
        moments = [client.num_moments for _ in outputs]
        assert moments and client.num_moments == number, "nothing before the first token"
        assert set(moments) == {max(0, number - 1)}, "and nothing before the last one of a stream"
    closed = engine.run([engine.prepare("closed", "abc", SamplingParams())])
    next(closed)
    closed.close()
    assert client.num_moments == 2


def test_requests_of_one_call_are_handed_over_together_and_one_that_is_refused_leaves_the_others():
    client = FakeClient()
    client.refuse = lambda request: RequestError("prompt", "no") if request.prompt_token_ids == [120] else None
    engine = make(client)
    asked = [engine.prepare(name, name, SamplingParams()) for name in ("ab", "x", "cd")]
    texts = {output.request_id: output.outputs[0].text for output in engine.run(asked) if output.outputs}
    assert client.groups == [2]
    assert texts["ab"] == "ba" and texts["cd"] == "dc"
