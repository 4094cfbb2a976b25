"""Structured output of a server over a real engine with a tiny model of random weights: what it writes matches."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
GBNF = 'root ::= ("ab" | "c")+ "."'
TAG = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder):
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


def texts_of(body: dict[str, Any]) -> list[str]:
    return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]


@on_event_loop
async def test_answers_match_what_was_asked(folder):
    async with serving(folder) as client:
        fields = {"prompt": "x", "max_tokens": 100, "n": 4, "seed": 1, "temperature": 2}
        asked = [COMPACT, {"choice": ["yes", "no"]}, {"regex": "[a-c]{3}-[0-9]{2}"}, {"grammar": GBNF}]
        answers = await asyncio.gather(*(client.complete(**fields, structured_outputs=what) for what in asked))
        objects, choices, expressions, sentences = [answer.json() for answer in answers]
        for body in (objects, choices, expressions):
            assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
        for text in texts_of(objects):
            jsonschema.validate(json.loads(text), SCHEMA)
        assert set(texts_of(choices)) <= {"yes", "no"}
        assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", text) for text in texts_of(expressions))
        assert all(re.fullmatch(r"(ab|c)*a?\.?", text) for text in texts_of(sentences))
        assert len({*texts_of(objects), *texts_of(expressions)}) > 2  # choices differ


@on_event_loop
async def test_a_stream_has_the_same_text(folder):
    async with serving(folder) as client:
        fields = {"max_tokens": 100, "seed": 3, "structured_outputs": COMPACT}
        whole = (await client.chat("x", **fields)).json()
        events = (await client.chat("x", stream=True, **fields)).events()
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
        assert "".join(pieces) == texts_of(whole)[0]
        jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


@on_event_loop
async def test_max_tokens_inside_the_grammar_is_told(folder):
    async with serving(folder) as client:
        body = (await client.complete(prompt="x", max_tokens=5, structured_outputs=COMPACT)).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert texts_of(body)[0].startswith("{")


@on_event_loop
async def test_a_continuation_goes_on_in_the_grammar(folder):
    async with serving(folder) as client:
        begun = (await client.complete(prompt="x", max_tokens=9, seed=1, structured_outputs=COMPACT)).json()
        assert begun["choices"][0]["finish_reason"] == "length"
        fields = {"continuation_of": begun["id"], "max_tokens": 100, "seed": 2}
        ended = (await client.complete(**fields, structured_outputs={"continue_grammar": True})).json()
        jsonschema.validate(json.loads(texts_of(begun)[0] + texts_of(ended)[0]), SCHEMA)
        other = (await client.complete(**fields, structured_outputs={"choice": ["yes", "no"]})).json()
        assert texts_of(other)[0] in ("yes", "no")
        alone = await client.complete(prompt="x", structured_outputs={"continue_grammar": True})
        assert (alone.status, alone.error["param"]) == (400, "structured_outputs.continue_grammar"), alone.body


@on_event_loop
async def test_free_text_comes_before_a_marker(folder):
    async with serving(folder) as client:
        bias = {str(byte): 6 for byte in b"<>"}
        asked = {"choice": ["yes", "no"], "begins_after": "<>"}
        fields = {"max_tokens": 300, "seed": 4, "logit_bias": bias, "structured_outputs": asked}
        body = (await client.complete(prompt="x", **fields)).json()
        before, marker, after = texts_of(body)[0].partition("<>")
        assert before and marker
        assert after in ("yes", "no")
        assert body["choices"][0]["finish_reason"] == "stop"


@on_event_loop
async def test_parts_behind_triggers_match_their_schema(folder):
    async with serving(folder) as client:
        bias = {str(byte): 5 for byte in b"<f>"} | {str(byte): -20 for byte in b" \t\r\n"}
        fields = {"max_tokens": 400, "seed": 1, "n": 4, "logit_bias": bias, "structural_tag": TAG}
        texts = texts_of((await client.complete(prompt="x", **fields)).json())
        parts = [part for text in texts for part in re.findall(r"<f>(.*?)</f>", text, re.DOTALL)]
        assert parts
        for part in parts:
            jsonschema.validate(json.loads(part), SCHEMA)


@on_event_loop
async def test_a_tree_of_formats_is_followed(folder):
    async with serving(folder) as client:
        thought = {"type": "tag", "begin": "<t>", "content": {"type": "regex", "pattern": "[a-z]{3}"}, "end": "</t>"}
        answer = {"type": "json_schema", "json_schema": {"type": "boolean"}}
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [thought, answer]}}
        for asked in (
            {"response_format": tag},
            {"structured_outputs": {"structural_tag": tag}},
            {"structural_tag": tag},
        ):
            body = (await client.complete(prompt="x", max_tokens=60, seed=1, **asked)).json()
            assert re.fullmatch(r"<t>[a-z]{3}</t>(true|false)", texts_of(body)[0]), body
        tag["format"]["elements"].insert(0, {"type": "any_text"})
        refused = await client.complete(prompt="x", response_format=tag)
        assert (refused.status, refused.error["param"]) == (400, "response_format"), refused.body
        assert "format.elements[0] is free text" in refused.error["message"]
        misplaced = await client.complete(prompt="x", response_format={"type": "text", "format": {"type": "any_text"}})
        assert (misplaced.status, misplaced.error["param"]) == (400, "response_format.format")


@on_event_loop
async def test_beams_stay_in_the_grammar(folder):
    async with serving(folder) as client:
        search = {"use_beam_search": True, "beam_width": 3, "n": 3, "max_tokens": 100}
        body = (await client.complete(prompt="x", **search, structured_outputs=COMPACT)).json()
        found = [choice for choice in body["choices"] if choice["finish_reason"] == "stop"]
        assert found
        for choice in found:
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)


@on_event_loop
async def test_a_search_returns_as_many_choices_as_there_are_texts(folder):
    async with serving(folder) as client:
        search = {"use_beam_search": True, "beam_width": 5, "n": 4, "max_tokens": 20}
        asked = {**search, "structured_outputs": {"choice": ["yes", "no"]}}
        for answer in (await client.complete(prompt="x", **asked), await client.chat("x", **asked)):
            assert sorted(texts_of(answer.json())) == ["no", "yes"], answer.body
        for streamed in (
            await client.complete(prompt="x", stream=True, **asked),
            await client.chat("x", stream=True, **asked),
        ):
            choices = [choice for event in streamed.events() for choice in event["choices"]]
            assert {choice["index"] for choice in choices} == {0, 1}
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop", "stop"]


@on_event_loop
async def test_other_requests_are_not_constrained(folder):
    async with serving(folder) as client:
        alone = (await client.complete(prompt="x", max_tokens=20, temperature=0, ignore_eos=True)).json()
        free, bound = await asyncio.gather(
            client.complete(prompt="x", max_tokens=20, temperature=0, ignore_eos=True),
            client.complete(prompt="x", max_tokens=20, structured_outputs={"choice": ["yes", "no"]}),
        )
        assert texts_of(free.json()) == texts_of(alone)
        assert texts_of(bound.json())[0] in ("yes", "no")


BAD = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD, "strict": True}}},
            "response_format.json_schema.schema",
            "'not' at #/properties/a is not supported",
        ),
        ({"guided_json": BAD}, "guided_json", "'not' at #/properties/a"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json", "'type' at #"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "allows no value"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag", "has no structures"),
        (
            {"response_format": {"type": "structural_tag", **TAG, "triggers": ["<g>"]}},
            "response_format",
            "begins with no trigger",
        ),
        (
            {"structured_outputs": {"json": {"enum": ["x" * 200_000]}}},
            "structured_outputs.json",
            "characters",
        ),
    ],
)
@on_event_loop
async def test_what_can_not_be_compiled_is_a_400(folder, fields, param, text):
    async with serving(folder) as client:
        for answer in (
            await client.chat("x", **fields),
            await client.complete(prompt="x", **fields),
            await client.complete(prompt="x", stream=True, **fields),
        ):
            assert (answer.status, answer.error["param"]) == (400, param), answer.body
            assert text in answer.error["message"]
            assert "\n" not in answer.error["message"]
