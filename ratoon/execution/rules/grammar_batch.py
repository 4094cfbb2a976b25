"""The grammars of a step's rows, which go on and write their masks together, by one call of the library a step.

For a device that samples while the host is a step ahead: what is the same from step to step is kept, and next to
nothing is done in Python for a row whose next token is not forced.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ratoon.execution.grammar.forced_text import forced_tokens
from ratoon.execution.grammar.interface import GrammarLibrary, Match, words_of
from ratoon.execution.rules.grammar import Grammar
from ratoon.execution.rules.mask_filler import SECONDS_OF_EACH, SECONDS_OF_MANY


class GrammarBatch:
    """Rules of trusted grammars, each the only one of its text, and none with a problem. They move on themselves and
    keep no masks; until `settle` they do not know how far they are."""

    def __init__(self, grammars: Sequence[Grammar], library: GrammarLibrary) -> None:
        self.grammars = list(grammars)
        self._states = [grammar.newest_state() for grammar in grammars]
        self._library = library
        self._num_moved = np.zeros(len(self._states), np.int64)
        self.forced: dict[int, list[int]] = {}  # by place: the tokens that must follow, where there is no choice
        self.is_doubted = False  # a step took long: its grammars are to be measured again
        ends_of_rows = [grammar.ends for grammar in grammars]
        self._places_of_ends = {
            ends: np.array([place for place, each in enumerate(ends_of_rows) if each is ends])
            for ends in set(ends_of_rows)
        }
        self._end_ids = frozenset().union(*(ends.token_ids for ends in ends_of_rows))

    def has_end(self, token_ids: np.ndarray) -> bool:
        """Whether one of these tokens ends a text, or may."""
        return not self._end_ids.isdisjoint(token_ids.tolist())

    def match(
        self,
        token_ids: np.ndarray | None,
        table: np.ndarray,
        rows: np.ndarray,
        told: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Go on by one token each, none of which ends its text, and write the masks to these rows of a table [R, W]
        int32. None: the masks alone. `told`: by place, tokens that follow it and were forced. Returns the places of
        texts that can't go on: their masks are empty, and they are no longer to be used."""
        start = time.perf_counter()
        tokens = np.full(len(self._states), -1) if token_ids is None else token_ids.copy()
        forced, stuck = self._follow_runs(tokens, told or {}) if self.forced or told else ({}, [])
        if forced or stuck:
            places = np.delete(np.arange(len(self._states)), [*forced, *stuck])
            found = np.zeros(len(self._states), np.uint8)
            states = [self._states[place] for place in places]
            found[places] = self._library.match(states, tokens[places], table, rows[places])
        else:
            found = self._library.match(self._states, tokens, table, rows)
        stuck += (found & (Match.REFUSED | Match.FAILED)).nonzero()[0].tolist()
        if self._library.finds_forced_text:
            self._find_forced((found & Match.ALIKE).nonzero()[0], table, rows, forced)
        for ends, members in self._places_of_ends.items():
            ends.set_in_rows(table, rows[members], (found[members] & Match.ACCEPTING) != 0)
        if forced or stuck:
            table[rows[[*forced, *stuck]]] = 0
        for place, run in forced.items():
            table.view(np.uint32)[rows[place], run[0] // 32] = 1 << run[0] % 32
        self.forced = forced
        if token_ids is not None:
            self._num_moved += 1
        if time.perf_counter() - start > SECONDS_OF_MANY + SECONDS_OF_EACH * len(self._states):
            self.is_doubted = True
            for grammar in self.grammars:
                grammar.cost.doubt()
        return stuck

    def _follow_runs(
        self, tokens: np.ndarray, told: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, list[int]], list[int]]:
        """Go on by tokens that were forced, in texts of which more than one is known. Returns by place what is still to
        follow, and the places of texts that can't go on; of the others the last token is left, in `tokens`."""
        forced: dict[int, list[int]] = {}
        stuck: list[int] = []
        for place in {*self.forced, *told}:
            run = [int(tokens[place]), *told.get(place, ())]
            left = self.forced.get(place, [])[len(run) :]
            state = self._states[place]
            if not all(state.consume(token_id) for token_id in (run if left else run[:-1])):
                stuck.append(place)
            elif left:
                forced[place] = left
            tokens[place] = run[-1]
            self._num_moved[place] += len(run) - 1
        return forced, stuck

    def _find_forced(
        self, places: np.ndarray, table: np.ndarray, rows: np.ndarray, forced: dict[int, list[int]]
    ) -> None:
        """Find the tokens that must follow these texts, by their masks without ends."""
        if not len(places):
            return
        num_words = words_of(self._library.vocab_size)
        masks = [table[row, :num_words] for row in rows[places]]
        runs = forced_tokens([self._states[place] for place in places], masks, self._library)
        for place, run in zip(places.tolist(), runs):
            cut = self.grammars[place].ends.cut(run, None)
            if cut:
                forced[place] = cut

    def settle(self) -> None:
        """Tell the rules how far they are."""
        for grammar, num_moved in zip(self.grammars, self._num_moved.tolist()):
            if num_moved:
                grammar.note_moved(num_moved)
        self._num_moved[:] = 0
