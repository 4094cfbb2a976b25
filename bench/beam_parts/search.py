"""Whole beam searches by Ratoon and its peers, after a prompt that is new to them, and after one that they know.

Known is what an engine can keep of an earlier request: a lease (Ratoon), the prefix cache (vLLM), a static prompt
(CTranslate2). transformers keeps nothing.
"""

from __future__ import annotations

from typing import Any

from cpu_peers import OURS, format_spread, spread
from peers.process import CallResult, EngineFailedError, EngineProcess
from workloads import PromptSource

from beam_parts.sizes import Say, Sizes

Engines = dict[str, EngineProcess]
KEEPING = (OURS, "vllm", "ctranslate2")
COLD, KNOWN = "cold", "known"
# Ratio: our time and theirs, what it says, and what is aimed at with each peer.
RATIOS = {
    "cold": (COLD, COLD, "new prompt, both", {"vllm": 4.0, "ctranslate2": 1.8, "transformers": 15.0}),
    "leased": (KNOWN, COLD, "leased parent against new prompt", {"vllm": 20.0, "ctranslate2": 8.0}),
    "known": (KNOWN, KNOWN, "leased parent against what it keeps", {}),
}


class SearchComparison:
    def __init__(self, engines: Engines, source: PromptSource, sizes: Sizes, say: Say) -> None:
        self._engines = engines
        self._source = source
        self._sizes = sizes
        self._say = say
        self._search = {"width": sizes.width, "num_tokens": sizes.tokens}
        self.samples: dict[str, dict[str, list[float]]] = {COLD: {}, KNOWN: {}}
        self.same_beams: dict[str, list[float]] = {}  # engine → share of beams that are also Ratoon's, for each search
        self.foreign_shares: list[float] = []

    def measure(self, rounds: int) -> dict[str, Any]:
        self._warm_up()
        for index in range(rounds):
            names = [*self._engines][index % len(self._engines) :] + [*self._engines][: index % len(self._engines)]
            self._say(f"search, round {index + 1}/{rounds}: new prompt")
            self._cold_round(names)
            self._say(f"search, round {index + 1}/{rounds}: known prompt")
            self._known_round([name for name in names if name in KEEPING])
        return {
            "samples": self.samples,
            "seconds": {
                kind: {name: spread(values) for name, values in by_engine.items()}
                for kind, by_engine in self.samples.items()
            },
            "ratios": self._ratios(),
            "same_beams": self.same_beams,
        }

    def _warm_up(self) -> None:
        """The shapes of the search once, in every engine, after a short prompt."""
        for name, engine in self._engines.items():
            self._say(f"search, warm-up: {name}")
            engine.call("beam_search", prompt=self._source.prompt(self._sizes.suffix), **self._search)

    def _cold_round(self, names: list[str]) -> None:
        prompt = self._source.prompt(self._sizes.before)
        found = {name: self._engines[name].call("beam_search", prompt=prompt, **self._search) for name in names}
        self._record(COLD, found)

    def _known_round(self, names: list[str]) -> None:
        prompt = self._source.prompt(self._sizes.before - 1)
        known = self._engines[OURS].call("prepare", prompt=prompt).value  # and a token more, which it generates
        suffix = self._source.prompt(self._sizes.suffix)
        found = {}
        for name in names:
            self._engines[name].call("prepare", prompt=prompt if name == OURS else known)
            found[name] = self._engines[name].call("search_behind", suffix=suffix, **self._search)
        self._record(KNOWN, found)

    def _record(self, kind: str, found: dict[str, CallResult]) -> None:
        ours = {tuple(tokens) for tokens in found[OURS].value["token_ids"]}
        for name, result in found.items():
            beams = {tuple(tokens) for tokens in result.value["token_ids"]}
            if len(beams) != self._sizes.width or {len(beam) for beam in beams} != {self._sizes.tokens}:
                raise EngineFailedError(f"{name} found {len(beams)} beams, not {self._sizes.width} of the full length")
            self.samples[kind].setdefault(name, []).append(result.seconds)
            if name != OURS:
                self.same_beams.setdefault(name, []).append(len(beams & ours) / len(ours))
            if result.foreign_share is not None:
                self.foreign_shares.append(result.foreign_share)

    def _ratios(self) -> dict[str, dict[str, dict[str, float]]]:
        """How many times faster we are, round by round."""
        return {
            key: {
                name: spread([their / our for our, their in zip(self.samples[ours][OURS], values)])
                for name, values in self.samples[theirs].items()
                if name != OURS
            }
            for key, (ours, theirs, _, _) in RATIOS.items()
        }


def format_table(result: dict[str, Any], sizes: Sizes) -> str:
    labels = {COLD: "new prompt", KNOWN: "known before"}
    engines = list(result["seconds"][COLD])
    rows = [[f"Beams {sizes.width} × {sizes.tokens} after {sizes.before} tokens, s", *engines]]
    for kind, label in labels.items():
        seconds = result["seconds"][kind]
        rows.append([f"  {label}", *(format_spread(seconds[name]) if name in seconds else "-" for name in engines)])
    for key, (_, _, label, aims) in RATIOS.items():
        ratios = result["ratios"][key]
        cells = [
            format_spread(ratios[name], "×") + (f", aim {aims[name]:g}×" if name in aims else "")
            if name in ratios
            else "-"
            for name in engines
        ]
        if set(cells) != {"-"}:
            rows.append([f"  {label}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for name, shares in result["same_beams"].items():
        lines.append(f"  Beams that are also Ratoon's, {name}: {sum(shares) / len(shares):.1%}")
    return "\n".join(lines)
