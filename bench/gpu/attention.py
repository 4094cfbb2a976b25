"""Attention over pages: times of the Triton kernels against floors, for several tiles and splits.

    python3 bench/gpu/attention.py             # everything: about a minute, kernels are compiled by several processes
    python3 bench/gpu/attention.py decode      # a part: decode, uneven, graph, fp8, prefill, mixed, shared, store, bits

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
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_balanced import Balance
from ratoon.attention.triton_plan import Tiles
from ratoon.layers.attention import AttentionLayer, HeadTransform
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps

READ = 4.39e12  # bytes a second
PRODUCTS = 790e12  # operations a second
ROTATED_BYTES = 256 * 2**20
MIN_LAYERS = 8  # what a step does once is spread over them
BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
BOUND = 9216  # of lengths in captured steps
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
BALANCES = {
    torch.bfloat16: [Balance(64, 3, 3), Balance(64, 4, 2), Balance(128, 3, 1, 8)],
    FP8: [Balance(128, 3, 2), Balance(64, 3, 3), Balance(64, 4, 4, 4, 128), Balance(128, 3, 2, 8, 128)],
}
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
    `per_search` requests has in common. `stores`: heads are rotated (and normed in Qwen) and stored, then attended to.
    `bound`: of lengths, as in a captured step. `padding`: requests of one token behind the others, which are none."""

    name: str
    layer: AttentionLayer
    queries: list[int]
    cached: list[int]
    shared: int = 0
    per_search: int = 1
    kv_dtype: torch.dtype = torch.bfloat16
    stores: bool = False
    bound: int | None = None
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.queries) + self.padding

    def moved(self) -> int:
        """Bytes: keys and values once (a shared prefix once for all that share it), queries and outputs."""
        layer = self.layer
        lengths = sum(q + c for q, c in zip(self.queries, self.cached, strict=True))
        lengths -= self.shared * (len(self.queries) - len(self.queries) // self.per_search)
        kept = 2 * lengths * layer.num_kv_heads * layer.head_dim * self.kv_dtype.itemsize
        return kept + 4 * self.num_tokens * layer.num_heads * layer.head_dim

    def floor(self) -> float:
        """Seconds: what is moved, or products."""
        layer = self.layer
        pairs = sum(q * c + q * (q + 1) / 2 for q, c in zip(self.queries, self.cached, strict=True))
        return max(self.moved() / READ, 4 * pairs * layer.num_heads * layer.head_dim / PRODUCTS)

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
        queries, cached = self.queries + [1] * self.padding, self.cached + [0] * self.padding
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        lengths = (np.array(queries) + cached).astype(np.int32)
        tables = np.zeros((len(queries), -(-max(self.bound or 0, lengths.max()) // BLOCK_SIZE)), np.int32)
        known = self.tables()
        tables[: len(known), : known.shape[1]] = known
        owner = np.repeat(np.arange(len(queries)), queries)
        positions = np.arange(len(owner)) - starts[owner] + np.array(cached)[owner]
        slots = tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        longest = max(queries) if self.bound is None or max(queries) == 1 else self.num_tokens
        return CommonAttentionMetadata(
            starts, lengths, tables, torch.from_numpy(starts).cuda(), torch.from_numpy(lengths).cuda(),
            torch.from_numpy(tables).cuda(), torch.from_numpy(slots).cuda(), BLOCK_SIZE, longest,
            self.bound or int(lengths.max()), is_padded=self.bound is not None,
        )  # fmt: skip

    def transform(self) -> HeadTransform:
        ops, layer = TorchOps(), self.layer
        norms: list[HeadRMSNorm | None] = [None, None]
        if layer is QWEN:
            norms = [object.__new__(HeadRMSNorm) for _ in range(2)]
            for norm in norms:
                norm.weight, norm.eps, norm.norm = torch.ones(128, device="cuda").bfloat16(), 1e-6, ops.head_rms_norm
        rotary = object.__new__(Rotary)
        angles = torch.arange(64, device="cuda")
        rotary.cos_sin = torch.cat([angles.cos(), angles.sin()])[None].repeat(16384, 1)
        rotary.rotate = ops.rotary
        return HeadTransform(torch.full((self.num_tokens,), 7, device="cuda"), rotary, *norms)

    def caches(self) -> list[torch.Tensor]:
        """As many as it takes to leave the L2 cache."""
        num_blocks = int(self.tables().max()) + 1
        shape = (num_blocks, 2, self.layer.num_kv_heads, BLOCK_SIZE, self.layer.head_dim)
        num_caches = max(1, min(16, ROTATED_BYTES // (self.kv_dtype.itemsize * int(np.prod(shape)))))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.kv_dtype) for _ in range(num_caches)]


def decode(layer: AttentionLayer, batch: int, length: int) -> Case:
    name = f"decode {batch} × {length}, {layer.num_heads}/8 heads"
    return Case(name, layer, [1] * batch, [length - 1] * batch, stores=True)


def captured(layer: AttentionLayer, batch: int, length: int, kv_dtype: torch.dtype = torch.bfloat16) -> Case:
    kept = "fp8: " if kv_dtype == FP8 else ""
    name = f"{kept}captured {batch} × {length}, {layer.num_heads}/8 heads"
    return replace(decode(layer, batch, length), name=name, bound=BOUND, kv_dtype=kv_dtype)


def uneven(layer: AttentionLayer, batch: int, kv_dtype: torch.dtype = torch.bfloat16) -> Case:
    kept = "fp8: " if kv_dtype == FP8 else ""
    lengths = np.random.default_rng(1).integers(100, 2048, batch).tolist()
    name = f"{kept}captured {batch} × 100–2,048, {layer.num_heads}/8 heads"
    return Case(name, layer, [1] * batch, lengths, bound=BOUND, kv_dtype=kv_dtype)


def continuation(layer: AttentionLayer) -> Case:
    name = f"captured, 17 behind 688, padded to 24, {layer.num_heads}/8 heads"
    return Case(name, layer, [17], [688], stores=True, bound=BOUND, padding=7)


@dataclass
class Variant:
    name: str
    make: Callable[[], TritonAttentionBackend]


@dataclass
class Plan:
    case: Case
    variants: list[Variant] = field(default_factory=lambda: [Variant("default", TritonAttentionBackend)])


def tiled(tiles: Tiles, num_splits: int | None = None, name: str = "", **options: Any) -> Variant:
    name += f"{tiles.block_m} × {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"
    splits = "" if num_splits is None else f", {num_splits} splits"
    return Variant(name + splits, lambda: TritonAttentionBackend(tiles=tiles, num_splits=num_splits, **options))


def fused(tiles: Tiles) -> Variant:
    return tiled(tiles, name="one kernel, ", fused_store=True)


def apart(tiles: Tiles) -> Variant:
    return tiled(tiles, name="two kernels, ", fused_store=False)


def balanced(balance: Balance) -> Variant:
    name = f"balanced, {balance.block_n} keys, {balance.num_warps} warps, {balance.num_stages} stages"
    name += f", {balance.programs_per_sm} programs"
    return Variant(name, lambda: TritonAttentionBackend(balance=balance))


DEFAULT = Variant("default", TritonAttentionBackend)
IN_ORDER = Variant("a request a program", lambda: TritonAttentionBackend(balance=False))
SEPARATE = Variant("separate store", lambda: TritonAttentionBackend(fused_store=False))
APART = Variant("each reads the prefix", lambda: TritonAttentionBackend(cascade=False))
NOT_DEPENDENT = Variant("no dependent launch", lambda: TritonAttentionBackend(dependent_launch=False))
INVARIANT = Variant("batch invariant", lambda: TritonAttentionBackend(batch_invariant=True))


def captured_plans() -> Iterator[Plan]:
    tiles = {stages: Tiles(16, 64, 4, stages, False) for stages in (2, 3, 4, 5)}
    for layer, length in ((LLAMA, 256), (QWEN, 256), (LLAMA, 1024)):
        ways = [DEFAULT, apart(tiles[3]), fused(tiles[2]), fused(tiles[3])]
        yield Plan(captured(layer, 1, length), ways)
    yield Plan(captured(LLAMA, 1, 8192), [DEFAULT, fused(tiles[2]), fused(tiles[3]), fused(tiles[5])])
    for layer, length in ((LLAMA, 256), (QWEN, 256), (LLAMA, 1024)):
        ways = [DEFAULT, apart(tiles[3]), apart(tiles[4]), fused(tiles[3]), fused(tiles[4])]
        yield Plan(captured(layer, 32, length), ways)
    for length in (256, 1024):
        ways = [DEFAULT, apart(tiles[3]), fused(tiles[3]), fused(tiles[4]), fused(tiles[5])]
        yield Plan(captured(LLAMA, 16, length), ways)
    for length in (256, 1024):
        yield Plan(captured(LLAMA, 256, length), [DEFAULT, apart(tiles[2]), fused(tiles[3])])
    for layer in (QWEN, LLAMA):
        ways = [tiled(Tiles(16, 64, 4, 3, False), 8), tiled(Tiles(16, 64, 4, 2, False), 16)]
        yield Plan(continuation(layer), [DEFAULT, *ways])


def plans(parts: set[str]) -> Iterator[Plan]:
    if "decode" in parts:
        splits = {(1, 1024): (8, 16, 32), (32, 1024): (1, 2, 4, 8), (256, 1024): (1, 2), (1, 8192): (16, 32)}
        for (batch, length), counts in splits.items():
            variants = [tiled(tiles, count) for tiles in DECODE_TILES for count in counts]
            yield Plan(decode(LLAMA, batch, length), [DEFAULT, INVARIANT, *variants])
        for batch, length in ((1, 256), (32, 256), (32, 8192), (256, 256)):
            yield Plan(decode(LLAMA, batch, length), [DEFAULT, INVARIANT])
        for batch, length in ((1, 256), (1, 1024), (32, 256), (32, 1024), (256, 1024)):
            yield Plan(decode(QWEN, batch, length), [DEFAULT, SEPARATE, NOT_DEPENDENT])
        yield Plan(Case("5 tokens behind 700, 32/8 heads", LLAMA, [5], [700]))
    if "uneven" in parts:
        for kv_dtype in (torch.bfloat16, FP8):
            for layer, batch in ((QWEN, 36), (QWEN, 64), (QWEN, 128), (QWEN, 256), (LLAMA, 128), (LLAMA, 256)):
                yield Plan(uneven(layer, batch, kv_dtype), [DEFAULT, IN_ORDER, *map(balanced, BALANCES[kv_dtype])])
    if "graph" in parts:
        yield from captured_plans()
    if "fp8" in parts:
        tiles = [Tiles(16, 64, 4, 3, False), Tiles(16, 64, 4, 4, False), Tiles(16, 128, 4, 3, False)]
        tiles += [Tiles(16, 128, 8, 3, False), Tiles(16, 32, 4, 4, False), Tiles(16, 64, 2, 4, False)]
        for batch in (256, 32):
            yield Plan(captured(LLAMA, batch, 1024, FP8), [DEFAULT, *map(apart, tiles), *map(fused, tiles)])
        yield Plan(captured(LLAMA, 256, 256, FP8))
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


class Run:
    """A case with its inputs and a number of caches."""

    def __init__(self, case: Case, num_caches: int | None = None) -> None:
        self.case, self.inputs, self.caches = case, case.metadata(), case.caches()[:num_caches]
        heads = [case.layer.num_heads, 8, 8]
        self.product = torch.randn(case.num_tokens, sum(heads), 128, device="cuda", dtype=torch.bfloat16)
        self.heads = self.product.split(heads, dim=1)
        self.original = self.product.clone()  # heads may be rotated in place
        self.transform = case.transform() if case.stores else None
        self.num_layers = max(MIN_LAYERS, len(self.caches))

    def attend(self, backend: TritonAttentionBackend, metadata: Any, cache: torch.Tensor) -> torch.Tensor:
        if self.case.stores:
            return backend.forward(self.case.layer, *self.heads, (cache,), metadata, self.transform)
        return backend.attend(self.case.layer, self.heads[0], (cache,), metadata)

    def attend_once(self, backend: TritonAttentionBackend, cache: torch.Tensor | None = None) -> torch.Tensor:
        """The rows that are there."""
        self.product.copy_(self.original)
        out = self.attend(backend, backend.build_metadata(self.inputs), self.caches[0] if cache is None else cache)
        return out[: sum(self.case.queries)].float()

    def attend_all(self, backend: TritonAttentionBackend) -> None:
        """As many layers of a step as `num_layers`."""
        metadata = backend.build_metadata(self.inputs)
        for index in range(self.num_layers):
            self.attend(backend, metadata, self.caches[index % len(self.caches)])


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
    case, run = plan.case, Run(plan.case)
    times = {}
    reference = TritonAttentionBackend(fused_store=False, cascade=False, num_splits=1)
    expected = run.attend_once(reference, run.caches[0].bfloat16())
    for variant in plan.variants:
        try:
            backend = variant.make()
            error = float((run.attend_once(backend) - expected).norm() / expected.norm())
            seconds = time_graph(lambda b=backend: run.attend_all(b), run.num_layers)
        except Exception as failure:
            print(f"{case.name}: {variant.name}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        times[variant.name] = seconds
        rate = round(case.moved() / seconds / 1e12, 2)
        report(case.name, variant.name, seconds, case.floor(), tb_s=rate, error=round(error, 5))
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
        try:
            Run(case, 1).attend_once(variant.make())
        except Exception as failure:
            print(variant.name, failure)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--compile"]:
        compile_share(int(arguments[1]), set(arguments[2:]))
        os._exit(0)
    parts = set(arguments) or {"decode", "uneven", "graph", "prefill", "mixed", "shared", "fp8", "store", "bits"}
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
