"""Embeddings that stand in the place of token ids: the tensors that the runner holds, and the rows of a step.

Where they stand is said by the plan, and kept with the rows of the branches (input_batch.py). A tensor is brought by a
plan, or put here by what computed it (passes/media.py), and is kept until a plan frees it.
"""

from __future__ import annotations

import numpy as np
import torch

from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.inputs.columns import NO_COLUMNS, StepColumns, StepTable
from ratoon.execution.inputs.input_batch import InputBatch

Tensor = torch.Tensor


class EmbeddingTable:
    """The tensors [N, H] that branches read rows of, by key."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor [N, H], in the dtype of the model. Raises ValueError if its rows are not as wide as the
        model's."""
        if tensor.ndim != 2 or tensor.shape[1] != self.width:
            raise ValueError(f"embeddings {key!r} have the shape {list(tensor.shape)}, not [rows, {self.width}]")
        self._tensors[key] = tensor.to(self._device, self._dtype)

    def receive(self, key: str, tensor: WireTensor) -> None:
        """Keeps a tensor that a plan brought, as `put` does."""
        flat = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
        self.put(key, flat.reshape(tensor.shape))

    def free(self, key: str) -> None:
        self._tensors.pop(key, None)

    def clear(self) -> None:
        self._tensors.clear()

    def columns_of(self, rows: InputBatch, batch: StepBatch) -> StepColumns:
        """The embeddings of a step: rows of a table, and which of them is the input of each token. No columns: all its
        inputs are token ids. Raises ValueError if a tensor is not there, or has too few rows."""
        batch_rows, num_scheduled = batch.rows, batch.num_scheduled
        if not rows.embeddings or (rows.num_computed[batch_rows] >= rows.embedding_ends[batch_rows]).all():
            return NO_COLUMNS
        found = np.full(int(num_scheduled.sum()), -1, np.int32)
        parts: list[Tensor] = []
        next_row = offset = 0
        for row, count in zip(batch_rows.tolist(), num_scheduled.tolist()):
            begin = int(rows.num_computed[row])
            for span in rows.embeddings.get(row, ()):
                first, stop = max(begin, span.start), min(begin + count, span.start + span.length)
                if first < stop:
                    parts.append(self._rows(span.key, first - span.start + span.first, stop - first))
                    place = offset + first - begin
                    found[place : place + stop - first] = np.arange(next_row, next_row + stop - first)
                    next_row += stop - first
            offset += count
        return {"embedding_rows": found, "embedding_table": StepTable(parts)} if parts else NO_COLUMNS

    def _rows(self, key: str, first: int, count: int) -> Tensor:
        tensor = self._tensors.get(key)
        if tensor is None or first + count > len(tensor):
            have = "are not there" if tensor is None else f"have {len(tensor)} rows"
            raise ValueError(f"embeddings {key!r} {have}, and rows {first} to {first + count - 1} are to be read")
        return tensor[first : first + count]
