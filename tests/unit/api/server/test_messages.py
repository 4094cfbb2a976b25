"""/v1/messages: Anthropic's protocol over a scripted engine, checked against the types of its client."""

from __future__ import annotations

import json

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from ratoon.api.server.protocol.messages import MessageAnswer, MessagesErrorAnswer, TokensCount
from tests.unit.api.server.harness import MODEL, TEMPLATE, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

PATH = "/v1/messages"
EVENT = TypeAdapter(RawMessageStreamEvent)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES = TEMPLATE + "{# <tool_call> #}"
THINKING = TEMPLATE + "{# </think> #}{% if enable_thinking %}<think>{% endif %}"


async def create(client, messages=HELLO, status=200, **fields):
    answer = await client.post(PATH, {"model": MODEL, "max_tokens": 200, "messages": messages, **fields})
    assert answer.status == status, answer.body
    found = answer.json()
    if status == 200:
        MessageAnswer.model_validate(found)
        AnthropicMessage.model_validate(found)
    else:
        MessagesErrorAnswer.model_validate(found)
    return found


async def stream(client, messages=HELLO, **fields):
    answer = await client.post(
        PATH, {"model": MODEL, "max_tokens": 200, "messages": messages, "stream": True, **fields}
    )
    assert answer.status == 200
    events = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    return events


def prompt_of(client):
    return bytes(client.engine.core.added[-1].prompt_token_ids).decode()


@on_event_loop
async def test_an_answer_has_all_fields():
    async with scripted(say("Good day")) as client:
        found = await create(client, system=[{"type": "text", "text": "Be kind"}])
        assert found["content"] == [{"type": "text", "text": "Good day"}] and found["id"].startswith("msg_")
        assert (found["stop_reason"], found["stop_sequence"], found["role"]) == ("end_turn", None, "assistant")
        prompt = "<system>Be kind\n<user>Hello\n<assistant>"
        assert prompt_of(client) == prompt
        assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == len(prompt)
        assert found["usage"]["output_tokens"] == len("Good day") + 1


@on_event_loop
async def test_events_come_in_anthropics_order():
    async with scripted(say(f"Hm {CALL}{CALL}"), template=HERMES) as client:
        events = await stream(client, tools=[TOOL])
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
        blocks, texts = [], {}
        for event in events[1:-2]:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append(event["content_block"])
                case "content_block_delta":
                    assert event["index"] == len(blocks) - 1
                    delta = event["delta"]
                    texts[event["index"]] = texts.get(event["index"], "") + (
                        delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
                    )
                case "content_block_stop":
                    assert event["index"] == len(blocks) - 1
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
        assert texts[0] == "Hm" and json.loads(texts[1]) == json.loads(texts[2]) == {"a": 1}
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        whole = await create(client, tools=[TOOL])
        assert whole["content"][1]["input"] == {"a": 1} and whole["stop_reason"] == "tool_use"
        assert whole["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"]


@on_event_loop
async def test_reasoning_is_a_block_of_its_own():
    async with scripted(say("let me see</think>Yes"), template=THINKING) as client:
        found = await create(client, thinking={"type": "enabled", "budget_tokens": 2000})
        assert found["content"] == [
            {"type": "thinking", "thinking": "let me see", "signature": ""},
            {"type": "text", "text": "Yes"},
        ]
        events = await stream(client, thinking={"type": "enabled", "budget_tokens": 2000})
        kinds = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
        assert kinds == {"thinking_delta", "text_delta"}
        await create(client, thinking={"type": "disabled"})
        assert not prompt_of(client).endswith("<think>")


@on_event_loop
async def test_calls_and_results_go_back_through_the_template():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{{ m.name }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}{% endfor %}"
    )
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "Go on"},
            ],
        },
    ]
    async with scripted(say("x"), template=template) as client:
        await create(client, messages)
        assert prompt_of(client) == "<user>Hello<assistant>hmWait.[add 1]<tool>2add<user>Go on"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 4}, "max_tokens", None, "Good"),
        ({"stop_sequences": ["d d"]}, "stop_sequence", "d d", "Goo"),
        ({"max_tokens": 100}, "end_turn", None, "Good day"),
    ],
)
@on_event_loop
async def test_the_reason_of_the_end_is_told(fields, reason, sequence, text):
    async with scripted(say("Good day")) as client:
        found = await create(client, **fields)
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
        assert found["content"][0]["text"] == text


@on_event_loop
async def test_an_answer_that_fills_the_context_says_so():
    async with scripted(say("x" * 600)) as client:
        found = await create(client, max_tokens=100_000)
        assert found["stop_reason"] == "model_context_window_exceeded"


@on_event_loop
async def test_the_last_message_may_begin_the_answer():
    async with scripted(say(" day")) as client:
        found = await create(client, [*HELLO, {"role": "assistant", "content": "Good"}])
        assert prompt_of(client).endswith("<assistant>Good") and found["content"][0]["text"] == " day"


@on_event_loop
async def test_tokens_are_counted():
    async with scripted(say("x")) as client:
        answer = await client.post(f"{PATH}/count_tokens", {"model": MODEL, "messages": HELLO, "tools": [TOOL]})
        TokensCount.model_validate(answer.json())
        counted = answer.json()["input_tokens"]
        usage = (await create(client, tools=[TOOL]))["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@on_event_loop
async def test_errors_have_anthropics_form():
    async with scripted(say("x"), api_keys=("sk-a",)) as client:
        found = await create(client, status=401)
        assert found["type"] == "error" and found["error"]["type"] == "authentication_error"
        client.headers = {"x-api-key": "sk-a"}
        await create(client)
        assert (await create(client, model="other", status=404))["error"]["type"] == "not_found_error"
        found = await create(client, [{"role": "user", "content": "x" * 600}], status=400)
        assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"].startswith("messages:")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nurse", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "x"}]}]},
         "messages[0].content[0].input"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)  # fmt: skip
@on_event_loop
async def test_a_wrong_request_names_the_place(body, place):
    async with scripted(say("x")) as client:
        found = await create(client, status=400, **{"messages": HELLO, **body})
        assert found["error"]["message"].startswith(f"{place}"), found
