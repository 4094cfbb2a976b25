"""Operations of layers on one GPU: products of few rows beside the library's, norms, and whole stacks of layers.

    python3 bench/gpu/ops.py                      # all of it, under 90 s on an H200, Triton's compilation included
    python3 bench/gpu/ops.py products stacks      # parts: products, elementwise, stacks, fp8, startup

Products rotate among weights that do not fit in the L2 cache together; all times are of replayed CUDA graphs. `stacks`
runs the two models with random weights and without attention, as one graph. Floors: bytes ÷ 4.39 TB/s. One line
`RESULT {json}` a figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ratoon.layers.cuda_ops import CudaLinear, CudaOps
from ratoon.layers.gpu import has_wgmma
from ratoon.layers.ops import Ops, RMSWeights
from ratoon.layers.product_choices import MAX_PANEL_ROWS, ProductKey, Split, Tile, default_choice
from ratoon.layers.product_measurement import time_graph
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.triton.gemv import gemv
from ratoon.layers.triton.matmul import matmul
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.dummy_source import DummySource
from ratoon.models.hf_config import parse_hf_config

Tensor = torch.Tensor

BYTES_A_SECOND = 4.39e12
L2_BYTES = 120e6  # twice the cache
PARTS = ("startup", "products", "elementwise", "stacks", "fp8")
SHAPES = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
}
LIBRARY_ROWS = (1, 2, 4, 8, 32, 64, 256)
TILES = {1: (Tile(1, 1024, 4), Tile(2, 1024, 4), Tile(4, 1024, 4)), 4: (Tile(1, 1024, 4), Tile(2, 1024, 4))}
FORMS = ("fused", "dependent", "library", "library early", "apart", "invariant")  # of stacks
SPLIT_ROWS = (8, 32, 64)
MODELS = {"0.6B": "qwen3-0.6b", "8B": "llama3-8b"}
DEVICE = torch.device("cuda")
FOLDER = Path(__file__).resolve().parent


def report(**figures: Any) -> None:
    print("RESULT", json.dumps(figures), flush=True)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(0.02).to(torch.bfloat16)


def time_products(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call, of several that read different memory."""
    rounds = max(1, 24 // len(calls))

    def work() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return 1000 * time_graph(work) / (rounds * len(calls))


def bench_products() -> None:
    for name, (outputs, inputs) in SHAPES.items():
        num_bytes = 2 * outputs * inputs
        weights = [random(outputs, inputs) for _ in range(max(1, round(L2_BYTES / num_bytes + 0.5)))]
        floor = 1e6 * num_bytes / BYTES_A_SECOND
        for rows in LIBRARY_ROWS:
            x, residual = random(rows, inputs), random(rows, outputs)
            found = {"library": time_products([partial(functional.linear, x, weight) for weight in weights])}
            if name.endswith((" o", " down")):
                added = [partial(residual.addmm_, x, weight.t()) for weight in weights]
                found["library, added"] = time_products(added)
            if name.endswith((" o", " down")) and rows in SPLIT_ROWS:
                split = Split(max(rows, 16), 64, 128, 8, 4, 4)
                added = [partial(matmul, x, weight, None, split, residual) for weight in weights]
                found["split, added"] = time_products(added)
            for tile in TILES.get(rows, ()):
                found[str(tuple(tile))] = time_products([partial(gemv, x, weight, None, tile) for weight in weights])
            default = None
            if rows <= MAX_PANEL_ROWS:
                default = default_choice(ProductKey("linear", outputs, inputs, "bfloat16", rows), has_wgmma())
                linears = [CudaLinear(weight, None, (), default, dependent=True) for weight in weights]
                found["default, early"] = time_products([partial(linear, x) for linear in linears])
            times = {form: round(micros, 2) for form, micros in found.items()}
            report(part="products", product=name, rows=rows, floor_us=round(floor, 2), us=times, default=default)
        del weights


def bench_elementwise() -> None:
    ours, reference = CudaOps(), TorchOps()
    for hidden in (1024, 4096):
        norm = RMSWeights(torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16), 1e-6)
        for rows in (1, 32, 256, 8192):
            xs = [random(rows, hidden) for _ in range(4)]
            residual, both = random(rows, hidden), [random(rows, 6 * hidden) for _ in range(4)]
            heads, kv, positions = random(rows, 16, 128), random(rows, 8, 128), torch.arange(rows, device=DEVICE)
            table = torch.randn(8192, 128, device=DEVICE)
            found = {}
            for ops in (ours, reference):
                norms = [partial(ops.add_rms_norm, x, residual, *norm) for x in xs]
                gates = [partial(ops.silu_and_mul, x) for x in both]
                turns = [partial(ops.rotary, heads, kv, positions, table)]
                found[ops.name] = {
                    "add_rms_norm": round(time_products(norms), 2),
                    "silu_and_mul": round(time_products(gates), 2),
                    "rotary": round(time_products(turns), 2),
                }
            report(part="elementwise", hidden=hidden, rows=rows, us=found)


