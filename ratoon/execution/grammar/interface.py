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
        """Go on by this token. False: the grammar forbids it, and the state is as before."""
        ...

    def rewind(self, num_tokens: int) -> None:
        """Back to the state before the last tokens."""
        ...

    def fill(self, words: np.ndarray) -> None:
        """Set the bits of the tokens that may follow in `words` [words_of(vocab_size)] int32, and clear all others; the
        lowest bit of the first word is token 0. Releases Python's lock. An end of the text has no bit: see
        `is_accepting`."""
        ...

    def forced_token(self) -> int | None:
        """The one token that may follow, where the library finds it without a mask: None says nothing. There is none
        where the text may end. Takes a microsecond or two."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here, and nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the state can't be used: a limit of the library."""
        ...


class CompiledGrammar(Protocol):
    num_bytes: int  # of memory, estimated

    def begin(self) -> GrammarState: ...


class GrammarLibrary(Protocol):
    """A grammar library with the vocabulary of a model. To be used from any thread."""

    vocab_size: int

    def masks(self, states: Sequence[Any]) -> np.ndarray:
        """What `fill` sets, for several states of this library in one call: [N, words_of(vocab_size)] int32. Releases
        Python's lock once for all of them."""
        ...

    def compile(self, asked: StructuredOutput) -> CompiledGrammar:
        """RequestError: it can't be compiled. The subject is the field's name."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a token, in UTF-8; for a special token, its name."""
        ...


def words_of(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)
