"""Structured output of engines over small random models: texts that end by a stop match, whatever the model prefers."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import SamplingParams
from ratoon.core.structured import StructuredOutput
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
    return SamplingParams(structured_output=asked, temperature=temperature, seed=seed, max_tokens=max_tokens)  # type: ignore[arg-type]


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
        assert ended >= (1 if asked.keys() & {"json_object", "structural_tag"} else len(each) * 2 // 3)


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
