"""Attention over pages: times of the Triton kernels against floors, as the backend chooses them and in other ways.

    python3 bench/gpu/attention.py             # everything
    python3 bench/gpu/attention.py decode      # a part: decode, uneven, graph, fp8, prefill, mixed, shared, store

Each figure is a line `RESULT {json}`; the table at the end has the best way of each case, and the one that the backend
chooses by itself ("default"). Steps run as CUDA graphs over several caches, more than the L2 cache holds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.triton_backend import TritonAttentionBackend
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
LLAMA, QWEN = AttentionLayer(0, 32, 8, 128, 128**-0.5), AttentionLayer(0, 16, 8, 128, 128**-0.5)


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
        rotary.rotate, rotary.axes = ops.rotary, None
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


Ways: TypeAlias = dict[str, dict[str, Any]]  # by name: options of the backend
DEFAULT: Ways = {"default": {}}
INVARIANT: Ways = {**DEFAULT, "batch invariant": {"batch_invariant": True}}
SEPARATE: Ways = {**DEFAULT, "separate store": {"fused_store": False}}
NOT_DEPENDENT: Ways = {**SEPARATE, "no dependent launch": {"dependent_launch": False}}
IN_ORDER: Ways = {**DEFAULT, "a request a program": {"balance": False}}
APART: Ways = {**DEFAULT, "each reads the prefix": {"cascade": False}}


def plans(parts: set[str]) -> Iterator[tuple[Case, Ways]]:
    if "decode" in parts:
        for batch, length in (
            (1, 256),
            (1, 1024),
            (1, 8192),
            (32, 256),
            (32, 1024),
            (32, 8192),
            (256, 256),
            (256, 1024),
        ):
            yield decode(LLAMA, batch, length), INVARIANT
        for batch, length in ((1, 256), (1, 1024), (32, 256), (32, 1024), (256, 1024)):
            yield decode(QWEN, batch, length), NOT_DEPENDENT
        yield Case("5 tokens behind 700, 32/8 heads", LLAMA, [5], [700]), DEFAULT
    if "uneven" in parts:
        for kv_dtype in (torch.bfloat16, FP8):
            for layer, batch in ((QWEN, 36), (QWEN, 64), (QWEN, 128), (QWEN, 256), (LLAMA, 128), (LLAMA, 256)):
                yield uneven(layer, batch, kv_dtype), IN_ORDER
    if "graph" in parts:
        for batch, length in ((1, 256), (1, 1024), (1, 8192), (16, 256), (16, 1024), (256, 256), (256, 1024)):
            yield captured(LLAMA, batch, length), SEPARATE
        for layer, length in ((QWEN, 256), (LLAMA, 256), (LLAMA, 1024)):
            yield captured(layer, 32, length), SEPARATE
        yield from ((continuation(layer), DEFAULT) for layer in (QWEN, LLAMA))
    if "fp8" in parts:
        for batch, length in ((256, 1024), (32, 1024), (256, 256)):
            yield captured(LLAMA, batch, length, FP8), SEPARATE
    if "prefill" in parts:
        yield Case("prefill 8,192, 32/8 heads", LLAMA, [8192], [0]), INVARIANT
        yield Case("prefill 8,192, 16/8 heads", QWEN, [8192], [0]), DEFAULT
        yield Case("prefill 16 × 512, 32/8 heads", LLAMA, [512] * 16, [0] * 16), DEFAULT
    if "mixed" in parts:
        yield Case("chunk 2,048 behind 4,096, 32/8 heads", LLAMA, [2048], [4096]), DEFAULT
        mixed = "255 × decode at 1,024 + chunk of 1,793, 32/8 heads"
        yield Case(mixed, LLAMA, [1] * 255 + [1793], [1023] * 255 + [0]), DEFAULT
    if "shared" in parts:
        for layer in (LLAMA, QWEN):
            name = f"32 searches × 32 beams, 704 shared + 16, {layer.num_heads}/8 heads"
            yield Case(name, layer, [1] * 1024, [719] * 1024, 704, 32), APART
        yield Case("32 beams, 704 shared + 16, 32/8 heads", LLAMA, [1] * 32, [719] * 32, 704, 32), APART


class Run:
    """A case with its inputs and caches."""

    def __init__(self, case: Case) -> None:
        self.case, self.inputs, self.caches = case, case.metadata(), case.caches()
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


def run_case(case: Case, ways: Ways) -> dict[str, float]:
    """Returns the seconds of each way."""
    run, times = Run(case), {}
    reference = TritonAttentionBackend(fused_store=False, cascade=False, num_splits=1)
    expected = run.attend_once(reference, run.caches[0].bfloat16())
    for way, options in ways.items():
        try:
            backend = TritonAttentionBackend(**options)
            error = float((run.attend_once(backend) - expected).norm() / expected.norm())
            seconds = time_graph(lambda b=backend: run.attend_all(b), run.num_layers)
        except Exception as failure:
            print(f"{case.name}: {way}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        times[way] = seconds
        rate = round(case.moved() / seconds / 1e12, 2)
        report(case.name, way, seconds, case.floor(), tb_s=rate, error=round(error, 5))
    return times


def report(case: str, way: str, seconds: float, floor: float, **more: Any) -> None:
    figure = {"bench": "attention", "case": case, "variant": way, "us": round(seconds * 1e6, 2)}
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
    rotary.cos_sin, rotary.rotate, rotary.axes = torch.randn(8192, 128, device="cuda"), ops.rotary, None
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


def main() -> None:
    parts = set(sys.argv[1:]) or {"decode", "uneven", "graph", "prefill", "mixed", "shared", "fp8", "store"}
    rows = [(case, run_case(case, ways)) for case, ways in plans(parts)]
    if "store" in parts:
        run_store()
    print(f"\n{'case':58} {'floor µs':>9} {'default':>9} {'best':>9}  best way")
    for case, times in rows:
        if times:
            best = min(times, key=lambda name: times[name])
            default = times.get("default", float("nan"))
            print(f"{case.name:58} {case.floor() * 1e6:9.1f} {default * 1e6:9.1f} {times[best] * 1e6:9.1f}  {best}")


if __name__ == "__main__":
    main()
