"""Turns Hugging Face configs of models with an encoder and a decoder into a ModelConfig: BART and its relatives, T5,
Whisper, Moonshine.

Pure, like hf_config.py, which calls this. Their decoding fields (first token, suppressed tokens) are in config.json or
in generation_config.json; if the latter exists, only it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ratoon.core.config import EncoderConfig, ModelConfig, PositionKind, RelativePositions
from ratoon.models.config_fields import ConfigFields
from ratoon.models.generation_config import bad_words
from ratoon.models.hf_rope import rope_fields, rope_kind, rope_theta

MODEL_TYPES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
}
# Other class names for the same tensors.
ALIASES = {
    "BartModel": "BartForConditionalGeneration",
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
}
ACTIVATION_NAMES = {"swish": "silu"}  # older name → ours
LAYER_NORM_EPS = 1e-5  # where a family has no field for it
MOONSHINE_STATES = 1248  # of the 30 s of sound that are read at a time
T5_POSITIONS = 4096  # T5 has no limit; the least reach of its distance tables


def _parse_bart_like(fields: ConfigFields, architecture: str) -> ModelConfig:
    """BART, mBART, Marian, Pegasus, and M2M-100 with NLLB, whose positions begin behind that of padding."""
    is_m2m = architecture == "M2M100ForConditionalGeneration"
    start, padding = fields.token_id("decoder_start_token_id"), fields.token_id("pad_token_id")
    if start is None and is_m2m:
        start = 2
    elif start is None:
        starts_with_padding = architecture in ("MarianMTModel", "PegasusForConditionalGeneration")
        start = padding if starts_with_padding else fields.token_id("bos_token_id")
    max_position = fields.count("max_position_embeddings", 1024)
    config = _encoder_decoder(fields, architecture, max_position, max_position, "relu" if is_m2m else "gelu")
    if architecture == "MarianMTModel" and not fields.flag("share_encoder_decoder_embeddings", True):
        assert config.encoder is not None
        own = replace(config.encoder, vocab_size=config.vocab_size)
        config = replace(config, encoder=own, vocab_size=fields.count("decoder_vocab_size", config.vocab_size))
    return replace(
        config,
        scale_embedding=fields.flag("scale_embedding", is_m2m),
        decoder_start_token_id=start,
        num_unused_positions=1 + (1 if padding is None else padding) if is_m2m else 0,
    )


def _parse_whisper(fields: ConfigFields, architecture: str) -> ModelConfig:
    num_states = fields.count("max_source_positions", 1500)
    config = _encoder_decoder(fields, architecture, num_states, fields.count("max_target_positions", 448))
    assert config.encoder is not None
    encoder = replace(config.encoder, num_mel_bins=fields.count("num_mel_bins", 80))
    return replace(config, encoder=encoder, decoder_start_token_id=fields.token_id("decoder_start_token_id"))


def _parse_moonshine(fields: ConfigFields, architecture: str) -> ModelConfig:
    hidden_size, heads = fields.count("hidden_size", 288), fields.count("decoder_num_attention_heads", 8)
    intermediate_size, rope = fields.count("intermediate_size", 1152), rope_fields(fields)
    head_dim = fields.divisible("hidden_size", hidden_size, "decoder_num_attention_heads", heads)
    for name in ("encoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"):
        if fields.count(name, heads) != heads:  # transformers runs no others
            raise fields.wrong(name, f"is {fields.raw[name]}", f"decoder_num_attention_heads ({heads})")
    if rope_kind(rope) != "default":
        raise rope.wrong("rope_type", f"is {rope_kind(rope)}", "default")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.9))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size", 32768),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=fields.layers("decoder_num_hidden_layers", 6),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=fields.count("max_position_embeddings", 512),
        norm_eps=LAYER_NORM_EPS,
        activation=_activation(fields, "decoder_hidden_act", "silu"),
        rope_theta=rope_theta(fields, rope),
        rotary_dim=int(head_dim * share),
        interleaved_rotary=True,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=True,
        norm_bias=False,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id") or (2,),
        encoder=EncoderConfig(
            num_layers=fields.layers("encoder_num_hidden_layers", 6),
            num_heads=heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            max_position=MOONSHINE_STATES,
            num_mel_bins=1,
            reads_waveform=True,
            activation=_activation(fields, "encoder_hidden_act", "gelu"),
        ),
        decoder_start_token_id=1 if (start := fields.token_id("decoder_start_token_id")) is None else start,
    )
    if config.rotary_dim is None or not 2 <= config.rotary_dim <= head_dim or config.rotary_dim % 2:
        expected = "a share of each head that is an even number"
        raise rope.wrong("partial_rotary_factor", f"is {share:g} of heads of {head_dim}", expected)
    return _with_decoding_fields(config, fields)


def _encoder_decoder(
    fields: ConfigFields, architecture: str, encoder_positions: int, decoder_positions: int, activation: str = "gelu"
) -> ModelConfig:
    """Fields that BART's relatives and Whisper share."""
    hidden_size = fields.count("d_model")
    decoder_heads, encoder_heads = fields.count("decoder_attention_heads"), fields.count("encoder_attention_heads")
    encoder = EncoderConfig(
        num_layers=fields.layers("encoder_layers"),
        num_heads=encoder_heads,
        head_dim=fields.divisible("d_model", hidden_size, "encoder_attention_heads", encoder_heads),
        intermediate_size=fields.count("encoder_ffn_dim"),
        max_position=encoder_positions,
    )
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("decoder_ffn_dim"),
        num_layers=fields.layers("decoder_layers"),
        num_heads=decoder_heads,
        num_kv_heads=decoder_heads,
        head_dim=fields.divisible("d_model", hidden_size, "decoder_attention_heads", decoder_heads),
        max_position=decoder_positions,
        position_kind=PositionKind.TABLE,
        norm_eps=LAYER_NORM_EPS,
        activation=_activation(fields, "activation_function", activation),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        checkpoint_dtype=fields.dtype(),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        encoder=encoder,
    )
    return _with_decoding_fields(config, fields)


