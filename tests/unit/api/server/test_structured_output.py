"""Structured output over HTTP: every way to ask for it, what contradicts, and errors in the body's names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ratoon.core.params import BeamSearchParams
from ratoon.core.structured import StructuredOutput
from tests.unit.api.server.harness import Client, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
STRUCTURES = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
TAG = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<f>"]}
OF_SCHEMA = StructuredOutput(json_schema=TEXT)
OF_CHOICE = StructuredOutput(choice=["a", "b"])
OF_TAG = StructuredOutput(structural_tag=json.dumps(TAG))
ANY_OBJECT = StructuredOutput(json_object=True)


def asked(client: Client) -> StructuredOutput | None:
    """Without what was measured when it was checked."""
    found = client.engine.core.added[-1].params.structured_output
    return None if found is None else msgspec.structs.replace(found, num_bytes=None, is_large=False)


async def answers(client: Client, fields: dict[str, Any]) -> list[Any]:
    return [await client.complete(prompt="x", **fields), await client.chat("x", **fields)]


WAYS: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, OF_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA},
            }
        },
        OF_SCHEMA,
    ),
    ({"response_format": TAG}, OF_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": TEXT, "regex": None, "disable_fallback": True}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "[ab]+"}}, StructuredOutput(regex="[ab]+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, OF_CHOICE),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput(grammar='start: "a"')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, OF_TAG),
    (
        {"structured_outputs": {"choice": ["a", "b"], "begins_after": "</think>"}},
        StructuredOutput(choice=["a", "b"], begins_after="</think>"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutput(json_schema=TEXT, disable_any_whitespace=True),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "allow_additional_properties": True}},
        StructuredOutput(json_schema=TEXT, allow_additional_properties=True),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        StructuredOutput(json_schema=TEXT, allow_additional_properties=True),
    ),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, OF_SCHEMA),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": TEXT, "guided_decoding_backend": "xgrammar"}, OF_SCHEMA),
    (
        {"guided_json": TEXT, "guided_whitespace_pattern": " ?"},
        StructuredOutput(json_schema=TEXT, whitespace_pattern=" ?"),
    ),
    ({"guided_json_object": True}, ANY_OBJECT),
    ({"guided_json_object": False, "guided_regex": "a+"}, StructuredOutput(regex="a+")),
    ({"guided_choice": ["a", "b"]}, OF_CHOICE),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutput(grammar='root ::= "a"')),
    ({"structural_tag": TAG}, OF_TAG),
    ({"response_format": {"type": "text"}, "guided_choice": ["a", "b"]}, OF_CHOICE),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
]


@on_event_loop
async def test_fields_become_params():
    async with scripted(say('{"a": 1}')) as client:  # one for all, because its processes check grammars
        for fields, meant in WAYS:
            for answer in await answers(client, fields):
                assert answer.status == 200, (fields, answer.body)
                assert asked(client) == meant, fields


@on_event_loop
async def test_a_beam_search_has_it_too():
    async with scripted(say("a")) as client:
        for answer in await answers(client, {"use_beam_search": True, "beam_width": 2, "guided_choice": ["a", "b"]}):
            assert answer.status == 200, answer.body
            assert isinstance(client.engine.core.added[-1].params, BeamSearchParams)
            assert asked(client) == OF_CHOICE


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "is unknown; 'text', 'json_object'"),
        ({"response_format": "json"}, "response_format", "is not an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strickt": True}}},
            "response_format.json_schema.strickt",
            "did you mean strict?",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "neither an object nor JSON text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
            "response_format.json_schema.schema",
            "is not JSON",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "has no meaning with the type json_object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of structured_outputs.json, structured_outputs.json_o"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "does not say what the answer must"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "structured_outputs.regex",
            "contradicts structured_outputs.json;",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean regex?"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "is not text"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is empty"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "is not text"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "not an object"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", "has 300000 characters"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "contradicts guided_json;"),
        ({"guided_json": 5}, "guided_json", "neither an object nor JSON text"),
        ({"guided_grammar": ""}, "guided_grammar", "is empty"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "does not say what"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "contradicts response_format; leave one of them out",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "contradicts response_format",
        ),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice", "contradicts structured_out"),
        ({"guided_whatever": 1}, "guided_whatever", "use response_format, or structured_outputs"),
        ({"grammar": "x"}, "grammar", "use structured_outputs.grammar"),
        ({"regex": "x"}, "regex", "use structured_outputs.regex"),
    ],
)
@on_event_loop
async def test_errors_name_the_field_of_the_body(fields, param, text):
    async with scripted(say("x")) as client:
        for answer in await answers(client, fields):
            assert answer.status == 400, answer.body
            assert answer.error["param"] == param
            assert text in answer.error["message"]
        assert not client.engine.core.added


@on_event_loop
async def test_a_lenient_server_ignores_unknown_fields_inside():
    async with scripted(say("x"), lenient=True) as client:
        inner = {"schema": SCHEMA, "unknown": 1}
        for answer in await answers(client, {"response_format": {"type": "json_schema", "json_schema": inner}}):
            assert answer.status == 200, answer.body
            assert asked(client) == OF_SCHEMA
