"""Models of transformers with states as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"mamba2": "mamba2", "granitemoehybrid": "granitehybrid"}  # by transformers' model types
NAMES = {"mamba2": gguf.MODEL_ARCH.MAMBA2, "granitehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID}
# Tensors of transformers' modules, and the names that its checkpoints have for them
NAMES_IN_FILES = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
NO_LENGTH = 2**20  # what the converter writes for models without a length
BLOCK = 32  # numbers of a row that are quantised together


def write_state_file(
    model: Any,
    path: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    changed: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the file, and returns its path. `kind`: of the products; the table of tokens is in Q8_0 then. `changed`:
    further metadata of the architecture, or other values. `vocabulary`: what is below tokenizer.ggml."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(NAMES[architecture], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    values = dict(_sizes(config, architecture)) | dict(changed or {})
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id} | dict(vocabulary or {})
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    for key, value in (metadata | {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}).items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, array in _parts(name, tensor.numpy(), bool(getattr(config, "num_local_experts", 0))):
            own = part if part.startswith("blk.") else names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert own is not None, part
            array = np.ascontiguousarray(_converted(own, array, config, architecture))
            found = _kind_of(own, array, kind)
            if found is None:
                writer.add_tensor(own, array)
            else:
                writer.add_tensor(own, gguf.quants.quantize(array, found), raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType | None) -> gguf.GGMLQuantizationType | None:
    is_float = array.ndim < 2 or "norm" in name or ".ssm_conv1d" in name or ".ffn_gate_inp" in name
    if kind is None or is_float or array.shape[-1] % BLOCK:
        return None
    return gguf.GGMLQuantizationType.Q8_0 if name in ("token_embd.weight", "output.weight") else kind


def _parts(name: str, array: np.ndarray, has_experts: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what the converter makes of a tensor, by names of the checkpoint or, where it splits one, of the file."""
    for own, in_files in NAMES_IN_FILES.items():
        name = name.replace(own, in_files)
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), array
    elif name.endswith("input_linear.weight"):  # gate and up together
        gate, up = np.split(array, 2, axis=-2)
        kind = "_exps" if "block_sparse_moe" in name else "_shexp" if has_experts else ""
        yield f"blk.{layer}.ffn_gate{kind}.weight", gate
        yield f"blk.{layer}.ffn_up{kind}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        yield f"blk.{layer}.ffn_down.weight", array
    else:
        yield name, array


def _converted(name: str, array: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture == "granitehybrid" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if name.endswith("ssm_a"):
        return -np.exp(array)[:, None]
    if name.endswith("ssm_d"):
        return array[:, None]
    if name.endswith("ssm_norm.weight"):
        return array.reshape(config.n_groups if architecture == "mamba2" else config.mamba_n_groups, -1)
    return array[:, 0] if name.endswith("ssm_conv1d.weight") else array


def _sizes(config: Any, architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_length": NO_LENGTH,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }
    if architecture == "mamba2":
        return values | {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": config.num_heads * config.head_dim,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.num_heads,
            "ssm.group_count": config.n_groups,
        }
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    experts = config.num_local_experts
    return values | {
        "feed_forward_length": config.intermediate_size if experts else config.shared_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if mark else 0 for mark in attends],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)
