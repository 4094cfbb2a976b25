"""Our reading of Hugging Face configs against transformers' own config classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config

SMALL = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32,
    "max_position_embeddings": 256,
}  # fmt: skip

CLASSES = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"num_key_value_heads": 8, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5}),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_theta": 1e6}),
    (
        "LlamaForCausalLM",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}),
    ("MistralForCausalLM", {}),
    ("MistralForCausalLM", {"sliding_window": None, "head_dim": 128}),
    ("MistralForCausalLM", {"sliding_window": 32, "rope_theta": 1000000.0}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen2ForCausalLM", {"num_key_value_heads": None}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}),
    (
        "Qwen2ForCausalLM",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "rope_theta": 1e6},
    ),
    ("Qwen3ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True, "eos_token_id": [1, 2]}),
    (
        "Qwen3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "attention_factor": 1.25, "beta_fast": 16.0,
                "beta_slow": 2.0, "original_max_position_embeddings": 128,
            }
        },
    ),
    (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True, "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes"), CASES)
@pytest.mark.parametrize("saved", [False, True], ids=["as written", "as transformers saves it"])
def test_a_config_means_what_transformers_takes_it_for(architecture: str, changes: dict, saved: bool) -> None:
    raw = {"architectures": [architecture], **SMALL, **changes}
    oracle = CLASSES[architecture](**copy.deepcopy(raw))  # it writes into what it is given
    config = parse_hf_config(oracle.to_dict() if saved else raw, "test")
    assert (config.vocab_size, config.hidden_size) == (oracle.vocab_size, oracle.hidden_size)
    assert (config.intermediate_size, config.num_layers) == (oracle.intermediate_size, oracle.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (oracle.num_attention_heads, oracle.num_key_value_heads)
    assert config.head_dim == (getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads)
    assert (config.max_position, config.norm_eps) == (oracle.max_position_embeddings, oracle.rms_norm_eps)
    assert (config.activation, config.tie_word_embeddings) == (oracle.hidden_act, oracle.tie_word_embeddings)
    assert config.attention_bias == (architecture == "Qwen2ForCausalLM" or getattr(oracle, "attention_bias", False))
    assert config.attention_output_bias == getattr(oracle, "attention_bias", False)
    assert config.mlp_bias == getattr(oracle, "mlp_bias", False)
    check_windows(config, oracle)
    check_rope(config, oracle)


def check_windows(config: ModelConfig, oracle: Any) -> None:
    window = getattr(oracle, "sliding_window", None)
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention"] * oracle.num_hidden_layers
    for layer, kind in enumerate(kinds):
        assert config.window_of_layer(layer) == (window if kind == "sliding_attention" else None)


def check_rope(config: ModelConfig, oracle: Any) -> None:
    rope = oracle.rope_parameters
    scaling = config.rope_scaling
    assert (config.rope_theta, scaling.kind) == (rope["rope_theta"], rope["rope_type"])
    assert scaling.factor == rope.get("factor", 1.0)
    for ours, theirs in (
        ("low_freq_factor", "low_freq_factor"), ("high_freq_factor", "high_freq_factor"), ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"), ("attention_factor", "attention_factor"),
        ("original_max_position", "original_max_position_embeddings"),
    ):  # fmt: skip
        if theirs in rope:
            assert getattr(scaling, ours) == rope[theirs]


@pytest.mark.parametrize("changes", [{}, {"n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 1e-3}])
def test_gpt2_has_names_of_its_own(changes: dict[str, Any]) -> None:
    oracle = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, architectures=["GPT2LMHeadModel"], **changes
    )
    config = parse_hf_config(oracle.to_dict(), "test")
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (50, 32, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 4, 8, 64)
    assert config.intermediate_size == (oracle.n_inner or 4 * 32)
    assert (config.norm_eps, config.activation) == (oracle.layer_norm_epsilon, oracle.activation_function)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True, True, True)
    assert config.eos_token_ids == (oracle.eos_token_id,)


GEMMA3_CASES: list[dict[str, Any]] = [
    {},  # what a file leaves out is as in transformers' class
    {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1},
    {"sliding_window": 512, "sliding_window_pattern": 3, "query_pre_attn_scalar": 168},
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 900.0}}},
]  # fmt: skip


@pytest.mark.parametrize("changes", GEMMA3_CASES, ids=str)
@pytest.mark.parametrize("saved", [False, True], ids=["as written", "as transformers saves it"])
def test_a_gemma3_config_means_what_transformers_takes_it_for(changes: dict[str, Any], saved: bool) -> None:
    raw = {"architectures": ["Gemma3ForCausalLM"], **changes}
    oracle = Gemma3TextConfig(**copy.deepcopy(raw))
    config = parse_hf_config(oracle.to_dict() if saved else raw, "test")
    assert (config.vocab_size, config.hidden_size) == (oracle.vocab_size, oracle.hidden_size)
    assert (config.intermediate_size, config.num_layers) == (oracle.intermediate_size, oracle.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (oracle.num_attention_heads, oracle.num_key_value_heads)
    assert (config.head_dim, config.attention_scale) == (oracle.head_dim, oracle.query_pre_attn_scalar**-0.5)
    assert (config.max_position, config.norm_eps) == (oracle.max_position_embeddings, oracle.rms_norm_eps)
    assert (config.activation, config.tie_word_embeddings) == (oracle.hidden_activation, oracle.tie_word_embeddings)
    assert config.attention_bias == config.attention_output_bias == oracle.attention_bias
    assert (config.bos_token_id, config.eos_token_ids) == (oracle.bos_token_id, (oracle.eos_token_id,))
    check_windows(config, oracle)
    whole, local = oracle.rope_parameters["full_attention"], oracle.rope_parameters["sliding_attention"]
    assert (config.rope_theta, config.rope_scaling.kind) == (whole["rope_theta"], whole["rope_type"])
    assert (config.rope_scaling.factor, config.local_rope_theta) == (whole.get("factor", 1.0), local["rope_theta"])


@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
    ],
)
def test_a_gemma3_config_with_what_is_not_there_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="expected"):
        parse_hf_config({"architectures": ["Gemma3ForCausalLM"], **changes}, "test")
