"""Configs of models with an encoder that are wrong or unusual, and what two files together say about decoding.

tests/golden/test_encoder_models.py compares the usual ones with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.unit.models.model_files import write_folder, write_json

BART: dict[str, Any] = {
    "architectures": ["BartForConditionalGeneration"], "vocab_size": 60, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 64,
    "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BERT: dict[str, Any] = {
    "architectures": ["BertModel"], "vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 64,
}  # fmt: skip


def parse(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_hf_config({**config, **changes}, "somewhere")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BART, {"encoder_layers": None}, r"somewhere: config field encoder_layers is missing"),
        (BART, {"encoder_attention_heads": 3}, r"d_model is 32; expected a multiple of encoder_attention_heads \(3\)"),
        (BART, {"decoder_start_token_id": "</s>"}, r"config field decoder_start_token_id is '</s>'"),
        (BART, {"suppress_tokens": [1, "2"]}, r"config field suppress_tokens is \[1, '2'\]; expected a token id or"),
        (
            BART,
            {"architectures": ["MarianMTModel"], "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 0},
            r"decoder_vocab_size is 0; expected a whole number above 0",
        ),
        (T5, {"d_kv": 0}, r"config field d_kv is 0"),
        (BERT, {"is_decoder": True}, r"config field is_decoder is True; expected False"),
        (BERT, {"position_embedding_type": "relative_key"}, r"position_embedding_type is 'relative_key'; expected abs"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse(config, **changes)


def test_the_start_token_is_the_one_written_or_that_of_the_family() -> None:
    assert parse(BART, decoder_start_token_id=2).decoder_start_token_id == 2
    assert parse(BART, architectures=["MBartForConditionalGeneration"]).decoder_start_token_id == 0
    assert parse(BART, architectures=["MarianMTModel"]).decoder_start_token_id == 1
    assert parse(T5).decoder_start_token_id == 0
    assert parse(T5, decoder_start_token_id=5).decoder_start_token_id == 5


@pytest.mark.parametrize(
    ("written", "activation", "gated"),
    [(None, "relu", False), ("gelu", "gelu", False), ("gated-gelu", "gelu_new", True), ("gated-silu", "silu", True)],
)
def test_t5_names_activation_and_gate_in_one_field(written: str | None, activation: str, gated: bool) -> None:
    config = parse(T5, feed_forward_proj=written)
    assert (config.activation, config.gated_mlp) == (activation, gated)


def test_t5_scales_before_its_head_unless_either_field_says_no() -> None:
    assert parse(T5).tie_word_embeddings
    assert not parse(T5, tie_word_embeddings=False).tie_word_embeddings
    assert not parse(T5, tie_word_embeddings=True, scale_decoder_outputs=False).tie_word_embeddings


def test_t5_reaches_further_than_it_was_trained_for() -> None:
    assert (parse(T5, n_positions=512).max_position, parse(T5, n_positions=9000).max_position) == (4096, 9000)


@pytest.mark.parametrize(
    ("config", "other", "architecture"),
    [(BART, "BartModel", "BartForConditionalGeneration"), (BERT, "BertForMaskedLM", "BertModel")],
)
def test_files_saved_from_another_class_of_the_family_are_known(
    config: dict[str, Any], other: str, architecture: str
) -> None:
    assert parse(config, architectures=[other]).architecture == architecture
    model_type = {"BartModel": "bart", "BertForMaskedLM": "bert"}[other]
    assert parse(config, architectures=None, model_type=model_type).architecture == architecture


def write_bart(folder: Path, generation: dict[str, Any] | None, **changes: Any) -> ModelConfig:
    write_folder(folder, {**BART, **changes})
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return resolve_model(str(folder)).config


DECODING = {"forced_bos_token_id": 7, "suppress_tokens": [4, 5], "begin_suppress_tokens": [6], "bad_words_ids": [[1]]}


def test_what_is_never_generated_stands_in_the_config(tmp_path: Path) -> None:
    config = write_bart(tmp_path, None, **DECODING, decoder_start_token_id=2)
    assert (config.decoder_start_token_id, config.forced_bos_token_id) == (2, 7)
    assert (config.suppressed_token_ids, config.suppressed_first_token_ids) == ((4, 5, 1), (6,))


def test_a_generation_config_counts_alone_but_for_the_start_token(tmp_path: Path) -> None:
    config = write_bart(tmp_path, {"suppress_tokens": [9]}, **DECODING, decoder_start_token_id=2)
    assert (config.decoder_start_token_id, config.forced_bos_token_id) == (2, None)
    assert (config.suppressed_token_ids, config.suppressed_first_token_ids) == ((9,), ())
    config = write_bart(tmp_path / "other", {"decoder_start_token_id": 3, **DECODING}, decoder_start_token_id=2)
    assert (config.decoder_start_token_id, config.forced_bos_token_id) == (3, 7)


def test_tokens_that_the_model_has_not_and_words_of_several_are_not_suppressed(tmp_path: Path) -> None:
    generation = {"suppress_tokens": [59, 60], "bad_words_ids": [[8, 9], [2], [10]]}
    assert write_bart(tmp_path, generation).suppressed_token_ids == (59, 10)  # 2 ends a text, and has to come


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "first"), ("max_tokens", None)])
def test_a_folder_of_sentence_transformers_says_how_to_pool(mode: str, pooling: str | None, tmp_path: Path) -> None:
    write_folder(tmp_path, BERT)
    assert resolve_model(str(tmp_path)).pooling is None
    (tmp_path / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    write_json(tmp_path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **flags})
    assert resolve_model(str(tmp_path)).pooling == pooling
