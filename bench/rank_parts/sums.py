"""Collectives of CPU ranks, which are processes: a sum in shared memory and by gloo, the choice of tokens by all ranks
or by one, and results of experts by all-to-all or by a sum.

Run as a program, it is a rank; the first one prints what was measured as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ratoon.distributed.collectives import GroupCollective, leave_group, share_memory
from ratoon.distributed.shared_memory import SharedMemoryCollective
from ratoon.layers.expert_exchange import ExpertExchange
from ratoon.layers.native import library
from ratoon.layers.shard import Shard

ROWS, COLUMNS = 32, 4096
SIZES = {
    f"{rows} × {columns}": (rows, columns)
    for rows, columns in ((32, 4096), (1, 576), (16, 576), (1, 4096), (512, 4096))
}
VOCABULARIES = (49152, 128256)
CHOICE_ROWS = (1, 32)
# Rows, their width, experts of a row, and all of them
EXCHANGES = {
    f"{rows} × {columns}, {top_k} of {experts} experts": (rows, columns, top_k, experts)
    for rows, columns, top_k, experts in (
        (128, 2048, 2, 8), (512, 2048, 2, 8), (2048, 2048, 2, 8), (512, 2048, 8, 128), (2048, 2048, 8, 128),
    )
}  # fmt: skip
SECONDS = 100.0


def measure_sums(world_size: int, threads: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Seconds of a call, one value a round: by size and way, and of the choice of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(each) for each in (world_size, Path(folder) / "ranks", threads, rounds, repeats)]
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
            for rank in range(world_size)
        ]
        try:
            found, *_ = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    result: dict[str, Any] = json.loads(found)
    return result


def run_rank(rank: int, world_size: int, rendezvous: str, threads: int, rounds: int, repeats: int) -> None:
    kernels = library()
    if kernels is None:
        sys.exit("sums in shared memory need the CPU kernels")
    torch.set_num_threads(threads)
    kernels.ratoon_set_threads(threads)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, world_size), rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    shared = share_memory(group)
    assert shared is not None, "the ranks are on one host"
    gloo = GroupCollective(group, on_cuda=False)
    sums: dict[str, dict[str, list[float]]] = {}
    for name, size in SIZES.items():
        x = torch.ones(size)
        sums[name] = {"shared memory": [], "gloo": []}
        for _ in range(rounds):
            count = max(1, repeats * ROWS // max(ROWS, size[0]))
            sums[name]["shared memory"].append(time_of(partial(shared.all_reduce, x), shared, count))
            sums[name]["gloo"].append(time_of(partial(gloo.all_reduce, x), shared, max(1, count // 5)))
            x.fill_(1.0)
    choices = {
        f"{rows} × {size}": measure_choices(shared, rank, world_size, rows, size, rounds, repeats // 2)
        for size in VOCABULARIES
        for rows in CHOICE_ROWS
    }
    shard = Shard(rank, world_size, shared, True, "all_to_all")
    exchanges = {
        name: measure_exchange(shard, shared, *sizes, rounds, repeats // 8) for name, sizes in EXCHANGES.items()
    }
    if rank == 0:
        print(json.dumps({"sums": sums, "choices": choices, "exchanges": exchanges}))
    leave_group()


def measure_choices(
    shared: SharedMemoryCollective, rank: int, world_size: int, rows: int, size: int, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """All ranks have the logits of all and choose; or the first rank does, and tells the others."""
    each = -(-size // world_size)
    own = torch.randn(rows, each)[:, : min(each, size - rank * each)].contiguous()
    ids, bad = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.uint8)
    kernels = library()
    assert kernels is not None

    def choose(logits: torch.Tensor) -> None:
        kernels.ratoon_greedy(logits.data_ptr(), rows, size, ids.data_ptr(), bad.data_ptr())

    def by_all() -> None:
        choose(shared.all_gather(own, size))

    def by_one() -> None:
        # Also the ranks that do not choose are in the concatenation: their parts are in their buffers then.
        logits = shared.all_gather(own, size)
        told = torch.zeros(1, rows)
        if rank == 0:
            choose(logits)
            told[0] = ids
        ids.copy_(shared.all_reduce(told)[0])

    times: dict[str, list[float]] = {"all ranks choose": [], "one rank chooses": []}
    for _ in range(rounds):
        times["all ranks choose"].append(time_of(by_all, shared, repeats))
        times["one rank chooses"].append(time_of(by_one, shared, repeats))
    return times


def measure_exchange(
    shard: Shard,
    shared: SharedMemoryCollective,
    rows: int,
    columns: int,
    top_k: int,
    num_experts: int,
    rounds: int,
    repeats: int,
) -> dict[str, list[float]]:
    """From what each rank's experts have made of the rows to the sums on all ranks. A router prefers no expert."""
    generator = torch.Generator().manual_seed(7)
    experts = torch.rand(rows, num_experts, generator=generator).topk(top_k).indices.int()
    exchange, y = ExpertExchange(shard, num_experts, torch.device("cpu")), torch.ones(rows, columns)
    sliced = exchange.slice_rows(rows)

    def by_exchange() -> None:
        exchange.gather_rows(exchange.combine(y, experts, sliced), sliced)

    times: dict[str, list[float]] = {"all-to-all": [], "all-reduce": []}
    for _ in range(rounds):
        times["all-to-all"].append(time_of(by_exchange, shared, max(1, repeats)))
        times["all-reduce"].append(time_of(partial(shared.all_reduce, y), shared, max(1, repeats)))
        y.fill_(1.0)
    return times


def time_of(call: Callable[[], object], shared: SharedMemoryCollective, count: int) -> float:
    """Seconds of a call, on average. All ranks begin together."""
    for _ in range(3):
        call()
    shared.all_reduce(torch.zeros(1, 1))
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", sys.argv[4])
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
