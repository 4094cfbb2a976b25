"""Nothing keeps the event loop for long: every route, with the largest and most hostile bodies that it reads, while the
longest callback is measured (tests/loop_watch.py)."""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from fastapi.routing import APIRoute

from ratoon.api.server.app import routers_of
from ratoon.api.server.response_items import message, store_items
from ratoon.core.config import ClassifierConfig
from ratoon.core.outputs import LogprobsLists, PromptLogprobsChunk
from ratoon.core.params import MAX_LENS, MAX_LOGIT_BIAS, PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, Extraction, FinishReason, lens_width
from ratoon.core.wire import WireTensor
from tests.loop_watch import LongCallbackError, LoopWatch, again_if_long, watching_loop
from tests.unit.api.server import harness
from tests.unit.api.server.harness import MODEL, Client, say, scripted
from tests.unit.engine.fakes import FakeClient, Script, model_config
from tests.unit.engine.fakes_async import on_event_loop

MEBIBYTE = 2**20
LENGTH = 65_536
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CONVERSATIONS = "/v1/conversations"
ONE_CONVERSATION = CONVERSATIONS + "/{conversation_id}"  # a test puts the id of a new one into the path
ADMIN_KEY = "sk-admin"
ADMIN: dict[str, Any] = {"admin": True, "admin_keys": (ADMIN_KEY,), "adapter_roots": ("/nowhere",)}
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
PARTS = [{"type": "text", "text": "x"}] * 20_000
IMAGES = ["iVBORw0KGgo="] * 20_000
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
    "a chat of many parts": (CHAT, chat(messages=[user(PARTS)])),
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
    "many blocks": (MESSAGES, chat(messages=[user(PARTS)])),
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
    "an Ollama chat of many messages": ("/api/chat", {"model": MODEL, "messages": [user("")] * 20_000}),
    "an Ollama chat of many images": ("/api/chat", {"model": MODEL, "messages": [{**user("x"), "images": IMAGES}]}),
    "an Ollama chat with many tools": ("/api/chat", {"model": MODEL, "messages": [user("x")], "tools": TOOLS[:100]}),
    "an Ollama chat with many small tools": (
        "/api/chat", {"model": MODEL, "messages": [user("x")], "tools": FEW_TOOLS * 10_000},
    ),
    "an Ollama chat that is too long": ("/api/chat", {"model": MODEL, "messages": [user(TOO_LONG)]}),
    "an Ollama prompt with images": ("/api/generate", {"model": MODEL, "prompt": "x", "images": IMAGES}),
    "an Ollama prompt with a context": ("/api/generate", {"model": MODEL, "prompt": "x", "context": [97] * LENGTH}),
    "an Ollama prompt that is raw": ("/api/generate", {"model": MODEL, "prompt": LONG_TEXT, "raw": True}),
    "an Ollama prompt that is too long": ("/api/generate", {"model": MODEL, "prompt": TOO_LONG}),
    "texts for Ollama to embed": ("/api/embed", {"model": MODEL, "input": ["Rice is a grass. " * 100] * 256}),
    "long texts for Ollama to embed": ("/api/embed", {"model": MODEL, "input": ["x" * (LENGTH + 1)] * 20}),
    "too many texts for Ollama to embed": ("/api/embed", {"model": MODEL, "input": ["x"] * 120_000}),
    "a text for Ollama to embed": ("/api/embeddings", {"model": MODEL, "prompt": "x" * MEBIBYTE}),
    "a model to show": ("/api/show", {"model": TOO_LONG}),
    "a conversation of many parts": (CONVERSATIONS, {"items": [user(PARTS[:1000])] * 20}),
    "a conversation of too many items": (CONVERSATIONS, {"items": [user("")] * 20_000}),
    "metadata of a conversation": (ONE_CONVERSATION, {"metadata": {str(key): "x" * 100 for key in range(20_000)}}),
    "items for a conversation": (ONE_CONVERSATION + "/items", {"items": [user("x" * 100_000)] * 20}),
    "documents to sort": ("/v1/rerank", {"model": MODEL, "query": "x", "documents": ["Rice is a grass. " * 100] * 256}),
    "too many documents": ("/v1/rerank", {"model": MODEL, "query": "x", "documents": ["x"] * 120_000}),
    "documents that are objects": (
        "/v1/rerank", {"model": MODEL, "query": "x", "documents": [{"text": "x"}] * 40_000},
    ),
    "long documents": ("/v2/rerank", {"model": MODEL, "query": "x", "documents": ["x" * (MEBIBYTE // 4)] * 3}),
    "pairs to score": ("/v1/score", {"model": MODEL, "text_1": "x", "text_2": ["Rice is a grass. " * 100] * 256}),
    "too many pairs": ("/v1/score", {"model": MODEL, "text_1": "x", "text_2": ["x"] * 120_000}),
    "texts to label": ("/v1/classify", {"model": MODEL, "input": ["Rice is a grass. " * 100] * 256}),
    "texts to label, cut": (
        "/v1/classify", {"model": MODEL, "input": ["x" * LENGTH] * 10, "truncate_prompt_tokens": 1000},
    ),
    "an adapter to load": ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x" * (MEBIBYTE // 4)}),
    "an adapter to unload": ("/v1/unload_lora_adapter", {"lora_name": "x" * MEBIBYTE}),
    "a lens over a long text": ("/v1/hidden_states", {"model": MODEL, "prompt": LONG_TEXT, "lens": MAX_LENS}),
}  # fmt: skip
NO_BODY = "its route reads no body"
WITHOUT_CASE = {
    "/admin/pause": NO_BODY,
    "/admin/resume": NO_BODY,
    "/admin/reset_prefix_cache": NO_BODY,
    "/admin/sleep": NO_BODY,
    "/admin/wake_up": NO_BODY,
    "/admin/profile/start": NO_BODY,
    "/admin/profile/stop": NO_BODY,
    "/admin/replicas": NO_BODY,
    "/admin/replicas/{index}/drain": NO_BODY,
    "/v1/responses/{response_id}/cancel": NO_BODY,
    "/v1/audio/translations": "its form is read as that of /v1/audio/transcriptions",
}
# The engine of the script has no vectors: what is measured is how the texts get there.
WITH_VECTORS = (
    "/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify",
)  # fmt: skip


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch, script: Script) -> AsyncIterator[tuple[Client, LoopWatch]]:
    """A server for long prompts, and the watch over its event loop, from when its first requests were answered."""
    monkeypatch.setattr(harness, "MAX_MODEL_LEN", LENGTH)
    config = model_config(max_position=LENGTH, classifier=ClassifierConfig(("useful",), "last"))
    with watching_loop() as watch:
        async with scripted(script, config=config, template=TEMPLATE, max_audio=64 * MEBIBYTE, **ADMIN) as client:
            for path, body in ((CHAT, chat()), (COMPLETIONS, complete()), (RESPONSES, respond()), (MESSAGES, chat())):
                assert (await client.post(path, body)).status == 200
                assert (await client.post(path, {**body, "stream": True})).status == 200
                assert (await client.post(path, {"unknown": 1})).status == 400
            await client.post("/v1/hidden_states", {"model": MODEL, "prompt": "x"})
            await client.get("/nothing")  # FastAPI prepares the routes of a router when a path is first looked up in it
            watch.begin_again()
            yield client, watch


@pytest.mark.slow  # bodies of megabytes, one for each way to be hostile
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(9)
@again_if_long
@on_event_loop
async def test_no_body_keeps_the_event_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = CASES[case]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [data[start : start + 65536] for start in range(0, len(data), 65536)]
    kind = "multipart/form-data; boundary=x" if path.startswith("/v1/audio") else "application/json"
    headers = {"content-type": kind}
    if path.endswith("_lora_adapter"):
        headers["authorization"] = f"Bearer {ADMIN_KEY}"
    async with watched(monkeypatch, say("y")) as (client, watch):
        if path.startswith(ONE_CONVERSATION):
            path = path.format(conversation_id=(await client.post(CONVERSATIONS, {})).json()["id"])
        answer = await client.open("POST", path, headers=headers, pieces=pieces).answer()
        assert answer.status in (200, 400, 404, 429) or path in WITH_VECTORS, answer.body
    watch.check()


@on_event_loop
async def test_every_route_that_reads_a_body_has_a_hostile_one() -> None:
    """A route that has several paths needs a case for one of them."""
    async with scripted(**ADMIN) as client:
        routes = [route for router in routers_of(client.context.settings) for route in router.routes]
    posts = [route for route in routes if isinstance(route, APIRoute) and route.methods & {"POST", "PUT", "PATCH"}]
    tried = {route.endpoint for route in posts if route.path in {path for path, _ in CASES.values()}}
    without = {route.path for route in posts if route.endpoint not in tried}
    assert without == set(WITHOUT_CASE)


# ---- answers ----

HOSTILE_ANSWERS = {
    "the beginnings of calls": '<tool_call>{"a": ' * 300,
    "text": "Rice is a grass. " * 300,
    "calls": '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>' * 75,
    "a long call": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 5000 + '"}}</tool_call>',
    "a call without a name": '<tool_call>{"arguments": {"a": "' + "x" * 5000,
    "blanks": "x" + " " * 5000,
}


@pytest.mark.slow  # the engine of the script says a token at a time, and long answers are what is tested
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", HOSTILE_ANSWERS)
@pytest.mark.one_in(5)
@again_if_long
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


# ---- answers with much beside the text ----

NUM_TOP, NUM_PROMPT_TOP = 20, 64
NUM_PROMPT_ROWS = 2048  # of a prompt whose log-probabilities come with one step
VECTOR_SIZE = 4096
NUM_TOKENS = 3000


def logprob_rows(num_rows: int, num_top: int) -> LogprobsLists:
    token_ids, values = list(range(97, 97 + num_top + 1)), [-0.25 * place for place in range(num_top + 1)]
    return LogprobsLists([token_ids] * num_rows, [values] * num_rows, [1] * num_rows)


class GenerousClient(FakeClient):
    """Adds the log-probabilities that requests ask for, and the vectors. All tokens are the first of these rows."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.rows_at_once = 512
        # Making them is not measured
        self._row, self._prompt_rows = logprob_rows(1, NUM_TOP), logprob_rows(NUM_PROMPT_ROWS, NUM_PROMPT_TOP)
        self._label = WireTensor("float32", (1,), array("f", [0.5]).tobytes())
        self._vector = WireTensor("float32", (VECTOR_SIZE,), array("f", [0.1234567] * VECTOR_SIZE).tobytes())

    def get_output(self) -> EngineCoreOutputs:
        step = super().get_output()
        for output in step.outputs:
            params = self._requests[output.request_id].params
            if isinstance(params, Extraction) and params.lens:
                assert output.hidden_states is not None
                shape = (*output.hidden_states.shape[:2], lens_width(params.lens))
                output.hidden_states = WireTensor("float32", shape, array("f", [97.0] * math.prod(shape)).tobytes())
            if isinstance(params, PoolingParams):
                output.finish_reason, output.error = FinishReason.STOP, None
                output.pooled = self._label if params.classify else self._vector
            elif isinstance(params, SamplingParams):
                output.new_logprobs = None if params.logprobs is None else self._row
                if params.prompt_logprobs is not None and self._given[output.request_id, output.choice] == 1:
                    output.prompt_logprobs = [PromptLogprobsChunk(1, self._prompt_rows)]
        return step


def always_a(request: EngineCoreRequest, choice: int) -> list[int]:
    return [97] * (getattr(request.params, "max_tokens", None) or 1)


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP, "max_output_tokens": NUM_TOKENS}
MANY = {"max_tokens": NUM_TOKENS}
OLLAMA_LENGTH = {"num_predict": NUM_TOKENS}
LARGE_ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a completion": (COMPLETIONS, complete(logprobs=NUM_TOP, **MANY)),
    "a completion that is streamed": (COMPLETIONS, complete(logprobs=NUM_TOP, stream=True, **MANY)),
    "many choices": (COMPLETIONS, complete(logprobs=NUM_TOP, n=100, max_tokens=60)),
    "many choices that are streamed": (COMPLETIONS, complete(logprobs=NUM_TOP, n=100, max_tokens=60, stream=True)),
    "a batch": (COMPLETIONS, complete(prompt=["x"] * 200, logprobs=NUM_TOP, max_tokens=30)),
    "a batch of choices": (COMPLETIONS, complete(prompt=["x"] * 100, n=20, max_tokens=2)),
    "token ids": (COMPLETIONS, complete(return_token_ids=True, **MANY)),
    "a prompt": (COMPLETIONS, complete(prompt="a" * (NUM_PROMPT_ROWS + 1), prompt_logprobs=NUM_PROMPT_TOP)),
    "a prompt that is echoed": (
        COMPLETIONS,
        complete(prompt="a" * (NUM_PROMPT_ROWS + 1), echo=True, logprobs=NUM_TOP),
    ),
    "a prompt, streamed": (
        COMPLETIONS,
        complete(prompt="a" * (NUM_PROMPT_ROWS + 1), prompt_logprobs=NUM_PROMPT_TOP, stream=True),
    ),
    "a chat": (CHAT, chat(logprobs=True, top_logprobs=NUM_TOP, **MANY)),
    "a chat that is streamed": (CHAT, chat(logprobs=True, top_logprobs=NUM_TOP, stream=True, **MANY)),
    "a chat of many choices": (CHAT, chat(logprobs=True, top_logprobs=NUM_TOP, n=100, max_tokens=60)),
    "a response": (RESPONSES, respond(**LOGPROBS)),
    "a response that is streamed": (RESPONSES, respond(**LOGPROBS, stream=True)),
    "a response in the background": (RESPONSES, respond(**LOGPROBS, background=True)),
    "a response in the background, streamed": (RESPONSES, respond(**LOGPROBS, background=True, stream=True)),
    "a message": (MESSAGES, chat(**MANY)),
    "a message that is streamed": (MESSAGES, chat(stream=True, **MANY)),
    "vectors": ("/v1/embeddings", {"model": MODEL, "input": ["x"] * 256}),
    "vectors in base64": ("/v1/embeddings", {"model": MODEL, "input": ["x"] * 256, "encoding_format": "base64"}),
    "hidden states": ("/v1/hidden_states", {"model": MODEL, "prompt": "x" * 20_000, "positions": "all"}),
    "hidden states of a completion": (
        COMPLETIONS,
        complete(prompt="x" * 2000, return_hidden_states={"positions": "all"}, n=4, max_tokens=200),
    ),
    "a lens": ("/v1/hidden_states", {"model": MODEL, "prompt": "x" * 2000, "positions": "all", "lens": MAX_LENS}),
    "sorted documents": ("/v1/rerank", {"model": MODEL, "query": "x", "documents": [LONG_TEXT[:2000]] * 256}),
    "labels": ("/v1/classify", {"model": MODEL, "input": ["x"] * 256}),
    "vectors in Ollama's form": ("/api/embed", {"model": MODEL, "input": ["x"] * 256}),
    "a chat in Ollama's form": ("/api/chat", {"model": MODEL, "messages": [user("x")], "options": OLLAMA_LENGTH}),
    "a prompt in Ollama's form": (
        "/api/generate",
        {"model": MODEL, "prompt": "x", "options": OLLAMA_LENGTH, "stream": False},
    ),
    "tokens of a text": ("/tokenize", {"prompt": "x" * 60_000, "return_token_strs": True}),
    "a text of tokens": ("/detokenize", {"tokens": [97] * 190_000}),
}


@pytest.mark.one_in(9)
@pytest.mark.slow  # thousands of tokens, or vectors
@pytest.mark.parametrize("kind", LARGE_ANSWERS)
@again_if_long
@on_event_loop
async def test_no_large_answer_keeps_the_event_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = LARGE_ANSWERS[kind]
    async with watched(monkeypatch, always_a) as (client, watch):
        client.engine.core = GenerousClient(client.engine.core.script)
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body[:1000]
        if body.get("background") and not body.get("stream"):
            found = client.context.shared.responses.store.find(answer.json()["id"], None)
            assert found is not None
            while found.is_running:
                await asyncio.sleep(0.05)
                answer = await client.get(f"{RESPONSES}/{found.id}")
        assert len(answer.body) > NUM_TOKENS
    watch.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["a completion that is streamed", "a chat that is streamed", "a response that is streamed"]
)
@pytest.mark.one_in(2)
@again_if_long
@on_event_loop
async def test_a_reader_that_is_far_behind_keeps_no_event_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has come meanwhile is one output: thousands of tokens."""
    path, body = LARGE_ANSWERS[kind]
    async with watched(monkeypatch, always_a) as (client, watch):
        client.engine.core = GenerousClient(client.engine.core.script)
        opened = client.open("POST", path, body)
        await opened.sent_something()
        opened.reads.clear()
        while client.context.llm.num_unfinished_requests():
            await asyncio.sleep(0.01)
        opened.reads.set()
        assert len((await opened.answer()).body) > 100 * NUM_TOKENS
    watch.check()


@again_if_long
@on_event_loop
async def test_a_long_list_of_requests_keeps_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say(*["y"] * 128)) as (client, watch):
        for _ in range(4):
            assert (await client.post(COMPLETIONS, complete(prompt=["x"] * 250, n=4))).status == 200
        watch.begin_again()
        listed = await client.get("/v1/requests?limit=1000")
        assert len(listed.json()["data"]) == 1000
    watch.check()


@pytest.mark.slow
@again_if_long
@on_event_loop
async def test_the_store_keeps_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say("y")) as (client, watch):
        items = [{"role": "user", "content": "x" * 20} for _ in range(1200)]
        made = None
        for _ in range(3):
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


