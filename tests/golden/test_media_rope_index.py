"""Positions on three axes of random prompts with images and videos, against transformers' `get_rope_index`."""

from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.video_utils import VideoMetadata

from ratoon.core.config import MediaSettings
from ratoon.media.decode import VideoFile
from ratoon.media.items import MediaItem
from ratoon.media.processor import MediaProcessor, _time_interval
from ratoon.media.rope_index import Span, pack_positions, rope_index
from tests.golden.media_oracle import QWEN
from tests.unit.media.test_media_files import video

MERGE = 2
TEXT, IMAGE, VIDEO = 0, 1, 2


def oracle(kind: type, types: list[int], images: list, videos: list, seconds: list[float], tokens_per_second: float):
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=tokens_per_second)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = MethodType(kind.get_vision_position_ids, model)
    positions, deltas = kind.get_rope_index(
        model,
        torch.zeros(1, len(types), dtype=torch.long),
        torch.tensor([types]),
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return positions[:, 0].numpy(), int(deltas[0, 0])


sides = st.integers(1, 6).map(lambda side: MERGE * side)
texts = st.integers(1, 7)
images = st.tuples(st.just(IMAGE), st.just(1), sides, sides, st.just(0.0))
videos = st.tuples(st.just(VIDEO), st.integers(1, 9), sides, sides, st.floats(0.0625, 3.0, width=32))
layouts = st.tuples(texts, st.lists(st.tuples(st.one_of(images, videos), texts), max_size=4))


@pytest.mark.parametrize("kind", [Qwen2VLModel, Qwen2_5_VLModel])
@given(layouts, st.sampled_from([1, 2, 4, 25]))
@settings(max_examples=80, deadline=None)
def test_positions_and_delta(kind: type, layout, tokens_per_second: int) -> None:
    first, media = layout
    rate = 0.0 if kind is Qwen2VLModel else float(tokens_per_second)
    types, spans = [TEXT] * first, []
    for (modality, steps, high, wide, seconds), behind in media:
        spans.append(Span(len(types), (steps, high, wide), _time_interval(rate, seconds)))
        types += [modality] * (steps * high * wide // MERGE**2) + [TEXT] * behind
    grids = {kind: [list(one[1:4]) for one, _ in media if one[0] == kind] for kind in (IMAGE, VIDEO)}
    seconds = [one[4] for one, _ in media if one[0] == VIDEO]
    expected, delta = oracle(kind, types, grids[IMAGE], grids[VIDEO], seconds, tokens_per_second)
    found, found_delta = rope_index(len(types), spans, MERGE)
    np.testing.assert_array_equal(found, expected)
    # What `generate` goes on with; `delta` of transformers is behind the greatest position, which a video's time may be
    assert found.dtype == np.int32 and found_delta == expected[:, -1].max() + 1 - len(types) <= delta
    has_time_ahead = expected.max() > expected[:, -1].max()
    assert (found_delta < delta) == has_time_ahead
    packed = pack_positions(found, found_delta)
    assert np.frombuffer(packed.packed, np.int32).reshape(3, -1).tolist() == expected.tolist()


@pytest.mark.parametrize("asked", [{}, {"fps": 1.0}, {"fps": 4.0}, {"num_frames": 6}])
@pytest.mark.parametrize("rate", [5, 12])
def test_the_time_of_a_file_is_that_of_the_frames_that_are_taken(rate: int, asked: dict) -> None:
    """transformers' processor gives its model `second_per_grid_ts`, which follows from the frames that it took."""
    data = video(num_frames=12, rate=rate)
    processor = MediaProcessor(QWEN, None, MediaSettings(), rope_axes=3)
    small = {"min_pixels": 784, "max_pixels": 4 * 784}
    item = MediaItem("video", data, "video")
    prompt = processor.process("prompt", [1, QWEN.video_token_id, 2, 3], [item], {**small, **asked})
    (feature,) = prompt.features
    file = VideoFile(data, "video", 2**20)
    num_taken = feature.data.grid[0] * QWEN.vision.temporal_patch_size
    metadata = VideoMetadata(file.num_frames, fps=file.fps, frames_indices=[*range(num_taken)])
    seconds = QWEN.vision.temporal_patch_size / metadata.sampled_fps
    types = [TEXT, *[VIDEO] * feature.length, TEXT, TEXT]
    expected, _ = oracle(Qwen2_5_VLModel, types, [], [list(feature.data.grid)], [seconds], 2.0)
    assert np.frombuffer(prompt.rope.packed, np.int32).reshape(3, -1).tolist() == expected.tolist()
    assert feature.data.grid[0] > 1 and expected[0].max() > 1, "time passes"
