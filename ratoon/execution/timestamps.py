"""What Whisper's rules for timestamps need to know of a text, and what they let come next.

The rules are equal to those of transformers. The arithmetic is in layers/timestamps.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratoon.core.params import TimestampRules
from ratoon.execution.cells import take, to_device
from ratoon.layers.timestamps import TimestampMasks, keep_timestamp_rules

NO_LIMIT = sys.maxsize


class Bounds(NamedTuple):
    """The ids that may come next: text from `text_from` on, timestamps from `earliest` to `latest`."""

    text_from: int
    earliest: int
    latest: int


class TextSoFar(NamedTuple):
    """The generated tokens alone count. What comes before the first of them counts as a timestamp."""

    rules: TimestampRules
    last_is_timestamp: bool = True
    before_is_timestamp: bool = True  # the token before the last
    newest: int | None = None  # the last timestamp there is

    def after(self, token_id: int) -> TextSoFar:
        is_timestamp = token_id >= self.rules.first_token_id
        return TextSoFar(self.rules, is_timestamp, self.last_is_timestamp, token_id if is_timestamp else self.newest)

    def bounds(self) -> Bounds:
        first = self.rules.first_token_id
        if not self.last_is_timestamp:  # within a part
            return Bounds(0, first if self.newest is None else self.newest + 1, NO_LIMIT)
        if self.newest is None:  # no token yet
            index = self.rules.max_initial_index
            return Bounds(first, first, NO_LIMIT if index is None else first + index)
        if self.before_is_timestamp:  # a part begins, with text
            return Bounds(0, NO_LIMIT, NO_LIMIT)
        return Bounds(self.rules.end_token_id, self.newest, NO_LIMIT)  # it has ended: the next begins, or all ends


def keep_to_timestamp_rules(logits: torch.Tensor, rows: np.ndarray, texts: Sequence[TextSoFar]) -> None:
    """Forbid in these rows of logits, which are in rising order, what cannot come next in the text of each."""
    places_of: dict[TimestampRules, list[int]] = {}  # nearly always the same rules for all
    for place, text in enumerate(texts):
        places_of.setdefault(text.rules, []).append(place)
    for rules, places in places_of.items():
        members = rows[places]
        part = take(logits, members)
        masks = _masks(rules, [texts[place].bounds() for place in places], logits.shape[1], logits.device)
        keep_timestamp_rules(part, masks, rules.end_token_id)
        if part is not logits:
            logits[to_device(members, logits.device)] = part


def _masks(rules: TimestampRules, bounds: list[Bounds], vocab_size: int, device: torch.device) -> TimestampMasks:
    first, end = rules.first_token_id, rules.end_token_id
    words, endings = np.zeros((2, len(bounds)), np.float32)
    timestamps = np.zeros((len(bounds), vocab_size - first), np.float32)
    for row, (text_from, earliest, latest) in enumerate(bounds):
        words[row] = -np.inf if text_from > 0 else 0.0
        endings[row] = -np.inf if text_from > end else 0.0
        timestamps[row, : earliest - first] = -np.inf
        timestamps[row, latest - first + 1 :] = -np.inf
    return TimestampMasks(*(to_device(mask, device) for mask in (words, endings, timestamps)))
