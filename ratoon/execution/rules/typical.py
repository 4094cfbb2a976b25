"""Locally typical sampling (`typical_p`): tokens whose surprise is near the expected one, as in transformers.

It applies behind temperature, min_p, top_k and top_p, so it does their work as well: rows with this rule have no other
filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.params import SamplingParams
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.rules.base import LogitsRule, Stage
from ratoon.layers import sampling


@dataclass(frozen=True, slots=True)
class Typical(LogitsRule):
    mass: float  # of the tokens that are kept
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    stage = Stage.TYPICAL

    @classmethod
    def of(cls, params: SamplingParams) -> Typical:
        return cls(params.typical_p, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[Typical]) -> None:
        device = logits.device
        filters = sampling.Filters(
            torch.tensor([rule.top_k for rule in rules], device=device),
            torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device),
            torch.tensor([rule.min_p for rule in rules], dtype=torch.float32, device=device),
        )
        temperatures = torch.tensor([rule.temperature for rule in rules], dtype=torch.float32, device=device)
        masses = torch.tensor([rule.mass for rule in rules], dtype=torch.float64, device=device)
        places = indices_on(device, rows.tolist())
        scaled = logits[places].float() / temperatures[:, None]
        is_kept = sampling.typical(scaled, filters, masses)
        logits[places] = logits[places].masked_fill(~is_kept, float("-inf"))
