"""Chat: tool calls and reasoning, split from the text of a scripted engine, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from tests.unit.api.server.harness import END, MODEL, TEMPLATE, Client, byte_tokenizer, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
ARGUMENTS = '{"a": 1, "b": "é"}'
HERMES = TEMPLATE + "{# <tool_call> #}"
THINKING = TEMPLATE + "{# </think> #}"
OPEN = (
    THINKING + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
)


def gather(events: list[Any], choice: int = 0) -> tuple[dict[str, Any], str]:
    """What a client makes of a stream: the message, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = ""
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for found in event["choices"]:
            if found["index"] != choice:
                continue
            delta = found["delta"]
            finish_reason = found["finish_reason"] or finish_reason
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function" and call["function"]["arguments"] == ""
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call["function"]) == {"arguments"} and call["function"]["arguments"]
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, finish_reason


@on_event_loop
async def test_a_call_is_in_the_answer_as_openai_has_it():
    async with scripted(say(f"One moment.\n<tool_call>\n{CALL}\n</tool_call>"), template=HERMES) as client:
        answer = (await client.chat("1+1?", tools=[TOOL])).json()
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "One moment."}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


@on_event_loop
async def test_a_stream_has_openais_deltas():
    async with scripted(say(f"Hm <tool_call>{CALL}</tool_call>"), template=HERMES) as client:
        events = (await client.chat("x", tools=[TOOL], stream=True, stream_options={"include_usage": True})).events()
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first = next(delta for delta in deltas if "tool_calls" in delta)
    (call,) = first["tool_calls"]
    assert set(call) == {"index", "id", "type", "function"}
    assert call["function"] == {"name": "add", "arguments": ""}
    assert deltas[-1] == {} and events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    message, finish_reason = gather(events)
    assert message == {
        "content": "Hm",
        "reasoning_content": "",
        "tool_calls": [{"name": "add", "arguments": ARGUMENTS}],
    }
    assert finish_reason == "tool_calls"
    assert events[-1]["usage"]["completion_tokens"] == len(f"Hm <tool_call>{CALL}</tool_call>".encode()) + 1


@on_event_loop
async def test_choices_have_parsers_of_their_own():
    texts = (f"<tool_call>{CALL}</tool_call>", "no call", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}")
    async with scripted(say(*texts), template=HERMES) as client:
        whole = (await client.chat("x", tools=[TOOL], n=3)).json()["choices"]
        events = (await client.chat("x", tools=[TOOL], n=3, stream=True)).events()
        single = (await client.chat("x", tools=[TOOL], n=3, parallel_tool_calls=False)).json()["choices"]
    assert [len(choice["message"].get("tool_calls", ())) for choice in whole] == [1, 0, 2]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "tool_calls"]
    assert whole[1]["message"] == {"role": "assistant", "content": "no call"}
    assert whole[0]["message"]["content"] is None
    assert [len(choice["message"].get("tool_calls", ())) for choice in single] == [1, 0, 1]
    for index, choice in enumerate(whole):
        message, finish_reason = gather(events, index)
        assert finish_reason == choice["finish_reason"]
        assert message["content"] == (choice["message"]["content"] or "")
        assert message["tool_calls"] == [call["function"] for call in choice["message"].get("tool_calls", ())]


@on_event_loop
async def test_a_call_that_max_tokens_cuts_says_length():
    def cut(request: Any, choice: int) -> list[int]:
        return list(f"<tool_call>{CALL}".encode())[: request.params.max_tokens]

    async with scripted(cut, template=HERMES) as client:
        (choice,) = (await client.chat("x", tools=[TOOL], max_tokens=50)).json()["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] and ARGUMENTS.startswith(call["function"]["arguments"])


@on_event_loop
async def test_without_tools_nothing_is_parsed():
    text = f"<tool_call>{CALL}</tool_call>"
    async with scripted(say(text), template=HERMES) as client:
        for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
            (choice,) = (await client.chat("x", **fields)).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("json", CALL),
        ("llama3_json", f"<|python_tag|>{CALL}"),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("hermes", f"<tool_call>{CALL}</tool_call>"),
    ],
)
@on_event_loop
async def test_the_parser_can_be_named(parser, text):
    async with scripted(say(text), template=HERMES, tool_parser=parser) as client:
        (choice,) = (await client.chat("x", tools=[TOOL])).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


def tokenizer_with(*special: str) -> Any:
    tokenizer = byte_tokenizer(HERMES)
    tokenizer.backend.add_special_tokens(list(special))
    return tokenizer


