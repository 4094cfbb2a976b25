"""Turns Hugging Face configs of models with latent attention (DeepSeek-V2 and V3) into ModelConfigs. Where a field may
be absent, the default is the one that transformers has for the same family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ratoon.core.config import ExpertConfig, LatentConfig, ModelConfig, RopeScaling
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_decoder_config import decoder_config
from ratoon.models.hf_mixture_config import count_or_0, top_k_of
from ratoon.models.hf_rope import rope_fields

MODEL_TYPES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


def _parse_v2(fields: ConfigFields, architecture: str) -> ModelConfig:
    _expect(fields, "scoring_func", "softmax")
    # transformers leaves the field unread, and DeepSeek's own code then leaves out the scale
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.wrong(name, "is True", "false: the other form is not supported")
    methods = ("greedy", "group_limited_greedy")
    if (method := fields.text("topk_method", "greedy")) not in methods:
        raise fields.wrong("topk_method", f"is {show(method)}", " or ".join(methods))
    experts = _experts(fields, 64, None, 1407, 2, first_dense=0)
    if experts is not None and method == "group_limited_greedy":
        experts = _with_groups(fields, experts, None, None)
    return _latent_model(fields, architecture, experts, interleaved=True, max_position=2048, bos=1, eos=(2,))


def _parse_v3(fields: ConfigFields, architecture: str) -> ModelConfig:
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    experts = _experts(fields, 256, 8, 2048, 1, first_dense=3)
    if experts is not None:
        scale = fields.number("routed_scaling_factor", 2.5)
        renormalise = fields.flag("norm_topk_prob", True)
        experts = replace(experts, scoring="sigmoid", renormalise=renormalise, scale=scale)
        experts = _with_groups(fields, experts, 8, 4)
    interleaved = fields.flag("rope_interleave", True)
    return _latent_model(fields, architecture, experts, interleaved, max_position=4096, bos=0, eos=(1,))


def _latent_model(
    fields: ConfigFields,
    architecture: str,
    experts: ExpertConfig | None,
    interleaved: bool,
    max_position: int,
    bos: int,
    eos: tuple[int, ...],
) -> ModelConfig:
    rank_is_null = "q_lora_rank" in fields.raw and fields.raw["q_lora_rank"] is None
    sizes = LatentConfig(
        kv_rank=fields.count("kv_lora_rank", 512),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        nope_dim=fields.count("qk_nope_head_dim", 128),
        value_dim=fields.count("v_head_dim", 128),
        q_rank=None if rank_is_null else fields.count("q_lora_rank", 1536),
    )
    if sizes.rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", f"is {sizes.rope_dim}", "an even number")
    rope = rope_fields(fields)
    rope = ConfigFields({**rope.raw, "rotary_dim": sizes.rope_dim}, rope.source, rope.prefix)
    # What is kept of a token has the place of one key-value head. Files may have sizes of other things by these names.
    kept = {"head_dim": sizes.kv_rank + sizes.rope_dim, "num_key_value_heads": 1}
    has_bias = fields.flag("attention_bias", False)
    config = decoder_config(
        ConfigFields({**fields.raw, **kept}, fields.source, fields.prefix), architecture, max_position=max_position,
        bos=bos, eos=eos, rope=rope, attention_bias=has_bias, attention_output_bias=has_bias, experts=experts,
        latent=sizes, interleaved_rotary=interleaved,
    )  # fmt: skip
    scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5 * _scale_of_stretch(config.rope_scaling)
    return replace(config, attention_scale=scale)


def _scale_of_stretch(rope: RopeScaling) -> float:
    """Scores of a model whose positions are stretched are larger: by the square of what yarn has for all numbers."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _experts(
    fields: ConfigFields, count: int, top_k: int | None, inner: int, shared: int, first_dense: int
) -> ExpertConfig | None:
    """None: `n_routed_experts` is null, and all layers are dense."""
    if "n_routed_experts" in fields.raw and fields.raw["n_routed_experts"] is None:
        return None
    num_layers, step = fields.layers("num_hidden_layers"), fields.count("moe_layer_freq", 1)
    first = count_or_0(fields, "first_k_dense_replace", first_dense)
    inner = fields.count("moe_intermediate_size", inner)
    num_experts = fields.count("n_routed_experts", count)
    has_shared = fields.raw.get("n_shared_experts", shared) not in (None, 0)
    layers = tuple(layer >= first and layer % step == 0 for layer in range(num_layers))
    return ExpertConfig(
        num_experts, top_k_of(fields, top_k, num_experts), inner, layers=None if all(layers) else layers,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared_size=inner * fields.count("n_shared_experts", shared) if has_shared else 0,
    )  # fmt: skip


def _with_groups(
    fields: ConfigFields, experts: ExpertConfig, num_groups: int | None, top_groups: int | None
) -> ExpertConfig:
    """Raises ModelError for groups that experts can't be divided into, or chosen from."""
    groups, chosen = fields.count("n_group", num_groups), fields.count("topk_group", top_groups)
    each = fields.divisible("n_routed_experts", experts.num_experts, "n_group", groups)
    if chosen > groups:
        raise fields.wrong("topk_group", f"is {chosen}", f"at most n_group ({groups})")
    if experts.top_k > chosen * each:
        problem, most = f"is {experts.top_k}", f"at most {chosen * each}, as many as topk_group groups have"
        raise fields.wrong("num_experts_per_tok", problem, most)
    return replace(experts, num_groups=groups, top_groups=chosen)


def _expect(fields: ConfigFields, name: str, only: str) -> None:
    if (found := fields.text(name, only)) != only:
        raise fields.wrong(name, f"is {show(found)}", f"{only}: no other is supported in this family")


PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "DeepseekV2ForCausalLM": _parse_v2,
    "DeepseekV3ForCausalLM": _parse_v3,
}
