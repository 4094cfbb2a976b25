"""Beam searches in the front end: what is checked and filled in, and how texts that replace others become outputs."""

from __future__ import annotations

import tracemalloc

import pytest
from msgspec.structs import replace

from ratoon.core.errors import RequestError
from ratoon.core.params import MAX_BEAM_STOP_TOKENS, BeamSearchParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, FinishReason, InheritedFrom
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.roots import Root
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes import END, VOCAB_SIZE, SlowTokenizer, byte_tokenizer, found_text, model_config

TOKENIZER = byte_tokenizer()
MAX_MODEL_LEN = 64


def processor(**settings) -> InputProcessor:
    return InputProcessor(model_config(), TOKENIZER, max_model_len=MAX_MODEL_LEN, **settings)


def beams(**fields) -> BeamSearchParams:
    """Set afterwards, so that no type is checked yet."""
    return replace(BeamSearchParams(beam_width=4), **fields)


def streamed(**fields) -> BeamSearchParams:
    return beams(output_kind=RequestOutputKind.CUMULATIVE, **fields)


# ---- requests ----


def test_a_request_carries_the_search_with_all_that_was_left_open():
    asked = beams(n=3, max_tokens=9, min_tokens=2, stop_token_ids=[7], length_penalty=2.0, skip_special_tokens=False)
    request = processor().process("r", "hi", asked)
    assert request.params == beams(
        n=3,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[7],
        length_penalty=2.0,
        skip_special_tokens=False,
        all_stop_token_ids=[7, END],
    )
    assert request.num_choices == 3
    assert asked.all_stop_token_ids is None, "the caller's own are left alone"


def test_a_continuation_may_be_a_search():
    parent = Root("p", "p-internal", [*b"ab"], [[*b"c"], [*b"d"]])
    request = processor().process_continuation("r", parent, "ef", beams(max_tokens=None), choice=1)
    assert bytes(request.prompt_token_ids) == b"abdef"
    assert request.params.max_tokens == MAX_MODEL_LEN - 5


def test_a_search_without_a_limit_takes_what_the_kv_cache_has_for_all_its_beams():
    # 40 blocks of 4 tokens, 2 of them for the prompt; 38 for 4 beams are 9 each, from the second block on.
    request = processor(kv_capacity=160, block_size=4).process("r", "five!", beams(max_tokens=None))
    assert request.params.max_tokens == 9 * 4 - 1
    tight = processor(kv_capacity=8, block_size=4).process("r", "five!", beams(max_tokens=None))
    assert tight.params.max_tokens == 1, "whether that fits is the engine's to say"


def test_room_and_min_tokens_are_those_of_any_request():
    assert processor().process("r", "hi", beams(max_tokens=500)).params.max_tokens == MAX_MODEL_LEN - 2
    with pytest.raises(RequestError, match="min_tokens"):
        processor().process("r", "hi", beams(max_tokens=None, min_tokens=63))


def test_ignore_eos_leaves_the_callers_stop_tokens():
    request = processor().process("r", "hi", beams(ignore_eos=True, stop_token_ids=[9]))
    assert request.params.all_stop_token_ids == [9]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (beams(beam_width=0), "beam_width"),
        (beams(beam_width=2049), "beam_width"),
        (beams(beam_width=True), "beam_width"),
        (beams(beam_width=2.0), "beam_width"),
        (beams(n=5), "n"),
        (beams(n=0), "n"),
        (beams(beam_width=500, n=VOCAB_SIZE), "n"),  # one token of them ends a text
        (beams(max_tokens=0), "max_tokens"),
        (beams(max_tokens=2, min_tokens=3), "min_tokens"),
        (beams(length_penalty=float("nan")), "length_penalty"),
        (beams(length_penalty=99), "length_penalty"),
        (beams(early_stopping="sometimes"), "early_stopping"),
        (beams(early_stopping=1), "early_stopping"),
        (beams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        (beams(stop_token_ids=["x"]), "stop_token_ids"),
        (beams(stop_token_ids=list(range(MAX_BEAM_STOP_TOKENS))), "stop_token_ids"),  # and the model's own
        (beams(ignore_eos="yes"), "ignore_eos"),
        (beams(detokenize=None), "detokenize"),
        (beams(skip_special_tokens=1), "skip_special_tokens"),
        (beams(output_kind=RequestOutputKind.DELTA), "output_kind"),
        (beams(output_kind=2), "output_kind"),
        ({"beam_width": 4}, "sampling_params"),
        (None, "sampling_params"),
    ],
    ids=repr,
)
def test_what_has_no_meaning_is_refused_by_its_name(params, field):
    with pytest.raises(RequestError) as refused:
        processor().process("r", "hi", params)
    assert refused.value.field == field
    with pytest.raises(RequestError):
        processor().process_continuation("r", Root("p", "i", [1], [[2]]), "", params)


def test_as_many_stop_tokens_as_allowed_and_as_many_texts_as_there_are():
    processor().process("r", "hi", beams(stop_token_ids=list(range(MAX_BEAM_STOP_TOKENS)), ignore_eos=True))
    processor().process("r", "hi", beams(beam_width=500, n=VOCAB_SIZE - 1))


