"""Prompts with images that are cut: what is left of the images, and of the positions that go with them."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.config import EngineConfig, ModelConfig, fit_to_model
from ratoon.core.media import (
    EMBEDS,
    IMAGE,
    VIDEO,
    MediaConfig,
    MediaFeature,
    MediaInput,
    RopePositions,
    VisionConfig,
    count_media,
    cut_features,
    cut_rope,
    end_of_image,
    feature_around,
    joined_rope,
    moved_features,
)
from ratoon.core.wire import WireTensor


def feature(offset: int, length: int, modality: str = IMAGE) -> MediaFeature:
    return MediaFeature(offset, length, "h", MediaInput(modality, length, WireTensor("uint8", (0,), b"")))


def test_a_prompt_that_ends_within_an_image_has_a_shorter_one() -> None:
    features = [feature(1, 3), feature(6, 4)]
    kept = [[(one.offset, one.length) for one in cut_features(features, count)] for count in (1, 2, 4, 6, 8, 20)]
    assert kept == [[], [(1, 1)], [(1, 3)], [(1, 3)], [(1, 3), (6, 2)], [(1, 3), (6, 4)]]
    assert features[1].length == 4


@pytest.mark.parametrize(("count", "end"), [(1, 1), (2, 4), (4, 4), (5, 5), (6, 6), (7, 10), (10, 10)])
def test_the_end_of_an_image_that_tokens_end_in(count: int, end: int) -> None:
    features = [feature(1, 3), feature(6, 4)]
    assert end_of_image(features, count) == end
    assert (feature_around(features, count) is None) == (count == end)
    assert end_of_image([feature(0, 12, EMBEDS)], count) == count, "rows of text have no such end"


def rope_of(axes: list[list[int]], delta: int) -> RopePositions:
    return RopePositions(array("i", [number for axis in axes for number in axis]).tobytes(), delta)


def test_positions_of_a_cut_prompt_go_on_behind_the_greatest_of_those_that_are_left() -> None:
    # Two tokens of text, an image of 2 x 3, text from 5 on
    axes = [[0, 1, *[2] * 6, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    rope = rope_of(axes, -3)
    assert cut_rope(rope, 3, 9) == cut_rope(rope, 3, 20) == rope
    assert cut_rope(rope, 3, 8) == rope_of([axis[:8] for axis in axes], 5 - 8)
    assert cut_rope(rope, 3, 4) == rope_of([axis[:4] for axis in axes], 4 - 4)
    assert cut_rope(rope, 3, 2) == rope_of([[0, 1]] * 3, 0)
    assert cut_rope(None, 3, 2) is None


def test_positions_of_a_text_with_an_image_go_on_behind_those_of_the_text_before() -> None:
    # Two tokens of text, an image of 2 x 3, then text from 5 on, of which the first token is listed; three follow
    axes = [[0, 1, *[2] * 6, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    rope = rope_of(axes, -3)
    # One token of text, then an image of 1 x 2
    behind = rope_of([[0, 1, 1], [0, 1, 1], [0, 1, 2]], 0)
    text = [6, 7, 8]
    joined = [[*axes[0], *text, 9, 10, 10], [*axes[1], *text, 9, 10, 10], [*axes[2], *text, 9, 10, 11]]
    assert joined_rope(rope, 3, 12, behind) == rope_of(joined, 12 - 15)
    assert joined_rope(rope, 3, 12, None) == rope
    assert joined_rope(None, 3, 2, behind) == rope_of([[0, 1, 2, 3, 3]] * 2 + [[0, 1, 2, 3, 4]], 0)
    assert joined_rope(None, 3, 0, behind) == behind


def test_an_image_of_several_tiles_is_counted_once() -> None:
    tile = msgspec.structs.replace(feature(3, 2), is_first=False)
    counted = count_media([feature(0, 3), tile, feature(6, 1), feature(7, 2, VIDEO), feature(9, 1, EMBEDS)])
    assert counted == {IMAGE: 2, VIDEO: 1}
    moved = moved_features([feature(0, 3), tile], 10)
    assert [(one.offset, one.length, one.is_first) for one in moved] == [(10, 3, True), (13, 2, False)]


@given(st.integers(1, 3), st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 14))
def test_what_is_left_of_positions_is_the_first_of_each_axis(num_axes: int, first: list[int], count: int) -> None:
    axes = [[number + axis for number in first] for axis in range(num_axes)]
    cut = cut_rope(rope_of(axes, 0), num_axes, count)
    assert cut is not None
    left = array("i", cut.packed).tolist()
    assert left == [number for axis in axes for number in axis[:count]]
    if count < len(first):
        last = {axis[count - 1] for axis in axes}  # of text if it is the same on all axes
        assert count + cut.delta == (first[count - 1] if len(last) == 1 else max(left)) + 1


@pytest.mark.parametrize("attends_both_ways", [False, True])
def test_images_that_are_attended_to_in_both_directions_run_whole(attends_both_ways: bool) -> None:
    vision = VisionConfig(8, 16, 1, 2, patch_size=4)
    media = MediaConfig("fake", vision, image_token_id=3, attends_both_ways=attends_both_ways)
    model = ModelConfig("LlamaForCausalLM", 10, 8, 16, 1, 2, 1, 4, 32, media=media)
    assert fit_to_model(EngineConfig("x"), model).scheduler.whole_images == attends_both_ways
