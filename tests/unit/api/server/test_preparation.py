"""Large bodies are prepared a few at a time, keys in turns, and what they were is not held while they are answered."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from ratoon.api.server.preparation import SMALL_BODY, Preparation
from ratoon.api.server.routes import responses
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import until

LARGE = 100_000


class Request:
    """A request that is prepared until it is let go."""

    def __init__(self, pool: Preparation, owner: str | None = None, size: int = LARGE) -> None:
        self.has_place = False
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._prepare(pool, owner, size))

    async def _prepare(self, pool: Preparation, owner: str | None, size: int) -> None:
        async with pool.place(owner, size):
            self.has_place = True
            await self.let_go.wait()
        self.has_place = False


async def placed(requests: list[Request]) -> list[int]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [number for number, request in enumerate(requests) if request.has_place]


async def end(requests: list[Request], *numbers: int) -> list[int]:
    for number in numbers:
        requests[number].let_go.set()
    return await placed(requests)


@on_event_loop
async def test_as_many_as_fit_are_prepared_and_then_the_next_ones():
    pool = Preparation(2 * LARGE)
    requests = [Request(pool) for _ in range(4)]
    assert await placed(requests) == [0, 1]
    assert pool.num_bytes == 2 * LARGE
    assert await end(requests, 1) == [0, 2]
    assert await end(requests, 0, 2) == [3]
    assert await end(requests, 3) == []
    assert pool.num_bytes == 0


@on_event_loop
async def test_a_body_that_is_larger_than_the_limit_is_prepared_alone_and_is_not_overtaken():
    pool = Preparation(2 * LARGE)
    requests = [Request(pool), Request(pool, size=5 * LARGE), Request(pool)]
    assert await placed(requests) == [0]
    assert await end(requests, 0) == [1]
    assert await end(requests, 1) == [2]
    await end(requests, 2)


@on_event_loop
async def test_small_bodies_do_not_wait():
    pool = Preparation(LARGE)
    requests = [Request(pool), Request(pool), Request(pool, size=SMALL_BODY)]
    assert await placed(requests) == [0, 2]
    await end(requests, 0, 1, 2)


@on_event_loop
async def test_keys_take_turns():
    pool = Preparation(LARGE)
    requests = [Request(pool, owner) for owner in ("a", "a", "a", "b", "c")]
    order = []
    for _ in requests:
        (number,) = await placed(requests)
        order.append(number)
        await end(requests, number)
    assert order == [0, 1, 3, 4, 2]


@pytest.mark.parametrize("number", [0, 1, 2])
@on_event_loop
async def test_one_that_is_cancelled_leaves_nothing_behind(number):
    pool = Preparation(LARGE)
    requests = [Request(pool) for _ in range(3)]
    await placed(requests)
    requests[number].task.cancel()
    await asyncio.gather(requests[number].task, return_exceptions=True)
    requests[number].has_place = False
    left = [one for one in range(3) if one != number]
    for one in left:
        assert await placed(requests) == [one]
        await end(requests, one)
    assert pool.num_bytes == 0


@on_event_loop
async def test_one_that_is_cancelled_in_the_moment_of_its_turn_passes_it_on():
    pool = Preparation(LARGE)
    requests = [Request(pool) for _ in range(3)]
    await placed(requests)
    requests[0].task.cancel()
    await asyncio.gather(requests[0].task, return_exceptions=True)  # the next one has its turn, and has not run since
    requests[1].task.cancel()
    await asyncio.gather(requests[1].task, return_exceptions=True)
    requests[0].has_place = requests[1].has_place = False
    assert await placed(requests) == [2]
    await end(requests, 2)
    assert pool.num_bytes == 0


@on_event_loop
async def test_who_waits_for_something_else_has_no_place_meanwhile():
    pool = Preparation(LARGE)
    gate = asyncio.Event()
    steps = []

    async def wait() -> None:
        async with pool.place(None, LARGE) as place:
            async with place.left():
                steps.append("left")
                await gate.wait()
            steps.append("back")

    waiting = asyncio.create_task(wait())
    other = Request(pool)
    assert await placed([other]) == [0] and steps == ["left"]
    gate.set()
    await placed([other])
    assert steps == ["left"]  # the other one has the place now
    await end([other], 0)
    await waiting
    assert steps == ["left", "back"] and pool.num_bytes == 0


# ---- in the server ----


def body_of(num_bytes: int, **fields: Any) -> dict[str, Any]:
    """Items that are far too long for the model, of which the last one is left."""
    item = {"role": "assistant", "content": "x" * 100}
    items = [{"role": "user", "content": "x"}, *[item] * (num_bytes // 140), {"role": "user", "content": "y"}]
    return {"model": MODEL, "input": items, "truncation": "auto", "max_output_tokens": 4, **fields}


@on_event_loop
async def test_responses_that_are_generated_hold_nothing_of_their_bodies_but_what_is_stored(monkeypatch):
    """80 requests of 0.9 MiB took 1.1 GB: each held its body, decoded, until its answer was complete."""
    decoded = []
    make_run = responses.make_run

    async def noting(context: Any, asked: Any, *others: Any) -> Any:
        decoded.append(weakref.ref(asked))
        return await make_run(context, asked, *others)

    monkeypatch.setattr(responses, "make_run", noting)
    async with scripted(say("abc"), by_hand=True) as client:
        opened = [client.open("POST", "/v1/responses", body_of(LARGE, stream=stream)) for stream in (False, True)]
        await until("both are in the engine", lambda: len(client.engine.core.added) == 2)
        gc.collect()
        assert [reference() for reference in decoded] == [None, None]
        client.engine.step(10)
        assert [(await one.answer()).status for one in opened] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/messages"])
@on_event_loop
async def test_no_more_large_bodies_are_decoded_than_there_is_room_for(path):
    async with scripted(say("abc")) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * LARGE}], "max_tokens": 4}
        if path == "/v1/responses":
            body = body_of(LARGE)
        elif path == "/v1/completions":
            body = {"model": MODEL, "prompt": "x" * LARGE}
        pool, most = Preparation(1), 0
        client.context.preparation = pool
        size = len(json.dumps(body))
        opened = [client.open("POST", path, body) for _ in range(4)]
        while not all(one.task.done() for one in opened):
            most = max(most, pool.num_bytes)
            await asyncio.sleep(0)
        assert {(await one.answer()).status for one in opened} <= {200, 400}
        assert most == size and pool.num_bytes == 0


@on_event_loop
async def test_a_turn_that_waits_for_the_one_before_it_does_not_hold_others_up():
    async with scripted(say("abc"), by_hand=True) as client:
        client.context.preparation = Preparation(1)
        first = (await client.post("/v1/responses", {**body_of(100), "background": True})).json()
        opened = client.open("POST", "/v1/responses", body_of(LARGE, previous_response_id=first["id"]))
        other = client.open("POST", "/v1/responses", body_of(LARGE))
        await until("the other one is in the engine", lambda: len(client.engine.core.added) == 2)
        while not (opened.task.done() and other.task.done()):
            client.engine.step()
            await asyncio.sleep(0.001)
        assert [(await one.answer()).status for one in (opened, other)] == [200, 200]
        assert client.context.preparation.num_bytes == 0