@on_event_loop
async def test_marks_that_are_special_tokens_reach_the_parser():
    tokenizer = tokenizer_with("[TOOL_CALLS]")
    script = lambda request, choice: [tokenizer.special_token_id("[TOOL_CALLS]"), *f"[{CALL}]".encode(), END]  # noqa: E731
    async with scripted(script, tokenizer=tokenizer, tool_parser="mistral") as client:
        (choice,) = (await client.chat("x", tools=[TOOL])).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert not client.engine.core.added[-1].params.skip_special_tokens
        await client.chat("x")
        assert client.engine.core.added[-1].params.skip_special_tokens


@on_event_loop
async def test_reasoning_is_apart_from_content():
    async with scripted(say("<think>\nHm.\n</think>\n\nYes."), template=THINKING) as client:
        (choice,) = (await client.chat("x")).json()["choices"]
        events = (await client.chat("x", stream=True)).events()
        (short,) = (await client.chat("x", include_reasoning=False)).json()["choices"]
        silent = (await client.chat("x", include_reasoning=False, stream=True)).events()
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert gather(events) == ({"content": "Yes.", "reasoning_content": "Hm.", "tool_calls": []}, "stop")
    assert short["message"] == {"role": "assistant", "content": "Yes."}
    assert gather(silent) == ({"content": "Yes.", "reasoning_content": "", "tool_calls": []}, "stop")


@on_event_loop
async def test_reasoning_that_the_prompt_opens():
    async with scripted(say("Hm.</think>Yes."), template=OPEN) as client:
        (choice,) = (await client.chat("x")).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
        (choice,) = (await client.chat("x", reasoning_effort="none")).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hm.</think>Yes."}
        (choice,) = (await client.chat("x", chat_template_kwargs={"enable_thinking": False})).json()["choices"]
        assert "reasoning_content" not in choice["message"]


@on_event_loop
async def test_a_continuation_begins_where_its_prompt_ends():
    async with scripted(say("Hm.</think>Yes."), template=OPEN) as client:
        first = (await client.chat("x")).json()
        (choice,) = (await client.chat("y", continuation_of=first["id"])).json()["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."


@on_event_loop
async def test_reasoning_that_is_continued():
    async with scripted(say("m.</think>Yes."), template=THINKING) as client:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>H"}]
        body = {"model": MODEL, "messages": messages, "continue_final_message": True}
        (choice,) = (await client.post("/v1/chat/completions", body)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "m."}


@on_event_loop
async def test_effort_reaches_the_template():
    template = TEMPLATE + "[{{ reasoning_effort }}|{{ enable_thinking }}]"
    async with scripted(say("x"), template=template) as client:
        await client.chat("a", reasoning_effort="low")
        assert prompt_of(client).endswith("[low|True]")
        await client.chat("a", reasoning_effort="none")
        assert prompt_of(client).endswith("[none|False]")
        await client.chat("a", reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
        assert prompt_of(client).endswith("[low|False]")


@on_event_loop
async def test_calls_and_results_go_back_through_the_template():
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.reasoning_content }}"
        "{% for call in message.tool_calls %}({{ call.function.name }} {{ call.function.arguments.a }}){% endfor %}"
        "{% if message.role == 'tool' %}!{% endif %}{% endfor %}{# <tool_call> #}{{ tools }}"
    )
    async with scripted(say(f"<tool_call>{CALL}</tool_call>"), template=template) as client:
        (choice,) = (await client.chat("x", tools=[TOOL])).json()["choices"]
        message = {**choice["message"], "reasoning_content": "why"}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}, message, result], "tools": [TOOL]}
        answer = await client.post("/v1/chat/completions", body)
        assert answer.status == 200
        assert "<assistant>Nonewhy(add 1)<tool>2!" in prompt_of(client)


@on_event_loop
async def test_logprobs_and_token_ids_cover_all_tokens():
    text = f"<tool_call>{CALL}</tool_call>"
    async with scripted(say(text), template=HERMES) as client:
        events = (await client.chat("x", tools=[TOOL], stream=True, return_token_ids=True)).events()
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]
    assert tokens == [*text.encode(), END]


def prompt_of(client: Client) -> str:
    return bytes(client.engine.core.added[-1].prompt_token_ids).decode()


def test_arguments_of_the_script_are_json():
    assert json.loads(CALL)["arguments"] == json.loads(ARGUMENTS)
