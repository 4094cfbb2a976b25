"""How requests end when something is in the way: clients that leave, engines that fail, servers that shut down."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.core.request import EngineCoreOutput, FinishReason
from tests.unit.api.server.harness import MODEL, Client, OpenRequest, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

PATHS = {
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
}


async def begin(client: Client, path: str, **fields) -> OpenRequest:
    """A request that the engine has taken, and given two tokens if it is streamed."""
    request = client.open("POST", path, {**PATHS[path], **fields})
    while not client.engine.core.added:
        await asyncio.sleep(0.001)
    client.engine.step(2)
    if fields.get("stream"):
        await request.sent_something()
    return request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@on_event_loop
async def test_a_client_that_leaves_has_its_request_taken_back(path, stream):
    async with scripted(say("abcdefgh"), by_hand=True) as client:
        request = await begin(client, path, stream=stream)
        request.disconnect()
        await request.task
        assert client.engine.core.aborted == [client.engine.core.added[0].request_id]
        assert client.context.num_unfinished == 0
        assert client.context.llm.num_unfinished_requests() == 0
        if not stream:
            assert not request.sent


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_client_that_leaves_takes_all_its_prompts_along(stream):
    async with scripted(say("abcdefgh", "ijk"), by_hand=True) as client:
        request = await begin(client, "/v1/completions", prompt=["a", "b", "c"], n=2, stream=stream)
        request.disconnect()
        await request.task
        assert sorted(client.engine.core.aborted) == sorted(r.request_id for r in client.engine.core.added)
        assert client.context.num_unfinished == 0


@on_event_loop
async def test_a_client_that_leaves_before_the_first_token_is_noticed():
    async with scripted(by_hand=True) as client:
        request = client.open("POST", "/v1/completions", {**PATHS["/v1/completions"], "stream": True})
        while not client.engine.core.added:
            await asyncio.sleep(0.001)
        request.disconnect()
        await request.task
        assert len(client.engine.core.aborted) == 1


@on_event_loop
async def test_an_answer_is_complete_although_the_client_never_spoke_again():
    async with scripted(say("ab")) as client:
        answer = await client.complete(prompt="x")
        assert answer.json()["choices"][0]["text"] == "ab"
        assert not client.engine.core.aborted


def failed(client: Client) -> EngineCoreOutput:
    request_id = client.engine.core.added[0].request_id
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error="the step failed")


@on_event_loop
async def test_a_failed_step_is_a_500():
    async with scripted(by_hand=True) as client:
        request = await begin(client, "/v1/completions")
        client.engine.send(failed(client))
        answer = await request.answer()
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "the step failed" in answer.error["message"]


@pytest.mark.parametrize("path", PATHS)
@on_event_loop
async def test_a_failed_step_ends_a_stream_with_an_error(path):
    async with scripted(say("abcdef"), by_hand=True) as client:
        request = await begin(client, path, stream=True)
        client.engine.send(failed(client))
        answer = await request.answer()
        assert answer.status == 200
        events = answer.events()
        assert events[-1]["error"]["type"] == "server_error"
        assert "choices" in events[0]


@on_event_loop
async def test_a_vector_that_fails_is_a_500():
    async with scripted(by_hand=True) as client:
        request = client.open("POST", "/v1/embeddings", {"model": MODEL, "input": ["a", "b"]})
        while not client.engine.core.added:
            await asyncio.sleep(0.001)
        client.engine.send(failed(client))
        answer = await request.answer()
        assert (answer.status, answer.error["message"]) == (500, "the step failed")
        assert client.context.num_unfinished == 0


@on_event_loop
async def test_one_prompt_that_fails_takes_the_others_back():
    async with scripted(say("abcdef"), by_hand=True) as client:
        request = await begin(client, "/v1/completions", prompt=["a", "b"])
        client.engine.send(failed(client))
        answer = await request.answer()
        assert answer.status == 500
        assert client.engine.core.aborted == [client.engine.core.added[1].request_id]


@on_event_loop
async def test_a_dead_engine_is_a_503():
    async with scripted(say("abcdef"), by_hand=True) as client:
        waiting = await begin(client, "/v1/completions")
        streaming = client.open("POST", "/v1/completions", {**PATHS["/v1/completions"], "stream": True})
        await asyncio.sleep(0.01)
        client.engine.die()
        assert (await waiting.answer()).status == 503
        assert (await streaming.answer()).status == 503
        assert (await client.complete(prompt="x")).error["code"] == "engine_dead"
        health = await client.get("/health")
        assert (health.status, health.json()["status"]) == (503, "dead")


@on_event_loop
async def test_an_engine_that_dies_ends_streams_with_an_error():
    async with scripted(say("abcdef"), by_hand=True) as client:
        request = await begin(client, "/v1/completions", stream=True)
        client.engine.die()
        events = (await request.answer()).events()
        assert events[-1]["error"]["code"] == "engine_dead"


@on_event_loop
async def test_a_server_that_shuts_down_takes_nothing_new_and_finishes_what_it_has():
    async with scripted(say("abcdef"), by_hand=True) as client:
        request = await begin(client, "/v1/completions", stream=True)
        client.context.draining = True
        for answer in (await client.complete(prompt="x"), await client.get("/v1/models")):
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert answer.headers["connection"] == "close"
        health = await client.get("/health")
        assert (health.status, health.json()["status"]) == (503, "shutting down")
        assert (await client.get("/metrics")).status == 200
        client.engine.step(20)
        events = (await request.answer()).events()
        assert "".join(event["choices"][0]["text"] for event in events) == "abcdef"


@on_event_loop
async def test_what_is_not_finished_in_time_is_aborted_and_told_so():
    async with scripted(say("abcdef"), by_hand=True) as client:
        streamed = await begin(client, "/v1/completions", stream=True)
        whole = client.open("POST", "/v1/completions", PATHS["/v1/completions"])
        await asyncio.sleep(0.01)
        client.context.draining = True
        await client.context.llm.shutdown(0.01)
        events = (await streamed.answer()).events()
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert (await whole.answer()).error["code"] == "shutting_down"


@on_event_loop
async def test_a_fault_of_the_server_gives_nothing_away(monkeypatch):
    async with scripted() as client:
        monkeypatch.setattr(client.context.llm, "get_default_sampling_params", lambda: 1 / 0)
        request = client.open("POST", "/v1/completions", PATHS["/v1/completions"])
        with pytest.raises(ZeroDivisionError):  # for the log
            await request.task
        assert request.sent[0]["status"] == 500
        assert b"ZeroDivision" not in request.sent[1]["body"]
