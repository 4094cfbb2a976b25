"""Sessions over HTTP: by which fields and headers they are named, whose they are, and what is refused."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
PROMPT = "a prompt that fills more than one block of the cache, and even more than two"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(model, **settings):
    llm = make_thread_engine(str(model), **{**TINY_SETTINGS, **settings})
    async with llm:
        yield Client(ServerContext(llm, ServerSettings()))


async def figures(client):
    """Sessions, newest roots, superseded ones."""
    (stats,) = await client.context.llm.stats()
    return stats.sessions.num_sessions, stats.sessions.num_roots, stats.sessions.superseded


async def ask(client, headers=None, **fields):
    body = {"model": MODEL, "prompt": PROMPT, **GREEDY, **fields}
    answer = await client.post("/v1/completions", body, headers=JSON | (headers or {}))
    assert answer.status == 200, answer.body
    return answer.json()


@on_event_loop
async def test_a_field_or_a_header_names_a_session_and_the_next_turn_supersedes_the_last(folder):
    async with serving(folder) as client:
        await ask(client)
        assert await figures(client) == (0, 0, 0)
        await ask(client, prompt_cache_key="one")
        assert await figures(client) == (1, 1, 0)
        await ask(client, prompt=PROMPT + " " + "x" * 40, prompt_cache_key="one")
        assert await figures(client) == (1, 1, 1)
        await ask(client, {"X-Session-Id": "two"})
        await ask(client, {"X-Session-Id": "two"}, prompt=PROMPT + "y" * 40)
        assert await figures(client) == (2, 2, 2)
        await ask(client, {"X-Session-Id": "two"}, prompt="another line of work of the same session, a subagent's")
        assert await figures(client) == (2, 3, 2), "a branch: both are newest"
        await ask(client, {"X-Session-Id": "two"}, prompt_cache_key="one", prompt=PROMPT + " " + "x" * 60)
        assert await figures(client) == (2, 3, 3), "the field goes before the header"
        await ask(client, prompt_cache_key="one", cache_salt="tenant")
        assert await figures(client) == (3, 4, 3), "another salt has sessions of its own"


@on_event_loop
async def test_chats_messages_and_responses_have_sessions(folder):
    async with serving(folder) as client:
        await client.chat(PROMPT, prompt_cache_key="one", **GREEDY)
        assert await figures(client) == (1, 1, 0)
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20}
        answer = await client.post("/v1/messages", body, headers=JSON | {"X-Session-Id": "m"})
        assert answer.status == 200
        assert (await figures(client))[0] == 2
        fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 20, "ignore_eos": True}
        first = (await client.post("/v1/responses", {**fields, "input": PROMPT})).json()
        assert (await figures(client))[:2] == (3, 3)
        chained = {**fields, "input": PROMPT, "previous_response_id": first["id"]}
        answer = await client.post("/v1/responses", chained)
        assert answer.status == 200, answer.body
        assert await figures(client) == (3, 3, 1), "the chain is one session, and its newest response is kept"
        await client.post("/v1/responses", {**fields, "input": PROMPT, "store": False})
        assert (await figures(client))[0] == 3, "what is not stored is in no session"


@on_event_loop
async def test_continuations_are_a_session_and_siblings_its_branches(folder):
    async with serving(folder) as client:
        parent = await ask(client, prompt_cache_key="one")
        for suffix in ("a way to go on, and far enough", "quite another way, and as far"):
            await ask(client, prompt="", continuation_of=parent["id"], continuation_suffix=suffix)
        assert await figures(client) == (1, 2, 1), "of the parent's session; it is superseded, and both are newest"
        other = await ask(client, prompt="a prompt of no session, which is long enough for two blocks")
        await ask(client, prompt="", continuation_of=other["id"], continuation_suffix="and goes on until here")
        assert await figures(client) == (2, 3, 1)


@on_event_loop
@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({}, {"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        ({"X-Session-Id": ""}, {}, "X-Session-Id"),
        ({"X-Session-Id": "x" * 513}, {}, "X-Session-Id"),
    ],
)
async def test_what_names_no_session_and_no_retention_is_refused(folder, headers, fields, param):
    async with serving(folder) as client:
        body = {"model": MODEL, "prompt": PROMPT, **GREEDY, **fields}
        answer = await client.post("/v1/completions", body, headers=JSON | headers)
        assert answer.status == 400 and answer.json()["error"]["param"] == param
        if param == "prompt_cache_retention":
            assert "in_memory" in answer.json()["error"]["message"] and "24h" in answer.json()["error"]["message"]


@on_event_loop
async def test_what_stays_in_memory_is_not_written_to_files_nor_are_its_root_and_its_continuations(folder, tmp_path):
    async with serving(folder, kv_files=str(tmp_path), swap_memory="1MiB") as client:
        secret = await ask(client, prompt_cache_retention="in_memory")
        await ask(client, prompt="", continuation_of=secret["id"], continuation_suffix="and more of it, a lot")
        await ask(client, prompt_cache_retention="in-memory", prompt=PROMPT[::-1])
    assert not list(tmp_path.rglob("*.kv"))
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and "roots" in file.name)
    assert secret["id"].encode() not in written
    async with serving(folder, kv_files=str(tmp_path), swap_memory="1MiB") as client:
        kept = await ask(client, prompt_cache_retention="24h")
    assert kept["usage"]["prompt_tokens"] // TINY_SETTINGS.get("block_size", 16) <= len(list(tmp_path.rglob("*.kv")))