def test_texts_are_counted_without_tokens_that_may_not_begin_one():
    held_back = beams(beam_width=500, n=VOCAB_SIZE - 3, suppressed_token_ids=[1, 2], suppressed_first_token_ids=[2])
    processor().process("r", "hi", held_back)
    for params in (replace(held_back, n=VOCAB_SIZE - 2), beams(n=2, allowed_token_ids=[5, END])):
        with pytest.raises(RequestError, match="more texts than the vocabulary can begin"):
            processor().process("r", "hi", params)


def test_checking_a_search_does_not_list_the_vocabulary():
    large = InputProcessor(model_config(vocab_size=2**18), None, max_model_len=MAX_MODEL_LEN)
    tracemalloc.start()
    try:
        large.process("r", [1], beams())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20, "a set of all tokens has many MiB, and takes milliseconds"


# ---- outputs ----


class Search:
    """One request in an output processor; `tell` is a step of the engine."""

    def __init__(self, params: BeamSearchParams, tokenizer=TOKENIZER, metrics: EngineMetrics | None = None) -> None:
        self.now = 0.0
        self.outputs = OutputProcessor(tokenizer, lambda: self.now, metrics)
        request = processor().process("r", "p", params, arrival_time=0.0)
        self.id = request.request_id
        self.outputs.add_request(request, "p")

    def tell(self, *texts: str | bytes | list[int], end: FinishReason | None = None, **fields):
        """The best text so far, or with `end` all that were found."""
        found = [
            found_text(self.id, list(text.encode() if isinstance(text, str) else text), choice, end)
            for choice, text in enumerate(texts)
        ]
        for output in found:
            for name, value in fields.items():
                setattr(output, name, value)
        return self.send(*found)

    def send(self, *outputs: EngineCoreOutput):
        self.now += 1
        results, *to_abort = self.outputs.process_outputs([EngineCoreOutputs(list(outputs))])
        assert not any(to_abort)
        return results


def summary(result) -> list[tuple]:
    return [(choice.index, choice.text, choice.score, choice.finish_reason) for choice in result.outputs]


def test_a_search_gives_one_output_with_its_texts_best_first():
    search = Search(beams(n=2))
    (result,) = search.tell("ab", "cd", end=FinishReason.LENGTH)
    assert summary(result) == [(0, "ab", -0.5, "length"), (1, "cd", -1.0, "length")]
    assert [choice.cumulative_logprob for choice in result.outputs] == [-1.0, -2.0]
    assert [choice.token_ids for choice in result.outputs] == [[97, 98], [99, 100]]
    assert result.finished and not search.outputs.has_unfinished_requests()


def test_the_best_text_so_far_replaces_the_one_before():
    search = Search(streamed(n=2))
    seen = [search.tell(text)[0] for text in ("a", "ab", "xyz", "xyz")]
    assert [summary(result) for result in seen] == [[(0, text, -0.5, None)] for text in ("a", "ab", "xyz", "xyz")]
    assert [result.outputs[0].token_ids for result in seen][1:3] == [[97, 98], [120, 121, 122]]
    (last,) = search.tell("abcd", "xyzz", end=FinishReason.LENGTH)
    assert [choice.text for choice in last.outputs] == ["abcd", "xyzz"] and last.finished


def test_only_what_is_new_is_detokenised_while_the_best_text_goes_on(monkeypatch):
    search = Search(streamed())
    search.tell("ab")
    state = search.outputs._states[search.id].choices[0]
    before = state.detokenizer
    search.tell("abc")
    assert state.detokenizer is before
    search.tell("abd")
    assert state.detokenizer is not before and state.detokenizer.text == "abd"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SlowTokenizer(TOKENIZER), None])
def test_texts_that_share_parts_of_characters_come_out_right(tokenizer):
    """é and è differ in their second byte: whatever was waiting for the rest of one must not end up in the other."""
    search = Search(streamed(), tokenizer)
    (half,) = search.tell(b"a" + "é".encode()[:1])
    (other,) = search.tell("aè")
    (last,) = search.tell("aé!", end=FinishReason.LENGTH)
    texts = ["", "", ""] if tokenizer is None else ["a", "aè", "aé!"]
    assert [result.outputs[0].text for result in (half, other, last)] == texts


def test_a_stop_token_is_no_part_of_the_text_though_the_search_goes_on():
    search = Search(streamed(stop_token_ids=[33]))
    (open_end,) = search.tell("ab!")
    assert (open_end.outputs[0].text, open_end.outputs[0].token_ids) == ("ab", [97, 98, 33])
    assert open_end.outputs[0].finish_reason is None
    (other,) = search.tell("abc!")
    assert other.outputs[0].text == "abc"
    (last,) = search.tell("ab!", end=FinishReason.STOP, stop_reason=33)
    assert (last.outputs[0].text, last.outputs[0].stop_reason) == ("ab", 33)


