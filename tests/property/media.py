"""Images in random loads: a runner's table of what the encoder has made, and what of it a sequence must read.

The input of a model at a placeholder is the image's content and the row of it, not the token id: another image, another
row or rows that were dropped show in every state and token behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import event

from ratoon.core.media import EMBEDS, IMAGE, MediaFeature, MediaInput
from ratoon.core.plan import EmbeddingSpan, InputOverrides, SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.core.wire import WireTensor

PLACEHOLDER = 3  # an ordinary token too


def _input(modality: str, number: int, num_rows: int) -> tuple[str, MediaInput]:
    return f"{modality}-{number}", MediaInput(modality, num_rows, WireTensor("uint8", (1,), bytes([number])))


INPUTS = [_input(IMAGE, 1, 1), _input(IMAGE, 2, 3), _input(IMAGE, 3, 6), _input(IMAGE, 4, 4), _input(EMBEDS, 5, 4)]


def with_media(prompt: list[int], places: Sequence[tuple[int, int]]) -> tuple[list[int], list[MediaFeature]]:
    """The prompt with placeholders, and where they stand. `places`: how many tokens behind the last image, and which
    input."""
    tokens: list[int] = []
    features: list[MediaFeature] = []
    for num_between, number in places:
        content_hash, media = INPUTS[number]
        tokens, prompt = tokens + prompt[:num_between], prompt[num_between:]
        features.append(MediaFeature(len(tokens), media.num_rows, content_hash, media))
        tokens += [PLACEHOLDER] * media.num_rows
    return tokens + prompt, features


def value_at(token: int, position: int, features: Sequence[MediaFeature]) -> int:
    """What a model reads at a position."""
    for feature in features:
        if feature.offset <= position < feature.offset + feature.length:
            return hash((feature.data.features.data[0], position - feature.offset, 19))
    return token


class FakeMedia:
    def __init__(self, capacity: int, budget: int, cuts_images: bool) -> None:
        self._capacity = capacity
        self._budget = budget  # rows that the encoder makes in a step, unless one input is longer
        self._cuts_images = cuts_images
        self._table: dict[str, MediaInput] = {}

    def run(self, plan: SchedulerOutput) -> None:
        for key in plan.free_encoder_mm_hashes:
            if self._table.pop(key, None) is not None:
                event("what the encoder made is dropped")
        for key, media in plan.scheduled_encoder_inputs.items():
            assert key not in self._table, f"{key} runs again, and is there"
            event("the encoder runs")
            self._table[key] = media
        assert sum(media.num_rows for media in self._table.values()) <= self._capacity

    def check_budget(self, plan: SchedulerOutput, runs_whole_prompts: bool) -> None:
        rows = [media.num_rows for media in plan.scheduled_encoder_inputs.values() if media.modality != EMBEDS]
        assert len(rows) <= 1 or sum(rows) <= self._budget or runs_whole_prompts
        assert not plan.scheduled_encoder_inputs or plan.req_ids, "the encoder runs for no request"

    def read(self, overrides: InputOverrides | None, request: EngineCoreRequest, positions: range) -> None:
        """A row runs these positions."""
        spans = [] if overrides is None else overrides.embeddings
        for position in positions:
            found = [span for span in spans if span.start <= position < span.start + span.length]
            wanted = [one for one in request.mm_features if one.offset <= position < one.offset + one.length]
            assert len(found) == len(wanted) <= 1, f"{request.request_id} reads no image at {position}, or another"
            for span, feature in zip(found, wanted, strict=True):
                self._read_row(span, feature, position)
        for feature in request.mm_features if not self._cuts_images else ():
            inside = range(feature.offset + 1, feature.offset + feature.length)
            if feature.data.modality != EMBEDS:
                assert positions.stop not in inside, f"{request.request_id} ends within an image"

    def _read_row(self, span: EmbeddingSpan, feature: MediaFeature, position: int) -> None:
        media = self._table.get(span.key)
        assert media is not None, f"what the encoder made of {span.key} is gone"
        assert media == feature.data, "another image"
        assert position - span.start + span.first == position - feature.offset, "another row of the image"
