"""Measures one grammar library by itself, in a process with an interpreter of its own. Reads a JSON object from
standard input, and writes one. Imports nothing of Ratoon.

    python libraries.py llguidance|xgrammar TOKENIZER.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer


class Matcher(Protocol):
    def fill(self) -> None: ...
    def consume(self, token: int) -> bool: ...
    def is_complete(self) -> bool: ...


class Llguidance:
    def __init__(self, path: str) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self.tokenizer = Tokenizer.from_file(path)
        self._library = LLTokenizer(Path(path).read_text(encoding="utf-8"))
        self._matcher = LLMatcher
        self.options = {"lenient": False, "coerce_one_of": False}

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        text = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=self.options)
        first = self._matcher(self._library, text, log_level=0)
        if first.is_error():
            raise ValueError(first.get_error().splitlines()[0])

        class Wrapped:
            def __init__(self) -> None:
                self._matcher = first.deep_copy()

            def fill(self) -> None:
                self._matcher.compute_bitmask()

            def consume(self, token: int) -> bool:
                return self._matcher.try_consume_tokens([token]) == 1

            def is_complete(self) -> bool:
                return self._matcher.is_accepting()

        return Wrapped


class Xgrammar:
    def __init__(self, path: str) -> None:
        import xgrammar

        self.tokenizer = Tokenizer.from_file(path)
        texts = [self.tokenizer.id_to_token(token) or "" for token in range(self.tokenizer.get_vocab_size())]
        info = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(texts), stop_token_ids=[len(texts) - 1]
        )
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, len(texts))

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        grammar = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        make, words = self._xgrammar.GrammarMatcher, self._words

        class Wrapped:
            def __init__(self) -> None:
                self._matcher = make(grammar, terminate_without_stop_token=True)

            def fill(self) -> None:
                self._matcher.fill_next_token_bitmask(words, 0)

            def consume(self, token: int) -> bool:
                return self._matcher.accept_token(token)

            def is_complete(self) -> bool:
                return self._matcher.is_terminated() or self._matcher.is_completed()

        return Wrapped


def measure_speed(library: Any, schemas: list[Any], values: list[str]) -> dict[str, Any]:
    """Compiling, and filling a mask before each token of a value."""
    compiling, filling, consuming = [], [], []
    for schema, value in zip(schemas, values, strict=True):
        begin = time.perf_counter()
        begin_text = library.compile(schema)
        compiling.append(time.perf_counter() - begin)
        matcher = begin_text()
        for token in library.tokenizer.encode(value, add_special_tokens=False).ids:
            begin = time.perf_counter()
            matcher.fill()
            filled = time.perf_counter()
            assert matcher.consume(token), (schema, value)
            filling.append(filled - begin)
            consuming.append(time.perf_counter() - filled)
    return {"compile": summary(compiling), "fill": summary(filling), "consume": summary(consuming)}


def measure_acceptance(library: Any, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Schemas that compile; of their values, valid ones that match and invalid ones that match nevertheless."""
    found = {"schemas": len(cases), "compiled": 0, "valid": 0, "valid_matched": 0, "invalid": 0, "invalid_matched": 0}
    refused: dict[str, int] = {}
    for case in cases:
        try:
            begin_text = library.compile(case["schema"])
        except Exception as error:
            reason = f"{case.get('keyword', '')}: {str(error).strip().splitlines()[0][:100]}"
            refused[reason] = refused.get(reason, 0) + 1
            continue
        found["compiled"] += 1
        for test in case.get("tests", ()):
            kind = "valid" if test["valid"] else "invalid"
            found[kind] += 1
            text = json.dumps(test["data"], ensure_ascii=False)
            found[f"{kind}_matched"] += matches(library, begin_text(), text)
    return {**found, "refused": refused}


def matches(library: Any, matcher: Matcher, text: str) -> bool:
    tokens = library.tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.consume(token) for token in tokens) and bool(matcher.is_complete())


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": statistics.median(ordered), "p99": at, "max": ordered[-1]}


def main() -> None:
    name, path = sys.argv[1:]
    asked = json.load(sys.stdin)
    begin = time.perf_counter()
    library = {"llguidance": Llguidance, "xgrammar": Xgrammar}[name](path)
    result: dict[str, Any] = {
        "vocabulary": time.perf_counter() - begin,
        "num_tokens": library.tokenizer.get_vocab_size(),
    }
    if asked.get("schemas"):
        result |= measure_speed(library, asked["schemas"], asked["values"])
    for kind in ("real", "suite"):
        if asked.get(kind):
            result[kind] = measure_acceptance(library, asked[kind])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
