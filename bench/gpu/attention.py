"""Attention over pages: times of the Triton kernels against floors, for several tiles and splits.

    python3 bench/gpu/attention.py             # everything: about a minute, kernels are compiled by several processes
    python3 bench/gpu/attention.py decode      # a part: decode, fp8, prefill, mixed, shared, store, bits

Each figure is a line `RESULT {json}`; the table at the end has the best variant of each case, and the one that the
backend chooses by itself ("default"). Steps run as CUDA graphs over several caches, more than the L2 cache holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.triton_backend import Tiles, TritonAttentionBackend
from ratoon.layers.attention import AttentionLayer, HeadTransform
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps

READ = 4.39e12  # bytes a second
PRODUCTS = 790e12  # operations a second
ROTATED_BYTES = 256 * 2**20
BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
NUM_COMPILERS = 12
LLAMA, QWEN = AttentionLayer(0, 32, 8, 128, 128**-0.5), AttentionLayer(0, 16, 8, 128, 128**-0.5)
DECODE_TILES = [
    Tiles(16, 32, 1, 3, False),
    Tiles(16, 32, 2, 4, False),
    Tiles(16, 32, 4, 4, False),
    Tiles(16, 64, 2, 3, False),
    Tiles(16, 64, 4, 2, False),
    Tiles(16, 64, 4, 3, False),
    Tiles(16, 64, 4, 4, False),
    Tiles(16, 64, 8, 3, False),
    Tiles(16, 128, 4, 2, False),
    Tiles(16, 128, 4, 3, False),
    Tiles(16, 128, 8, 2, False),
    Tiles(16, 128, 8, 3, False),
]
PREFILL_TILES = [
    Tiles(128, 64, 8, 2, True),
    Tiles(128, 64, 8, 3, True),
    Tiles(128, 64, 4, 3, True),
    Tiles(128, 128, 8, 2, True),
    Tiles(128, 128, 8, 3, True),
    Tiles(64, 64, 4, 3, True),
    Tiles(64, 128, 4, 2, True),
]


@dataclass
class Case:
    """Requests with `queries` new tokens behind others that are cached. `shared`: cached tokens that each run of
    `per_search` requests has in common."""

    name: str
    layer: AttentionLayer
    queries: list[int]
    cached: list[int]
    shared: int = 0
    per_search: int = 1
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)

    def floor(self) -> float:
        """Seconds: keys and values read once (a shared prefix once for all that share it), or products."""
        layer = self.layer
        lengths = sum(q + c for q, c in zip(self.queries, self.cached, strict=True))
        lengths -= self.shared * (len(self.queries) - len(self.queries) // self.per_search)
        pairs = sum(q * c + q * (q + 1) / 2 for q, c in zip(self.queries, self.cached, strict=True))
        kept = 2 * lengths * layer.num_kv_heads * layer.head_dim * self.kv_dtype.itemsize
        moved = kept + 4 * self.num_tokens * layer.num_heads * layer.head_dim
        return max(moved / READ, 4 * pairs * layer.num_heads * layer.head_dim / PRODUCTS)

    def tables(self) -> np.ndarray:
        lengths = [q + c for q, c in zip(self.queries, self.cached, strict=True)]
        tables = np.zeros((len(lengths), -(-max(lengths) // BLOCK_SIZE)), np.int32)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = iter(np.random.default_rng(0).permutation(sum(counts)) + 1)
        num_shared = self.shared // BLOCK_SIZE
        for row, count in enumerate(counts):
            tables[row, :count] = [next(order) for _ in range(count)]
            if row % self.per_search:
                tables[row, :num_shared] = tables[row - 1, :num_shared]
        return tables

    def metadata(self) -> CommonAttentionMetadata:
        starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        lengths = (np.array(self.queries) + self.cached).astype(np.int32)
        tables = self.tables()
        slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + self.num_tokens, device="cuda")
        return CommonAttentionMetadata(
            starts, lengths, tables, torch.from_numpy(starts).cuda(), torch.from_numpy(lengths).cuda(),
            torch.from_numpy(tables).cuda(), slots, BLOCK_SIZE, max(self.queries), int(lengths.max()),
        )  # fmt: skip

    def caches(self) -> list[torch.Tensor]:
        """As many as it takes to leave the L2 cache."""
        num_blocks = int(self.tables().max()) + 1
        shape = (num_blocks, 2, self.layer.num_kv_heads, BLOCK_SIZE, self.layer.head_dim)
        num_caches = max(1, min(16, ROTATED_BYTES // (self.kv_dtype.itemsize * int(np.prod(shape)))))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.kv_dtype) for _ in range(num_caches)]


def decode(layer: AttentionLayer, batch: int, length: int) -> Case:
    return Case(f"decode {batch} × {length}, {layer.num_heads}/8 heads", layer, [1] * batch, [length - 1] * batch)


@dataclass
class Variant:
    name: str
    make: Callable[[], TritonAttentionBackend]


@dataclass
class Plan:
    case: Case
    variants: list[Variant] = field(default_factory=lambda: [Variant("default", TritonAttentionBackend)])


def tiled(tiles: Tiles, num_splits: int | None = None) -> Variant:
    name = f"{tiles.block_m} × {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"
    splits = "" if num_splits is None else f", {num_splits} splits"
    return Variant(name + splits, lambda: TritonAttentionBackend(tiles=tiles, num_splits=num_splits))


DEFAULT = Variant("default", TritonAttentionBackend)
SEPARATE = Variant("separate merge", lambda: TritonAttentionBackend(fused_merge=False))
APART = Variant("each reads the prefix", lambda: TritonAttentionBackend(cascade=False))
NOT_DEPENDENT = Variant("no dependent launch", lambda: TritonAttentionBackend(dependent_launch=False))
INVARIANT = Variant("batch invariant", lambda: TritonAttentionBackend(batch_invariant=True))


def plans(parts: set[str]) -> Iterator[Plan]:
    if "decode" in parts:
        splits = {(1, 1024): (8, 16, 32), (32, 1024): (1, 2, 4, 8), (256, 1024): (1, 2), (1, 8192): (16, 32)}
        for (batch, length), counts in splits.items():
            variants = [tiled(tiles, count) for tiles in DECODE_TILES for count in counts]
            yield Plan(decode(LLAMA, batch, length), [DEFAULT, SEPARATE, INVARIANT, *variants])
        for batch, length in ((1, 256), (32, 256), (32, 8192), (256, 256)):
            yield Plan(decode(LLAMA, batch, length), [DEFAULT, SEPARATE, INVARIANT])
        for batch, length in ((1, 256), (1, 1024), (32, 256), (32, 1024), (256, 1024)):
            yield Plan(decode(QWEN, batch, length), [DEFAULT, SEPARATE, NOT_DEPENDENT])
        lengths = np.random.default_rng(1).integers(100, 2048, 256).tolist()
        uneven = Case("decode 256 × 100–2,048, 32/8 heads", LLAMA, [1] * 256, lengths)
        yield Plan(uneven, [DEFAULT, *(tiled(Tiles(16, 64, 4, 3, False), count) for count in (1, 2, 4))])
        yield Plan(Case("5 tokens behind 700, 32/8 heads", LLAMA, [5], [700]), [DEFAULT, SEPARATE])
    if "fp8" in parts:
        tiles = [Tiles(16, 64, 4, 4, False), Tiles(16, 128, 4, 3, False), Tiles(16, 128, 4, 4, False)]
        tiles += [Tiles(16, 128, 8, 3, False), Tiles(16, 256, 8, 2, False)]
        for batch, counts in ((32, (2, 4)), (256, (1, 2))):
            case = replace(decode(LLAMA, batch, 1024), name=f"fp8: decode {batch} × 1024, 32/8 heads", kv_dtype=FP8)
            yield Plan(case, [DEFAULT, *(tiled(one, count) for one in tiles for count in counts)])
        yield Plan(Case("fp8: prefill 8,192, 32/8 heads", LLAMA, [8192], [0], kv_dtype=FP8))
    if "prefill" in parts:
        alone = Case("prefill 8,192, 32/8 heads", LLAMA, [8192], [0])
        yield Plan(alone, [DEFAULT, INVARIANT, *map(tiled, PREFILL_TILES)])
        yield Plan(Case("prefill 8,192, 16/8 heads", QWEN, [8192], [0]))
        yield Plan(Case("prefill 16 × 512, 32/8 heads", LLAMA, [512] * 16, [0] * 16))
    if "mixed" in parts:
        yield Plan(Case("chunk 2,048 behind 4,096, 32/8 heads", LLAMA, [2048], [4096]))
        mixed = Case(
            "255 × decode at 1,024 + chunk of 1,793, 32/8 heads", LLAMA, [1] * 255 + [1793], [1023] * 255 + [0]
        )
        yield Plan(mixed)
    if "shared" in parts:
        for layer in (LLAMA, QWEN):
            name = f"32 searches × 32 beams, 704 shared + 16, {layer.num_heads}/8 heads"
            yield Plan(Case(name, layer, [1] * 1024, [719] * 1024, 704, 32), [DEFAULT, APART])
        yield Plan(
            Case("32 beams, 704 shared + 16, 32/8 heads", LLAMA, [1] * 32, [719] * 32, 704, 32), [DEFAULT, APART]
        )


def attend_all(backend: TritonAttentionBackend, plan: Plan, q: torch.Tensor, caches: list, metadata: Any) -> None:
    for cache in caches:
        backend.attend(plan.case.layer, q, (cache,), metadata)


def time_graph(work: Callable[[], None], count: int) -> float:
    """Seconds of one of `count` equal parts of the work, in a CUDA graph; the median of several replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    begin = time.monotonic()
    while len(times) < 5 or (len(times) < 12 and time.monotonic() - begin < 0.1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(np.median(times[1:])) / count


def run_plan(plan: Plan) -> dict[str, float]:
    case = plan.case
    inputs, caches = case.metadata(), case.caches()
    q = torch.randn(case.num_tokens, case.layer.num_heads, case.layer.head_dim, device="cuda", dtype=torch.bfloat16)
    times = {}
    expected: torch.Tensor | None = None
    for variant in plan.variants:
        try:
            backend = variant.make()
            metadata = backend.build_metadata(inputs)
            out = backend.attend(case.layer, q, (caches[0],), metadata).float()
            expected = out if expected is None else expected
            error = float((out - expected).norm() / expected.norm())
            seconds = time_graph(lambda b=backend, m=metadata: attend_all(b, plan, q, caches, m), len(caches))
        except Exception as failure:
            print(f"{case.name}: {variant.name}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        times[variant.name] = seconds
        report(case.name, variant.name, seconds, case.floor(), error=round(error, 5))
    return times


def report(case: str, variant: str, seconds: float, floor: float, **more: Any) -> None:
    figure = {"bench": "attention", "case": case, "variant": variant, "us": round(seconds * 1e6, 2)}
    figure |= {"floor_us": round(floor * 1e6, 2), "times_floor": round(seconds / floor, 2), **more}
    print("RESULT", json.dumps(figure, ensure_ascii=False), flush=True)


def run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def run_store() -> None:
    """Norms of heads, rotation and write of keys and values."""
    ops, layer = TorchOps(), LLAMA
    norms = [object.__new__(HeadRMSNorm) for _ in range(2)]
    for norm in norms:
        norm.weight, norm.eps, norm.norm = torch.randn(128, device="cuda").bfloat16(), 1e-6, ops.head_rms_norm
    rotary = object.__new__(Rotary)
    rotary.cos_sin, rotary.rotate = torch.randn(8192, 128, device="cuda"), ops.rotary
    for num_tokens in (1, 32, 256, 8192):
        case = Case("", layer, [num_tokens], [0])
        backend, inputs = TritonAttentionBackend(), case.metadata()
        metadata = backend.build_metadata(inputs)
        positions = torch.arange(num_tokens, device="cuda")
        transform = HeadTransform(positions, rotary, *norms)
        num_copies = max(1, min(16, ROTATED_BYTES // (num_tokens * 48 * 256)))
        products = [torch.randn(num_tokens, 48, 128, device="cuda").bfloat16() for _ in range(num_copies)]
        caches = case.caches()
        heads = [product.split([32, 8, 8], dim=1) for product in products]

        places = [(caches[index % len(caches)],) for index in range(num_copies)]
        calls = [
            partial(backend._store, layer, *heads[index], places[index], metadata, transform)
            for index in range(num_copies)
        ]
        seconds = time_graph(partial(run_all, calls), num_copies)
        report(f"norm, rotation, store of {num_tokens}", "default", seconds, num_tokens * 48 * 128 * 2 * 2 / READ)


def same_bits_for_any_tile() -> None:
    """Whether tensor cores round alike for tiles of 16 and of 64 rows: then decoding could use the small ones where
    rows must not depend on the batch."""
    case = decode(LLAMA, 8, 512)
    inputs, cache = case.metadata(), case.caches()[0]
    q = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)
    outs = []
    for block_m in (16, 64, 128):
        backend = TritonAttentionBackend(tiles=Tiles(block_m, 64, 4, 3, False), num_splits=1)
        outs.append(backend.attend(case.layer, q, (cache,), backend.build_metadata(inputs)))
    equal = {f"16 and {m}": bool(torch.equal(outs[0], out)) for m, out in zip((64, 128), outs[1:], strict=True)}
    print("RESULT", json.dumps({"bench": "attention", "case": "equal bits for tiles of rows", **equal}), flush=True)


def compile_in_processes(parts: set[str]) -> None:
    """Compiled kernels are shared through Triton's cache on disk."""
    begin = time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, __file__, "--compile", str(index), *parts], stdout=subprocess.DEVNULL)
        for index in range(NUM_COMPILERS)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)


