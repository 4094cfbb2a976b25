"""Drafts for rejection sampling: drawn from the distribution of the model or head that drafts, which is kept on the
device until they are checked.

A draft that is drawn from q and checked against p is accepted with the probability sum(min(p, q)), the most that any
draft can have. That needs q as it was when the draft was drawn, so it is found by the branch and the number of its
tokens; a draft whose q is gone is checked against an independent draw, which is right for any draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.sampling.sampler import Sampler

Tensor = torch.Tensor


class KeptDrafts(NamedTuple):
    num_tokens: int  # that the branch had
    distributions: list[Tensor]  # [V] of each draft; none: the drafts were the likeliest tokens, and certain


class DrawnDrafts:
    """Draws drafts behind a step, and returns their distributions to the reader that checks them."""

    def __init__(self, branches: InputBatch, sampler: Sampler) -> None:
        self._branches = branches
        self._sampler = sampler
        self._kept: dict[str, KeptDrafts] = {}  # by branch: rows of tensors that passes have left

    def begin(self) -> None:
        """Forgets branches that are gone."""
        for req_id in self._kept.keys() - self._branches.row_of.keys():
            del self._kept[req_id]

    def draw(self, logits: Tensor, ids: Sequence[str], rows: np.ndarray, number: int) -> Tensor:
        """Returns draft `number` of each of these branches [D] by logits [D, V]; -1: they can't be used."""
        branches = self._branches
        num_tokens = branches.num_tokens[rows]
        drawn = self._sampler.draw_drafts(logits, rows, branches.seeds[rows], num_tokens + number)
        for place, req_id in enumerate(ids):
            if number == 0:
                self._kept[req_id] = KeptDrafts(int(num_tokens[place]), [])
            if drawn.is_drawn[place]:
                self._kept[req_id].distributions.append(drawn.distributions[place])
        return drawn.token_ids

    def take(self, req_id: str, num_tokens: int) -> list[Tensor] | None:
        """Returns the distributions of drafts behind so many tokens of a branch; empty: the drafts were certain. None:
        it is not known how they came about."""
        kept = self._kept.pop(req_id, None)
        return kept.distributions if kept is not None and kept.num_tokens == num_tokens else None
