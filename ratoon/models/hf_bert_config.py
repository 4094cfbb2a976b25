"""Turns Hugging Face configs of encoders alone (BERT, RoBERTa, DistilBERT, ModernBERT) into a ModelConfig, and reads
what configs say about heads that classify, of encoders and of decoders. Pure, like hf_config.py, which calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ratoon.core.config import ClassifierConfig, ModelConfig, PositionKind
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import show
from ratoon.models.hf_rope import rope_kind, rope_scaling, sliding_layers

MODEL_TYPES = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "distilbert": "DistilBertModel",
    "modernbert": "ModernBertModel",
}
# Other class names for the same layers: their heads are left out.
ALIASES = {
    "BertForMaskedLM": "BertModel",
    "BertForPreTraining": "BertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
    "DistilBertForMaskedLM": "DistilBertModel",
    "ModernBertForMaskedLM": "ModernBertModel",
}
CLASSIFIES = "ForSequenceClassification"
ACTIVATION_NAMES = {"swish": "silu"}  # older name → ours
MAX_LABELS = 2**16
MAX_TEMPLATE = 2**16  # characters
# The functions of torch.nn by which sentence-transformers makes scores of logits
SCORE_ACTIVATIONS = {"identity": "none", "sigmoid": "sigmoid", "softmax": "softmax"}


def _parse_bert(fields: ConfigFields, architecture: str) -> ModelConfig:
    """BERT, and RoBERTa, whose positions begin behind that of padding."""
    if fields.flag("is_decoder", False):
        raise fields.wrong("is_decoder", "is True", "False: such a model is an encoder here")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.wrong("position_embedding_type", f"is {show(kind)}", "absolute")
    hidden_size, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    is_bert = architecture.startswith("Bert")
    max_position, num_unused = fields.count("max_position_embeddings", 512), 0
    if not is_bert:
        num_unused = 1 + (1 if (padding := fields.token_id("pad_token_id")) is None else padding)
        if num_unused >= max_position:
            problem = f"is {num_unused - 1}, and max_position_embeddings is {max_position}"
            raise fields.wrong("pad_token_id", problem, "less than the positions, which begin behind it")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.divisible("hidden_size", hidden_size, "num_attention_heads", heads),
        max_position=max_position - num_unused,
        num_unused_positions=num_unused,
        position_kind=PositionKind.TABLE,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=_activation(fields, "hidden_act"),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        checkpoint_dtype=fields.dtype(),
        causal=False,
        num_token_types=fields.count("type_vocab_size", 2),
    )
    return _with_head(config, fields, "first")


def _parse_distilbert(fields: ConfigFields, architecture: str) -> ModelConfig:
    hidden_size, heads = fields.count("dim", 768), fields.count("n_heads", 12)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("hidden_dim", 4 * 768),
        num_layers=fields.layers("n_layers", 6),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.divisible("dim", hidden_size, "n_heads", heads),
        max_position=fields.count("max_position_embeddings", 512),
        position_kind=PositionKind.TABLE,
        norm_eps=1e-12,
        activation=_activation(fields, "activation"),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        checkpoint_dtype=fields.dtype(),
        causal=False,
    )
    return _with_head(config, fields, "first", dense_activation="relu")


def _parse_modernbert(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Files leave out what is as in transformers' config class."""
    hidden_size, heads = fields.count("hidden_size", 768), fields.count("num_attention_heads", 12)
    num_layers, max_position = fields.layers("num_hidden_layers", 22), fields.count("max_position_embeddings", 8192)
    head_dim = fields.divisible("hidden_size", hidden_size, "num_attention_heads", heads)
    rope = fields.below("rope_parameters")
    whole, local = rope.below("full_attention"), rope.below("sliding_attention")
    if (kind := rope_kind(local)) != "default":
        raise local.wrong("rope_type", f"is {show(kind)}", "default: layers with a window have no rope scaling")
    sliding = _modernbert_windows(fields, num_layers)
    has_bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size", 50368),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 1152),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("norm_eps", 1e-5),
        norm_bias=fields.flag("norm_bias", False),
        activation=_activation(fields, "hidden_activation"),
        rope_theta=whole.number("rope_theta", fields.number("global_rope_theta", 160_000.0)),
        rope_scaling=rope_scaling(whole, max_position, None, head_dim // 2),
        local_rope_theta=local.number("rope_theta", fields.number("local_rope_theta", 10_000.0)),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_window=fields.count("local_attention", 128) // 2 + 1 if any(sliding) else None,
        sliding_layers=None if all(sliding) or not any(sliding) else sliding,
        checkpoint_dtype=fields.dtype(),
        causal=False,
    )
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise fields.wrong("classifier_pooling", f"is {show(pooling)}", "cls or mean")
    return _with_head(
        config,
        fields,
        "mean" if pooling == "mean" else "first",
        dense_activation=_activation(fields, "classifier_activation"),
        dense_bias=fields.flag("classifier_bias", False),
    )


