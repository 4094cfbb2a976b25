"""Beam search with an encoder, on the CPU: what a step costs against a greedy one, transformers and CTranslate2.

    .venv/bin/python bench/encoder_beams.py
    .venv/bin/python bench/encoder_beams.py --parts bart,spellings --quantization int8 --engines ratoon,ctranslate2 \\
        --ct2-python .venv-ct2/bin/python

A greedy answer and a search read a text that is new to all engines. Ratoon tells when every step ended; a peer's step
is what all tokens take beyond the first, shared out. The models have the usual shape of a family and random weights;
CTranslate2 takes BART alone. spellings: words whose phonemes are not those of Ratoon in float32, by a small real BART.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beams import median_step
from export_hf import CACHE_FOLDER, write_json
from harness import (
    OURS,
    Comparison,
    Engines,
    Program,
    Row,
    format_comparison,
    format_spread,
    in_turn,
    ratios_of,
    say,
)
from peers.conversion import FLOATS, converted_model, quantization_settings
from peers.process import EngineFailedError, EngineProcess
from random_models import ENCODER_SHAPES, encoder_vocab_size, make_encoder_model
from workloads import PromptSource

SEED = 0
CTRANSLATE2 = "ctranslate2"
SPELLINGS, DECODED = "spellings", "ratoon, float32"
DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "bart-g2p-us"
TEXT = DATA.parents[2] / "docs" / "architecture.md"
MOST_WORDS = 2000
MOST_TOKENS = 60
ROOM = 4  # positions of the decoder beyond an answer
GREEDY, BEAMS = "greedy", "beams"
ROWS = {
    "greedy": Row("greedy answer"),
    "beams": Row("beam search", aims={"transformers": "above 1×"}),
    "greedy_first": Row("greedy: first token", "ms"),
    "beams_first": Row("beams: first tokens", "ms"),
    "greedy_step": Row("greedy: step", "ms"),
    "beams_step": Row("beams: step", "ms"),
}
GROWTH_AIM = 2.0  # a step of beams against a greedy one, at most


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    input: int = 512  # of the encoder
    tokens: int = 32  # of an answer
    width: int = 5
    full_models: bool = True  # or tiny ones


QUICK = Sizes(input=20, tokens=4, width=3, full_models=False)


class EncoderBeams(Program):
    """A part is a family of models. Its engines end with it."""

    doc = __doc__
    parts = (*ENCODER_SHAPES, SPELLINGS)
    peers = (OURS, CTRANSLATE2, "transformers")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quantization", choices=(FLOATS, "int8"), default=FLOATS, help="default: %(default)s")

    def measure(self) -> None:
        self.sizes = QUICK if self.args.quick else Sizes()
        for part in self.args.parts:
            with ExitStack() as stack:
                self.found[part] = self._spellings(stack) if part == SPELLINGS else self._family(stack, part)

    def _family(self, stack: ExitStack, family: str) -> dict[str, Any]:
        source = PromptSource(SEED, encoder_vocab_size(family, self.sizes.full_models))
        model = make_encoder_model(family, self.sizes.full_models)
        names = [name for name in self.args.engines if name != CTRANSLATE2 or family == "bart"]
        engines = {name: self._engine(stack, name, model, self.args.quantization) for name in names}
        for engine in engines.values():
            engine.start(source.prompt(self.sizes.input))
        return measure_search(family, engines, source, self.sizes, self.args.rounds)

    def _spellings(self, stack: ExitStack) -> dict[str, float]:
        """Returns by engine the share of answers that are not Ratoon's in float32."""
        folder = CACHE_FOLDER / f"{DATA.name}-hf"
        shutil.copytree(DATA, folder, dirs_exist_ok=True)
        kinds = {DECODED: (OURS, FLOATS)}
        kinds |= {name: (name, self.args.quantization) for name in self.args.engines if name != "transformers"}
        answers = {}
        for name, kind in kinds.items():
            say(f"spellings: {name}")
            engine = self._engine(stack, kind[0], folder, kind[1])
            engine.start(spellings()[0])
            found = engine.call("answer", prompts=spellings(), most_tokens=MOST_TOKENS).value
            answers[name] = [[token for token in answer if token > 3] for answer in found]  # no start, end and filling
            engine.close()
        wanted = answers.pop(DECODED)
        return {
            name: sum(one != other for one, other in zip(found, wanted, strict=True)) / len(wanted)
            for name, found in answers.items()
        }

    def _engine(self, stack: ExitStack, name: str, model: Path, quantization: str) -> EngineProcess:
        more: dict[str, Any] = {"settings": quantization_settings(name, quantization)}
        if name == CTRANSLATE2:
            complete_bart(model)
            model = converted_model(model, self.args.ct2_python, quantization)
            more["worker"] = "ctranslate2_encoder_worker"
        longest = max(self.sizes.tokens, MOST_TOKENS) + ROOM
        return self.add_engine(stack, name, model, longest, log=f"{name}_encoder", **more)

    def title(self) -> str:
        models = [
            "spellings" if part == SPELLINGS else f"tiny {part}" if self.args.quick else ENCODER_SHAPES[part][0]
            for part in self.args.parts
        ]
        return f"{' and '.join(models)} in {self.args.quantization}, {self.args.threads} threads"

    def report(self) -> Iterator[str]:
        for part, result in self.found.items():
            if part == SPELLINGS:
                rates = ", ".join(f"{name} {rate:.1%}" for name, rate in result.items())
                yield f"Words whose phonemes are not those of Ratoon in float32: {rates}"
            else:
                yield format_search(part, result, self.sizes)


