"""Damaged models: a ModelError of one line for each, before anything is built, and within a short time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.errors import ModelError, RatoonError, RequestError
from ratoon.models.damage import reading, show, without_panic_messages
from ratoon.models.safetensors_source import SafetensorsSource, read_header
from ratoon.models.source import resolve_model
from ratoon.models.tokenizer import load_tokenizer_from_folder
from tests.unit.models.model_files import (
    LLAMA_CONFIG,
    byte_level_metadata,
    embedding_only,
    llama_metadata,
    sentencepiece_vocabulary,
    train_byte_level,
    write_folder,
    write_gguf,
    write_json,
)

SECONDS = 10.0  # of the processor; one is usual
LONGEST_MESSAGE = 1000
DEEP = "[" * 200_000 + "]" * 200_000
ODD_VALUES: list[Any] = [
    *(None, True, False, "x", "", [], {}, [[]], [{}], {"a": 1}, -1, 0, 3, 1.5, 10**8, 2**31, 2**40, 10**30),
    *(math.nan, math.inf, -math.inf, 1e-300, 1e300, "x" * 5000, [0] * 1000, "\ud800"),
]
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 50, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "n_inner": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
QWEN2 = {
    **LLAMA_CONFIG, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16,
    "max_window_layers": 1, "layer_types": None, "quantization_config": None, "partial_rotary_factor": 1.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0},
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu", "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "n_positions": 64,
}  # fmt: skip
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 50, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_source_positions": 30, "max_target_positions": 32, "num_mel_bins": 16,
    "decoder_start_token_id": 3, "forced_bos_token_id": 1, "suppress_tokens": [3], "bad_words_ids": [[4], [5, 6]],
}  # fmt: skip
BERT = {
    "architectures": ["BertModel"], "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "type_vocab_size": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64, "hidden_act": "gelu",
}  # fmt: skip
LONG = {
    **LLAMA_CONFIG,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
}
FAMILIES = {
    "llama": LLAMA_CONFIG,
    "long": LONG,
    "qwen2": QWEN2,
    "gpt2": GPT2,
    "t5": T5,
    "whisper": WHISPER,
    "bert": BERT,
}


@contextmanager
def in_a_moment() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


def check(error: RatoonError, *said: str) -> None:
    text = str(error)
    assert "\n" not in text and len(text) < LONGEST_MESSAGE
    text.encode()  # it travels between processes
    for part in said:
        assert part in text


def refused(name: object, *said: str) -> None:
    with in_a_moment(), pytest.raises(ModelError) as caught:
        resolve_model(str(name))
    check(caught.value, *said)


# ---- names ----


@pytest.mark.parametrize(
    "name",
    [
        *("x" * 5000, "x" * 300, "/" + "x" * 300, "a/" * 2500, "org/" + "x" * 5000, "~nobody-of-this-name/model"),
        *("x\0y", "\ud800", "x\ny", "/dev/null", "/dev/null/model", "..", "/proc/self/mem"),
    ],
)
def test_a_name_that_no_model_can_have_is_refused(name):
    refused(name)


def test_a_folder_whose_config_can_not_be_read_is_an_error(tmp_path):
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json")


# ---- configs ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_every_field_of_a_config_may_have_any_value_and_is_accepted_or_named(family, tmp_path):
    good = FAMILIES[family]
    (folder := tmp_path / "model").mkdir()
    cases = [({**good, name: value}, value) for name in good for value in ODD_VALUES]
    for name, inner in good.items():
        if isinstance(inner, dict):
            cases += [({**good, name: {**inner, key: value}}, value) for key in inner for value in ODD_VALUES]
    write_json(folder / "config.json", {**good, "dtype": "float32"})
    resolve_model(str(folder))
    num_refused, unnamed = 0, []
    with in_a_moment():
        for config, _ in cases:
            write_json(folder / "config.json", {"dtype": "float32", **config})
            try:
                resolve_model(str(folder))
            except ModelError as error:
                check(error)
                unnamed += [error] if "damaged" in str(error) else []
                num_refused += 1
    assert num_refused > len(cases) // 2
    assert not unnamed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_million_layers_are_refused_before_anything_is_built(family, tmp_path):
    good = FAMILIES[family]
    names = [name for name in good if name.endswith("layers") or name == "n_layer" if name != "max_window_layers"]
    assert names
    for name in names:
        write_json(tmp_path / "config.json", {**good, "dtype": "float32", name: 10**8})
        refused(tmp_path, name, "100000000", "at most 4096")


@pytest.mark.parametrize(
    "architectures", [[["LlamaForCausalLM"]], [{"a": 1}], [None], [5], {"a": 1}, "Llama", 5, True, [DEEP[:1000]]]
)
def test_architectures_of_odd_types_are_refused(architectures, tmp_path):
    write_json(tmp_path / "config.json", {**LLAMA_CONFIG, "architectures": architectures, "model_type": 5})
    refused(tmp_path, "…ForCausalLM of ", "Llama")


@pytest.mark.parametrize(
    "content", [DEEP, '{"a":' * 100_000, "[]", "5", '{"a": 1', "\x00", '{"vocab_size": ' + "9" * 5000]
)
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "1_Pooling/config.json"]
)
def test_json_that_is_none_or_too_deep_is_an_error_that_names_the_file(file, content, tmp_path):
    write_folder(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    refused(tmp_path, file.rpartition("/")[2])


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "eos_token_id"]
)
def test_a_generation_config_may_have_any_value_and_is_accepted_or_named(name, tmp_path):
    write_folder(tmp_path)
    for value in ODD_VALUES:
        write_json(tmp_path / "generation_config.json", {name: value})
        try:
            resolve_model(str(tmp_path))
        except ModelError as error:
            check(error, name)


# ---- weights ----


def header_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        *(DEEP, '{"a":' * 100_000, "[]", "5", "null", '{"a": 5}', '{"a": []}', '{"a": {}}', "\xff", '{"a": null}'),
        *(
            json.dumps({"a": {**ENTRY, name: value}})
            for name, values in {
                "shape": [5, "x", None, [-1, -1], [1.0], ["1"], [[1]], [2**70], [True], {"a": 1}],
                "data_offsets": [
                    5,
                    None,
                    [0],
                    [4, 0],
                    [-4, 0],
                    [0.0, 4.0],
                    ["0", "4"],
                    [0, 2**70],
                    {"a": 1},
                    [0, 4, 4],
                ],
                "dtype": [5, None, [], {}],
            }.items()
            for value in values
        ),
    ],
)
def test_a_damaged_safetensors_header_is_an_error_that_names_the_file(header, tmp_path):
    file = header_file(tmp_path / "model.safetensors", header.encode("latin-1"), b"\0" * 4)
    with in_a_moment(), pytest.raises(ModelError) as caught:
        read_header(file)
    check(caught.value, "model.safetensors")


def test_tensors_that_lie_where_they_can_not_are_an_error_when_they_are_read(tmp_path):
    entries = {"a": {**ENTRY, "data_offsets": [4, 8]}, "b": {**ENTRY, "data_offsets": [4, 8]}}
    header_file(tmp_path / "model.safetensors", json.dumps(entries).encode(), b"\0" * 8)
    source = SafetensorsSource(tmp_path)
    with pytest.raises(ModelError) as caught:
        source.read("a")
    check(caught.value, "model.safetensors")


# ---- chat templates ----


@pytest.mark.parametrize(
    "template", [5, True, {}, {"default": "x"}, [5], [["x"]], [{"name": "x"}], [{"name": 5, "template": "x"}], [{}]]
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_a_chat_template_of_an_odd_type_is_an_error_that_names_the_file(file, template, tmp_path):
    write_folder(tmp_path)
    write_json(tmp_path / file, {"chat_template": template})
    refused(tmp_path, file, "chat_template", "expected a template")


def test_a_chat_template_that_is_no_text_is_an_error(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    refused(tmp_path, "chat_template.jinja")


# ---- tokenizers ----

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
BPE = {"type": "BPE", "dropout": None, "unk_token": None, "end_of_word_suffix": None, "fuse_unk": False}
PANICS: dict[str, dict[str, Any]] = {
    "while it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "with the first text": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "with special tokens": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "prefix longer than a merge": {
        "model": {
            **BPE, "continuing_subword_prefix": "####", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"],
            "byte_fallback": False,
        }
    },
    "prefix that cuts a character": {  # where the library does not stop at a panic, but ends the process
        "model": {
            **BPE, "continuing_subword_prefix": "#", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]],
            "byte_fallback": False,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("case", PANICS)
def test_a_tokenizer_that_makes_the_library_panic_is_an_error_of_one_line(case, tmp_path, capfd):
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": None, "decoder": None, "model": WORDS}
    write_json(tmp_path / "tokenizer.json", {**parts, **PANICS[case]})
    with in_a_moment(), pytest.raises(ModelError) as caught:
        load_tokenizer_from_folder(tmp_path)
    check(caught.value, "tokenizer.json")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "content", [DEEP, '{"a":' * 100_000, "", "null", '{"model": 5}', '{"model": {"type": "Magic"}}']
)
def test_a_tokenizer_file_that_is_none_is_an_error(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with in_a_moment(), pytest.raises(ModelError) as caught:
        load_tokenizer_from_folder(tmp_path)
    check(caught.value, "tokenizer.json")


def test_a_word_without_a_token_is_the_requests_error(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    tokenizer = load_tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="no tokens for it"):
        tokenizer.encode("b")


# ---- GGUF ----

GGUF_VALUES: list[Any] = [
    *(True, 0, 1, 3, 2**31, 2**32 - 1, "x", "", "x" * 5000, 1.5, math.nan, math.inf, -1.0, 1e30),
    *([1, 2], [1, 1], ["x"], [1.5, 1.5], [True]),
]


def test_every_key_of_gguf_metadata_may_have_any_value_and_is_accepted_or_named(tmp_path):
    good = llama_metadata(**{"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "attention.key_length": 8})
    good |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "x"}
    good |= {"tokenizer.chat_templates": ["a"], "tokenizer.chat_template.a": "x", "general.alignment": 32}
    path = write_gguf(tmp_path / "good.gguf", "llama", good, embedding_only())
    resolve_model(str(path))
    num_refused = 0
    with in_a_moment():
        for key in good:
            for number, value in enumerate(GGUF_VALUES):
                if key == "general.alignment" and not (isinstance(value, int) and value > 3):
                    continue  # the writer itself needs it
                path = write_gguf(tmp_path / f"{key}-{number}.gguf", "llama", {**good, key: value}, embedding_only())
                try:
                    resolve_model(str(path))
                except ModelError as error:
                    check(error)
                    num_refused += 1
                path.unlink()
    assert num_refused > 100


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_key_of_a_gguf_tokenizer_may_have_any_value_and_is_accepted_or_named(kind, tmp_path, capfd):
    if kind == "gpt2":
        good = byte_level_metadata(train_byte_level(vocab_size=300), "gpt-2")
    else:
        tokens, scores, types = sentencepiece_vocabulary(["▁ab"])
        values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1}
        good = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    num_refused = 0
    with in_a_moment():
        for key in good:
            for value in GGUF_VALUES:
                try:
                    load_tokenizer(tmp_path, {**good, key: value})
                except ModelError as error:
                    check(error)
                    num_refused += 1
    assert num_refused > 50
    assert capfd.readouterr().err == ""


def load_tokenizer(tmp_path: Path, metadata: dict[str, Any]) -> None:
    from ratoon.models.gguf_tokenizer import load_tokenizer_from_gguf

    load_tokenizer_from_gguf(metadata, "model.gguf")


def test_tokens_of_senseless_length_take_no_time(tmp_path):
    for length, number in ((10**6, 1), (60_000, 20)):
        tokens = ["<unk>", "<s>", "</s>", *(f"{n}" + "x" * length for n in range(number)), "x"]
        values = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": [1] * len(tokens)}
        with in_a_moment():
            try:
                load_tokenizer(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in values.items()})
            except ModelError as error:
                check(error)


# ---- the tools ----


def test_values_are_shown_on_one_line_whatever_they_are():
    for value in (*ODD_VALUES, {"a": {"b": {"c": {"d": 1}}}}, "a\nb", 10**4000, b"x" * 10**6):
        text = show(value)
        assert "\n" not in text and len(text) < 400


def test_interrupts_are_no_damage():
    with pytest.raises(KeyboardInterrupt), reading("x"), without_panic_messages():
        raise KeyboardInterrupt


def test_what_others_write_to_standard_error_meanwhile_is_not_lost(capfd):
    import os

    with without_panic_messages():
        os.write(2, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"
