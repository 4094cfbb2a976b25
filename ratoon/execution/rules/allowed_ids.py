"""Only these tokens may be generated (`allowed_token_ids`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.execution.inputs.cells import cells, to_device
from ratoon.execution.rules.base import LogitsRule, Stage
from ratoon.layers import sampling


@dataclass(frozen=True, slots=True)
class AllowedIds(LogitsRule):
    token_ids: np.ndarray  # int64, each once

    stage = Stage.ALLOW

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[AllowedIds]) -> None:
        allowed = cells(logits, rows, [rule.token_ids for rule in rules])
        sampling.allow_only(logits, to_device(rows, logits.device), *allowed)
