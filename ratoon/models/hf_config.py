"""Turns a Hugging Face config (the dict of a config.json) into a ModelConfig. Pure: reads no files, loads nothing.

The first decoder-only families are read here, others in hf_decoder_config.py, mixtures of experts in
hf_mixture_config.py, those with latent attention in hf_latent_config.py, those with an encoder and a decoder in
hf_encoder_config.py, encoders alone and heads that classify in hf_bert_config.py, and what some add to read images in
hf_media_config.py. Where a field may be absent, the default is the one that transformers has for the same family. A
field that is wrong is named in the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ratoon.core.config import ClassifierConfig, ModelConfig, PositionKind
from ratoon.core.errors import ModelError
from ratoon.models import (
    hf_bert_config,
    hf_decoder_config,
    hf_encoder_config,
    hf_latent_config,
    hf_media_config,
    hf_mistral_config,
    hf_mixture_config,
    hf_state_config,
    transformers_config,
)
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import reading, show
from ratoon.models.family import ModelFamily, find_family, known_architectures
from ratoon.models.hf_rope import rope_fields, rope_kind, rope_scaling, rope_theta, rotary_dim, sliding_layers

MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_heads": 2**14,
    "head_dim": 2**14,
    "max_position": 2**24,  # tables for all positions are made when the model is built
    "num_token_types": 2**16,
    "num_mel_bins": 2**12,
    "num_buckets": 2**16,
    "patch_size": 2**10,
    "image_size": 2**14,
    "num_channels": 2**8,
    "temporal_patch_size": 2**8,
    "merge_size": 2**8,
    "num_experts": 2**10,
    "inner_size": 2**22,
}
ROTARY = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM",
    *hf_decoder_config.PARSERS, *hf_mixture_config.PARSERS, *hf_media_config.TEXT_MODELS, "ModernBertModel",
    "ModernBertForSequenceClassification", *hf_latent_config.PARSERS, *hf_mistral_config.MODEL_TYPES.values(),
)  # fmt: skip
# Decoders that have another head, or none: the family with one whose layers they have.
WITHOUT_LM_HEAD = {
    f"{base}{suffix}": f"{base}ForCausalLM"
    for base in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for suffix in ("Model", hf_bert_config.CLASSIFIES)
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma3_text": "Gemma3ForCausalLM",
    **hf_decoder_config.MODEL_TYPES,
    **hf_mixture_config.MODEL_TYPES,
    **hf_latent_config.MODEL_TYPES,
    **hf_state_config.MODEL_TYPES,
    **hf_encoder_config.MODEL_TYPES,
    **hf_bert_config.MODEL_TYPES,
    **hf_media_config.MODEL_TYPES,
    **hf_mistral_config.MODEL_TYPES,
}


def parse_hf_config(raw: Mapping[str, Any], source: str, backend: str = "auto") -> ModelConfig:
    """`source` is for messages: the file or folder that the config came from. `backend`: the setting model_backend."""
    if backend == "transformers" or (backend == "auto" and runs_in_library(raw)):
        with reading(source, "a config.json as transformers writes it"):
            config = transformers_config.parse_library_config(raw, source)
        _check_sizes(config, source)
        return config
    architecture = _architecture(raw, source)
    fields = ConfigFields(raw, source)
    family = None if architecture in _PARSERS else find_family(architecture)
    with reading(source, "a config.json as transformers writes it"):
        config = _with_answer_tokens(_parse(fields, architecture, family), fields)
        config = replace(config, matryoshka=hf_bert_config.read_matryoshka(fields))
    _check_sizes(config, source)
    return config if family is None else replace(config, architecture=architecture)


def _parse(fields: ConfigFields, architecture: str, family: ModelFamily | None) -> ModelConfig:
    if family is None:
        return _PARSERS[architecture](fields, architecture)
    if not isinstance(family.config, str):
        return family.config(fields, architecture)
    if family.config not in _PARSERS:
        problem = f"its package reads it as one of {family.config!r}, which is not built in"
        raise ModelError(architecture, problem, f"one of {', '.join(sorted(_PARSERS))}")
    return _PARSERS[family.config](fields, family.config)


def _check_sizes(config: ModelConfig, source: str) -> None:
    """Implausible sizes would otherwise fail only when memory is allocated."""
    vision = None if config.media is None else config.media.vision
    for part in (config, config.encoder, config.relative_positions, config.experts, vision):
        for name, most in MOST.items():
            value = getattr(part, name, None)
            if value is not None and value > most:
                raise ModelError(source, f"its config has a {name} of {value}", f"expected at most {most}")
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        token = getattr(config, name)
        if token is not None and token >= config.vocab_size:
            problem = f"its config has {token} as {name}"
            raise ModelError(source, problem, f"expected a token of the vocabulary: 0 to {config.vocab_size - 1}")
    if config.rope_scaling.kind == "yarn" and config.rope_theta <= 1:
        raise ModelError(source, f"its config has a rope_theta of {config.rope_theta}", "yarn needs more than 1")
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if config.architecture in ROTARY and (rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim):
        problem = f"its config rotates {rotary_dim} of {config.head_dim} numbers of each head"
        raise ModelError(source, problem, "expected an even number, and no more than a head has")


def _name_of_architecture(raw: Mapping[str, Any]) -> Any:
    names = raw.get("architectures") or []
    model_type = raw.get("model_type")
    name = names[0] if isinstance(names, list) and names else MODEL_TYPES.get(str(model_type), model_type)
    return {**hf_encoder_config.ALIASES, **hf_bert_config.ALIASES}.get(str(name), name)


def _is_native(raw: Mapping[str, Any]) -> bool:
    name = _name_of_architecture(raw)
    return isinstance(name, str) and (name in _PARSERS or find_family(name) is not None)


def runs_in_library(raw: Mapping[str, Any]) -> bool:
    """Whether a model is not native, and among the decoders of the Transformers library that is installed."""
    return not _is_native(raw) and transformers_config.may_run(_name_of_architecture(raw))


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    name = _name_of_architecture(raw)
    if _is_native(raw):
        return str(name)
    known = known_architectures(list(_PARSERS))
    if name is None:
        raise ModelError(source, "config has neither architectures nor model_type", known)
    if isinstance(name, str) and name.endswith(transformers_config.DECODERS) and not transformers_config.is_installed():
        known += f"; other decoders of the Transformers library after {transformers_config.INSTALL}"
    raise ModelError(source, f"architecture {show(name)} is not supported", known)


def _parse_llama_like(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3 use the same names; they differ in biases, windows and a few defaults."""
    num_heads = fields.count("num_attention_heads")
    num_layers = fields.layers("num_hidden_layers")
    hidden_size = fields.count("hidden_size")
    max_position = fields.count("max_position_embeddings")
    head_dim = _head_dim(fields, architecture, hidden_size, num_heads)
    rope = rope_fields(fields)
    window, sliding_layers = _sliding_window(fields, architecture, num_layers)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    all_biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.text("hidden_act", "silu"),
        rope_theta=rope_theta(fields, rope),
        rope_scaling=rope_scaling(
            rope, max_position, fields.optional_count("original_max_position_embeddings"), head_dim // 2
        ),
        rotary_dim=rotary_dim(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=is_qwen2 or all_biased,
        attention_output_bias=all_biased,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        sliding_window=window,
        sliding_layers=sliding_layers,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _parse_ministral3(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields = hf_mistral_config.with_ministral3_defaults(fields)
    config = replace(_parse_llama_like(fields, "MistralForCausalLM"), architecture=architecture)
    return hf_mistral_config.with_query_scale(config, fields)


def _parse_mistral3(fields: ConfigFields, architecture: str) -> ModelConfig:
    """The text model of one that reads pictures, without what reads them."""
    text, text_model = hf_mistral_config.text_model(fields)
    return replace(_PARSERS[text_model](text, text_model), architecture=architecture)


def _parse_without_lm_head(fields: ConfigFields, architecture: str) -> ModelConfig:
    """A decoder that classifies, by the state of the last token, or whose states are all that it gives."""
    known = WITHOUT_LM_HEAD[architecture]
    config = replace(_PARSERS[known](fields, known), architecture=architecture, has_lm_head=False)
    if not architecture.endswith(hf_bert_config.CLASSIFIES):
        return config
    return replace(config, classifier=hf_bert_config.read_classifier(fields, "last"))


def _with_answer_tokens(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """The config of a decoder that scores pairs by the logits of two tokens, if `fields` name them."""
    tokens = hf_bert_config.read_answer_tokens(fields)
    if tokens is None:
        return config
    if not config.generates or config.encoder is not None:
        raise fields.wrong("classifier_from_token", "names tokens", "a decoder with a head over its vocabulary")
    template = hf_bert_config.read_template(fields)
    classifier = ClassifierConfig((tokens[1],), "last", "sigmoid", "sigmoid", tokens=tokens, template=template)
    return replace(config, classifier=classifier)


def _parse_with_media(fields: ConfigFields, architecture: str) -> ModelConfig:
    """A decoder that reads images: its text model, and what it adds to that."""
    text = hf_media_config.text_fields(fields, architecture)
    text_model = hf_media_config.TEXT_MODELS[architecture]
    config = _PARSERS[text_model](text, text_model)
    return hf_media_config.with_media(config, fields, architecture)


def _parse_gpt2(fields: ConfigFields, architecture: str) -> ModelConfig:
    for name, known in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)
    ):  # fmt: skip
        if fields.flag(name, known) is not known:
            raise fields.wrong(name, f"is {not known}", f"{known}: the other form is not supported")
    hidden_size, num_heads = fields.count("n_embd"), fields.count("n_head")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("n_inner", 4 * hidden_size),
        num_layers=fields.layers("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.divisible("n_embd", hidden_size, "n_head", num_heads),
        max_position=fields.count("n_positions", fields.optional_count("n_ctx")),
        position_kind=PositionKind.TABLE,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.text("activation_function", "gelu_new"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _parse_gemma3(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Files of Gemma 3 leave out what is as in transformers' config class."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.raw.get(name):
            raise fields.wrong(name, f"is {show(fields.raw[name])}", "none of it: the other form is not supported")
    num_heads, num_layers = fields.count("num_attention_heads", 8), fields.layers("num_hidden_layers", 26)
    head_dim, max_position = fields.count("head_dim", 256), fields.count("max_position_embeddings", 131072)
    num_kv_heads = fields.count("num_key_value_heads", 4)
    fields.divisible("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    has_bias = fields.flag("attention_bias", False)
    window, sliding = fields.count("sliding_window", 4096), _gemma3_sliding_layers(fields, num_layers)
    whole, local = _gemma3_rope(fields)
    if (kind := rope_kind(local)) != "default":
        raise local.wrong("rope_type", f"is {show(kind)}", "default: layers with a window have no rope scaling")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size", 262208),
        hidden_size=fields.count("hidden_size", 2304),
        intermediate_size=fields.count("intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        rope_theta=whole.number("rope_theta", fields.number("rope_theta", 1_000_000.0)),
        rope_scaling=rope_scaling(whole, max_position, None, head_dim // 2),
        local_rope_theta=local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0)),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        sliding_window=window if any(sliding) else None,
        sliding_layers=None if all(sliding) or not any(sliding) else sliding,
        scale_embedding=True,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id") if "bos_token_id" in fields.raw else 2,
        eos_token_ids=fields.token_ids("eos_token_id") if "eos_token_id" in fields.raw else (1,),
    )


def _gemma3_sliding_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    if fields.raw.get("layer_types") is not None:
        return sliding_layers(fields, num_layers)
    pattern = fields.count("sliding_window_pattern", fields.optional_count("_sliding_window_pattern") or 6)
    return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))


def _gemma3_rope(fields: ConfigFields) -> tuple[ConfigFields, ConfigFields]:
    """The rope parameters of layers that see everything, and of those with a window. Older files have only the scaling
    of the former, in `rope_scaling`."""
    rope = fields.below("rope_parameters")
    is_parted = "full_attention" in rope.raw or "sliding_attention" in rope.raw
    whole = rope.below("full_attention") if is_parted else rope
    scaling = fields.below("rope_scaling")
    if scaling.raw:
        whole = ConfigFields({**whole.raw, **scaling.raw}, fields.source, scaling.prefix)
    return whole, rope.below("sliding_attention") if is_parted else ConfigFields({}, fields.source)


_PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "LlamaForCausalLM": _parse_llama_like,
    "MistralForCausalLM": _parse_llama_like,
    "Qwen2ForCausalLM": _parse_llama_like,
    "Qwen3ForCausalLM": _parse_llama_like,
    "Ministral3ForCausalLM": _parse_ministral3,
    "Mistral3ForConditionalGeneration": _parse_mistral3,
    "GPT2LMHeadModel": _parse_gpt2,
    "Gemma3ForCausalLM": _parse_gemma3,
    **hf_decoder_config.PARSERS,
    **hf_mixture_config.PARSERS,
    **hf_latent_config.PARSERS,
    **hf_state_config.PARSERS,
    **hf_encoder_config.PARSERS,
    **hf_bert_config.PARSERS,
    **dict.fromkeys(WITHOUT_LM_HEAD, _parse_without_lm_head),
    **dict.fromkeys(hf_media_config.TEXT_MODELS, _parse_with_media),
}


def _head_dim(fields: ConfigFields, architecture: str, hidden_size: int, num_heads: int) -> int:
    explicit = fields.optional_count("head_dim")
    if explicit is not None:
        return explicit
    if architecture == "Qwen3ForCausalLM":
        return 128
    return fields.divisible("hidden_size", hidden_size, "num_attention_heads", num_heads)


def _num_kv_heads(fields: ConfigFields, architecture: str, num_heads: int) -> int:
    """null means as many as query heads; if absent, the family's default applies."""
    defaults = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
    left_out = "num_key_value_heads" not in fields.raw
    count = fields.count("num_key_value_heads", defaults.get(architecture, num_heads) if left_out else num_heads)
    fields.divisible("num_attention_heads", num_heads, "num_key_value_heads", count)
    return count


def _sliding_window(
    fields: ConfigFields, architecture: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...] | None]:  # fmt: skip
    """The window, and which layers have it, if not all."""
    if architecture == "LlamaForCausalLM":
        return None, None
    window = fields.optional_count("sliding_window") if "sliding_window" in fields.raw else 4096
    if architecture == "MistralForCausalLM":
        return window, None
    if window is None or not fields.flag("use_sliding_window", False):
        return None, None
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        first = 0 if fields.raw.get("max_window_layers", 28) == 0 else fields.count("max_window_layers", 28)
        sliding = tuple(layer >= first for layer in range(num_layers))
    else:
        sliding = sliding_layers(fields, num_layers)
    if not any(sliding):
        return None, None
    return window, (None if all(sliding) else sliding)
