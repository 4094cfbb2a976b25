"""Prompts by FlashInfer's kernels against Ratoon's own in Triton: the same numbers, and the time of each.

    PYTHONPATH=/path/to/flashinfer:. python3 bench/gpu/flashinfer_attention.py

Needs flashinfer-python, and nvcc or its package of compiled kernels; without them it says so and ends. The first use of
FlashInfer may compile for a minute, which is shown. Each figure is a line `RESULT {json}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from attention import BLOCK_SIZE, LLAMA, PRODUCTS, QWEN, Case

from ratoon.attention import flashinfer_backend
from ratoon.attention.flashinfer_backend import FlashInferBackend
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.triton_backend import TritonAttentionBackend

ROUNDS = 7
CASES = [
    Case("8B, 8,192", LLAMA, [8192], [0]),
    Case("8B, 16 of 512", LLAMA, [512] * 16, [0] * 16),
    Case("8B, 2,048 behind 6,144", LLAMA, [2048], [6144]),
    Case("8B, 1,024 beside 64 that decode", LLAMA, [1024] + [1] * 64, [0] + [1000] * 64),
    Case("0.6B, 8,192", QWEN, [8192], [0]),
    Case("0.6B, 16 of 512", QWEN, [512] * 16, [0] * 16),
]


def main() -> int:
    layer = LLAMA
    needs = AttentionNeeds("cuda", torch.bfloat16, BLOCK_SIZE, layer.head_dim, layer.num_heads, layer.num_kv_heads)
    reasons = FlashInferBackend.reasons_against(needs)
    if reasons:
        print(f"flashinfer can't be measured: {', '.join(reasons)}")
        return 1
    flashinfer_backend._MIN_SCORES = 0  # also where the backend would leave a step to Triton
    begin = perf_counter()
    ours, theirs = TritonAttentionBackend(), FlashInferBackend()
    for case in CASES:
        layer, inputs = case.layer, case.metadata()
        num_blocks = int(inputs.block_table.max()) + 1
        pages = torch.randn(
            num_blocks, 2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim, dtype=torch.bfloat16, device="cuda"
        )
        q = torch.randn(case.num_tokens, layer.num_heads, layer.head_dim, dtype=torch.bfloat16, device="cuda")
        found = []
        times = {}
        for backend in (ours, theirs):
            metadata = backend.build_metadata(inputs)
            attend = lambda backend=backend, metadata=metadata: backend.attend(layer, q, (pages,), metadata)  # noqa: E731, B023
            found.append(attend())
            torch.cuda.synchronize()
            if backend is theirs and case is CASES[0]:
                print(f"compiled after {perf_counter() - begin:.1f} s", flush=True)
            times[backend.name] = milliseconds(attend)
        begin_plan = perf_counter()
        theirs.attend(layer, q, (pages,), theirs.build_metadata(inputs))
        plan = (perf_counter() - begin_plan) * 1e3
        error = (found[0].float() - found[1].float()).abs().max().item()
        pairs = sum(q * c + q * (q + 1) / 2 for q, c in zip(case.queries, case.cached, strict=True))
        work = 4 * pairs * layer.num_heads * layer.head_dim
        print("RESULT " + json.dumps({
            "bench": "flashinfer", "name": case.name, **{name: round(ms, 4) for name, ms in times.items()},
            "ratio": round(times["triton"] / times["flashinfer"], 3), "floor": round(work / PRODUCTS * 1e3, 4),
            "error": round(error, 5), "right": error < 0.03, "host_ms_with_plan": round(plan, 3),
        }), flush=True)  # fmt: skip
    return 0


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the host is ahead
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
