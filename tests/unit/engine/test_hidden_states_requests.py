"""Requests for hidden states in the front end: how they are made, what they become, and who asks for them when."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from msgspec.structs import replace

from ratoon.core.errors import (
    DeadlineError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnknownParentError,
)
from ratoon.core.faults import fault_of
from ratoon.core.outputs import HiddenStatesOutput, RequestOutput
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.core.readings import reading_of
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.output.output_processor import OutputProcessor, Processed
from ratoon.engine.output.roots import Root
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes import byte_tokenizer, found_text, hidden_rows, hidden_state, model_config

TOKENIZER = byte_tokenizer()
ROOT = Root("r", "r-12345678", [1, 2, 3], [[4, 5], [6, 7, 8]], "salt", None, "me", engine=1, leased_until=float("inf"))
LAST = HiddenStatesParams()


def input_processor(**changes: Any) -> InputProcessor:
    return InputProcessor(model_config(), TOKENIZER, clock=lambda: 7.0, **changes)


# ---- requests ----


def test_an_extraction_of_a_prompt_ends_with_the_last_position_asked_for():
    params = HiddenStatesParams(positions=[3, 1], layers=["norm", 0], dtype="float16", deadline=2.0)
    request, selection = input_processor().process_extraction("x", "abcdef", params, cache_salt="s", owner="me")
    assert bytes(request.prompt_token_ids) == b"abcd", "what lies behind changes nothing before it"
    assert request.external_id == "x" and request.request_id.startswith("x-") and request.arrival_time == 7.0
    assert (request.cache_salt, request.owner, request.continuation_of) == ("s", "me", None)
    assert request.params is selection.extraction
    assert (request.params.positions, request.params.layers) == ([1, 3], [0, 4])
    assert (request.params.dtype, request.params.deadline) == ("float16", 2.0)
    assert (selection.positions, selection.layers) == ([3, 1], ["norm", 0])


def test_an_extraction_of_an_earlier_request_reads_the_choice_that_it_names():
    request, selection = input_processor().process_extraction("x", ROOT, LAST, choice=1)
    assert request.prompt_token_ids == [1, 2, 3, 6, 7, 8] and selection.positions == [5]
    assert (request.continuation_of, request.continuation_token_ids) == ("r-12345678#1", [])
    assert (request.cache_salt, request.owner, request.preferred_rank) == ("salt", "me", 1)
    output, _ = input_processor().process_extraction("x", ROOT, HiddenStatesParams(scope="output", positions="all"))
    assert output.params.positions == [3, 4]


def test_the_prompt_may_fill_the_whole_length():
    request, _ = input_processor(max_model_len=4).process_extraction("x", [1, 2, 3, 4], LAST)
    assert len(request.prompt_token_ids) == 4
    with pytest.raises(RequestError, match="at most 4 fit"):
        input_processor(max_model_len=4).process_extraction("x", [1, 2, 3, 4, 5], LAST)


@pytest.mark.parametrize(
    ("source", "params", "others", "field"),
    [
        ("abc", HiddenStatesParams(positions=3), {}, "positions"),
        ("abc", HiddenStatesParams(scope="output"), {}, "positions"),
        ("abc", HiddenStatesParams(layers=9), {}, "layers"),
        ("abc", {}, {}, "params"),
        ("", LAST, {}, "prompt"),
        ([999], LAST, {}, "prompt_token_ids[0]"),
        (ROOT, LAST, {"choice": 2}, "choice"),
        (ROOT, LAST, {"choice": "1"}, "choice"),
        (ROOT, LAST, {"cache_salt": "mine"}, "cache_salt"),
        ("abc", LAST, {"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_cannot_be_read_is_refused(source: Any, params: Any, others: dict, field: str):
    with pytest.raises(RequestError) as refused:
        input_processor().process_extraction("x", source, params, **others)
    assert refused.value.field == field


def test_a_beam_search_that_runs_has_no_choices_to_read_yet():
    root = Root("r", "r-12345678", [1], [[], []], searching=True)
    with pytest.raises(RequestError) as refused:
        input_processor().process_extraction("x", root, LAST)
    assert refused.value.field == "original_request_id"


# ---- asked for together with a text ----


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (HiddenStatesParams(positions=13), "return_hidden_states.positions"),
        (HiddenStatesParams(positions=["x"]), "return_hidden_states.positions[0]"),
        (HiddenStatesParams(layers=4), "return_hidden_states.layers"),
        (HiddenStatesParams(dtype="int8"), "return_hidden_states.dtype"),
        ("yes", "return_hidden_states"),
    ],
)
def test_what_no_answer_could_have_is_refused_on_arrival(asked: Any, field: str):
    for params in (
        replace(SamplingParams(max_tokens=10), return_hidden_states=asked),
        replace(BeamSearchParams(beam_width=2, max_tokens=10), return_hidden_states=asked),
    ):
        with pytest.raises(RequestError) as refused:
            input_processor().process("r", "abc", params)
        assert refused.value.field == field


def test_the_size_of_all_choices_is_checked_on_arrival():
    asked = HiddenStatesParams(positions="all")
    one = 13 * 8 * 4
    processor = input_processor(max_hidden_states_bytes=2 * one)
    processor.process("r", "abc", SamplingParams(n=2, max_tokens=10, return_hidden_states=asked))
    with pytest.raises(TooLargeError) as refused:
        processor.process("r", "abc", SamplingParams(n=3, max_tokens=10, return_hidden_states=asked))
    assert refused.value.field == "return_hidden_states.positions"


def test_true_asks_for_the_last_token_and_callers_params_stay_as_they_were():
    params = SamplingParams(return_hidden_states=True, max_tokens=4)
    assert (
        params.return_hidden_states == LAST and SamplingParams(return_hidden_states=False).return_hidden_states is None
    )
    mine = SamplingParams(return_hidden_states=HiddenStatesParams(positions=range(2)), max_tokens=4)
    request = input_processor().process("r", "abc", mine)
    states = request.params.return_hidden_states
    assert (states.positions, states.layers, states.layers_passed) == ([0, 1], [3], [4]), "it travels"
    assert mine.return_hidden_states.positions == range(2)


class Generation:
    """A request that asks for hidden states, from its side and from the engine's."""

    def __init__(self, params: SamplingParams | BeamSearchParams, metrics: EngineMetrics | None = None, **others: Any):
        processor = input_processor()
        self.outputs = OutputProcessor(TOKENIZER, lambda: 9.0, metrics, processor.selector)
        self.request = processor.process("r", "abc", params, **others)
        self.outputs.add_request(self.request, "abc")
        self.tokens = [b""] * self.request.num_choices

    def step(self, *outputs: EngineCoreOutput) -> Processed:
        for output in outputs:
            if output.request_id == self.request.request_id:
                self.tokens[output.choice] += bytes(output.new_token_ids)
        return self.outputs.process_outputs([EngineCoreOutputs(list(outputs), engine_index=1)])

    def generate(self, text: str = "xy", choice: int = 0, reason: FinishReason = FinishReason.LENGTH) -> list[Any]:
        return self.step(EngineCoreOutput(self.request.request_id, list(text.encode()), choice, reason)).outputs

    def reading(self, choice: int = 0) -> EngineCoreRequest:
        """What the engine makes of a choice that has ended."""
        reading = reading_of(self.request, choice, list(self.tokens[choice]))
        assert reading is not None
        return reading

    def read(self, choice: int = 0) -> list[Any]:
        return self.step(hidden_rows(self.reading(choice), 0, 100)).outputs


