"""Models that read images compute the logits that transformers computes, in float32: text alone, pictures, tiles and
video, with rows of embeddings placed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ratoon.attention.segments import build_segment_attention
from ratoon.core.media import VIDEO, MediaInput
from ratoon.layers.embedding import RowEmbeddings
from ratoon.models.base import LanguageModel
from tests.golden.dense_step import DenseStep
from tests.golden.tiny_media_models import (
    FAMILIES,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    TinyMediaModel,
    normalised,
    qwen_input,
    tile_input,
)
from tests.golden.tiny_models import random_token_ids

Tensor = torch.Tensor
TOLERANCE = 1e-4  # of logits that reach about 10
Prompt = Sequence[list[int] | MediaInput]


def text(length: int) -> list[int]:
    return [token % 90 for token in random_token_ids(length, seed=length)]


def ids_of(prompt: Prompt) -> list[int]:
    """The prompt as tokens, with a placeholder for each row of embeddings."""
    found: list[int] = []
    for part in prompt:
        if isinstance(part, MediaInput):
            found += [VIDEO_TOKEN if part.modality == VIDEO else IMAGE_TOKEN] * part.num_rows
        else:
            found += part
    return found


@torch.inference_mode()
def our_logits(model: LanguageModel, prompt: Prompt, positions: Tensor) -> Tensor:
    """`positions`: by which heads are rotated."""
    ids = torch.tensor(ids_of(prompt))
    media = [part for part in prompt if isinstance(part, MediaInput)]
    embeddings = None
    if media:
        assert model.media_encoder is not None
        attend = build_segment_attention(model.device, model.dtype)
        rows = torch.full((len(ids),), -1)
        is_placeholder = (ids == IMAGE_TOKEN) | (ids == VIDEO_TOKEN)
        rows[is_placeholder] = torch.arange(int(is_placeholder.sum()))
        embeddings = RowEmbeddings(rows, torch.cat(model.media_encoder.encode(media, attend)))
        ids = ids.masked_fill(is_placeholder, 0)  # their ids are not read
    places = torch.arange(len(ids))
    states = model.forward(ids, places, DenseStep(), rope_positions=positions, embeddings=embeddings)
    return model.compute_logits(states.normed)


@torch.inference_mode()
def qwen_logits(tiny: TinyMediaModel, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The logits of transformers, and its positions [3, T]."""
    ids = torch.tensor([ids_of(prompt)])
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    arguments = {}
    media = [part for part in prompt if isinstance(part, MediaInput)]
    for is_video, pixels_name, grid_name in (
        (False, "pixel_values", "image_grid_thw"), (True, "pixel_values_videos", "video_grid_thw")
    ):  # fmt: skip
        alike = [part for part in media if (part.modality == VIDEO) == is_video]
        if alike:
            arguments[pixels_name] = torch.cat([normalised(tiny.config, part) for part in alike])
            arguments[grid_name] = torch.tensor([part.grid for part in alike])
    mask = torch.ones_like(ids)
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    if media:
        grids = {name: value for name, value in arguments.items() if name.endswith("thw")}
        positions, _ = tiny.oracle.model.get_rope_index(ids, kinds, **grids)
        arguments["mm_token_type_ids"] = kinds
    tiny.oracle.model.rope_deltas = None
    found = tiny.oracle(ids, attention_mask=mask, use_cache=False, **arguments)
    return found.logits[0], positions[:, 0].contiguous()


@torch.inference_mode()
def idefics3_logits(tiny: TinyMediaModel, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The logits of transformers, and the positions [T]."""
    ids = torch.tensor([ids_of(prompt)])
    tiles = [normalised(tiny.config, part) for part in prompt if isinstance(part, MediaInput)]
    arguments = {"pixel_values": torch.stack(tiles)[None]} if tiles else {}
    return tiny.oracle(ids, use_cache=False, **arguments).logits[0], torch.arange(ids.shape[1])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_logits_of_prompts_with_pictures_and_video_equal_those_of_transformers(family: str) -> None:
    tiny = FAMILIES[family]()
    model = tiny.build()

    def picture(height: int, width: int, time: int = 0) -> MediaInput:
        return qwen_input(tiny.config, (time or 1, height, width), seed=height, video=time > 0)

    prompts: list[Prompt] = [
        [text(1)],
        [text(40)],
        [text(5), picture(8, 12), text(7)],
        [picture(2, 2), text(3)],
        [text(3), picture(4, 6), text(2), picture(10, 8), text(4), picture(2, 18), text(9)],
        [text(4), picture(6, 4, time=3), text(6)],
        [text(2), picture(4, 4), text(5), picture(4, 8, time=2), text(3), picture(6, 6), text(8)],
    ]
    for prompt in prompts:
        expected, positions = qwen_logits(tiny, prompt)
        torch.testing.assert_close(our_logits(model, prompt, positions), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_logits_of_prompts_with_tiles_equal_those_of_transformers(family: str) -> None:
    tiny = FAMILIES[family]()
    model = tiny.build()
    tiles = [tile_input(tiny.config, 24, 24, seed) for seed in range(4)]
    prompts: list[Prompt] = [
        [text(1)],
        [text(40)],
        [text(5), tiles[0], text(7)],
        [text(3), tiles[0], text(2), tiles[1], tiles[2], text(6), tiles[3], text(4)],
    ]
    for prompt in prompts:
        expected, positions = idefics3_logits(tiny, prompt)
        torch.testing.assert_close(our_logits(model, prompt, positions), expected, atol=TOLERANCE, rtol=0)
