"""What the engine needs of a grammar library. llguidance_library.py implements it; another library would do so too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ratoon.core.structured import StructuredOutput


class GrammarState(Protocol):
    """A place in a grammar: what was consumed so far. It changes; `copy` gives another one."""

    def copy(self) -> GrammarState: ...

    def consume(self, token_id: int) -> bool:
        """Go on by this token. False: the grammar forbids it, and the state is as before, or it exceeds a limit
        (`error`)."""
        ...

    def rewind(self, num_tokens: int) -> None:
        """Back to the state before the last tokens."""
        ...

    def fill(self, words: np.ndarray) -> None:
        """Set the bits of the tokens that may follow in `words` [words_of(vocab_size)] int32, and clear all others; the
        lowest bit of the first word is token 0. Releases Python's lock. An end of the text has no bit: see
        `is_accepting`."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def error(self) -> str | None:
        """Why the state can't be used: a limit of the library."""
        ...


class Match:
    """What `GrammarLibrary.match` says of a state, as bits. The names are those of kernels.h."""

    ACCEPTING = 1  # the text may end here
    REFUSED = 2  # the grammar forbids its token
    FAILED = 4  # its mask could not be filled
    # It may not end here, and the tokens that may follow are few (forced_text.MAX_TOKENS) and begin alike. A library
    # that does not look says so of all texts that may not end.
    ALIKE = 8


class CompiledGrammar(Protocol):
    num_bytes: int  # of memory, estimated
    cost: GrammarCost

    def begin(self) -> GrammarState: ...


class GrammarLibrary(Protocol):
    """A grammar library with the vocabulary of a model. To be used from any thread."""

    vocab_size: int
    finds_forced_text: bool  # whether text without an alternative is looked for, and gets the tokenizer's tokens

    def __hash__(self) -> int: ...

    def masks(self, states: Sequence[Any]) -> np.ndarray:
        """What `fill` sets, for several states of this library in one call: [N, words_of(vocab_size)] int32. Releases
        Python's lock once for all of them."""
        ...

    @property
    def num_words(self) -> int:
        """Returns the number of words in a row of the table that `match` writes: at least words_of(vocab_size)."""
        ...

    def match(self, states: Sequence[Any], token_ids: np.ndarray, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Go on by a token in each of several states of this library, unless that is below 0, and write what `fill`
        sets to rows of a table [R, num_words] int32, which is contiguous. Returns the bits of Match for each: [N]
        uint8. Releases Python's lock. A state that was refused or has failed can't be used any more; its `error` says
        why."""
        ...

    def compile(self, asked: StructuredOutput) -> CompiledGrammar:
        """RequestError: it can't be compiled. The subject is the field's name."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a token, in UTF-8; for a special token, its name."""
        ...

    def all_token_bytes(self) -> Sequence[bytes]:
        """Returns `token_bytes` of all tokens of the model. The first call takes some tenths of a second."""
        ...

    def is_special(self, token_id: int) -> bool: ...

    def tokenize(self, text: bytes, is_whole: bool) -> list[int]:
        """The tokens that the tokenizer makes of a text. If more may follow (not `is_whole`), those that no
        continuation changes."""
        ...


class GrammarCost:
    """What it has taken to fill masks of a grammar so far, in seconds of processor time. All texts of a grammar share
    it, as they share what the library computes. A new grammar is measured mask by mask, a trusted one is not."""

    __slots__ = ("is_slow", "num_fast", "num_slow", "seconds")

    def __init__(self) -> None:
        self.is_slow = False
        self.num_fast = 0  # masks in a row that were fast
        self.num_slow = 0  # masks that were slow, less one for each that was not
        self.seconds = 0.0  # of all masks that were measured

    @property
    def is_trusted(self) -> bool:
        return self.num_fast >= NUM_FAST_OF_TRUSTED and not self.is_slow

    def note(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_fast = self.num_fast + 1 if seconds < FAST_SECONDS else 0
        if seconds >= SLOW_SECONDS:
            self.num_slow += 1
            self.is_slow = self.is_slow or self.num_slow >= NUM_SLOW_OF_SLOW  # some may be the machine's fault
        elif not self.is_slow:
            self.num_slow = max(0, self.num_slow - 1)
        elif self.num_fast >= NUM_FAST_OF_SLOW:
            self.is_slow, self.num_slow = False, 0

    def doubt(self) -> None:
        """Measure it again: it was among masks that together took long."""
        self.num_fast = min(self.num_fast, 0)


FAST_SECONDS = 0.001
SLOW_SECONDS = 0.003
NUM_FAST_OF_TRUSTED = 4
NUM_SLOW_OF_SLOW = 3
NUM_FAST_OF_SLOW = 32  # as many again, before one that was slow is measured among the others


def words_of(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)