def test_the_states_come_with_the_last_output():
    run = Generation(SamplingParams(return_hidden_states=True, output_kind=RequestOutputKind.DELTA), retain_kv=5.0)
    (first,), _, _ = run.step(EngineCoreOutput(run.request.request_id, [120]))
    assert (first.outputs[0].text, first.finished, first.hidden_states) == ("x", False, None)
    assert run.generate("y") == [], "the last output waits"
    assert run.outputs.is_running("r") and run.outputs.has_unfinished_requests()
    assert bytes(run.reading().prompt_token_ids) == b"abcxy" and run.reading().params.positions == [4]
    (last,) = run.read()
    assert isinstance(last, RequestOutput) and last.finished and last.error is None
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("y", "length")
    (states,) = last.hidden_states
    assert (states.request_id, states.positions, states.layers, states.token_ids) == ("r", [4], [3], [ord("y")])
    assert states.tensor.tolist() == [[hidden_state(4, 4)]]  # behind the final norm
    assert (states.computed_tokens, states.source) == (1, "lease")
    assert not run.outputs.has_unfinished_requests()
    assert run.outputs.find_root("r").choices == [[120, 121]] and run.outputs.find_root("r").leased
    run = Generation(SamplingParams(return_hidden_states=True))
    run.generate()
    run.read()
    assert not run.outputs.find_root("r").leased and run.request.retain_kv is None, "there is no lease for it"


