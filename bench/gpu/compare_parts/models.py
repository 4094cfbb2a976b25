"""A folder that both engines load: the config of a shape, and a tokenizer of words in the place of a real one.

It is byte-level, as the real ones of these models are: what tokens cost on their way to text is then the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

SPECIAL_WORDS = ("<unk>", "<s>", "</s>")
SPACE = "Ġ"  # as byte-level vocabularies write it


def prepare_model(shape: Path, folder: Path) -> Path:
    """The folder `folder`/NAME. Weights are made by the engines (load_format dummy)."""
    target = folder / shape.name
    target.mkdir(parents=True, exist_ok=True)
    text = (shape / "config.json").read_text(encoding="utf-8")
    (target / "config.json").write_text(text, encoding="utf-8")
    write_tokenizer(target, json.loads(text)["vocab_size"])
    return target


def copy_model(shape: Path, folder: Path, tokenizer: Path | None) -> Path:
    """The folder `folder`/NAME with a real tokenizer: a `tokenizer.json`. None: it has none, and prompts are tokens."""
    target = Path(shutil.copytree(shape, folder / shape.name))
    if tokenizer is not None:
        shutil.copy(tokenizer, target / "tokenizer.json")
        (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return target


def write_tokenizer(folder: Path, vocab_size: int, special: Mapping[str, int] | None = None) -> None:
    """Every id has a word. The first ones are those that `ratoon bench serve` makes its prompts of. `special`: further
    special tokens, and their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from ratoon.benchmarks.loadgen.datasets import WORDS

    words = [*SPECIAL_WORDS, *(SPACE + word for word in WORDS)][:vocab_size]
    words += [f"{SPACE}w{index}" for index in range(len(words), vocab_size)]
    for word, index in (special or {}).items():
        words[index] = word
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special or {}))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": "</s>"}), encoding="utf-8")
