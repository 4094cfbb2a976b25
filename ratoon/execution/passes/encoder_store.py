"""Outputs of the encoder of media in a tier that outlives the engine: rows of embeddings by the key of their input.

An input that another engine has encoded, or this one before it was started again, is loaded and not encoded. What can't
be loaded is encoded. The key contains the content of the input and the salt of the request (memory/encoder_cache.py);
what the bytes mean is in the fingerprint of the tier. Which outputs are on the device is the plan's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import blake2b

import torch

from ratoon.core.kv_connector import BlockMover, block_key
from ratoon.core.media import MediaInput

logger = logging.getLogger(__name__)

Tensor = torch.Tensor


class EncoderStore:
    def __init__(self, mover: BlockMover, may_save: bool = True) -> None:
        """`may_save`: False on ranks that make the same rows as one that saves them."""
        self._mover = mover
        self._may_save = may_save
        self.num_loaded = 0  # since the start

    def load(self, inputs: Mapping[str, MediaInput], width: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The outputs of those inputs that are there, [rows, width] each, in host memory."""
        rows = {key: torch.empty((media.num_rows, width), dtype=dtype) for key, media in inputs.items()}
        wanted = [(name_of(key), [_bytes_of(tensor)]) for key, tensor in rows.items()]
        found = self._mover.load_all(wanted)
        self.num_loaded += sum(found)
        return {key: tensor for (key, tensor), is_there in zip(rows.items(), found, strict=True) if is_there}

    def flush(self) -> None:
        """Waits until all that was saved can be loaded by others."""
        flush = getattr(self._mover, "flush", None)  # of a mover that writes behind the steps
        if flush is not None:
            flush()

    def save(self, key: str, rows: Tensor) -> None:
        if not self._may_save:
            return
        try:
            self._mover.save(name_of(key), [_bytes_of(rows.cpu().contiguous()).toreadonly()])
        except Exception:
            logger.warning("the output of an encoder can't be saved to the connector", exc_info=True)


def name_of(key: str) -> bytes:
    """The name of an output in the tier, in the form of a block's."""
    return block_key(0, blake2b(key.encode(), digest_size=32).digest())


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.view(torch.uint8).numpy().data.cast("B")
