"""Sums, concatenations and exchanges of rows over ranks that are processes: the same bits on all, through shared memory
on one host, and by gloo where it can't be shared."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("ranks in processes need Linux", allow_module_level=True)

from ratoon.core.errors import DeviceLostError, EngineError
from ratoon.distributed.shared_memory import MemoryHandover, SharedMemoryCollective, identity_of_host, new_memory
from ratoon.layers.native import library
from ratoon.layers.native.recording import Arena, Recording

KERNELS = library()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="there are no kernels here")
SIZES = [(1, 64), (5, 1000), (40, 4096), (3, 100_001)]  # rows and columns: of one call, and of several
VOCABULARY = 1003  # which no number of ranks divides

RANK = """
import hashlib, json, os, secrets, sys, time
import torch
import torch.distributed as dist
from ratoon.distributed import collectives
from tests.unit.distributed.test_collectives import SIZES, VOCABULARY, rows_between, tensor_of, vocabulary_of
rank, world_size, repeats = map(int, sys.argv[1:4])
if sys.argv[4] == "apart":
    collectives.identity_of_host = lambda: secrets.token_bytes(32)
store = dist.FileStore(sys.argv[5], world_size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
collective = collectives.open_collective(dist.group.WORLD, on_cuda=False)
print(type(collective).__name__, flush=True)
for _ in range(repeats):
    digest = hashlib.sha256()
    for size in SIZES:
        digest.update(collective.all_reduce(tensor_of(rank, *size)).numpy().tobytes())
    digest.update(collective.all_gather(vocabulary_of(rank, world_size), VOCABULARY).numpy().tobytes())
counts, rows, expected = rows_between(rank, world_size)
for dtype in (torch.float32, torch.bfloat16):
    assert torch.equal(collective.all_to_all(rows.to(dtype), counts), expected.to(dtype)), dtype
halves = collective.all_reduce(torch.full((2, 3), 0.5 + rank, dtype=torch.bfloat16))
print(json.dumps([digest.hexdigest(), halves.tolist()]), flush=True)
collectives.leave_group()
"""


def tensor_of(rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank))


def vocabulary_of(rank: int, world_size: int) -> torch.Tensor:
    each = -(-VOCABULARY // world_size)
    return torch.arange(3 * VOCABULARY).view(3, -1).float()[:, rank * each : (rank + 1) * each]


def rows_between(rank: int, world_size: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """How many rows go from each rank to each, none from the last to the first; what this rank sends and gets."""
    ranks = range(world_size)
    counts = [
        [(5 * source + 3 * target) % 7 * (source - target < world_size - 1) for target in ranks] for source in ranks
    ]

    def rows(source: int, target: int) -> torch.Tensor:
        return tensor_of(10 * source + target, counts[source][target], 3000)

    sent = torch.cat([rows(rank, target) for target in ranks])
    return counts, sent, torch.cat([rows(source, rank) for source in ranks])


def start_ranks(world_size: int, folder: Path, apart: str = "", repeats: int = 1) -> list[subprocess.Popen[str]]:
    arguments = [str(world_size), str(repeats), apart, str(folder / "ranks")]
    return [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]


def results_of(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, Any]]:
    found = []
    for rank in ranks:
        kind, result = rank.communicate(timeout=120)[0].splitlines()
        found.append((kind, json.loads(result)))
    return found


def sum_in_order(world_size: int) -> str:
    digest = hashlib.sha256()
    for size in SIZES:
        total = tensor_of(0, *size)
        for rank in range(1, world_size):
            total = total + tensor_of(rank, *size)
        digest.update(total.numpy().tobytes())
    digest.update(torch.arange(3 * VOCABULARY).float().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow  # processes that load torch
@needs_kernels
def test_ranks_of_one_host_sum_in_shared_memory_in_the_order_of_ranks(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    for kind, (digest, halves) in results_of(start_ranks(3, tmp_path)):
        assert kind == "SharedMemoryCollective"
        assert digest == sum_in_order(3)
        assert halves == [[4.5] * 3] * 2
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
def test_ranks_that_share_no_memory_sum_by_gloo(tmp_path: Path) -> None:
    first, second = results_of(start_ranks(2, tmp_path, "apart"))
    assert first == second, "the same bits on every rank"
    kind, (digest, halves) = first
    assert kind == "GroupCollective"
    assert digest == sum_in_order(2), "the sum of two numbers has one rounding, in any order"
    assert halves == [[2.0] * 3] * 2


@pytest.mark.slow
@needs_kernels
@pytest.mark.full
def test_a_rank_that_is_stopped_for_a_while_changes_nothing(tmp_path: Path) -> None:
    ranks = start_ranks(2, tmp_path, repeats=40)
    assert all(rank.stdout is not None and rank.stdout.readline().startswith("Shared") for rank in ranks)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(rank.pid, signal.SIGCONT)
        time.sleep(0.1)
    for rank in ranks:
        digest, _ = json.loads(rank.communicate(timeout=120)[0])
        assert digest == sum_in_order(2)


@needs_kernels
def test_a_recorded_pass_holds_sums_and_concatenations() -> None:
    """One rank repeats a recording, and the other one calls: both find what the other has in its memory then."""
    assert KERNELS is not None
    descriptor = new_memory(KERNELS, 2)
    first, second = (SharedMemoryCollective(descriptor, rank, 2, seconds=60) for rank in range(2))
    os.close(descriptor)
    x, theirs = torch.randn(3, 5), torch.randn(3, 5)
    with ThreadPoolExecutor(1) as peer:

        def answer() -> torch.Tensor:
            return second.all_gather(second.all_reduce(theirs.clone())[:, :4], 9)

        answered = peer.submit(answer)
        arena = Arena()
        with Recording(arena) as recording:
            total = first.all_reduce(arena.take_floats(3, 5).copy_(x))
            y = first.all_gather(total, 9)
        program = recording.program()
        assert program is not None and program.names == ["ratoon_copy", "ratoon_all_reduce", "ratoon_all_gather"]
        for _ in range(3):
            expected = x + theirs
            assert torch.equal(y, torch.cat([expected, expected[:, :4]], dim=1))
            assert torch.equal(answered.result(), y)
            x.normal_()
            theirs.normal_()
            answered = peer.submit(answer)
            program.run()
        assert torch.equal(answered.result(), y)
    lonely = SharedMemoryCollective(new_memory(KERNELS, 2), 0, 2, seconds=0.1)
    with Recording(Arena()) as recording, pytest.raises(DeviceLostError):
        lonely.all_reduce(x)
    program = recording.program()
    assert program is not None
    with pytest.raises(DeviceLostError, match="another rank"):
        program.run()


@needs_kernels
def test_a_rank_that_is_gone_is_not_waited_for_forever() -> None:
    assert KERNELS is not None
    descriptor = new_memory(KERNELS, 2)
    first, second = (SharedMemoryCollective(descriptor, rank, 2, seconds=0.2) for rank in range(2))
    begin = time.monotonic()
    with pytest.raises(DeviceLostError, match="another rank"):
        first.all_reduce(torch.ones(2, 2))
    assert time.monotonic() - begin >= 0.2, "the other rank has its time"
    with pytest.raises(DeviceLostError, match="another rank"):  # it comes too late, and the group is broken
        second.all_gather(torch.ones(2, 2), 4)
    with pytest.raises(DeviceLostError, match="another rank"):
        second.all_to_all(torch.ones(2, 2), [[1, 1], [1, 1]])
    os.close(descriptor)


def test_a_rank_that_is_none_of_the_group_is_refused() -> None:
    if KERNELS is None:
        pytest.skip("there are no kernels here")
    descriptor = new_memory(KERNELS, 2)
    with pytest.raises(EngineError, match="rank 2 of 2"):
        SharedMemoryCollective(descriptor, 2, 2)
    os.close(descriptor)


def test_memory_is_handed_over_by_a_name_that_no_file_has() -> None:
    handover = MemoryHandover()
    with handover.listen() as listener, pytest.raises(TimeoutError):
        handover.give(listener, 0, 1, seconds=0.05)
    with pytest.raises(ConnectionRefusedError):
        MemoryHandover.take(handover.name, 1.0)
    assert identity_of_host() == identity_of_host() or KERNELS is None
