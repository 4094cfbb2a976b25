"""Where a grammar begins behind a marker ("</think>"): tokens that hold the end of the marker and the beginning of what
follows it.

What follows the marker inside of such a token must match the grammar's beginning, or the token is not possible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ratoon.execution.grammar.interface import GrammarLibrary, GrammarState


class Marker:
    """A marker, and the tokens of a vocabulary that may complete it with more text behind it."""

    def __init__(self, text: bytes, library: GrammarLibrary) -> None:
        self.text = text
        self._library = library
        # By the number of the marker's bytes that come before the token: the token, and its text behind the marker
        self._completing: dict[int, list[tuple[int, bytes]]] = {}
        last = text[-1:]
        for token_id, own in enumerate(library.all_token_bytes()):
            if last not in own or library.is_special(token_id):
                continue
            for num_before in range(len(text)):
                rest = self._rest_behind(own, num_before)
                if rest:
                    self._completing.setdefault(num_before, []).append((token_id, rest))

    def _rest_behind(self, own: bytes, num_before: int) -> bytes:
        """The text of a token behind a marker that so many bytes were there of; empty, if there is none."""
        found = (self.text[:num_before] + own).find(self.text)
        return b"" if found < 0 else (self.text[:num_before] + own)[found + len(self.text) :]

    def tail(self, text: bytes) -> bytes:
        """What matters of a text without the marker: as much of its end as a marker could begin with."""
        return text[max(0, len(text) - len(self.text) + 1) :]

    def split(self, text: bytes) -> bytes | None:
        """What stands behind the first marker in a text. None: it has none."""
        _, found, rest = text.partition(self.text)
        return rest if found else None

    def begun(self, begin: Callable[[], GrammarState], rest: bytes) -> GrammarState | None:
        """The grammar's state behind its first text. None: the grammar does not allow it."""
        state = begin()
        if not rest:
            return state
        tokens = self._library.tokenize(rest, True)
        return state if all(state.consume(token) for token in tokens) else None

    def forbidden_after(self, tail: bytes, begin: Callable[[], GrammarState]) -> list[int]:
        """The tokens that would complete the marker and go on with text that the grammar does not allow."""
        found: list[int] = []
        allowed: dict[bytes, bool] = {}
        for num_before, completing in self._completing.items():
            if not tail.endswith(self.text[:num_before]):
                continue
            for token_id, rest in completing:
                if rest not in allowed:
                    allowed[rest] = self.begun(begin, rest) is not None
                if not allowed[rest]:
                    found.append(token_id)
        return found


@lru_cache(64)
def marker_of(text: str, library: GrammarLibrary) -> Marker:
    return Marker(text.encode(), library)
