"""Nothing keeps the event loop for long: every route, with the largest and most hostile bodies that it reads, while the
longest callback is measured (tests/loop_watch.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ratoon.core.params import MAX_LOGIT_BIAS
from tests.loop_watch import LoopWatch, watching_loop
from tests.unit.api.server import harness
from tests.unit.api.server.harness import MODEL, Client, say, scripted
from tests.unit.engine.fakes import Script, model_config
from tests.unit.engine.fakes_async import on_event_loop

MEBIBYTE = 2**20
LENGTH = 65_536
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"
)
LONG_TEXT = "Rice is a grass. " * (3 * LENGTH // (4 * 17))  # most of the model's length
TOO_LONG = "x" * (4 * MEBIBYTE)
SCHEMA = {"type": "object", "properties": {f"field_{number}": {"type": "integer"} for number in range(200)}}
TOOLS = [{"type": "function", "function": {"name": f"f{number}", "parameters": SCHEMA}} for number in range(200)]
FEW_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def many(entry: str, num_bytes: int = 2 * MEBIBYTE) -> str:
    """So much of a list's inside."""
    return (entry * (num_bytes // len(entry)))[:-1]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [user("x")], "max_tokens": 1, **fields}


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}


def respond(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "x", "max_output_tokens": 1, **fields}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 1000})}}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    + b"x\n" * (15 * MEBIBYTE)
    + b"\r\n--x--\r\n"
)
CASES: dict[str, tuple[str, Any]] = {
    "messages of numbers": (CHAT, b'{"model": "tiny", "messages": [%b]}' % many("0,").encode()),
    "messages that are wrong": (CHAT, b'{"model": "tiny", "messages": [%b]}' % many('{"role":1},').encode()),
    "tools of numbers": (CHAT, b'{"model": "tiny", "messages": [], "tools": [%b]}' % many("0,").encode()),
    "stop_token_ids": (COMPLETIONS, b'{"model": "tiny", "prompt": "", "stop_token_ids": [%b]}' % many('"",').encode()),
    "prompts of lists": (COMPLETIONS, b'{"model": "tiny", "prompt": [%b]}' % many("[],").encode()),
    "prompts of numbers": (COMPLETIONS, b'{"model": "tiny", "prompt": [%b]}' % many("1,").encode()),
    "positions": ("/v1/hidden_states", b'{"model": "tiny", "prompt": "x", "positions": [%b]}' % many("[0],").encode()),
    "negative tokens": ("/detokenize", b'{"tokens": [%b]}' % many("-1,").encode()),
    "tokens": ("/detokenize", b'{"tokens": [%b]}' % many("97,", 600_000).encode()),
    "an unknown field": (COMPLETIONS, b'{"model": "tiny", "prompt": "x", "unknown": [%b]}' % many("{},").encode()),
    "nested lists": (CHAT, b'{"model": "tiny", "messages": %b' % (b"[" * MEBIBYTE)),
    "surrogates": (COMPLETIONS, b'{"model": "tiny", "prompt": "%b"}' % (b"\\ud83d\\ude00" * 100_000)),
    "no json": (COMPLETIONS, b"x" * (4 * MEBIBYTE)),
    "a long key": (COMPLETIONS, complete(**{"x" * MEBIBYTE: 1})),
    "logit_bias": (COMPLETIONS, complete(logit_bias={str(key): 1 for key in range(90_000)})),
    "logit_bias that fits": (COMPLETIONS, complete(logit_bias={str(key % 250): 1 for key in range(MAX_LOGIT_BIAS)})),
    "a prompt that is too long": (COMPLETIONS, complete(prompt=TOO_LONG)),
    "a long prompt": (COMPLETIONS, complete(prompt=LONG_TEXT)),
    "a long prompt, echoed": (COMPLETIONS, complete(prompt=LONG_TEXT, echo=True)),
    "a long prompt of tokens": (COMPLETIONS, complete(prompt=[97] * (LENGTH - 2))),
    "a batch of prompts": (COMPLETIONS, complete(prompt=["Rice is a grass. " * 100] * 256)),
    "a batch of prompts of tokens": (COMPLETIONS, complete(prompt=[[97] * 2000] * 256)),
    "bad words": (COMPLETIONS, complete(bad_words=["x" * 1000] * 10_000)),
    "stop": (COMPLETIONS, complete(stop=["x" * 1000] * 10_000)),
    "a chat that is too long": (CHAT, chat(messages=[user(TOO_LONG)])),
    "a long chat": (CHAT, chat(messages=[user("x" * 40)] * 1400)),
    "a chat of many messages": (CHAT, chat(messages=[user("")] * 8000)),
    "a chat of many parts": (CHAT, chat(messages=[user([{"type": "text", "text": "x"}] * 20_000)])),
    "a chat of many calls": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 2000}])),
    "many tools": (CHAT, chat(tools=TOOLS)),
    "a tool must be called": (CHAT, chat(tools=TOOLS[:50], tool_choice="required")),
    "a schema": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})),
    "metadata": (CHAT, chat(metadata={str(key): "x" * 100 for key in range(20_000)})),
    "template variables": (CHAT, chat(chat_template_kwargs={str(key): "x" * 100 for key in range(20_000)})),
    "a long response": (RESPONSES, respond(input=LONG_TEXT)),
    "a response that is too long": (RESPONSES, respond(input=TOO_LONG)),
    "a response to many items": (RESPONSES, respond(input=[user("")] * 8000)),
    "a response to too many items": (RESPONSES, respond(input=[user("x")] * 40_000)),
    "a response with many tools": (RESPONSES, respond(tools=[{**tool, **tool["function"]} for tool in TOOLS])),
    "a response with instructions": (RESPONSES, respond(instructions=LONG_TEXT)),
    "a response in the background": (RESPONSES, respond(input=LONG_TEXT, background=True, stream=True)),
    "references to nothing": (RESPONSES, respond(input=[{"type": "item_reference", "id": "msg_1"}] * 30_000)),
    "items of no kind": (RESPONSES, respond(input=[{}] * 40_000)),
    "a truncated response": (RESPONSES, respond(input=[user("x" * 400)] * 2000, truncation="auto")),
    "a long message": (MESSAGES, chat(messages=[user(LONG_TEXT)])),
    "many blocks": (MESSAGES, chat(messages=[user([{"type": "text", "text": "x"}] * 20_000)])),
    "many messages": (MESSAGES, chat(messages=[user("x"), {"role": "assistant", "content": "y"}] * 4000)),
    "a message that is too long": (MESSAGES, chat(messages=[user(TOO_LONG)])),
    "a message to count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": [user("x" * MEBIBYTE)]}),
    "a text to count": ("/tokenize", {"prompt": "x" * MEBIBYTE, "return_token_strs": True}),
    "a chat to count": ("/tokenize", {"messages": [user("x" * 100)] * 10_000}),
    "texts to embed": ("/v1/embeddings", {"model": MODEL, "input": ["Rice is a grass. " * 100] * 256}),
    "tokens to embed": ("/v1/embeddings", {"model": MODEL, "input": [[97] * 2000] * 256}),
    "hidden states of a long text": ("/v1/hidden_states", {"model": MODEL, "prompt": LONG_TEXT}),
    "a file in a form": ("/v1/audio/transcriptions", FORM),
    "a form": ("/v1/audio/transcriptions", b"--x\r\n" + b"x" * (30 * MEBIBYTE)),
}  # fmt: skip


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch, script: Script) -> AsyncIterator[tuple[Client, LoopWatch]]:
    """A server for long prompts, and the watch over its event loop, from when its first requests were answered."""
    monkeypatch.setattr(harness, "MAX_MODEL_LEN", LENGTH)
    config = model_config(max_position=LENGTH)
    with watching_loop() as watch:
        async with scripted(script, config=config, template=TEMPLATE, max_audio=64 * MEBIBYTE) as client:
            for path, body in ((CHAT, chat()), (COMPLETIONS, complete()), (RESPONSES, respond()), (MESSAGES, chat())):
                assert (await client.post(path, body)).status == 200
                assert (await client.post(path, {**body, "stream": True})).status == 200
                assert (await client.post(path, {"unknown": 1})).status == 400
            await client.post("/v1/hidden_states", {"model": MODEL, "prompt": "x"})
            watch.begin_again()
            yield client, watch


