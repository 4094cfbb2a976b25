"""Drafts over HTTP: OpenAI's `prediction`, the switch of a request, and what usage and metrics say."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.api.server.settings import ServerSettings
from ratoon.observe.metrics import EngineMetrics
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder, **settings):
    settings = {**TINY_SETTINGS, "speculate_max_seqs": 64, **settings}
    async with thread_engine(str(folder), metrics=EngineMetrics(MODEL), **settings) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


def text_of(answer) -> str:
    return answer.json()["choices"][0]["message"]["content"]


@on_event_loop
async def test_an_answer_that_is_predicted_is_counted_and_the_same(folder):
    async with serving(folder) as client:
        plain = await client.chat("hello", **ASKED, return_token_ids=True)
        assert "completion_tokens_details" not in plain.json()["usage"]
        body = plain.json()
        text = text_of(plain)
        parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
        for content in (text, parts):
            answer = await client.chat("hello", **ASKED, prediction={"type": "content", "content": content})
            ChatCompletion.model_validate(answer.json())
            assert text_of(answer) == text
            details = answer.json()["usage"]["completion_tokens_details"]
            assert details["draft_tokens"] == sum(
                details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")
            )
        assert body["usage"]["completion_tokens"] == 40


@on_event_loop
async def test_a_prediction_of_the_tokens_is_accepted(folder):
    """By token ids that are text: those that the tiny model writes need not be whole characters."""
    async with serving(folder) as client:
        bias = {str(ord(letter)): 50 for letter in "ab"}
        asked = {**ASKED, "logit_bias": bias}
        text = text_of(await client.chat("hello", **asked))
        assert set(text) <= {"a", "b"}
        answer = await client.chat("hello", **asked, prediction={"type": "content", "content": text})
        details = answer.json()["usage"]["completion_tokens_details"]
        assert text_of(answer) == text and details["accepted_prediction_tokens"] > 20
        events = (
            await client.chat(
                "hello",
                **asked,
                stream=True,
                stream_options={"include_usage": True},
                prediction={"type": "content", "content": text},
            )
        ).events()
        for event in events:
            ChatCompletionChunk.model_validate(event)
        assert "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"]) == text
        assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
        off = await client.chat("hello", **asked, speculate=False, prediction={"type": "content", "content": text})
        assert text_of(off) == text and "completion_tokens_details" not in off.json()["usage"]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("x", "prediction"),
    ],
)
@on_event_loop
async def test_a_wrong_prediction_is_refused_by_name(folder, prediction, param):
    async with serving(folder) as client:
        answer = await client.chat("hello", prediction=prediction)
        assert answer.status == 400 and answer.error["param"] == param


@on_event_loop
async def test_drafts_of_a_server_are_in_its_metrics_and_in_usage(folder):
    async with serving(folder, speculate="ngram") as client:
        asked = {**ASKED, "logit_bias": {str(ord("a")): 100}}
        answer = await client.complete(prompt="xaaaa", **asked)
        details = answer.json()["usage"]["completion_tokens_details"]
        assert answer.json()["choices"][0]["text"] == "a" * 40
        assert details["accepted_draft_tokens"] > 20 and details["accepted_prediction_tokens"] == 0
        page = (await client.get("/metrics")).body.decode()
        found = {
            line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith("ratoon_spec")
        }
        labels = '{engine="0",source="ngram"}'
        assert found[f"ratoon_spec_decode_num_draft_tokens_total{labels}"] == details["draft_tokens"]
        assert found[f"ratoon_spec_decode_num_accepted_tokens_total{labels}"] == details["accepted_draft_tokens"]
        first = found['ratoon_spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0",source="ngram"}']
        assert 0 < first <= found[f"ratoon_spec_decode_num_drafts_total{labels}"]
        answer = await client.complete(prompt="xaaaa", **asked, speculate=False)
        assert "completion_tokens_details" not in answer.json()["usage"]
        response = await client.post("/v1/responses", {"input": "hello", "max_output_tokens": 4, "speculate": False})
        assert response.status == 200


def messages(text):
    return [{"role": "user", "content": text}]


# An endpoint without completion_tokens_details: its path, a body, what its usage has, and where drafts are in it.
OTHER_USAGES = [
    pytest.param("/v1/responses", {"input": "hello", "max_output_tokens": 60}, "output_tokens_details", id="responses"),
    pytest.param("/v1/messages", {"messages": messages("hello"), "max_tokens": 60}, None, id="messages"),
]


@pytest.mark.parametrize(("path", "body", "part"), OTHER_USAGES)
@on_event_loop
async def test_usage_of_responses_and_messages_counts_drafts_unless_they_are_switched_off(folder, path, body, part):
    async with serving(folder, speculate="ngram") as client:
        asked = {"model": MODEL, **body, "temperature": 0}

        async def usage_of(**fields):
            answer = await client.post(path, {**asked, **fields})
            assert answer.status == 200, answer.body
            usage = answer.json()["usage"]
            return usage if part is None else usage[part]

        usage = await usage_of()
        assert usage["draft_tokens"] >= usage["accepted_draft_tokens"] > 0
        off = await usage_of(speculate=False)
        assert off.keys() == {name for name in usage if "draft" not in name}
        assert '"accepted_draft_tokens":' in (await client.post(path, {**asked, "stream": True})).body.decode()


@on_event_loop
async def test_an_option_of_ollama_switches_drafts_off(folder):
    async with serving(folder, speculate="ngram") as client:
        asked = {"model": MODEL, "messages": messages("hello"), "stream": False}

        async def drafted(**options):
            before = await drafts_of(client)
            answer = await client.post(
                "/api/chat", {**asked, "options": {"temperature": 0, "num_predict": 60, **options}}
            )
            assert answer.status == 200, answer.body
            return await drafts_of(client) - before

        assert await drafted() > 0
        assert await drafted(speculate=False) == 0


async def drafts_of(client) -> float:
    page = (await client.get("/metrics")).body.decode()
    found = [line for line in page.splitlines() if line.startswith("ratoon_spec_decode_num_draft_tokens_total")]
    return sum(float(line.split()[1]) for line in found)
