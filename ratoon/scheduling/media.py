"""Images and other media of a request as the scheduler sees them: where their rows stand in the prompt, and what the
runner is told of them. media_inputs.py decides when they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratoon.core.media import EMBEDS, MediaInput
from ratoon.core.plan import EmbeddingSpan, InputOverrides
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.encoder_cache import key_of_media
from ratoon.memory.hashing import MediaSpan


class MediaRun(NamedTuple):
    """A run of placeholder tokens, and the input whose rows stand in their place."""

    start: int
    end: int
    key: str  # of the input's output in the encoder cache
    data: MediaInput
    is_whole: bool  # its rows are computed in one step


def media_of(request: EngineCoreRequest, whole_images: bool) -> list[MediaRun]:
    """`whole_images`: rows of an image see each other in both directions. Embeddings that a caller brought do not."""
    return [
        MediaRun(
            feature.offset,
            feature.offset + feature.length,
            key_of_media(feature.content_hash, request.cache_salt),
            feature.data,
            whole_images and feature.data.modality != EMBEDS,
        )
        for feature in request.mm_features
    ]


def spans_of(request: EngineCoreRequest, media: Sequence[MediaRun]) -> list[MediaSpan]:
    """What blocks are hashed with."""
    return [
        MediaSpan(feature.offset, feature.length, feature.content_hash, run.is_whole)
        for feature, run in zip(request.mm_features, media, strict=True)
    ]


def overrides_of(request: EngineCoreRequest, media: Sequence[MediaRun]) -> InputOverrides | None:
    """What the model reads in place of token ids and positions. None: nothing."""
    if not media and request.rope is None:
        return None
    embeddings = [
        EmbeddingSpan(run.start, run.end - run.start, run.key, is_causal=run.data.modality == EMBEDS) for run in media
    ]
    if request.rope is None:
        return InputOverrides(embeddings=embeddings)
    return InputOverrides(request.rope.packed, request.rope.delta, embeddings)
