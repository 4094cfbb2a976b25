"""What a prompt holds besides text, for one model: images and videos, or embeddings in the place of tokens.

How images become inputs of an encoder is in ratoon.media; here is whether a model takes them at all, and what is wrong
with them if it does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ratoon.core.config import MediaSettings, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.media import EMBEDS, MediaFeature, MediaInput, RopePositions
from ratoon.core.wire import WireTensor
from ratoon.engine.input.prompts import EMBEDS_FORM, TEXT_FORMS, PromptPart
from ratoon.media.items import MediaItem, parse_media
from ratoon.media.pixels import to_numpy
from ratoon.media.processor import ExpandedPrompt, MediaProcessor

HASH_BYTES = 32


class PromptMedia:
    def __init__(self, model_config: ModelConfig, tokenizer: Any | None, settings: MediaSettings) -> None:
        self._model_config = model_config
        media = model_config.media
        self._processor = None if media is None else MediaProcessor(media, tokenizer, settings, model_config.rope_axes)

    def verify(self, part: PromptPart, earlier: Mapping[str, int] | None = None) -> list[MediaItem]:
        """The images and videos of a part, none of which is read yet. RequestError: the model does not take them.
        `earlier`: the number of media by modality in the text that is continued."""
        if part.media is None:
            if part.processor_kwargs and self._processor is None:
                raise RequestError("mm_processor_kwargs", "the model reads text alone", "leave them out")
            return []
        items = parse_media(part.media_field, part.media)
        if items and self._processor is None:
            raise RequestError(items[0].field, f"is of the kind {items[0].modality}, and the model reads text alone")
        if self._processor is not None:
            self._processor.verify(items, part.processor_kwargs or {}, earlier)
        return items

    def expand(self, part: PromptPart, token_ids: list[int], items: list[MediaItem]) -> ExpandedPrompt:
        """The tokens of the part with a token for each row of embeddings."""
        if self._processor is None:
            return ExpandedPrompt(token_ids, [], None)
        return self._processor.process(part.field, token_ids, items, part.processor_kwargs or {})

    def read_embeds(self, part: PromptPart, longest: int) -> ExpandedPrompt:
        """Embeddings in the place of all tokens, whose ids are 0."""
        field, config = f"{part.name}_embeds", self._model_config
        if config.encoder is not None or not config.causal:
            raise RequestError(field, "only the embeddings of decoders can be replaced", TEXT_FORMS)
        rows = _floats(field, part.embeds)
        if rows.ndim != 2 or rows.shape[1] != config.hidden_size or not len(rows):
            problem = f"has the shape {list(rows.shape)}"
            raise RequestError(field, problem, f"[tokens, {config.hidden_size}]: at least one token")
        if len(rows) > longest:
            raise RequestError(field, f"has {len(rows)} rows, and at most {longest} fit", "fewer rows")
        features = WireTensor(rows.dtype.name, rows.shape, rows.tobytes())
        digest = blake2b(repr((EMBEDS, features.dtype, features.shape)).encode(), digest_size=HASH_BYTES)
        digest.update(features.data)
        data = MediaInput(EMBEDS, len(rows), features)
        return ExpandedPrompt([0] * len(rows), [MediaFeature(0, len(rows), digest.hexdigest(), data)], None)


def verify_rope(field: str, rope: RopePositions | None, longest: int) -> None:
    """RequestError: tokens of a prompt have positions below 0 or from `longest` on, by which heads can't be rotated. It
    happens with videos whose frames are far apart: their time runs ahead of their tokens."""
    positions = array("i", b"" if rope is None else rope.packed)
    least, greatest = min(positions, default=0), max(positions, default=-1)
    if least < 0:
        raise RequestError(field, f"has a token at position {least}", "positions from 0 on")
    if greatest >= longest:
        problem = f"the time of a video reaches position {greatest}, and those below {longest} fit (max_model_len)"
        raise RequestError(field, problem, "a video whose frames are nearer to each other")


def num_skipped(rope: RopePositions | None) -> int:
    """Positions before the end of a prompt that no token of it stands for, because a video's time ran ahead."""
    return 0 if rope is None else max(rope.delta, 0)


def verify_audio(part: PromptPart, settings: MediaSettings) -> None:
    if part.audio is not None and settings.limit_of("audio") < 1:
        raise RequestError(part.name, "is audio, of which none is allowed", "a greater limit_mm_per_prompt")


def refuse_media(part: PromptPart, problem: str) -> None:
    """For parts of a prompt that are text alone."""
    if part.embeds is not None:
        raise RequestError(f"{part.name}_embeds", problem, TEXT_FORMS)
    if part.media is not None:
        raise RequestError(part.media_field, problem, TEXT_FORMS)


def _floats(field: str, values: Any) -> Any:
    """float32 or float16, as they are given; others become float32."""
    import numpy as np

    array = to_numpy(field, values)
    if array.dtype.kind != "f":
        raise RequestError(field, f"holds {array.dtype}", EMBEDS_FORM)
    if array.dtype not in (np.float32, np.float16):
        with np.errstate(over="ignore"):  # infinity is found below
            array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise RequestError(field, "holds numbers that are not finite", "finite numbers")
    return array
