"""Values added to the logits of some tokens (`logit_bias`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.execution.inputs.cells import cells
from ratoon.execution.rules.base import LogitsRule, Stage
from ratoon.layers import sampling


@dataclass(frozen=True, slots=True)
class LogitBias(LogitsRule):
    token_ids: np.ndarray  # int64
    values: np.ndarray  # float32

    stage = Stage.BIAS

    @classmethod
    def of(cls, logit_bias: Mapping[int, float]) -> LogitBias:
        return cls(np.array(list(logit_bias), np.int64), np.array(list(logit_bias.values()), np.float32))

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[LogitBias]) -> None:
        values = np.concatenate([rule.values for rule in rules])
        sampling.add_bias(logits, *cells(logits, rows, [rule.token_ids for rule in rules], values))
