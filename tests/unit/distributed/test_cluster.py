"""Sockets between hosts: only owners of the same secret reach each other, and rows arrive as they were sent."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq

if sys.platform != "linux":
    pytest.skip("ranks on several hosts need Linux", allow_module_level=True)

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError, EngineError
from ratoon.core.ranks import WorkerLaunch
from ratoon.core.settings import engine_config
from ratoon.distributed import cluster
from ratoon.distributed.cluster import SECRET_VARIABLE, EncryptedContext, keys_of_secret, new_keys, read_secret
from ratoon.distributed.host_collective import HostCollective
from ratoon.distributed.host_links import HostLinks, as_bytes
from tests.golden.nodes import Relay
from tests.unit.layers.ranks import Meeting, Rank
from tests.waiting import wait_until

LOCALHOST = "127.0.0.1"


def test_only_owners_of_the_secret_are_heard() -> None:
    keys = keys_of_secret("one secret of the cluster")
    assert keys == keys_of_secret("one secret of the cluster") != keys_of_secret("another secret")
    assert keys.secret not in repr(keys)
    server, friend, stranger = EncryptedContext(keys), EncryptedContext(keys), EncryptedContext(new_keys())
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        listening, endpoint = server.listen(zmq.PULL, LOCALHOST)
        in_clear = plain.socket(zmq.PUSH)
        in_clear.linger = 0
        in_clear.connect(endpoint)
        in_clear.send(b"in clear")
        other = stranger.connect(zmq.PUSH, endpoint)
        other.linger = 0
        other.send(b"with other keys")
        assert not listening.poll(300)
        friend.connect(zmq.PUSH, endpoint).send(b"with the keys")
        assert listening.poll(10_000)
        assert listening.recv() == b"with the keys"
        assert not listening.poll(300)
    finally:
        plain.destroy(linger=0)
        for context in (friend, stranger, server):
            context.close()


def test_a_connection_whose_other_end_is_gone_without_a_word_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MILLISECONDS_BETWEEN_PINGS", 100)
    monkeypatch.setattr(cluster, "MILLISECONDS_WITHOUT_ANSWER", 1000)
    keys = new_keys()
    server, client = EncryptedContext(keys), EncryptedContext(keys)
    listening, endpoint = server.listen(zmq.PULL, LOCALHOST)
    relay = Relay(int(endpoint.rpartition(":")[2]))
    try:
        sending = client.connect(zmq.PUSH, f"tcp://{LOCALHOST}:{relay.port}")
        sending.send(b"before")
        assert listening.recv() == b"before"
        relay.is_cut.set()
        wait_until("another connection is made", lambda: relay.num_connections > 1)
        relay.is_cut.clear()
    finally:
        relay.close()
        for context in (client, server):
            context.close()


def links_of(rank: int, keys: object, num_shards: int = 1) -> HostLinks:
    """Of one of two hosts with a stage each."""
    config = EngineConfig("m", tensor_parallel_size=num_shards, pipeline_parallel_size=2, nnodes=2)
    first = rank // num_shards * num_shards
    launch = WorkerLaunch(config, rank, first, num_shards, 0, LOCALHOST)
    return HostLinks(launch, keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_as_they_were_sent_and_each_rank_has_its_neighbour(dtype: torch.dtype) -> None:
    keys = new_keys()
    links = [links_of(rank, keys, num_shards=2) for rank in range(4)]
    try:
        endpoints = [link.listen() for link in links]
        assert endpoints[:2] == [["", ""]] * 2
        assert all(before and not stage for before, stage in endpoints[2:])
        for link in links:
            link.connect(endpoints)
        rows = torch.randn(5, 8).to(dtype)
        for rank in (0, 1):
            links[rank].send(rows[rank:])
        for rank in (0, 1):
            found = torch.empty_like(rows[rank:])
            links[rank + 2].receive(found)
            assert torch.equal(found, rows[rank:])
        links[0].send(rows)
        with pytest.raises(EngineError, match=r"bytes of rows have come for \[4, 8\]"):
            links[2].receive(torch.empty_like(rows[:4]))
    finally:
        for link in links:
            link.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_on_three_hosts_has_the_same_sums_and_columns_on_all(dtype: torch.dtype) -> None:
    config, keys = EngineConfig("m", tensor_parallel_size=3, nnodes=3), new_keys()
    links = [HostLinks(WorkerLaunch(config, rank, rank, 1, 0, LOCALHOST), keys) for rank in range(3)]
    parts = torch.randn(3, 5, 4).to(dtype)
    try:
        endpoints = [link.listen() for link in links]
        assert all(stage and not before for before, stage in endpoints)
        for link in links:
            link.connect(endpoints)

        def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            collective = HostCollective(links[rank], None, rank, 3, 1)
            # Ten columns: four of the first ranks, two of the last
            columns = parts[rank][:, : 2 if rank == 2 else 4]
            first = collective.all_reduce(parts[rank].clone())
            return first, collective.all_gather(columns, 10), collective.all_reduce(parts[rank][:1] * 2)

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(work, range(3)))
        total = (parts[0] + parts[1]) + parts[2]
        doubled = (parts[0][:1] * 2 + parts[1][:1] * 2) + parts[2][:1] * 2
        columns = torch.cat(list(parts), dim=1)[:, :10]
        for one in found:
            assert all(map(torch.equal, one, (total, columns, doubled)))
        # What comes from a rank that is a sum ahead waits for its turn; a tensor of another size is refused.
        for x in (parts[1], parts[1][:2]):
            links[1]._part_takers[0].send_multipart([b"\1\0\0\0", as_bytes(x)])
        links[2]._part_takers[0].send_multipart([b"\2\0\0\0", as_bytes(parts[2])])
        assert all(map(torch.equal, links[0].exchange(parts[0]), parts))
        with pytest.raises(EngineError, match=r"bytes have come for \[5, 4\]"):
            links[0].exchange(parts[0])
    finally:
        for link in links:
            link.close()


@pytest.mark.parametrize("on_each", [1, 2])
def test_rows_go_from_each_rank_of_several_hosts_to_each(on_each: int) -> None:
    """Two hosts, with one rank or two of the stage. Rows say where they are from and where they go."""
    world_size = 2 * on_each
    ranks, keys = range(world_size), new_keys()
    config = EngineConfig("m", tensor_parallel_size=world_size, nnodes=2)
    firsts = [rank // on_each * on_each for rank in ranks]
    links = [HostLinks(WorkerLaunch(config, rank, firsts[rank], on_each, 0, LOCALHOST), keys) for rank in ranks]
    meetings = [Meeting(on_each), Meeting(on_each)]
    counts = [[(3 * source + target) % 4 for target in ranks] for source in ranks]

    def rows(source: int, target: int) -> torch.Tensor:
        return torch.tensor([[source, target, row] for row in range(counts[source][target])]).reshape(-1, 3).float()

    def work(rank: int) -> torch.Tensor:
        own = Rank(meetings[rank // on_each], rank % on_each) if on_each > 1 else None
        collective = HostCollective(links[rank], own, rank, world_size, on_each)
        return collective.all_to_all(torch.cat([rows(rank, target) for target in ranks]), counts)

    try:
        endpoints = [link.listen() for link in links]
        for link in links:
            link.connect(endpoints)
        with ThreadPoolExecutor(world_size) as pool:
            for rank, found in enumerate(pool.map(work, ranks)):
                assert torch.equal(found, torch.cat([rows(source, rank) for source in ranks]))
    finally:
        for link in links:
            link.close()


def test_hosts_have_equal_parts_of_stages() -> None:
    for settings in (
        {"nnodes": 2, "tensor_parallel_size": 2},
        {"nnodes": 2, "tensor_parallel_size": 4},
        {"nnodes": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"nnodes": 2, "tensor_parallel_size": 3, "pipeline_parallel_size": 2},
        {"nnodes": 3, "tensor_parallel_size": 6},
    ):
        engine_config("m", **settings)
    for settings in (
        {"nnodes": 2},
        {"nnodes": 2, "tensor_parallel_size": 3},
        {"nnodes": 2, "pipeline_parallel_size": 3},
        {
            "nnodes": 2,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
        },  # one and a half a host
    ):
        with pytest.raises(ConfigError, match="nnodes: 2 hosts can't have equal parts"):
            engine_config("m", **settings)


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of the environment\n")
    assert read_secret(EngineConfig("m")) == "of the environment"
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cluster_secret_file: can't be read"):
        read_secret(EngineConfig("m", cluster_secret_file=str(file)))
    file.write_text("of a file, and long enough\n")
    assert read_secret(EngineConfig("m", cluster_secret_file=str(file))) == "of a file, and long enough"
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(ConfigError, match="nnodes: hosts authenticate each other by a secret"):
        read_secret(EngineConfig("m"))