def test_each_choice_has_its_states_whatever_order_they_come_in():
    run = Generation(SamplingParams(n=3, return_hidden_states=HiddenStatesParams(scope="output", positions=[-1, 0])))
    for choice, text in ((1, "q"), (0, "xyz"), (2, "rs")):
        run.generate(text, choice)
    assert run.read(2) == [] and run.read(0) == []
    (last,) = run.read(1)
    assert [states.positions for states in last.hidden_states] == [[5, 3], [3, 3], [4, 3]]
    assert [bytes(states.token_ids) for states in last.hidden_states] == [b"zx", b"qq", b"sr"]
    for states in last.hidden_states:
        expected = [[hidden_state(position, 4) for position in states.positions]]
        numpy.testing.assert_array_equal(states.tensor, numpy.array(expected, numpy.float32))


def test_states_that_come_before_other_choices_have_ended_are_kept():
    run = Generation(SamplingParams(n=2, return_hidden_states=True, output_kind=RequestOutputKind.DELTA))
    (first,) = run.generate("q", 1)
    assert first.outputs[0].finish_reason == "length" and not first.finished
    assert run.read(1) == []
    assert run.generate("xy", 0) == []
    (last,) = run.read(0)
    assert [states.positions for states in last.hidden_states] == [[4], [3]] and last.outputs[0].text == "xy"


def test_every_text_that_a_beam_search_found_has_its_states():
    run = Generation(BeamSearchParams(beam_width=2, n=2, return_hidden_states=True))
    ends = [
        found_text(run.request.request_id, list(text), choice, FinishReason.LENGTH)
        for choice, text in enumerate([b"xy", b"z"])
    ]
    assert run.step(*ends).outputs == []
    run.read(0)
    (last,) = run.read(1)
    assert [states.positions for states in last.hidden_states] == [[4], [3]]


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_the_engine_hears_how_many_tokens_count_where_a_stop_string_may_end_the_text(reason: FinishReason | None):
    run = Generation(SamplingParams(stop=["."], n=2, return_hidden_states=HiddenStatesParams(positions="all")))
    outputs, stopped, _ = run.step(EngineCoreOutput(run.request.request_id, list(b"x.y"), 1, reason))
    assert outputs[0].outputs[1].text == "x" and stopped == {f"{run.request.request_id}#1": 2}
    _, stopped, _ = run.step(EngineCoreOutput(run.request.request_id, list(b"xy"), 0, FinishReason.LENGTH))
    assert stopped == {run.request.request_id: 2}
    run.tokens[1] = b"x."
    run.read(0)
    (last,) = run.read(1)
    assert [len(states.positions) for states in last.hidden_states] == [5, 5]
    plain = Generation(SamplingParams(stop=["."]))
    assert plain.step(EngineCoreOutput(plain.request.request_id, list(b"x"), 0, FinishReason.LENGTH)).stopped == {}
    plain = Generation(SamplingParams(stop=["."]))
    assert plain.step(EngineCoreOutput(plain.request.request_id, list(b"x."))).stopped == {
        plain.request.request_id: None
    }


