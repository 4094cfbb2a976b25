"""Content hashes of what encoders read: equal for equal pixels, wherever these came from and in whatever format."""

from __future__ import annotations

from hashlib import sha256

from ratoon.core.media import MediaInput
from ratoon.media.families.base import Preprocessed


def hash_inputs(family: str, preprocessed: Preprocessed) -> None:
    """Fills in the content hashes, in place."""
    preprocessed.content_hashes = [
        hash_input(family, one, preprocessed.seconds_per_step) for one in preprocessed.inputs
    ]


def hash_input(family: str, data: MediaInput, seconds_per_step: float = 0.0) -> str:
    """Options of preprocessing are in it by what they do to pixels and grid. The seconds of a video are in it because
    rope positions, and so the keys of its rows, depend on them."""
    digest = sha256()  # most processors have instructions for it: it takes half the time of blake2b
    facts = (family, data.modality, data.num_rows, data.grid, data.features.dtype, data.features.shape)
    digest.update(repr((*facts, seconds_per_step)).encode())
    digest.update(data.features.data)
    return digest.hexdigest()
