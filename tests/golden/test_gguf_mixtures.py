"""Mixtures of experts out of GGUF files against transformers: the experts of a layer are one tensor there, in floats or
in quantised blocks. The files are written as llama.cpp's converter writes them, with names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.test_gguf_models import ARCHITECTURES, reorder_rows
from tests.golden.tiny_mixtures import tiny_mixtral, tiny_olmoe, tiny_qwen2_moe, tiny_qwen3_moe
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.models.model_files import write_gguf

Type = gguf.GGMLQuantizationType
KINDS: dict[str, Callable[[], TinyModel]] = {
    "llama": tiny_mixtral,
    "qwen2moe": lambda: tiny_qwen2_moe(dense=False),
    "qwen3moe": tiny_qwen3_moe,
    "olmoe": tiny_olmoe,
}
CPU = torch.device("cpu")


def convert(tiny: TinyModel, architecture: str, path: Path, kind: Type | None = None) -> Path:
    """`kind`: of the experts' tensors; None: floats."""
    config = tiny.oracle.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, tensor in tiny.oracle.state_dict().items():
        array = tensor.numpy()
        if name.endswith("experts.gate_up_proj"):  # which the converter has apart
            both = np.split(array, 2, axis=1)
            parts = {name.replace("gate_up_proj", part): each for part, each in zip(("gate_proj", "up_proj"), both)}
        else:
            parts = {name: array}
        for part, numbers in parts.items():
            if architecture == "llama" and ("q_proj" in part or "k_proj" in part):
                heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
                numbers = reorder_rows(numbers, heads)
            if part.endswith("shared_expert_gate.weight"):
                numbers = numbers[0]
            part = part if part.endswith((".weight", ".bias")) else f"{part}.weight"
            new_name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert new_name is not None, part
            numbers = np.ascontiguousarray(numbers)
            if kind is not None and "_exps" in new_name:
                tensors[new_name] = gguf.quants.quantize(numbers, kind), kind
            else:
                tensors[new_name] = numbers
    return write_gguf(path, architecture, metadata_of(tiny, architecture), tensors)


def metadata_of(tiny: TinyModel, architecture: str) -> dict[str, Any]:
    config, experts = tiny.config, tiny.config.experts
    assert experts is not None
    values: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
    }
    if architecture in ("qwen2moe", "qwen3moe"):
        values["expert_feed_forward_length"] = experts.inner_size
    return {f"{architecture}.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("architecture", KINDS)
def test_a_converted_mixture_has_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    tiny = KINDS[architecture]()
    found = resolve_model(str(convert(tiny, architecture, tmp_path / "m.gguf")))
    assert found.config.experts == tiny.config.experts
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(30)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=2e-5, rtol=0)


@pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
def test_experts_stay_in_the_bits_of_their_file(kind: Type, tmp_path: Path) -> None:
    """Against the same file decoded to floats: what differs is the rounding of activations to 8 bits."""
    tiny = tiny_mixtral(inner=128)
    found = resolve_model(str(convert(tiny, "llama", tmp_path / "m.gguf", kind)))
    ops, ids = NativeOps(), random_token_ids(30)
    kept = dense_logits(build_model(found.config, found.tensors, ops, CPU, torch.float32), ids)
    decoded = dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32), ids)
    assert any(one["format"] == kind.name for one in ops.kept_formats())
    assert 0 < (kept - decoded).norm() < 0.03 * decoded.norm()


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_take_their_part_of_quantised_experts(expert_parallel: bool, tmp_path: Path) -> None:
    tiny = tiny_mixtral(inner=128)
    found = resolve_model(str(convert(tiny, "llama", tmp_path / "m.gguf", Type.Q8_0)))
    whole = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(9)

    def logits_of(shard: Shard) -> torch.Tensor:
        part = ModelPart(Shard(shard.rank, shard.world_size, shard.collective, expert_parallel))
        return dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32, part=part), ids)

    for logits in on_all_ranks(2, logits_of):
        torch.testing.assert_close(logits, dense_logits(whole, ids), atol=2e-5, rtol=0)


def test_a_mixture_of_another_family_is_refused(tmp_path: Path) -> None:
    tiny = tiny_olmoe()
    metadata = metadata_of(tiny, "granite")
    tensors = {"token_embd.weight": np.zeros((97, 64), np.float32)}
    with pytest.raises(ModelError, match="is a mixture of experts of granite"):
        resolve_model(str(write_gguf(tmp_path / "m.gguf", "granite", metadata, tensors)))
