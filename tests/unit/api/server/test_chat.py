"""/v1/chat/completions: conversations go through the template, and answers come back in OpenAI's form."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.models import template_process
from tests.unit.api.server.harness import MAX_MODEL_LEN, MODEL, Client, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

FirstChild = template_process._Child
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def prompt_of(client: Client) -> str:
    return bytes(client.engine.core.added[-1].prompt_token_ids).decode()


@on_event_loop
async def test_an_answer_has_openais_shape():
    async with scripted(say("Hi", "Ho")) as client:
        answer = await client.chat("Hello", n=2)
        assert prompt_of(client) == "<user>Hello\n<assistant>"
    body = answer.json()
    ChatCompletion.model_validate(body)
    assert body["id"].startswith("chatcmpl-")
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]


@on_event_loop
async def test_a_stream_begins_with_roles_and_ends_with_usage():
    async with scripted(say("a🙂", "b")) as client:
        answer = await client.chat("x", n=2, stream=True, stream_options={"include_usage": True})
    events = answer.events()
    assert answer.headers["content-type"].startswith("text/event-stream")
    for event in events:
        ChatCompletionChunk.model_validate(event)
    roles = [event["choices"][0] for event in events[:2]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in roles] == [(0, "assistant"), (1, "assistant")]
    texts = ["", ""]
    for event in events[2:-1]:
        (choice,) = event["choices"]
        assert "role" not in choice["delta"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == ["a🙂", "b"]
    ends = [choice for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert sorted((choice["index"], choice["finish_reason"]) for choice in ends) == [(0, "stop"), (1, "stop")]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert len({event["id"] for event in events}) == 1


@on_event_loop
async def test_without_a_limit_an_answer_may_fill_the_models_length():
    async with scripted(say("x")) as client:
        await client.chat("abc")
        request = client.engine.core.added[0]
        assert request.params.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)
        await client.chat("abc", max_tokens=3, max_completion_tokens=5)
        assert client.engine.core.added[1].params.max_tokens == 5


@on_event_loop
async def test_content_may_be_text_parts():
    async with scripted(say("x")) as client:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
        await client.post("/v1/chat/completions", body)
        assert prompt_of(client) == "<user>one\ntwo\n<assistant>"


@on_event_loop
async def test_what_the_template_may_know_reaches_it():
    async with scripted(say("x")) as client:
        await client.chat("a", tools=[TOOL], tool_choice="auto", chat_template_kwargs={"shout": True})
        assert prompt_of(client) == "<user>a\n[tools: 1]!<assistant>"
        await client.chat("a", tools=[TOOL], tool_choice="none", add_generation_prompt=False)
        assert prompt_of(client) == "<user>a\n"


@on_event_loop
async def test_the_arguments_of_a_tool_call_reach_the_template_as_an_object():
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"
    )

    def call(arguments: str) -> dict:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    async with scripted(say("x"), template=template) as client:
        body = {"model": MODEL, "messages": [call('{"x": "seen"}')]}
        assert (await client.post("/v1/chat/completions", body)).status == 200
        assert prompt_of(client) == "seen"
        refused = await client.post("/v1/chat/completions", {**body, "messages": [call("{")]})
        assert refused.error["param"] == "messages[0].tool_calls[0].function.arguments"


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]


@on_event_loop
async def test_a_call_without_content_is_text_where_the_template_knows_no_calls():
    """OpenAI returns `content: null` beside tool calls, and clients send that back."""
    template = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    async with scripted(say("x"), template=template) as client:
        answer = await client.post("/v1/chat/completions", {"model": MODEL, "messages": CALLING})
        assert answer.status == 200, answer.body
        call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
        assert prompt_of(client) == f"<user>a<assistant>{call}<tool>2"
        assert "tool calls" in answer.headers["x-ratoon-note"]


@on_event_loop
async def test_tools_that_the_template_does_not_know_are_written_and_the_answer_says_so():
    template = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    async with scripted(say("x"), template=template) as client:
        for stream in (False, True):
            answer = await client.chat("a", tools=[TOOL], stream=stream)
            assert "does not know tools" in answer.headers["x-ratoon-note"]
            assert prompt_of(client).startswith("<system># Tools")
            assert '{"type": "function", "function": {"name": "add", "parameters": {}}}' in prompt_of(client)
        assert "x-ratoon-note" not in (await client.chat("a", tools=[TOOL], tool_choice="none")).headers
        assert prompt_of(client) == "<user>a"
    async with scripted(template="fixed") as client:
        assert (await client.chat("a", tools=[TOOL])).error["param"] == "tools"


@on_event_loop
async def test_the_last_message_can_be_continued():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]
    async with scripted(say("x")) as client:
        for fields in ({}, {"add_generation_prompt": False}):
            body = {"model": MODEL, "messages": messages, "continue_final_message": True, **fields}
            answer = await client.post("/v1/chat/completions", body)
            assert answer.json()["choices"][0]["message"]["content"] == "x"
            assert prompt_of(client) == "<user>a\n<assistant>Well, "
        tokens = await client.post("/tokenize", {"messages": messages, "continue_final_message": True})
        assert bytes(tokens.json()["tokens"]).decode() == "<user>a\n<assistant>Well, "
        refused = await client.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
        assert (refused.status, refused.error["param"]) == (400, "add_generation_prompt")
        refused = await client.post("/v1/chat/completions", {**body, "messages": messages[:1]})
        assert (refused.status, refused.error["param"]) == (400, "messages[0].role")


@on_event_loop
async def test_an_error_in_a_continuation_has_the_index_of_the_request():
    async with scripted(say("x")) as client:
        parent = (await client.chat("a")).json()["id"]
        body = {"model": MODEL, "continuation_of": parent, "messages": [{"role": "user", "content": "b"}]}
        assert (await client.post("/v1/chat/completions", body)).status == 200
        body["messages"].append({"role": "user"})
        assert (await client.post("/v1/chat/completions", body)).error["param"] == "messages[1].content"


@on_event_loop
async def test_the_servers_template_goes_before_the_models():
    async with scripted(say("x"), chat_template="server:{{ messages[0].content }}") as client:
        await client.chat("a")
        assert prompt_of(client) == "server:a"


@on_event_loop
async def test_a_request_may_bring_a_template_only_where_it_was_allowed():
    async with scripted() as client:
        answer = await client.chat("a", chat_template="mine")
        assert (answer.status, answer.error["param"]) == (400, "chat_template")
        sneaked = await client.chat("a", chat_template_kwargs={"chat_template": "mine"})
        assert (sneaked.status, sneaked.error["param"]) == (400, "chat_template_kwargs.chat_template")
    async with scripted(say("x"), allow_request_template=True) as client:
        assert (await client.chat("a", chat_template="mine:{{ messages[0].content }}")).status == 200
        assert prompt_of(client) == "mine:a"
        endless = await client.chat("a", chat_template="{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5)
        assert (endless.status, endless.error["param"]) == (400, "chat_template")


@pytest.mark.slow
@on_event_loop
async def test_requests_with_hostile_templates_delay_no_others(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 60.0)
    children = template_process.TemplateProcesses(template_process.MAX_PROCESSES)
    monkeypatch.setattr(template_process, "_children", children)
    killed = []
    monkeypatch.setattr(template_process, "_Child", lambda: killed.append(FirstChild()) or killed[-1])
    endless = "{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5
    async with scripted(say("x"), allow_request_template=True) as client:
        hostile = [asyncio.ensure_future(client.chat("a", chat_template=endless)) for _ in range(8)]
        while len(killed) < template_process.MAX_PROCESSES:
            await asyncio.sleep(0.001)
        assert (await client.chat("a")).status == 200
        assert not any(task.done() for task in hostile)
        monkeypatch.setattr(template_process, "MAX_SECONDS", 0.1)
        for child in killed:
            child.process.kill()
        for answer in await asyncio.gather(*hostile):
            assert (answer.status, answer.error["param"]) == (400, "chat_template")
    children.close()


@on_event_loop
async def test_a_model_without_a_template_takes_no_conversations():
    async with scripted(template=None) as client:
        answer = await client.chat("a")
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "/v1/completions" in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "requird", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": 5}]}, None),
        ({"tools": [{"type": "other"}]}, "tools[0].type"),
        ({"temprature": 1}, "temprature"),
    ],
)
@on_event_loop
async def test_what_is_not_supported_is_refused_by_name(fields, param):
    async with scripted(say("x")) as client:
        answer = await client.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
        )
        if param is None:
            assert answer.status == 200
            return
        assert answer.status == 400
        assert answer.error["param"] == param
        assert not client.engine.core.added


@on_event_loop
async def test_harmless_fields_are_accepted():
    async with scripted(say("x")) as client:
        answer = await client.chat(
            "a", user="me", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
            response_format={"type": "text"}, modalities=["text"], functions=None, audio=None, prompt_cache_key="k",
            echo=False, best_of=1, n=1, suffix=None, whatever=None, top_logprobs=0, function_call="none", tools=[],
            stream_options={"include_usage": False}, guided_json=None,
        )  # fmt: skip
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "field",
    [
        *("guided_whatever", "json_schema", "grammar", "regex", "ebnf", "logits_processors", "max_new_tokens"),
        *("documents", "truncate_prompt_tokens"),
    ],
)
@on_event_loop
async def test_what_constrains_an_answer_is_refused_by_name_on_a_lenient_server_too(field):
    async with scripted(say("x"), lenient=True) as client:
        for answer in (
            await client.chat("a", **{field: {"x": 1}}),
            await client.complete(prompt="a", **{field: ["x"]}),
        ):
            assert (answer.status, answer.error["param"]) == (400, field)
            assert answer.error["code"] == "unsupported_parameter"
        assert not client.engine.core.added


@on_event_loop
async def test_a_conversation_that_is_too_long_has_openais_code():
    async with scripted() as client:
        answer = await client.chat("x" * 5000)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "messages"
