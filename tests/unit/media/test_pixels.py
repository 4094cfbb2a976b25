"""Pictures before they are cut to patches."""

import numpy as np
import pytest

from ratoon.core.media import IMAGE, MediaConfig
from ratoon.media.items import MediaItem
from ratoon.media.preprocess import MediaLimits, preprocess_decoded, read_decoded
from tests.golden.media_oracle import GEMMA, IDEFICS, QWEN


@pytest.mark.parametrize(("config", "side"), [(QWEN, 56), (GEMMA, 224), (IDEFICS, IDEFICS.vision.image_size)])
def test_what_the_caller_does_with_a_picture_later_does_not_change_the_input(config: MediaConfig, side: int) -> None:
    picture = np.full((side, side, 3), 7, np.uint8)
    decoded = read_decoded(MediaItem(IMAGE, picture, "image"), {}, MediaLimits(2**22, 16))
    (media_input, *_) = preprocess_decoded(decoded, config, {}).inputs
    picture[:] = 8
    assert set(bytes(media_input.features.data)) == {7}
