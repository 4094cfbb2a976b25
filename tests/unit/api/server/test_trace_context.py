"""The W3C trace context of HTTP requests reaches the engine, from every route that runs something in it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.api.server.harness import MODEL, scripted
from tests.unit.engine.fakes_async import on_event_loop

CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
HEADERS = {"content-type": "application/json", "x-other": "y", **CONTEXT}
BODIES = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/embeddings": {"input": "abc"},
    "/v1/hidden_states": {"prompt": "abc"},
}


@pytest.mark.parametrize("path", BODIES)
@on_event_loop
async def test_the_clients_span_goes_along(path):
    async with scripted() as client:
        client.context.llm.engine._tracer = SimpleNamespace(record=lambda trace: None, shutdown=lambda: None)
        request = client.open("POST", path, {"model": MODEL, **BODIES[path]}, headers=HEADERS)
        while not client.engine.core.added:
            assert not request.task.done() or (await request.answer()).status == 200, await request.answer()
            await asyncio.sleep(0.001)
        request.disconnect()
        await asyncio.gather(request.task, return_exceptions=True)
        assert client.engine.core.added[-1].trace_headers == CONTEXT


@on_event_loop
async def test_a_continuation_belongs_to_the_span_of_its_own_request():
    async with scripted() as client:
        client.context.llm.engine._tracer = SimpleNamespace(record=lambda trace: None, shutdown=lambda: None)
        parent = (await client.complete(prompt="abc")).json()["id"]
        body = {"model": MODEL, "continuation_of": parent, "continuation_suffix": "x"}
        assert (await client.post("/v1/completions", body, headers=HEADERS)).status == 200
        assert [request.trace_headers for request in client.engine.core.added] == [{}, CONTEXT]
