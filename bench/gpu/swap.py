"""Times the swapping of blocks on a GPU: copies to pinned host memory and back, and what steps beside them lose.

    python3 bench/gpu/swap.py
    python3 bench/gpu/swap.py --blocks 512

A block is Llama-3-8B's: 16 tokens, 2 MiB in 32 tensors. The floor is one direction of PCIe 5.0 with 16 lanes, about
55 GB/s. "kernel" is a copy by a kernel on the stream of the steps, which host memory of any kind has to wait for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from time import perf_counter

import torch

from ratoon.core.plan import BlockTransfer
from ratoon.execution.kv.block_kernels import Pages, copy_blocks
from ratoon.execution.kv.block_swaps import BlockSwaps, CudaCopyStream, pinned_rows, split_rows
from ratoon.execution.kv.kv_tensors import staging_size

DEVICE = torch.device("cuda")
NUM_TENSORS, WORDS = 32, 8192
BLOCK_BYTES = NUM_TENSORS * WORDS * 8
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256, help="blocks that are swapped at once, at most")
    num_blocks = parser.parse_args().blocks
    torch.cuda.set_stream(torch.cuda.Stream())
    begin = perf_counter()
    host = pinned_rows(num_blocks + 1, NUM_TENSORS * WORDS)
    show("pin host memory", seconds=perf_counter() - begin, gib=host.nbytes / 2**30)
    tensors = [torch.randint(0, 2**40, (num_blocks + 1, WORDS), device=DEVICE) for _ in range(NUM_TENSORS)]
    pages = Pages(tensors, DEVICE)
    num_staged, part_size = staging_size(BLOCK_BYTES, num_blocks)
    staging = torch.empty(num_staged, NUM_TENSORS * WORDS, dtype=torch.int64, device=DEVICE)
    swaps = BlockSwaps(pages, host, staging, part_size, CudaCopyStream(DEVICE))
    show("measured at start-up", gb_per_s=BLOCK_BYTES / swaps.measure() / 1e9)
    check(swaps, tensors, num_blocks)
    for count in (min(16, num_blocks), num_blocks // 2, num_blocks):
        pairs = [(number, number) for number in range(1, count + 1)]
        scattered = [(number, (number * 37) % num_blocks + 1) for number in range(1, count + 1)]
        for name, blocks in (("neighbours", pairs), ("scattered", scattered)):
            transfers = [BlockTransfer(*one) for one in blocks]
            show_swap(f"out, {count} {name}", count, lambda transfers=transfers: swaps.store(transfers), swaps)
            show_swap(f"in, {count} {name}", count, lambda transfers=transfers: swaps.load(transfers), swaps)
        by_kernel(pages, split_rows(host, [WORDS] * NUM_TENSORS), pairs)
    beside_work(swaps, min(num_staged, num_blocks))


def check(swaps: BlockSwaps, tensors: list[torch.Tensor], num_blocks: int) -> None:
    """Out, overwritten at once, and back, while the device is late."""
    expected = [tensor.clone() for tensor in tensors]
    torch.cuda._sleep(20_000_000)
    transfers = [BlockTransfer(block, num_blocks + 1 - block) for block in range(1, num_blocks + 1)]
    swaps.store(transfers)
    for tensor in tensors:
        tensor[1:] = -1
    swaps.load(transfers)
    torch.cuda.synchronize()
    right = all(ours.equal(theirs) for ours, theirs in zip(tensors, expected))
    show("there and back", right=right)


def show_swap(name: str, count: int, swap: Callable[[], None], swaps: BlockSwaps) -> None:
    """The time until the copies have ended, and until the stream of the steps goes on."""
    best = (float("inf"), float("inf"), float("inf"))
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin = perf_counter()
        start.record()
        swap()
        end.record()
        launched = perf_counter() - begin
        end.synchronize()
        swaps.drain()
        whole = perf_counter() - begin
        best = min(best, (whole, start.elapsed_time(end) / 1e3, launched))
    whole, step, launched = best
    show(name, gb_per_s=count * BLOCK_BYTES / whole / 1e9, ms=whole * 1e3, step_ms=step * 1e3, host_ms=launched * 1e3)


def by_kernel(pages: Pages, host_tensors: list[torch.Tensor], blocks: list[tuple[int, int]]) -> None:
    on_host = Pages(host_tensors, DEVICE)
    for name, source, target in (("out", pages, on_host), ("in", on_host, pages)):
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begin = perf_counter()
            copy_blocks(source, target, blocks)
            torch.cuda.synchronize()
            times.append(perf_counter() - begin)
        seconds = min(times)
        show(f"{name}, {len(blocks)} by a kernel", gb_per_s=len(blocks) * BLOCK_BYTES / seconds / 1e9, ms=seconds * 1e3)


def beside_work(swaps: BlockSwaps, num_blocks: int) -> None:
    """Products and reads of memory, as in steps, with a swap out of the whole staging buffer beside them."""
    factor = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    large = torch.randn(2**28, dtype=torch.bfloat16, device=DEVICE)
    transfers = [BlockTransfer(number, number) for number in range(1, num_blocks + 1)]
    for name, work in (("products", lambda: factor @ factor), ("reads", lambda: large.sum())):
        times = {}
        for beside in (False, True):
            found = []
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                if beside:
                    swaps.store(transfers)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(20):
                    work()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end))
            times[beside] = min(found)
        show(f"{name} beside a swap of {num_blocks}", ms=times[True], alone_ms=times[False])


def show(name: str, **figures: float) -> None:
    rounded = {key: value if isinstance(value, bool) else round(value, 3) for key, value in figures.items()}
    print(f"{name:34}" + "".join(f"  {key} {value}" for key, value in rounded.items()), flush=True)
    print("RESULT " + json.dumps({"bench": "swap", "name": name, **rounded}), flush=True)


if __name__ == "__main__":
    main()
