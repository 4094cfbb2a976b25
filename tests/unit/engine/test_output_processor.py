"""Engine outputs become what callers asked for, by choice and by output kind."""

from __future__ import annotations

import array

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.messages import Fault
from ratoon.core.outputs import EmbeddingOutput, LogprobsLists, PromptLogprobsChunk
from ratoon.core.params import PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from ratoon.core.wire import WireTensor
from ratoon.engine.output.output_processor import OutputProcessor
from tests.unit.engine.fakes import END, byte_tokenizer

TOKENIZER = byte_tokenizer()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(params: SamplingParams, clock: Clock | None = None, prompt: str = "p") -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER, clock or Clock())
    request = EngineCoreRequest(
        request_id="r-internal",
        prompt_token_ids=list(prompt.encode()),
        params=params,
        external_id="r",
    )
    processor.add_request(request, prompt)
    return processor


def out(text: str, choice: int = 0, **fields) -> EngineCoreOutput:
    return EngineCoreOutput("r-internal", list(text.encode()), choice=choice, **fields)


def step(processor: OutputProcessor, *outputs: EngineCoreOutput):
    done = processor.process_outputs([EngineCoreOutputs(outputs=list(outputs))])
    return done.outputs, [*done.stopped, *done.aborted]


def texts(result) -> list[tuple[int, str]]:
    return [(choice.index, choice.text) for choice in result.outputs]


def test_cumulative_outputs_hold_everything_so_far():
    processor = make(SamplingParams())
    (first,), _ = step(processor, out("a"))
    (second,), _ = step(processor, out("b", finish_reason=FinishReason.LENGTH))
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == ("a", [97], False)
    assert (second.outputs[0].text, second.outputs[0].token_ids, second.finished) == ("ab", [97, 98], True)
    assert second.outputs[0].finish_reason == "length"
    assert (second.request_id, second.prompt, second.prompt_token_ids) == ("r", "p", [112])


def test_delta_outputs_hold_what_is_new():
    processor = make(SamplingParams(output_kind=RequestOutputKind.DELTA))
    results = [
        step(processor, output)[0] for output in (out("a"), out("bc"), out("d", finish_reason=FinishReason.LENGTH))
    ]
    assert [(one.outputs[0].text, one.outputs[0].token_ids) for (one,) in results] == [
        ("a", [97]),
        ("bc", [98, 99]),
        ("d", [100]),
    ]


