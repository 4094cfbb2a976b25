"""What beams pay for attention when they share the blocks of their prefix, against private copies of the same blocks.

    .venv/bin/python bench/shared_prefix.py [--prefixes 64 256 700 2048 4096] [--beams 4 8 32 64] [--rounds 7]

One decode step of one layer with the shape of SmolLM2-135M, called through the CPU backend as the model runner does.
The rest of the model is not in it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Program, align, format_spread, positive, ratios_of, spread

from ratoon.attention.cpu import CpuAttentionBackend, CpuMetadata
from ratoon.attention.interface import AttentionNeeds, CommonAttentionMetadata
from ratoon.core.kv import FullAttentionSpec
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.native import library

BLOCK_SIZE = 16
LAYER = AttentionLayer(index=0, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
OWN_TOKENS = 4  # of each beam, after the prefix
NUM_LAYERS = 30  # caches that take turns, as in the model, so that keys and values come from memory …
MAX_CACHE_BYTES = 512 << 20  # … and fewer where these would take more than this
SECONDS_PER_ROUND = 0.05


class Step:
    """A decode step of all beams, ready to be repeated."""

    def __init__(self, backend: CpuAttentionBackend, prefix: int, beams: int, shared: bool) -> None:
        self.backend = backend
        self.inputs = step_inputs(prefix, beams, shared)
        spec = FullAttentionSpec(BLOCK_SIZE, LAYER.num_kv_heads, LAYER.head_dim, "float32")
        shape = (int(self.inputs.block_table.max()) + 1, *backend.page_shapes(spec)[0])
        num_layers = min(NUM_LAYERS, max(1, MAX_CACHE_BYTES // (4 * int(np.prod(shape)))))
        generator = torch.Generator().manual_seed(0)
        one_block = torch.randn(shape[1:], generator=generator)
        self.caches = [(one_block.expand(shape).contiguous(),) for _ in range(num_layers)]
        num_rows = LAYER.num_heads + 2 * LAYER.num_kv_heads
        rows = torch.randn(beams, num_rows, LAYER.head_dim, generator=generator)
        self.q, self.k, self.v = rows.split([LAYER.num_heads, LAYER.num_kv_heads, LAYER.num_kv_heads], dim=1)
        self.metadata = backend.build_metadata(self.inputs)

    def build_metadata(self) -> CpuMetadata:
        return self.backend.build_metadata(self.inputs)

    def attend_all_layers(self) -> torch.Tensor:
        for cache in self.caches:
            out = self.backend.forward(LAYER, self.q, self.k, self.v, cache, self.metadata)
        return out


def step_inputs(prefix: int, beams: int, shared: bool) -> CommonAttentionMetadata:
    """Beams own the block that their prefix fills only in part, and all after it; without sharing, every block."""
    seq_len = prefix + OWN_TOKENS
    width = -(-seq_len // BLOCK_SIZE)
    table = 1 + np.arange(beams * width, dtype=np.int32).reshape(beams, width)
    if shared:
        table[:, : prefix // BLOCK_SIZE] = table[0, : prefix // BLOCK_SIZE]
        table = np.unique(table, return_inverse=True)[1].reshape(beams, width).astype(np.int32) + 1
    query_start = np.arange(beams + 1, dtype=np.int32)
    seq_lens = np.full(beams, seq_len, dtype=np.int32)
    slots = table[:, -1].astype(np.int64) * BLOCK_SIZE + (seq_len - 1) % BLOCK_SIZE
    return CommonAttentionMetadata(
        query_start, seq_lens, table, torch.from_numpy(query_start), torch.from_numpy(seq_lens),
        torch.from_numpy(table), torch.from_numpy(slots), BLOCK_SIZE, 1, seq_len,
    )  # fmt: skip


def seconds_of(work: Callable[[], object], per_call: int = 1) -> float:
    """The mean over as many calls as fit into a moment, each of them `per_call` pieces of work."""
    begin, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < SECONDS_PER_ROUND:
        work()
        calls += 1
    return elapsed / (calls * per_call)


class SharedPrefix(Program):
    doc = __doc__
    rounds = 7

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        prefixes = [64, 256, 700, 2048, 4096]
        parser.add_argument("--prefixes", type=positive, nargs="+", default=prefixes, metavar="TOKENS")
        parser.add_argument("--beams", type=positive, nargs="+", default=[4, 8, 32, 64], metavar="N")

    def prepare(self) -> None:
        needs = AttentionNeeds("cpu", torch.float32, BLOCK_SIZE, LAYER.head_dim, LAYER.num_heads, LAYER.num_kv_heads)
        if reasons := CpuAttentionBackend.reasons_against(needs):
            raise SystemExit(f"error: {'; '.join(reasons)}")
        kernels = library()
        assert kernels is not None
        kernels.ratoon_set_threads(self.args.threads)
        torch.set_num_threads(1)

    def measure(self) -> None:
        for prefix, beams in itertools.product(self.args.prefixes, self.args.beams):
            self.found[f"{prefix} × {beams}"] = self._measure_one(prefix, beams)

    def _measure_one(self, prefix: int, beams: int) -> dict[str, list[float]]:
        """Both kinds take turns within a round, and a ratio is taken within it."""
        backend = CpuAttentionBackend()
        steps = {name: Step(backend, prefix, beams, name == "shared") for name in ("shared", "private")}
        if not torch.equal(*(step.attend_all_layers() for step in steps.values())):
            raise SystemExit("error: with shared blocks the result is not the same as with private ones")
        found: dict[str, list[float]] = {"shared": [], "private": [], "metadata": []}
        for _ in range(self.args.rounds):
            for name, step in steps.items():
                found[name].append(seconds_of(step.attend_all_layers, len(step.caches)) * 1e6)
            found["metadata"].append(seconds_of(steps["shared"].build_metadata) * 1e6)
        return found

    def title(self) -> str:
        return f"{self.args.threads} threads; {LAYER.num_heads} heads, {LAYER.num_kv_heads} KV heads"

    def report(self) -> Iterator[str]:
        yield "microseconds for a layer, metadata once a step for all layers: median (min–max)"
        rows = [["prefix × beams", "shared", "private", "private ÷ shared", "metadata, shared"]]
        for name, found in self.found.items():
            shared, private, metadata = (format_spread(spread(values)) for values in found.values())
            ratio = format_spread(ratios_of(found["private"], found["shared"]))
            rows.append([name, shared, private, ratio, metadata])
        yield align(rows)

    def figures(self) -> dict[str, Any]:
        return {"microseconds": self.found}


if __name__ == "__main__":
    sys.exit(SharedPrefix().run())
