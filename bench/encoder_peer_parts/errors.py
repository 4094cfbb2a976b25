"""What weights in 8 bits cost in words: of speech against what was said, of spellings against float32's phonemes."""

from __future__ import annotations

import json
import re
import shutil
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER, write_json
from peers.process import EngineProcess
from speech_parts.clips import Task

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
SENTENCES = DATA / "speech" / "sentences.json"
SPELLINGS = DATA / "bart-g2p-us"
WORDS = DATA.parents[1] / "docs" / "architecture.md"
MOST_WORDS = 2000
MOST_TOKENS = 60


def join_sentences() -> tuple[Path, list[list[int]], list[str]]:
    """One recording of all sentences, where each begins and ends, and what is said."""
    sentences = json.loads(SENTENCES.read_text(encoding="utf-8"))
    path = CACHE_FOLDER / "sentences.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    cuts: list[list[int]] = []
    with wave.open(str(path), "wb") as joined:
        for sentence in sentences:
            with wave.open(str(SENTENCES.parent / sentence["file"])) as file:
                if not cuts:
                    joined.setparams(file.getparams())
                first = cuts[-1][1] if cuts else 0
                cuts.append([first, first + file.getnframes()])
                joined.writeframes(file.readframes(file.getnframes()))
    return path, cuts, [sentence["text"] for sentence in sentences]


def speech_errors(engine: EngineProcess, task: Task, tokenizer: Any) -> float:
    """Share of wrong, missing and additional words."""
    path, cuts, texts = join_sentences()
    engine.call("take_clips", recording=str(path.resolve()), cuts=cuts)
    answers = engine.call("transcribe", prompt=task.prompt, num_tokens=MOST_TOKENS, ready=False).value
    heard = [tokenizer.decode(task.answer(tokens), skip_special_tokens=True) for tokens in answers]
    pairs = [(_words(said), _words(text)) for said, text in zip(texts, heard, strict=True)]
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(said) for said, _ in pairs)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    row = list(range(len(b) + 1))
    for i, one in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def spelling_model() -> Path:
    """The real BART of the tests, as CTranslate2 needs it."""
    folder = CACHE_FOLDER / "bart-g2p-us-hf"
    shutil.copytree(SPELLINGS, folder, dirs_exist_ok=True)
    complete_bart(folder)
    return folder


def complete_bart(folder: Path) -> None:
    """What CTranslate2's converter asks for: a field that transformers no longer writes, and a tokenizer, whose tokens
    are their numbers here."""
    from tokenizers import Tokenizer, models

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "normalize_before": False})
    names = {f"<{index}>": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(names, unk_token="<3>")).save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def spellings() -> list[list[int]]:
    """Words of a document, in the model's characters."""
    config = json.loads((SPELLINGS / "config.json").read_text(encoding="utf-8"))
    start, end, letters = config["bos_token_id"], config["eos_token_id"], config["grapheme_chars"]
    words = sorted(set(re.findall(r"[A-Za-z]{3,}", WORDS.read_text(encoding="utf-8"))))
    words = [word for word in words if all(letter in letters[4:] for letter in word)][:MOST_WORDS]
    return [[start, *(letters.index(letter, 4) for letter in word), end] for word in words]


def spelling_answers(engine: EngineProcess) -> list[list[int]]:
    answers = engine.call("answer", prompts=spellings(), most_tokens=MOST_TOKENS).value
    return [[token for token in answer if token > 3] for answer in answers]  # without start, end and filling
