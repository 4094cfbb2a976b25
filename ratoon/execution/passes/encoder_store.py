"""Outputs of the encoder of media in a tier that outlives the engine: rows of embeddings by the key of their input.

An input that another engine has encoded, or this one before it was started again, is loaded and not encoded. What can't
be loaded is encoded. The key contains the content of the input and the salt of the request (memory/encoder_cache.py);
what the bytes mean is in the fingerprint of the tier. Which outputs are on the device is the plan's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import blake2b

import torch

from ratoon.core.kv_connector import BlockMover, EncoderLink, block_key
from ratoon.core.media import MediaInput

logger = logging.getLogger(__name__)

Tensor = torch.Tensor


class EncoderStore:
    def __init__(self, movers: Sequence[BlockMover], may_save: bool = True) -> None:
        """`movers`: of the tiers, the first one asked first. All save what is made, and the earlier ones what a later
        one had. `may_save`: False on ranks that make the same rows as one that saves them."""
        self._movers = list(movers)
        self._may_save = may_save
        self.num_loaded = 0  # since the start

    @property
    def address(self) -> str:
        """Where engines on other hosts fetch what is saved here. Empty: nowhere."""
        return next((mover.address for mover in self._movers if isinstance(mover, EncoderLink)), "")

    def fetch(self, places: Mapping[str, str]) -> Future[None] | None:
        """Begins to fetch outputs from engines on other hosts, by their keys and the addresses of these. The future is
        done when they can be loaded, or will not come; None: this engine fetches from no others."""
        for mover in self._movers:
            if isinstance(mover, EncoderLink):
                return mover.fetch({name_of(key): place for key, place in places.items()})
        return None

    def load(self, inputs: Mapping[str, MediaInput], width: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The outputs of those inputs that are there, [rows, width] each, in host memory."""
        lacking = {key: torch.empty((media.num_rows, width), dtype=dtype) for key, media in inputs.items()}
        found: dict[str, Tensor] = {}
        for place, mover in enumerate(self._movers):
            wanted = [(name_of(key), [_bytes_of(tensor)]) for key, tensor in lacking.items()]
            loaded = [key for key, is_there in zip(lacking, mover.load_all(wanted), strict=True) if is_there]
            for key in loaded:
                found[key] = lacking.pop(key)
                self._save_to(self._movers[:place], key, found[key])
        self.num_loaded += len(found)
        return found

    def flush(self) -> None:
        """Waits until all that was saved can be loaded by others."""
        for mover in self._movers:
            flush = getattr(mover, "flush", None)  # of a mover that writes behind the steps
            if flush is not None:
                flush()

    def save(self, key: str, rows: Tensor) -> None:
        if self._may_save:
            self._save_to(self._movers, key, rows.cpu().contiguous())

    def _save_to(self, movers: Sequence[BlockMover], key: str, rows: Tensor) -> None:
        for mover in movers:
            try:
                mover.save(name_of(key), [_bytes_of(rows).toreadonly()])
            except Exception:
                logger.warning("the output of an encoder can't be saved to the connector", exc_info=True)

    def close(self) -> None:
        for mover in self._movers:
            mover.close()


def name_of(key: str) -> bytes:
    """The name of an output in the tier, in the form of a block's."""
    return block_key(0, blake2b(key.encode(), digest_size=32).digest())


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.view(torch.uint8).numpy().data.cast("B")
