"""`LLM.hidden_states` and `return_hidden_states`, on an engine whose states are its positions and layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.errors import EngineError, QueueFullError, RequestError, TooLargeError, UnknownParentError
from ratoon.core.outputs import HiddenStatesOutput
from ratoon.core.params import HiddenStatesParams, SamplingParams
from ratoon.engine.llm_engine import MAX_EXTRACTIONS
from tests.unit.engine.fakes import FakeClient, hidden_state

LAST = SamplingParams(max_tokens=20)


@pytest.fixture
def llm(client) -> LLM:
    return LLM("fake")


def states_of(llm: LLM, *arguments: Any, **options: Any) -> Any:
    return llm.extract_hidden_states(*arguments, progress=False, **options)


def test_one_source_gives_one_output_and_a_list_gives_a_list(llm):
    one = states_of(llm, "abc")
    assert isinstance(one, HiddenStatesOutput) and one.token_ids == [ord("c")]
    assert torch.equal(one.tensor, torch.tensor([[hidden_state(2, 4)]]))
    assert states_of(llm, [97, 98]).token_ids == [98]
    many = states_of(llm, ["abc", [97, 98], {"prompt": "xy"}], HiddenStatesParams(positions="all"))
    assert [bytes(output.token_ids) for output in many] == [b"abc", b"ab", b"xy"]
    assert [tuple(output.tensor.shape) for output in many] == [(1, 3, 8), (1, 2, 8), (1, 2, 8)]
    assert states_of(llm, []) == []


def test_outputs_and_ids_of_requests_are_read_without_their_prompt_again(llm, client):
    first, second = llm.generate(["abc", "xy"], SamplingParams(max_tokens=20, n=2), progress=False)
    assert bytes(states_of(llm, first, HiddenStatesParams(scope="output", positions=[0])).token_ids) == b"c"
    assert client.added[-1].continuation_of == client.added[0].request_id
    many = states_of(llm, [first, "pq", second], HiddenStatesParams(positions=[-2]), choice=[0, 0, 1])
    assert [bytes(output.token_ids) for output in many] == [b"a", b"p", b"x"]
    assert [output.source for output in many] == ["lease", None, "lease"]
    assert client.added[-1].continuation_of == f"{client.added[1].request_id}#1"
    assert states_of(llm, original_request_id=second.request_id).positions == [4]
    by_id = states_of(llm, original_request_id=[second.request_id, first.request_id])
    assert [output.positions for output in by_id] == [[4], [6]]


def test_a_stream_that_is_open_is_read_as_far_as_it_has_come(llm):
    stream = llm.stream("abc", LAST)
    output = next(stream)
    assert bytes(states_of(llm, output, HiddenStatesParams(positions="all")).token_ids) == b"abcc"
    assert "".join(rest.outputs[0].text for rest in stream) == "ba"


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ([], {}, "prompt"),
        (["abc"], {"original_request_id": "0"}, "prompt"),
        (["abc", HiddenStatesParams(positions=3)], {}, "positions"),
        ([["abc", "a"], HiddenStatesParams(positions=1)], {}, "prompts[1].positions"),
        ([["abc", "a"], [HiddenStatesParams()]], {}, "params"),
        ([["abc", "a"], [HiddenStatesParams(), "all"]], {}, "prompts[1].params"),
        ([], {"original_request_id": ["7"]}, "original_request_id[0]"),
        ([], {"original_request_id": "7"}, "original_request_id"),
        ([["abc"]], {"choice": [0, 1]}, "choice"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(llm, client, arguments, options, field):
    with pytest.raises(RequestError) as refused:
        states_of(llm, *arguments, **options)
    assert refused.value.field == field and client.added == []


def test_errors_keep_their_class_in_a_list(client):
    llm = LLM("fake", max_hidden_states_bytes=100)
    with pytest.raises(TooLargeError) as large:
        states_of(llm, ["a", "abcdefgh"], HiddenStatesParams(positions="all"))
    assert large.value.field == "prompts[1].positions"
    with pytest.raises(UnknownParentError):
        states_of(llm, original_request_id=["7"])
    llm.close()
    with pytest.raises(EngineError, match="is shut down"):
        states_of(llm, "a")


def test_one_that_the_engine_refuses_raises_and_in_a_list_it_has_an_error(llm, client):
    client.refuse = lambda request: (
        QueueFullError("hidden_states", "full") if len(request.prompt_token_ids) == 1 else None
    )
    with pytest.raises(QueueFullError):
        states_of(llm, "a")
    failed, fine = states_of(llm, ["a", "ab"])
    assert failed.tensor is None and isinstance(failed.refusal, QueueFullError) and "full" in failed.error
    assert fine.tensor is not None


def test_a_long_list_never_fills_the_engines_queue(llm, client):
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, len(client._extracted))

    client.on_step = count
    prompts = [[1, number % 250] for number in range(3 * MAX_EXTRACTIONS + 5)]
    outputs = states_of(llm, prompts)
    assert [output.token_ids for output in outputs] == [[prompt[1]] for prompt in prompts]
    assert most == MAX_EXTRACTIONS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_generated_texts_carry_tensors_of_the_type_that_was_asked_for(llm, dtype):
    asked = HiddenStatesParams(positions=[0], layers=[0], dtype=dtype)
    params = SamplingParams(max_tokens=20, n=2, return_hidden_states=asked)
    for output in [*llm.generate(["abc", "xy"], params, progress=False), [*llm.stream("abc", params)][-1]]:
        assert output.finished and [choice.text for choice in output.outputs]
        for states in output.hidden_states:
            assert states.tensor.dtype == getattr(torch, dtype)
            assert torch.equal(states.tensor.float(), torch.tensor([[hidden_state(0, 0)]]))


def test_a_stream_that_is_closed_while_states_are_read_leaves_nothing(llm, client: FakeClient):
    stream = llm.stream("abc", SamplingParams(max_tokens=20, return_hidden_states=HiddenStatesParams(positions="all")))
    next(stream)
    for _ in range(4):  # the text ends, and the first of its states come
        llm.engine.step()
    assert client._extracted
    stream.close()
    assert not llm.engine.has_unfinished_requests() and not client.has_work()
