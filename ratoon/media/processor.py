"""Prompts with images and videos of one model: expanded placeholders, inputs of the encoder, rope positions.

What is wrong with a prompt is found in this order: kinds and numbers of media and options (`verify`), placeholders,
then the media themselves. Files are decoded in child processes, so callers wait in a thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ratoon.core.config import MediaSettings
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.machine import usable_cores
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, MediaFeature, RopePositions
from ratoon.core.sizes import format_size
from ratoon.core.wire import Buffer
from ratoon.media.content import hash_inputs
from ratoon.media.families import family_of
from ratoon.media.families.base import Preprocessed
from ratoon.media.items import IMAGE_FORMS, VIDEO_FORMS, MediaItem, verify_number
from ratoon.media.placeholders import Placeholders, TextTokens
from ratoon.media.prepared import PreparedMedia, key_of
from ratoon.media.preprocess import MediaLimits, is_decoded, preprocess_decoded, read_decoded
from ratoon.media.process import make_job, preprocess_in_child
from ratoon.media.rope_index import Span, pack_positions, rope_index


class ExpandedPrompt(NamedTuple):
    token_ids: list[int]
    features: list[MediaFeature]
    rope: RopePositions | None


class MediaProcessor:
    """ConfigError: the setting `mm_processor_kwargs` has what the model's preprocessing does not know."""

    def __init__(
        self, config: MediaConfig, tokenizer: TextTokens | None, settings: MediaSettings, rope_axes: int = 0
    ) -> None:
        self._config = config
        self._settings = settings
        self._rope_axes = rope_axes
        self._limits = MediaLimits(settings.max_image_pixels, settings.max_video_frames)
        self._family = family_of(config.family)
        self._placeholders = Placeholders(config, self._family, tokenizer)
        try:
            self._family.options(config, settings.mm_processor_kwargs)
        except RequestError as error:
            raise ConfigError(error.field, error.problem, error.expected) from None
        self._prepared = PreparedMedia()

    def verify(
        self, items: Sequence[MediaItem], asked: Mapping[str, Any], earlier: Mapping[str, int] | None = None
    ) -> None:
        """RequestError for what is wrong before any of it is read. `earlier`: the number of media by modality in the
        text that is continued."""
        for item in items:
            if item.modality not in self._placeholders.modalities:
                known = " and ".join(self._placeholders.modalities)
                raise RequestError(item.field, f"is of the kind {item.modality}, which the model does not read", known)
        verify_number(items, self._settings, earlier or {})
        self._family.options(self._config, self._options(asked))

    def process(
        self, field: str, token_ids: list[int], items: Sequence[MediaItem], asked: Mapping[str, Any]
    ) -> ExpandedPrompt:
        """`field` names the tokens in errors."""
        wanted = Counter(item.modality for item in items)
        token_ids = self._placeholders.mark(token_ids, wanted)
        found = self._placeholders.find(field, token_ids, wanted)
        if not items:
            return ExpandedPrompt(token_ids, [], None)
        options = self._options(asked)
        waiting = {kind: iter([item for item in items if item.modality == kind]) for kind in (IMAGE, VIDEO)}
        items = [next(waiting[modality]) for _, modality in found]
        media = self._preprocess_all(items, options)
        expanded, features = self._placeholders.expand(token_ids, found, media)
        return ExpandedPrompt(expanded, features, self._rope(len(expanded), features, items, media))

    def _options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._settings.mm_processor_kwargs, **asked}

    def _preprocess_all(self, items: list[MediaItem], options: dict[str, Any]) -> list[Preprocessed]:
        """Beside each other, in threads: all that takes long is done without the interpreter."""
        num_threads = min(len(items), usable_cores())
        if num_threads < 2:
            return [self._preprocess(item, options) for item in items]
        with ThreadPoolExecutor(num_threads, "pictures") as pool:
            return list(pool.map(self._preprocess, items, [options] * len(items)))

    def _preprocess(self, item: MediaItem, options: dict[str, Any]) -> Preprocessed:
        if not is_decoded(item):
            data = self._read(item)
            key = key_of(item.modality, options, (), [data])
            job = make_job(item.modality, self._config, options, self._limits, item.field)
            return self._prepared.get(key, lambda: self._hashed(preprocess_in_child(job, data)))
        decoded = read_decoded(item, options, self._limits)
        shapes = [picture.shape for picture in decoded.pictures]
        key = key_of(item.modality, options, (shapes, decoded.facts), [picture.data for picture in decoded.pictures])
        return self._prepared.get(key, lambda: self._hashed(preprocess_decoded(decoded, self._config, options)))

    def _hashed(self, preprocessed: Preprocessed) -> Preprocessed:
        hash_inputs(self._config.family, preprocessed)
        return preprocessed

    def _read(self, item: MediaItem) -> Buffer:
        """The bytes of a file."""
        data, limit = item.data, self._settings.max_media_bytes
        if isinstance(data, (str, os.PathLike)):
            try:
                with open(data, "rb") as file:
                    data = file.read(limit + 1)
            except (OSError, ValueError) as error:
                problem = f"can't read {os.fspath(data)!r} ({getattr(error, 'strerror', None) or error})"
                raise RequestError(item.field, problem, "a file that exists") from None
        if not isinstance(data, (bytes, bytearray, memoryview)):
            forms = IMAGE_FORMS if item.modality == IMAGE else VIDEO_FORMS
            raise RequestError(item.field, f"{type(data).__name__} is not of the kind {item.modality}", forms)
        if len(data) > limit:
            problem = f"has more than {format_size(limit)}"
            raise RequestError(item.field, problem, "a smaller file, or a greater max_media_bytes")
        return data

    def _rope(
        self,
        num_tokens: int,
        features: Sequence[MediaFeature],
        items: Sequence[MediaItem],
        media: Sequence[Preprocessed],
    ) -> RopePositions | None:
        """`items` and `media` are in the order of the prompt."""
        if self._rope_axes != 3:
            return None
        vision, spans = self._config.vision, []
        sources = [(item, one.seconds_per_step) for item, one in zip(items, media) for _ in one.inputs]
        for feature, (item, seconds) in zip(features, sources, strict=True):
            span = Span(feature.offset, feature.data.grid, _time_interval(vision.tokens_per_second, seconds))
            if span.has_large_times():
                problem = f"has {seconds:g} seconds between two steps in time, for which there are no positions"
                raise RequestError(item.field, problem, "a video whose frames are nearer to each other")
            spans.append(span)
        return pack_positions(*rope_index(num_tokens, spans, vision.merge_size))


def _time_interval(tokens_per_second: float, seconds_per_step: float) -> float:
    """Positions between two steps of a video; 1 for an image, and for models whose videos have no rate."""
    if not tokens_per_second or not seconds_per_step:
        return 1.0
    import numpy as np

    with np.errstate(over="ignore"):  # infinity is refused
        return float(np.float32(tokens_per_second) * np.float32(seconds_per_step))
