"""Forced tool calls over a real engine with a tiny model of random weights: whatever it samples, calls are valid."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import jsonschema
import pytest

from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS
from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.api.server.test_tool_calls import gather
from tests.unit.engine.fakes_async import on_event_loop

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
NOW = {"type": "function", "function": {"name": "now"}}
FIELDS = {"tools": [WEATHER, NOW], "max_tokens": 300, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder):
    """A function that makes a client of a server with these settings; the engine is the same."""
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield lambda **settings: Client(ServerContext(llm, ServerSettings(**settings)))


def check_calls(message: dict) -> list[str]:
    assert not message.get("content")
    functions = [call.get("function", call) for call in message["tool_calls"]]
    for function in functions:
        schema = PLACE if function["name"] == "weather" else {"const": {}}
        jsonschema.validate(json.loads(function["arguments"]), schema)
    return [function["name"] for function in functions]


@on_event_loop
async def test_required_and_named_calls_of_every_format(folder):
    async with serving(folder) as connect:
        for parser in TOOL_FORMATS:
            client = connect(tool_parser=parser)
            answer = await client.chat("x", **FIELDS, tool_choice="required", parallel_tool_calls=False, n=2, seed=1)
            for choice in answer.json()["choices"]:
                assert choice["finish_reason"] == "tool_calls"
                assert len(check_calls(choice["message"])) == 1
            named = {"type": "function", "function": {"name": "weather"}}
            events = (await client.chat("x", **FIELDS, tool_choice=named, stream=True, seed=2)).events()
            message, finish_reason = gather(events)
            assert (check_calls(message), finish_reason) == (["weather"], "tool_calls")


@on_event_loop
async def test_calls_come_behind_the_reasoning_of_a_prompt(folder):
    """The bias makes an end of the reasoning likely, which a random model would not write by itself."""
    template = "{{ tools | length }}{{ messages[0].content }}<think>"
    async with serving(folder) as connect:
        client = connect(chat_template=template, reasoning_parser="<think>...!")
        fields = {**FIELDS, "max_tokens": 400, "logit_bias": {str(ord("!")): 4.0}}
        answer = await client.chat("x", **fields, tool_choice="required", parallel_tool_calls=False, seed=3)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and "reasoning_content" in choice["message"]
        assert len(check_calls(choice["message"])) == 1


@on_event_loop
async def test_a_beam_search_calls_too(folder):
    async with serving(folder) as connect:
        fields = {"tools": [WEATHER], "max_tokens": 200, "use_beam_search": True, "beam_width": 2}
        answer = await connect().chat("x", **fields, tool_choice="required", parallel_tool_calls=False)
        assert answer.status == 200, answer.json()
        (choice,) = answer.json()["choices"]
        assert check_calls(choice["message"]) == ["weather"]


@on_event_loop
async def test_an_answer_with_a_form_may_call_or_answer(folder):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    async with serving(folder) as connect:
        answer = await connect().chat("x", **FIELDS, response_format=form, n=8, seed=4)
        for choice in answer.json()["choices"]:
            if choice["finish_reason"] == "tool_calls":
                check_calls(choice["message"])
            else:
                assert json.loads(choice["message"]["content"]) in ("yes", "no")


@on_event_loop
async def test_what_cannot_be_enforced_is_refused(folder):
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"x": {"type": "nothing"}}}}}
    async with serving(folder) as connect:
        answer = await connect().chat("x", tools=[WEATHER, bad], tool_choice="required")
        assert (answer.status, answer.error["param"]) == (400, "tools[1].function.parameters")
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        answer = await connect().chat("x", tools=[WEATHER], response_format=form)
        assert (answer.status, answer.error["param"]) == (400, "response_format.json_schema.schema")
