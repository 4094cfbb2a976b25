"""Ranks and replicas on a real Ray cluster, of several nodes in this machine. All of it is in one file: one cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ratoon[ray]'", allow_module_level=True)

import ray
from ray.cluster_utils import Cluster

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.health import EngineState
from ratoon.core.messages import EngineLaunch
from ratoon.distributed import ray_cluster
from ratoon.distributed.ray_cluster import connect_to_ray
from ratoon.engine.processes import replica
from ratoon.engine.processes.ray_engines import RayEngineProcess
from tests.faults.processes import SETTINGS, is_running, model_name
from tests.faults.test_engine_death import num_requests_in, read_stream
from tests.golden import test_encode_engines as images
from tests.golden.engines import greedy
from tests.golden.every_kind import PROMPTS, answers, ask_everything, encoder_prompts, open_engine, right_answers
from tests.golden.every_kind_over_http import check_everything, two_front_ends
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.image_readers import image_reader
from tests.golden.nodes import Relay
from tests.golden.test_encoder_decoder_api import folder_of
from tests.golden.tiny_models import random_token_ids
from tests.ports import free_port
from tests.real_models import needs_embedded_model
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]

ON_RAY: dict[str, Any] = {"executor": "ray", "tensor_parallel_size": 2}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}  # room for one rank, or for one replica


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes, which processes of this test find by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_health_check_period_ms", "500")  # a lost node is noticed sooner
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            for _ in range(2):
                made.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def actors_by_node(cluster: Cluster, name: str) -> dict[Any, list[int]]:
    """The processes of actors of a class, by their nodes."""
    by_raylet = {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}
    found: dict[Any, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in by_raylet and (folder / "cmdline").read_text().startswith(f"ray::{name}"):
                found.setdefault(by_raylet[parent], []).append(int(folder.name))
    return found


def free_cpus() -> float:
    """Returns the cores of the cluster that nothing uses."""
    # Connected here, since an engine in a process of its own does not connect this one
    return float(connect_to_ray("the test").available_resources().get("CPU", 0))


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_on_several_nodes_answer_as_one_worker(cluster: Cluster, ranks: str) -> None:
    with open_engine(grammar_folder(FAMILY), executor="ray", **{ranks: 2}) as llm:
        ask_everything(llm).check(right_answers())
        assert [len(pids) for pids in actors_by_node(cluster, "RankActor").values()] == [1, 1]
    wait_until("the room of the ranks is free again", lambda: free_cpus() == 3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("t5", {}),
        pytest.param("quantised", {"quantization": "int8"}, marks=pytest.mark.full),
        pytest.param("whisper", {}, marks=pytest.mark.full),
        pytest.param("marian", {}, marks=pytest.mark.full),
    ],
)
def test_ranks_with_an_encoder_or_quantised_weights_answer_as_ranks_of_one_host(
    cluster: Cluster, kind: str, settings: dict[str, Any]
) -> None:
    """To the bit: sums are in the order of ranks, wherever these are."""
    folder, prompts = grammar_folder(FAMILY), PROMPTS
    if kind != "quantised":
        folder, prompts = folder_of(kind), encoder_prompts(kind)
    found = []
    for executor in ("mp", "ray"):
        with open_engine(folder, **settings, executor=executor, tensor_parallel_size=2, skip_tokenizer=True) as llm:
            found.append(answers(llm, prompts))
    assert found[0] == found[1]


def test_replicas_behind_front_ends_answer_as_one_worker(cluster: Cluster) -> None:
    with two_front_ends(grammar_folder(FAMILY), "--ray") as client:
        assert len(actors_by_node(cluster, "EngineActor")) == 2
        check_everything(client)
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


def test_streams_survive_a_rank_that_is_killed(cluster: Cluster) -> None:
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS, **ON_RAY) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(4)}
            streams = [asyncio.create_task(read_stream(llm, seed, 200)) for seed in range(4)]
            await until("all have begun", lambda: has_progressed(llm, 4))
            _, victim = [pid for pids in actors_by_node(cluster, "RankActor").values() for pid in pids]
            os.kill(victim, signal.SIGKILL)
            for seed, tokens in enumerate(await asyncio.gather(*streams)):
                assert {choice: ids[:60] for choice, ids in tokens.items()} == right[seed]
            assert llm.health().engines[0].num_restarts == 1

    asyncio.run(run())
    wait_until("the room of the ranks is free again", lambda: free_cpus() == 3)


def has_progressed(llm: AsyncLLM, count: int) -> bool:
    return sum(entry.progressed for entry in llm._client._ledger._entries.values()) == count


def test_replicas_are_added_and_drained_and_a_lost_node_loses_no_request(cluster: Cluster) -> None:
    seen: set[int] = set()

    async def load(llm: AsyncLLM, right: dict[int, Any], num_streams: int) -> None:
        found = await asyncio.gather(*(read_stream(llm, index % 4) for index in range(num_streams)))
        assert found == [right[index % 4] for index in range(num_streams)]

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS, num_replicas=2, ray=True) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(4)}
            seen.update(engine.pid or 0 for engine in llm.health().engines)
            loaded = asyncio.create_task(load(llm, right, 24))
            await until("both work", lambda: num_requests_in(llm, 0) > 3 and num_requests_in(llm, 1) > 3)
            await asyncio.to_thread(lose_a_node_with_an_engine, cluster)
            await loaded
            await until("one was lost", lambda: sum(one.num_restarts for one in llm.health().engines) == 1)
            await until("it is back, on another node", lambda: count(llm, EngineState.OK) == 2)
            cluster.add_node(**NODE)  # in the main thread, as Ray asks for
            assert await llm.add_replica() == 2
            seen.update(engine.pid or 0 for engine in llm.health().engines)
            loaded = asyncio.create_task(load(llm, right, 24))
            await until("the new one works", lambda: num_requests_in(llm, 2) > 3)
            await llm.drain_replica(0)
            assert [engine.state for engine in llm.health().engines] == ["drained", "ok", "ok"]
            await loaded
            with pytest.raises(RequestError, match="there is no engine 0 that runs"):
                await llm.drain_replica(0)
            assert len(llm._client._ledger) == 0

    asyncio.run(run())
    wait_until("no engine process is left", lambda: not any(is_running(pid) for pid in seen - {0}))
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


def count(llm: AsyncLLM, state: EngineState) -> int:
    return sum(engine.state == state for engine in llm.health().engines)


def lose_a_node_with_an_engine(cluster: Cluster) -> None:
    """Ends a node other than the head: of two engines, each on a node of its own, at most one is there."""
    node = next(node for node in actors_by_node(cluster, "EngineActor") if node is not cluster.head_node)
    cluster.remove_node(node)


def test_replicas_on_nodes_tell_what_they_hold(cluster: Cluster) -> None:
    async def run() -> None:
        settings = {**SETTINGS, "num_replicas": 2, "ray": True, "balance_by_events": True}
        async with AsyncLLM(model_name(), **settings) as llm:
            for seed in range(3):
                await read_stream(llm, seed)
            index = llm._client._index
            assert index.num_blocks_of(0) > 0 and index.num_blocks_of(1) > 0, "both have worked"
            assert await llm.reset_prefix_cache()
            await until("nothing is left", lambda: index.num_blocks == 0)

    asyncio.run(run())
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


def test_prompts_are_computed_on_one_node_and_answered_on_another(cluster: Cluster) -> None:
    """The same holds after either engine was lost: blocks go to its next run, and come from it."""
    prompt, num_blocks = random_token_ids(100, seed=1), 6
    settings: dict[str, Any] = {**SETTINGS, "ray": True, "prefill_engines": 1, "decode_engines": 1}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def answer(llm: AsyncLLM, salt: str = "") -> tuple[list[int], int]:
        """Returns the tokens of an answer, and how many blocks the last engine has received so far. With another salt
        nothing of the prompt is cached."""
        async for output in llm.generate({"prompt_token_ids": prompt}, params, cache_salt=salt or None):
            last = output
        return list(last.outputs[0].token_ids), (await llm.stats())[-1].store.loaded

    async def lose(llm: AsyncLLM, engine: int) -> None:
        os.kill(llm.health().engines[engine].pid or 0, signal.SIGKILL)
        await until("it was lost", lambda: llm.health().engines[engine].num_restarts == 1)
        await until("it is back", lambda: count(llm, EngineState.OK) == 2)

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as one:
            right, _ = await answer(one)
        async with AsyncLLM(model_name(), **settings) as llm:
            assert await answer(llm) == (right, num_blocks), "the full blocks came from the other node"
            assert len(actors_by_node(cluster, "EngineActor")) == 2
            await lose(llm, 0)
            assert await answer(llm, "second") == (right, 2 * num_blocks)
            await lose(llm, 1)
            assert await answer(llm, "third") == (right, num_blocks)

    asyncio.run(run())
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


@pytest.mark.full
def test_images_are_encoded_on_one_node_and_read_on_another(cluster: Cluster) -> None:
    """Also after the engine that encodes was lost: meanwhile the others encode, and then its next run."""
    reader = image_reader(images.FAMILY)
    prompts = [reader.prompt(0), reader.prompt(1, "who is in ", "?")]
    with images.served() as llm:
        right = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy(8), progress=False)]

    async def answer(llm: AsyncLLM, number: int, salt: str | None = None) -> list[int]:
        async for output in llm.generate(prompts[number], greedy(8), cache_salt=salt):
            last = output
        return list(last.outputs[0].token_ids)

    async def num_encoded(llm: AsyncLLM) -> list[int]:
        return [one.num_media_runs for one in await llm.stats()]

    async def run() -> None:
        settings = images.COMMON | images.SPLIT | {"ray": True, "encode_engines": 1}
        async with AsyncLLM(str(reader.folder), **settings) as llm:
            assert await asyncio.gather(answer(llm, 0), answer(llm, 1)) == right
            assert await answer(llm, 1, "a tenant") == right[1]
            assert await num_encoded(llm) == [0, 0, 3]
            assert len(actors_by_node(cluster, "EngineActor")) == 3
            pid = llm.health().engines[2].pid or 0
            os.kill(pid, signal.SIGSTOP)  # it takes the request, and does nothing
            asked = asyncio.create_task(answer(llm, 0, "another"))
            await until("its image is being encoded", lambda: len(llm._client._encodings) == 1)
            os.kill(pid, signal.SIGKILL)
            assert await asked == right[0], "an engine that answers has encoded"
            await until("it is back", lambda: [one.num_restarts for one in llm.health().engines] == [0, 0, 1])
            await until("all work", lambda: count(llm, EngineState.OK) == 3)
            assert await answer(llm, 0, "a third") == right[0]
            of_prompts, of_answers, encoded = await num_encoded(llm)
            assert (of_prompts + of_answers, encoded) == (1, 1)

    asyncio.run(run())
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


@pytest.mark.parametrize(
    "way", [pytest.param("held", marks=pytest.mark.full), pytest.param("broken", marks=pytest.mark.full), "cut"]
)
def test_connections_to_nodes_that_break_lose_no_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Both connections of an engine fail. An engine whose connections pass nothing for a while only is waited for."""
    relays: list[Relay] = []
    bind = RayEngineProcess._bind

    def bind_behind_relays(process: RayEngineProcess, launch: EngineLaunch) -> None:
        bind(process, launch)
        for name in ("input_address", "output_address"):
            found = urlsplit(getattr(launch, name))
            relays.append(Relay(found.port or 0, found.hostname or ""))
            setattr(launch, name, f"tcp://127.0.0.1:{relays[-1].port}")

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS, num_replicas=2, ray=True) as llm:
            right = {seed: await read_stream(llm, seed, 400) for seed in range(4)}
            loaded = [asyncio.create_task(read_stream(llm, index % 4, 400)) for index in range(16)]
            await until("both work", lambda: num_requests_in(llm, 0) > 3 and num_requests_in(llm, 1) > 3)
            for relay in relays[:2]:  # of one engine
                if way == "held":
                    relay.hold()
                elif way == "cut":
                    relay.is_cut.set()
                else:
                    relay.break_connections()
            if way == "held":
                await asyncio.sleep(2.0)
                for relay in relays:
                    relay.release()
            for index, tokens in enumerate(await asyncio.gather(*loaded)):
                assert tokens == right[index % 4]
            await until("both are there", lambda: count(llm, EngineState.OK) == 2)
            assert sorted(engine.num_restarts for engine in llm.health().engines) == [0, int(way != "held")]

    monkeypatch.setattr(RayEngineProcess, "_bind", bind_behind_relays)
    if way == "cut":
        monkeypatch.setattr(replica, "SILENCE_IS_DEATH", 10.0)
    asyncio.run(run())
    for relay in relays:
        relay.close()
    wait_until("the room of the engines is free again", lambda: free_cpus() == 3)


def test_a_cluster_without_room_is_an_error_that_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "SECONDS_TO_PLACE", 1.0)
    with pytest.raises(
        ConfigError, match=r"executor: the Ray cluster has no room for 2 times 64 CPU; it has 3 CPU free"
    ):
        open_engine(grammar_folder(FAMILY), **ON_RAY, num_threads=64)


@pytest.mark.full
@needs_embedded_model
def test_the_application_for_ray_serve_answers(cluster: Cluster) -> None:
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")
    connect_to_ray("ray")
    from examples import ray_serve

    port = free_port()
    serve.start(http_options={"port": port})
    try:
        serve.run(ray_serve.application)
        url = f"http://127.0.0.1:{port}/v1/completions"
        asked = {"prompt": "a", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        whole = requests.post(url, json=asked, timeout=120).json()
        assert whole["usage"]["completion_tokens"] == 5
        streamed = requests.post(url, json={**asked, "stream": True}, timeout=120, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *_, last = filter(None, streamed.iter_lines())
        assert last == b"data: [DONE]"
        refused = requests.post(url, json={**asked, "max_tokens": -1}, timeout=120)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    finally:
        serve.shutdown()
