"""Sockets between hosts: only owners of the same secret reach each other, and rows arrive as they were sent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import zmq

if sys.platform != "linux":
    pytest.skip("ranks on several hosts need Linux", allow_module_level=True)

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError, EngineError
from ratoon.core.ranks import WorkerLaunch
from ratoon.distributed.cluster import SECRET_VARIABLE, EncryptedContext, keys_of_secret, new_keys, read_secret
from ratoon.distributed.host_links import HostLinks

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
        assert endpoints[:2] == ["", ""] and all(endpoints[2:])
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