def test_a_final_only_request_gives_one_output():
    processor = make(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    assert step(processor, out("a")) == ([], [])
    (result,), _ = step(processor, out("b", finish_reason=FinishReason.LENGTH))
    assert result.outputs[0].text == "ab"


def test_a_step_without_tokens_gives_no_output():
    processor = make(SamplingParams())
    assert step(processor, out("")) == ([], [])
    assert processor.has_unfinished_requests()


def test_a_stop_token_ends_the_text_and_is_named():
    processor = make(SamplingParams(stop_token_ids=[33]))
    (result,), to_abort = step(processor, out("a!", finish_reason=FinishReason.STOP, stop_reason=33))
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == ("a", 33)
    assert result.outputs[0].token_ids == [97, 33]
    assert to_abort == []


def test_a_stop_string_ends_the_request_and_the_engine_is_told():
    processor = make(SamplingParams(stop=["bc"]))
    (held,), _ = step(processor, out("ab"))
    assert held.outputs[0].text == "a"
    (result,), to_abort = step(processor, out("c"))
    assert (result.outputs[0].text, result.outputs[0].finish_reason, result.outputs[0].stop_reason) == (
        "a",
        "stop",
        "bc",
    )
    assert result.finished
    assert to_abort == ["r-internal"]
    assert not processor.has_unfinished_requests()
    assert step(processor, out("late")) == ([], [])


def test_a_stop_string_that_ends_with_the_engines_last_token_needs_no_abort():
    processor = make(SamplingParams(stop=["b"]))
    (result,), to_abort = step(processor, out("ab", finish_reason=FinishReason.LENGTH))
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", "b")
    assert to_abort == []


def test_choices_of_a_step_are_merged_and_sorted():
    processor = make(SamplingParams(n=3, output_kind=RequestOutputKind.DELTA))
    (result,), _ = step(processor, out("c", 2), out("a", 0))
    assert texts(result) == [(0, "a"), (2, "c")]
    (result,), _ = step(processor, out("b", 1))
    assert texts(result) == [(1, "b")]


def test_a_stop_string_in_one_choice_ends_that_choice_alone():
    processor = make(SamplingParams(n=2, stop=["."]))
    (result,), to_abort = step(processor, out("x.", 0), out("y", 1))
    assert to_abort == ["r-internal"]
    assert [choice.finish_reason for choice in result.outputs] == ["stop", None]
    assert not result.finished
    (result,), to_abort = step(processor, out("ignored", 0), out(".", 1))
    assert to_abort == ["r-internal#1"]
    assert result.finished
    assert texts(result) == [(0, "x"), (1, "y")]


def test_a_request_with_choices_ends_when_the_last_one_does():
    processor = make(SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    assert step(processor, out("a", 1, finish_reason=FinishReason.LENGTH), out("b", 0)) == ([], [])
    (result,), _ = step(processor, out("c", 0, finish_reason=FinishReason.LENGTH))
    assert texts(result) == [(0, "bc"), (1, "a")]


def test_an_error_reaches_the_caller_with_the_text_so_far():
    processor = make(SamplingParams())
    step(processor, out("a"))
    (result,), _ = step(processor, out("", finish_reason=FinishReason.ERROR, error="logits are not finite"))
    assert (result.error, result.finished) == ("logits are not finite", True)
    assert (result.outputs[0].finish_reason, result.outputs[0].text) == ("error", "a")


def test_a_request_that_fails_before_its_choices_were_forked_ends_whole():
    processor = make(SamplingParams(n=3))
    (result,), _ = step(processor, out("", 0, finish_reason=FinishReason.ERROR, error="no"))
    assert result.finished
    assert [choice.finish_reason for choice in result.outputs] == ["error"] * 3


def test_a_choice_that_fails_later_leaves_the_others_running():
    processor = make(SamplingParams(n=2))
    step(processor, out("a", 0), out("b", 1))
    (result,), _ = step(processor, out("", 0, finish_reason=FinishReason.ERROR, error="no"), out("c", 1))
    assert [choice.finish_reason for choice in result.outputs] == ["error", None]


def test_an_abort_gives_what_there_is_and_the_engines_id():
    processor = make(SamplingParams(stop=["xyz"]))
    step(processor, out("ax"))
    (result,), _, internal = processor.abort_requests(["r", "unknown"])
    assert internal == ["r-internal"]
    assert (result.outputs[0].text, result.outputs[0].finish_reason, result.finished) == ("ax", "abort", True)
    assert not processor.has_unfinished_requests()


def test_logprobs_of_tokens_and_prompt_arrive_once_in_deltas():
    params = SamplingParams(logprobs=0, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    processor = make(params, prompt="pq")
    prompt_rows = PromptLogprobsChunk(1, LogprobsLists([[113]], [[-0.5]], [1]))
    (first,), _ = step(
        processor, out("a", new_logprobs=LogprobsLists([[97]], [[-1.0]], [1]), prompt_logprobs=[prompt_rows])
    )
    (second,), _ = step(processor, out("b", new_logprobs=LogprobsLists([[98]], [[-2.0]], [1])))
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 2
    assert second.prompt_logprobs is None
    assert [list(position) for position in second.outputs[0].logprobs] == [[98]]
    assert second.outputs[0].cumulative_logprob == pytest.approx(-3.0)


def test_logprobs_are_cut_with_the_tokens_behind_a_stop_string():
    processor = make(SamplingParams(logprobs=0, stop=["."]))
    rows = LogprobsLists([[97], [46], [98]], [[-1.0], [-1.0], [-1.0]], [1, 1, 1])
    (result,), _ = step(processor, out("a.b", new_logprobs=rows))
    assert len(result.outputs[0].token_ids) == len(result.outputs[0].logprobs) == 2


def test_without_logprobs_there_is_no_sum():
    (result,), _ = step(make(SamplingParams()), out("a"))
    assert (result.outputs[0].logprobs, result.outputs[0].cumulative_logprob) == (None, None)


def test_times_and_counts_are_kept():
    clock = Clock()
    processor = make(SamplingParams(), clock)
    clock.now = 2.0
    (result,), _ = step(processor, out("a", num_cached_tokens=16))
    clock.now = 5.0
    (result,), _ = step(processor, out("b", finish_reason=FinishReason.LENGTH))
    metrics = result.metrics
    assert (metrics.time_to_first_token, metrics.finished_time, metrics.num_generation_tokens) == (2.0, 5.0, 2)
    assert result.num_cached_tokens == 16


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    processor = make(SamplingParams())
    again = EngineCoreRequest("r-other", [1], SamplingParams(), external_id="r")
    with pytest.raises(RequestError) as caught:
        processor.add_request(again, None)
    assert caught.value.field == "request_id"
    step(processor, out("", finish_reason=FinishReason.LENGTH))
    processor.add_request(again, None)


def test_a_special_stop_token_does_not_show_in_the_text():
    processor = make(SamplingParams(skip_special_tokens=False))
    (result,), _ = step(processor, EngineCoreOutput("r-internal", [97, END], finish_reason=FinishReason.STOP))
    assert result.outputs[0].text == "a"


def test_a_refusal_becomes_the_error_that_the_caller_should_get():
    processor = make(SamplingParams(n=2))
    fault = Fault("RequestError", "max_tokens", "is too much", "at most 7")
    (result,), to_abort = step(processor, out("", finish_reason=FinishReason.ERROR, refusal=fault))
    assert isinstance(result.refusal, RequestError)
    assert (result.refusal.field, result.refusal.problem, result.refusal.expected) == (
        "max_tokens", "is too much", "at most 7",
    )  # fmt: skip
    assert result.error == "max_tokens: is too much; at most 7"
    assert result.finished and to_abort == []
    assert not processor.has_unfinished_requests()


def test_a_request_that_can_not_be_handled_here_fails_alone():
    processor = make(SamplingParams(n=2))
    other = EngineCoreRequest("other", [1], SamplingParams(), external_id="other")
    processor.add_request(other, None)

    def fail(*arguments):
        raise ZeroDivisionError("a bug")

    step(processor, out("a", 0), out("b", 1))
    processor._states["r-internal"].choices[1].detokenizer.update = fail
    results, to_abort = step(processor, out("c", 0), out("d", 1), EngineCoreOutput("other", [97]), out("e", 0))
    by_id = {result.request_id: result for result in results}
    assert by_id["other"].outputs[0].text == "a"
    assert "a bug" in by_id["r"].error and by_id["r"].finished
    assert [choice.finish_reason for choice in by_id["r"].outputs] == ["error", "error"]
    assert to_abort == ["r-internal"]
    assert not processor.is_running("r")


def test_a_request_whose_last_text_can_not_be_made_still_ends():
    processor = make(SamplingParams(output_kind=RequestOutputKind.DELTA))

    def fail(*arguments):
        raise ZeroDivisionError("a bug")

    processor._states["r-internal"].choices[0].detokenizer.finish = fail
    (result,), _, internal = processor.abort_requests(["r"])
    assert "a bug" in result.error and result.finished
    assert internal == ["r-internal"]
    assert not processor.has_unfinished_requests()


# ---- vectors ----


def make_pooling(params: PoolingParams) -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER, Clock())
    request = EngineCoreRequest("r-internal", [112], params, external_id="r")
    processor.add_request(request, "p")
    return processor


def vector(*values: float) -> WireTensor:
    return WireTensor("float32", (len(values),), array.array("f", values).tobytes())


def embedding(params: PoolingParams, *values: float) -> list[float]:
    (result,), to_abort = step(make_pooling(params), out("", finish_reason=FinishReason.STOP, pooled=vector(*values)))
    assert isinstance(result, EmbeddingOutput)
    assert (result.request_id, result.prompt, result.prompt_token_ids, result.error) == ("r", "p", [112], None)
    assert result.finished and to_abort == []
    assert str(result.embedding.dtype) == "float32"
    return result.embedding.tolist()


def test_a_vector_is_brought_to_length_one_or_left_alone():
    assert embedding(PoolingParams(), 3.0, -4.0) == pytest.approx([0.6, -0.8])
    assert embedding(PoolingParams(normalize=False), 3.0, -4.0) == [3.0, -4.0]


def test_a_vector_is_cut_before_it_is_brought_to_length_one():
    assert embedding(PoolingParams(dimensions=2), 3.0, 4.0, 100.0) == pytest.approx([0.6, 0.8])
    assert embedding(PoolingParams(dimensions=2, normalize=False), 3.0, 4.0, 100.0) == [3.0, 4.0]


def test_vectors_of_zeros_and_of_huge_numbers_stay_finite():
    assert embedding(PoolingParams(), 0.0, 0.0) == [0.0, 0.0]
    assert embedding(PoolingParams(), 3e38, 0.0) == [1.0, 0.0]


def test_a_vector_that_failed_or_was_aborted_says_so():
    processor = make_pooling(PoolingParams())
    (result,), _ = step(processor, out("", finish_reason=FinishReason.ERROR, error="it broke"))
    assert (result.embedding, result.error) == (None, "it broke")
    processor = make_pooling(PoolingParams())
    (result,), _, internal = processor.abort_requests(["r"])
    assert (result.embedding, result.error, internal) == (None, "the request was aborted", ["r-internal"])
    processor = make_pooling(PoolingParams())
    fault = Fault("RequestError", "prompt", "is too long")
    (result,), _ = step(processor, out("", finish_reason=FinishReason.ERROR, refusal=fault))
    assert isinstance(result.refusal, RequestError)


# ---- owners ----


def owned(processor: OutputProcessor, owner: str | None, params: SamplingParams | None = None) -> EngineCoreRequest:
    request = EngineCoreRequest(
        f"r-{owner}", [112], params or SamplingParams(), external_id="r", owner=owner, retain_kv=5.0
    )
    processor.add_request(request, "p")
    return request


def test_owners_may_call_their_requests_the_same_and_hear_nothing_of_each_other():
    processor = OutputProcessor(TOKENIZER)
    mine, theirs = owned(processor, "me"), owned(processor, "them")
    with pytest.raises(RequestError, match="in use"):
        owned(processor, "me")
    outputs = [EngineCoreOutput(request.request_id, [byte]) for request, byte in ((mine, 97), (theirs, 98))]
    results, *_ = processor.process_outputs([EngineCoreOutputs(outputs)])
    assert [(one.owner, one.request_id, one.outputs[0].text) for one in results] == [
        ("me", "r", "a"),
        ("them", "r", "b"),
    ]
    assert bytes(processor.find_root("r", "me").tokens(0, None)) == b"pa"
    assert processor.abort_requests(["r"]) == ([], {}, []), "no request has this id"
    (gone,), _, internal = processor.abort_requests(["r"], "me")
    assert (gone.owner, internal) == ("me", ["r-me"])
    assert not processor.is_running("r", "me") and processor.is_running("r", "them")
    failed = processor.fail_request("r", RuntimeError("no"), "them")
    assert failed is not None and failed.owner == "them"
    assert processor.fail_request("r", RuntimeError("no"), "them") is None


def test_a_vector_has_an_owner_too():
    processor = OutputProcessor(TOKENIZER)
    request = EngineCoreRequest("i", [1], PoolingParams(), external_id="r", owner="me")
    processor.add_request(request, None)
    (result,), *_ = processor.abort_requests(["r"], "me")
    assert isinstance(result, EmbeddingOutput) and result.owner == "me"


# ---- times that the engine tells ----


def event(kind: EngineCoreEventType, timestamp: float) -> EngineCoreEvent:
    return EngineCoreEvent(kind, timestamp)


def step_of(processor: OutputProcessor, timestamp: float, *outputs: EngineCoreOutput):
    return processor.process_outputs([EngineCoreOutputs(list(outputs), timestamp=timestamp)]).outputs


def test_the_metrics_have_the_times_of_the_engine():
    clock = Clock()
    processor = make(SamplingParams(), clock)
    clock.now = 5.0
    begin = [event(EngineCoreEventType.QUEUED, 1.0), event(EngineCoreEventType.SCHEDULED, 2.0)]
    step_of(processor, 4.5, out("a", events=begin))
    clock.now = 8.0
    again = [event(EngineCoreEventType.PREEMPTED, 6.0), event(EngineCoreEventType.SCHEDULED, 7.0)]
    (last,) = step_of(processor, 7.5, out("b", events=again, finish_reason=FinishReason.LENGTH))
    metrics = last.metrics
    assert (metrics.queued_time, metrics.scheduled_time, metrics.first_token_time) == (1.0, 2.0, 5.0)
    assert (metrics.sampled_first_time, metrics.sampled_last_time, metrics.finished_time) == (4.5, 7.5, 8.0)
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.5, 3.0)
    assert (metrics.inference_time, metrics.time_to_first_token, metrics.e2e_latency) == (5.5, 5.0, 8.0)
    assert metrics.num_preemptions == 1


@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_a_clock_that_disagrees_makes_no_negative_times(shift):
    clock = Clock()
    processor = make(SamplingParams(max_tokens=1), clock)
    clock.now = 5.0
    begin = [event(EngineCoreEventType.QUEUED, 1.0 + shift), event(EngineCoreEventType.SCHEDULED, 2.0 + shift)]
    (output,) = step_of(processor, 4.5 + shift, out("a", events=begin, finish_reason=FinishReason.LENGTH))
    metrics = output.metrics
    spans = (metrics.queue_time, metrics.prefill_time, metrics.decode_time, metrics.inference_time)
    assert all(span is not None and 0 <= span <= 5 for span in spans)


def test_events_are_kept_of_requests_that_are_traced_alone():
    processor = make(SamplingParams())
    step_of(processor, 4.5, out("a", events=[event(EngineCoreEventType.QUEUED, 1.0)]))
    assert processor._states["r-internal"].events == []


# ---- several steps at once ----


def steps_at_once(processor: OutputProcessor, *steps: list[EngineCoreOutput]):
    return processor.process_outputs([EngineCoreOutputs(outputs) for outputs in steps])


def test_what_several_steps_brought_is_one_output():
    processor = make(SamplingParams(output_kind=RequestOutputKind.DELTA, n=2))
    done = steps_at_once(processor, [out("a"), out("x", 1)], [out("b")], [out("c"), out("y", 1)])
    (result,) = done.outputs
    assert texts(result) == [(0, "abc"), (1, "xy")]
    assert [list(choice.token_ids) for choice in result.outputs] == [[97, 98, 99], [120, 121]]
    assert result.metrics.num_generation_tokens == 5 and not done.stopped


def test_an_end_in_a_step_before_the_last_is_told_and_what_follows_it_dropped():
    processor = make(SamplingParams(output_kind=RequestOutputKind.DELTA, stop=["bc"]))
    done = steps_at_once(processor, [out("a")], [out("b")], [out("c")], [out("d")])
    (result,) = done.outputs
    assert texts(result) == [(0, "a")] and result.finished
    assert list(done.stopped) == ["r-internal"]
    assert not processor.has_unfinished_requests()
