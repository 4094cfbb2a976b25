"""Tokenizers from folders and from GGUF metadata: special tokens, single tokens, templates, damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from ratoon.core.errors import ModelError, RequestError
from ratoon.models.gguf_tokenizer import load_tokenizer_from_gguf
from ratoon.models.tokenizer import LONG_TEXT, Tokenizer, load_tokenizer_from_folder
from tests.unit.models.model_files import (
    NASTY_TEXTS,
    byte_level_metadata,
    sentencepiece_vocabulary,
    train_byte_level,
    write_json,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
IN_CONFIG = {"chat_template": "A"}
NAMED_TEMPLATES = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ add_generation_prompt }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = train_byte_level()
    backend.post_processor = TemplateProcessing(single="<|special|> $A", special_tokens=[("<|special|>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|special|>"}, "eos_token": "<|end|>", "chat_template": TEMPLATE}
    write_json(tmp_path / "tokenizer_config.json", config)
    return tmp_path


def test_special_tokens_come_from_the_files_beside(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|special|>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 1)
    assert tokenizer.special_token_ids == {0, 1}
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer_from_folder(folder).eos_token_id is None
    write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "<|end|>"}})
    assert load_tokenizer_from_folder(folder).eos_token_id == 1


def test_texts_are_neither_cut_nor_padded_whatever_the_file_says(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    text = "the quick brown fox jumps over the lazy dog " * 5
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_long_texts_are_tokenised_and_refused_like_short_ones(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    line = "the quick brown fox jumps over the lazy dog\n"
    count = LONG_TEXT // len(line) + 1
    assert (
        tokenizer.encode(line * count, add_special_tokens=False)
        == tokenizer.backend.encode(line * count, add_special_tokens=False).ids
    )
    assert tokenizer.encode(line * count)[0] == tokenizer.bos_token_id
    with pytest.raises(RequestError):
        tokenizer.encode("\ud800" * LONG_TEXT * 2)


def test_special_tokens_are_added_and_skipped_on_request(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    bare = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [0, *bare]
    assert tokenizer.decode([0, *bare]) == "the fox"
    assert tokenizer.decode([0, *bare], skip_special_tokens=False) == "<|special|>the fox"


def test_a_chat_has_one_bos_token(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    assert tokenizer.apply_chat_template(MESSAGES) == "<|special|>Hi<|end|>True"
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 0 and ids.count(0) == 1 and 1 in ids


def test_vocab_size_reaches_the_highest_id() -> None:
    backend = train_byte_level()
    size = backend.get_vocab_size()
    backend.add_tokens([AddedToken("<new>")])
    assert Tokenizer(backend, {}).vocab_size == size + 1


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_texts_of_tokens_add_up_to_the_text(text: str, folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokenizer.token_text(id) for id in ids]
    if not any("�" in piece for piece in pieces):
        assert "".join(pieces) == text


def test_a_part_of_a_character_is_shown_as_a_replacement(folder: Path) -> None:
    tokenizer = load_tokenizer_from_folder(folder)
    ids = tokenizer.encode("𓀀", add_special_tokens=False)
    assert len(ids) > 1
    assert all("�" in tokenizer.token_text(id) for id in ids)
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.id_to_token(-1) is None


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"tokenizer_config.json": {"chat_template": "A"}}, {"default": "A"}),
        ({"tokenizer_config.json": {"chat_template": NAMED_TEMPLATES}}, {"default": "A", "rag": "B"}),
        ({"tokenizer_config.json": IN_CONFIG, "chat_template.json": {"chat_template": "C"}}, {"default": "C"}),
        ({"tokenizer_config.json": IN_CONFIG, "chat_template.jinja": "D"}, {"default": "D"}),
        ({}, {}),
    ],
)  # fmt: skip
def test_templates_are_found_where_models_keep_them(files: dict[str, Any], wanted: dict, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        if name.endswith("json"):
            write_json(folder / name, content)
        else:
            (folder / name).write_text(content)
    tokenizer = load_tokenizer_from_folder(folder)
    assert tokenizer.chat_templates == wanted
    assert tokenizer.chat_template == wanted.get("default")


def test_the_template_is_chosen_by_name_by_tools_or_brought_along() -> None:
    tokenizer = Tokenizer(
        train_byte_level(), {}, {"default": "plain", "tool_use": "{{ tools | length }}", "rag": "rag"}
    )
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "x"}]) == "1"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="rag") == "rag"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="{{ word }}", word="own") == "own"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("look", "tools: str is not a list"),
        ({"a": 1}, "tools: dict is not a list"),
        ([print], r"tools\[0\]: is of type "),
    ],
)
def test_tools_that_are_no_tools_are_named(tools: Any, message: str) -> None:
    tokenizer = Tokenizer(train_byte_level(), {}, {"default": "{{ tools }}"})
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(MESSAGES, tools=tools)


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(RequestError, match="messages: this model has no chat template; send a prompt, or a chat_templ"):
        Tokenizer(train_byte_level(), {}).apply_chat_template(MESSAGES)


def test_a_damaged_tokenizer_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer.json: is no valid tokenizer"):
        load_tokenizer_from_folder(folder)


def test_gguf_token_types_make_special_and_added_tokens() -> None:
    backend = train_byte_level()
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = load_tokenizer_from_gguf(byte_level_metadata(backend, "gpt-2"), "test")
    assert tokenizer.special_token_ids == {0, 1}
    ids = tokenizer.encode("a<think><|end|>")
    assert ids[-2:] == [backend.token_to_id("<think>"), 1]
    assert tokenizer.decode(ids) == "a<think>"


@pytest.mark.parametrize(
    ("pre", "changes", "bos", "eos"),
    [
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": None}, False, False),
    ],
)
def test_gguf_metadata_says_what_goes_around_a_text(pre: str, changes: dict, bos: bool, eos: bool) -> None:
    tokenizer = load_tokenizer_from_gguf(byte_level_metadata(train_byte_level(), pre, **changes), "test")
    bare = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [0] * bos + bare + [1] * eos


def test_gguf_may_have_several_templates() -> None:
    metadata = byte_level_metadata(train_byte_level(), "gpt-2") | {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "B",
    }
    assert load_tokenizer_from_gguf(metadata, "test").chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, r"unknown way 'martian'; known: a.x-4.0, chatglm-bpe, dbrx, .*qwen2, refact, .*viking"),
        ({"model": "rwkv"}, r"unknown kind 'rwkv'; known: gpt2, llama, bert, t5"),
        ({"model": "t5"}, r"has no tokenizer.ggml.scores"),
        ({"model": None}, r"has no tokenizer: the metadata key tokenizer.ggml.model is missing"),
        ({"tokens": None}, r"the metadata key tokenizer.ggml.tokens is missing"),
        ({"merges": None}, r"has no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"the merge 'ab' has no two parts"),
        ({"merges": ["never seen"]}, r"its tokenizer is damaged"),
        ({"token_type": [1, 2]}, r"\d+ tokens, but 2 token types"),
        ({"model": "llama"}, r"has no tokenizer.ggml.scores"),
    ],
)
def test_a_gguf_tokenizer_that_can_not_be_built_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer_from_gguf(byte_level_metadata(train_byte_level(), **{"pre": "gpt-2", **changes}), "test")


def sentencepiece_tokenizer(**changes: Any) -> Tokenizer:
    tokens, scores, types = sentencepiece_vocabulary(["▁hello", "▁world", "low", "or"])
    metadata = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return load_tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "test")


def test_sentencepiece_has_bos_a_space_in_front_and_bytes_for_the_rest() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert [tokenizer.id_to_token(id) for id in tokenizer.encode("hello é")] == [
        "<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("hello world é")) == "hello world é"
    no_prefix = sentencepiece_tokenizer(add_space_prefix=False, add_bos_token=False)
    assert no_prefix.id_to_token(no_prefix.encode("hello")[0]) == "hello"
    assert no_prefix.decode(no_prefix.encode(" hello")) == " hello"


def test_the_text_of_a_sentencepiece_token_keeps_its_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    vocabulary = tokenizer.backend.get_vocab()
    assert tokenizer.token_text(vocabulary["▁hello"]) == " hello"
    assert tokenizer.token_text(vocabulary["<0xC3>"]) == "�"
    assert tokenizer.token_text(1) == "<s>"


@pytest.mark.parametrize(
    ("text", "message"), [("half \ud800", "prompt: is no valid Unicode"), (3, "prompt: int is no text")]
)
def test_what_is_no_text_is_the_requests_error(text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Tokenizer(train_byte_level(), {}).encode(text)
