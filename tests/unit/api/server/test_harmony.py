"""Answers in the format of gpt-oss over HTTP: channels in chat, responses and messages, and what applies to them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.harmony import TEMPLATE, harmony_ids, harmony_tokenizer, write_tiny_gpt_oss
from tests.unit.api.server.harness import END, MAX_MODEL_LEN, MODEL, TINY_SETTINGS, Answer, Client, scripted
from tests.unit.api.server.test_tool_calls import gather
from tests.unit.engine.fakes import model_config
from tests.unit.engine.fakes_async import on_event_loop

THOUGHTS = "<|channel|>analysis<|message|>The user asks for rain.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SHORT = {"type": "function", "function": {"name": "weather"}}
MESSAGES_TOOL = {"name": "weather", "input_schema": PARAMETERS}
HELLO = [{"role": "user", "content": "Rain?"}]


def writing(text: str) -> Any:
    """A server whose model writes this."""
    ids = [*harmony_ids(text), END]
    tokenizer = harmony_tokenizer()
    config = model_config(vocab_size=tokenizer.vocab_size, max_position=MAX_MODEL_LEN)
    return scripted(lambda request, choice: ids, template=TEMPLATE, tokenizer=tokenizer, config=config)


def data_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream that has no [DONE] at its end."""
    return [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]


# ---- channels ----


@on_event_loop
async def test_a_chat_has_reasoning_calls_and_content():
    async with writing(THOUGHTS + FINAL) as client:
        (choice,) = (await client.chat("Rain?")).json()["choices"]
        assert choice["message"]["reasoning_content"] == "The user asks for rain."
        assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")
        message, finish_reason = gather((await client.chat("Rain?", stream=True)).events())
        assert (message["reasoning_content"], message["content"]) == ("The user asks for rain.", "It rains.")
        assert (message["tool_calls"], finish_reason) == ([], "stop")
    async with writing(THOUGHTS + PREAMBLE + CALL) as client:
        (choice,) = (await client.chat("Rain?", tools=[SHORT])).json()["choices"]
        message, finish_reason = gather((await client.chat("Rain?", tools=[SHORT], stream=True)).events())
        assert choice["finish_reason"] == finish_reason == "tool_calls"
        assert choice["message"]["content"] == message["content"] == "I look it up."
        assert choice["message"]["reasoning_content"] == message["reasoning_content"] == "The user asks for rain."
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [function]
        assert message["tool_calls"] == [function]


@on_event_loop
async def test_a_turn_behind_a_result_is_written_as_the_template_has_it():
    async with writing(THOUGHTS + FINAL) as client:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "5 mm"},
        ]
        body = {"model": MODEL, "messages": messages, "tools": [SHORT], "reasoning_effort": "high"}
        assert (await client.post("/v1/chat/completions", body)).status == 200
        prompt = harmony_tokenizer().backend.decode(
            client.engine.core.added[-1].prompt_token_ids, skip_special_tokens=False
        )
        assert "Reasoning: high" in prompt
        assert "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" in prompt
        assert prompt.endswith("<|channel|>commentary<|message|>5 mm<|end|><|start|>assistant")


@on_event_loop
async def test_a_response_has_an_item_for_each_channel():
    async with writing(THOUGHTS + FINAL) as client:
        body = {"model": MODEL, "input": "Rain?"}
        found = (await client.post("/v1/responses", body)).json()
        assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
        assert found["output"][0]["content"][0]["text"] == "The user asks for rain."
        assert found["output"][1]["content"][0]["text"] == "It rains."
        assert found["usage"]["output_tokens_details"]["reasoning_tokens"] >= len("The user asks for rain.")
        events = data_of(await client.post("/v1/responses", {**body, "stream": True}))
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert ("".join(deltas), "".join(thoughts)) == ("It rains.", "The user asks for rain.")
    async with writing(THOUGHTS + CALL) as client:
        body = {"model": MODEL, "input": "Rain?", "tools": [{"type": "function", "name": "weather"}]}
        found = (await client.post("/v1/responses", body)).json()
        assert [item["type"] for item in found["output"]] == ["reasoning", "function_call"]
        assert (found["output"][1]["name"], found["output"][1]["arguments"]) == ("weather", '{"city": "Oslo"}')
        events = data_of(await client.post("/v1/responses", {**body, "stream": True}))
        pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"city": "Oslo"}'


