"""Fields that a request does not have: ignored and reported, refused where they look misspelt, or as the server's
settings say. The model's name and other fields may be left out."""

from __future__ import annotations

import logging

import pytest

from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.api.server.protocol.messages import MessagesRequest
from ratoon.api.server.protocol.responses import ResponsesRequest
from ratoon.api.server.routes.audio import TranscriptionRequest, TranslationRequest
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.unknown_fields import MAX_IGNORED, MAX_REPORTED
from ratoon.core.errors import ConfigError
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

IGNORED = "x-ratoon-ignored-fields"
MESSAGES = [{"role": "user", "content": "x"}]
HELLO = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/tokenize": {"prompt": "x"},
}
# Of OpenRouter, LiteLLM, llama.cpp, SGLang, Ollama and vLLM, without a counterpart here.
FOREIGN = (
    "provider", "models", "route", "transforms", "plugins", "top_a", "mirostat", "cache_prompt", "id_slot",
    "samplers", "n_keep", "n_probs", "keep_alive", "options", "num_ctx", "repeat_last_n", "lora_path", "rid",
    "separate_reasoning", "stream_reasoning", "vllm_xargs", "chat_id",
    "litellm_metadata", "extra_body", "return_tokens_as_token_ids", "enable_thinking", "timings_per_token", "tfs_z",
)  # fmt: skip


@pytest.mark.parametrize("path", HELLO)
@on_event_loop
async def test_unknown_fields_are_ignored_and_reported(path, caplog):
    async with scripted(say("x")) as client:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answer = await client.post(path, {**HELLO[path], "whatever": 1, "odd name\r\n": [2]})
                assert answer.status == 200, answer.body
                assert answer.headers[IGNORED] == "whatever, odd%20name%0D%0A"
        assert IGNORED not in (await client.post(path, HELLO[path])).headers
    assert [record.getMessage().count("'whatever'") for record in caplog.records] == [1, 0]  # each name once


@on_event_loop
async def test_unknown_fields_inside_are_reported_with_their_place():
    async with scripted(say("x")) as client:
        answer = await client.complete(prompt="x", stream=True, stream_options={"other": 1, "include_usage": True})
        assert answer.headers[IGNORED] == "stream_options.other"
        assert answer.events()[-1]["usage"]
        messages = [{**MESSAGES[0], "whatever": 1}, {"role": "assistant", "content": "y", "whatever": 2}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 5, "output_config": {"format": None, "odd": 1}}
        answer = await client.post("/v1/messages", body)
        assert (answer.status, answer.headers[IGNORED]) == (200, "messages[].whatever, output_config.odd")
        answer = await client.post("/v1/responses", {"input": "x", "text": {"format": {"type": "text", "what": 1}}})
        assert (answer.status, answer.headers[IGNORED]) == (200, "text.format.what")


@on_event_loop
async def test_a_slip_is_refused_with_what_was_meant():
    async with scripted() as client:
        for name, meant in {"max_token": "max_tokens", "temprature": "temperature", "topP": "top_p"}.items():
            answer = await client.complete(prompt="x", **{name: 1})
            assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "unknown_parameter")
            assert answer.error["message"].endswith(f"; did you mean {meant}?")
        wrong = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "contents": "x"}]}
        error = (await client.post("/v1/messages", wrong)).json()["error"]
        assert error["message"].startswith("messages[0].contents: is not a field")


@pytest.mark.parametrize("name", FOREIGN)
@on_event_loop
async def test_fields_of_other_servers_are_no_slips(name):
    async with scripted(say("x")) as client:
        answer = await client.chat("x", **{name: 1})
        assert (answer.status, answer.headers.get(IGNORED)) == (200, name), answer.body


@on_event_loop
async def test_a_strict_server_refuses_all_and_a_lenient_one_none():
    async with scripted(strict=True) as client:
        error = (await client.complete(prompt="x", whatever=1)).error
        assert error["param"] == "whatever" and "--strict" in error["message"]
        assert "did you mean max_tokens?" in (await client.complete(prompt="x", max_token=1)).error["message"]
    async with scripted(say("x"), lenient=True) as client:
        answer = await client.complete(prompt="x", max_token=5, suffix="")
        assert (answer.status, answer.headers[IGNORED]) == (200, "max_token")
        assert (await client.complete(prompt="x", suffix="y")).error["param"] == "suffix"
    with pytest.raises(ConfigError, match="lenient: contradicts strict"):
        ServerSettings(strict=True, lenient=True).verify()


@on_event_loop
async def test_many_and_long_names_have_limits():
    async with scripted(say("x")) as client:
        answer = await client.complete(prompt="x", **{f"whatever{index}z{index}": 1 for index in range(MAX_IGNORED)})
        assert len(answer.headers[IGNORED].split(", ")) == MAX_REPORTED
        error = (await client.complete(prompt="x", **{f"what{index}z{index}": 1 for index in range(9999)})).error
        assert f"more than {MAX_IGNORED} fields" in error["message"]
        answer = await client.complete(prompt="x", **{"y" * 100_000: 1})
        assert len(answer.headers[IGNORED]) < 100


@pytest.mark.parametrize("path", HELLO)
@on_event_loop
async def test_the_model_may_be_left_out(path):
    async with scripted(say("x"), served_names=("first", "second")) as client:
        for body in (HELLO[path], {**HELLO[path], "model": None}):
            answer = await client.post(path, body)
            assert answer.status == 200, answer.body
            assert answer.json().get("model", "first") == "first"
        assert (await client.post(path, {**HELLO[path], "model": "third"})).status == 404
        document = (await client.get("/openapi.json")).json()
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        described = document["components"]["schemas"][body["$ref"].split("/")[-1]]
        assert "model" in described["properties"] and "model" not in described.get("required", [])


@on_event_loop
async def test_stream_options_without_a_stream_are_no_error():
    async with scripted(say("x")) as client:
        for options in ({"include_usage": True}, {}, None):
            assert (await client.chat("x", stream_options=options)).status == 200


@pytest.mark.parametrize(
    ("path", "tool", "expected"),
    [
        ("/v1/chat/completions", {"type": "web_search_preview"}, "expected 'function'"),
        ("/v1/responses", {"type": "code_interpreter", "container": {}}, "expected 'function'"),
        ("/v1/messages", {"type": "web_search_20250305", "name": "w"}, "expected 'custom'"),
    ],
)
@on_event_loop
async def test_built_in_tools_are_refused_by_their_names(path, tool, expected):
    async with scripted() as client:
        answer = await client.post(path, {**HELLO[path], "tools": [tool]})
        message = answer.json()["error"]["message"]
        assert answer.status == 400
        assert message.startswith(f"tools[0].type: {tool['type']!r} is not supported: this server runs no tools itself")
        assert expected in message


@on_event_loop
async def test_verbosity_is_accepted_in_chat_as_in_responses():
    async with scripted(say("x")) as client:
        assert (await client.chat("x", verbosity="low")).status == 200
        assert (await client.post("/v1/responses", {"input": "x", "text": {"verbosity": "low"}})).status == 200


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatCompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        TranscriptionRequest,
        TranslationRequest,
    ],
)
def test_hints_do_not_repeat_the_problem(model: type[RequestModel]):
    """The message is "NAME: is not supported; HINT"."""
    for name, hint in model.UNSUPPORTED.items():
        assert "not supported" not in hint and not hint.startswith("is "), f"{name}: {hint}"