def measure_search(family: str, engines: Engines, source: PromptSource, sizes: Sizes, rounds: int) -> dict[str, Any]:
    comparison = Comparison()
    for name, engine in engines.items():
        say(f"{family}, warm-up: {name}")
        for way in (GREEDY, BEAMS):
            _answer(name, engine, way, source.prompt(sizes.input), sizes)
    for index in range(rounds):
        for way in (GREEDY, BEAMS):
            say(f"{family}, round {index + 1}/{rounds}: {way}")
            prompt = source.prompt(sizes.input)
            answers = {}
            for name in in_turn(engines, index):
                times, answers[name] = _answer(name, engines[name], way, prompt, sizes)
                for key, seconds in times.items():
                    comparison.record(key, name, seconds)
            ours = set(map(tuple, answers.pop(OURS)))
            for name, theirs in answers.items():
                comparison.record_same(f"{name}, {way}", [len(ours & set(map(tuple, theirs))) / len(ours)])
    steps = comparison.samples
    growth = {name: ratios_of(values, steps["greedy_step"][name]) for name, values in steps["beams_step"].items()}
    return {**comparison.summary(), "growth": growth}


def _answer(
    name: str, engine: EngineProcess, way: str, prompt: list[int], sizes: Sizes
) -> tuple[dict[str, float], list[list[int]]]:
    """Returns the times by row, and the texts, the best first."""
    if name == OURS:
        search = {"width": sizes.width} if way == BEAMS else {}
        call = "beam_search" if way == BEAMS else "decode"
        result = engine.call(call, prompt=prompt, num_tokens=sizes.tokens, **search)
        times, texts, seconds = result.value["times"], result.value["token_ids"], result.seconds
        first, step = times[0], median_step(times)
    else:
        first, _ = _peer_call(engine, way, prompt, 1, sizes.width)
        seconds, texts = _peer_call(engine, way, prompt, sizes.tokens, sizes.width)
        step = (seconds - first) / (sizes.tokens - 1)
    expected = [sizes.tokens] * (sizes.width if way == BEAMS else 1)
    if [len(text) for text in texts] != expected:
        raise EngineFailedError(f"{name} found texts of {[len(text) for text in texts]} tokens, not {expected}")
    return {way: seconds, f"{way}_first": first, f"{way}_step": step}, texts


def _peer_call(
    engine: EngineProcess, way: str, prompt: list[int], num_tokens: int, width: int
) -> tuple[float, list[list[int]]]:
    if way == GREEDY:
        result = engine.call("generate", prompts=[prompt], num_tokens=num_tokens)
        return result.seconds, result.value
    result = engine.call("beam_search", prompt=prompt, width=width, num_tokens=num_tokens)
    return result.seconds, result.value["token_ids"]


def format_search(family: str, result: dict[str, Any], sizes: Sizes) -> str:
    title = f"{family}: {sizes.input} tokens in, {sizes.tokens} out, {sizes.width} beams"
    lines = [format_comparison(title, ROWS, result)]
    for name, growth in result["growth"].items():
        aim = f"; the aim is at most {GROWTH_AIM:g}" if name == OURS else ""
        lines.append(f"  A step of {sizes.width} beams against a greedy one, {name}: {format_spread(growth, '×')}{aim}")
    for name, shares in result["same"].items():
        lines.append(f"  Texts that are also Ratoon's, {name}: {statistics.mean(shares):.1%}")
    return "\n".join(lines)


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
    config = json.loads((DATA / "config.json").read_text(encoding="utf-8"))
    start, end, letters = config["bos_token_id"], config["eos_token_id"], config["grapheme_chars"]
    words = sorted(set(re.findall(r"[A-Za-z]{3,}", TEXT.read_text(encoding="utf-8"))))
    words = [word for word in words if all(letter in letters[4:] for letter in word)][:MOST_WORDS]
    return [[start, *(letters.index(letter, 4) for letter in word), end] for word in words]


if __name__ == "__main__":
    sys.exit(EncoderBeams().run())
