"""The server of several models: every route of it answers, and the events of the engines are those of all models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from ratoon.api.server.app import ROUTERS
from ratoon.api.server.context import ServerContext
from ratoon.api.server.host_app import EngineModel, HostContext, build_host_app, router
from ratoon.api.server.model_host import LoadedModel, ModelHost, ModelSlot, ModelSpec
from ratoon.api.server.model_router import ModelRouter
from ratoon.api.server.model_slots import ModelState
from ratoon.api.server.routes import adapters, console, service
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import OwnState
from ratoon.core.errors import ModelError
from ratoon.observe.metrics import EngineMetrics
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import TINY_SETTINGS, Client, write_tiny_model
from tests.unit.api.server.test_engine_events import Page, bearer, watch
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import until

NAMES = ("a", "b")
KEYS: dict[str, Any] = {"api_keys": ("alice",), "admin": True, "admin_keys": ("root",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@asynccontextmanager
async def serving(
    folder: Path, gate: asyncio.Event | None = None, paused: str = "", **settings: Any
) -> AsyncIterator[Client]:
    """Two models, of which none is loaded. Their engines are threads, which start once the gate is open. The engine of
    the model `paused` takes requests and computes nothing, so that they stay until they are aborted.
    """
    given = ServerSettings(**settings)

    async def load(slot: ModelSlot, kv_memory: int | None) -> LoadedModel:
        if gate is not None:
            await gate.wait()
        llm = make_thread_engine(str(folder), metrics=EngineMetrics(slot.name), **TINY_SETTINGS)
        await llm.start()
        if slot.name == paused:
            await llm.pause()
        state = OwnState(llm, given, slot.store)
        return EngineModel(ServerContext(llm, replace(given, served_names=(slot.name,)), given_state=state))

    host = ModelHost([ModelSpec(name, str(folder)) for name in NAMES], load)
    context = HostContext(host, given)
    try:
        yield Client(context, app=build_host_app(context))
    finally:
        await host.shutdown()


def body_for(name: str, **fields: Any) -> dict[str, Any]:
    return {"model": name, "prompt": "x" * 40, "max_tokens": 400, "ignore_eos": True, **fields}


@on_event_loop
async def test_every_route_of_the_server_itself_answers_without_a_fault() -> None:
    async def load(slot: ModelSlot, kv_memory: int | None) -> LoadedModel:
        raise ModelError("the model", "has no files")

    host = ModelHost([ModelSpec(name, name) for name in NAMES], load)
    context = HostContext(host, ServerSettings(admin=True, admin_keys=("root",)))
    client = Client(context, app=build_host_app(context))
    routers = (router, *ROUTERS, console.router, service.admin_router, adapters.router)
    routes = [route for one in routers for route in one.routes if isinstance(route, APIRoute)]
    answers: dict[str, int] = {}
    for route in routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        query = "?count=1" if path.endswith("/events") else ""
        for method in sorted(route.methods):
            body = {"model": "a"} if method == "POST" else None
            answer = await client.open(method, path + query, body, headers=bearer("root")).answer()
            answers[f"{method} {path}"] = answer.status
    assert not {asked: status for asked, status in answers.items() if status >= 500}
    assert answers["GET /v1/engine/events"] == answers["GET /console/config.json"] == 200
    assert answers["DELETE /v1/engine/requests/x"] == answers["DELETE /v1/engine/leases/x"] == 404
    assert (await client.get("/console/config.json")).json()["models"] == list(NAMES)


@on_event_loop
async def test_events_are_those_of_the_engines_of_all_loaded_models(folder: Path) -> None:
    async with serving(folder, paused="a") as client:
        page = watch(client)
        await page.until("a snapshot", lambda page: page.names)
        assert page.seen[0]["models"] == list(NAMES) and not page.seen[0]["engines"]
        b, last_used = client.context.host.find("b"), 0.0
        assert b.state == ModelState.UNLOADED, "to watch a model does not load it"
        answer = await client.post("/v1/completions", body_for("b", max_tokens=4, retain_kv=600))
        await page.until("the lease", lambda page: page.leases)
        (lease,) = page.leases.values()
        assert (lease["id"], lease["engine"]) == (answer.json()["id"], 100)
        shown = merged(page)
        assert {index: one["model"] for index, one in shown.items()} == {100: "b"}
        for _ in range(100):  # the steps of a request are told if a report was asked for while it ran
            if page.steps:
                break
            await client.post("/v1/completions", body_for("b", max_tokens=4))
        await page.until("a step", lambda page: page.steps)
        assert {step[0] for step in page.steps} == {100}
        last_used = b.last_used
        dropped = await client.open("DELETE", f"/v1/engine/leases/{lease['id']}").answer()
        assert dropped.json() == {"id": lease["id"], "object": "lease.deleted", "deleted": True}
        await page.until("its end", lambda page: not page.leases)
        running = client.open("POST", "/v1/completions", body_for("a"))
        await page.until("a request of the other model", lambda page: page.requests)
        (request,) = page.requests.values()
        assert request["engine"] == 0
        assert (await client.open("DELETE", f"/v1/engine/requests/{request['id']}").answer()).status == 200
        assert (await running.answer()).error["code"] == "request_aborted"
        await client.context.host.unload(b)
        await page.until("the end of b's engine", lambda page: set(merged(page)) == {0})
        assert b.last_used == last_used, "to watch a model, and to free its lease, is no use of it"
        await client.post("/v1/completions", body_for("b", max_tokens=1))
        await page.until("b's new engine", lambda page: merged(page).get(100, {}).get("num_blocks"))
        assert merged(page)[100]["model"] == "b" and isinstance(merged(page)[100]["blocks"], str), "all of it is told"
        await page.close()


@on_event_loop
async def test_a_model_that_sleeps_is_shown_and_stays_asleep(folder: Path) -> None:
    async with serving(folder) as client:
        host = client.context.host
        for name in NAMES:
            await client.post("/v1/completions", body_for(name, max_tokens=1))
        a = host.find("a")
        a.keep_alive = 0.001
        await until("it may sleep", lambda: host.now > a.expires_at)
        await host.put_idle_away()
        assert a.state == ModelState.ASLEEP
        page = watch(client)
        await page.until("a snapshot", lambda page: page.names)
        assert set(merged(page)) == {0, 100}
        assert "blocks" in merged(page)[100] and "blocks" not in merged(page)[0]
        await client.open("DELETE", "/v1/engine/leases/nothing").answer()
        assert a.state == ModelState.ASLEEP
        await page.close()


@on_event_loop
async def test_a_key_ends_its_own_requests_of_any_model_and_an_admin_key_all(folder: Path) -> None:
    async with serving(folder, paused="b", **KEYS) as client:
        config = (await client.get("/console/config.json")).json()
        assert config["needs_key"] and config["models"] == []
        running = client.open("POST", "/v1/completions", body_for("b"), headers=bearer("alice"))
        page = watch(client, "root")
        await page.until("a request", lambda page: page.requests)
        (request,) = page.requests.values()
        assert (request["owner"], page.seen[0]["scope"]) == ("key 1", "all")
        ended = await client.open("DELETE", f"/v1/engine/requests/{request['id']}", headers=bearer("root")).answer()
        assert ended.status == 200
        assert (await running.answer()).error["code"] == "request_aborted"
        await page.close()


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_a_form_that_asks_for_a_stream_is_told_that_it_waits_for_its_model(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRouter, "grace", 0.01)

    @on_event_loop
    async def told() -> None:
        gate = asyncio.Event()
        async with serving(folder, gate) as client:
            opened = client.open("POST", path, form({"model": "b", "stream": "true"}), headers=FORM)
            await until("a comment", lambda: len(opened.sent) > 1)
            gate.set()
            answer = await opened.answer()
            assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
            assert answer.body.startswith(b": waiting for b: loading, ")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b'data: {"error":{"message":"' in answer.body, "it writes, and hears nothing"
            again = await client.open("POST", path, form({"model": "b", "stream": "yes"}), headers=FORM).answer()
            assert again.status == 400, "what is loaded answers with its own status"

    told()


FORM = {"content-type": "multipart/form-data; boundary=edge"}


def form(fields: dict[str, str]) -> bytes:
    parts = [
        f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()
    ]
    file = '--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--edge--\r\n'
    return "".join([*parts, file]).encode()


def merged(page: Page) -> dict[int, dict[str, Any]]:
    """The engines as the events told them so far. Blocks are as they were told last."""
    engines: dict[int, dict[str, Any]] = {}
    for event in page.read().seen:
        for index in event.get("engines_gone", ()):
            engines.pop(index, None)
        for one in event["engines"]:
            engines[one["index"]] = {**engines.get(one["index"], {}), **one}
    return engines
