"""Models with states out of GGUF files against transformers. The files are written as llama.cpp's converter writes
them, with names of the `gguf` package."""

from __future__ import annotations

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
from tests.golden.test_gguf_models import reorder_rows
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.golden.tiny_states import STATE_MODELS, tiny_granite_hybrid, tiny_mamba2
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.models.model_files import write_gguf

CPU = torch.device("cpu")
ARCHITECTURES = {"Mamba2ForCausalLM": "mamba2", "GraniteMoeHybridForCausalLM": "granitehybrid"}
MODELS = {"mamba2": gguf.MODEL_ARCH.MAMBA2, "granitehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID}
# Tensors of transformers' modules, and the names that its checkpoints have for them
NAMES_IN_FILES = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
NO_LENGTH = 2**20  # what the converter writes for models without a length
Q8 = gguf.GGMLQuantizationType.Q8_0


def convert(tiny: TinyModel, path: Path, quantised: bool = False, **changed: Any) -> Path:
    """`quantised`: the products of layers with states. `changed`: further metadata, or other values."""
    config, states = tiny.config, tiny.config.state_space
    assert states is not None
    architecture = ARCHITECTURES[config.architecture]
    names = gguf.get_tensor_name_map(MODELS[architecture], config.num_layers)
    tensors: dict[str, Any] = {}
    for name, tensor in tiny.oracle.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, array in parts_of(name, tensor.numpy(), config.experts is not None).items():
            new_name = part if part.startswith("blk.") else names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert new_name is not None, part
            if architecture == "granitehybrid" and ("attn_q" in new_name or "attn_k" in new_name):
                array = reorder_rows(array, config.num_heads if "attn_q" in new_name else config.num_kv_heads)
            if new_name.endswith("ssm_a"):
                array = -np.exp(array)
            if new_name.endswith(("ssm_a", "ssm_d")):
                array = array[:, None]
            elif new_name.endswith("ssm_norm.weight"):
                array = array.reshape(states.num_groups, -1)
            elif new_name.endswith("ssm_conv1d.weight"):
                array = array[:, 0]
            array = np.ascontiguousarray(array)
            is_product = new_name.endswith(("ssm_in.weight", "ssm_out.weight"))
            tensors[new_name] = (gguf.quants.quantize(array, Q8), Q8) if quantised and is_product else array
    return write_gguf(path, architecture, metadata_of(tiny, architecture) | changed, tensors)


def parts_of(name: str, array: np.ndarray, has_experts: bool) -> dict[str, np.ndarray]:
    """What the converter makes of a tensor, by names of the checkpoint or, where it splits one, of the file."""
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): array}
    for own, in_files in NAMES_IN_FILES.items():
        name = name.replace(own, in_files)
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if name.endswith("input_linear.weight"):  # gate and up together
        gate, up = np.split(array, 2, axis=-2)
        kind = "_exps" if "block_sparse_moe" in name else "_shexp" if has_experts else ""
        return {f"blk.{layer}.ffn_gate{kind}.weight": gate, f"blk.{layer}.ffn_up{kind}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        return {f"blk.{layer}.ffn_down.weight": array}
    return {name: array}


def metadata_of(tiny: TinyModel, architecture: str) -> dict[str, Any]:
    config, states, experts = tiny.config, tiny.config.state_space, tiny.config.experts
    assert states is not None
    values: dict[str, Any] = {
        "context_length": NO_LENGTH,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "ssm.conv_kernel": states.conv_width,
        "ssm.inner_size": states.num_heads * states.head_dim,
        "ssm.state_size": states.state_size,
        "ssm.time_step_rank": states.num_heads,
        "ssm.group_count": states.num_groups,
    }
    if architecture == "granitehybrid":
        heads = [0 if states.is_in_layer(layer) else config.num_kv_heads for layer in range(config.num_layers)]
        values |= {
            "feed_forward_length": config.intermediate_size if experts is None else experts.inner_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": heads,
            "attention.scale": config.attention_scale,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": 1 / config.logits_multiplier,
            "rope.freq_base": config.rope_theta,
            "rope.scaling.finetuned": config.rotary_layers is None,
            "expert_count": 0 if experts is None else experts.num_experts,
            "expert_used_count": 0 if experts is None else experts.top_k,
        }
    tokens = {
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
    }
    known = {f"{architecture}.{key}": value for key, value in values.items()} | tokens
    return {key: value for key, value in known.items() if value is not None}


@pytest.mark.parametrize("family", STATE_MODELS)
def test_a_converted_model_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    tiny = STATE_MODELS[family]()
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf")))
    assert (found.config.state_space, found.config.experts) == (tiny.config.state_space, tiny.config.experts)
    assert found.config.rotary_layers == tiny.config.rotary_layers
    assert found.config.max_position == (32768 if "mamba2" in family else 131072)
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(40)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=5e-5, rtol=0)


@pytest.mark.parametrize("make", [lambda: tiny_mamba2(2), tiny_granite_hybrid], ids=["mamba2", "granite hybrid"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_their_heads(make: Any, world_size: int, tmp_path: Path) -> None:
    """With 4 ranks of 2 groups each has a part of one, whose norm takes what other ranks have."""
    tiny = make()
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf")))
    ids = random_token_ids(9)

    def logits_of(shard: Shard) -> torch.Tensor:
        part = ModelPart(shard)
        return dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32, part=part), ids)

    for logits in on_all_ranks(world_size, logits_of):
        torch.testing.assert_close(logits, tiny.oracle_logits(ids), atol=5e-5, rtol=0)


@pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")
def test_products_of_states_stay_in_the_bits_of_their_file(tmp_path: Path) -> None:
    """Against the same file decoded to floats: what differs is the rounding of activations to 8 bits."""
    found = resolve_model(str(convert(tiny_mamba2(), tmp_path / "m.gguf", quantised=True)))
    ops, ids = NativeOps(), random_token_ids(30)
    kept = dense_logits(build_model(found.config, found.tensors, ops, CPU, torch.float32), ids)
    decoded = dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32), ids)
    assert any(one["format"] == "Q8_0" for one in ops.kept_formats())
    assert 0 < (kept - decoded).norm() < 0.05 * decoded.norm()


def test_a_length_that_a_file_has_is_kept(tmp_path: Path) -> None:
    path = convert(tiny_mamba2(), tmp_path / "m.gguf", **{"mamba2.context_length": 4096})
    assert resolve_model(str(path)).config.max_position == 4096


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"granitehybrid.ssm.inner_size": 100}, "granitehybrid.ssm.inner_size; a multiple"),
        ({"granitehybrid.ssm.group_count": 3}, "mamba_n_groups"),
        ({"granitehybrid.block_count": 2**31}, "granitehybrid.block_count; a number from 1 to 4096"),
        ({"granitehybrid.ssm.time_step_rank": "many"}, "granitehybrid.ssm.time_step_rank; a whole number"),
        ({"granitehybrid.attention.head_count_kv": [2, 1, 0, 0]}, "head_count_kv differs between layers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        resolve_model(str(convert(tiny_granite_hybrid(), tmp_path / "m.gguf", **changed)))


def test_decays_above_0_are_refused(tmp_path: Path) -> None:
    tiny = tiny_mamba2()
    path = convert(tiny, tmp_path / "m.gguf")
    tensors: dict[str, Any] = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    tensors["blk.1.ssm_a"] = -tensors["blk.1.ssm_a"]
    found = resolve_model(str(write_gguf(tmp_path / "b.gguf", "mamba2", metadata_of(tiny, "mamba2"), tensors)))
    with pytest.raises(ModelError, match=r"decays above 0 in blk\.1\.ssm_a"):
        build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
