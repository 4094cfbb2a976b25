"""Ollama's API: its own Python package is the client, over the ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from tests.unit.api.server.harness import MAX_MODEL_LEN, Client, byte_tokenizer, say, scripted

THINKING_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}<assistant>"
    "{# </think> #}"
)
TOOL_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}<assistant>"
)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, opened: Any) -> None:
        self._opened = opened

    async def __aiter__(self) -> AsyncIterator[bytes]:
        answer = await self._opened.answer()
        yield answer.body


class Transport(httpx.AsyncBaseTransport):
    """Plays the package's requests to the application."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        opened = self._client.open(
            request.method, request.url.path, body or b"", headers={"content-type": "application/json"}
        )
        await opened.task
        answer = await opened.answer()
        return httpx.Response(answer.status, headers=answer.headers, stream=_Stream(opened))


def package(client: Client) -> ollama.AsyncClient:
    made = ollama.AsyncClient(host="http://test")
    made._client = httpx.AsyncClient(base_url="http://test", transport=Transport(client))
    return made


def lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.decode().splitlines()]


def test_a_whole_chat_has_the_text_the_counts_and_the_durations() -> None:
    async def run() -> None:
        async with scripted(say("Tokyo.")) as client:
            message = {"role": "user", "content": "Where?"}
            answer = await package(client).chat("tiny", [message], options={"temperature": 0})
            assert answer.message.content == "Tokyo."
            assert answer.done and answer.done_reason == "stop"
            assert answer.eval_count == 7  # its bytes, and the end
            assert answer.prompt_eval_count == len("<user>Where?\n<assistant>")
            assert answer.total_duration and answer.total_duration >= (answer.eval_duration or 0) >= 0
            assert answer.load_duration == 0

    asyncio.run(run())


def test_a_stream_is_lines_of_json_and_only_the_last_one_is_done() -> None:
    async def run() -> None:
        async with scripted(say("Tokyo.")) as client:
            body: dict[str, Any] = {"model": "tiny:latest", "messages": [{"role": "user", "content": "Where?"}]}
            answer = await client.post("/api/chat", body)
            assert answer.headers["content-type"].startswith("application/x-ndjson")
            found = lines(answer.body)
            assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
            assert "".join(line["message"]["content"] for line in found) == "Tokyo."
            assert all(line["model"] == "tiny:latest" for line in found)
            pieces = [part async for part in await package(client).chat("tiny", body["messages"], stream=True)]
            assert "".join(part.message.content or "" for part in pieces) == "Tokyo."

    asyncio.run(run())


def test_generate_returns_token_ids_that_the_next_request_goes_on_from() -> None:
    async def run() -> None:
        async with scripted(say("Tokyo.")) as client:
            first = await package(client).generate("tiny", "Where?", system="Be brief.")
            assert first.context is not None
            prompt = "<system>Be brief.\n<user>Where?\n<assistant>"
            assert bytes(token for token in first.context if token < 256).decode() == prompt + "Tokyo."
            assert first.response == "Tokyo."
            second = await package(client).generate("tiny", "Why?", context=first.context)
            asked = client.engine.core.added[-1].prompt_token_ids
            assert asked[: len(first.context)] == list(first.context)
            assert bytes(asked[len(first.context) :]).decode() == "<user>Why?\n<assistant>"
            assert second.prompt_eval_count == len(asked)
            raw = await package(client).generate("tiny", "as it is", raw=True)
            assert bytes(client.engine.core.added[-1].prompt_token_ids).decode() == "as it is"
            assert raw.context is None

    asyncio.run(run())


def test_options_become_sampling_params_and_those_without_a_counterpart_are_reported() -> None:
    async def run() -> None:
        async with scripted(say("Tokyo.")) as client:
            options = {
                "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "num_predict": 4, "stop": ["x"],
                "repeat_penalty": 1.1, "num_ctx": 64, "mirostat": 1, "num_thread": 2,
            }  # fmt: skip
            answer = await client.post(
                "/api/generate", {"model": "tiny", "prompt": "Where?", "options": options, "stream": False}
            )
            params = client.engine.core.added[-1].params
            assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
            assert (params.max_tokens, params.stop, params.repetition_penalty) == (4, ["x"], 1.1)
            assert answer.json()["done_reason"] == "length" and answer.json()["eval_count"] == 4
            assert answer.headers["x-ratoon-ignored-fields"] == "options.mirostat, options.num_thread"
            assert f"the context is {MAX_MODEL_LEN} tokens" in answer.headers["x-ratoon-note"]

    asyncio.run(run())


def test_thinking_stands_apart_and_can_be_switched_off() -> None:
    async def run() -> None:
        async with scripted(say("<think>Hm.</think>Tokyo."), template=THINKING_TEMPLATE) as client:
            messages = [{"role": "user", "content": "Where?"}]
            answer = await package(client).chat("tiny", messages, think=True)
            assert (answer.message.thinking, answer.message.content) == ("Hm.", "Tokyo.")
            await package(client).chat("tiny", messages, think=False)
            assert b"<think></think>" in bytes(client.engine.core.added[-1].prompt_token_ids)
        async with scripted(say("Tokyo.")) as client:
            with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
                await package(client).chat("tiny", messages, think=True)
            assert refused.value.status_code == 400

    asyncio.run(run())


