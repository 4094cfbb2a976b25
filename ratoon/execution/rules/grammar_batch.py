"""The grammars of a step's rows, which go on and write their masks together, by one call of the library a step.

For a device that samples while the host is a step ahead: what is the same from step to step is kept, and nothing is
done for each row in Python.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ratoon.execution.grammar.interface import GrammarLibrary, Match
from ratoon.execution.rules.grammar import Grammar
from ratoon.execution.rules.mask_filler import SECONDS_OF_EACH, SECONDS_OF_MANY


class GrammarBatch:
    """Rules of trusted grammars, each the only one of its text, and none with a problem. They move on themselves and
    keep no masks; until `settle` they do not know how far they are."""

    def __init__(self, grammars: Sequence[Grammar], library: GrammarLibrary) -> None:
        self.grammars = list(grammars)
        self._states = [grammar.newest_state() for grammar in grammars]
        self._library = library
        self._num_moved = 0
        self.is_doubted = False  # a step took long: its grammars are to be measured again
        ends_of_rows = [grammar.ends for grammar in grammars]
        self._places_of_ends = {
            ends: np.array([place for place, each in enumerate(ends_of_rows) if each is ends])
            for ends in set(ends_of_rows)
        }
        self._end_ids = np.array(sorted(set().union(*(ends.token_ids for ends in ends_of_rows))), np.int64)

    def has_end(self, token_ids: np.ndarray) -> bool:
        """Whether one of these tokens ends a text, or may."""
        return bool(np.isin(token_ids, self._end_ids).any())

    def match(self, token_ids: np.ndarray | None, table: np.ndarray, rows: np.ndarray) -> list[int]:
        """Go on by one token each, none of which ends its text, and write the masks to these rows of a table [R, W]
        int32. None: the masks alone. Returns the places of texts that can't go on: their masks are empty, and they are
        no longer to be used."""
        start = time.perf_counter()
        tokens = np.full(len(self._states), -1) if token_ids is None else token_ids
        found = self._library.match(self._states, tokens, table, rows)
        for ends, places in self._places_of_ends.items():
            ends.set_in_rows(table, rows[places], (found[places] & Match.ACCEPTING) != 0)
        if token_ids is not None:
            self._num_moved += 1
        if time.perf_counter() - start > SECONDS_OF_MANY + SECONDS_OF_EACH * len(self._states):
            self.is_doubted = True
            for grammar in self.grammars:
                grammar.cost.doubt()
        stuck = np.flatnonzero(found & (Match.REFUSED | Match.FAILED))
        table[rows[stuck]] = 0
        return stuck.tolist()

    def settle(self) -> None:
        """Tell the rules how far they are."""
        for grammar in self.grammars if self._num_moved else ():
            grammar.note_moved(self._num_moved)
        self._num_moved = 0
