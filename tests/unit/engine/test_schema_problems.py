"""A schema that can't be used is refused with the keyword and the path to it, however deep."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from ratoon.engine.grammars.schema_problems import MAX_TRIALS, SchemaProblem, find_invalid, find_unenforced, locate


def problem_of(text: str) -> str | None:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else None


def find_problem(schema: Any) -> SchemaProblem | None:
    invalid = find_invalid(schema)
    if invalid is not None:
        return invalid
    problem = problem_of(json.dumps(schema))
    return find_unenforced(schema) if problem is None else locate(schema, problem, problem_of)


def deep_inside(schema: Any) -> dict[str, Any]:
    """Behind a reference, beside parts that are usable; `never` can't be satisfied, and need not be."""
    return {
        "type": "object",
        "properties": {"never": False, "list": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Item"}}},
        "required": ["list"],
        "$defs": {"Item": {"type": "object", "properties": {"a/b": schema}, "required": ["a/b"]}},
    }


INVALID = [
    ({"type": "strin"}, "type", 'is "strin", not one or several of null'),
    ({"type": "integer", "minLength": "x"}, "minLength", "not a whole number"),
    ({"minItems": -1}, "minItems", "not a whole number of at least 0"),
    ({"multipleOf": 0}, "multipleOf", "not a number above 0"),
    ({"required": "a"}, "required", "not a list of names"),
    ({"properties": [1]}, "properties", "not an object of schemas"),
    ({"anyOf": []}, "anyOf", "not a list of one schema or more"),
    ({"enum": []}, "enum", "not a list of one value or more"),
    ({"items": 1}, "items", "not a schema"),
    ({"pattern": 3}, "pattern", "not text"),
    ({"uniqueItems": 1}, "uniqueItems", "not true or false"),
]
UNSUPPORTED = [
    ({"not": {}}, "not", "is not supported"),
    ({"if": {}, "then": {"type": "string"}}, "if", "is not supported"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "is not supported"),
    ({"type": "string", "format": "colour"}, "format", "unknown format: colour"),
    ({"type": "string", "pattern": "(?=x)"}, "pattern", "look-around"),
    ({"type": "string", "pattern": "("}, "pattern", "unclosed group"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf", "use 'anyOf'"),
    ({"type": "object", "minProperties": 3, "properties": {"a": {}}}, "minProperties", "can't be used"),
    ({"$ref": "#/nowhere"}, "$ref", "refers to nothing in this schema"),
    ({"$ref": "https://example.org/schema"}, "$ref", "refers to nothing in this schema"),
]
UNSATISFIABLE = [
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum", "minimum (5) is greater than maximum (3)"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allOf", "incompatible types"),
    ({"type": "object", "required": ["x"], "additionalProperties": False}, "required", "property 'x'"),
    ({"type": "string", "format": "date", "pattern": "^x"}, "format", "allows no text"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems", "greater than maxItems"),
]


@pytest.mark.parametrize(("schema", "keyword", "text"), [*INVALID, *UNSUPPORTED, *UNSATISFIABLE])
def test_keyword_and_path_are_named(schema: Any, keyword: str, text: str) -> None:
    for whole, path in ((schema, "#"), (deep_inside(schema), "#/$defs/Item/properties/a~1b")):
        found = find_problem(whole)
        assert found is not None
        assert (found.path, found.keyword) == (path, keyword)
        assert text in found.problem
        assert str(found).startswith(f"{keyword!r} at {path} ")


def test_a_whole_schema_may_be_the_problem() -> None:
    assert str(find_problem(False)) == "at # allows no value: it is false"
    assert str(find_problem([1])) == "at # is neither an object nor a boolean: [1]"
    assert str(find_problem({"items": [{}, 5]})) == "at #/items/1 is neither an object nor a boolean: 5"


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
OPTIONAL = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}


def test_what_the_library_does_not_enforce_is_refused() -> None:
    """{"a": 1, "a": 2} has two names for a grammar, and one for a parser."""
    counted = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
    assert str(find_problem({"items": counted})) == (
        "'minProperties' at #/items is not supported above 1 and the required names"
    )
    assert find_problem({**counted, "minProperties": 1}) is None
    named = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    assert find_problem({**counted, **named}) is None


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "#/$defs/node"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "#/$defs/a"),
    ],
)
def test_values_without_an_end_are_refused(schema: Any, path: str) -> None:
    assert str(find_problem(schema)) == f"at {path} allows no value: it would have to contain itself, for ever"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": []}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "properties": {"next": OPTIONAL}}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"never": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}},
        {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "$defs": {"node": NODE}},
    ],
)
def test_recursion_that_can_end_is_usable(schema: Any) -> None:
    assert find_problem(schema) is None


def test_a_deep_schema_is_refused_before_anything_recurses() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert "is nested too deeply" in str(find_invalid(schema))


@pytest.mark.parametrize("schema", [True, {}, deep_inside({"type": "integer"}), {"x-unknown": 3, "title": 5}])
def test_usable_schemas_have_no_problem(schema: Any) -> None:
    assert find_problem(schema) is None


def test_the_search_is_bounded() -> None:
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(5000)}}
    wide["properties"]["p4999"] = {"not": {}}  # type: ignore[index]
    num_calls = 0

    def count(text: str) -> str | None:
        nonlocal num_calls
        num_calls += 1
        return 'Unimplemented keys: ["not"]' if '"not"' in text else None

    found = locate(wide, 'Unimplemented keys: ["not"]', count)
    assert found.keyword == "not"
    assert num_calls <= MAX_TRIALS


def test_messages_stay_short() -> None:
    found = find_invalid({"type": "x" * 10_000})
    assert found is not None
    assert len(str(found)) < 300
