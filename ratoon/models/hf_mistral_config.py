"""Reads what configs of later Mistral models have beyond Llama's: the text model within Mistral 3 (Mistral Small 3.1
and 3.2), and the scale of queries of Ministral 3.

Pure, like hf_config.py, which reads the fields of the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_media_config import OF_EITHER, OF_THE_WHOLE, ROPE_FIELDS
from ratoon.models.hf_rope import rope_fields

MODEL_TYPES = {"mistral3": "Mistral3ForConditionalGeneration", "ministral3": "Ministral3ForCausalLM"}
# The text models that Mistral3ForConditionalGeneration may have, by their model_type
TEXT_MODELS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
# What transformers takes for fields that a config of Ministral 3 leaves out
MINISTRAL3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
QUERY_BETA = "llama_4_scaling_beta"


def with_ministral3_defaults(fields: ConfigFields) -> ConfigFields:
    raw = {**MINISTRAL3_DEFAULTS, **fields.raw}
    if all(raw.get(name) is None for name in ROPE_FIELDS):
        raw["rope_parameters"] = MINISTRAL3_ROPE
    return ConfigFields(raw, fields.source, fields.prefix)


def with_query_scale(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """The config with the number by which queries grow behind the original length, if there is one."""
    rope = rope_fields(fields)
    if not rope.raw.get(QUERY_BETA):
        return config
    beta, original = rope.number(QUERY_BETA), rope.count("original_max_position_embeddings")
    scaling = replace(config.rope_scaling, query_beta=beta, original_max_position=original)
    return replace(config, rope_scaling=scaling)


def text_model(fields: ConfigFields) -> tuple[ConfigFields, str]:
    """The fields of the text model, and its architecture. A rope scaling beside `text_config`, where `hf_overrides`
    puts it, takes the place of the one within, and keeps its base."""
    text, whole = fields.below("text_config"), fields.raw
    kind = text.text("model_type", "mistral")
    if kind not in TEXT_MODELS:
        raise text.wrong("model_type", f"is {show(kind)}", f"one of {', '.join(TEXT_MODELS)}")
    raw = {**text.raw}
    if any(whole.get(name) for name in ROPE_FIELDS):
        inner = [raw.pop(name, None) for name in ROPE_FIELDS]
        theta = next((one["rope_theta"] for one in inner if isinstance(one, Mapping) and "rope_theta" in one), None)
        raw |= {} if theta is None else {"rope_theta": theta}
    raw |= {name: whole[name] for name in OF_THE_WHOLE if whole.get(name) is not None}
    raw |= {name: whole[name] for name in OF_EITHER if raw.get(name) is None and whole.get(name) is not None}
    # transformers ties by the flag of the whole, and files may have it within. A head in the file takes precedence.
    raw["tie_word_embeddings"] = fields.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    return ConfigFields(raw, fields.source, text.prefix), TEXT_MODELS[kind]