@pytest.mark.slow  # bodies of megabytes, one for each way to be hostile
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
@on_event_loop
async def test_no_body_keeps_the_event_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = CASES[case]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [data[start : start + 65536] for start in range(0, len(data), 65536)]
    kind = "multipart/form-data; boundary=x" if path.startswith("/v1/audio") else "application/json"
    async with watched(monkeypatch, say("y")) as (client, watch):
        answer = await client.open("POST", path, headers={"content-type": kind}, pieces=pieces).answer()
        # The engine of the script has no vectors; what is measured is how the texts get there.
        assert answer.status in (200, 400, 404, 429) or path == "/v1/embeddings", answer.body
    watch.check()


# ---- answers ----

HOSTILE_ANSWERS = {
    "the beginnings of calls": '<tool_call>{"a": ' * 600,
    "text": "Rice is a grass. " * 600,
    "calls": '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>' * 150,
    "a long call": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 10_000 + '"}}</tool_call>',
    "a call without a name": '<tool_call>{"arguments": {"a": "' + "x" * 10_000,
    "blanks": "x" + " " * 10_000,
}


@pytest.mark.slow  # the engine of the script says a token at a time, and long answers are what is tested
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", HOSTILE_ANSWERS)
@pytest.mark.one_in(5)
@on_event_loop
async def test_no_answer_keeps_the_event_loop(kind: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say(HOSTILE_ANSWERS[kind])) as (client, watch):
        fields = {"max_tokens": 20_000, "stream": stream}
        for path, body in (
            (CHAT, chat(tools=FEW_TOOLS, **fields)),
            (RESPONSES, respond(tools=[{"type": "function", "name": "f"}], max_output_tokens=20_000, stream=stream)),
            (MESSAGES, chat(tools=[{"name": "f", "input_schema": {"type": "object"}}], **fields)),
        ):
            answer = await client.post(path, body)
            assert answer.status == 200, answer.body
            assert len(answer.body) > 1000
    watch.check()


