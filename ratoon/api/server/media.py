"""Images and videos of requests: found in messages, checked before anything is fetched, then loaded as bytes.

Data URLs are always taken, addresses only of hosts that the operator allows (media_fetcher.py), paths never. What was
loaded is decoded by the engine's front end (engine/input).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import refused
from ratoon.api.server.media_fetcher import ByteBudget
from ratoon.api.server.threads import off_loop
from ratoon.media.items import NamedMedia
from ratoon.models.media_parts import (
    URL_PARTS,
    MediaPart,
    check_data_url,
    check_reads,
    decode_data_url,
    find_media,
    is_data_url,
)

Media = dict[str, list[NamedMedia]]  # by kind, in the order of the prompt


def chat_media(context: ServerContext, messages: Sequence[Mapping[str, Any]], param: str) -> list[MediaPart]:
    """Returns the images and videos of a conversation, which may be loaded. `param` is the field of the body with the
    messages."""
    parts = find_media(messages, kinds_of(context), param, URL_PARTS)
    check_media(context, parts)
    return parts


def listed_media(context: ServerContext, given: Mapping[str, Sequence[str]] | None) -> list[MediaPart]:
    """Returns the images and videos of the field multi_modal_data, which may be loaded: data URLs and addresses by
    kind."""
    parts: list[MediaPart] = []
    for kind, urls in (given or {}).items():
        field = f"multi_modal_data.{kind}"
        if kind not in URL_PARTS.values():
            raise refused(field, "is not a kind of media here", " or ".join(URL_PARTS.values()))
        parts += [MediaPart(kind, url, f"{field}[{index}]") for index, url in enumerate(urls)]
    check_media(context, parts)
    return parts


def kinds_of(context: ServerContext) -> Mapping[str, str]:
    """The kinds of media that the model reads."""
    return context.llm.get_tokenizer().media_placeholders


def check_media(context: ServerContext, parts: Sequence[MediaPart]) -> None:
    """Refuses what can be refused before anything is fetched: media that the model does not read, too many of them, and
    addresses that are not allowed."""
    counts: Counter[str] = Counter()
    for part in parts:
        check_reads(part.field, part.kind, kinds_of(context))
        counts[part.kind] += 1
        limit = context.llm.config.media.limit_of(part.kind)
        if counts[part.kind] > limit:
            problem = f"is more than the {limit} of the kind {part.kind} that a prompt may have"
            raise refused(part.field, problem, "fewer of them; limit_mm_per_prompt is the server's setting")
        if is_data_url(part.value):
            check_data_url(part)
        else:
            context.media_fetcher.check(part)


async def load_media(context: ServerContext, parts: Sequence[MediaPart]) -> Media | None:
    """Returns the bytes of images and videos that were checked. None: there are none. If one can't be loaded, loading
    the others is cancelled."""
    if not parts:
        return None
    budget = ByteBudget(context.media_fetcher.max_bytes)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_load(context, part, budget)) for part in parts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    media: Media = {}
    for part, task in zip(parts, tasks):
        media.setdefault(part.kind, []).append(NamedMedia(task.result(), part.field))
    return media


async def _load(context: ServerContext, part: MediaPart, budget: ByteBudget) -> bytes:
    if is_data_url(part.value):
        return await off_loop(len(part.value), lambda: decode_data_url(part))
    return await context.media_fetcher.fetch(part, budget)
