"""What drafts are worth on the CPU: a file that is rewritten, ordinary chat, and an agent's session, by each source.

    .venv/bin/python bench/speculation.py                                      # SmolLM2-135M, which is embedded
    .venv/bin/python bench/speculation.py --model qwen2.5-coder-1.5b-q4_k_m.gguf
    .venv/bin/python bench/speculation.py --sources 'off;draft:MODEL;head:FOLDER'   # drafts of a model or head, too
    .venv/bin/python bench/speculation.py --model FILE --record                # makes the agent's session anew

rewrite: a file of 300 tokens with three edits, and the same request again, when its first answer is a root; and with an
answer that is begun up to behind the first edit, from where a small model too goes on with the file. chat:
questions that repeat nothing, where drafts can only cost time. agent: a recorded session of ten turns with results of
tools, turn by turn, and once more. Every source has an engine of its own; all answers must be the same tokens, greedy.
The peers are transformers with and without `prompt_lookup_num_tokens`, in float32, and llama.cpp with and without the
prompt lookup of llama-cpp-python: each is compared with itself. Ratios are taken within a round; times are whole
requests, prompts included. What drafts can bring depends on the answers, so each row says which share of their tokens
occurred before behind the same three or more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from export_hf import DEFAULT_FOLDER, MODEL, export_model
from harness import OURS, Program, align, format_number, format_spread, in_turn, ratios_of, say, spread
from peers.process import EngineFailedError, EngineProcess
from speculation_parts.texts import (
    FENCE,
    SESSION_FILE,
    SYSTEM,
    Messages,
    begun_rewriting,
    questions,
    read_session,
    rewriting,
    session_texts,
    share_of_repeats,
)

OFF = "off"
SOURCES = (OFF, "ngram", "roots", "roots,ngram")
AIMS = {
    ("rewrite", "ngram"): "at least 2×",
    ("rewrite again", "roots"): "at least 3×",
    ("begun rewrite", "ngram"): "at least 2×",
    ("begun rewrite again", "roots"): "at least 3×",
    ("chat", "ngram"): "at least 0.98×",
    ("chat", "roots"): "at least 0.98×",
}
MAX_MODEL_LEN = 8192
KV_MEMORY = "768MiB"
LOOKUP_TOKENS = 8  # that peers draft: they do not choose by themselves
RECORDED_THING = "record"
WARM_UP = 1000  # the round whose texts engines run before the first that counts
BEGUN = 500  # from a round to the one whose texts its begun answers have

Row: TypeAlias = str
Samples: TypeAlias = dict[Row, dict[str, list[float]]]  # row → way → seconds, one value a round


@dataclass(frozen=True)
class Sizes:
    most_tokens: int = 600  # of a rewritten file
    questions: int = 4
    answer: int = 128  # tokens of an answer in a chat
    turns: int = 10
    turn: int = 400  # tokens of a turn, at most


QUICK = Sizes(most_tokens=24, questions=1, answer=16, turns=2, turn=16)


@dataclass(frozen=True)
class Way:
    """One engine with one source of drafts."""

    engine: str
    source: str
    worker: str
    settings: dict[str, Any]
    arguments: dict[str, Any]  # of each call

    @property
    def label(self) -> str:
        return f"{self.engine} {self.source}"

    @property
    def base(self) -> str:
        """The same engine without drafts."""
        return f"{self.engine} {OFF}"


class SpeculationBenchmark(Program):
    doc = __doc__
    parts = ("rewrite", "chat", "agent")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, metavar="FILE", help=f"a GGUF file; default: {MODEL}, embedded")
        parser.add_argument("--hf", type=Path, metavar="FOLDER", help="the model for transformers; embedded: exported")
        parser.add_argument(
            "--sources", default=";".join(SOURCES), help="separated by semicolons; default: %(default)s"
        )
        parser.add_argument("--no-peers", dest="peers", action="store_false", help="Ratoon alone")
        parser.add_argument("--record", action="store_true", help=f"write {SESSION_FILE.name} with this model, and end")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        args.sources = args.sources.split(";")
        if OFF not in args.sources:
            parser.error(f"--sources: {';'.join(args.sources)}; expected {OFF} among them")

    def prepare(self) -> None:
        from ratoon.models.embedded import find_embedded_model
        from ratoon.models.source import resolve_model

        self.sizes = QUICK if self.args.quick else Sizes()
        self.model: Path = self.args.model or find_embedded_model(MODEL)
        self.folder: Path | None = self.args.hf
        if self.args.peers and self.folder is None and self.args.model is None:
            self.folder = export_model(MODEL, DEFAULT_FOLDER)
        self.tokenizer = resolve_model(str(self.model)).load_tokenizer()
        self.ways = {way.label: way for way in self._find_ways()}

    def _find_ways(self) -> Iterator[Way]:
        for source in [OFF] if self.args.record else self.args.sources:
            # A recording has the same answers with drafts, sooner
            settings = {"speculate": "ngram,roots" if self.args.record else source, "kv_memory": KV_MEMORY}
            yield Way(OURS, source, "ratoon_worker", settings, {})
        if not self.args.peers or self.args.record:
            return
        if self.folder is not None:
            lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
            yield Way("transformers", OFF, "transformers_worker", {}, {})
            yield Way("transformers", "lookup", "transformers_worker", {}, lookup)
        if importlib.util.find_spec("llama_cpp") is not None:
            for source, tokens in ((OFF, 0), ("lookup", LOOKUP_TOKENS)):
                yield Way("llama.cpp", source, "llama_cpp_lookup_worker", {"lookup_tokens": tokens}, {})

    def title(self) -> str:
        return f"{self.model.name}, {self.args.threads} threads"

    def tokens_of(self, messages: Messages, begin: str = "") -> list[int]:
        """Returns a prompt of the model; the answer begins with `begin`."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True) + begin
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def measure(self) -> None:
        with ExitStack() as stack:
            self.running: dict[str, EngineProcess] = {}
            for way in self.ways.values():
                model = self.folder if way.engine == "transformers" and self.folder else self.model
                engine = self.add_engine(
                    stack, way.engine, model, MAX_MODEL_LEN, re.sub(r"[^A-Za-z0-9.]+", "-", way.label),
                    worker=way.worker, settings=way.settings,
                )  # fmt: skip
                engine.start(self.tokens_of(rewriting(WARM_UP))[:32])
                self.running[way.label] = engine
            if self.args.record:
                self._record()
                return
            for part in self.args.parts:
                self.found[part] = getattr(self, f"_measure_{part}")()

    # ---- one request by all ways ----

    def _answers(self, prompts: list[list[int]], most_tokens: int) -> list[list[int]]:
        """Returns the model's answers, up to their end tokens. The engine that gave them forgets the prompts again, as
        no other one has seen them."""
        engine = self.running[f"{OURS} {OFF}"]
        answers = [engine.call("answer", prompts=[one], most_tokens=most_tokens).value[0] for one in prompts]
        engine.call("reset_prefix_cache")
        return answers

    def _rows_of(self, label: str, rows: Iterable[Row]) -> list[Row]:
        """Peers keep nothing of an answer: the second time would be the first again."""
        return [row for row in rows if self.ways[label].engine == OURS or not row.endswith(" again")]

    def _ask(self, label: str, prompt: list[int], expected: list[int]) -> float:
        """Returns the seconds of a request whose answer is known."""
        way = self.ways[label]
        result = self.running[label].call("generate", prompts=[prompt], num_tokens=len(expected), **way.arguments)
        (tokens,) = result.value
        same = sum(1 for mine, other in zip(tokens, expected) if mine == other)
        if way.engine == OURS and tokens != expected:
            raise EngineFailedError(f"{label}: {same} of {len(expected)} tokens are those without drafts")
        self.same.setdefault(label, []).append(same / len(expected))
        # A run that is ended early has lost nothing
        print(f"# {label}: {len(expected)} tokens in {result.seconds:.1f} s", file=sys.stderr, flush=True)
        return result.seconds

    def _rounds(self, part: str) -> Iterator[int]:
        self.same: dict[str, list[float]] = {}
        self.repeated: dict[Row, list[float]] = {}  # the share of each answer's tokens
        for index in range(self.args.rounds):
            say(f"{part}, round {index + 1}/{self.args.rounds}")
            yield index

    def _summary(self, samples: Samples, num_tokens: dict[Row, list[int]]) -> dict[str, Any]:
        """`num_tokens`: of each row and round."""
        ratios = {
            row: {
                label: ratios_of(by_way[self.ways[label].base], seconds)
                for label, seconds in by_way.items()
                if label != self.ways[label].base
            }
            for row, by_way in samples.items()
        }
        rates = {
            row: {
                label: spread([count / one for count, one in zip(num_tokens[row], seconds)])
                for label, seconds in by_way.items()
            }
            for row, by_way in samples.items()
        }
        return {
            "samples": samples,
            "ratios": ratios,
            "tokens_per_second": rates,
            "same": self.same,
            "repeated": {row: sum(shares) / len(shares) for row, shares in self.repeated.items()},
        }

    def _note_repeats(self, row: Row, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.repeated.setdefault(row, []).extend(map(share_of_repeats, prompts, answers))

    def _record_time(self, samples: Samples, row: Row, label: str, seconds: float, index: int) -> None:
        """Adds the seconds of a request to a round of a row."""
        values = samples.setdefault(row, {}).setdefault(label, [])
        values += [0.0] * (index + 1 - len(values))
        values[index] += seconds

    # ---- parts ----

    def _measure_rewrite(self) -> dict[str, Any]:
        samples: Samples = {}
        num_tokens: dict[Row, list[int]] = {}
        for index in self._rounds("rewrite"):
            whole, begun = self.tokens_of(rewriting(index), FENCE), self.tokens_of(*begun_rewriting(index + BEGUN))
            for name, prompt in (("rewrite", whole), ("begun rewrite", begun)):
                rows = (name, f"{name} again")
                (expected,) = self._answers([prompt], self.sizes.most_tokens)
                for label in in_turn(self.ways, index):
                    for row in self._rows_of(label, rows):
                        self._record_time(samples, row, label, self._ask(label, prompt, expected), index)
                for row in rows:
                    num_tokens.setdefault(row, []).append(len(expected))
                    self._note_repeats(row, [prompt], [expected])
        return self._summary(samples, num_tokens)

    def _measure_chat(self) -> dict[str, Any]:
        samples: Samples = {}
        counts = []
        for index in self._rounds("chat"):
            asked = [self.tokens_of(messages) for messages in questions(index, self.sizes.questions)]
            answers = self._answers(asked, self.sizes.answer)
            self._note_repeats("chat", asked, answers)
            for label in in_turn(self.ways, index):
                for prompt, expected in zip(asked, answers):
                    self._record_time(samples, "chat", label, self._ask(label, prompt, expected), index)
            counts.append(sum(map(len, answers)))
        return self._summary(samples, {"chat": counts})

    def _measure_agent(self) -> dict[str, Any]:
        samples: Samples = {}
        num_tokens: dict[Row, list[int]] = {"agent": [], "agent again": []}
        for index in self._rounds("agent"):
            prompts = [self.tokens_of(messages, FENCE) for messages in read_session(index)[: self.sizes.turns]]
            answers = self._answers(prompts, self.sizes.turn)
            for label in in_turn(self.ways, index):
                for row in self._rows_of(label, num_tokens):
                    for prompt, expected in zip(prompts, answers):
                        self._record_time(samples, row, label, self._ask(label, prompt, expected), index)
            for row, counts in num_tokens.items():
                counts.append(sum(map(len, answers)))
                self._note_repeats(row, prompts, answers)
        return self._summary(samples, num_tokens)

    def _record(self) -> None:
        """Plays the agent's session with this model, and writes its answers."""
        messages, answers = [{"role": "system", "content": SYSTEM}], []
        for text in session_texts(RECORDED_THING):
            messages.append({"role": "user", "content": text})
            (tokens,) = self._answers([self.tokens_of(messages, FENCE)], self.sizes.turn)
            answers.append(FENCE + self.tokenizer.decode(tokens, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answers[-1]})
            print(f"turn {len(answers)}: {len(tokens)} tokens", flush=True)
        recorded = {"model": self.model.stem, "thing": RECORDED_THING, "answers": answers}
        SESSION_FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")

    # ---- report ----

    def report(self) -> Iterable[str]:
        for part, found in self.found.items():
            lines = [[part, "tokens/s", "against off", "", "same tokens", "that repeat"]]
            for row, rates in found["tokens_per_second"].items():
                for label, rate in rates.items():
                    ratio = found["ratios"][row].get(label)
                    aim = AIMS.get((row, self.ways[label].source)) if self.ways[label].engine == OURS else None
                    lines.append(
                        [
                            f"  {row}, {label}",
                            format_spread(rate),
                            "" if ratio is None else format_spread(ratio, "×"),
                            "" if aim is None else f"aim: {aim}",
                            f"{format_number(100 * sum(found['same'][label]) / len(found['same'][label]))} %",
                            f"{format_number(100 * found['repeated'][row])} %" if ratio is None else "",
                        ]
                    )
            yield align(lines)


if __name__ == "__main__":
    sys.exit(SpeculationBenchmark().run())
