"""API keys."""

from __future__ import annotations

import logging
import re

import pytest

from ratoon.api.server.exchange import Exchange
from ratoon.api.server.middleware import KeyRing
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

KEYS = ("sk-first", "sk-zweiter-schlüssel")
ADMIN_KEY = "sk-admin"


def bearing(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/openapi.json", "/admin/stats", "/health/"])
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
    async with scripted(api_keys=KEYS, admin=True, admin_keys=(ADMIN_KEY,)) as client:
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


@on_event_loop
async def test_only_the_admin_key_opens_the_administration():
    async with scripted(api_keys=KEYS, admin=True, admin_keys=(ADMIN_KEY,)) as client:
        client.engine.results.update(stats={})
        assert (await client.get("/admin/stats", headers=bearing(ADMIN_KEY))).status == 200
        assert (await client.get("/admin/stats", headers=bearing("sk-other"))).status == 401
        for path in ("/admin/stats", "/admin", "/admin/", "/admin/nothing"):
            answer = await client.get(path, headers=bearing(KEYS[0]))
            assert (answer.status, answer.error["code"]) == (403, "admin_key_required")
        assert (await client.get("//admin/stats", headers=bearing(KEYS[0]))).status == 404


@on_event_loop
async def test_the_admin_key_opens_nothing_else():
    async with scripted(api_keys=KEYS, admin=True, admin_keys=(ADMIN_KEY,)) as client:
        answer = await client.get("/v1/models", headers=bearing(ADMIN_KEY))
        assert (answer.status, answer.error["code"]) == (403, "api_key_required")


@on_event_loop
async def test_administration_needs_its_key_where_everything_else_is_open():
    async with scripted(admin=True, admin_keys=(ADMIN_KEY,)) as client:
        assert (await client.get("/v1/models")).status == 200
        assert (await client.get("/v1/models", headers=bearing(ADMIN_KEY))).status == 200
        answer = await client.post("/admin/pause")
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert "admin key" in answer.error["message"]
        assert (await client.post("/admin/pause", headers=bearing(ADMIN_KEY))).status == 200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"admin": True}, "admin: needs an admin key; give --admin-key-file FILE"),
        ({"admin": True, "api_keys": KEYS}, "needs an admin key"),
        ({"admin": True, "api_keys": KEYS, "admin_keys": (KEYS[1],)}, "one of the API keys as well"),
        ({"admin": True, "admin_keys": (" x",)}, "admin_key"),
        ({"allowed_hosts": ("http://name",)}, "allow_host"),
        ({"allowed_hosts": ("name:8000",)}, "allow_host"),
        ({"allowed_hosts": ("",)}, "allow_host"),
    ],
)
def test_keys_and_names_that_can_not_be_meant_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServerSettings(**settings).verify()
    ServerSettings(admin=True, api_keys=KEYS, admin_keys=(ADMIN_KEY,), allowed_hosts=("llm.example", "::1")).verify()