def test_what_the_answer_turned_out_not_to_have_is_said_beside_the_text():
    run = Generation(
        SamplingParams(max_tokens=9, n=2, return_hidden_states=HiddenStatesParams(scope="output", positions=2))
    )
    run.generate("xyz", 0)
    assert run.generate("x", 1) == []
    (last,) = run.read()
    assert last.error is None and last.refusal is None and last.outputs[1].text == "x"
    assert last.hidden_states[0].tensor is not None
    failed = last.hidden_states[1]
    assert failed.tensor is None and failed.refusal.field == "return_hidden_states.positions"
    assert "the output has 1 tokens" in failed.error
    alone = Generation(SamplingParams(max_tokens=9, return_hidden_states=HiddenStatesParams(positions=8)))
    (last,) = alone.generate("x")
    assert last.finished and last.hidden_states[0].refusal is not None


@pytest.mark.parametrize("error", [DeadlineError("deadline", "is over"), QueueFullError("hidden_states", "full")])
def test_a_text_is_delivered_when_its_states_are_refused(error: RequestError):
    run = Generation(SamplingParams(return_hidden_states=True))
    run.generate("xy")
    refused = EngineCoreOutput(
        run.reading().request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=fault_of(error)
    )
    (last,) = run.step(refused).outputs
    assert (last.outputs[0].text, last.outputs[0].finish_reason, last.error, last.refusal) == (
        "xy",
        "length",
        None,
        None,
    )
    (states,) = last.hidden_states
    assert states.tensor is None and states.error == str(error) and type(states.refusal) is type(error)


def test_a_text_is_delivered_when_the_engine_sends_nonsense():
    run = Generation(SamplingParams(return_hidden_states=HiddenStatesParams(positions="all")))
    run.generate("xy")
    part = hidden_rows(run.reading(), 2, 2)  # a hole before it
    (last,), _, aborted = run.step(part)
    assert aborted == [run.reading().request_id]
    assert last.outputs[0].text == "xy" and "EngineError" in last.hidden_states[0].error
    assert not run.outputs.has_unfinished_requests()


def test_an_end_without_all_rows_is_an_error():
    run = Generation(SamplingParams(return_hidden_states=HiddenStatesParams(positions="all")))
    run.generate("xy")
    run.step(hidden_rows(run.reading(), 0, 2))
    (last,) = run.step(EngineCoreOutput(run.reading().request_id, [], finish_reason=FinishReason.STOP)).outputs
    assert last.hidden_states[0].error == "the engine did not send all rows" and last.hidden_states[0].tensor is None


def test_who_does_not_end_well_has_no_states():
    for reason in (FinishReason.ERROR, FinishReason.ABORT):
        run = Generation(SamplingParams(return_hidden_states=True))
        (last,) = run.generate("x", reason=reason)
        assert last.finished and last.hidden_states is None
    run = Generation(SamplingParams(n=2, return_hidden_states=True))
    run.generate("x", 0)
    (last,), _, aborted = run.outputs.abort_requests(["r"])
    names = [f"{run.request.request_id}{suffix}" for suffix in ("", ".states", "#1.states")]
    assert aborted == names and last.hidden_states is None, "of the other one, the end may be under way"
    assert not run.outputs.has_unfinished_requests() and run.read(0) == []
    run = Generation(SamplingParams(n=2, return_hidden_states=True))
    run.generate("x", 0)
    (last,), _, aborted = run.step(EngineCoreOutput(run.request.request_id, [], 1, FinishReason.ERROR, error="no"))
    assert [name.endswith(".states") for name in aborted] == [True, True]
    assert last.hidden_states is None and last.error == "no"
    assert not run.outputs.has_unfinished_requests()


