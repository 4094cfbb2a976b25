"""Adapters as models of a server: which requests may name them, who may load them, and from where."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ratoon.api.adapter_options import served_adapters
from ratoon.api.commands.serve import add_parser
from ratoon.api.server.context import ServerContext
from ratoon.api.server.routes.service import Models
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError
from ratoon.models.build import collect_shapes
from ratoon.models.source import resolve_model
from ratoon.observe.metrics import EngineMetrics
from tests.adapter_folders import write_adapter
from tests.engines_async import make_thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, say, scripted, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
ADMIN_KEY = "sk-admin"
AS_ADMIN = {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters."""
    found, shapes = tmp_path_factory.mktemp("adapters"), collect_shapes(resolve_model(str(folder)).config)
    for seed, name in enumerate(("first", "second"), start=1):
        write_adapter(found / name, shapes, seed)
    return found


@asynccontextmanager
async def serving(folder: Path, root: Path | None, **settings: Any) -> AsyncIterator[Client]:
    options = {"enable_lora": True, "max_lora_rank": 8, **TINY_SETTINGS, **settings}
    async with make_thread_engine(str(folder), metrics=EngineMetrics(MODEL), **options) as llm:
        roots = () if root is None else (str(root),)
        own = ServerSettings(admin=True, admin_keys=(ADMIN_KEY,), adapter_roots=roots)
        yield Client(ServerContext(llm, own))


async def load(client: Client, name: str, path: Path | str, **fields: Any) -> Any:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await client.post(LOAD, body, headers=AS_ADMIN)


async def tokens(client: Client, model: str | None, **fields: Any) -> list[int]:
    answer = await client.complete(**{"model": model, "prompt": "abc", **GREEDY, **fields})
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["token_ids"]


@on_event_loop
async def test_an_adapter_is_a_model_of_every_route(folder, root):
    async with serving(folder, root) as client:
        base = await tokens(client, MODEL)
        assert (await client.complete(model="first", prompt="abc")).status == 404
        loaded = await load(client, "first", root / "first")
        assert loaded.status == 200 and loaded.json()["rank"] == 4
        tuned = await tokens(client, "first")
        assert tuned != base and await tokens(client, MODEL) == base

        models = (await client.get("/v1/models")).json()
        Models.model_validate(models)
        shown = {one["id"]: (one["parent"], one["root"]) for one in models["data"]}
        assert shown == {MODEL: (None, MODEL), "first": (MODEL, str(root / "first"))}
        assert (await client.get("/v1/models/first")).json()["parent"] == MODEL

        message = {"role": "user", "content": "hello"}
        bodies = {
            "/v1/chat/completions": {"messages": [message], "temperature": 0, "max_tokens": 6},
            "/v1/responses": {"input": "hello", "temperature": 0, "max_output_tokens": 6},
            "/v1/messages": {"messages": [message], "temperature": 0, "max_tokens": 6},
            "/v1/embeddings": {"input": "hello"},
            "/v1/hidden_states": {"prompt": "hello"},
        }
        for path, body in bodies.items():
            answers = [await client.post(path, {"model": name, **body}) for name in (MODEL, "first", "first")]
            assert [answer.status for answer in answers] == [200] * 3, answers[1].body
            assert [answer.json()["model"] for answer in answers] == [MODEL, "first", "first"]
            contents = [part_that_is_generated(answer.json()) for answer in answers]
            assert contents[0] != contents[1] == contents[2], path
        page = (await client.get("/metrics")).body.decode()
        assert 'ratoon_adapters_loaded{engine="0"} 1.0' in page
        assert 'ratoon_adapter_loads_total{engine="0"} 1.0' in page


def part_that_is_generated(answer: dict[str, Any]) -> Any:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    if "content" in answer:
        return [block["text"] for block in answer["content"]]
    data = answer["data"]
    return data[0]["embedding"] if isinstance(data, list) and isinstance(data[0], dict) else data


@on_event_loop
async def test_other_files_under_a_name_find_no_prefix_of_the_old_ones(folder, root, tmp_path):
    async with serving(folder, tmp_path) as client:
        shutil.copytree(root / "first", tmp_path / "one")
        assert (await load(client, "x", tmp_path / "one")).status == 200
        long = {"prompt": "a prompt that fills more than one block of the cache"}
        first = await tokens(client, "x", **long)
        shutil.rmtree(tmp_path / "one")
        shutil.copytree(root / "second", tmp_path / "one")
        refused = await load(client, "x", tmp_path / "one")
        assert refused.status == 400 and "lora_name: 'x' is the name of" in refused.error["message"]
        assert (await load(client, "x", tmp_path / "one", load_inplace=True)).status == 200
        second = await tokens(client, "x", **long)
        await load(client, "y", tmp_path / "one")
        assert first != second == await tokens(client, "y", cache_salt="alone", **long)


@on_event_loop
async def test_a_continuation_has_its_parents_adapter_and_is_refused_another_by_name(folder, root):
    async with serving(folder, root) as client:
        await load(client, "first", root / "first")
        await load(client, "second", root / "second")
        parent = (await client.complete(model="first", prompt="abc", retain_kv=60, **GREEDY)).json()
        goes_on = {"continuation_of": parent["id"], "continuation_suffix": "more", **GREEDY}
        named = (await client.complete(model="first", **goes_on)).json()
        left_out = (await client.post("/v1/completions", goes_on)).json()
        assert named["choices"][0]["token_ids"] == left_out["choices"][0]["token_ids"]
        assert named["continuation"]["source"] == "lease"
        for other, shown in (("second", "'second'"), (MODEL, "none")):
            answer = await client.complete(model=other, **goes_on)
            assert answer.status == 400 and answer.error["param"] == "model"
            assert f"is {shown}, and the request that it goes on from has 'first'" in answer.error["message"]
        states = await client.post("/v1/hidden_states", {"model": "second", "original_request_id": parent["id"]})
        assert states.status == 400


