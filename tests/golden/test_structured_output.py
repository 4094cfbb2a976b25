"""Structured output of engines over small random models: texts that end by a stop match, whatever the model prefers."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import msgspec
import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.core.request import ResumedChoice
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import GrammarCost
from ratoon.execution.grammar.llguidance_library import State
from tests.depths import both_depths
from tests.golden.engines import engine
from tests.golden.grammar_engines import FAMILY, grammar_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "boolean"},
        "c": {"enum": ["x", "yz", None]},
        "d": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
PROMPTS = ["hello", "abc", "12, 3"]


def params(seed: int, temperature: float = 1.0, max_tokens: int = 90, **asked: Any) -> SamplingParams:
    return SamplingParams(structured_output=asked, temperature=temperature, seed=seed, max_tokens=max_tokens)


def matches(asked: dict[str, Any], text: str) -> bool:
    match asked:
        case {"json_schema": schema}:
            jsonschema.validate(json.loads(text), schema)
            return True
        case {"json_object": True}:
            return isinstance(json.loads(text), dict)
        case {"regex": regex} if "begins_after" in asked:  # the grammar begins with the next token
            return re.fullmatch(f".*?{asked['begins_after']}[a-z]*{regex}", text, re.DOTALL) is not None
        case {"regex": regex}:
            return re.fullmatch(regex, text) is not None
        case {"choice": texts}:
            return text in texts
        case {"grammar": _}:
            return re.fullmatch(r"x[0-9]{1,3}", text) is not None
    return re.fullmatch(r"((?!<f).|\n)*(<f=a>-?[0-9]+</f>((?!<f).|\n)*)*", text) is not None


KINDS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "disable_any_whitespace": True},
    {"json_object": True},
    {"regex": r"[ab]{3,7}c"},
    {"choice": ["red", "green", "blue", ""]},
    {"grammar": 'start: "x" /[0-9]{1,3}/'},
    {"grammar": 'root ::= "x" [0-9] [0-9]? [0-9]?'},
    {"structural_tag": TAG},
    {"regex": "[0-9]{3}", "begins_after": "a"},
]


@pytest.mark.parametrize("asked", KINDS, ids=lambda asked: next(iter(asked)))
@pytest.mark.one_in(3)
def test_texts_that_end_match(asked: dict[str, Any]) -> None:
    with grammar_engine() as llm:
        each = [params(seed, temperature, **asked) for seed in range(6) for temperature in (0.0, 1.0, 5.0)]
        outputs = llm.generate([PROMPTS[index % 3] for index in range(len(each))], each, progress=False)
        ended = 0
        for output in outputs:
            (answer,) = output.outputs
            assert output.error is None
            if answer.finish_reason == "stop":
                assert matches(asked, answer.text), answer.text
                ended += 1
            else:
                assert answer.finish_reason == "length" and len(answer.token_ids) == 90
        # Few tokens of this vocabulary end with the marker
        share = 1 / 3 if "begins_after" in asked else 2 / 3
        assert ended >= (1 if asked.keys() & {"json_object", "structural_tag"} else len(each) * share)


def test_a_request_gets_the_same_tokens_alone_and_among_others() -> None:
    each = [params(seed, **KINDS[seed % len(KINDS)]) for seed in range(12)] + [SamplingParams(seed=5, max_tokens=20)]
    with grammar_engine() as llm:
        together = llm.generate([PROMPTS[0]] * len(each), each, progress=False)
        alone = [llm.generate([PROMPTS[0]], [one], progress=False)[0] for one in each]
    assert [out.outputs[0].token_ids for out in together] == [out.outputs[0].token_ids for out in alone]


def test_choices_of_one_request_all_match_and_differ() -> None:
    asked = SamplingParams(n=6, seed=1, max_tokens=90, structured_output=StructuredOutput(regex="[a-z]{3,7}"))
    with grammar_engine() as llm:
        (output,) = llm.generate([PROMPTS[0]], [asked], progress=False)
    texts = [answer.text for answer in output.outputs]
    assert all(re.fullmatch("[a-z]{3,7}", text) for text in texts)
    assert len(set(texts)) > 1


def test_preempted_requests_get_the_same_tokens() -> None:
    each = [params(seed, max_tokens=60, json_object=True) for seed in range(8)]
    with grammar_engine() as llm:
        roomy = llm.generate([PROMPTS[0]] * 8, each, progress=False)
    with grammar_engine(num_blocks=14) as llm:
        tight = llm.generate([PROMPTS[0]] * 8, each, progress=False)
        assert llm._client.core.scheduler.preemption.num_preemptions > 0
    assert [out.outputs[0].token_ids for out in roomy] == [out.outputs[0].token_ids for out in tight]


def test_logprobs_are_the_model_s_own() -> None:
    """Those of the same tokens as a prompt, without a grammar."""
    asked = params(3, regex="[a-z]{5}")
    asked.logprobs = 2
    with grammar_engine() as llm:
        (output,) = llm.generate([PROMPTS[0]], [asked], progress=False)
        answer = output.outputs[0]
        again = llm.generate(
            [{"prompt_token_ids": [*output.prompt_token_ids, *answer.token_ids]}],
            [SamplingParams(max_tokens=1, prompt_logprobs=2)],
            progress=False,
        )[0]
    own = again.prompt_logprobs[len(output.prompt_token_ids) :]
    for token, here, there in zip(answer.token_ids, answer.logprobs, own):
        assert here[token].logprob == pytest.approx(there[token].logprob, abs=1e-4)


def test_a_bad_schema_is_refused_before_it_is_queued() -> None:
    with grammar_engine() as llm:
        with pytest.raises(RequestError, match=r"structured_output\.json_schema: 'not' at #/properties/a"):
            llm.generate([PROMPTS[0]], [params(1, json_schema={"properties": {"a": {"not": {}}}})], progress=False)
        assert not llm._client.has_work()


def test_without_a_tokenizer_it_is_refused() -> None:
    with engine(FAMILY) as llm, pytest.raises(RequestError, match="structured_output: needs a tokenizer"):
        llm.generate([[1, 2]], [params(1, regex="a")], progress=False)


def test_a_text_that_can_t_go_on_ends_without_an_end_token() -> None:
    each = [
        SamplingParams(structured_output={"choice": ["abc", "12"]}, seed=1, n=3, max_tokens=20, **changes)
        for changes in ({"ignore_eos": True}, {"min_tokens": 10})
    ]
    with grammar_engine() as llm:
        outputs = llm.generate([PROMPTS[0]] * 2, each, progress=False)
    for output in outputs:
        assert output.error is None
        for answer in output.outputs:
            assert answer.text in ("abc", "12") and answer.finish_reason == "stop"


def test_beams_never_leave_the_grammar() -> None:
    with grammar_engine(max_num_seqs=64) as llm:
        for asked in ({"choice": ["red", "green", "blue"]}, {"regex": "[ab]{2,4}"}, KINDS[0], {"json_object": True}):
            params = BeamSearchParams(beam_width=6, n=3, max_tokens=60, structured_output=asked)
            (output,) = llm.generate([PROMPTS[0]], [params], progress=False)
            assert output.error is None and len({answer.text for answer in output.outputs}) == 3
            for answer in output.outputs:
                assert answer.finish_reason == "length" or matches(asked, answer.text), answer.text
        with pytest.raises(RequestError, match="needs a token that ends a text"):
            llm.generate([PROMPTS[0]], [BeamSearchParams(beam_width=2, structured_output=asked, ignore_eos=True)])


@pytest.mark.parametrize("asked", [{"choice": ["red", "green", "blue"]}, {"regex": "[xy]{1,2}"}, {"regex": "x"}])
def test_a_search_ends_with_the_texts_that_exist(asked: dict[str, Any]) -> None:
    texts = ["x", "y", "xx", "xy", "yx", "yy"] if asked.get("regex") == "[xy]{1,2}" else asked.get("choice", ["x"])
    with grammar_engine(max_num_seqs=64) as llm:
        params = [
            BeamSearchParams(beam_width=12, n=9, max_tokens=20, structured_output=asked, output_kind=kind, **states)  # type: ignore[arg-type]
            for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE)
            for states in ({}, {"return_hidden_states": HiddenStatesParams(positions=-1)})
        ]
        for output in llm.generate([PROMPTS[0]] * len(params), params, progress=False, retain_kv=60):
            assert output.error is None and output.finished
            assert sorted(answer.text for answer in output.outputs) == sorted(texts)
            assert [answer.index for answer in output.outputs] == list(range(len(texts)))
            assert all(answer.finish_reason == "stop" for answer in output.outputs)
            assert output.hidden_states is None or len(output.hidden_states) == len(texts)
            child = llm.generate_continuation(output, " b", SamplingParams(max_tokens=3), choice=len(texts) - 1)
            assert child.error is None and child.continuation.source == "lease"
            with pytest.raises(RequestError, match="choice"):
                llm.generate_continuation(output, " b", SamplingParams(max_tokens=3), choice=len(texts))
            llm.forget(output.request_id)


def test_a_continuation_goes_on_with_the_parent_s_grammar() -> None:
    asked = {"regex": "[a-z]{40}"}
    goes_on = SamplingParams(structured_output={"continue_grammar": True}, seed=7, max_tokens=60)
    with grammar_engine() as llm:
        (parent,) = llm.generate([PROMPTS[0]], [params(1, max_tokens=10, **asked)], progress=False)
        assert parent.outputs[0].finish_reason == "length"
        child = llm.generate_continuation(parent, "", goes_on)
        whole = parent.outputs[0].text + child.outputs[0].text
        assert re.fullmatch("[a-z]{40}", whole) and child.outputs[0].finish_reason == "stop"
        # A suffix is a part of the text, and so is what a continuation of a continuation has
        begun = llm.generate_continuation(parent, "abc", params_of(goes_on, max_tokens=2))
        ended = llm.generate_continuation(begun, "", goes_on)
        texts = parent.outputs[0].text, "abc", begun.outputs[0].text, ended.outputs[0].text
        assert re.fullmatch("[a-z]{40}", "".join(texts))
        complete = llm.generate_continuation(child, "", goes_on)
        assert (complete.outputs[0].text, complete.outputs[0].finish_reason) == ("", "stop")
        # A grammar of its own is over the new part
        other = llm.generate_continuation(parent, " x", params(3, regex="[0-9]{3}"))
        assert re.fullmatch("[0-9]{3}", other.outputs[0].text)
        (free,) = llm.generate([PROMPTS[0]], [SamplingParams(max_tokens=2)], progress=False)
        for name, refused in (("no structured output", free), ("begins after", parent)):
            with pytest.raises(RequestError, match=name):
                llm.generate_continuation(refused, "", goes_on, at=1)
        with pytest.raises(RequestError, match="continues no other"):
            llm.generate([PROMPTS[0]], [goes_on], progress=False)


def params_of(some: SamplingParams, **changes: Any) -> SamplingParams:
    changed = some.clone()
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_a_suffix_that_leaves_the_grammar_fails_alone() -> None:
    goes_on = SamplingParams(structured_output={"continue_grammar": True}, max_tokens=60)
    with grammar_engine() as llm:
        (parent,) = llm.generate([PROMPTS[0]], [params(1, max_tokens=3, regex="[a-z]{9}")], progress=False)
        with pytest.raises(RequestError, match="structured_output: allows no token here"):
            llm.generate_continuation(parent, "123", goes_on)


def test_steps_in_flight_change_nothing() -> None:
    each = [params(seed, **KINDS[seed % len(KINDS)]) for seed in range(10)]
    answers = []
    for depth in (1, 2):
        with grammar_engine(max_steps_in_flight=depth) as llm:
            outputs = llm.generate([PROMPTS[0]] * len(each), each, progress=False)
            answers.append([(out.outputs[0].token_ids, out.outputs[0].finish_reason) for out in outputs])
    assert answers[0] == answers[1]


def test_a_request_that_another_engine_began_goes_on_with_the_same_tokens() -> None:
    """As after the death of an engine process, with what the client's ledger sends."""
    asked = params(5, json_object=True)
    with grammar_engine() as llm:
        (whole,) = llm.generate([PROMPTS[0]], [asked], progress=False)
        tokens = list(whole.outputs[0].token_ids)
        for count in (1, 7, len(tokens) - 1):
            request = llm.engine.prepare("again", PROMPTS[0], asked).request
            request = msgspec.structs.replace(request, resumed=[ResumedChoice(tokens[:count])])
            core = llm._client.core
            core.add_request(request)
            rest: list[int] = []
            while core.has_work():
                rest += [token for output in core.step().outputs for token in output.new_token_ids]
            assert tokens[:count] + rest == tokens


