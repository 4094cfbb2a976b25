"""The choice of beam candidates for one search whose beams are all rows."""

from __future__ import annotations

import torch

from ratoon.layers.beams import Candidates, Edit, SearchRows, best_candidates_of_searches


def best_candidates(
    logits: torch.Tensor, scores: torch.Tensor, num_candidates: int, edit: Edit | None = None
) -> Candidates | None:
    return best_candidates_of_searches(logits, scores, [SearchRows(0, len(logits), num_candidates)], edit)[0]
