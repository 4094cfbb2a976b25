"""Quantised weights are cut for ranks in the bits of their file: together they compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ratoon.core.config import ModelConfig
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import TensorSource
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.dummy_source import DummySource
from ratoon.models.gguf_source import GGUFSource
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden import test_packed_checkpoints
from tests.golden.dense_batch import DenseMemory, DensePass
from tests.golden.tiny_models import tiny_llama
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.layers.test_shards import LLAMA
from tests.unit.models.model_files import llama_metadata, write_gguf
from tests.unit.models.test_packed_source import CountingSource
from tests.unit.models.test_stored_tensors import quantise, random

Tensor = torch.Tensor
CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 128, 256, 4, 1, 50
HEAD_DIM = HIDDEN // HEADS
NUM_LAYERS = 2

pytestmark = pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")


def quantised_file(path: Path, kind: Type) -> Path:
    wide, narrow = (HIDDEN, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)
    shapes = {"attn_q": wide, "attn_k": narrow, "attn_v": narrow, "attn_output": wide,
              "ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN),
              "ffn_down": (HIDDEN, INTERMEDIATE)}  # fmt: skip
    tensors: dict[str, Any] = {"token_embd.weight": (quantise(random(VOCABULARY, HIDDEN, seed=9), kind), kind)}
    tensors["output_norm.weight"] = 1 + random(HIDDEN, seed=20)
    for layer in range(NUM_LAYERS):
        for seed, (name, shape) in enumerate(shapes.items()):
            tensors[f"blk.{layer}.{name}.weight"] = (quantise(random(*shape, seed=10 * layer + seed), kind), kind)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = 1 + random(HIDDEN, seed=21)
    changes = {"embedding_length": HIDDEN, "block_count": NUM_LAYERS, "feed_forward_length": INTERMEDIATE,
               "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
               "rope.dimension_count": HEAD_DIM}  # fmt: skip
    return write_gguf(path, "llama", llama_metadata(**changes), tensors)


def logits_of(path: Path, shard: Shard) -> tuple[Tensor, list[dict[str, Any]]]:
    source = GGUFSource(path)
    return logits_of_source(parse_hf_config(source.raw_config, str(path)), source, NativeOps(), shard)


def logits_of_source(
    config: ModelConfig, source: TensorSource, ops: NativeOps, shard: Shard
) -> tuple[Tensor, list[dict[str, Any]]]:
    model = build_model(config, source, ops, CPU, torch.float32, part=ModelPart(shard))
    ids = torch.arange(VOCABULARY) % config.vocab_size
    states = model.forward(ids, torch.arange(len(ids)), DensePass(DenseMemory(1), [len(ids)])).normed
    return model.compute_logits(states), ops.kept_formats()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
@torch.inference_mode()
def test_ranks_with_quantised_weights_are_the_model_on_one(kind: Type, world_size: int, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits in blocks of 32, which no cut divides. What is left is the order of sums, by
    which an activation of the next product may be rounded to the neighbour of its number, 1/127 of the largest away."""
    path = quantised_file(tmp_path / "model.gguf", kind)
    expected, whole = logits_of(path, Shard())

    def work(shard: Shard) -> tuple[Tensor, list[dict[str, Any]]]:
        with torch.inference_mode():
            return logits_of(path, shard)

    for found, kept in on_all_ranks(world_size, work):
        torch.testing.assert_close(found, expected, atol=2e-2 * float(expected.abs().max()), rtol=0)
        assert [one["format"] for one in kept] == [one["format"] for one in whole], "no weight became floats"
        assert kept[0]["num_weights"] < 0.75 * whole[0]["num_weights"]


def compare_ranks(world_size: int, logits: Callable[[Shard], tuple[Tensor, list[dict[str, Any]]]]) -> None:
    expected, whole = logits(Shard())

    def work(shard: Shard) -> tuple[Tensor, list[dict[str, Any]]]:
        with torch.inference_mode():
            return logits(shard)

    for found, kept in on_all_ranks(world_size, work):
        torch.testing.assert_close(found, expected, atol=2e-2 * float(expected.abs().max()), rtol=0)
        assert [one["format"] for one in kept] == [one["format"] for one in whole], "no weight became floats"


@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_ranks_quantise_their_part_as_one_rank_does_all(bits: int) -> None:
    """A block is encoded by itself: the codes are the same."""
    config = replace(LLAMA, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, max_position=VOCABULARY)
    config = replace(config, num_heads=HEADS, num_kv_heads=1, head_dim=HEAD_DIM)
    shapes = collect_shapes(config)
    compare_ranks(2, lambda shard: logits_of_source(config, DummySource(shapes, seed=1), NativeOps(bits=bits), shard))


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4), ("awq", 4), ("pack-quantized", 8), ("int-quantized", 4)])
@torch.inference_mode()
def test_ranks_with_packed_weights_are_the_model_on_one(
    method: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_packed_checkpoints, "tiny_llama", partial(tiny_llama, num_kv_heads=4))
    test_packed_checkpoints.write_folder(tmp_path, method, bits, symmetric=False)
    source = resolve_model(str(tmp_path))
    compare_ranks(2, lambda shard: logits_of_source(source.config, source.tensors, NativeOps(), shard))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_their_part_of_a_file(world_size: int, tmp_path: Path) -> None:
    """Norms, and key-value heads that several ranks have, are what more than one of them reads."""
    tiny_llama(num_kv_heads=4).oracle.save_pretrained(tmp_path / "floats")
    gguf = quantised_file(tmp_path / "model.gguf", Type.Q4_0)
    for path, allowed in ((tmp_path / "floats", 1.1), (gguf, 1.3)):
        source = resolve_model(str(path))

        def read(shard: Shard, source: Any = source) -> int:
            counting = CountingSource(source.tensors)
            build_model(source.config, counting, NativeOps(), CPU, torch.float32, part=ModelPart(shard))
            return counting.num_bytes

        whole = read(Shard())
        parts = on_all_ranks(world_size, read)
        assert sum(parts) < allowed * whole
        assert max(parts) < 1.1 * min(parts)


@torch.inference_mode()
def test_a_block_that_a_cut_would_divide_becomes_floats(tmp_path: Path) -> None:
    """Sixteen inputs of the last product on each of eight ranks: half a block. The numbers are the same."""
    path = quantised_file(tmp_path / "model.gguf", Type.Q8_0)
    source = GGUFSource(path)
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = source.read(name)
    for rank in range(8):
        part = source.read(name, TensorSlice(1, 16 * rank, 16 * rank + 16))
        assert part.decode is None
        assert torch.equal(part.floats(), whole.floats()[:, 16 * rank : 16 * rank + 16])
