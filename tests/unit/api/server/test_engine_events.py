"""/v1/engine/events over a real engine with a tiny model: a snapshot, what changes, and who sees what."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, OpenRequest, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import until

NUM_BLOCKS = TINY_SETTINGS["num_blocks"]
FREE, CACHED, USED, LEASED, NULL = range(5)
KEYS = {"api_keys": ("alice", "bob"), "admin": True, "admin_keys": ("root",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder, **settings):
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings(**settings)))


def bearer(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


class Page:
    """What a page makes of the events of a stream."""

    def __init__(self, opened: OpenRequest) -> None:
        self.opened = opened
        self.num_read = 0
        self.names: list[str] = []
        self.blocks: list[int] = []
        self.requests: dict[str, dict] = {}
        self.leases: dict[str, dict] = {}
        self.steps: list[list] = []
        self.seen: list[dict] = []

    def read(self) -> Page:
        body = b"".join(message["body"] for message in self.opened.sent[1:]).decode()
        events = [event for event in body.split("\n\n")[:-1] if not event.startswith(":")]
        for text in events[self.num_read :]:
            name, data = text.split("\n")
            self.names.append(name.removeprefix("event: "))
            self.apply(json.loads(data.removeprefix("data: ")))
        self.num_read = len(events)
        return self

    def apply(self, event: dict) -> None:
        self.seen.append(event)
        for engine in event["engines"]:
            blocks = engine.get("blocks")
            if isinstance(blocks, str):
                self.blocks = list(base64.b64decode(blocks))
            for place, code in blocks.items() if isinstance(blocks, dict) else ():
                self.blocks[int(place)] = code
        for kind, held in (("requests", self.requests), ("leases", self.leases)):
            for gone in event.get(f"{kind}_gone", ()):
                del held[gone]
            held.update((one["key"], one) for one in event[kind])
        self.steps += event["steps"]

    async def until(self, what: str, condition) -> None:
        await until(what, lambda: condition(self.read()))

    async def close(self) -> None:
        self.opened.disconnect()
        await self.opened.answer()


def watch(client: Client, key: str | None = None) -> Page:
    headers = None if key is None else bearer(key)
    return Page(client.open("GET", "/v1/engine/events?interval=0.1", headers=headers))


def long_request(client: Client, key: str | None = None, **fields) -> OpenRequest:
    body = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
    return client.open("POST", "/v1/completions", body, headers=None if key is None else bearer(key))


def marked(blocks: list[int], code: int) -> set[int]:
    return {place for place, found in enumerate(blocks) if found == code}


def blocks_of(one: dict) -> set[int]:
    return {place for first, last in one["blocks"] for place in range(first, last + 1)}


@on_event_loop
async def test_a_snapshot_is_followed_by_what_changes(folder):
    async with serving(folder) as client:
        await client.context.llm.pause()
        page = watch(client)
        await page.until("a snapshot", lambda page: page.names == ["snapshot"])
        (first,) = page.seen
        assert first["models"] == [MODEL] and first["scope"] == "all" and not first["requests"]
        assert first["engines"][0]["state"] == "ok" and first["engines"][0]["num_blocks"] == NUM_BLOCKS
        assert page.blocks == [NULL] + [FREE] * (NUM_BLOCKS - 1)
        running = long_request(client, max_tokens=300, stream=False, retain_kv=600)
        await page.until("a request that waits", lambda page: page.requests)
        (waiting,) = page.requests.values()
        assert (waiting["state"], waiting["kind"], waiting["prompt_tokens"]) == ("waiting", "generate", 40)
        assert waiting["owner"] is None and waiting["age"] >= 0 and waiting["blocks"] == []
        await client.context.llm.resume()
        answer = (await running.answer()).json()
        await page.until("its end, and a lease", lambda page: not page.requests and page.leases)
        lease = page.leases[f"0//{answer['id']}"]
        assert lease["id"] == answer["id"]
        assert lease["tokens"] == 340 and 0 < lease["seconds_left"] <= 600
        assert marked(page.blocks, LEASED) == blocks_of(lease) and not marked(page.blocks, USED)
        assert len(blocks_of(lease)) == -(-339 // 16)  # the last token is not computed
        assert sum(step[3] for step in page.steps) == 40 and sum(step[4] for step in page.steps) == 300
        assert all(step[0] == 0 and step[2] >= 0 and step[5] == 1 for step in page.steps)
        assert set(page.names[1:]) == {"delta"}
        rates = page.seen[-1]["rates"]
        assert rates["memory_bytes"] > 0 and rates["num_running"] == 0 and rates["draft_acceptance"] is None
        dropped = await client.open("DELETE", f"/v1/engine/leases/{answer['id']}").answer()
        assert dropped.json() == {"id": answer["id"], "object": "lease.deleted", "deleted": True}
        await page.until("the end of the lease", lambda page: not page.leases)
        assert not marked(page.blocks, LEASED) and marked(page.blocks, CACHED)
        assert (await client.open("DELETE", f"/v1/engine/leases/{answer['id']}").answer()).status == 404
        await page.close()


@on_event_loop
async def test_there_are_at_most_ten_events_a_second(folder):
    async with serving(folder) as client:
        running = long_request(client, max_tokens=400, stream=False)
        answer = await client.get("/v1/engine/events?count=6&interval=0.1")
        times = [json.loads(line[6:])["time"] for line in answer.body.decode().splitlines() if line[:6] == "data: "]
        assert len(times) == 6
        assert min(later - former for former, later in itertools.pairwise(times)) >= 0.09, "of wall clocks"
        await running.answer()


@on_event_loop
async def test_nothing_is_collected_unless_it_is_watched(folder):
    async with serving(folder) as client:
        core = client.context.llm._client.inproc.core
        await client.complete(prompt="abc", max_tokens=4)
        assert not core.map.is_watched and core.scheduler.kv_cache.pool.changed is None
        answer = await client.get("/v1/engine/events?count=1")
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body.startswith(b"event: snapshot\ndata: {") and answer.body.endswith(b"}\n\n")
        assert core.map.is_watched and client.context.watch._task is None


@on_event_loop
async def test_a_request_is_aborted_by_its_id(folder):
    async with serving(folder) as client:
        await client.context.llm.pause()  # the request cannot end before it is shown
        page, running = watch(client), long_request(client, stream=False)
        await page.until("a request", lambda page: page.requests)
        name = next(iter(page.requests.values()))["id"]
        answer = await client.open("DELETE", f"/v1/engine/requests/{name}").answer()
        assert answer.json() == {"id": name, "object": "request.aborted", "aborted": True}
        await client.context.llm.resume()
        ended = await running.answer()
        assert (ended.status, ended.error["code"]) == (409, "request_aborted")
        await page.until("its end", lambda page: not page.requests)
        again = await client.open("DELETE", f"/v1/engine/requests/{name}").answer()
        assert (again.status, again.error["param"]) == (404, "request_id")
        await page.close()


@on_event_loop
async def test_a_key_sees_and_ends_its_own_requests_and_an_admin_key_all(folder):
    async with serving(folder, **KEYS) as client:
        await client.context.llm.pause()
        requests = {key: long_request(client, key, prompt=f"secret of {key}") for key in ("alice", "bob")}
        pages = {key: watch(client, key) for key in ("alice", "bob", "root")}
        await pages["root"].until("both requests", lambda page: len(page.requests) == 2)
        ids = {one["owner"]: one["id"] for one in pages["root"].requests.values()}
        assert ids.keys() == {"key 1", "key 2"}
        for key, label in (("alice", "key 1"), ("bob", "key 2")):
            await pages[key].until("its request", lambda page: page.requests)
            assert [one["owner"] for one in pages[key].requests.values()] == [label]
            assert pages[key].seen[0]["scope"] == "own" and not pages[key].steps
        for page in pages.values():
            shown = json.dumps(page.seen)
            assert not any(secret in shown for secret in ("secret of", "alice", "bob", "root"))
        theirs = await client.open("DELETE", f"/v1/engine/requests/{ids['key 1']}", headers=bearer("bob")).answer()
        assert theirs.status == 404
        for key, label in (("alice", "key 1"), ("root", "key 2")):
            path = f"/v1/engine/requests/{ids[label]}"
            assert (await client.open("DELETE", path, headers=bearer(key)).answer()).status == 200
        await client.context.llm.resume()
        for opened in requests.values():
            assert b'"finish_reason":"abort"' in (await opened.answer()).body
        for page in pages.values():
            await page.close()
        for headers, status in (({}, 401), (bearer("eve"), 401)):
            assert (await client.get("/v1/engine/events", headers=headers)).status == status
        assert (await client.get("/v1/models", headers=bearer("root"))).status == 403


@on_event_loop
async def test_two_keys_may_choose_the_same_id_for_a_request(folder):
    async with serving(folder, **KEYS) as client:
        await client.context.llm.pause()
        page = watch(client, "root")
        requests = {key: long_request(client, key, request_id="mine") for key in ("alice", "bob")}
        await page.until("both requests", lambda page: len(page.requests) == 2)
        (name,) = {one["id"] for one in page.requests.values()}
        assert {one["owner"] for one in page.requests.values()} == {"key 1", "key 2"}
        path = f"/v1/engine/requests/{name}"
        assert (await client.open("DELETE", path, headers=bearer("alice")).answer()).status == 200
        await page.until("the end of the one", lambda page: len(page.requests) == 1)
        (left,) = page.requests.values()
        assert left["owner"] == "key 2"
        assert (await client.open("DELETE", path, headers=bearer("bob")).answer()).status == 200
        await client.context.llm.resume()
        for opened in requests.values():
            await opened.answer()
        await page.close()


@on_event_loop
async def test_blocks_of_others_are_not_on_the_map_of_a_key(folder):
    async with serving(folder, **KEYS) as client:
        page, everything = watch(client, "alice"), watch(client, "root")
        for key in ("alice", "bob"):
            body = {"model": MODEL, "prompt": "y" * 60 + key, "max_tokens": 2, "retain_kv": 600}
            assert (await client.post("/v1/completions", body, headers=bearer(key))).status == 200
        await everything.until("two leases", lambda page: len(page.leases) == 2)
        await page.until("its own lease", lambda page: page.leases)
        (own,) = page.leases.values()
        assert marked(page.blocks, LEASED) == blocks_of(own) and not marked(page.blocks, CACHED)
        assert marked(everything.blocks, LEASED) > blocks_of(own)
        await page.close()
        await everything.close()


@pytest.mark.parametrize("query", ["interval=0.05", "interval=11", "interval=often", "count=0"])
def test_a_wrong_query_is_refused_by_name(folder, query):
    @on_event_loop
    async def refused():
        async with serving(folder) as client:
            answer = await client.get(f"/v1/engine/events?{query}")
            assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])

    refused()


@on_event_loop
async def test_streams_end_with_the_server(folder):
    async with serving(folder) as client:
        page = watch(client)
        await page.until("a snapshot", lambda page: page.names)
        client.context.draining = True
        await asyncio.wait_for(page.opened.answer(), 60)
