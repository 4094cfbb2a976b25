"""Texts that end under a grammar match it: random schemas, random logits, and jsonschema as the judge.

No model is needed: a model under a grammar is a choice among the tokens that the grammar allows, and ends where it may.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator, FormatChecker

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.validator import validate
from ratoon.execution.grammar.interface import CompiledGrammar, words_of
from ratoon.execution.grammar.llguidance_library import Llguidance
from tests.property.json_vocabulary import json_tokenizer
from tests.property.random_schemas import random_document, random_schema

NUM_PARTS = 4  # of all seeds, which may run side by side
SEEDS_OF_A_PART = 150
TEXTS_OF_A_SCHEMA = 6
MAX_TOKENS = 150
CHECKED_FORMATS = ("date", "uuid", "ipv4", "email")  # others jsonschema checks with further packages, or differently

OTHER_FORMATS = {
    "uuid": st.uuids().map(str)
}  # hypothesis-jsonschema has those of draft 7, and draws any text for others


@cache
def format_checker() -> FormatChecker:
    """jsonschema's own checks, and those of dates and times by Python's parser."""
    checker = FormatChecker(CHECKED_FORMATS)
    for name, parse in (("date-time", datetime.fromisoformat), ("time", time.fromisoformat)):

        def is_valid(value: object, parse: Callable[[str], Any] = parse) -> bool:
            return not isinstance(value, str) or parse(_in_microseconds(value.upper())).tzinfo is not None

        checker.checks(name, raises=ValueError)(is_valid)
    return checker


def _in_microseconds(moment: str) -> str:
    """The fraction of a second may have any number of digits, and Python reads six."""
    return re.sub(r"\.([0-9]+)", lambda found: "." + found[1][:6].ljust(6, "0"), moment)


@cache
def library() -> Llguidance:
    return Llguidance(json_tokenizer(), json_tokenizer().vocab_size)


@cache
def ending_tokens() -> np.ndarray:
    """Those that bring a text nearer to its end, [V]."""
    texts = [library().token_bytes(token) for token in range(library().vocab_size)]
    return np.array([any(byte in b'"}],:0123456789' for byte in text) for text in texts])


def random_text(grammar: CompiledGrammar, random: np.random.Generator) -> tuple[list[int], bool]:
    """The tokens, and whether the text has ended before MAX_TOKENS. Random logits prefer tokens that end something,
    some texts more than others."""
    state, tokens = grammar.begin(), []
    words = np.zeros(words_of(library().vocab_size), np.int32)
    bias = ending_tokens() * random.choice([0.0, 3.0, 6.0])
    ends = random.choice([0.3, 0.9])  # how likely an end is where it is possible
    while len(tokens) < MAX_TOKENS:
        state.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if state.is_accepting and (not len(allowed) or random.random() < ends):
            return tokens, True
        assert len(allowed), f"nothing can follow {text_of(tokens)!r}"
        logits = random.normal(size=len(allowed)) + bias[allowed]
        tokens.append(int(allowed[logits.argmax()]))
        assert state.consume(tokens[-1])
    return tokens, False


def text_of(tokens: list[int]) -> str:
    return json_tokenizer().decode(tokens)


def refusal_of(asked: StructuredOutput) -> RequestError | None:
    try:
        validate(asked)
    except RequestError as error:
        return error
    return None


def find_violations(schema: Any, text: str) -> list[str]:
    """Numbers are decimal ones: as a float, 20.7 is no multiple of 0.1."""
    decimals = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(decimals, format_checker=format_checker())
    return [error.message for error in validator.iter_errors(json.loads(text, parse_float=Decimal))]


@pytest.mark.parametrize("name", ["date", "time", "date-time"])
@pytest.mark.parametrize("further", [{}, {"pattern": "^[^9]*$"}, {"maxLength": 25}])
@pytest.mark.one_in(2)
def test_every_text_of_a_date_or_a_time_is_one(name: str, further: dict[str, Any]) -> None:
    """Digits are as likely as the grammar lets them be: second 60, the 30th of February or the year 0 would come."""
    schema = {"$defs": {"x": {"type": "string", "format": name, **further}}, "$ref": "#/$defs/x"}
    grammar = library().compile(StructuredOutput(json_schema=json.dumps(schema), disable_any_whitespace=True))
    random = np.random.default_rng(0)
    num_ended = 0
    for _ in range(400):
        tokens, ended = random_text(grammar, random)
        num_ended += ended
        assert not ended or not find_violations(schema, text_of(tokens)), text_of(tokens)
    assert num_ended > 200


@settings(max_examples=200)
@given(st.dates() | st.dates(max_value=date(400, 1, 1)), st.times(), st.data())
def test_a_date_and_a_time_are_possible_where_they_exist(day: date, moment: time, data: st.DataObject) -> None:
    text = f"{day.isoformat()}T{moment.isoformat()}"
    offset = data.draw(st.sampled_from(["Z", "z", "+00:00", "-23:59", "+05:30"]))
    assert matches(dates("date-time"), f'"{text}{offset}"')
    assert matches(dates("date"), f'"{day.isoformat()}"')
    for wrong in (
        f"{day.isoformat()}T23:59:60{offset}",
        f"{day.isoformat()}T24:00:00{offset}",
        f"{day.year:04}-02-30T00:00:00Z",
        f"0000{day.isoformat()[4:]}T00:00:00Z",
        text,
    ):
        assert not matches(dates("date-time"), f'"{wrong}"')
    last_of_february = (date(day.year, 3, 1) - timedelta(days=1)).day if day.year > 1 else 28
    assert matches(dates("date"), f'"{day.year:04}-02-29"') == (last_of_february == 29)


@cache
def dates(name: str) -> CompiledGrammar:
    return library().compile(StructuredOutput(json_schema=json.dumps({"type": "string", "format": name})))


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.one_in(2)
def test_no_text_that_ends_violates_its_schema(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * SEEDS_OF_A_PART, (part + 1) * SEEDS_OF_A_PART):
        schema = random_document(Random(seed))
        asked = StructuredOutput(json_schema=json.dumps(schema))
        refusal = refusal_of(asked)
        if refusal is not None:
            assert refusal.field == "structured_output.json_schema"
            assert " #" in refusal.problem  # the path
            counts["refused"] += 1
            continue
        grammar = library().compile(asked)
        random = np.random.default_rng(seed)
        for _ in range(TEXTS_OF_A_SCHEMA):
            tokens, ended = random_text(grammar, random)
            counts["ended" if ended else "cut"] += 1
            if ended:
                text = text_of(tokens)
                assert not (found := find_violations(schema, text)), (seed, schema, text, found)
    # The test would show nothing if most schemas were refused, or if most texts did not end.
    assert counts["refused"] < SEEDS_OF_A_PART / 3
    assert counts["ended"] > 3 * counts["cut"]


def matches(grammar: CompiledGrammar, text: str) -> bool:
    state = grammar.begin()
    return all(state.consume(token) for token in json_tokenizer().encode(text)) and state.is_accepting


@settings(max_examples=60)
@given(st.data())
def test_every_value_of_a_schema_is_possible(data: st.DataObject) -> None:
    """Without objects, whose properties have a fixed order; values are by hypothesis-jsonschema."""
    schema = random_schema(Random(data.draw(st.integers(0, 400))), depth=2, objects=False)
    asked = StructuredOutput(json_schema=json.dumps(schema))
    if refusal_of(asked) is not None:
        return
    value = data.draw(from_schema(schema, custom_formats=OTHER_FORMATS))
    text = json.dumps(value, ensure_ascii=False)
    if "\\u" not in text and "e" not in text.replace("true", "").replace("false", "") and not _has_whole_float(value):
        assert matches(library().compile(asked), text), (schema, text)


def _has_whole_float(value: Any) -> bool:
    """1.0 is an integer for JSON Schema, and is not generated."""
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


NAMES = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
PATTERNS = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NAMES, r'{"\u0061": "x"}'),
        (NAMES, '{"a": 1, "a": "x"}'),
        (NAMES, r'{"a": 1, "\u0061": "x"}'),
        (PATTERNS, r'{"\u0061": "x"}'),
        ({"type": "string", "pattern": "^[^a]*$"}, r'"\u0061"'),
        ({"type": "string", "maxLength": 1}, '"ab"'),
        ({"type": "string"}, r'"\ud800"'),
        ({"type": "integer"}, "1.5"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "{}"),
    ],
)
def test_other_ways_to_write_what_a_schema_forbids_are_forbidden(schema: Any, text: str) -> None:
    assert not matches(library().compile(StructuredOutput(json_schema=json.dumps(schema))), text)


@pytest.mark.parametrize("name", ["\x01", "\x7f", "a\nb", "ü", "\\", '"', "/"])
def test_constants_of_any_characters_can_be_written(name: str) -> None:
    grammar = library().compile(StructuredOutput(json_schema=json.dumps({"const": name})))
    tokens, ended = random_text(grammar, np.random.default_rng(0))
    assert ended
    assert json.loads(text_of(tokens)) == name


CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BOTH = {"allOf": [{"$ref": "#/$defs/City"}, {"properties": {"size": {"type": "integer"}}}], "$defs": {"City": CITY}}


@pytest.mark.parametrize("as_tag", [False, True])
@pytest.mark.parametrize(
    ("schema", "text", "further"),
    [
        (CITY, '{"name": "x"}', '{"name": "x", "y": 1}'),
        ({"type": "array", "items": CITY}, '[{"name": "x"}]', '[{"name": "x", "y": 1}]'),
        (BOTH, '{"name": "x", "size": 1}', '{"name": "x", "size": 1, "y": 1}'),
    ],
)
def test_objects_are_closed_unless_additional_properties_are_allowed(
    schema: Any, text: str, further: str, as_tag: bool
) -> None:
    def is_possible(text: str, **options: bool) -> bool:
        if as_tag:
            tag = {"format": {"type": "json_schema", "json_schema": schema}}
            return matches(library().compile(StructuredOutput(structural_tag=tag, **options)), text)
        return matches(library().compile(StructuredOutput(json_schema=schema, **options)), text)

    assert is_possible(text)
    assert not is_possible(further)
    assert is_possible(further, allow_additional_properties=True)
    assert is_possible(further, disable_additional_properties=False)  # vLLM's name
    assert not is_possible(further, disable_additional_properties=True)
