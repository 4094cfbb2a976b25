"""Engines over small random models whose tokenizer can write JSON: single characters, and some longer tokens."""

from __future__ import annotations

import functools
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ratoon.api.llm import LLM
from ratoon.core.params import SamplingParams
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


NAMES_AND_VALUES = {
    "type": "object",
    "properties": {"name": {"enum": [1, 12, 7]}, "longer": {"type": "boolean"}, "abcdef": {"enum": ["x", "yz"]}},
    "required": ["name", "longer", "abcdef"],
    "additionalProperties": False,
}


class ForcedTexts(NamedTuple):
    answers: list[Any]
    num_steps: int
    num_known: int  # how often a step had a branch whose next token was known by then
    num_preemptions: int


def forced_texts(others: bool = False, **settings: Any) -> ForcedTexts:
    """Texts that are mostly the names of a schema. `others`: some ask for more, so that masks are not their only
    rule."""
    changes: list[dict[str, Any]] = [{}, {}, {}, {}, {"max_tokens": 9}, {"stop": "longer"}, {"temperature": 0.0}]
    if others:
        changes += [{"logprobs": 1}, {"frequency_penalty": 0.5}, {"n": 2}, {"min_tokens": 30}]
        changes += [{"structured_output": None, "max_tokens": 20}]
    usual = {"structured_output": {"json_schema": NAMES_AND_VALUES}, "max_tokens": 60}
    asked = [SamplingParams(**{**usual, "seed": seed, **change}) for seed, change in enumerate(changes)]
    num_known = 0
    with grammar_engine(**settings) as llm:
        scheduler = llm._client.core.scheduler
        take = scheduler.update_from_output

        def count(plan: Any, output: Any, now: float | None = None) -> Any:
            nonlocal num_known
            num_known += len(output.known)
            return take(plan, output, now)

        scheduler.update_from_output = count
        outputs = llm.generate([f"hello {index}" for index in range(len(asked))], asked, progress=False)
        stats = scheduler.stats()
    answers = [
        (one.token_ids, one.text, one.finish_reason, None if one.logprobs is None else len(one.logprobs))
        for output in outputs
        for one in output.outputs
    ]
    return ForcedTexts(answers, stats.num_steps, num_known, stats.num_preemptions)