@on_event_loop
async def test_a_message_has_a_block_for_each_channel():
    async with writing(THOUGHTS + PREAMBLE + CALL) as client:
        body = {
            "model": MODEL,
            "max_tokens": 250,
            "messages": HELLO,
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        }
        found = (await client.post("/v1/messages", body)).json()
        assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
        assert found["content"][0]["thinking"] == "The user asks for rain."
        assert found["content"][1]["text"] == "I look it up."
        assert (found["content"][2]["name"], found["content"][2]["input"]) == ("weather", {"city": "Oslo"})
        assert found["stop_reason"] == "tool_use"
        events = data_of(await client.post("/v1/messages", {**body, "stream": True}))
        blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        for name, text in (
            ("thinking", "The user asks for rain."),
            ("text", "I look it up."),
            ("partial_json", '{"city": "Oslo"}'),
        ):
            assert "".join(delta.get(name, "") for delta in deltas) == text


# ---- what answers must match, with a model that samples ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("models") / MODEL)


def biased(*marks: str) -> dict[str, float]:
    """Makes the end of a message likely, which a random model would not write by itself."""
    return {str(harmony_ids(mark)[0]): 6.0 for mark in marks}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
SAMPLED = {"max_tokens": 400, "temperature": 1.0, "logit_bias": biased("<|end|>")}


@on_event_loop
async def test_a_form_applies_to_the_final_channel_of_every_protocol(folder):
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        client = Client(ServerContext(llm, ServerSettings()))
        answer = (await client.chat("x", **SAMPLED, response_format=SCHEMA, n=4, seed=1)).json()
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert json.loads(choice["message"]["content"]) in ("yes", "no")
        assert any(choice["message"].get("reasoning_content") for choice in answer["choices"]), "before the form"
        expression = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}
        bias = biased("<|end|>", "<|channel|>", "<|message|>", "<|start|>")
        # The way to the final message is free: a prompt that begins it makes it short.
        template = TEMPLATE.replace(
            "<|start|>assistant{% endif %}", "<|start|>assistant<|channel|>final<|message|>{% endif %}"
        )
        own = Client(ServerContext(llm, ServerSettings(chat_template=template)))
        fields = {**SAMPLED, "logit_bias": bias, **expression}
        (choice,) = (await own.chat("x", **fields, seed=2)).json()["choices"]
        assert re.fullmatch("[a-f]{3}-[0-9]{2}", choice["message"]["content"])
        body = {"model": MODEL, "input": "x", "max_output_tokens": 400, "logit_bias": SAMPLED["logit_bias"], "seed": 3}
        form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}}
        found = (await client.post("/v1/responses", {**body, "text": form})).json()
        assert json.loads(found["output"][-1]["content"][0]["text"]) in ("yes", "no")


@on_event_loop
async def test_required_and_named_calls_are_made(folder):
    other = {"type": "function", "function": {"name": "now"}}
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        client = Client(ServerContext(llm, ServerSettings()))
        answer = await client.chat("x", **SAMPLED, tools=[TOOL, other], tool_choice="required", n=4, seed=1)
        assert answer.status == 200, answer.body
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
            (call,) = choice["message"]["tool_calls"]
            schema = PARAMETERS if call["function"]["name"] == "weather" else {"const": {}}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        named = {"type": "function", "function": {"name": "weather"}}
        events = (
            await client.chat("x", **SAMPLED, tools=[TOOL, other], tool_choice=named, stream=True, seed=2)
        ).events()
        message, finish_reason = gather(events)
        assert finish_reason == "tool_calls" and [call["name"] for call in message["tool_calls"]] == ["weather"]
        jsonschema.validate(json.loads(message["tool_calls"][0]["arguments"]), PARAMETERS)
        body = {"model": MODEL, "max_tokens": 400, "messages": HELLO, "tools": [MESSAGES_TOOL]}
        choice = {"tool_choice": {"type": "tool", "name": "weather"}, "logit_bias": SAMPLED["logit_bias"], "seed": 3}
        found = (await client.post("/v1/messages", {**body, **choice})).json()
        assert found["stop_reason"] == "tool_use" and found["content"][-1]["name"] == "weather"
        jsonschema.validate(found["content"][-1]["input"], PARAMETERS)
        spaced = {"type": "function", "function": {"name": "two words"}}
        refused = await client.chat("x", tools=[spaced], tool_choice="required")
        assert (refused.status, refused.error["param"]) == (400, "tools[0].function.name")
