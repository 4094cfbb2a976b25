"""Compile the Triton kernels for a GPU that this machine does not have, and show what each of them takes.

    .venv/bin/python bench/gpu/compile_kernels.py                   # for compute capability 9.0 (H100, H200)
    .venv/bin/python bench/gpu/compile_kernels.py --capability 80 attention

The functions that launch kernels are called with tensors on the CPU, in the shapes of a step of the two models that are
compared here; each launch is compiled down to machine code and left out. Registers are those of a thread; a stack or
local memory means that they were not enough. One line a kernel; the exit status is 1 if one does not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before kernels are imported: functions of the interpreter have no machine code

import numpy as np
import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ratoon.attention import triton_backend, triton_latent, triton_plan, triton_states
from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.core.params import SamplingParams
from ratoon.core.plan import NewRequestData
from ratoon.execution.inputs.device_inputs import DeviceInputs
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.input_kernels import append_tokens
from ratoon.execution.inputs.row_writes import RowWrites
from ratoon.execution.kv.block_kernels import Pages, copy_blocks
from ratoon.layers import cuda_ops, fp8
from ratoon.layers.attention import (
    AttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
    StateSpaceLayer,
)
from ratoon.layers.cuda_ops import CudaGatedMLP, CudaLinear, CudaOps
from ratoon.layers.ops import ExpertGate, FusedProduct, RMSWeights, Routes, RoutingRule
from ratoon.layers.product_choices import ProductChoices, Tile, invariant_choice
from ratoon.layers.torch_ops import TorchHeadProduct
from ratoon.layers.triton import (
    bits,
    elementwise,
    experts,
    gemv,
    joined,
    low_rank,
    matmul,
    norms,
    penalties,
    quantize,
    sampling,
    top,
)
from ratoon.layers.triton.compilation import Launch, launches_go_to
from ratoon.layers.triton.kernel_requests import AbsentDevice

Tensor = torch.Tensor

BF16 = torch.bfloat16
NUM_SMS = 132
BLOCK_SIZE = 16
STATE_SIZE = 128  # of Mamba-2 and Granite 4
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compilation:
    """Compiles every launch once and reports what the kernel takes."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.num_failed = 0
        self._seen: set[str] = set()
        self.part = ""  # what is compiled now, for the report

    def compile(self, kernel: JITFunction, launch: Launch, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        begin = time.monotonic()
        try:
            compiled = launch(kernel, *args, grid=(1,), warmup=True, **options)
        except Exception as error:  # Triton has many, and whatever it is belongs to this kernel
            self.num_failed += 1
            self._report(kernel, error=f"{type(error).__name__}: {error}")
            return None
        if compiled.hash not in self._seen:
            self._seen.add(compiled.hash)
            seconds = round(time.monotonic() - begin, 1)
            self._report(
                kernel, **resource_usage(compiled.asm["cubin"]), shared=compiled.metadata.shared, seconds=seconds
            )
        return compiled

    def _report(self, kernel: JITFunction, **figures: Any) -> None:
        print("RESULT", json.dumps({"part": self.part, "kernel": kernel.fn.__name__, **figures}), flush=True)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of a thread, in bytes but for the first."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = dict(field.split(":") for line in lines if " REG:" in line for field in line.split())
    return {name.lower(): int(fields[name]) for name in ("REG", "STACK", "LOCAL")}


# ---- What a step launches


def attend(
    heads: int,
    kv_heads: int,
    query_lens: list[int],
    seq_len: int,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    has_norm: bool = False,
    is_padded: bool = False,
    window: int | None = None,
    rope_axes: int = 1,
    has_sinks: bool = False,
    **options: Any,
) -> None:
    """Store and attend, for requests of one length in all."""
    backend = triton_backend.TritonAttentionBackend(**options)
    inputs, num_tokens = step_inputs(query_lens, seq_len, is_padded), sum(query_lens)
    q, k, v = torch.zeros(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype).split([heads, kv_heads, kv_heads], 1)
    pages = torch.zeros(2, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=kv_dtype or dtype)
    norm: Any = RMSWeights(torch.ones(head_dim, dtype=dtype), 1e-6) if has_norm else None
    positions = torch.zeros(rope_axes, num_tokens, dtype=torch.int64)
    table_of_angles: Any = _Table(head_dim, rope_axes)
    transform = HeadTransform(positions[0] if rope_axes == 1 else positions, table_of_angles, norm, norm)
    sinks = torch.zeros(heads) if has_sinks else None
    layer = AttentionLayer(0, heads, kv_heads, head_dim, head_dim**-0.5, window, True, sinks=sinks)
    backend.forward(layer, q, k, v, (pages,), backend.build_metadata(inputs), transform)


def attend_to_vectors(
    heads: int, query_lens: list[int], seq_len: int, dtype: torch.dtype = BF16, kv_dtype: torch.dtype | None = None
) -> None:
    """Compiles a step of latent attention, in the sizes of DeepSeek's models."""
    backend, layer = triton_latent.TritonLatentBackend(), LatentAttentionLayer(0, heads, 1, 576, 0.07, rope_dim=64)
    inputs, num_tokens = step_inputs(query_lens, seq_len), sum(query_lens)
    q, k = torch.zeros(num_tokens, heads + 1, 576, dtype=dtype).split([heads, 1], 1)
    pages = torch.zeros(2, BLOCK_SIZE, 576, dtype=kv_dtype or dtype)
    angles: Any = _Table(64, 1)
    transform = HeadTransform(torch.zeros(num_tokens, dtype=torch.int64), angles, None, None)
    backend.forward(layer, q, k, k[..., 64:], (pages,), backend.build_metadata(inputs), transform)


def attend_by_products(
    heads: int, query_lens: list[int], seq_len: int, dtype: torch.dtype = BF16, kv_dtype: torch.dtype | None = None
) -> None:
    """Compiles the same of queries that have not been multiplied yet: long ones have the expanded form."""
    backend, layer = triton_latent.TritonLatentBackend(), LatentAttentionLayer(0, heads, 1, 576, 0.07, rope_dim=64)
    inputs, num_tokens, rank, size = step_inputs(query_lens, seq_len), sum(query_lens), 512, 128
    products = LatentProducts(
        TorchHeadProduct(torch.zeros(heads, size, rank, dtype=dtype), 64),
        TorchHeadProduct(torch.zeros(heads, rank, size, dtype=dtype), 0),
    )
    queries, k = torch.zeros(num_tokens, heads, 64 + size, dtype=dtype), torch.zeros(num_tokens, 1, 576, dtype=dtype)
    pages = torch.zeros(2, BLOCK_SIZE, 576, dtype=kv_dtype or dtype)
    angles: Any = _Table(64, 1)
    transform = HeadTransform(torch.zeros(num_tokens, dtype=torch.int64), angles, None, None)
    backend.forward_latent(layer, queries, k, (pages,), backend.build_metadata(inputs), transform, products)


def scan(heads: int, head_dim: int, groups: int, query_lens: list[int], dtype: torch.dtype = BF16) -> None:
    """Compiles a step of a state-space layer."""
    channels = heads * head_dim + 2 * groups * STATE_SIZE
    of_heads, weight = torch.zeros(heads), torch.zeros(4, channels).t()
    layer = StateSpaceLayer(
        0, heads, head_dim, STATE_SIZE, groups, (0.0, float("inf")), weight, torch.zeros(channels), of_heads, of_heads,
        of_heads,
    )  # fmt: skip
    backend, inputs = triton_states.TritonStateBackend(), step_inputs(query_lens, max(query_lens))
    projected = torch.zeros(sum(query_lens), layer.inner_size + channels + heads, dtype=dtype)
    pages = torch.zeros(2, heads, head_dim, STATE_SIZE), torch.zeros(2, 3, channels)
    backend.scan(layer, projected, pages, backend.build_metadata(inputs))


def step_inputs(query_lens: list[int], seq_len: int, is_padded: bool = False) -> CommonAttentionMetadata:
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    num_tokens, num_requests = int(starts[-1]), len(query_lens)
    seq_lens = np.full(num_requests, seq_len, np.int32)
    table = np.zeros((num_requests, -(-seq_len // BLOCK_SIZE)), np.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=table,
        query_start_loc_device=torch.from_numpy(starts),
        seq_lens_device=torch.from_numpy(seq_lens),
        block_table_device=torch.from_numpy(table),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
        is_padded=is_padded,
    )


class _Table:
    def __init__(self, head_dim: int, rope_axes: int) -> None:
        self.cos_sin = torch.zeros(64, head_dim)
        self.axes = None if rope_axes == 1 else torch.zeros(head_dim // 2, dtype=torch.int32)


def attention(compilation: Compilation) -> None:
    triton_backend.num_multiprocessors = lambda device: NUM_SMS  # type: ignore[attr-defined]
    triton_backend.can_launch_dependently = lambda: compilation.capability >= 90  # type: ignore[assignment]
    compilation.part = "attention: 0.6B, decode of 32"
    attend(16, 8, [1] * 32, 1024, has_norm=True)
    for num_requests in (1, 32):
        compilation.part = f"attention: 0.6B, decode of {num_requests}, keys and values in fp8"
        attend(16, 8, [1] * num_requests, 1024, has_norm=True, kv_dtype=torch.float8_e4m3fn)
    compilation.part = "attention: 8B, decode of 1"
    attend(32, 8, [1], 1024)
    compilation.part = "attention: 8B, decode of 256"
    attend(32, 8, [1] * 256, 1024)
    compilation.part = "attention: 8B, decode of 256, keys and values in fp8"
    attend(32, 8, [1] * 256, 1024, kv_dtype=torch.float8_e4m3fn)
    compilation.part = "attention: 8B, decode of 1, keys and values in fp8"
    attend(32, 8, [1], 1024, kv_dtype=torch.float8_e4m3fn)
    compilation.part = "attention: 8B, 24 tokens, captured"
    attend(32, 8, [24], 9216, is_padded=True)
    compilation.part = "attention: 8B, prefill"
    attend(32, 8, [4096], 8192, tiles=triton_plan.choose_tiles(128, BF16, None))
    if compilation.capability == 90:
        triton_backend.has_wgmma = lambda: True  # type: ignore[attr-defined]
        for model, heads in (("0.6B", 16), ("8B", 32)):
            compilation.part = f"attention: {model}, decode of 64 on Hopper"
            attend(heads, 8, [1] * 64, 1024)
            compilation.part = f"attention: {model}, decode of 64 on Hopper, keys and values in fp8"
            attend(heads, 8, [1] * 64, 1024, kv_dtype=torch.float8_e4m3fn)
        compilation.part = "attention: heads of 64, decode of 64 on Hopper, window"
        attend(32, 8, [1] * 64, 1024, head_dim=64, window=100)
        compilation.part = "attention: 8B, prefill on Hopper"
        attend(32, 8, [4096], 8192)
        for number, tokens in (("decode of 64", [1] * 64), ("prefill", [4096])):
            compilation.part = f"attention: gpt-oss, {number} on Hopper, window and sinks"
            attend(64, 8, tokens, 8192, head_dim=64, window=128, has_sinks=True)
        compilation.part = "attention: heads of 80, prefill on Hopper, window"
        attend(8, 8, [4096], 8192, head_dim=80, window=1024)
    compilation.part = "attention: 8B, decode, the same bits in any batch"
    attend(32, 8, [1], 1024, batch_invariant=True)
    attend(16, 8, [1] * 32, 1024, batch_invariant=True, has_norm=True)
    attend(32, 8, [1] * 256, 1024, batch_invariant=True)
    compilation.part = "attention: gpt-oss, decode and prefill, with sinks"
    attend(64, 8, [1], 1024, head_dim=64, has_sinks=True)
    attend(64, 8, [4096], 8192, head_dim=64, has_sinks=True, tiles=triton_plan.choose_tiles(64, BF16, None))
    attend(64, 8, [1], 1024, head_dim=64, has_sinks=True, batch_invariant=True)
    compilation.part = "attention: 8B, prefill, the same bits in any batch"
    attend(32, 8, [4096], 8192, batch_invariant=True)
    compilation.part = "attention: positions on three axes"
    attend(28, 4, [40], 64, rope_axes=3)
    attend(28, 4, [1] * 32, 1024, rope_axes=3)
    attend(28, 4, [1] * 32, 1024, rope_axes=3, batch_invariant=True)
    compilation.part = "attention: heads of 80"
    attend(8, 8, [1] * 32, 1024, head_dim=80)
    compilation.part = "attention: float32"
    attend(4, 2, [1, 40], 64, head_dim=16, dtype=torch.float32)


def products(compilation: Compilation) -> None:
    tile = Tile(2, 1024, 4)
    for model, hidden, inner in (("0.6B", 1024, 3072), ("8B", 4096, 14336)):
        x, between = torch.zeros(1, hidden, dtype=BF16), torch.zeros(1, inner, dtype=BF16)
        norm = RMSWeights(torch.ones(hidden, dtype=BF16), 1e-6)
        gate_up, down = torch.empty(2 * inner, hidden, dtype=BF16), torch.empty(hidden, inner, dtype=BF16)
        for dependent in (False, True):
            launch = "launched early" if dependent else "launched in turn"
            compilation.part = f"products: {model}, gate and up, {launch}"
            gemv.gemv(x, gate_up, None, tile, norm=norm, gated="silu", dependent=dependent)
            compilation.part = f"products: {model}, down, {launch}"
            gemv.gemv(between, down, None, tile, residual=x, dependent=dependent)
        compilation.part = f"products: {model}, down, 8 bits"
        weight = fp8.quantize_weight(down)
        gemv.gemv(between, weight.data, None, tile._replace(inputs=2048), scales=weight.extras["scales"], residual=x)
        quantize.quantize_rows(x, norm)
        for rows in (1, 2048):
            compilation.part = f"products: {model}, down, the same bits in any batch of {rows} rows"
            matmul.matmul(between.expand(rows, -1), down, None, invariant_choice(*down.shape))
        if compilation.capability == 90:
            segments(compilation, model, gate_up, down, norm)
        if model == "0.6B":  # the other's weights are too large for panels
            panels(compilation, model, gate_up, down, norm)
        elif compilation.capability == 90:
            streams(compilation, model, gate_up, down)
        compilation.part = f"norms and activations: {model}"
        rows = torch.zeros(32, hidden, dtype=BF16)
        norms.rms_norm(rows, norm.weight, norm.eps, rows.clone())
        elementwise.gated_activation(torch.zeros(32, 2 * inner, dtype=BF16), "silu")


def panels(compilation: Compilation, model: str, gate_up: Tensor, down: Tensor, norm: RMSWeights) -> None:
    for dtype, scales in ((BF16, None), (fp8.DTYPE, torch.ones(len(gate_up)))):
        first, second = gate_up.to(dtype), down.to(dtype)
        for rows in (1, 32, 64):
            between, x = torch.zeros(rows, down.shape[1], dtype=BF16), torch.zeros(rows, len(down), dtype=BF16)
            linear = CudaLinear(second, None, ProductChoices().of("linear", second), dependent=True, scales=scales)
            gate = CudaLinear(first, None, (), dependent=True, scales=scales)
            mlp = CudaGatedMLP(gate, linear, ProductChoices().of("gated", first))
            bits = f"{rows} rows, {8 * dtype.itemsize} bits"
            compilation.part = f"products: {model}, gate and up, {bits}"
            mlp.gate(x, norm)
            compilation.part = f"products: {model}, down, {bits}"
            linear.fused(between, None, x)


def segments(compilation: Compilation, model: str, gate_up: Tensor, down: Tensor, norm: RMSWeights) -> None:
    """The same bits in any batch, on Hopper."""
    ops = CudaOps(ProductChoices(has_wgmma=True), dependent_launch=True, batch_invariant=True)
    mlp = ops.make_gated_mlp(ops.make_linear(gate_up, None), ops.make_linear(down, None))
    assert isinstance(mlp, CudaGatedMLP)
    for rows in (1, 64, 256) if model == "0.6B" else (128, 8192):  # few rows of the other are below
        compilation.part = f"products: {model}, gate and up, down, the same bits in any batch of {rows} rows on Hopper"
        x = torch.zeros(rows, len(down), dtype=BF16)
        mlp.fused(x, norm, x)


def streams(compilation: Compilation, model: str, gate_up: Tensor, down: Tensor) -> None:
    cuda_ops.num_multiprocessors = lambda device: NUM_SMS  # type: ignore[attr-defined]
    found = ProductChoices(has_wgmma=True)
    for dtype, scales in ((BF16, None), (fp8.DTYPE, torch.ones(len(gate_up)))):
        first, second = gate_up.to(dtype), down.to(dtype)
        for rows in (2, 32, 64):
            between, x = torch.zeros(rows, down.shape[1], dtype=BF16), torch.zeros(rows, len(down), dtype=BF16)
            linear = CudaLinear(second, None, found.of("linear", second), dependent=True, scales=scales)
            gate = CudaLinear(first, None, (), dependent=True, scales=scales)
            bits = f"{rows} rows, {8 * dtype.itemsize} bits"
            compilation.part = f"products: {model}, gate and up, {bits}"
            CudaGatedMLP(gate, linear, found.of("gated", first)).gate(x)
            compilation.part = f"products: {model}, down, {bits}"
            linear.fused(between, None, x)


def gluon(compilation: Compilation) -> None:
    """One shape of each kernel in Gluon: the quickest way to see that they compile."""
    triton_backend.num_multiprocessors = lambda device: NUM_SMS  # type: ignore[attr-defined]
    triton_backend.can_launch_dependently = lambda: True  # type: ignore[assignment]
    triton_backend.has_wgmma = lambda: True  # type: ignore[attr-defined]
    cuda_ops.num_multiprocessors = lambda device: NUM_SMS  # type: ignore[attr-defined]
    compilation.part = "gluon: attention, prefill"
    attend(16, 8, [4096], 8192)
    norm = RMSWeights(torch.ones(1024, dtype=BF16), 1e-6)
    compilation.part = "gluon: panel"
    gate_up, down = torch.empty(6144, 1024, dtype=BF16), torch.empty(1024, 3072, dtype=BF16)
    linear = CudaLinear(down, None, ProductChoices().of("linear", down))
    linear.fused(torch.zeros(1, 3072, dtype=BF16), None, torch.zeros(1, 1024, dtype=BF16))
    compilation.part = "gluon: stream"
    long = torch.empty(4096, 14336, dtype=BF16)
    linear = CudaLinear(long, None, ProductChoices(has_wgmma=True).of("linear", long))
    linear.fused(torch.zeros(32, 14336, dtype=BF16), None, torch.zeros(32, 4096, dtype=BF16))
    compilation.part = "gluon: factors of a norm, and wide"
    ops = CudaOps(ProductChoices(has_wgmma=True), dependent_launch=True, batch_invariant=True)
    mlp = ops.make_gated_mlp(ops.make_linear(gate_up, None), ops.make_linear(down, None))
    assert isinstance(mlp, CudaGatedMLP)
    mlp.gate(torch.zeros(256, 1024, dtype=BF16), norm)


def choices(compilation: Compilation) -> None:
    logits = torch.empty(32, 151936, dtype=BF16)
    rows = len(logits)
    numbers = (
        torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.float64),
        torch.zeros(rows), torch.zeros(rows, dtype=torch.float64),
    )  # fmt: skip
    for name, draws, filters in (("greedy", False, False), ("drawn", True, False), ("filtered", True, True)):
        compilation.part = f"sampling: {name}"
        sampling.sample_plain(logits, *numbers, draws, filters)
    compilation.part = "beams: 32 over 151,936 tokens"
    normalizers, maxima = top.normalizers_and_maxima(logits)
    top.best_keys(logits, normalizers, torch.zeros(rows), maxima, torch.tensor([[0], [rows]]), rows, 64)
    compilation.part = "log-probabilities"
    ids = torch.zeros(rows, dtype=torch.int64)
    top.token_logprobs(logits, ids, 20)
    compilation.part = "penalties"
    occurred = torch.zeros(2, logits.shape[1], dtype=torch.int16)
    penalties.apply_penalties(torch.empty(2, logits.shape[1]), ids[:2], ids[:2], torch.ones(2, 3), occurred)
    penalties.count_tokens(occurred, ids[:2], ids[:2], ids)
    compilation.part = "masks of bits"
    words = torch.zeros(2, -(-logits.shape[1] // 32), dtype=torch.int32)
    bits.allow_bits(torch.empty(2, logits.shape[1]), ids[:2], words)


def outputs_of(weight: Tensor) -> FusedProduct:
    """A product whose numbers do not matter."""
    return lambda x, norm, residual: torch.zeros(len(x), len(weight), dtype=x.dtype)


def mixtures(compilation: Compilation) -> None:
    """Routers and grouped products, in the shapes of Qwen3-30B-A3B and of gpt-oss-20B."""
    shapes = (("30B-A3B", 2048, 768, 128, 8, ""), ("gpt-oss-20B", 2880, 2880, 32, 4, "clamped_swiglu"))
    for model, hidden, inner, num_experts, top_k, kind in shapes:
        rule = RoutingRule(num_experts, top_k, renormalise=True)
        own, gate = range(num_experts), ExpertGate(kind or "silu", 7.0 if kind else 0.0)
        weights = torch.zeros(2, 2 * inner, hidden, dtype=BF16), torch.zeros(2, hidden, inner, dtype=BF16)
        biases = (torch.zeros(2, 2 * inner, dtype=BF16), torch.zeros(2, hidden, dtype=BF16)) if kind else None
        layer = experts.TritonExperts(*weights, biases, own, gate)
        counts = torch.zeros(num_experts, dtype=torch.int64)
        for num_rows in (1, 256, 4096):
            compilation.part = f"experts: {model}, {num_rows} rows"
            x = torch.zeros(num_rows, hidden, dtype=BF16)
            routes = experts.route(rule, None, counts, torch.zeros(num_rows, num_experts, dtype=BF16))
            layer(x, Routes(torch.zeros_like(routes.experts), routes.weights))
    compilation.part = "experts: sigmoid with a bias"
    experts.route(rule._replace(scoring="sigmoid"), torch.zeros(num_experts), None, torch.zeros(4, num_experts))


def adapters(compilation: Compilation) -> None:
    cpu = torch.device("cpu")
    for model, hidden, inner in (("0.6B", 1024, 3072), ("8B", 4096, 14336)):
        norm = RMSWeights(torch.ones(hidden, dtype=BF16), 1e-6)
        for dependent in (False, True):
            launch = "launched early" if dependent else "launched in turn"
            products = low_rank.TritonLowRank(hidden, [inner, inner], 8, 64, cpu, BF16, dependent)
            for num_rows in (32, 2048):
                compilation.part = f"adapters: {model}, {num_rows} rows, {launch}"
                x, y = torch.zeros(num_rows, hidden, dtype=BF16), torch.zeros(num_rows, 2 * inner, dtype=BF16)
                slots = torch.zeros(num_rows, dtype=torch.int32)
                products.add(y, x, slots)
                products.add(y, x, slots, norm)
            weight = torch.zeros(2 * inner, 16, dtype=BF16)  # its own product is another kernel
            whole = joined.TritonJoined(weight, [inner, inner], 8, 16, outputs_of, dependent)
            for num_rows in (1, 32, 2048):
                compilation.part = f"adapters: {model}, joined, {num_rows} rows, {launch}"
                slots = torch.zeros(num_rows, dtype=torch.int32)
                narrow = torch.zeros(num_rows, 16, dtype=BF16)
                whole.multiply(narrow, None, None, slots)
                whole.multiply_gate(narrow, None, slots)
        compilation.part = f"adapters: {model}, head"
        head = low_rank.TritonLowRank(hidden, [151936], 8, 64, cpu, BF16, takes_weights=True)
        head.add(torch.zeros(32, 151936, dtype=BF16), x[:32], slots[:32])
        compilation.part = f"adapters: {model}, tables"
        tables = low_rank.TritonTables(8, range(151936), cpu, BF16)
        tables.replace(x, torch.zeros(len(x), dtype=torch.int64), slots)


def inputs(compilation: Compilation) -> None:
    device = torch.device("cpu")
    shapes = (([BLOCK_SIZE], 0, 0), ([BLOCK_SIZE] * 2, 1500, 0), ([BLOCK_SIZE, 2 * BLOCK_SIZE], 0, 3))
    for block_sizes, max_encoder_len, rope_axes in shapes:
        num_groups = len(block_sizes)
        has_adapters = rope_axes > 0
        rows = InputBatch(320, 40960, block_sizes, RowWrites(), max_encoder_len, BLOCK_SIZE, rope_axes, has_adapters)
        rows.add(NewRequestData("a", [1, 2, 3], 3, SamplingParams(), 0, ([1],) * num_groups, 0))
        made = DeviceInputs(rows, 2048, 320, 512, 512, device)
        compilation.part = f"inputs: cells of the rows, {num_groups} groups"
        made.send(np.array([0]), np.array([1]))
        for longest, num_requests in ((1, 32), (64, 1), (2048, 5)):
            compilation.part = f"inputs: {num_groups} groups, at most {longest} tokens"
            made.compute(num_requests * longest, num_requests, longest)
        compilation.part = f"inputs: sampled tokens, {num_groups} groups"
        cells, results = torch.zeros(2, 32, dtype=torch.int32)
        tokens, bad = torch.zeros(32, dtype=torch.int64), torch.zeros(32, dtype=torch.bool)
        append_tokens(made.resident.memory, cells, tokens, bad, results)
    compilation.part = "blocks"
    pages = Pages([torch.zeros(4, 4096, dtype=torch.int64)] * 28, device)
    copy_blocks(pages, pages, [(1, 2)])
    copy_blocks(pages, pages, [(1, 2)] * 3)


def latent(compilation: Compilation) -> None:
    triton_latent.num_multiprocessors = lambda device: NUM_SMS  # type: ignore[attr-defined]
    for heads in (16, 128):
        compilation.part = f"latent: {heads} heads, decode of 1"
        attend_to_vectors(heads, [1], 2000)
        compilation.part = f"latent: {heads} heads, two tokens"
        attend_to_vectors(heads, [2], 2000)
        compilation.part = f"latent: {heads} heads, prefill"
        attend_to_vectors(heads, [512] * 4, 512)
    compilation.part = "latent: 16 heads, decode of 300"
    attend_to_vectors(16, [1] * 300, 2000)
    compilation.part = "latent: 16 heads, decode of 1, vectors in fp8"
    attend_to_vectors(16, [1], 2000, kv_dtype=torch.float8_e4m3fn)
    compilation.part = "latent: float32"
    attend_to_vectors(16, [1], 2000, torch.float32)
    for heads in (16, 128):
        compilation.part = f"latent: {heads} heads, expanded, beside decodes"
        attend_by_products(heads, [128, 1, 1], 128)
    compilation.part = "latent: 16 heads, expanded, in segments"
    attend_by_products(16, [256], 5000)
    compilation.part = "latent: 16 heads, expanded, vectors in fp8"
    attend_by_products(16, [128], 128, kv_dtype=torch.float8_e4m3fn)
    compilation.part = "latent: 4 heads, expanded, float32"
    attend_by_products(4, [128], 128, torch.float32)


def states(compilation: Compilation) -> None:
    for name, sizes in {"granite": (48, 32, 1), "codestral mamba": (128, 64, 8)}.items():
        compilation.part = f"states: {name}"
        scan(*sizes, [512, 1])
    compilation.part = "states: float32"
    scan(48, 64, 1, [512, 1], torch.float32)


PARTS = {
    "gluon": gluon,
    "attention": attention, "latent": latent, "states": states, "products": products, "experts": mixtures,
    "adapters": adapters, "choices": choices, "inputs": inputs,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--capability", type=int, default=90, metavar="N", help="compute capability; default: 90")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    driver.set_active(AbsentDevice(args.capability))
    compilation = Compilation(args.capability)
    with launches_go_to(compilation.compile):
        for name in args.parts or PARTS:
            PARTS[name](compilation)
    return 1 if compilation.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
