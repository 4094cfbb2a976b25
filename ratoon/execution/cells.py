"""Cells of logits: the rows and tokens that an edit applies to, as index tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Tensor = torch.Tensor


def cells(
    logits: Tensor, rows: np.ndarray, token_lists: Sequence[Sequence[int] | np.ndarray], *values: np.ndarray
) -> list[Tensor]:
    """The cells (row, token) for one list of tokens a row, as row ids and token ids [E], and the cells' values.

    Tokens outside the vocabulary (such as placeholders in a prompt) have no logit and are left out.
    """
    row_ids = np.repeat(rows, [len(tokens) for tokens in token_lists])
    token_ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in token_lists])
    arrays = [row_ids, token_ids, *values]
    known = (token_ids >= 0) & (token_ids < logits.shape[1])
    if not known.all():
        arrays = [array[known] for array in arrays]
    return [to_device(array, logits.device) for array in arrays]


def take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """These rows, in rising order: the logits themselves where that is all of them, otherwise a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[to_device(rows, logits.device)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
