"""Schemas and grammars that can't be used are refused with the keyword and its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.validator import validate


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(value))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "asked",
    [
        schema(OBJECT),
        schema({}),
        schema(True),
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
        schema({"type": "object", "title": "x", "examples": [1], "x-own": 5}),
        StructuredOutput(json_object=True),
        StructuredOutput(regex=r"^\d{3}$"),
        StructuredOutput(choice=["a", "", 'quote"', "new\nline", "ü", "<end>"]),
        StructuredOutput(grammar='start: "a" /[0-9]+/'),
        StructuredOutput(grammar='root ::= "a" [0-9]+'),
        StructuredOutput(
            structural_tag=json.dumps(
                {"structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f="]}
            )
        ),
        StructuredOutput(continue_grammar=True),
    ],
)
def test_what_is_supported_is_accepted(asked: StructuredOutput) -> None:
    validate(asked)
    validate(asked, {"<end>"})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"not": {"type": "string"}}, "'not' at # is not supported"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "'type' at #/properties/a is \"strin\", not"),
        ({"type": "object", "properties": {"a/b": {"uniqueItems": True}}}, "'uniqueItems' at #/properties/a~1b"),
        ({"anyOf": [{"type": "integer"}, {"items": {"if": {}}}]}, "'if' at #/anyOf/1/items is not supported"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"contains": {}}}}, "'contains' at #/$defs/x"),
        ({"$ref": "#/$defs/x"}, "'$ref' at # refers to nothing"),
        ({"$ref": "http://elsewhere/x"}, "'$ref' at #"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern' at # is not a supported regular expression: look-around"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "'minLength' at # allows no value"),
        ({"type": "integer", "minimum": "a"}, "'minimum' at #"),
        ({"enum": []}, "'enum' at # is [], not a list"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "'allOf' at # allows no value"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' at # is not supported where"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "'required' at # allows no value"),
        (False, "at # allows no value"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "'not' at #"),
    ],
)
def test_bad_schemas_name_keyword_and_place(value: Any, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate(schema(value))
    assert refused.value.field == "structured_output.json_schema"
    assert told in refused.value.problem


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (StructuredOutput(regex="(a"), "structured_output.regex: "),
        (StructuredOutput(grammar="start: foo"), 'unknown name: "foo"'),
        (StructuredOutput(grammar="::= )("), "structured_output.grammar"),
        (StructuredOutput(structural_tag="{}"), "has no structures"),
        (StructuredOutput(structural_tag='{"structures": [{"begin": "<a>", "schema": {}}]}'), "has no triggers"),
        (
            StructuredOutput(structural_tag='{"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}'),
            "structures[0].begin '<a>' begins with no trigger",
        ),
        (
            StructuredOutput(
                structural_tag='{"structures": [{"begin": "<a>", "schema": {"not": {}}}], "triggers": ["<a"]}'
            ),
            "structures[0].schema: 'not' at # is not supported",
        ),
        (StructuredOutput(), "structured_output.json_schema: is missing"),
    ],
)
def test_other_kinds_are_refused_with_a_reason(asked: StructuredOutput, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate(asked)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
