"""API keys."""

from __future__ import annotations

import logging

import pytest

from ratoon.api.server.auth import KeyRing
from ratoon.api.server.exchange import Exchange
from ratoon.api.server.settings import ServerSettings
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

KEYS = ("sk-first", "sk-zweiter-schlüssel")


def bearing(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/docs", "/openapi.json", "/admin/stats", "/health/"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic sk-first"},
        {"authorization": "sk-first"},
        {"authorization": "Bearer sk-firs"},
        {"authorization": "Bearer sk-first2"},
        {"api-key": "sk-first"},
    ],
)
@on_event_loop
async def test_nothing_is_told_without_a_key(path, headers):
    async with scripted(api_keys=KEYS, admin=True) as client:
        answer = await client.get(path, headers=headers)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
@on_event_loop
async def test_every_key_opens(key):
    async with scripted(say("x"), api_keys=KEYS) as client:
        assert (await client.get("/v1/models", headers=bearing(key))).status == 200
        answer = await client.post("/v1/completions", {"model": MODEL, "prompt": "x"}, headers=bearing(key))
        assert answer.status == 200


@on_event_loop
async def test_what_operators_need_stays_open():
    async with scripted(api_keys=KEYS) as client:
        for path in ("/health", "/version", "/metrics"):
            assert (await client.get(path)).status == 200


def test_a_tenant_is_the_same_for_the_same_key_and_does_not_give_it_away():
    ring = KeyRing(KEYS)
    tenants = [ring.find_tenant(key.encode()) for key in KEYS]
    assert len(set(tenants)) == 2 and None not in tenants
    assert tenants == [KeyRing(reversed(KEYS)).find_tenant(key.encode()) for key in KEYS]
    assert all(key not in tenant for key, tenant in zip(KEYS, tenants))
    assert ring.find_tenant(b"other") is None


@on_event_loop
async def test_the_tenant_is_noted_in_the_exchange(monkeypatch):
    seen = []
    monkeypatch.setattr("ratoon.api.server.app._counter", lambda context: lambda scope, exchange: seen.append(exchange))
    async with scripted(api_keys=KEYS) as client:
        await client.get("/v1/models", headers=bearing(KEYS[0]))
    (exchange,) = seen
    assert isinstance(exchange, Exchange)
    assert exchange.tenant == KeyRing(KEYS).find_tenant(KEYS[0].encode())


@on_event_loop
async def test_keys_appear_nowhere(caplog):
    with caplog.at_level(logging.DEBUG):
        async with scripted(say("x"), api_keys=KEYS) as client:
            for key in ("sk-first", "sk-wrong"):
                answer = await client.post("/v1/completions", {"model": MODEL}, headers=bearing(key))
                assert key not in answer.body.decode()
    assert "sk-" not in caplog.text
    assert "sk-" not in repr(ServerSettings(api_keys=KEYS))
