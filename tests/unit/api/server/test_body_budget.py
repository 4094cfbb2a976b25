"""The memory of all bodies in flight: one limit, which API keys share, and which no body can hold without sending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratoon.api.server import body_budget
from ratoon.api.server.body_budget import SMALL_BODY, BodyBudget, least_limit, room_for_large_bodies
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError
from tests.unit.api.server.harness import Client, OpenRequest, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

MEBIBYTE = 2**20
LIMIT = 8 * MEBIBYTE
ROOM = room_for_large_bodies(LIMIT)
PATH = "/v1/completions"
GOOD = b'{"model": "tiny", "prompt": "x"}'


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(body_budget, "LOOK_SECONDS", 0.01)


def open_body(
    client: Client, size: int, num_sent: int | None = None, key: str | None = None, announces: bool = True
) -> OpenRequest:
    """A request with a body of this size, of which so many bytes arrive, in pieces as the HTTP server reads them."""
    data = GOOD.ljust(size)[:num_sent]
    headers = {"content-type": "application/json"}
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= {"content-length": str(size)} if announces else {}
    pieces = [data[start : start + SMALL_BODY] for start in range(0, len(data), SMALL_BODY)]
    return client.open("POST", PATH, headers=headers, pieces=pieces, complete=num_sent is None)


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def num_unread(request: OpenRequest) -> int:
    return request.inbox.qsize()


def feed(request: OpenRequest, data: bytes, more: bool) -> None:
    request.inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})


@on_event_loop
async def test_bodies_that_never_end_hold_no_more_than_the_limit() -> None:
    async with scripted(say("x"), max_total_body=LIMIT) as client:
        stalled = [open_body(client, MEBIBYTE, MEBIBYTE - 1) for _ in range(50)]
        await settle()
        assert client.context.bodies.num_bytes <= LIMIT
        read = [request for request in stalled if num_unread(request) == 0]
        assert len(read) == ROOM // MEBIBYTE, "what has no place is not read"
        assert (await client.post(PATH, GOOD)).status == 200, "small bodies have room of their own"
        answers = [await request.answer() for request in stalled if request not in read]
        assert {answer.status for answer in answers} == {503}
        assert all(answer.headers["retry-after"] and answer.headers["connection"] == "close" for answer in answers)
        for request in read:
            feed(request, b" ", more=False)
        assert [(await request.answer()).status for request in read] == [200] * len(read)
        assert client.context.bodies.num_bytes == 0


@on_event_loop
async def test_a_body_that_does_not_say_how_long_it_is_counts_as_one_of_the_largest() -> None:
    async with scripted(say("x"), max_total_body=LIMIT, max_body=2 * MEBIBYTE) as client:
        opened = [open_body(client, MEBIBYTE, 3 * SMALL_BODY, announces=False) for _ in range(10)]
        await settle()
        assert sum(num_unread(request) == 0 for request in opened) == ROOM // (2 * MEBIBYTE)
        assert client.context.bodies.num_bytes <= LIMIT
        for request in opened:
            request.disconnect()
            await request.task
        assert client.context.bodies.num_bytes == 0
        assert (await open_body(client, MEBIBYTE, announces=False).answer()).status == 200


@on_event_loop
async def test_a_body_waits_for_a_place_and_then_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 30.0)
    async with scripted(say("x"), max_total_body=LIMIT) as client:
        first = open_body(client, ROOM, ROOM - 1)
        await settle()
        second, third = open_body(client, 2 * MEBIBYTE), open_body(client, MEBIBYTE)
        await settle()
        assert num_unread(second) and num_unread(third)
        feed(first, b" ", more=False)
        assert [(await request.answer()).status for request in (first, second, third)] == [200] * 3
        assert client.context.bodies.num_bytes == 0


@on_event_loop
async def test_a_body_keeps_its_place_until_it_is_answered() -> None:
    async with scripted(say("x"), by_hand=True, max_total_body=LIMIT) as client:
        request = open_body(client, MEBIBYTE)
        while not client.context.num_unfinished:
            await asyncio.sleep(0.001)
        assert client.context.bodies.num_bytes == MEBIBYTE
        client.engine.step(10)
        assert (await request.answer()).status == 200
        assert client.context.bodies.num_bytes == 0


@on_event_loop
async def test_one_key_can_not_take_the_room_of_another() -> None:
    async with scripted(say("x"), max_total_body=LIMIT, api_keys=("sk-a", "sk-b")) as client:
        greedy = [open_body(client, MEBIBYTE, MEBIBYTE - 1, key="sk-a") for _ in range(20)]
        await settle()
        assert (await open_body(client, ROOM // 2, key="sk-b").answer()).status == 200
        assert (await open_body(client, ROOM, key="sk-b").answer()).status == 503, "more than its share"
        for request in greedy:
            request.disconnect()
            await request.task


@on_event_loop
async def test_a_stalled_body_loses_its_place_to_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 30.0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.1)
    async with scripted(say("x"), max_total_body=LIMIT) as client:
        stalled = open_body(client, ROOM, ROOM - 1)
        await asyncio.sleep(0.3)
        assert not stalled.task.done(), "nothing waits for its place"
        assert (await open_body(client, MEBIBYTE).answer()).status == 200
        answer = await stalled.answer()
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")
        assert "while others wait" in answer.error["message"]


@on_event_loop
async def test_another_keys_waiting_does_not_end_a_body_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.05)
    async with scripted(say("x"), max_total_body=LIMIT, api_keys=("sk-a", "sk-b")) as client:
        slow = open_body(client, MEBIBYTE, MEBIBYTE - 1, key="sk-b")
        await settle()
        greedy = [open_body(client, ROOM, key="sk-a") for _ in range(3)]
        assert {(await request.answer()).status for request in greedy} == {503}
        feed(slow, b" ", more=False)
        assert (await slow.answer()).status == 200


@on_event_loop
async def test_only_so_many_bodies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAITING", 3)
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 30.0)
    budget = BodyBudget(LIMIT)
    place = await budget.take(None, ROOM)
    waiting = [asyncio.ensure_future(budget.take(None, MEBIBYTE)) for _ in range(3)]
    await settle()
    assert await budget.take(None, MEBIBYTE) is None
    waiting[0].cancel()
    await settle()
    assert place is not None
    place.give_back()
    found = [await one for one in waiting[1:]]
    assert budget.num_bytes == 2 * MEBIBYTE
    for one in found:
        assert one is not None
        one.give_back()
    assert budget.num_bytes == 0


@on_event_loop
async def test_a_place_that_is_given_to_a_request_that_has_ended_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 30.0)
    budget = BodyBudget(LIMIT)
    place = await budget.take(None, ROOM)
    waiting = asyncio.ensure_future(budget.take(None, MEBIBYTE))
    await settle()
    assert place is not None
    place.give_back()
    waiting.cancel()
    await settle()
    assert waiting.cancelled()
    assert budget.num_bytes == 0


@on_event_loop
async def test_a_server_that_has_no_room_for_its_largest_body_does_not_start() -> None:
    with pytest.raises(ConfigError, match=f"max_total_body: .*{64 * MEBIBYTE}.*; {least_limit(64 * MEBIBYTE)} or more"):
        ServerSettings(max_total_body=64 * MEBIBYTE).verify()
    ServerSettings(max_total_body=least_limit(64 * MEBIBYTE)).verify()
    assert room_for_large_bodies(least_limit(1001)) >= 1001


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", PATH)])
@on_event_loop
async def test_expectations_other_than_the_one_of_http_are_refused(method: str, path: str) -> None:
    async with scripted(say("x")) as client:

        async def ask(expected: str) -> Any:
            headers = {"content-type": "application/json", "expect": expected}
            return await client.open(method, path, GOOD, headers=headers).answer()

        answer = await ask("payment")
        assert (answer.status, answer.error["code"]) == (417, "expectation_failed")
        assert answer.headers["connection"] == "close"
        assert (await ask("100-Continue")).status == 200
