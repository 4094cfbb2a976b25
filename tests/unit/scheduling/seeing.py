"""Helpers to drive a scheduler with requests that have images."""

from __future__ import annotations

from typing import Any

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.media import EMBEDS, IMAGE, MediaFeature, MediaInput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.core.speculation import SpeculationConfig
from ratoon.core.wire import WireTensor
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import BLOCK_SIZE, request_of

PAD = 9  # the placeholder
Part = int | tuple[str, int]  # so many tokens of text, or an image by name with so many rows


def seeing_scheduler(
    num_blocks: int = 200,
    cache_size: int = 100,
    num_host_blocks: int = 0,
    speculation: SpeculationConfig | None = None,
    caching: bool = True,
    **config: Any,
) -> Scheduler:
    groups = (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,)),)
    return Scheduler(
        SchedulerConfig(**config),
        CacheConfig(block_size=BLOCK_SIZE, encoder_cache_size=cache_size, enable_prefix_caching=caching),
        KVCacheConfig(num_blocks, BLOCK_SIZE, groups, num_host_blocks=num_host_blocks),
        200,
        speculation=speculation,
    )


def image(name: str, num_rows: int, modality: str = IMAGE) -> MediaInput:
    return MediaInput(modality, num_rows, WireTensor("uint8", (len(name),), name.encode()))


def seeing(request_id: str, *parts: Part, text: int = 50, **rest: Any) -> EngineCoreRequest:
    """A request whose prompt is these parts. Text is counted on from `text`: equal prompts have equal tokens. An image
    whose name begins with "words" is rows of embeddings that the request brought."""
    tokens: list[int] = []
    features: list[MediaFeature] = []
    for part in parts:
        if isinstance(part, int):
            tokens += range(text + len(tokens), text + len(tokens) + part)
        else:
            name, num_rows = part
            data = image(name, num_rows, EMBEDS if name.startswith("words") else IMAGE)
            features.append(MediaFeature(len(tokens), num_rows, name, data))
            tokens += [PAD] * num_rows
    retain_kv = rest.pop("retain_kv", None)
    request = request_of(request_id, tokens, **rest)
    request.mm_features, request.retain_kv = features, retain_kv
    return request


def runs(plan: SchedulerOutput) -> list[str]:
    """The keys of inputs that the encoder runs over."""
    return list(plan.scheduled_encoder_inputs)
