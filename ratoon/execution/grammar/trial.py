"""Tries a grammar out before a request with it is queued: compiles it, and walks along a few texts that match.

What fails with the first tokens, or takes too long for them, is refused here. Meant for a process of its own, which is
ended where it exceeds limits of the system.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection

import numpy as np

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import CompiledGrammar, GrammarLibrary, GrammarState, words_of

NUM_WALKS = 2
MAX_STEPS = 12  # tokens of a walk
MAX_WALK_SECONDS = 0.5  # of processor time, for all walks together
MAX_STEP_SECONDS = 0.1  # of processor time, for the mask of one token

SMALLER = "a smaller one, with fewer repetitions and alternatives within each other"


class NoTokenError(Exception):
    """The grammar allows no token at this place, and the text may not end there."""


class Tried:
    """A grammar that was tried out."""

    def __init__(self, compiled: CompiledGrammar, compile_seconds: float) -> None:
        self._compiled: CompiledGrammar | None = compiled
        self.compile_seconds = compile_seconds  # of processor time

    def free(self) -> None:
        """Its memory can be measured until then."""
        self._compiled = None


def try_out(
    library: GrammarLibrary,
    asked: StructuredOutput,
    ends: Collection[int],
    clock: Callable[[], float] = time.process_time,
) -> Tried:
    """RequestError: it can't be compiled, or can't be matched within limits. `ends`: tokens that end a text."""
    field = asked.kind or ""
    start = clock()
    compiled = library.compile(asked)
    tried = Tried(compiled, clock() - start)
    walks = _Walks(library.vocab_size, field, ends, clock)
    num_dead = 0
    for seed in range(NUM_WALKS):
        try:
            walks.walk(compiled.begin(), random.Random(seed))
        except NoTokenError as error:
            num_dead += 1
            if num_dead == NUM_WALKS:
                raise RequestError(field, str(error), "rules that describe a text which tokens can write") from None
    return tried


class _Walks:
    def __init__(self, vocab_size: int, field: str, ends: Collection[int], clock: Callable[[], float]) -> None:
        self._vocab_size = vocab_size
        self._field = field
        self._kept = _mask_without(ends, vocab_size)
        self._clock = clock
        self._seconds = 0.0

    def walk(self, state: GrammarState, choose: random.Random) -> None:
        for num_tokens in range(MAX_STEPS):
            if self._seconds > MAX_WALK_SECONDS:
                return
            words = self._allowed(state)
            some = np.flatnonzero(words)
            if not len(some):
                if state.is_accepting:
                    return
                place = "at its beginning" if num_tokens == 0 else f"after {num_tokens} tokens"
                raise NoTokenError(f"allows no token of the model {place}")
            word = int(some[choose.randrange(len(some))])
            if not state.consume(32 * word + choose.choice(_bits_of(int(words[word])))):
                raise self._refusal(state)

    def _allowed(self, state: GrammarState) -> np.ndarray:
        """A mask of the tokens that may follow, without those that end a text."""
        words = np.empty(words_of(self._vocab_size), np.int32)
        start = self._clock()
        state.fill(words)
        seconds = self._clock() - start
        self._seconds += seconds
        if state.error is not None and not state.is_accepting and not _is_dead_end(state.error):
            raise self._refusal(state)
        if seconds > MAX_STEP_SECONDS:
            problem = f"takes {seconds * 1000:.0f} ms to match one token, which may take {MAX_STEP_SECONDS * 1000:.0f}"
            raise RequestError(self._field, problem, SMALLER)
        words &= self._kept
        return words

    def _refusal(self, state: GrammarState) -> RequestError:
        return RequestError(self._field, state.error or "a token is forbidden that was allowed", SMALLER)


def _mask_without(tokens: Collection[int], vocab_size: int) -> np.ndarray:
    """The bits of all tokens but these: [words_of(vocab_size)] int32."""
    bits = np.zeros(32 * words_of(vocab_size), np.uint8)
    bits[:vocab_size] = 1
    bits[[token for token in tokens if token < vocab_size]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bits_of(word: int) -> list[int]:
    return [bit for bit in range(32) if word >> bit & 1]


def _is_dead_end(error: str) -> bool:
    """Whether the library says that nothing can follow, rather than that a limit is exceeded."""
    return error.startswith("NoExtension")
