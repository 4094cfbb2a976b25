"""The last token before the length limit is an end token (`forced_eos_token_id`), so that truncated texts end with
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.execution.inputs.cells import cells, to_device
from ratoon.execution.rules.base import LogitsRule, Reads, Stage
from ratoon.layers import sampling


@dataclass(frozen=True, slots=True)
class ForcedEnd(LogitsRule):
    token_ids: tuple[int, ...]
    num_left: int  # tokens left until the length limit

    stage = Stage.FORCE

    @property
    def reads(self) -> Reads:
        return Reads.LENGTH

    @property
    def is_active(self) -> bool:
        return self.num_left == 1

    def after(self, token_id: int) -> ForcedEnd | None:
        return ForcedEnd(self.token_ids, self.num_left - 1) if self.num_left > 1 else None

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[ForcedEnd]) -> None:
        """The forced tokens get 0, and no other token is possible."""
        forced = cells(logits, rows, [rule.token_ids for rule in rules])
        sampling.force_tokens(logits, to_device(rows, logits.device), *forced)