def test_an_abort_while_the_states_are_read_gives_the_text_and_ends_the_reading():
    run = Generation(SamplingParams(n=2, return_hidden_states=True))
    run.generate("x", 0)
    run.generate("y", 1)
    run.read(0)
    (last,), _, aborted = run.outputs.abort_requests(["r"])
    assert aborted == [run.reading(1).request_id], "the generation itself has ended long ago"
    assert [choice.finish_reason for choice in last.outputs] == ["length", "length"]
    assert last.hidden_states[0].tensor is not None
    assert (last.hidden_states[1].tensor, last.hidden_states[1].error) == (None, "the request was aborted")
    assert run.read(1) == [] and not run.outputs.has_unfinished_requests()


# ---- on their own ----


def test_an_extraction_gives_one_output_with_all_its_rows():
    outputs = OutputProcessor(TOKENIZER, lambda: 9.0)
    params = HiddenStatesParams(positions=[4, 0, 4], layers=["pre_norm", "norm"])
    request, selection = input_processor().process_extraction("x", "abcdef", params, owner="me")
    outputs.add_request(request, None, selection)
    with pytest.raises(UnknownParentError) as unknown:
        outputs.find_original("x", "me")
    assert unknown.value.field == "original_request_id", "it is no text that could be read or continued"
    assert outputs.process_outputs([EngineCoreOutputs([hidden_rows(request, 0, 1)])]).outputs == []
    (output,) = outputs.process_outputs([EngineCoreOutputs([hidden_rows(request, 1, 1)])]).outputs
    assert isinstance(output, HiddenStatesOutput) and output.finished and output.error is None
    assert (output.request_id, output.owner, output.dtype, output.source) == ("x", "me", "float32", None)
    assert (output.positions, output.layers, bytes(output.token_ids)) == ([4, 0, 4], ["pre_norm", "norm"], b"eae")
    expected = [[hidden_state(position, layer) for position in (4, 0, 4)] for layer in (3, 4)]
    assert output.tensor.tolist() == expected and output.computed_tokens == 2
    assert (output.metrics.arrival_time, output.metrics.finished_time) == (7.0, 9.0)


def test_what_still_runs_is_read_as_far_as_it_has_come():
    run = Generation(SamplingParams())
    run.step(EngineCoreOutput(run.request.request_id, [120]))
    root = run.outputs.find_original("r")
    assert root.choices == [[120]] and root.branch_id(0) == run.request.request_id
    with pytest.raises(UnknownParentError, match="there is no request 'r'"):
        run.outputs.find_original("r", "somebody else")


def test_extractions_are_counted_with_their_rows_and_their_source():
    metrics = EngineMetrics("m")
    run = Generation(SamplingParams(return_hidden_states=True), metrics)
    run.generate()
    run.read()
    assert metrics.extractions["lease"] == 1 and metrics.num_extraction_rows == 1
    assert metrics.finished["length"] == 1 and metrics.finished["stop"] == 0, "a part of that request"
    outputs = OutputProcessor(TOKENIZER, lambda: 9.0, metrics)
    for refusal in (None, DeadlineError("deadline", "is over"), QueueFullError("hidden_states", "full")):
        request, selection = input_processor().process_extraction("x", "abc", HiddenStatesParams(positions="all"))
        outputs.add_request(request, None, selection)
        if refusal is None:
            outputs.process_outputs([EngineCoreOutputs([hidden_rows(request, 0, 3)])])
        else:
            outputs.fail_request("x", refusal)
    assert metrics.extractions["prompt"] == 1 and metrics.num_extraction_rows == 4
    assert sum(metrics.extraction_time.counts) == 2 and metrics.extraction_time.total == 2.0
    assert (metrics.finished["stop"], metrics.finished["error"], metrics.finished["refused"]) == (1, 1, 1)