def _parse_t5(fields: ConfigFields, architecture: str) -> ModelConfig:
    heads, head_dim = fields.count("num_heads"), fields.count("d_kv")
    intermediate_size, num_layers = fields.count("d_ff"), fields.layers("num_layers")
    positions = max(fields.count("n_positions", T5_POSITIONS), T5_POSITIONS)
    is_mt5 = architecture == "MT5ForConditionalGeneration"
    feed_forward = fields.text("feed_forward_proj", "gated-gelu" if is_mt5 else "relu")
    activation = feed_forward.removeprefix("gated-")
    start = fields.token_id("decoder_start_token_id")
    relative = RelativePositions(
        num_buckets=fields.count("relative_attention_num_buckets", 32),
        max_distance=fields.count("relative_attention_max_distance", 128),
    )
    # Of each direction's buckets one half is for single distances, the other for all up to the largest.
    if relative.num_buckets < 4 or relative.max_distance <= relative.num_buckets // 2:
        problem = f"is {relative.num_buckets}, with a relative_attention_max_distance of {relative.max_distance}"
        raise fields.wrong("relative_attention_num_buckets", problem, "at least 4, and fewer than twice the distance")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("d_model"),
        intermediate_size=intermediate_size,
        num_layers=fields.layers("num_decoder_layers", num_layers),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=positions,
        position_kind=PositionKind.RELATIVE,
        norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        # T5's gated-gelu is always the tanh form.
        activation="gelu_new" if feed_forward == "gated-gelu" else ACTIVATION_NAMES.get(activation, activation),
        gated_mlp=feed_forward.startswith("gated-"),
        # In T5's configs this field means that states are scaled before the head, as only a tied head needs. mT5's are
        # not, whether the head is tied (there is none in the file then) or not.
        tie_word_embeddings=not is_mt5
        and fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True)),
        checkpoint_dtype=fields.dtype(),
        eos_token_ids=fields.token_ids("eos_token_id"),
        encoder=EncoderConfig(num_layers, heads, head_dim, intermediate_size, positions),
        relative_positions=relative,
        decoder_start_token_id=fields.token_id("pad_token_id") if start is None else start,
    )
    return _with_decoding_fields(config, fields)


PARSERS: dict[str, Callable[[ConfigFields, str], ModelConfig]] = {
    "BartForConditionalGeneration": _parse_bart_like,
    "MBartForConditionalGeneration": _parse_bart_like,
    "MarianMTModel": _parse_bart_like,
    "M2M100ForConditionalGeneration": _parse_bart_like,
    "PegasusForConditionalGeneration": _parse_bart_like,
    "T5ForConditionalGeneration": _parse_t5,
    "MT5ForConditionalGeneration": _parse_t5,
    "WhisperForConditionalGeneration": _parse_whisper,
    "MoonshineForConditionalGeneration": _parse_moonshine,
}


def _activation(fields: ConfigFields, name: str, default: str) -> str:
    written = fields.text(name, default)
    return ACTIVATION_NAMES.get(written, written)


def with_generation_config(config: ModelConfig, raw: Mapping[str, Any], source: str, alone: bool) -> ModelConfig:
    """A model's config, with the decoding fields of its generation config. `alone`: they come from
    generation_config.json, not from the keys of config.json, which an encoder-decoder model's config already has."""
    fields = ConfigFields(raw, source)
    if config.encoder is None:
        return _with_suppressed_tokens(config, fields)
    if not alone:
        return config
    start = fields.token_id("decoder_start_token_id")
    if start is not None:
        config = replace(config, decoder_start_token_id=start)
    return _with_decoding_fields(config, fields)


def _with_decoding_fields(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Adds the fields about decoding, which have the same names in config.json and generation_config.json."""
    return replace(_with_suppressed_tokens(config, fields), forced_bos_token_id=fields.token_id("forced_bos_token_id"))


def _with_suppressed_tokens(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    suppressed = dict.fromkeys((*fields.token_ids("suppress_tokens"), *_bad_words(fields, config.eos_token_ids)))
    return replace(
        config,
        suppressed_token_ids=_known(suppressed, config.vocab_size),
        suppressed_first_token_ids=_known(fields.token_ids("begin_suppress_tokens"), config.vocab_size),
    )


def _bad_words(fields: ConfigFields, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Returns the bad words of one token: Marian's way to suppress padding. Longer ones are rules over texts."""
    single = [word[0] for word in bad_words(fields) if len(word) == 1]
    return [token for token in single if token not in eos_token_ids]


def _known(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Lists may name tokens outside the vocabulary, which are ignored."""
    return tuple(token for token in token_ids if token < vocab_size)