def test_tokens_without_a_choice_are_appended_without_steps_of_their_own() -> None:
    each = [params(seed, **KINDS[seed % len(KINDS)]) for seed in range(12)]
    each += [params_of(params(seed, json_schema=SCHEMA), frequency_penalty=0.5, n=2) for seed in range(3)]
    each += [params_of(params(1, json_schema=SCHEMA), **change) for change in ({"logprobs": 1}, {"min_tokens": 30})]
    answers, steps = {}, {}
    for jumps in (False, True):
        for depth in (1, 2):
            with grammar_engine(jump_forward=jumps, max_steps_in_flight=depth) as llm:
                outputs = llm.generate([PROMPTS[0]] * len(each), each, progress=False)
                choices = [answer for out in outputs for answer in out.outputs]
                answers[jumps, depth] = [(one.token_ids, one.text, one.finish_reason) for one in choices]
                llm.generate([PROMPTS[1]], [params(4, json_schema=SCHEMA)], progress=False)
                steps[jumps, depth] = llm._client.core.scheduler.planner.num_steps
    assert len({repr(some) for some in answers.values()}) == 1
    assert steps[True, 1] < steps[True, 2] < steps[False, 2], "a step that is planned ahead computes none of the run"


def test_a_run_without_a_choice_ends_at_max_tokens_and_at_stop_strings() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    with grammar_engine() as llm:
        (cut,) = llm.generate([PROMPTS[0]], [params(1, max_tokens=5, choice=[text])], progress=False)
        stop = params_of(params(1, choice=[text]), stop=["hij"])
        (stopped,) = llm.generate([PROMPTS[0]], [stop], progress=False)
    assert cut.outputs[0].finish_reason == "length" and len(cut.outputs[0].token_ids) == 5
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("abcdefg", "stop")


