"""Engines over small random models whose tokenizer can write JSON: single characters, and some longer tokens."""

from __future__ import annotations

import functools
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ratoon.api.llm import LLM
from tests.golden.engines import engine_of_folder, model_folder
from tests.golden.tiny_models import VOCAB_SIZE

FAMILY = "llama with grouped heads"
END = "<end>"
THOUGHT = "</think>"
MERGES = (
    '{"',
    '":',
    '",',
    '"}',
    "tr",
    "tru",
    "true",
    "fa",
    "fal",
    "fals",
    "false",
    "nu",
    "nul",
    "null",
    "ab",
    "abc",
    "12",
)


def json_tokenizer() -> Tokenizer:
    """As many tokens as the small models have."""
    specials = ["<pad>", THOUGHT, END]  # the models' configs have 2 as the end
    letters = string.ascii_lowercase + string.digits + string.punctuation + " \n"
    written = [byte_level(text) for text in (*letters, *MERGES)]
    fillers = [chr(0x100 + 0x60 + n) for n in range(VOCAB_SIZE - len(specials) - len(written))]
    vocabulary = {text: index for index, text in enumerate([*specials, *written, *fillers])}
    merges = [(byte_level(text[:-1]), byte_level(text[-1])) for text in MERGES]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def byte_level(text: str) -> str:
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


@functools.cache
def grammar_folder(family: str) -> Path:
    folder = model_folder(family)
    with_grammar = folder.with_name(folder.name + "-json")
    shutil.copytree(folder, with_grammar)
    json_tokenizer().save(str(with_grammar / "tokenizer.json"))
    (with_grammar / "tokenizer_config.json").write_text(f'{{"eos_token": "{END}"}}')
    return with_grammar


@contextmanager
def grammar_engine(family: str = FAMILY, **settings: Any) -> Iterator[LLM]:
    with engine_of_folder(grammar_folder(family), skip_tokenizer=False, **settings) as llm:
        yield llm
