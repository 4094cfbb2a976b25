"""Limits: what is too large, too slow or too much is turned away at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

JSON = {"content-type": "application/json"}


@on_event_loop
async def test_a_body_that_announces_too_much_is_not_read():
    async with scripted(max_body=1000) as client:
        for length in ("1001", "9" * 30):
            request = client.open(
                "POST", "/v1/completions", headers={**JSON, "content-length": length}, pieces=[b"x"], complete=False
            )
            answer = await request.answer()
            assert answer.status == 413
            assert answer.headers["connection"] == "close"
            assert request.inbox.qsize() == 1


@on_event_loop
async def test_a_length_that_is_no_number_is_refused():
    async with scripted() as client:
        for length in ("-1", "x", "1e3"):
            headers = {**JSON, "content-length": length}
            assert (await client.post("/v1/completions", {}, headers=headers)).status == 400


@on_event_loop
async def test_a_body_that_grows_too_large_is_cut_off():
    async with scripted(max_body=1000) as client:
        request = client.open("POST", "/v1/completions", pieces=[b"x" * 300] * 100, complete=False)
        assert (await request.answer()).status == 413
        assert request.inbox.qsize() == 96


@on_event_loop
async def test_a_body_of_just_the_size_is_fine():
    async with scripted(say("x"), max_body=1000) as client:
        body = b'{"model": "tiny", "prompt": "x"}'
        assert (await client.post("/v1/completions", body.ljust(1000))).status == 200
        assert (await client.post("/v1/completions", body.ljust(1001))).status == 413


@on_event_loop
async def test_a_body_that_never_ends_is_given_up():
    async with scripted(body_timeout=0.05) as client:
        answer = await client.open("POST", "/v1/completions", pieces=[b"{"], complete=False).answer()
        assert answer.status == 408


@on_event_loop
async def test_a_client_that_leaves_before_its_body_is_complete_gets_no_answer():
    async with scripted() as client:
        request = client.open("POST", "/v1/completions", pieces=[b"{"], complete=False)
        request.disconnect()
        await request.task
        assert not request.sent


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_too_many_prompts_in_a_request(stream):
    async with scripted(say("x"), max_batch=2) as client:
        assert (await client.complete(prompt=["a", "b"], stream=stream)).status == 200
        answer = await client.complete(prompt=["a", "b", "c"], stream=stream)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        answer = await client.post("/v1/embeddings", {"model": MODEL, "input": ["a", "b", "c"]})
        assert (answer.status, answer.error["param"]) == (400, "input")


@on_event_loop
async def test_too_many_tokens_asked_for():
    async with scripted(say(*"abcdef"), max_request_tokens=100) as client:
        assert (await client.complete(prompt=["a", "b"], n=5, max_tokens=10)).status == 200
        answer = await client.complete(prompt=["a", "b"], n=5, max_tokens=11)
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        assert (await client.chat("x", max_tokens=20, n=5)).status == 200
        assert (await client.chat("x", max_tokens=20, n=6)).status == 400
        assert (await client.chat("x")).status == 400, "without a limit, the whole length counts"


@on_event_loop
async def test_a_full_queue_says_when_to_come_back():
    async with scripted(say("x"), by_hand=True, max_queue=3) as client:
        body = {"model": MODEL, "prompt": ["a", "b"]}
        first = client.open("POST", "/v1/completions", body)
        while client.context.num_unfinished < 2:
            await asyncio.sleep(0.001)
        for stream in (False, True):
            answer = await client.post("/v1/completions", {**body, "stream": stream})
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
        third = client.open("POST", "/v1/completions", {"model": MODEL, "prompt": "c", "stream": True})
        await asyncio.sleep(0.01)
        client.engine.step(10)
        assert (await first.answer()).status == 200
        assert (await third.answer()).status == 200
        assert client.context.num_unfinished == 0
        larger_than_the_queue = await client.complete(prompt=["a"] * 4)
        assert larger_than_the_queue.status == 400


def _bearing(key: str) -> dict[str, str]:
    return {**JSON, "authorization": f"Bearer {key}"}


@on_event_loop
async def test_one_key_can_not_fill_the_queue_for_another():
    async with scripted(say("x"), by_hand=True, max_queue=8, api_keys=("sk-a", "sk-b")) as client:

        async def ask(key: str, num_prompts: int, before: int):
            body = {"model": MODEL, "prompt": ["p"] * num_prompts}
            request = client.open("POST", "/v1/completions", body, headers=_bearing(key))
            while client.context.num_unfinished < before + num_prompts and not request.task.done():
                await asyncio.sleep(0.001)
            return request

        first = await ask("sk-a", 8, 0)
        assert not first.task.done(), "a key alone may use all of it"
        assert (await (await ask("sk-a", 1, 8)).answer()).status == 429
        second = await ask("sk-b", 4, 8)
        assert not second.task.done(), "another key has its share nevertheless"
        for key in ("sk-a", "sk-b"):
            answer = await (await ask(key, 1, 12)).answer()
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert "its share of the queue" in answer.error["message"]
        client.engine.step(10)
        assert [(await request.answer()).status for request in (first, second)] == [200, 200]
        assert client.context.num_unfinished == 0
