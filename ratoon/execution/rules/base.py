"""What every rule over tokens is, all rules of one row together, and what they leave possible in a batch of logits.

A rule is a value: `after(token)` is another one, so that forks, beams and replayed branches share and rebuild it from
tokens alone. Which rules a request asks for is decided in rules/build.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ratoon.execution.cells import cells, to_device
from ratoon.execution.timestamps import TextSoFar


class TokenRule(Protocol):
    """Over one sequence. Each method takes time that does not grow with the sequence."""

    def after(self, token_id: int) -> TokenRule:
        """The rule once this token has been added."""
        ...

    def forbidden(self) -> Sequence[int]:
        """Tokens that may not come next."""
        ...

    def forced(self) -> Sequence[int]:
        """The only tokens that may come next; empty: any that no rule forbids. It goes before what is forbidden."""
        ...


class Verdict(NamedTuple):
    """What the rules of one row say about its next token."""

    forbidden: Sequence[int] = ()
    forced: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.forbidden or self.forced)


NO_VERDICT = Verdict()


class RowRules(NamedTuple):
    """All rules of one row that look at its tokens. Whisper's timestamps weigh logits, and are kept apart."""

    rules: tuple[TokenRule, ...] = ()
    text: TextSoFar | None = None

    def after(self, token_id: int) -> RowRules:
        text = None if self.text is None else self.text.after(token_id)
        return RowRules(tuple([rule.after(token_id) for rule in self.rules]), text)

    def after_all(self, token_ids: Iterable[int]) -> RowRules:
        return reduce(RowRules.after, token_ids, self)

    def verdict(self) -> Verdict:
        forbidden: list[int] = []
        for rule in self.rules:
            forced = rule.forced()
            if forced:
                return Verdict(forced=forced)
            forbidden += rule.forbidden()
        return Verdict(forbidden) if forbidden else NO_VERDICT


def forbid(logits: torch.Tensor, rows: np.ndarray, verdicts: Sequence[Verdict]) -> None:
    """Set what is forbidden in these rows of logits [R, V] to -inf, in place."""
    places = [place for place, verdict in enumerate(verdicts) if verdict.forbidden]
    if places:
        row_ids, token_ids = cells(logits, rows[places], [verdicts[place].forbidden for place in places])
        logits[row_ids, token_ids] = -torch.inf


def force(logits: torch.Tensor, rows: np.ndarray, verdicts: Sequence[Verdict]) -> torch.Tensor | None:
    """Leave only the forced tokens in the rows that have some, with 0. Returns which rows these are."""
    places = [place for place, verdict in enumerate(verdicts) if verdict.forced]
    if not places:
        return None
    forced_rows = to_device(rows[places], logits.device)
    row_ids, token_ids = cells(logits, rows[places], [verdicts[place].forced for place in places])
    logits[forced_rows] = -torch.inf
    logits[row_ids, token_ids] = 0.0
    return forced_rows
