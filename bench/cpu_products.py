"""Products of the CPU kernels, in float32 and with weights in bf16, against torch's in the same run.

    .venv/bin/python bench/cpu_products.py [--threads 1 2 4] [--rows 1 8 32 1024] [--seconds 0.3]

The shapes are those of SmolLM2-135M and Qwen3-0.6B. Several weights of a shape take turns, so that those of few rows
come from memory, as in a model. Each figure is the best of the calls in its time; the three products take turns. With
one thread the time is the thread's own on the processor, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from ratoon.layers.native import kernel_set_name
from ratoon.layers.native_ops import NativeLinear, native_ops_reasons, set_native_threads

Tensor = torch.Tensor
Products = list[Callable[[Tensor], Tensor]]

SHAPES = {  # name → (in, out)
    "SmolLM2 qkv": (576, 960),
    "SmolLM2 gate, up": (576, 3072),
    "SmolLM2 down": (1536, 576),
    "SmolLM2 head": (576, 49152),
    "Qwen3 qkv": (1024, 4096),
    "Qwen3 down": (3072, 1024),
}
WEIGHT_BYTES = 256 << 20  # of a shape's weights together: more than a core's share of the caches


def best_seconds(products: Products, x: Tensor, seconds: float, clock: Callable[[], float]) -> float:
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or calls <= len(products):
        multiply = products[calls % len(products)]
        begin = clock()
        multiply(x)
        best = min(best, clock() - begin)
        calls += 1
    return best


def make_products(in_features: int, out_features: int) -> dict[str, Products]:
    count = max(1, WEIGHT_BYTES // (4 * in_features * out_features))
    weights = [torch.randn(out_features, in_features) for _ in range(count)]
    return {
        "float32": [NativeLinear(weight, None) for weight in weights],
        "bf16": [NativeLinear(weight.bfloat16(), None) for weight in weights],
        "torch": [lambda x, weight=weight: functional.linear(x, weight) for weight in weights],
    }


def measure(threads: int, rows_counts: list[int], seconds: float) -> None:
    set_native_threads(threads)
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    print(f"\n{threads} thread{'s'[: threads > 1]}, kernels {kernel_set_name()}\n")
    print("| product | rows | float32, ms | GFLOP/s | GB/s of weights | torch ÷ float32 | float32 ÷ bf16 |")
    print("|---|---|---|---|---|---|---|")
    for name, (in_features, out_features) in SHAPES.items():
        products = make_products(in_features, out_features)
        for rows in rows_counts:
            if rows * out_features > 64 << 20:
                continue
            x = torch.randn(rows, in_features)
            took = {kind: best_seconds(some, x, seconds, clock) for kind, some in products.items()}
            weights = in_features * out_features
            own = took["float32"]
            print(
                f"| {name} | {rows} | {own * 1e3:.3f} | {2e-9 * rows * weights / own:.0f} | {4e-9 * weights / own:.1f} "
                f"| {took['torch'] / own:.2f} | {own / took['bf16']:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 1024])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    args = parser.parse_args()
    reasons = native_ops_reasons(torch.device("cpu"), torch.float32)
    if reasons:
        raise SystemExit(f"error: {', '.join(reasons)}")
    with torch.inference_mode():
        for threads in args.threads:
            measure(threads, args.rows, args.seconds)


if __name__ == "__main__":
    main()
