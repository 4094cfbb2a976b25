"""Objects of a JSON schema are closed where that excludes nothing that the schema names."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ratoon.core.closed_objects import close_objects

A, B = {"type": "integer"}, {"type": "string"}


def closed(*names: str) -> dict[str, Any]:
    return {"properties": dict.fromkeys(names, True), "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"properties": {"a": A}}, {"properties": {"a": A}, "additionalProperties": False}),
        (
            {"properties": {"a": {"properties": {"b": B}}}, "additionalProperties": True},
            {
                "properties": {"a": {"properties": {"b": B}, "additionalProperties": False}},
                "additionalProperties": True,
            },
        ),
        (
            {"items": {"properties": {}}, "$defs": {"X": {"properties": {"a": A}}}},
            {
                "items": {"properties": {}, "additionalProperties": False},
                "$defs": {"X": {"properties": {"a": A}, "additionalProperties": False}},
            },
        ),
        # Alternatives are closed each by itself, and a single part of allOf as if it stood alone.
        (
            {"anyOf": [{"properties": {"a": A}}, {"properties": {"b": B}}, {"type": "null"}]},
            {
                "anyOf": [
                    {"properties": {"a": A}, "additionalProperties": False},
                    {"properties": {"b": B}, "additionalProperties": False},
                    {"type": "null"},
                ]
            },
        ),
        (
            {"allOf": [{"$ref": "#/$defs/X"}], "default": {}, "$defs": {"X": {"properties": {"a": A}}}},
            {
                "allOf": [{"$ref": "#/$defs/X"}],
                "default": {},
                "$defs": {"X": {"properties": {"a": A}, "additionalProperties": False}},
            },
        ),
        # A property that is required and nowhere described may have any value.
        (
            {"properties": {"a": A}, "required": ["a", "b"]},
            {"properties": {"a": A, "b": True}, "required": ["a", "b"], "additionalProperties": False},
        ),
        (
            {"properties": {"a": A}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {
                "properties": {"a": A, "b": True},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_have_the_properties_that_are_named(schema: Any, meant: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == meant
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"properties": {"a": A}, "additionalProperties": B},
        {"patternProperties": {"^x": A}, "properties": {"a": A}},
        {"const": {"properties": {"a": A}}, "enum": [{"properties": {}}], "default": {"properties": {}}},
    ],
)
def test_what_says_otherwise_and_what_is_no_schema_stays(schema: Any) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_be_called_properties() -> None:
    found = close_objects({"properties": {"properties": {"type": "array"}, "type": {"const": "object"}}})
    assert list(found["properties"]) == ["properties", "type"]
    assert found["properties"]["properties"] == {"type": "array"}


def test_several_descriptions_of_one_object_are_closed_together() -> None:
    base, own = {"properties": {"a": A}, "required": ["c"]}, {"properties": {"b": B}}
    assert close_objects({"allOf": [base, own]}) == {"allOf": [base, own, closed("b", "a", "c")]}
    assert close_objects({**own, "anyOf": [base, {"properties": {"d": A}}]})["allOf"] == [closed("b", "d", "a", "c")]
    # The base stays open for those that extend it, through references as well.
    document = {"$defs": {"Base": base}, "properties": {"x": {"$ref": "#/$defs/Base", **own}}}
    found = close_objects(document)
    assert found["$defs"]["Base"] == base
    assert found["properties"]["x"] == {"$ref": "#/$defs/Base", **own, "allOf": [closed("b", "a", "c")]}
    assert found["additionalProperties"] is False
    # One of them allows more.
    free = {"allOf": [{**base, "additionalProperties": True}, own]}
    assert close_objects(free) == free


@pytest.mark.parametrize("reference", ["#", "#/$defs/a~1b%20c", "#/$defs/missing", "#anchor", "other.json", 7])
def test_references_are_followed_without_an_end(reference: Any) -> None:
    schema = {"$defs": {"a/b c": {"properties": {"a": A}}}, "$ref": reference}
    found = close_objects(schema)
    assert found["$defs"]["a/b c"]["additionalProperties"] is False


@pytest.mark.slow
def test_a_schema_of_nothing_but_references_takes_no_long_time() -> None:
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}
    chain["d3000"] = {"properties": {"a": A}}
    begin = time.process_time()
    close_objects({"$defs": chain, "properties": {"a": {"$ref": "#/$defs/d0"}}})
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "wrong", [{"properties": 1}, {"allOf": 1}, {"allOf": [1]}, {"required": 1}, {"required": [{}]}]
)
def test_malformed_schemas_are_left_to_the_validator(wrong: Any) -> None:
    close_objects({"properties": {"a": wrong}, "allOf": [{"properties": {}}]})
    close_objects({"properties": {"b": A}, **wrong})
