"""Names that requests may call the server by: a web page that points a name of its own at this machine gets nothing."""

from __future__ import annotations

import pytest

from ratoon.api.server.connections import bind, release
from ratoon.api.server.middleware import AllowedHosts
from ratoon.api.server.runner import allowed_hosts
from ratoon.api.server.settings import ServerSettings
from tests.unit.api.server.harness import Client, scripted
from tests.unit.engine.fakes_async import on_event_loop

LOOPBACK = [
    *("localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "app.localhost:8000", "127.0.0.1", "127.0.0.1:8000"),
    *("127.8.9.10", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:8000", "localhost:", " localhost:8000 "),
]
OTHERS = [
    *("rebound.example", "rebound.example:8000", "192.168.0.7:8000", "0.0.0.0:8000", "[2001:db8::1]", "notlocalhost"),
    *("localhost.evil.example", "127.0.0.1.evil.example:8000", "evil.example@localhost", "localhost:80@evil", ""),
    *(":8000", "[::1", "2130706433", "127.1", "user@127.0.0.1", "localhost, evil.example", "localhost/evil"),
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_is_always_allowed(host):
    assert host in AllowedHosts()


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not(host):
    assert host not in AllowedHosts()
    assert host not in AllowedHosts(["llm.example"])


def test_names_of_the_operators_are_allowed_with_any_port():
    allowed = AllowedHosts(["LLM.example", "2001:db8::1"])
    for host in ("llm.example", "llm.example:443", "LLM.EXAMPLE.", "[2001:db8::1]:8000"):
        assert host in allowed
    assert "www.llm.example" not in allowed


@on_event_loop
async def test_a_request_by_another_name_is_refused_whatever_it_asks_for():
    async with scripted(cors_origins=("https://page.example",)) as client:
        client.context.allowed_hosts = AllowedHosts(["llm.example"])
        checked = Client(client.context)
        for path in (
            "/",
            "/console/config.json",
            "/v1/engine/events",
            "/v1/models",
            "/health",
            "/metrics",
            "/docs",
            "/nothing",
        ):
            answer = await checked.get(path, headers={"host": "rebound.example:8000"})
            assert (answer.status, answer.error["code"]) == (403, "host_refused")
            assert "rebound.example:8000" in answer.error["message"] and "--allow-host" in answer.error["message"]
        for headers in ({"host": "localhost:8000"}, {"host": "llm.example"}, {}):
            assert (await checked.get("/v1/models", headers=headers)).status == 200


@pytest.mark.parametrize(
    ("settings", "is_checked"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"api_keys": ("key",)}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("llm.example",)}, True),
        ({"api_keys": ("key",), "allowed_hosts": ("llm.example",)}, True),
        ({"admin": True, "admin_keys": ("key",)}, True),
    ],
)
def test_names_matter_on_a_loopback_address_and_where_the_operator_says_so(settings, is_checked):
    chosen = ServerSettings(port=0, **settings)
    bound = bind(chosen)
    try:
        found = allowed_hosts(bound, chosen)
        assert (found is not None) == is_checked
        assert found is None or ("localhost" in found and "rebound.example" not in found)
    finally:
        release(bound, chosen)


def test_a_unix_socket_is_out_of_a_browsers_reach(tmp_path):
    chosen = ServerSettings(uds=str(tmp_path / "socket"))
    bound = bind(chosen)
    try:
        assert allowed_hosts(bound, chosen) is None
    finally:
        release(bound, chosen)