@pytest.mark.slow
@on_event_loop
async def test_the_store_keeps_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say("y")) as (client, watch):
        items = [{"role": "user", "content": "x" * 20} for _ in range(1200)]
        made = None
        for _ in range(6):
            turn = None if made is None else made["id"]
            answer = await client.post(RESPONSES, respond(input=items, previous_response_id=turn, truncation="auto"))
            assert answer.status == 200, answer.body
            made = answer.json()
        assert made is not None
        path = f"{RESPONSES}/{made['id']}"
        page = (await client.get(f"{path}/input_items?limit=100")).json()
        reference = {"type": "item_reference", "id": page["last_id"]}
        assert (await client.post(RESPONSES, respond(input=[reference]))).status == 200
        assert (await client.post(RESPONSES, respond(input=[reference] * 1000))).status == 200
        assert (await client.get(path)).status == 200
        assert (await client.open("DELETE", path).answer()).status == 200
    watch.check()


@on_event_loop
async def test_every_other_route_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say("y")) as (client, watch):
        for path in ("/health", "/version", "/metrics", "/v1/models", "/v1/requests", "/", "/docs"):
            assert (await client.get(path)).status == 200, path
        assert (await client.get("/v1/" + "x" * 60_000)).status == 404
        watch.begin_again()  # what is made once, on first use, may take longer
        for path in ("/health", "/version", "/metrics", "/v1/models", "/v1/requests", "/", "/docs"):
            assert (await client.get(path)).status == 200, path
        assert (await client.get("/v1/" + "x" * 60_000)).status == 404
    watch.check()


def test_the_watch_sees_what_keeps_a_loop() -> None:
    async def keep() -> None:
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            pass

    with watching_loop() as watch:
        asyncio.run(keep())
    with pytest.raises(AssertionError, match="ms on the event loop"):
        watch.check()
