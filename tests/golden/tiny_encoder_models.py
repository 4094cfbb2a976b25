"""Small random models with an encoder, as tiny_models.py has those without: BART, mBART, Marian, T5, Whisper, BERT.

The two sides differ in layers, heads and sizes wherever a family allows it, so that neither can be taken for the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers

from ratoon.core.config import EncoderConfig, ModelConfig, PositionKind, RelativePositions
from tests.golden.tiny_models import MAX_POSITION, VOCAB_SIZE, TinyModel, make_tiny

NUM_MEL_BINS = 16
NUM_AUDIO_STATES = 30  # of Whisper's encoder: half as many as it gets frames

BART_SIZES = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 112, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip


def tiny_bart(scale_embedding: bool = False, activation: str = "gelu", seed: int = 0) -> TinyModel:
    config = _config("BartForConditionalGeneration", scale_embedding, activation)
    oracle_config = transformers.BartConfig(**_bart_arguments(config), forced_eos_token_id=None)
    return make_tiny(transformers.BartForConditionalGeneration, oracle_config, config, seed)


def tiny_mbart(seed: int = 0) -> TinyModel:
    config = _config("MBartForConditionalGeneration", scale_embedding=True)
    oracle_config = transformers.MBartConfig(**_bart_arguments(config), forced_eos_token_id=None)
    return make_tiny(transformers.MBartForConditionalGeneration, oracle_config, config, seed)


def tiny_marian(seed: int = 0) -> TinyModel:
    config = _config("MarianMTModel", scale_embedding=True, activation="silu")
    arguments = _bart_arguments(config) | {"activation_function": "swish", "forced_eos_token_id": None}
    return make_tiny(transformers.MarianMTModel, transformers.MarianConfig(**arguments), config, seed)


def tiny_marian_of_two_vocabularies(seed: int = 0) -> TinyModel:
    """The encoder's is the larger one; the head is the decoder's own."""
    config = replace(_config("MarianMTModel", scale_embedding=True), tie_word_embeddings=False)
    assert config.encoder is not None
    config = replace(config, encoder=replace(config.encoder, vocab_size=VOCAB_SIZE + 20))
    arguments = _bart_arguments(config) | {
        "share_encoder_decoder_embeddings": False, "vocab_size": VOCAB_SIZE + 20, "decoder_vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False, "forced_eos_token_id": None,
    }  # fmt: skip
    return make_tiny(transformers.MarianMTModel, transformers.MarianConfig(**arguments), config, seed)


def tiny_m2m100(seed: int = 0) -> TinyModel:
    """Padding is a token that no text has: transformers gives it no position. Positions begin behind its number."""
    config = replace(_config("M2M100ForConditionalGeneration", True, "relu"), vocab_size=VOCAB_SIZE + 1)
    config = replace(config, num_unused_positions=VOCAB_SIZE + 1)
    arguments = _bart_arguments(config) | {"pad_token_id": VOCAB_SIZE, "vocab_size": VOCAB_SIZE + 1}
    return make_tiny(transformers.M2M100ForConditionalGeneration, transformers.M2M100Config(**arguments), config, seed)


def tiny_pegasus(seed: int = 0) -> TinyModel:
    config = _config("PegasusForConditionalGeneration", scale_embedding=True, activation="relu")
    oracle_config = transformers.PegasusConfig(**_bart_arguments(config), forced_eos_token_id=None)
    return make_tiny(transformers.PegasusForConditionalGeneration, oracle_config, config, seed)


def tiny_whisper(seed: int = 0) -> TinyModel:
    config = _config("WhisperForConditionalGeneration")
    assert config.encoder is not None
    encoder = replace(config.encoder, max_position=NUM_AUDIO_STATES, num_mel_bins=NUM_MEL_BINS)
    oracle_config = transformers.WhisperConfig(
        **BART_SIZES,
        num_mel_bins=NUM_MEL_BINS,
        max_source_positions=NUM_AUDIO_STATES,
        max_target_positions=MAX_POSITION,
        begin_suppress_tokens=None,
    )
    return make_tiny(
        transformers.WhisperForConditionalGeneration, oracle_config, replace(config, encoder=encoder), seed
    )


def tiny_t5(feed_forward: str = "relu", own_head: bool = False, seed: int = 0, family: str = "T5") -> TinyModel:
    """The first T5; with `feed_forward` "gated-gelu" and an own head the later one, and Flan-T5."""
    heads, head_dim, hidden_size, intermediate_size = 4, 32, 64, 112
    positions, relative = 4096, RelativePositions(num_buckets=8, max_distance=20)
    config = ModelConfig(
        architecture=f"{family}ForConditionalGeneration",
        position_kind=PositionKind.RELATIVE,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=3,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=positions,
        activation={"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}[feed_forward],
        gated_mlp=feed_forward != "relu",
        tie_word_embeddings=family == "T5" and not own_head,
        eos_token_ids=(2,),
        encoder=EncoderConfig(2, heads, head_dim, intermediate_size, positions),
        relative_positions=relative,
        decoder_start_token_id=3,
    )
    oracle_config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB_SIZE,
        d_model=hidden_size,
        d_kv=head_dim,
        d_ff=intermediate_size,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=heads,
        relative_attention_num_buckets=relative.num_buckets,
        relative_attention_max_distance=relative.max_distance,
        feed_forward_proj=feed_forward,
        tie_word_embeddings=not own_head,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    oracle_class = getattr(transformers, config.architecture)
    tiny = make_tiny(oracle_class, oracle_config, config, seed, gain=1.0)
    with torch.no_grad():
        for stack in (tiny.oracle.encoder, tiny.oracle.decoder):  # small as they are, they would hardly be seen
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(8)
        if own_head:
            tiny.oracle.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, hidden_size) * 0.1)
            tiny.source.tensors["lm_head.weight"] = tiny.oracle.lm_head.weight.data
    return tiny


def tiny_bert(seed: int = 0) -> TinyModel:
    config = ModelConfig(
        architecture="BertModel",
        position_kind=PositionKind.TABLE,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position=MAX_POSITION,
        norm_eps=1e-12,
        activation="gelu",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        causal=False,
        num_token_types=2,
    )
    oracle_config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position,
    )
    return make_tiny(transformers.BertModel, oracle_config, config, seed)


def random_features(seed: int = 0) -> torch.Tensor:
    """What tiny Whisper's encoder reads of one stretch of audio: [mel bins, frames]."""
    return torch.randn(NUM_MEL_BINS, 2 * NUM_AUDIO_STATES, generator=torch.Generator().manual_seed(seed))


def _config(architecture: str, scale_embedding: bool = False, activation: str = "gelu") -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        position_kind=PositionKind.TABLE,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position=MAX_POSITION,
        norm_eps=1e-5,
        activation=activation,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        encoder=EncoderConfig(num_layers=2, num_heads=2, head_dim=32, intermediate_size=96, max_position=MAX_POSITION),
        scale_embedding=scale_embedding,
        decoder_start_token_id=3,
    )


def _bart_arguments(config: ModelConfig) -> dict[str, Any]:
    return BART_SIZES | {
        "max_position_embeddings": config.max_position,
        "scale_embedding": config.scale_embedding,
        "activation_function": config.activation,
    }
