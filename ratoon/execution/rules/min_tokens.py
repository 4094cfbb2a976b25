"""No end before a number of tokens (`min_tokens`): until then the tokens that would end the text are masked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ratoon.execution.rules.base import ForbiddingRule, Reads


@dataclass(frozen=True, slots=True)
class MinTokens(ForbiddingRule):
    stop_token_ids: np.ndarray  # int64
    num_left: int  # tokens left before one of them may be generated

    @property
    def reads(self) -> Reads:
        return Reads.LENGTH

    def after(self, token_id: int) -> MinTokens | None:
        return MinTokens(self.stop_token_ids, self.num_left - 1) if self.num_left > 1 else None

    def forbidden(self) -> np.ndarray:
        return self.stop_token_ids