def compile_share(index: int, parts: set[str]) -> None:
    tasks = [(plan.case, variant) for plan in plans(parts) for variant in plan.variants]
    for case, variant in tasks[index::NUM_COMPILERS]:
        inputs, cache = case.metadata(), case.caches()[:1]
        q = torch.randn(case.num_tokens, case.layer.num_heads, 128, device="cuda", dtype=torch.bfloat16)
        try:
            backend = variant.make()
            backend.attend(case.layer, q, (cache[0],), backend.build_metadata(inputs))
        except Exception as failure:
            print(variant.name, failure)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--compile"]:
        compile_share(int(arguments[1]), set(arguments[2:]))
        os._exit(0)
    parts = set(arguments) or {"decode", "prefill", "mixed", "shared", "fp8", "store", "bits"}
    compile_in_processes(parts)
    rows = [(plan.case, run_plan(plan)) for plan in plans(parts)]
    if "store" in parts:
        run_store()
    if "bits" in parts:
        same_bits_for_any_tile()
    print(f"\n{'case':58} {'floor µs':>9} {'default':>9} {'best':>9}  best variant")
    for case, times in rows:
        if times:
            best = min(times, key=lambda name: times[name])
            default = times.get("default", float("nan"))
            print(f"{case.name:58} {case.floor() * 1e6:9.1f} {default * 1e6:9.1f} {times[best] * 1e6:9.1f}  {best}")


if __name__ == "__main__":
    main()
