"""Whisper and BART with weights in 8 bits on the CPU: Ratoon against CTranslate2, speed and errors.

    .venv/bin/python bench/cpu_encoder_peers.py --rounds 3
    .venv/bin/python bench/cpu_encoder_peers.py --quantization float32      # the same in fp32

Whisper-tiny has its own weights; BART has the shape of bart-base and random weights, and its errors are those of a
small real one. Errors are in words: of speech against what was said, of spellings against float32's phonemes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import wave
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import encoder_beams
import speech
from export_hf import CACHE_FOLDER, write_json
from harness import OURS, Program, Row, add_python_option, say
from peers.conversion import converted_model
from peers.process import EngineProcess
from random_models import encoder_vocab_size, make_encoder_model
from workloads import PromptSource

SEED = 0
PEER = "ctranslate2"
FAMILY = "bart"
ROOM = 4  # positions of the decoder beyond an answer
FLOATS = "float32"
DECODED = "ratoon, float32"
BART_WORKERS = {OURS: "", PEER: "encoder_worker"}  # after the engine's name
SPEECH_ROWS = {"whole": Row("samples to tokens", aims={PEER: "at least 1.5×"}), "ready": Row("features to tokens")}
DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
SENTENCES = DATA / "speech" / "sentences.json"
SPELLINGS = DATA / "bart-g2p-us"
WORDS = DATA.parents[1] / "docs" / "architecture.md"
MOST_WORDS = 2000
MOST_TOKENS = 60


class EncoderPeers(Program):
    doc = __doc__
    parts = ("whisper", FAMILY)
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quantization", choices=("int8", FLOATS), default="int8", help="default: %(default)s")
        add_python_option(parser, PEER)
        speech.add_speech_options(parser)

    def prepare(self) -> None:
        quantization = self.args.quantization
        self.sizes = encoder_beams.QUICK if self.args.quick else encoder_beams.Sizes()
        self.settings: dict[str, dict[str, Any]] = {
            OURS: {"quantization": "none" if quantization == FLOATS else quantization},
            PEER: {"compute_type": quantization},
        }

    def measure(self) -> None:
        for part in self.args.parts:
            with ExitStack() as stack:
                self.found[part] = self._measure_whisper(stack) if part == "whisper" else self._measure_bart(stack)

    def _measure_whisper(self, stack: ExitStack) -> dict[str, Any]:
        from transformers import AutoTokenizer

        args, sizes = self.args, speech.QUICK if self.args.quick else speech.Sizes()
        source, task = speech.open_recording(args, sizes)
        engines = {name: self._engine(stack, name, args.model, "speech_worker") for name in (OURS, PEER)}
        for engine in engines.values():
            source.start(engine)
        result = speech.measure_transcription(engines, source, task, sizes, args.rounds)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        say("whisper: word errors")
        found = {name: speech_errors(engine, task, tokenizer) for name, engine in engines.items()}
        if args.quantization != FLOATS:
            decoded = self._engine(stack, OURS, args.model, "speech_worker", {"quantization": "none"})
            source.start(decoded)
            found[DECODED] = speech_errors(decoded, task, tokenizer)
        return {**result, "errors": found, "table": speech.format_transcription(result, sizes, SPEECH_ROWS)}

    def _measure_bart(self, stack: ExitStack) -> dict[str, Any]:
        args, sizes = self.args, self.sizes
        model = make_encoder_model(FAMILY, sizes.full_models)
        complete_bart(model)
        source = PromptSource(SEED, encoder_vocab_size(FAMILY, sizes.full_models))
        engines = {name: self._engine(stack, name, model, BART_WORKERS[name]) for name in (OURS, PEER)}
        for engine in engines.values():
            engine.start(source.prompt(sizes.input))
        result = encoder_beams.measure_search(FAMILY, engines, source, sizes, args.rounds)
        say("bart: words whose phonemes are other ones")
        found = self._spelling_errors(stack)
        return {**result, "errors": found, "table": encoder_beams.format_search(FAMILY, result, sizes)}

    def _spelling_errors(self, stack: ExitStack) -> dict[str, float]:
        """Returns the errors against Ratoon's own answers in float32."""
        model = spelling_model()
        settings = {DECODED: {"quantization": "none"}, **self.settings}
        answers = {}
        for name, of_engine in settings.items():
            kind = PEER if name == PEER else OURS
            engine = self._engine(stack, kind, model, BART_WORKERS[kind], of_engine)
            engine.start(spellings()[0])
            answers[name] = spelling_answers(engine)
            engine.close()
        return {
            name: sum(one != other for one, other in zip(found, answers[DECODED], strict=True)) / len(found)
            for name, found in answers.items()
        }

    def _engine(
        self, stack: ExitStack, name: str, model: Path, worker: str, settings: dict[str, Any] | None = None
    ) -> EngineProcess:
        if name == PEER:
            model = converted_model(model, self.args.ct2_python, self.args.quantization)
        longest = max(self.sizes.tokens, MOST_TOKENS) + ROOM
        more = {"worker": f"{name}_{worker}" if worker else None, "settings": settings or self.settings[name]}
        return self.add_engine(stack, name, model, longest, log=f"{name}_encoder", **more)

    def title(self) -> str:
        return f"{' and '.join(self.args.parts)} in {self.args.quantization}, {self.args.threads} threads"

    def report(self) -> Iterator[str]:
        for part, result in self.found.items():
            what = "Word error rate" if part == "whisper" else "Words whose phonemes are not those of float32"
            rates = ", ".join(f"{name} {rate:.1%}" for name, rate in result["errors"].items())
            yield f"{part}\n{result['table']}\n  {what}: {rates}"


def join_sentences() -> tuple[Path, list[list[int]], list[str]]:
    """Returns one recording of all sentences, where each begins and ends, and what is said."""
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


def speech_errors(engine: EngineProcess, task: speech.Task, tokenizer: Any) -> float:
    """Returns the share of wrong, missing and additional words."""
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
    """Returns the real BART of the tests, as CTranslate2 needs it."""
    folder = CACHE_FOLDER / "bart-g2p-us-hf"
    shutil.copytree(SPELLINGS, folder, dirs_exist_ok=True)
    complete_bart(folder)
    return folder


def complete_bart(folder: Path) -> None:
    """Writes what CTranslate2's converter asks for: a field that transformers no longer writes, and a tokenizer, whose
    tokens are their numbers here."""
    from tokenizers import Tokenizer, models

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "normalize_before": False})
    names = {f"<{index}>": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(names, unk_token="<3>")).save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def spellings() -> list[list[int]]:
    """Returns words of a document, in the model's characters."""
    config = json.loads((SPELLINGS / "config.json").read_text(encoding="utf-8"))
    start, end, letters = config["bos_token_id"], config["eos_token_id"], config["grapheme_chars"]
    words = sorted(set(re.findall(r"[A-Za-z]{3,}", WORDS.read_text(encoding="utf-8"))))
    words = [word for word in words if all(letter in letters[4:] for letter in word)][:MOST_WORDS]
    return [[start, *(letters.index(letter, 4) for letter in word), end] for word in words]


def spelling_answers(engine: EngineProcess) -> list[list[int]]:
    answers = engine.call("answer", prompts=spellings(), most_tokens=MOST_TOKENS).value
    return [[token for token in answer if token > 3] for answer in answers]  # without start, end and filling


if __name__ == "__main__":
    sys.exit(EncoderPeers().run())