def _modernbert_windows(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    if fields.raw.get("layer_types") is not None:
        return sliding_layers(fields, num_layers)
    every = fields.count("global_attn_every_n_layers", 3)
    return tuple(layer % every != 0 for layer in range(num_layers))


def _activation(fields: ConfigFields, name: str) -> str:
    written = fields.text(name, "gelu")
    return ACTIVATION_NAMES.get(written, written)


def _with_head(config: ModelConfig, fields: ConfigFields, pooling: str, **details: Any) -> ModelConfig:
    if not config.architecture.endswith(CLASSIFIES):
        return config
    return replace(config, classifier=replace(read_classifier(fields, pooling), **details))


# ---- heads ----


def read_classifier(fields: ConfigFields, pooling: str) -> ClassifierConfig:
    """What a config says about the labels of a head, and about scores."""
    labels = _labels(fields)
    problem = fields.text("problem_type", "")
    if problem == "regression":
        activation = "none"
    else:
        activation = "sigmoid" if problem == "multi_label_classification" or len(labels) == 1 else "softmax"
    found = _score_activation(fields) or ("sigmoid" if len(labels) == 1 else "none")
    return ClassifierConfig(labels, pooling, activation, found, template=read_template(fields))


def read_template(fields: ConfigFields) -> str | None:
    """The text that is made of a pair, where a config or an override has one."""
    template = fields.raw.get("score_template")
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
        raise fields.wrong("score_template", f"is {show(template)}", f"a text of at most {MAX_TEMPLATE} characters")
    if "{query}" not in template or "{document}" not in template:
        raise fields.wrong("score_template", f"is {show(template)}", "a text with {query} and {document} in it")
    return template


def read_answer_tokens(fields: ConfigFields) -> tuple[str, str] | None:
    """The two tokens whose logits are compared, in a config or an override: what counts against a document, and what
    counts for it."""
    tokens = fields.raw.get("classifier_from_token")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(one, str) and one for one in tokens):
        raise fields.wrong("classifier_from_token", f"is {show(tokens)}", 'two tokens, such as ["no", "yes"]')
    return tokens[0], tokens[1]


def read_matryoshka(fields: ConfigFields) -> tuple[int, ...] | None:
    """The lengths to which vectors may be cut; empty: any; None: the config does not say that they may."""
    lengths = fields.raw.get("matryoshka_dimensions")
    if lengths is None:
        return () if fields.flag("is_matryoshka", False) else None
    if not isinstance(lengths, list) or not lengths:
        raise fields.wrong("matryoshka_dimensions", f"is {show(lengths)}", "a list of whole numbers above 0")
    if wrong := [one for one in lengths if isinstance(one, bool) or not isinstance(one, int) or one < 1]:
        raise fields.wrong("matryoshka_dimensions", f"holds {show(wrong[0])}", "whole numbers above 0")
    return tuple(sorted(lengths))


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    names = fields.raw.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(fields.count("num_labels", 2, MAX_LABELS)))
    if not isinstance(names, Mapping) or not names or len(names) > MAX_LABELS:
        raise fields.wrong("id2label", f"is {show(names)}", f"an object of 1 to {MAX_LABELS} labels by index")
    labels = tuple(names.get(str(index), names.get(index)) for index in range(len(names)))
    if not all(isinstance(label, str) for label in labels):
        raise fields.wrong("id2label", f"is {show(names)}", f"a text for each index from 0 to {len(names) - 1}")
    return labels


def _score_activation(fields: ConfigFields) -> str | None:
    """The function by which sentence-transformers makes a score of a logit, if the config names one."""
    own = fields.below("sentence_transformers")
    name = own.text("activation_fn", fields.text("sbert_ce_default_activation_function", ""))
    if not name:
        return None
    found = SCORE_ACTIVATIONS.get(name.rpartition(".")[2].lower())
    if found is None:
        raise fields.wrong("activation_fn", f"is {show(name)}", f"one of {', '.join(SCORE_ACTIVATIONS)} of torch.nn")
    return found


_BASES: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "Bert": _parse_bert,
    "Roberta": _parse_bert,
    "XLMRoberta": _parse_bert,
    "DistilBert": _parse_distilbert,
    "ModernBert": _parse_modernbert,
}
PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    **{f"{base}Model": parse for base, parse in _BASES.items()},
    **{f"{base}{CLASSIFIES}": parse for base, parse in _BASES.items()},
}
