"""Cells of logits: the rows and tokens that an edit applies to, as index tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Tensor = torch.Tensor

ALIGNMENT = 16  # bytes


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
    return all_to_device(arrays, logits.device)


def take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """These rows, in rising order: the logits themselves where that is all of them, otherwise a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[to_device(rows, logits.device)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return all_to_device([array], device)[0]


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device. To a GPU they travel in one copy from pinned memory, without waiting for the
    device: a copy from ordinary memory would."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    starts = [0, *ends.tolist()]
    for start, array in zip(starts, arrays):
        host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    # The allocator of pinned memory does not hand it out again before the copy is done.
    copied = host.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