def test_calls_of_tools_have_objects_as_arguments() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

    async def run() -> None:
        tokenizer = byte_tokenizer(TOOL_TEMPLATE)
        async with scripted(say(call), template=TOOL_TEMPLATE, tokenizer=tokenizer) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
            answer = await package(client).chat("tiny", messages, tools=[tool])
            (made,) = answer.message.tool_calls or ()
            assert (made.function.name, made.function.arguments) == ("weather", {"city": "Tokyo"})
            pieces = [part async for part in await package(client).chat("tiny", messages, tools=[tool], stream=True)]
            (made,) = [one for part in pieces for one in part.message.tool_calls or ()]
            assert made.function.arguments == {"city": "Tokyo"}
            messages += [
                {"role": "assistant", "tool_calls": [made.model_dump()]},
                {"role": "tool", "tool_name": "weather", "content": "sunny"},
            ]
            await package(client).chat("tiny", messages)
            assert b"<tool>sunny" in bytes(client.engine.core.added[-1].prompt_token_ids)

    asyncio.run(run())


def test_a_format_is_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    async def run() -> None:
        async with scripted(say("{}")) as client:
            await package(client).chat("tiny", [{"role": "user", "content": "x"}], format="json")
            assert client.engine.core.added[-1].params.structured_output.json_object
            await package(client).generate("tiny", "x", format=schema)
            assert json.loads(client.engine.core.added[-1].params.structured_output.json_schema) == schema
            answer = await client.post("/api/generate", {"model": "tiny", "prompt": "x", "format": "yaml"})
            assert answer.status == 400 and 'neither "json" nor a JSON schema' in answer.json()["error"]

    asyncio.run(run())


def test_an_empty_prompt_only_loads_and_one_model_is_never_unloaded() -> None:
    async def run() -> None:
        async with scripted() as client:
            loaded = await package(client).generate("tiny")
            assert (loaded.response, loaded.done_reason, loaded.done) == ("", "load", True)
            assert (await client.post("/api/chat", {"model": "tiny"})).json()["message"]["content"] == ""
            answer = await client.post("/api/generate", {"model": "tiny", "keep_alive": 0})
            assert answer.status == 400 and "keeps it loaded" in answer.json()["error"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/api/pull", {"model": "other"}, 404, "There is no '/api/pull' here: `ratoon pull MODEL` does that"),
        ("/api/generate", {"model": "other", "prompt": "x"}, 404, "'other' does not exist"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "suffix": "y"}, 400, "suffix: is not supported"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "options": {"top_p": 7}}, 400, "options.top_p: "),
        ("/api/generate", {"model": "tiny", "prompt": "x", "options": {"seed": "4"}}, 400, "options.seed: is not a"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "context": [5000]}, 400, "context: token id 5000"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "images": ["!!"]}, 400, "images[0]: is not base64"),
        ("/api/chat", {"model": "tiny", "messages": [{"content": "x"}]}, 400, "messages[0].role: is missing"),
        ("/api/show", {"model": "other"}, 404, "'other' does not exist"),
        ("/api/show", {}, 400, "model: is missing"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "keep_alive": "bogus"}, 400, "keep_alive: 'bogus' is not a"),
        ("/api/generate", {"model": "tiny", "keep_alive": "0m"}, 400, "keep_alive: this server has one model"),
        ("/api/embed", {"model": "tiny", "input": "x", "keep_alive": []}, 400, "keep_alive: [] is not a duration"),
        ("/api/embed", {"model": "tiny"}, 400, "input: is missing"),
    ],
)  # fmt: skip
def test_errors_are_a_text_with_ollamas_status(path: str, body: dict[str, Any], status: int, told: str) -> None:
    async def run() -> None:
        async with scripted() as client:
            answer = await client.post(path, body)
            assert answer.status == status
            assert set(answer.json()) == {"error"} and told in answer.json()["error"]

    asyncio.run(run())


def test_fields_that_clients_send_everywhere_are_not_reported_as_unknown() -> None:
    async def run() -> None:
        async with scripted() as client:
            for path, text in (("/api/show", "name"), ("/api/embed", "input"), ("/api/embeddings", "prompt")):
                body = {"model": "other", text: "x", "stream": False}
                assert "x-ratoon-ignored-fields" not in (await client.post(path, body)).headers
                unknown = await client.post(path, {**body, "colour": 1})
                assert unknown.headers["x-ratoon-ignored-fields"] == "colour"

    asyncio.run(run())


def test_version_and_presence() -> None:
    async def run() -> None:
        async with scripted() as client:
            assert (await client.get("/api/version")).json()["version"].count(".") == 2
            assert (await client.open("HEAD", "/").answer()).status == 200

    asyncio.run(run())
