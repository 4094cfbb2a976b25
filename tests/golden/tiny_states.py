"""Small random models with states, as tiny_models.py has other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import transformers
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from ratoon.core.config import ExpertConfig, PositionKind, StateSpaceConfig
from ratoon.models.expert_source import ExpertSource
from tests.golden.tiny_models import TinyModel, make_tiny, plain_config, shared_arguments


def tiny_mamba2(num_groups: int = 2, tied: bool = False, has_biases: bool = False, seed: int = 0) -> TinyModel:
    states = StateSpaceConfig(8, 16, 24, num_groups, 4, conv_bias=not has_biases, proj_bias=has_biases)
    config = replace(
        plain_config("Mamba2ForCausalLM", 8, 8),
        intermediate_size=128, position_kind=PositionKind.IMPLICIT, norm_eps=1e-5, tie_word_embeddings=tied,
        state_space=states,
    )  # fmt: skip
    oracle_config = transformers.Mamba2Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
        num_heads=8, head_dim=16, state_size=24, n_groups=num_groups, chunk_size=16, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied, use_bias=has_biases, use_conv_bias=not has_biases,
        time_step_limit=(0.0, float("inf")), max_position_embeddings=config.max_position,
    )  # fmt: skip
    tiny = make_tiny(transformers.Mamba2ForCausalLM, oracle_config, config, seed, gain=1.5)
    for layer in tiny.oracle.backbone.layers:
        # Each group has a norm of its own, as models are trained with it; transformers has that only in Zamba2
        norm = Zamba2RMSNormGated(128, group_size=128 // num_groups, eps=config.norm_eps)
        norm.weight = layer.mixer.norm.weight
        layer.mixer.norm = norm
    return tiny


def tiny_granite_hybrid(experts: int = 4, num_layers: int = 4, rope: bool = False, seed: int = 0) -> TinyModel:
    """The second layer attends, as every fourth behind it does."""
    attends = [layer % 4 == 1 for layer in range(num_layers)]
    states = StateSpaceConfig(8, 16, 24, 1, 4, tuple(not mark for mark in attends))
    config = replace(
        plain_config("GraniteMoeHybridForCausalLM", 4, 2),
        num_layers=num_layers, intermediate_size=56, attention_scale=0.2, embedding_multiplier=3.0,
        residual_multiplier=0.4, logits_multiplier=1 / 2.5, tie_word_embeddings=True, state_space=states,
        experts=ExpertConfig(experts, 2, 40, renormalise=True) if experts else None,
        position_kind=PositionKind.ROTARY if rope else PositionKind.IMPLICIT,
        rotary_layers=None if rope else (False,) * num_layers,
    )  # fmt: skip
    oracle_config = transformers.GraniteMoeHybridConfig(
        **shared_arguments(config) | {"intermediate_size": 40},
        attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.5,
        num_local_experts=experts, num_experts_per_tok=2 if experts else 0, shared_intermediate_size=56,
        layer_types=["full_attention" if mark else "linear_attention" for mark in attends],
        mamba_n_heads=8, mamba_d_head=16, mamba_d_state=24, mamba_n_groups=1, mamba_chunk_size=16,
        position_embedding_type="rope" if rope else None,
    )  # fmt: skip
    tiny = make_tiny(transformers.GraniteMoeHybridForCausalLM, oracle_config, config, seed)
    return tiny._replace(source=ExpertSource(tiny.source))  # type: ignore[arg-type]


# One of each family, and of each form that differs
STATE_MODELS: dict[str, Callable[[], TinyModel]] = {
    "mamba2": tiny_mamba2,
    "mamba2 with one group, a tied head and other biases": lambda: tiny_mamba2(1, tied=True, has_biases=True),
    "granite hybrid with experts": tiny_granite_hybrid,
    "granite hybrid without experts": lambda: tiny_granite_hybrid(experts=0, num_layers=7),
    "granite hybrid with rope": lambda: tiny_granite_hybrid(experts=0, rope=True),
}
