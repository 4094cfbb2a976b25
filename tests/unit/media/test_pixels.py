"""Pictures before they are cut to patches."""

import numpy as np
import pytest
from PIL import Image

from ratoon.core.media import IMAGE, MediaConfig
from ratoon.media.items import MediaItem
from ratoon.media.pixels import resize
from ratoon.media.preprocess import MediaLimits, preprocess_decoded
from tests.golden.media_oracle import GEMMA, IDEFICS, QWEN

PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)


@pytest.mark.parametrize("filter", ["BILINEAR", "BICUBIC", "LANCZOS"])
def test_a_picture_of_the_right_size_is_what_pillow_makes_of_it(filter: str) -> None:
    by_pillow = Image.fromarray(PIXELS).resize((84, 56), getattr(Image.Resampling, filter))
    assert np.array_equal(resize(PIXELS, 56, 84, filter), np.asarray(by_pillow))


@pytest.mark.parametrize(("config", "side"), [(QWEN, 56), (GEMMA, 224), (IDEFICS, IDEFICS.vision.image_size)])
def test_what_the_caller_does_with_a_picture_later_does_not_change_the_input(config: MediaConfig, side: int) -> None:
    picture = np.full((side, side, 3), 7, np.uint8)
    (media_input, *_) = preprocess_decoded(
        MediaItem(IMAGE, picture, "image"), config, {}, MediaLimits(2**22, 16)
    ).inputs
    picture[:] = 8
    assert set(bytes(media_input.features.data)) == {7}
