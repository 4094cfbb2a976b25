"""Mixtures of experts out of GGUF files against transformers: the experts of a layer are one tensor there, in floats or
in quantised blocks. The files are written as llama.cpp's converter writes them, with names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.stored import TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.expert_source import with_experts_apart
from ratoon.models.source import resolve_model
from tests.golden import tiny_mixtures
from tests.golden.dense_step import dense_logits
from tests.golden.test_gguf_models import ARCHITECTURES, reorder_rows
from tests.golden.tiny_mixtures import (
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_mixtral,
    tiny_olmoe,
    tiny_qwen2_moe,
    tiny_qwen3_moe,
)
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.models.model_files import write_gguf

Type = gguf.GGMLQuantizationType
KINDS: dict[str, Callable[[], TinyModel]] = {
    "llama": tiny_mixtral,
    "qwen2moe": lambda: tiny_qwen2_moe(dense=False),
    "qwen3moe": tiny_qwen3_moe,
    "olmoe": tiny_olmoe,
    "glm4moe": lambda: tiny_glm4_moe(groups=4, head_norms=True),
    "gpt-oss": lambda: tiny_gpt_oss(limit=7.0),
}
CPU = torch.device("cpu")


def convert(
    tiny: TinyModel, architecture: str, path: Path, kind: Type | None = None, more: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """`kind`: of the experts' tensors; None: floats. `more`: metadata, and `extra`: tensors, beside the usual ones."""
    config = tiny.oracle.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, tensor in tiny.oracle.state_dict().items():
        array = tensor.numpy()
        if architecture == "gpt-oss":
            parts = gpt_oss_parts(name, array)
        elif name.endswith("experts.gate_up_proj"):  # which the converter has apart
            both = np.split(array, 2, axis=1)
            parts = {name.replace("gate_up_proj", part): each for part, each in zip(("gate_proj", "up_proj"), both)}
        else:
            parts = {name.replace("e_score_correction_bias", "e_score_correction.bias"): array}
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
            if kind is not None and "_exps.weight" in new_name:
                tensors[new_name] = gguf.quants.quantize(numbers, kind), kind
            else:
                tensors[new_name] = numbers
    return write_gguf(path, architecture, metadata_of(tiny, architecture) | (more or {}), tensors | (extra or {}))


def gpt_oss_parts(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Its experts as the converter writes them: [out, in], gate and up apart, and with suffixes as other tensors."""
    if name.endswith(".sinks"):
        return {f"{name}.weight": array}
    if ".experts." not in name:
        return {name: array}
    name = name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight"
    array = array if name.endswith(".bias") else array.transpose(0, 2, 1)
    if "gate_up_proj" not in name:
        return {name: array}
    return {
        name.replace("gate_up_proj", "gate_proj"): array[:, 0::2],
        name.replace("gate_up_proj", "up_proj"): array[:, 1::2],
    }


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
    if architecture == "gpt-oss":
        values |= {"expert_feed_forward_length": experts.inner_size, "attention.sliding_window": config.sliding_window}
    if architecture == "glm4moe":
        values |= {
            "rope.dimension_count": config.rotary_dim,
            "expert_feed_forward_length": experts.inner_size,
            "expert_shared_count": experts.shared_size // experts.inner_size,
            "leading_dense_block_count": experts.layers.index(True),
            "expert_gating_func": 2,
            "expert_weights_scale": experts.scale,
            "expert_weights_norm": experts.renormalise,
            "expert_group_count": experts.num_groups,
            "expert_group_used_count": experts.top_groups,
        }
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


@pytest.mark.parametrize(
    ("dispatch", "world_size"), [(None, 2), ("all_reduce", 2), ("all_to_all", 2), ("all_to_all", 4)]
)
def test_ranks_take_their_part_of_quantised_experts(
    dispatch: str | None, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a part of every expert; otherwise some of them whole, and rows are exchanged where that is asked for."""
    monkeypatch.setattr(tiny_mixtures, "EXPERTS", 8)
    tiny = tiny_mixtral(inner=128)
    found = resolve_model(str(convert(tiny, "llama", tmp_path / "m.gguf", Type.Q8_0)))
    whole = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(70)

    def logits_of(shard: Shard) -> torch.Tensor:
        if dispatch is not None:
            shard = replace(shard, expert_parallel=True, expert_dispatch=dispatch)
        part = ModelPart(shard)
        return dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32, part=part), ids)

    for logits in on_all_ranks(world_size, logits_of):
        torch.testing.assert_close(logits, dense_logits(whole, ids), atol=2e-5, rtol=0)


@pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")
def test_experts_of_gpt_oss_in_mxfp4_keep_every_number(tmp_path: Path) -> None:
    tiny = tiny_gpt_oss(limit=7.0, inner=64)
    file = convert(tiny, "gpt-oss", tmp_path / "m.gguf", Type.MXFP4)
    found = resolve_model(str(file))
    source = with_experts_apart(found.tensors, found.config)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    whole = next(one for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.ffn_up_exps.weight")
    numbers = torch.from_numpy(gguf.quants.dequantize(whole.data, whole.tensor_type))
    torch.testing.assert_close(source.read(name).floats(), numbers[3], atol=0, rtol=0)
    part = TensorSlice(1, 32, 64)
    torch.testing.assert_close(source.read(name, part).floats(), numbers[3][:, 32:64], atol=0, rtol=0)
    ops, ids = NativeOps(), random_token_ids(30)
    kept = dense_logits(build_model(found.config, found.tensors, ops, CPU, torch.float32), ids)
    decoded = dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32), ids)
    assert ops.kept_formats(), "in a byte each, as from the model's own files"
    # Activations of 8 bits: a row's error is small, unless the router then chooses another expert for it.
    errors = (kept - decoded).norm(dim=-1) / decoded.norm(dim=-1)
    assert errors.median() < 0.03


def test_the_rotation_and_the_ends_of_gpt_oss(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False,
    }  # fmt: skip
    tiny = tiny_gpt_oss(limit=7.0, rope=rope)
    tokens = ["<|return|>", "<|end|>", "<|call|>", "a"]
    scaling = {
        "gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 16, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1,
    }  # fmt: skip
    found = resolve_model(str(convert(tiny, "gpt-oss", tmp_path / "m.gguf", more=scaling)))
    assert found.config.eos_token_ids == (0, 2), "an answer goes on behind the end of a message"
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(40)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=2e-5, rtol=0)


def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    tiny = tiny_glm4_moe()
    extra = {
        f"blk.{tiny.config.num_layers}.{name}": np.ones(8, np.float32)
        for name in ("attn_norm.weight", "nextn.eh_proj.weight", "nextn.shared_head_norm.weight")
    }
    more = {"glm4moe.block_count": tiny.config.num_layers + 1, "glm4moe.nextn_predict_layers": 1}
    found = resolve_model(str(convert(tiny, "glm4moe", tmp_path / "m.gguf", more=more, extra=extra)))
    assert found.config.num_layers == tiny.config.num_layers
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(12)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=2e-5, rtol=0)


def test_a_mixture_of_another_family_is_refused(tmp_path: Path) -> None:
    tiny = tiny_olmoe()
    metadata = metadata_of(tiny, "granite")
    tensors = {"token_embd.weight": np.zeros((97, 64), np.float32)}
    with pytest.raises(ModelError, match="is a mixture of experts of granite"):
        resolve_model(str(write_gguf(tmp_path / "m.gguf", "granite", metadata, tensors)))
