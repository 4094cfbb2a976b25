"""Tokens never generated (`suppressed_token_ids`), or not as the first (`suppressed_first_token_ids`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ratoon.execution.rules.base import ForbiddingRule, Reads


@dataclass(frozen=True, slots=True)
class SuppressedTokens(ForbiddingRule):
    token_ids: np.ndarray  # int64

    def forbidden(self) -> np.ndarray:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class SuppressedFirst(ForbiddingRule):
    token_ids: np.ndarray  # int64

    @property
    def reads(self) -> Reads:
        return Reads.LENGTH

    def after(self, token_id: int) -> None:
        return None

    def forbidden(self) -> np.ndarray:
        return self.token_ids
