"""Tensors and configs read from GGUF against the transformers models that they were made from.

The files are written here as llama.cpp's converter writes them: its names come from the `gguf` package, its reordering
of query and key rows, its transposed GPT-2 weights and its norms of Gemma are spelled out below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from ratoon.core.errors import ModelError
from ratoon.models.gguf_config import LAYER_NORMED
from ratoon.models.gguf_source import PERMUTED
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden.tiny_decoder_models import MINISTRAL3_ROPE
from tests.unit.models.model_files import write_gguf

SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gptneox": gguf.MODEL_ARCH.GPTNEOX,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "glm4moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
KINDS = ["llama", "llama with biases", "qwen2", "qwen3", "gpt2", "gemma3", *(DECODERS := {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}),
    "mistral3": (Ministral3ForCausalLM, Ministral3Config, {"head_dim": 32, "rope_parameters": MINISTRAL3_ROPE | {
        "rope_theta": 1e6, "llama_4_scaling_beta": 0.125}}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"pad_token_id": 0, "sliding_window": 16}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"attention_multiplier": 0.25, "embedding_multiplier": 4.0,
                                                    "residual_multiplier": 0.5, "logits_scaling": 8.0}),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config, {"norm_epsilon": 1e-5}),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"pad_token_id": 0, "num_hidden_layers": 5}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"pad_token_id": 0, "head_dim": 32, "eos_token_id": 2}),
    "gptneox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "falcon": (FalconForCausalLM, FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2,
                                                 "ffn_hidden_size": 96}),
})]  # fmt: skip

FEED_FORWARD = ("n_inner", "ffn_hidden_size", "intermediate_size")  # what configs call its size


def build(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES
    if kind == "gpt2":
        sizes = {"vocab_size": 48, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, eos_token_id=2))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True, eos_token_id=2))
    elif kind in DECODERS:
        model_class, config_class, own = DECODERS[kind]
        sizes = sizes | {"bos_token_id": 1, "eos_token_id": 2} | own
        sizes = {name: value for name, value in sizes.items() if name in config_class.__dataclass_fields__}
        model = model_class(config_class(**sizes))
    elif kind == "gemma3":
        scaling = {"rope_type": "linear", "factor": 8.0}
        rope = {"full_attention": {"rope_theta": 1e6, **scaling}, "sliding_attention": {"rope_theta": 1e4}}
        sizes = sizes | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 7}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, rope_parameters=rope, eos_token_id=2))
    else:
        bias = kind == "llama with biases"
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=bias))
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide mistakes
        torch.nn.init.normal_(parameter)
        if kind.startswith("gemma"):
            parameter.data = (parameter.data * 128).round() / 128  # 1 more and 1 less is the same number again
    return model


def reorder_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Row i and row i + half of each head become neighbours."""
    head_dim = tensor.shape[0] // heads
    order = [
        head * head_dim + coordinate * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for coordinate in (0, 1)
    ]
    return tensor[order]


def part_rows(tensor: np.ndarray, config: Any) -> np.ndarray:
    """All queries, all keys, all values, of rows that have them KV head by KV head."""
    kv_heads = getattr(config, "num_kv_heads", config.num_attention_heads)
    group, rest = config.num_attention_heads // kv_heads, tensor.shape[1:]
    rows = tensor.reshape(kv_heads, group + 2, -1, *rest)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return np.concatenate([part.reshape(-1, *rest) for part in parts])


