"""Quantised weights are cut for ranks in the bits of their file: together they compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.models.build import build_model
from ratoon.models.gguf_source import GGUFSource
from ratoon.models.hf_config import parse_hf_config
from tests.golden.dense_batch import DenseMemory, DensePass
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.models.model_files import llama_metadata, write_gguf
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
    source, ops = GGUFSource(path), NativeOps()
    config = parse_hf_config(source.raw_config, str(path))
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