@both_depths
@pytest.mark.one_in(2)
def test_masks_that_take_long_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose masks are not filled in time are left out of steps, beside others that are not."""
    each = [params(seed, **KINDS[seed % len(KINDS)]) for seed in range(8)]
    each += [
        SamplingParams(seed=9, max_tokens=40, ignore_eos=True),
        params_of(params(3, json_schema=SCHEMA), logprobs=1),
    ]

    engines: list[LLM] = []

    def num_steps_so_far() -> int:
        return engines[-1]._client.core.scheduler.planner.num_steps

    def texts() -> list[Any]:
        with grammar_engine() as llm:
            engines.append(llm)
            outputs = llm.generate([PROMPTS[0]] * len(each), each, progress=False)
            assert all(output.error is None for output in outputs)
            return [(out.outputs[0].token_ids, out.outputs[0].finish_reason) for out in outputs]

    right = texts()
    fill, num_slow, num_passed_by = State.fill, 0, 0

    def fill_slowly(state: State, words: Any) -> None:
        nonlocal num_slow, num_passed_by
        num_slow += 1
        if num_slow % 5 == 0:  # until others have gone on without it, if there are others
            further, end = num_steps_so_far() + 2, time.monotonic() + 0.2
            while num_steps_so_far() < further and time.monotonic() < end:
                time.sleep(0.001)
            num_passed_by += num_steps_so_far() >= further
        fill(state, words)

    monkeypatch.setattr(State, "fill", fill_slowly)
    monkeypatch.setattr(GrammarCost, "note", lambda cost, _: setattr(cost, "is_slow", True))
    assert texts() == right
    assert num_passed_by > 0
