"""Whisper's rules for timestamps over a batch of logits, as a pure tensor function: no state, no requests.

What may come next in the text of each row is known to execution/rules/timestamps.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class TimestampMasks(NamedTuple):
    """What may come next, as a sum of logits and 0, or -inf where it may not. (On a CPU a sum is several times faster
    than a mask over that many columns.) T is the number of timestamps, the last ids of the vocabulary."""

    words: Tensor  # [R] float32: ids below the end token
    endings: Tensor  # [R] float32: the end token and all that follow it up to the timestamps
    timestamps: Tensor  # [R, T] float32


def keep_timestamp_rules(logits: Tensor, masks: TimestampMasks, end_token: int) -> None:
    """Forbid in logits [R, V], in place, what the masks say, and all that is no timestamp where timestamps together are
    more probable than any other token."""
    first_timestamp = logits.shape[1] - masks.timestamps.shape[1]
    words, endings = logits[:, :end_token], logits[:, end_token:first_timestamp]
    timestamps = logits[:, first_timestamp:].add_(masks.timestamps)
    best_other = torch.maximum(words.amax(dim=-1).add_(masks.words), endings.amax(dim=-1).add_(masks.endings))
    together = (timestamps - best_other[:, None]).exp_().sum(dim=-1)  # [R] how many times as probable
    forced = torch.where(together > 1, -torch.inf, 0.0)
    for columns, mask in ((words, forced + masks.words), (endings, forced + masks.endings)):
        if mask.device.type != "cpu" or mask.any():  # elsewhere to ask would be to wait
            columns.add_(mask[:, None])