@again_if_long
@on_event_loop
async def test_a_stored_response_of_any_size_is_read_without_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest answer with log-probabilities has some hundred megabytes."""
    text = "y" * (192 * MEBIBYTE)
    async with watched(monkeypatch, say("y")) as (client, watch):
        made = (await client.post(RESPONSES, respond())).json()
        found = client.context.shared.responses.store.find(made["id"], None)
        assert found is not None
        found.turn.output = store_items([message(text, item_id="msg_1")])
        await asyncio.sleep(0)
        watch.begin_again()
        opened = client.open("GET", f"{RESPONSES}/{found.id}")
        await opened.task
        watch.check()
        answer = await opened.answer()
        assert answer.json()["output"][0]["content"][0]["text"] == text


OTHER_PATHS = (
    "/health", "/version", "/metrics", "/v1/models", "/v1/requests", "/", "/docs",
    "/console/config.json", "/console/index.html", "/api/version",
)  # fmt: skip
UNKNOWN = "x" * 60_000
UNKNOWN_PATHS = ("/v1/" + UNKNOWN, "/console/" + "x/" * 30_000, f"{CONVERSATIONS}/{UNKNOWN}/items")
UNKNOWN_NAMES = (f"/v1/engine/requests/{UNKNOWN}", f"{CONVERSATIONS}/{UNKNOWN}")


@again_if_long
@on_event_loop
async def test_every_other_route_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, say("y")) as (client, watch):
        for is_first in (True, False):
            if not is_first:
                watch.begin_again()  # what is made once, on first use, may take longer
            for path in OTHER_PATHS:
                assert (await client.get(path)).status == 200, path
            for path in UNKNOWN_PATHS:
                assert (await client.get(path)).status == 404, path
            for path in UNKNOWN_NAMES:
                assert (await client.open("DELETE", path).answer()).status == 404, path
    watch.check()


def keep_a_loop(seconds: float) -> None:
    async def keep() -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    with watching_loop() as watch:
        asyncio.run(keep())
    watch.check()


@pytest.mark.parametrize(("attempts", "is_long"), [([0.06, 0.06, 0.06], True), ([0.06, 0.06, 0.0], False)])
def test_the_watch_sees_what_keeps_a_loop_every_time(attempts: list[float], is_long: bool) -> None:
    with pytest.raises(LongCallbackError, match="ms on the event loop") if is_long else nullcontext():
        again_if_long(lambda: keep_a_loop(attempts.pop(0)))()
    assert not attempts