@on_event_loop
async def test_the_next_turn_of_a_response_may_have_another_adapter(folder, root):
    """It is computed afresh: nothing of the turn before is inherited."""
    async with serving(folder, root) as client:
        await load(client, "first", root / "first")
        ask = {"temperature": 0, "max_output_tokens": 6}
        turn = (await client.post("/v1/responses", {"model": "first", "input": "hello", **ask})).json()
        again = {"input": "more", "previous_response_id": turn["id"], **ask}
        same = (await client.post("/v1/responses", {"model": "first", **again})).json()
        other = (await client.post("/v1/responses", {"model": MODEL, **again})).json()
        assert same["continuation"]["source"] == "lease"
        assert "continuation" not in other or other["continuation"] is None
        assert part_that_is_generated(same) != part_that_is_generated(other)


@on_event_loop
async def test_an_unloaded_adapter_ends_for_new_requests(folder, root):
    async with serving(folder, root) as client:
        await load(client, "first", root / "first")
        opened = client.open(
            "POST", "/v1/completions", {"model": "first", "prompt": "abc", **GREEDY, "max_tokens": 200, "stream": True}
        )
        await opened.sent_something()
        assert (await client.post(UNLOAD, {"lora_name": "first"}, headers=AS_ADMIN)).json()["ok"]
        assert (await client.complete(model="first", prompt="abc")).status == 404
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == [MODEL]
        events = (await opened.answer()).events()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        again = await client.post(UNLOAD, {"lora_name": "first"}, headers=AS_ADMIN)
        assert again.status == 404 and again.error["code"] == "adapter_not_found"


@on_event_loop
async def test_only_an_admin_loads_adapters(folder, root):
    async with scripted(say("x"), api_keys=("sk-user",), admin=True, admin_keys=(ADMIN_KEY,)) as client:
        body = {"lora_name": "x", "lora_path": "/x"}
        for path in (LOAD, UNLOAD):
            assert (await client.post(path, body)).status == 401
            user = {"content-type": "application/json", "authorization": "Bearer sk-user"}
            assert (await client.post(path, body, headers=user)).status == 403
    async with scripted(say("x")) as client:
        answer = await client.post(LOAD, body)
        assert answer.status == 404 and "--admin" in answer.error["message"]


@on_event_loop
async def test_adapters_are_loaded_from_allowed_folders_alone(folder, root, tmp_path):
    async with serving(folder, None) as client:
        answer = await load(client, "x", root / "first")
        assert answer.status == 403 and "--adapter-root" in answer.error["message"]
    (tmp_path / "allowed").mkdir()
    outside = shutil.copytree(root / "first", tmp_path / "outside")
    (tmp_path / "allowed" / "link").symlink_to(outside)
    half = tmp_path / "allowed" / "half"  # a folder inside, with a file that is a link to the outside
    half.mkdir()
    shutil.copy(outside / "adapter_config.json", half)
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    shutil.copytree(root / "first", tmp_path / "allowed" / "good")
    async with serving(folder, tmp_path / "allowed") as client:
        for path in (
            outside,
            tmp_path / "allowed" / ".." / "outside",
            tmp_path / "allowed" / "link",
            half,
            tmp_path / "allowed",
            "/etc/passwd",
            "/no/such/thing",
            "relative",
        ):
            answer = await load(client, "x", path)
            assert answer.status == 403 and "not below a folder" in answer.error["message"], path
        missing = await load(client, "x", tmp_path / "allowed" / "missing")
        assert missing.status == 400 and missing.error["param"] == "lora_path"
        assert (await load(client, "x", "a\0b")).status == 400
        assert (await load(client, "x", tmp_path / "allowed" / "good" / ".." / "good")).status == 200


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * 257, MODEL])
@on_event_loop
async def test_names_that_requests_could_not_use_are_refused(name, folder, root):
    async with serving(folder, root) as client:
        answer = await load(client, name, root / "first")
        assert answer.status == 400 and answer.error["param"] == "lora_name"


@on_event_loop
async def test_the_number_of_adapters_is_limited(folder, root):
    async with serving(folder, root, max_adapters=1) as client:
        assert (await load(client, "x", root / "first")).status == 200
        answer = await load(client, "y", root / "second")
        assert answer.status == 400 and "at most 1 (max_adapters)" in answer.error["message"]


@on_event_loop
async def test_a_server_without_memory_for_adapters_says_so(folder, root):
    async with serving(folder, root, enable_lora=False) as client:
        answer = await load(client, "x", root / "first")
        assert answer.status == 400 and "--enable-lora" in answer.error["message"]


# ---- options of the command ----


def parse(*options: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "model", *options])


def test_adapters_are_given_as_options_under_our_name_and_vllms():
    args = parse("--adapter", "a=/a", "--lora-modules", "b=/b=c", '{"name": "d", "path": "/d"}', "--adapter", "e=/e")
    assert served_adapters(args, ()) == {"adapters": {"a": "/a", "b": "/b=c", "d": "/d", "e": "/e"}}
    assert served_adapters(parse(), ()) == {}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["a"], "'a' has no name or no path"),
        (["=x"], "has no name"),
        (["{"], "is no JSON"),
        (['{"name": "a"}'], "has no name or no path"),
        (["a=/a", "a=/b"], "'a' is the name of another adapter"),
        (["tiny=/a"], "'tiny' is the name of the model"),
    ],
)
def test_adapters_that_are_not_named_rightly_are_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        served_adapters(parse(*(word for one in given for word in ("--adapter", one))), ("tiny",))
