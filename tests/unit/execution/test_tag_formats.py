"""Structural tags as trees of formats: which texts match, and what is refused where."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.validator import validate
from ratoon.execution.grammar.llguidance_library import Llguidance
from tests.property.json_vocabulary import json_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
CALL = {"begin": "<f=x>", "content": JSON, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=y>", "content": {"type": "const_string", "value": "1"}, "end": "</f>"}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
YES = {"type": "const_string", "value": "yes"}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER]}
LIST = {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "}
X = '<f=x>{"a": 1}</f>'
Y = "<f=y>1</f>"


@cache
def library() -> Llguidance:
    return Llguidance(json_tokenizer(), json_tokenizer().vocab_size)


def asked(format: Any) -> StructuredOutput:
    return StructuredOutput(structural_tag={"type": "structural_tag", "format": format})  # type: ignore[arg-type]


def matches(format: Any, text: str) -> bool:
    state = library().compile(asked(format)).begin()
    return all(state.consume(token) for token in json_tokenizer().encode(text)) and state.is_accepting


@pytest.mark.parametrize(
    ("format", "matching", "others"),
    [
        (YES, ["yes"], ["", "no", "yes!"]),
        ({"type": "const_string", "value": "a/b\n"}, ["a/b\n"], ["a/b"]),
        (JSON, ['{"a": 1}', '{"a":1}'], ["{}", '{"a": 1}x']),
        ({"type": "regex", "pattern": "^[a-z]+/[0-9]$"}, ["ab/1"], ["ab1", "ab/12"]),
        ({"type": "grammar", "grammar": 'root ::= "yes" | no\nno ::= "n" "o"'}, ["yes", "no"], ["n"]),
        ({"type": "any_text"}, ["", "a\nb <f=x>"], []),
        ({"type": "any_text", "excludes": ["<f", "bad"]}, ["", "<g>\nfine ba d"], ["a <f", "bad"]),
        ({"type": "sequence", "elements": [THINK, YES]}, ["<t>hm\n</f></t>yes", "<t></t>yes"], ["yes", "<t>yes"]),
        ({"type": "sequence", "elements": [YES, {"type": "any_text"}]}, ["yes", "yes, I do"], ["no"]),
        ({"type": "or", "elements": [YES, JSON]}, ["yes", '{"a": 2}'], ["no", 'yes{"a": 2}']),
        ({"type": "tag", **CALL}, [X], [Y, X + X]),
        ({**THINK, "end": ["</t>", "</s>"]}, ["<t>a</t>", "<t>a</s>"], ["<t>a</t>b", "<t>a"]),
        ({**OTHER, "end": ["</f>", "!"]}, ["<f=y>1</f>", "<f=y>1!"], ["<f=y>1"]),
        (
            {**THINK, "content": {"type": "sequence", "elements": [YES, {"type": "any_text", "excludes": ["<f"]}]}},
            ["<t>yes, so</t>"],
            ["<t>no</t>", "<t>yes <f</t>"],
        ),
        ({"type": "optional", "content": YES}, ["", "yes"], ["yesyes"]),
        ({"type": "star", "content": YES}, ["", "yesyes"], ["ye"]),
        ({"type": "plus", "content": YES}, ["yes", "yesyes"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": YES}, ["yes", "yesyes"], ["", "yesyesyes"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": YES}, ["yes" * 5], ["yes"]),
        (CALLS, ["", "a < b", X, f"text {X} more {Y}", Y + X], ["<f=z>", "<f=x>{}</f>", "a <f=x>1"]),
        ({**CALLS, "at_least_one": True}, [X, f"{Y} and {X}."], ["", f"text {X}"]),
        ({**CALLS, "stop_after_first": True}, ["", "text", f"text {X}"], [f"{X} more", X + Y]),
        ({**CALLS, "at_least_one": True, "stop_after_first": True}, [X, Y], ["", "text", X + Y]),
        ({"type": "sequence", "elements": [THINK, CALLS]}, ["<t>a</t>", f"<t></t>b {X}c"], [X, "<t>a</t><f=x>2"]),
        (LIST, ["", X, f"{X}, {Y}"], [f"{X}{Y}", f"{X}, ", f"a{X}"]),
        ({**LIST, "at_least_one": True}, [Y, f"{X}, {Y}, {X}"], [""]),
        ({**LIST, "stop_after_first": True}, ["", X], [f"{X}, {Y}"]),
    ],
)
def test_texts_match_their_format(format: Any, matching: list[str], others: list[str]) -> None:
    validate(asked(format))
    assert [text for text in matching if not matches(format, text)] == []
    assert [text for text in others if matches(format, text)] == []


DEEP: dict[str, Any] = YES
for _ in range(40):
    DEEP = {"type": "sequence", "elements": [DEEP]}


@pytest.mark.parametrize(
    ("format", "problem"),
    [
        (5, "format is not an object"),
        ({}, "format has no type"),
        ({"type": "token", "token": 3}, "format has the type 'token', which is not supported"),
        ({"type": "sequence", "elements": []}, "format.elements is missing, empty, or not a list"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, YES]}, "format.elements[0] is free text"),
        ({"type": "sequence", "elements": [CALLS, YES]}, "format.elements[0] has free text behind its tags"),
        ({"type": "star", "content": {"type": "any_text"}}, "format.content is free text"),
        ({"type": "or", "elements": [YES, {"type": "const_string"}]}, "format.elements[1].value is missing"),
        ({"type": "tag", "begin": 5, "content": YES, "end": ""}, "format.begin is missing, or not text"),
        ({**THINK, "end": {"type": "token", "token": 4}}, "format.end is a token"),
        ({**THINK, "end": ""}, "format.content is free text"),
        ({**CALLS, "triggers": ["<g"]}, "format.tags[0].begin '<f=x>' begins with no trigger"),
        ({**CALLS, "triggers": [""]}, "format.triggers is not a list of texts"),
        ({**CALLS, "excludes": ["x"]}, "format.excludes is not supported"),
        ({**CALLS, "at_least_one": 1}, "format.at_least_one is neither true nor false"),
        ({**LIST, "tags": [YES]}, "format.tags[0] is not a tag"),
        ({"type": "repeat", "min": 2, "max": 1, "content": YES}, "format.max 1 is less than min"),
        ({"type": "repeat", "min": -1, "max": 1, "content": YES}, "format.min -1 is out of range"),
        ({"type": "any_text", "max_tokens": 5}, "format.max_tokens is not supported"),
        ({**JSON, "style": "qwen_xml"}, "format.style 'qwen_xml' is not supported"),
        ({"type": "json_schema", "json_schema": False}, "format.json_schema allows no value"),
        (
            {**THINK, "content": {"type": "json_schema", "json_schema": {"not": {}}}},
            "format.content.json_schema: 'not' at #",
        ),
        ({**LIST, "tags": [{**CALL, "content": {"type": "json_schema", "json_schema": {"type": "x"}}}]}, "'type' at #"),
        ({"type": "regex", "pattern": "("}, ""),
        ({"type": "grammar", "grammar": "root ::= nothing"}, ""),
        (DEEP, "is nested too deeply"),
    ],
)
def test_what_can_not_be_translated_is_refused_with_its_place(format: Any, problem: str) -> None:
    with pytest.raises(RequestError) as raised:
        validate(asked(format))
    assert raised.value.field == "structured_output.structural_tag"
    assert problem in raised.value.problem


def test_both_forms_at_once_are_refused() -> None:
    tag = {"format": YES, "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": ""}]}
    with pytest.raises(RequestError, match="structures contradicts format"):
        validate(StructuredOutput(structural_tag=tag))  # type: ignore[arg-type]


def test_marks_that_are_special_tokens_are_tokens() -> None:
    (end,) = json_tokenizer().encode("<|end|>")
    call = {**OTHER, "begin": "<|end|>y"}
    for format, text in (
        ({"type": "sequence", "elements": [{**THINK, "end": "<|end|>"}, YES]}, "<t>hm<|end|>yes"),
        ({**CALLS, "triggers": ["<|end|>"], "tags": [call]}, "a <|end|>y1</f> b"),
    ):
        assert end in json_tokenizer().encode(text) and matches(format, text)
        assert not matches(format, text.replace("<|end|>", "<end>", 1) + "<|end|>")
