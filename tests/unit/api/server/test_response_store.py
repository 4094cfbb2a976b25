"""The store of responses under load: what it counts is what it holds, references cost what they refer to, and events of
streams that nothing reads are bounded."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from ratoon.api.server import response_items
from ratoon.api.server.response_directory import follow_events
from ratoon.api.server.response_items import PIECE_BYTES, StoredItems, find_items, store_items
from ratoon.api.server.response_store import EVENT_BYTES, LEAST_LOG_BYTES, EventLog, EventPage, ResponseStore
from tests.unit.api.server.harness import MODEL, Client, say, scripted
from tests.unit.api.server.test_event_loop import NUM_TOP, GenerousClient, always_a
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import until

PATH = "/v1/responses"
TEMPLATE = "<{{ messages | length }}>"  # a prompt of any conversation is short


async def create(client: Client, given: Any = "Hello", status: int = 200, **fields: Any) -> Any:
    answer = await client.post(PATH, {"model": MODEL, "input": given, **fields})
    assert answer.status == status, answer.body
    return answer.json()


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SHAPES: dict[str, tuple[int, Any]] = {
    "short": (40, "Hello"),
    "one long text": (4, "x" * 200_000),
    "one long text in characters of four bytes": (4, "x" * 200_000 + "🙂"),
    "many short items": (3, [message("x")] * 1000),
    "calls": (
        3,
        [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * 500 + [message("x")],
    ),
}


@pytest.mark.slow  # memory is traced
@pytest.mark.parametrize("shape", SHAPES)
@on_event_loop
async def test_what_is_counted_is_what_is_held(shape: str) -> None:
    count, given = SHAPES[shape]
    async with scripted(say("Hi"), template=TEMPLATE) as client:
        store = client.context.shared.responses.store
        await create(client, given)  # what the first request makes is not the store's
        gc.collect()
        tracemalloc.start()
        try:
            before, counted = tracemalloc.get_traced_memory()[0], store.num_bytes
            for _ in range(count):
                await create(client, given)

            def held() -> int:
                """Returns the bytes that were allocated since, less those that the engine keeps of each response."""
                gc.collect()
                return tracemalloc.get_traced_memory()[0] - before - count * 4000

            # A thread that prepared the last request may not have let go of it yet
            await until("no more is held than counted", lambda: 0.5 * held() < store.num_bytes - counted)
            assert store.num_bytes - counted < 2 * held() + count * 6000
        finally:
            tracemalloc.stop()


@on_event_loop
async def test_turns_that_responses_share_are_counted_once_and_until_the_last_is_gone() -> None:
    async with scripted(say("Hi"), template=TEMPLATE) as client:
        store = client.context.shared.responses.store
        first = await create(client, "x" * 100_000)
        alone = store.num_bytes
        others = [await create(client, "And?", previous_response_id=first["id"]) for _ in range(5)]
        last = await create(client, "And?", previous_response_id=others[-1]["id"])
        assert store.num_bytes < alone + 6 * 10_000
        for made in (first, *others):
            await client.open("DELETE", f"{PATH}/{made['id']}").answer()
        assert 100_000 < store.num_bytes < alone + 20_000, "the last one continues the first"
        items = (await client.get(f"{PATH}/{last['id']}/input_items?order=asc")).json()["data"]
        assert len(items[0]["content"][0]["text"]) == 100_000
        await client.open("DELETE", f"{PATH}/{last['id']}").answer()
        assert (len(store), store.num_bytes) == (0, 0)


@on_event_loop
async def test_a_reference_decodes_what_it_refers_to_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    piece = StoredItems.piece

    def count(items: StoredItems, number: int) -> Any:
        decoded.append(len(items.pieces[number]))
        return piece(items, number)

    async with scripted(say("Hi"), template=TEMPLATE) as client:
        for _ in range(3):
            made = await create(client, [message("x" * 1000) for _ in range(1000)])
        page = (await client.get(f"{PATH}/{made['id']}/input_items?limit=1")).json()
        monkeypatch.setattr(StoredItems, "piece", count)
        reference = {"type": "item_reference", "id": page["first_id"]}
        await create(client, [reference, reference, message("And?")])
        assert len(decoded) == 1 and decoded[0] < 2 * PIECE_BYTES


@on_event_loop
async def test_references_are_bounded_as_bodies_are() -> None:
    async with scripted(say("Hi"), template=TEMPLATE, max_body=100_000) as client:
        made = await create(client, "x" * 60_000)
        listed = (await client.get(f"{PATH}/{made['id']}/input_items")).json()
        reference = {"type": "item_reference", "id": listed["first_id"]}
        await create(client, [reference])
        error = (await create(client, [reference] * 1000, status=400))["error"]
        assert error["param"] == "input" and "at most 100000" in error["message"]


@on_event_loop
async def test_a_conversation_is_bounded_as_a_body_is() -> None:
    async with scripted(say("Hi"), template=TEMPLATE, max_body=100_000) as client:
        first = await create(client, "x" * 60_000)
        error = (await create(client, "x" * 60_000, previous_response_id=first["id"], status=400))["error"]
        assert error["param"] == "previous_response_id" and "at most 100000" in error["message"]
        await create(client, "x", previous_response_id=first["id"])


def test_items_come_back_as_they_were() -> None:
    items = [{"id": f"msg_{number}", "text": 'é🙂\\"' * number} for number in range(300)]
    items.append({"id": "long", "text": "x" * 3 * PIECE_BYTES})
    stored = store_items(items)
    assert list(stored) == items and len(stored.pieces) > 3
    found = find_items(["msg_7", "long", "none"], [store_items([]), stored])
    assert {item_id: one.item for item_id, one in found.items()} == {"msg_7": items[7], "long": items[-1]}
    assert response_items._decode(b"[%b]" % b"".join(stored.as_json())) == items


# ---- events of streams in the background ----


@on_event_loop
async def test_events_that_nothing_reads_are_bounded() -> None:
    limit = 300_000
    text = "y" * 400
    async with scripted(say(text), by_hand=True, max_response_bytes=limit, template=TEMPLATE) as client:
        opened = [
            client.open("POST", PATH, {"model": MODEL, "input": "x", "background": True, "stream": True})
            for _ in range(8)
        ]
        for request in opened:
            await request.sent_something()
            request.disconnect()
            await request.task
        store = client.context.shared.responses.store
        most = 0
        while any(response.is_running for response in store._by_owner[None].values()):
            client.engine.step(1)
            for _ in range(20):
                await asyncio.sleep(0)
            most = max(most, store.num_bytes)
        assert most <= limit + 8 * LEAST_LOG_BYTES
        response = next(one for one in store._by_owner[None].values() if one.log is not None)
        path = f"{PATH}/{response.id}"
        assert (await client.get(path)).json()["output"][0]["content"][0]["text"] == text
        answer = await client.get(f"{path}?stream=true")
        assert (answer.status, answer.error["code"]) == (410, "events_dropped")
        assert response.log is not None
        answer = await client.get(f"{path}?stream=true&starting_after={response.log._num_dropped - 1}")
        assert answer.status == 200 and b"response.completed" in answer.body


@on_event_loop
async def test_a_reader_that_is_too_slow_gets_an_error_at_the_end_of_its_stream() -> None:
    log = EventLog()
    log.append([b"x" * 100] * 10)
    assert log.num_bytes == 10 * (100 + EVENT_BYTES)

    class OneLog:
        async def read_events(self, response_id: str, owner: str | None, start: int) -> EventPage:
            return await log.page(start)

    reader = follow_events(OneLog(), "resp_1", None, 0)  # type: ignore[arg-type]
    assert len(await anext(reader)) == 1000
    log.append([b"y" * 100] * 10)
    log.drop_older_half()
    assert len(await anext(reader)) == 1000, "it has read what was dropped"
    log.append([b"z" * 100] * 10)
    log.drop_older_half()
    log.drop_older_half()
    with pytest.raises(Exception, match="has dropped the first"):
        await anext(reader)


def test_an_empty_store_holds_nothing() -> None:
    assert (len(ResponseStore(5, 5)), ResponseStore(5, 5).num_bytes) == (0, 0)


@on_event_loop
async def test_what_a_response_holds_while_it_is_generated_is_counted() -> None:
    """Log-probabilities that are asked for are most of it: a kilobyte for each token."""
    body = {"model": MODEL, "input": "x", "background": True, "max_output_tokens": 400}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP}
    async with scripted(always_a, by_hand=True, template=TEMPLATE) as client:
        client.engine.core = GenerousClient(always_a)
        store = client.context.shared.responses.store
        found = store.find((await client.post(PATH, {**body, **logprobs})).json()["id"], None)
        assert found is not None and store.num_bytes < 10_000
        client.engine.step(200)
        await until("most of it is counted", lambda: store.num_bytes > 150_000)
        assert found.is_running
        client.engine.step(200)
        await until("it is complete", lambda: not found.is_running)
        assert found.num_output_bytes == 0 and store.num_bytes > 300_000  # it is a part of the conversation now


@on_event_loop
async def test_what_responses_hold_while_they_are_generated_is_bounded() -> None:
    """The largest one of the key that holds most fails, and says why; the others go on."""
    limit = 1_000_000
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP}
    body = {"model": MODEL, "input": "x", "background": True, "max_output_tokens": 400}
    keys = {
        key: {"authorization": f"Bearer {key}", "content-type": "application/json", "host": "localhost"}
        for key in ("sk-a", "sk-b")
    }
    settings = {"max_response_bytes": limit, "api_keys": tuple(keys)}
    async with scripted(always_a, by_hand=True, template=TEMPLATE, **settings) as client:
        client.engine.core = GenerousClient(always_a)
        store = client.context.shared.responses.store
        for key in ["sk-a"] * 4 + ["sk-b"]:
            assert (await client.post(PATH, {**body, **logprobs}, headers=keys[key])).status == 200
        most = 0
        while any(response.is_running for response in store):
            client.engine.step(5)
            for _ in range(20):
                await asyncio.sleep(0)
            most = max(most, store.num_bytes)
        assert 0.6 * limit < most < 1.2 * limit
        ended = {response.id: response for response in store}
        failed = [one for one in ended.values() if one.status == "failed"]
        assert failed and len({one.owner for one in failed}) == 1, "of the key that holds most"
        for one in failed:
            answer = (await client.get(f"{PATH}/{one.id}", headers=keys["sk-a"])).json()
            assert "--max-response-bytes" in answer["error"]["message"] and answer["output"] == []
        (other,) = (one for one in ended.values() if one.owner != failed[0].owner)
        assert other.status == "incomplete"
