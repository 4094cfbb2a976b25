"""The state of Whisper's timestamp rules for a text, and the tokens that they allow next.

The rules are equal to those of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ratoon.core.params import TimestampRules
from ratoon.execution.inputs.cells import take, to_device
from ratoon.execution.rules.base import LogitsRule, Reads, Stage

NO_LIMIT = sys.maxsize


class Bounds(NamedTuple):
    """The ids allowed next: text from `text_from` on, timestamps from `earliest` to `latest`."""

    text_from: int
    earliest: int
    latest: int


@dataclass(frozen=True, slots=True)
class Timestamps(LogitsRule):
    """Considers generated tokens only. The position before the first of them counts as a timestamp."""

    params: TimestampRules
    last_is_timestamp: bool = True
    before_is_timestamp: bool = True  # the token before the last
    newest: int | None = None  # the last timestamp

    stage = Stage.TIMESTAMPS

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> Timestamps:
        is_timestamp = token_id >= self.params.first_token_id
        return Timestamps(self.params, is_timestamp, self.last_is_timestamp, token_id if is_timestamp else self.newest)

    def bounds(self) -> Bounds:
        first = self.params.first_token_id
        if not self.last_is_timestamp:  # within a segment
            return Bounds(0, first if self.newest is None else self.newest + 1, NO_LIMIT)
        if self.newest is None:  # no token yet
            index = self.params.max_initial_index
            return Bounds(first, first, NO_LIMIT if index is None else first + index)
        if self.before_is_timestamp:  # a segment begins, with text
            return Bounds(0, NO_LIMIT, NO_LIMIT)
        return Bounds(self.params.end_token_id, self.newest, NO_LIMIT)  # it has ended: a timestamp, or the end

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[Timestamps]) -> None:
        places_of: dict[TimestampRules, list[int]] = {}  # usually one entry
        for place, rule in enumerate(rules):
            places_of.setdefault(rule.params, []).append(place)
        for params, places in places_of.items():
            members = rows[places]
            part = take(logits, members)
            masks = _masks(params, [rules[place].bounds() for place in places], logits.shape[1], logits.device)
            keep_timestamp_rules(part, masks, params.end_token_id)
            if part is not logits:
                logits[to_device(members, logits.device)] = part


def _masks(params: TimestampRules, bounds: list[Bounds], vocab_size: int, device: torch.device) -> TimestampMasks:
    first, end = params.first_token_id, params.end_token_id
    words, endings = np.zeros((2, len(bounds)), np.float32)
    timestamps = np.zeros((len(bounds), vocab_size - first), np.float32)
    for row, (text_from, earliest, latest) in enumerate(bounds):
        words[row] = -np.inf if text_from > 0 else 0.0
        endings[row] = -np.inf if text_from > end else 0.0
        timestamps[row, : earliest - first] = -np.inf
        timestamps[row, latest - first + 1 :] = -np.inf
    return TimestampMasks(*(to_device(mask, device) for mask in (words, endings, timestamps)))


class TimestampMasks(NamedTuple):
    """Added to logits: 0 for tokens allowed next, -inf for others. (On a CPU an addition is several times faster than a
    mask over that many columns.) T is the number of timestamps, the last ids of the vocabulary."""

    words: torch.Tensor  # [R] float32: ids below the end token
    endings: torch.Tensor  # [R] float32: the end token and all ids from there to the timestamps
    timestamps: torch.Tensor  # [R, T] float32


def keep_timestamp_rules(logits: torch.Tensor, masks: TimestampMasks, end_token: int) -> None:
    """Mask logits [R, V] in place by `masks`, and all other tokens where timestamps together are more probable than any
    other token."""
    first_timestamp = logits.shape[1] - masks.timestamps.shape[1]
    words, endings = logits[:, :end_token], logits[:, end_token:first_timestamp]
    timestamps = logits[:, first_timestamp:].add_(masks.timestamps)
    best_other = torch.maximum(words.amax(dim=-1).add_(masks.words), endings.amax(dim=-1).add_(masks.endings))
    together = (timestamps - best_other[:, None]).exp_().sum(dim=-1)  # [R] how many times as probable
    forced = torch.where(together > 1, -torch.inf, 0.0)
    for columns, mask in ((words, forced + masks.words), (endings, forced + masks.endings)):
        if mask.device.type != "cpu" or mask.any():  # on other devices the check would synchronise
            columns.add_(mask[:, None])
