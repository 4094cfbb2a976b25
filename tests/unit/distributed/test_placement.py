"""Which GPU, threads and share of the memory each rank of each engine of a host gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.core.settings import engine_config
from ratoon.distributed import placement
from ratoon.distributed.placement import place_engine, place_rank
from ratoon.execution.passes.cuda_driver import DEVICE_VARIABLE


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of 16 cores, whose GPUs `has_gpus` counts."""
    monkeypatch.setattr(placement, "usable_cores", lambda: 16)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    has_gpus(monkeypatch, 0)
    return monkeypatch


def has_gpus(machine: pytest.MonkeyPatch, count: int) -> None:
    machine.setattr(torch.cuda, "device_count", lambda: count)


def ranks_of(num_engines: int, **settings: Any) -> list[list[EngineConfig]]:
    """Returns the settings that the ranks of each engine get."""
    config = engine_config("m", **settings)
    count = config.num_ranks // config.nnodes
    engines = [place_engine(config, index, num_engines) for index in range(num_engines)]
    return [[place_rank(engine, number, count) for number in range(count)] for engine in engines]


def devices_of(num_engines: int, **settings: Any) -> list[list[tuple[str, int]]]:
    """The device of each rank, and how many share its memory."""
    placed = ranks_of(num_engines, **settings)
    return [[(rank.device, rank.cache.num_sharers) for rank in engine] for engine in placed]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ranks_of_engines_follow_each_other_on_gpus(machine: pytest.MonkeyPatch, device: str) -> None:
    has_gpus(machine, 4)
    expected = [[("cuda:0", 1), ("cuda:1", 1)], [("cuda:2", 1), ("cuda:3", 1)]]
    assert devices_of(2, tensor_parallel_size=2, device=device) == expected
    assert devices_of(2, pipeline_parallel_size=2, device=device) == expected
    (ranks,) = devices_of(1, tensor_parallel_size=2, pipeline_parallel_size=2, device=device)
    assert ranks == [(f"cuda:{number}", 1) for number in range(4)]
    assert devices_of(4, device=device) == [[(f"cuda:{number}", 1)] for number in range(4)]


def test_engines_that_share_gpus_share_their_memory(machine: pytest.MonkeyPatch) -> None:
    has_gpus(machine, 2)
    assert devices_of(2, tensor_parallel_size=2) == [[("cuda:0", 2), ("cuda:1", 2)]] * 2
    assert devices_of(3) == [[("cuda:0", 2)], [("cuda:1", 1)], [("cuda:0", 2)]]
    assert devices_of(2, device="cuda:1") == [[("cuda:1", 2)]] * 2  # what is given is kept
    has_gpus(machine, 3)
    expected = [[("cuda:0", 2), ("cuda:1", 1)], [("cuda:2", 1), ("cuda:0", 2)]]
    assert devices_of(2, tensor_parallel_size=2) == expected


@pytest.mark.parametrize(
    ("num_engines", "settings", "num_threads"),
    [
        (1, {"tensor_parallel_size": 2}, 8),
        (2, {"tensor_parallel_size": 2}, 4),
        (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        (2, {}, 8),
        (2, {"tensor_parallel_size": 2, "num_threads": 5}, 5),
        (3, {"tensor_parallel_size": 8}, 1),
        (1, {"pipeline_parallel_size": 2, "nnodes": 2}, 16),
    ],
)
def test_cores_are_divided_among_all_ranks(
    machine: pytest.MonkeyPatch, num_engines: int, settings: dict[str, Any], num_threads: int
) -> None:
    placed = [rank for engine in ranks_of(num_engines, **settings) for rank in engine]
    assert {rank.num_threads for rank in placed} == {num_threads}
    assert {(rank.device, rank.cache.num_sharers) for rank in placed} == {("cpu", len(placed))}


def test_one_worker_on_a_host_is_left_as_it_is(machine: pytest.MonkeyPatch) -> None:
    has_gpus(machine, 4)
    config = engine_config("m")
    assert place_rank(place_engine(config, 0, 1), 0, 1) == config


def test_ranks_without_a_gpu_each_are_refused(machine: pytest.MonkeyPatch) -> None:
    has_gpus(machine, 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 2 ranks of this host need a GPU each, and it has 1"):
        ranks_of(1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 3 ranks of this host need a GPU each"):
        ranks_of(2, pipeline_parallel_size=3, device="cuda")
    with pytest.raises(ConfigError, match="device: cuda:1 is one GPU, and each of 2 ranks needs its own"):
        ranks_of(1, tensor_parallel_size=2, device="cuda:1")
    assert devices_of(1, tensor_parallel_size=2, device="cpu") == [[("cpu", 2)] * 2]
    machine.setenv(DEVICE_VARIABLE, "cpu")
    assert devices_of(1, tensor_parallel_size=2) == [[("cpu", 2)] * 2]


def test_a_host_of_several_may_have_one_rank_on_the_gpu_that_it_names(machine: pytest.MonkeyPatch) -> None:
    has_gpus(machine, 2)
    assert devices_of(1, pipeline_parallel_size=2, nnodes=2, device="cuda:1") == [[("cuda:1", 1)]]
