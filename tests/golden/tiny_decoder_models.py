"""Small random models of further decoder families, as tiny_models.py has them of the first ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import transformers

from ratoon.core.config import RopeScaling
from tests.golden.tiny_models import TinyModel, make_tiny, plain_config, shared_arguments, tiny_mistral

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.4 * i for i in range(6)],
}


def tiny_gemma2(
    window: int | None = 6,
    head_dim: int = 16,
    attention_cap: float | None = 2.0,
    final_cap: float | None = 3.0,
    seed: int = 0,
) -> TinyModel:
    """Soft caps that most scores and logits come near to. Every other layer has the window, if there is one."""
    sliding = (True, False, True, False)
    config = replace(
        plain_config("Gemma2ForCausalLM", 4, 2, head_dim=head_dim),
        num_layers=4,
        activation="gelu_pytorch_tanh",
        attention_scale=20.0**-0.5,
        attention_soft_cap=attention_cap,
        final_soft_cap=final_cap,
        tie_word_embeddings=True,
        sliding_window=window,
        sliding_layers=None if window is None else sliding,
        scale_embedding=True,
    )
    oracle_config = transformers.Gemma2Config(
        **shared_arguments(config),
        head_dim=head_dim,
        query_pre_attn_scalar=20,
        sliding_window=window or 6,  # transformers asks for one, whatever layers have it
        layer_types=["sliding_attention" if has and window else "full_attention" for has in sliding],
        attn_logit_softcapping=attention_cap,
        final_logit_softcapping=final_cap,
    )
    return make_tiny(transformers.Gemma2ForCausalLM, oracle_config, config, seed)


def tiny_phi3(share: float = 0.75, longrope: bool = False, window: int | None = None, seed: int = 0) -> TinyModel:
    """`longrope`: of which all sequences have the short factors."""
    config = replace(plain_config("Phi3ForCausalLM", 4, 2), sliding_window=window)
    rotary_dim = int(config.head_dim * share)
    config = replace(config, rotary_dim=None if share == 1.0 else rotary_dim)
    rope: dict[str, Any] = {"rope_type": "default"}
    if longrope:
        assert rotary_dim == 12
        rope = LONGROPE | {"original_max_position_embeddings": config.max_position, "factor": 4.0}
        scaling = RopeScaling(
            kind="longrope", factor=4.0, original_max_position=config.max_position,
            short_factors=tuple(LONGROPE["short_factor"]), long_factors=tuple(LONGROPE["long_factor"]),
        )  # fmt: skip
        config = replace(config, rope_scaling=scaling)
    rope["partial_rotary_factor"] = share
    oracle_config = transformers.Phi3Config(
        **shared_arguments(config, rope),
        original_max_position_embeddings=config.max_position,
        sliding_window=window,
        pad_token_id=0,
    )
    return make_tiny(transformers.Phi3ForCausalLM, oracle_config, config, seed)


def tiny_olmo2(num_kv_heads: int = 2, seed: int = 0) -> TinyModel:
    config = plain_config("Olmo2ForCausalLM", 4, num_kv_heads)
    return make_tiny(transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**shared_arguments(config)), config, seed)


def tiny_granite(seed: int = 0) -> TinyModel:
    config = replace(
        plain_config("GraniteForCausalLM", 4, 2),
        attention_scale=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_multiplier=1 / 2.5,
        tie_word_embeddings=True,
    )
    oracle_config = transformers.GraniteConfig(
        **shared_arguments(config),
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    )
    return make_tiny(transformers.GraniteForCausalLM, oracle_config, config, seed)


def tiny_starcoder2(window: int | None = 7, seed: int = 0) -> TinyModel:
    config = replace(
        plain_config("Starcoder2ForCausalLM", 4, 2),
        norm_eps=1e-5,
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        sliding_window=window,
    )
    oracle_config = transformers.Starcoder2Config(
        **shared_arguments(config, eps_name="norm_epsilon"), sliding_window=window
    )
    return make_tiny(transformers.Starcoder2ForCausalLM, oracle_config, config, seed)


def tiny_smollm3(seed: int = 0) -> TinyModel:
    config = replace(
        plain_config("SmolLM3ForCausalLM", 4, 2),
        tie_word_embeddings=True,
        rotary_layers=(True, False, True),
    )
    oracle_config = transformers.SmolLM3Config(**shared_arguments(config), no_rope_layers=[1, 0, 1], pad_token_id=0)
    return make_tiny(transformers.SmolLM3ForCausalLM, oracle_config, config, seed)


def tiny_glm(is_later: bool, share: float = 0.5, seed: int = 0) -> TinyModel:
    """`is_later`: with norms on both sides of each half of a layer."""
    config = plain_config("Glm4ForCausalLM" if is_later else "GlmForCausalLM", 4, 2, head_dim=32)
    config = replace(
        config, rotary_dim=int(32 * share), interleaved_rotary=True, attention_bias=True, norm_eps=1.5625e-7
    )
    rope = {"rope_type": "default", "partial_rotary_factor": share}
    arguments = shared_arguments(config, rope) | {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}
    if is_later:
        return make_tiny(transformers.Glm4ForCausalLM, transformers.Glm4Config(**arguments), config, seed)
    return make_tiny(transformers.GlmForCausalLM, transformers.GlmConfig(**arguments), config, seed)


def tiny_gpt_neox(parallel: bool = True, seed: int = 0) -> TinyModel:
    config = replace(
        plain_config("GPTNeoXForCausalLM", 4, 4),
        norm_eps=1e-5,
        activation="gelu",
        rotary_dim=4,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        parallel_residual=parallel,
    )
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25}
    arguments = shared_arguments(config, rope, eps_name="layer_norm_eps")
    del arguments["num_key_value_heads"]
    oracle_config = transformers.GPTNeoXConfig(**arguments, use_parallel_residual=parallel)
    return make_tiny(transformers.GPTNeoXForCausalLM, oracle_config, config, seed)


def tiny_falcon(kind: str, seed: int = 0) -> TinyModel:
    """`kind`: "multi-query" (7B), "new" (40B), "one norm" (11B), "one after the other" (with as many KV heads)."""
    num_kv_heads = {"multi-query": 1, "one after the other": 4}.get(kind, 2)
    has_bias = kind == "one after the other"
    config = replace(
        plain_config("FalconForCausalLM", 4, num_kv_heads),
        norm_eps=1e-5,
        activation="gelu",
        tie_word_embeddings=True,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=has_bias,
        parallel_residual=kind != "one after the other",
    )
    arguments = shared_arguments(config, eps_name="layer_norm_epsilon")
    arguments["num_kv_heads"] = arguments.pop("num_key_value_heads")
    arguments["ffn_hidden_size"] = arguments.pop("intermediate_size")
    oracle_config = transformers.FalconConfig(
        **arguments,
        new_decoder_architecture=kind in ("new", "one norm"),
        num_ln_in_parallel_attn=1 if kind == "one norm" else None,
        multi_query=kind == "multi-query",
        parallel_attn=kind != "one after the other",
        bias=has_bias,
        alibi=False,
    )
    return make_tiny(transformers.FalconForCausalLM, oracle_config, config, seed)


MINISTRAL3_ROPE = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def tiny_ministral3(beta: float = 0.4, seed: int = 0) -> TinyModel:
    """Queries grow three times within 64 positions."""
    scaling = RopeScaling(
        kind="yarn", factor=8.0, original_max_position=16, mscale=1.0, mscale_all_dim=1.0, query_beta=beta
    )
    config = replace(plain_config("Ministral3ForCausalLM", 4, 2), rope_scaling=scaling)
    rope = MINISTRAL3_ROPE | {"llama_4_scaling_beta": beta}
    oracle_config = transformers.Ministral3Config(**shared_arguments(config, rope), head_dim=config.head_dim)
    return make_tiny(transformers.Ministral3ForCausalLM, oracle_config, config, seed)


def tiny_mistral3(text: str = "mistral", seed: int = 0) -> TinyModel:
    """With an encoder of pictures, which is not built. `text`: the model_type of the text model."""
    inner = tiny_ministral3() if text == "ministral3" else tiny_mistral(window=None)
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28
    )
    oracle_config = transformers.Mistral3Config(
        text_config=inner.oracle.config, vision_config=vision, image_token_index=5, tie_word_embeddings=False
    )
    config = replace(inner.config, architecture="Mistral3ForConditionalGeneration")
    return make_tiny(transformers.Mistral3ForConditionalGeneration, oracle_config, config, seed)


# One of each family
DECODERS: dict[str, Callable[[], TinyModel]] = {
    "gemma2": tiny_gemma2,
    "phi3": tiny_phi3,
    "olmo2": tiny_olmo2,
    "granite": tiny_granite,
    "starcoder2": tiny_starcoder2,
    "smollm3": tiny_smollm3,
    "glm4": lambda: tiny_glm(is_later=True),
    "gpt_neox": tiny_gpt_neox,
    "falcon": lambda: tiny_falcon("new"),
}
