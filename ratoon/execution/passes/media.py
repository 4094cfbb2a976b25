"""Runs the encoder of media over the inputs of a step, and keeps the rows of embeddings that come out for the prompts
that read them. The plan decides which inputs run when, and which rows are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ratoon.attention.segments import build_segment_attention
from ratoon.core.media import EMBEDS, IMAGE, MediaConfig, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.embeddings import EmbeddingTable
from ratoon.execution.passes.encoder_store import EncoderStore
from ratoon.models.base import LanguageModel
from ratoon.models.media_encoder import MediaEncoder

Tensor = torch.Tensor
# Attention within runs of rows: q, k, v [T, heads, head_dim] and the lengths of the runs → [T, heads * head_dim]
SegmentAttention = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]


class MediaRunner:
    def __init__(
        self, embeddings: EmbeddingTable, device: torch.device, dtype: torch.dtype, may_round: bool = False
    ) -> None:
        """`may_round`: attention may round what it multiplies to bf16."""
        self.num_runs = 0  # inputs that the encoder has read, since the start
        self._embeddings = embeddings
        self._device = device
        self._dtype = dtype
        self._may_round = may_round
        self._attend: SegmentAttention | None = None
        self.store: EncoderStore | None = None  # where outputs are kept beyond the device; None: nowhere

    def run(self, model: LanguageModel, inputs: Mapping[str, MediaInput]) -> None:
        """Encodes these inputs, or loads what was made of them before, and keeps the rows under their keys. Rows of
        embeddings that a request brought are kept as they are. Raises ValueError for an input that the model has no
        encoder for, or whose rows are not as many as was said."""
        pictures = {key: media for key, media in inputs.items() if media.modality != EMBEDS}
        for key, media in inputs.items():
            if media.modality == EMBEDS:
                self._embeddings.receive(key, media.features)
        if self.store is not None and pictures:
            for key, rows in self.store.load(pictures, self._embeddings.width, self._dtype).items():
                self._embeddings.put(key, rows)
                del pictures[key]
        if not pictures:
            return
        encoder = getattr(model, "media_encoder", None)
        if encoder is None:
            raise ValueError("a plan has images, and the model has no encoder for them")
        for key, rows in self._encode(encoder, pictures):
            # A part of a larger tensor would keep all of it in memory
            self._embeddings.put(key, rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone())

    def encode_for_others(self, model: LanguageModel, inputs: Mapping[str, MediaInput]) -> None:
        """Encodes those of these inputs that the store has no output of, one by one, and keeps none of them here.
        Returns when the store has them."""
        assert self.store is not None and model.media_encoder is not None
        for key, media in inputs.items():
            if not self.store.load({key: media}, self._embeddings.width, self._dtype):
                for _ in self._encode(model.media_encoder, {key: media}):
                    pass
        self.store.flush()

    def _encode(self, encoder: MediaEncoder, inputs: Mapping[str, MediaInput]) -> Iterator[tuple[str, Tensor]]:
        """Yields the rows of these inputs, which are in the store, if there is one, with what others find them by."""
        outputs = encoder.encode(list(inputs.values()), self._attend_segments)
        self.num_runs += len(inputs)
        for (key, media), rows in zip(inputs.items(), outputs, strict=True):
            if len(rows) != media.num_rows:
                raise ValueError(f"the encoder made {len(rows)} rows of {key!r}, not {media.num_rows}")
            if self.store is not None:
                self.store.save(key, rows.to(self._dtype))
            yield key, rows

    def _attend_segments(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        if self._attend is None:  # most engines never see an image
            self._attend = build_segment_attention(self._device, self._dtype, self._may_round)
        return self._attend(q, k, v, lengths)

    def release(self) -> None:
        """Drops all rows, because memory is freed."""
        self._embeddings.clear()


def encode_most(model: LanguageModel, num_rows: int) -> None:
    """Runs the encoder of a model over black pictures with `num_rows` rows in all, as the largest step does, and drops
    what comes out."""
    media = model.config.media
    assert media is not None and model.media_encoder is not None
    attend = build_segment_attention(model.device, model.dtype)
    model.media_encoder.encode(black_pictures(media, num_rows), attend)


def black_pictures(media: MediaConfig, num_rows: int) -> list[MediaInput]:
    """Inputs of the encoder with at least `num_rows` rows in all: one picture where the size is free, tiles of the only
    size where it is not."""
    vision = media.vision
    if vision.image_size:
        patches = vision.image_size // vision.patch_size
        rows = media.num_rows or (patches // vision.merge_size) ** 2
        tile = _black((vision.num_channels, vision.image_size, vision.image_size))
        return [MediaInput(IMAGE, rows, tile, (1, patches, patches))] * -(-num_rows // rows)
    high = max(1, math.isqrt(num_rows))
    wide = -(-num_rows // high)
    grid = (1, high * vision.merge_size, wide * vision.merge_size)
    pixels = _black((grid[1] * grid[2], vision.num_channels * vision.patch_size**2))
    return [MediaInput(IMAGE, high * wide, pixels, grid)]


def _black(shape: tuple[int, ...]) -> WireTensor:
    return WireTensor("uint8", shape, bytes(math.prod(shape)))
