"""Models with latent attention out of GGUF files against transformers. The files are written as llama.cpp's converter
writes them, newer ones with the two halves of kv_b_proj apart, with names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_latent_models import tiny_deepseek_v2, tiny_deepseek_v3
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.models.model_files import write_gguf

KINDS: dict[str, Callable[[], TinyModel]] = {
    "v2": tiny_deepseek_v2,
    "v2 with groups and products for queries": lambda: tiny_deepseek_v2(20, 4),
    "v2 with yarn": lambda: tiny_deepseek_v2(yarn=True, mscale=1.2),
    "v3": tiny_deepseek_v3,
}
CPU = torch.device("cpu")
Tensors = dict[str, Any]


def convert(tiny: TinyModel, path: Path, is_new: bool, leave_out: str = "nothing") -> Path:
    latent, heads = tiny.config.latent, tiny.config.num_heads
    assert latent is not None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, tiny.config.num_layers)
    tensors: Tensors = {}
    for name, tensor in tiny.oracle.state_dict().items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        elif name.endswith("kv_b_proj.weight") and is_new:
            keys, values = tensor.unflatten(0, (heads, -1)).split([latent.nope_dim, latent.value_dim], 1)
            parts = {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
        for part, numbers in parts.items():
            part = part.replace("e_score_correction_bias", "e_score_correction.bias")
            part = part if part.endswith((".weight", ".bias")) else f"{part}.weight"
            new_name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert new_name is not None, part
            if leave_out not in new_name:
                tensors[new_name] = np.ascontiguousarray(numbers.numpy())
    return write_gguf(path, "deepseek2", metadata_of(tiny, is_new), tensors)


def metadata_of(tiny: TinyModel, is_new: bool) -> dict[str, Any]:
    config, latent, experts, rope = tiny.config, tiny.config.latent, tiny.config.experts, tiny.config.rope_scaling
    assert latent is not None and experts is not None
    key_dim = latent.nope_dim + latent.rope_dim
    values: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": 1 if is_new else config.num_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.key_length": config.head_dim if is_new else key_dim,
        "attention.value_length": latent.kv_rank if is_new else latent.value_dim,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": latent.rope_dim,
        "leading_dense_block_count": 1,
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.inner_size,
        "expert_shared_count": experts.shared_size // experts.inner_size,
        "expert_weights_scale": experts.scale,
        "expert_weights_norm": experts.renormalise,
        "expert_gating_func": 2 if experts.scoring == "sigmoid" else 1,
    }
    if is_new:
        values |= {"attention.key_length_mla": key_dim, "attention.value_length_mla": latent.value_dim}
    if latent.q_rank is not None:
        values["attention.q_lora_rank"] = latent.q_rank
    if experts.num_groups > 1:
        values |= {"expert_group_count": experts.num_groups, "expert_group_used_count": experts.top_groups}
    if rope.kind == "yarn":
        assert rope.mscale_all_dim is not None and rope.original_max_position is not None
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_log_multiplier": 0.1 * rope.mscale_all_dim,
        }  # fmt: skip
    return {f"deepseek2.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("is_new", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_has_the_logits_of_transformers(kind: str, is_new: bool, tmp_path: Path) -> None:
    tiny = KINDS[kind]()
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf", is_new)))
    assert (found.config.latent, found.config.experts) == (tiny.config.latent, tiny.config.experts)
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(40)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=5e-5, rtol=0)


def test_ranks_take_their_heads_of_both_halves(tmp_path: Path) -> None:
    found = resolve_model(str(convert(tiny_deepseek_v2(), tmp_path / "m.gguf", is_new=True)))
    whole, ids = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32), random_token_ids(9)

    def logits_of(shard: Shard) -> torch.Tensor:
        part = ModelPart(shard)
        return dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32, part=part), ids)

    for logits in on_all_ranks(2, logits_of):
        torch.testing.assert_close(logits, dense_logits(whole, ids), atol=2e-5, rtol=0)


def test_a_file_without_one_half_is_refused(tmp_path: Path) -> None:
    path = convert(tiny_deepseek_v2(), tmp_path / "m.gguf", is_new=True, leave_out="attn_v_b")
    with pytest.raises(ModelError, match="lacks the other half of blk"):
        resolve_model(str(path))