def test_text_that_is_not_wanted_is_not_made():
    (result,) = Search(beams(detokenize=False)).tell("ab", end=FinishReason.LENGTH)
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("", [97, 98])


def test_an_answer_in_several_parts_is_complete_in_its_last_output():
    """A message with very many outputs is taken in slices."""
    search = Search(streamed(n=3))
    ends = [found_text(search.id, [97 + choice], choice, FinishReason.LENGTH) for choice in range(3)]
    (first,) = search.send(*ends[:2])
    assert [choice.index for choice in first.outputs] == [0, 1] and not first.finished
    (last,) = search.send(ends[2])
    assert [choice.text for choice in last.outputs] == ["a", "b", "c"] and last.finished


@pytest.mark.parametrize("told", [(), ("ab",)])
def test_a_search_that_fails_ends_all_its_choices(told):
    search = Search(streamed(n=3))
    for text in told:
        search.tell(text)
    (result,) = search.send(EngineCoreOutput(search.id, [], 0, FinishReason.ERROR, error="the step failed"))
    assert result.finished and result.error == "the step failed"
    assert [choice.finish_reason for choice in result.outputs] == ["error"] * 3
    assert not search.outputs.has_unfinished_requests()


def test_an_abort_ends_it_with_the_best_text_so_far():
    search = Search(streamed(n=2))
    search.tell("ab")
    (result,), _, internal = search.outputs.abort_requests(["r"])
    assert [(choice.text, choice.finish_reason) for choice in result.outputs] == [("ab", "abort"), ("", "abort")]
    assert internal == [search.id]


def test_a_replayed_search_tells_its_end_once():
    search = Search(streamed(n=2))
    search.tell("abc")
    search.tell("a")  # the engine died, and another one begins again
    (last,) = search.tell("ab", "cd", end=FinishReason.LENGTH)
    assert [choice.text for choice in last.outputs] == ["ab", "cd"]
    assert search.tell("ab", "cd", end=FinishReason.LENGTH) == []


def test_tokens_are_counted_once_and_the_first_is_that_of_the_first_best_text():
    metrics = EngineMetrics("fake")
    search = Search(streamed(n=2), metrics=metrics)
    for text in ("a", "ab"):
        search.tell(text)
    (result,) = search.tell("abc", "d", end=FinishReason.LENGTH)
    assert (result.metrics.first_token_time, result.metrics.finished_time) == (1.0, 3.0)
    assert result.metrics.num_generation_tokens == metrics.num_generation_tokens == 4
    assert metrics.time_to_first_token.total == 1.0
    assert metrics.inter_token_latency.total == 2.0
    assert metrics.time_per_output_token.total == 1.0
    assert metrics.num_prompt_tokens == 1 and metrics.finished["length"] == 1


def test_a_search_that_told_nothing_before_its_end_says_nothing_about_the_time_between_tokens():
    metrics = EngineMetrics("fake")
    (result,) = Search(beams(), metrics=metrics).tell("abc", end=FinishReason.LENGTH)
    assert result.metrics.first_token_time == 1.0
    assert sum(metrics.time_per_output_token.counts) == sum(metrics.inter_token_latency.counts) == 0


# ---- continuations ----


def test_every_text_that_was_found_is_a_root():
    search = Search(beams(n=2))
    search.tell("ab", "cd", end=FinishReason.LENGTH)
    root = search.outputs.find_root("r")
    assert bytes(root.tokens(0, None)) == b"pab" and bytes(root.tokens(1, None)) == b"pcd"
    assert root.branch_id(1) == f"{search.id}#1"


def test_a_search_that_has_not_ended_can_be_looked_at_but_not_forked():
    search = Search(streamed())
    search.tell("ab")
    root = search.outputs.find_root("r")
    assert root.searching
    with pytest.raises(RequestError, match="a beam search that has not ended; wait for its end") as refused:
        processor().process_continuation("c", root, "", SamplingParams())
    assert refused.value.field == "continuation_of"
    search.tell("ab", end=FinishReason.LENGTH)
    assert bytes(search.outputs.find_root("r").tokens(0, 2)) == b"pa"


def test_a_search_that_failed_or_was_aborted_is_no_root():
    search = Search(streamed())
    search.tell("ab")
    search.outputs.abort_requests(["r"])
    with pytest.raises(RequestError, match="there is no request 'r'"):
        search.outputs.find_root("r")


def test_a_search_behind_a_parent_says_how_it_began():
    outputs = OutputProcessor(TOKENIZER)
    request = processor().process_continuation("r", Root("p", "i", [*b"ab"], [[*b"c"]]), "d", beams())
    outputs.add_request(request, None)
    found = found_text(request.request_id, [120], 0, FinishReason.LENGTH)
    found.num_cached_tokens, found.inherited_from = 2, InheritedFrom.LEASE
    (result,), *_ = outputs.process_outputs([EngineCoreOutputs([found])])
    assert (result.continuation.inherited_tokens, result.continuation.computed_tokens) == (2, 2)
    assert result.continuation.source == "lease"
