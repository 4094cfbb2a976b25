"""Attention of the CPU kernels: a prompt's, and one stream's decode step, with keys and values in every form.

    .venv/bin/python bench/cpu_attention.py [--threads 1 2] [--keys 128 1024 8192] [--seconds 0.5]

The shapes are those of SmolLM2-135M and Qwen3-0.6B. A decode step finds its keys and values in memory: several layers
take turns. Each figure is the best of the calls in its time. With one thread the time is the thread's own on the
processor, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from ratoon.layers.native import Kernels, kernel_set_name, library

BLOCK_SIZE = 16
CACHE_BYTES = 128 << 20  # of a decode step's layers together: more than a core's share of the caches
KINDS = {"float32": (0, np.float32), "float16": (1, np.float16), "int8": (2, np.int8)}  # as the kernels number them


class Shape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape("SmolLM2", 9, 3, 64), Shape("Qwen3-0.6B", 16, 8, 128))


def best_seconds(
    kernels: Kernels, shape: Shape, kind: str, keys: int, tokens: int, seconds: float, threads: int
) -> float:
    number, dtype = KINDS[kind]
    blocks, width = -(-keys // BLOCK_SIZE), 2 * shape.kv_heads * shape.head_dim * BLOCK_SIZE
    layers = 1 if tokens > 1 else max(2, CACHE_BYTES // (blocks * width * np.dtype(dtype).itemsize))
    random = np.random.default_rng(0)
    cache = (random.standard_normal((layers, blocks, width), np.float32) * (32 if kind == "int8" else 1)).astype(dtype)
    scales = np.full((blocks, 2 * shape.kv_heads * BLOCK_SIZE), 1 / 32, np.float32)
    table = random.permutation(blocks).astype(np.int32)
    query_start, seq_lens, shared = (np.array(some, np.int32) for some in ([0, tokens], [keys], [0]))
    row = shape.heads * shape.head_dim
    q, out = random.standard_normal((tokens, row), np.float32), np.empty((tokens, row), np.float32)
    clock = time.thread_time if threads == 1 else time.perf_counter
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or calls <= layers:
        layer = cache[calls % layers]
        begin = clock()
        failed = kernels.ratoon_attention(
            q.ctypes.data, row, out.ctypes.data, row, number, layer.ctypes.data, layer.strides[0], scales.ctypes.data,
            scales.strides[0], table.ctypes.data, blocks, query_start.ctypes.data, seq_lens.ctypes.data,
            shared.ctypes.data, 1, shape.heads, shape.kv_heads, shape.head_dim, BLOCK_SIZE, 0, 1, None, 0,
            shape.head_dim**-0.5,
        )  # fmt: skip
        best = min(best, clock() - begin)
        assert not failed
        calls += 1
    return best


def measure(kernels: Kernels, threads: int, key_counts: list[int], seconds: float) -> None:
    kernels.ratoon_set_threads(threads)
    print(f"\n{threads} thread{'s'[: threads > 1]}, kernels {kernel_set_name()}\n")
    print(
        "| shape | keys and values | keys | decode, µs | GB/s | prompt, ms | GFLOP/s |\n|---|---|---|---|---|---|---|"
    )
    for shape in SHAPES:
        for kind, (_, dtype) in KINDS.items():
            for keys in key_counts:
                decode = best_seconds(kernels, shape, kind, keys, 1, seconds, threads)
                prompt = best_seconds(kernels, shape, kind, keys, keys, seconds, threads) if keys <= 4096 else None
                num_bytes = 2 * keys * shape.kv_heads * shape.head_dim * np.dtype(dtype).itemsize
                operations = 2 * keys * (keys + 1) * shape.heads * shape.head_dim  # of keys that a row sees
                of_prompt = f"{prompt * 1e3:.2f} | {operations / prompt * 1e-9:.0f}" if prompt else "– | –"
                figures = f"{decode * 1e6:.1f} | {num_bytes / decode * 1e-9:.1f} | {of_prompt}"
                print(f"| {shape.name} | {kind} | {keys} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--keys", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    args = parser.parse_args()
    kernels = library()
    if kernels is None:
        raise SystemExit("error: there are no kernels for this processor")
    for threads in args.threads:
        measure(kernels, threads, args.keys, args.seconds)


if __name__ == "__main__":
    main()