class NoAttention:
    """A step whose attention gives back the queries: what is left of a model without it."""

    adapters = None

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, *transform: Any) -> Tensor:
        return q.reshape(len(q), -1)


def config_of(name: str) -> Any:
    raw = json.loads((FOLDER / "models" / MODELS[name] / "config.json").read_text())
    return parse_hf_config(raw, name)


def build(name: str, ops: Ops) -> Any:
    config = config_of(name)
    source = DummySource(collect_shapes(config))
    return build_model(config, source, ops, DEVICE, torch.bfloat16, 8192)


def time_startup() -> None:
    torch.zeros(1, device=DEVICE)
    for name in MODELS:
        start = time.perf_counter()
        model = build(name, CudaOps())
        torch.cuda.synchronize()
        report(part="startup", model=name, weights_s=round(time.perf_counter() - start, 2))
        del model
        torch.cuda.empty_cache()


def run_model(model: Any, ids: Tensor) -> Tensor:
    return model.compute_logits(model.forward(ids, ids, NoAttention()).normed)


def bench_stacks() -> None:
    """One model, whose products are switched between forms: random weights are made once."""
    for name in MODELS:
        model = build(name, CudaOps())
        config = model.config
        weights = sum(2 * shape.numel() for shape in map(torch.Size, collect_shapes(config).values()))
        if not config.tie_word_embeddings:
            weights -= 2 * config.vocab_size * config.hidden_size  # the embedding: rows of it are read
        for rows in (1, 2, 4, 8, 16, 32, 64):
            step = partial(run_model, model, torch.arange(rows, device=DEVICE))
            found = {}
            for form in FORMS:
                set_form(model, form)
                found[form] = round(time_graph(step), 4)
            report(part="stacks", model=name, rows=rows, floor_ms=round(1e3 * weights / BYTES_A_SECOND, 3), ms=found)
        del model
        torch.cuda.empty_cache()


def bench_fp8() -> None:
    """The models with weights in 8 bits: our kernels for few rows, the library's for more."""
    for name in MODELS:
        model = build(name, CudaOps(dependent_launch=True, quantization="fp8"))
        for rows in (1, 4, 8, 32, 64, 256):
            step = partial(run_model, model, torch.arange(rows, device=DEVICE))
            report(part="fp8", model=name, rows=rows, ms=round(time_graph(step), 4))
        del model, step
        torch.cuda.empty_cache()


def set_form(model: Any, form: str) -> None:
    """fused: by the default choices, with norms and additions inside; dependent: the same, launched early; library:
    cuBLAS, adding to the residual stream itself; library early: the same, with norms and activations launched early;
    apart: cuBLAS, and norms that add; invariant: the same bits in any batch."""
    is_invariant = form == "invariant"
    ops, by_ours = CudaOps(batch_invariant=is_invariant), form in ("fused", "dependent")
    for linear in [*linears_of(model), model.lm_head]:
        product = linear.multiply
        product.choices = ops.choices.of("linear", product.weight) if by_ours else []
        product.beyond, product.segments = None, None
        if is_invariant:
            made = ops.make_linear(product.weight, None)
            product.choices, product.beyond, product.segments = made.choices, made.beyond, made.segments
        product.dependent = form in ("dependent", "library early", "invariant")
    for linear in linears_of(model):
        linear.fused = None if form == "apart" else ops.fuse(linear.multiply)
    for layer in model.layers:
        mlp = layer.mlp
        mlp.multiply.choices = ops.choices.of("gated", mlp.gate_up.multiply.weight) if by_ours else []
        if is_invariant:
            mlp.multiply.choices = ops.make_gated_mlp(mlp.gate_up.multiply, mlp.down.multiply).choices
        mlp.fused = None if form == "apart" else ops.fuse(mlp.multiply)
        for norm in (layer.attention_norm, layer.mlp_norm):
            norm.rms = None if form == "apart" else RMSWeights(norm.weight, norm.eps)


def linears_of(model: Any) -> list[Any]:
    found = []
    for layer in model.layers:
        found += [layer.attention.qkv.linear, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    programs = {
        "startup": time_startup,
        "products": bench_products,
        "elementwise": bench_elementwise,
        "stacks": bench_stacks,
        "fp8": bench_fp8,
    }
    with torch.inference_mode():
        for part in chosen:
            start = time.perf_counter()
            programs[part]()
            torch.cuda.synchronize()
            report(part=part, seconds=round(time.perf_counter() - start, 1))


if __name__ == "__main__":
    main()