def convert(model: Any, architecture: str, path: Path) -> Path:
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture in ("gptneox", "falcon") and "query_key_value" in name:
            array = part_rows(array, config)
        if architecture in PERMUTED and "q_proj" in name:
            array = reorder_rows(array, config.num_attention_heads)
        if architecture in PERMUTED and "k_proj" in name:
            array = reorder_rows(array, config.num_key_value_heads)
        if architecture == "gpt2" and ".c_" in name and name.endswith("weight"):
            array = array.T
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        tensors[new_name] = np.ascontiguousarray(array)
    return write_gguf(path, architecture, metadata_of(config, architecture), tensors)


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": next(getattr(config, name) for name in FEED_FORWARD if hasattr(config, name)),
        "attention.head_count": config.num_attention_heads,
    }
    if architecture in LAYER_NORMED:
        names = ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps")
        values["attention.layer_norm_epsilon"] = next(getattr(config, name) for name in names if hasattr(config, name))
    else:
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if architecture != "gpt2":
        kv_heads = getattr(config, "num_key_value_heads", getattr(config, "num_kv_heads", None))
        values["attention.head_count_kv"] = kv_heads or config.num_attention_heads
        rope = config.rope_parameters
        values["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "gemma3":
        scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": rope["full_attention"]["factor"]}
        values |= {"attention.sliding_window": config.sliding_window, **scaling}
    if architecture == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        values |= {"attention.sliding_window": config.sliding_window, **caps}
    if architecture == "phi3":
        values |= {"attention.sliding_window": config.sliding_window, "rope.scaling.original_context_length": 4096}
    if architecture == "mistral3":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values |= {"rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"]}
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture == "granite":
        values |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        values |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    if architecture in ("gptneox", "glm4"):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values["rope.dimension_count"] = int(head_dim * config.rope_parameters["partial_rotary_factor"])
    if architecture in ("qwen3", "gemma2", "gemma3", "glm4", "mistral3"):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    tokens = {"tokenizer.ggml.bos_token_id": config.bos_token_id, "tokenizer.ggml.eos_token_id": config.eos_token_id}
    known = {f"{architecture}.{key}": value for key, value in values.items()} | tokens
    return {key: value for key, value in known.items() if value is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_reads_as_the_model_it_was(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    source = resolve_model(str(convert(model, kind.split()[0], tmp_path / "m.gguf")))
    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert dict(source.tensors.shapes()) == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        assert torch.equal(source.tensors.read(name).floats(), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_has_the_config_it_had(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    source = resolve_model(str(convert(model, kind.split()[0], tmp_path / "m.gguf")))
    model.config.architectures = [type(model).__name__]
    raw = model.config.to_dict() | {"dtype": "float32"}
    wanted = parse_hf_config(raw, "test")
    for field in set(wanted.__dataclass_fields__) - {"norm_eps"}:  # which GGUF has in single precision
        assert getattr(source.config, field) == getattr(wanted, field), field
    assert source.config.norm_eps == pytest.approx(wanted.norm_eps)


def test_quantised_query_rows_are_put_back_in_order(tmp_path: Path) -> None:
    """Reordering happens on quantised rows; it must come to the same as reordering numbers."""
    model = build("llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    original = model.state_dict()[name].numpy()
    q8 = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(reorder_rows(original, 4), q8)
    path = convert(model, "llama", tmp_path / "m.gguf")
    tensors: dict[str, Any] = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    tensors["blk.1.attn_q.weight"] = (stored, q8)
    path = write_gguf(tmp_path / "q.gguf", "llama", metadata_of(model.config, "llama"), tensors)
    wanted = gguf.quants.dequantize(gguf.quants.quantize(original, q8), q8)
    np.testing.assert_array_equal(resolve_model(str(path)).tensors.read(name).floats().numpy(), wanted)


def test_a_scale_of_queries_from_another_length_than_that_of_the_rotation_is_refused(tmp_path: Path) -> None:
    model = build("mistral3")
    metadata = metadata_of(model.config, "mistral3") | {"mistral3.attention.temperature_length": 32}
    tensors = {"token_embd.weight": np.zeros((48, 64), np.float32)}
    with pytest.raises(ModelError, match=r"mistral3\.attention\.temperature_length"):
        resolve_model(str(write_gguf(tmp_path / "m.gguf", "mistral3", metadata, tensors)))
