"""What a generation config presets, by its keys, and which of them are named because nothing is done about them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ratoon.core.config import EncoderConfig, ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.generation_config import generation_fields, read_generation_defaults

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1,
    "head_dim": 8, "max_position": 64,
}  # fmt: skip
LLAMA = ModelConfig("LlamaForCausalLM", **SIZES)
BART = ModelConfig("BartForConditionalGeneration", **SIZES, encoder=EncoderConfig(1, 1, 8, 8, 64))
WHISPER = ModelConfig("WhisperForConditionalGeneration", **SIZES, encoder=EncoderConfig(1, 1, 8, 8, 64, num_mel_bins=4))


def read(config: ModelConfig = LLAMA, **raw: Any) -> dict[str, Any]:
    return read_generation_defaults(raw, config, "file")


def refused(config: ModelConfig = LLAMA, **raw: Any) -> list[str]:
    """The keys that an error names."""
    try:
        read(config, **raw)
    except ModelError as error:
        told, _, _ = str(error).partition(", which changes answers in transformers and is not supported here")
        return re.findall(r"(\w+) \(", told)
    return []


def test_keys_that_are_obeyed_are_defaults_under_their_names():
    raw = {
        "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "min_length": 56,
        "max_length": 142, "min_new_tokens": 2, "encoder_no_repeat_ngram_size": 4,
    }  # fmt: skip
    assert read(**raw) == raw
    assert read(forced_eos_token_id=2, bad_words_ids=[[3], [4, 5], [4, 99]]) == {
        "forced_eos_token_id": [2],
        "bad_words_ids": [[4, 5]],  # of one token: a suppressed token; 99 is none of this vocabulary
    }
    assert read(no_repeat_ngram_size=0, early_stopping=None) == {}


def test_what_do_sample_says_is_what_a_request_without_params_does():
    assert read(do_sample=False, temperature=0.6) == {"temperature": 0.0}
    assert read(do_sample=True, temperature=0.6) == {"temperature": 0.6}
    assert read(temperature=0.6) == {"temperature": 0.6}
    assert read(BART) == {"temperature": 0.0}
    assert read(BART, do_sample=True) == {}


def test_without_a_file_of_its_own_the_config_counts_with_the_defaults_of_its_family():
    config = {"num_beams": 4, "max_position_embeddings": 64, "do_sample": None}
    assert generation_fields({}, config, LLAMA) == {"num_beams": 4}
    assert generation_fields({}, config, BART) == {"num_beams": 4, "forced_eos_token_id": 2}
    assert generation_fields({}, {"forced_eos_token_id": None}, BART) == {}
    assert generation_fields({"num_beams": 2}, config, BART) == {"num_beams": 2}


def test_keys_that_are_not_obeyed_are_refused_if_they_have_an_effect_in_transformers():
    assert refused(penalty_alpha=0.6, num_beam_groups=2, diversity_penalty=0.5, sequence_bias=[[[1], -1.0]]) == [
        "penalty_alpha", "num_beam_groups", "diversity_penalty", "sequence_bias",
    ]  # fmt: skip
    assert refused(exponential_decay_length_penalty=[5, 1.1], guidance_scale=2) == [
        "exponential_decay_length_penalty", "guidance_scale",
    ]  # fmt: skip
    neutral = {"penalty_alpha": 0, "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": 1}
    assert refused(**neutral, epsilon_cutoff=0.0, num_return_sequences=1, token_healing=False, constraints=None) == []
    assert refused(num_beams=4, do_sample=True) == ["num_beams"]
    assert refused(num_beams=4, repetition_penalty=1.2) == []
    assert refused(epsilon_cutoff=0.1) == [] and refused(epsilon_cutoff=0.1, do_sample=True) == ["epsilon_cutoff"]
    assert refused(forced_decoder_ids=[[1, 2]]) == ["forced_decoder_ids"]
    assert refused(WHISPER, forced_decoder_ids=[[1, 2]]) == []
    assert refused(forced_bos_token_id=3) == ["forced_bos_token_id"] and refused(BART, forced_bos_token_id=3) == []
    with pytest.raises(ModelError, match="no_repeat_ngram_size is 1000; expected at most"):
        read(no_repeat_ngram_size=1000)


def test_a_refusal_says_what_a_key_asks_for_and_how_to_do_without_it():
    with pytest.raises(ModelError) as raised:
        read_generation_defaults({"num_beam_groups": 2}, LLAMA, "model/generation_config.json")
    assert str(raised.value) == (
        "model/generation_config.json: sets num_beam_groups (groups of beams that differ), which changes answers in "
        "transformers and is not supported here; files without it, or leave it out: "
        'hf_overrides={"generation_config": {"num_beam_groups": null}}'
    )
    with pytest.raises(ModelError, match=re.escape('leave it out: hf_overrides={"max_time": null}')):
        read_generation_defaults({"max_time": 2}, LLAMA, "model/config.json")


def test_what_is_typical_counts_where_a_model_is_sampled():
    assert read(typical_p=0.9, do_sample=True) == {"typical_p": 0.9}
    assert read(typical_p=0.9) == {} and read(typical_p=0.9, do_sample=False) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", "4"), ("num_beams", -1), ("max_length", 1.5), ("early_stopping", "always"), ("top_p", "high"),
        ("typical_p", 0), ("typical_p", 1.5),
        ("bad_words_ids", [1]), ("bad_words_ids", [[-1]]), ("forced_eos_token_id", "end"), ("min_length", True),
        ("no_repeat_ngram_size", -2),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_an_error_with_its_name(name: str, value: Any):
    with pytest.raises(ModelError, match=f"file: config field {name} is"):
        read(**{name: value})
