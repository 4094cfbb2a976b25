"""Pixels that encoders get, against transformers' processors: sizes, filters, order of patches, formats of files."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ratoon.core.errors import ModelError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, MediaInput
from ratoon.media.families import FAMILIES
from ratoon.media.families.base import Preprocessed
from ratoon.media.items import MediaItem
from ratoon.media.preprocess import MediaLimits, preprocess_decoded, preprocess_file, read_decoded
from tests.golden.media_oracle import GEMMA, IDEFICS, QWEN, drawn, files

LIMITS = MediaLimits(2**24, 64)
FILES = files()
SIZES = [(28, 28), (1, 1), (300, 20), (17, 255), (640, 480), (31, 57), (224, 224), (57, 56)]


def ours(config: MediaConfig, picture, modality: str = IMAGE, **asked) -> Preprocessed:
    return preprocess_decoded(read_decoded(MediaItem(modality, picture, "image"), asked, LIMITS), config, asked)


def pixels_of(data: MediaInput) -> np.ndarray:
    return np.asarray(data.features.view()).reshape(data.features.shape)


def assert_same_pixels(found: np.ndarray, expected: np.ndarray, config: MediaConfig) -> None:
    """`found` is [..., channels, pixels], uint8; the other one is normalised."""
    mean, std = (np.array(one, np.float32)[:, None] for one in (config.mean, config.std))
    assert found.dtype == np.uint8
    np.testing.assert_allclose((found.astype(np.float32) / np.float32(255) - mean) / std, expected, atol=1e-6, rtol=0)


# ---- Qwen ----


def assert_like_qwen(preprocessed: Preprocessed, picture, config: MediaConfig = QWEN, **options) -> None:
    expected = Qwen2VLImageProcessorPil(**options)(picture, return_tensors="np")
    (data,) = preprocessed.inputs
    assert data.grid == tuple(expected["image_grid_thw"][0])
    assert data.num_rows == np.prod(data.grid) // 4
    frames = expected["pixel_values"].reshape(-1, 3, 2, 14 * 14)  # the picture twice
    assert_same_pixels(pixels_of(data).reshape(-1, 3, 14 * 14), frames[:, :, 0], config)
    np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_qwen_patches_of_any_size(width: int, height: int) -> None:
    picture = Image.fromarray(drawn(width, height))
    assert_like_qwen(ours(QWEN, picture), picture)


@given(st.integers(1, 180), st.integers(1, 180), st.integers(1, 60), st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_qwen_sizes_within_limits_of_pixels(width: int, height: int, least: int, more: int) -> None:
    picture = Image.fromarray(drawn(width, height))
    limits = {"min_pixels": least * 784, "max_pixels": (least + more) * 784}
    assert_like_qwen(ours(QWEN, picture, **limits), picture, **limits)
    in_files = replace(QWEN, processor={"min_pixels": 1, **limits})
    assert_like_qwen(ours(in_files, picture), picture, **limits)
    as_size = {"size": {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}}
    assert_like_qwen(ours(in_files, picture, **as_size), picture, **as_size)


def test_qwen_videos_have_sizes_of_their_own_in_files() -> None:
    config = replace(QWEN, processor={"max_pixels": 784, "video_processor": {"min_pixels": 1, "max_pixels": 8 * 784}})
    picture = drawn(112, 56)
    assert ours(config, picture).inputs[0].grid == (1, 2, 2)
    assert ours(config, [picture, picture], VIDEO).inputs[0].grid == (1, 4, 8)
    alone = replace(QWEN, processor={"min_pixels": 1, "max_pixels": 784})
    assert ours(alone, [picture, picture], VIDEO).inputs[0].grid == (1, 2, 2)
    with pytest.raises(ModelError, match="preprocessor_config"):
        ours(replace(QWEN, processor={"max_pixels": "many"}), picture)


def test_qwen_video_has_groups_of_frames_in_a_patch() -> None:
    """The processor of videos needs torchvision; that of images gives the patches of each frame in the same order."""
    frames = [drawn(90 + 0 * index, 70) // (index + 1) for index in range(5)]
    limits = {"min_pixels": 8 * 784, "max_pixels": 20 * 784}
    preprocessed = ours(QWEN, (np.stack(frames), {"fps": 4.0}), VIDEO, **limits)
    (data,) = preprocessed.inputs
    of_frames = [
        Qwen2VLImageProcessorPil(**limits)(Image.fromarray(frame), return_tensors="np")
        for frame in [*frames, frames[-1]]
    ]
    _, high, wide = of_frames[0]["image_grid_thw"][0]
    assert data.grid == (3, high, wide) and data.num_rows == 3 * high * wide // 4
    values = np.stack([one["pixel_values"].reshape(-1, 3, 2, 196)[:, :, 0] for one in of_frames])
    in_pairs = values.reshape(3, 2, high * wide, 3, 196).transpose(0, 2, 3, 1, 4)  # step, patch, channel, frame
    assert_same_pixels(pixels_of(data).reshape(-1, 3, 2 * 196), in_pairs.reshape(-1, 3, 2 * 196), QWEN)
    assert preprocessed.seconds_per_step == 2 / 4


# ---- the others ----


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_gemma_squares(width: int, height: int) -> None:
    picture = Image.fromarray(drawn(width, height))
    (data,) = ours(GEMMA, picture).inputs
    expected = Gemma3ImageProcessorPil(do_pan_and_scan=False)(picture, return_tensors="np")["pixel_values"]
    assert_same_pixels(pixels_of(data).reshape(3, -1), expected.reshape(3, -1), GEMMA)
    assert data.num_rows == 16 and data.grid == (1, 16, 16)


@pytest.mark.parametrize(("width", "height"), [(300, 60), (60, 300), (100, 90), (130, 40), (520, 64), (64, 130)])
def test_gemma_pan_and_scan(width: int, height: int) -> None:
    asked = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 48,
        "pan_and_scan_max_num_crops": 5,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    picture = Image.fromarray(drawn(width, height))
    expected = Gemma3ImageProcessorPil(**asked)(picture, return_tensors="np")
    found = ours(GEMMA, picture, **asked)
    assert found.tile_columns == expected["num_crops"][0]
    pixels = np.stack([pixels_of(data).reshape(3, -1) for data in found.inputs])
    assert_same_pixels(pixels, expected["pixel_values"].reshape(len(pixels), 3, -1), GEMMA)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("width", "height"), [*SIZES, (56, 224), (225, 224)])
def test_idefics_tiles(width: int, height: int, splits: bool) -> None:
    picture = Image.fromarray(drawn(width, height))
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}, do_image_splitting=splits
    )
    expected = processor(picture, return_tensors="np", return_row_col_info=True)
    found = ours(IDEFICS, picture, do_image_splitting=splits)
    assert (found.tile_rows, found.tile_columns) == (expected["rows"][0][0], expected["cols"][0][0])
    pixels = np.stack([pixels_of(data).reshape(3, -1) for data in found.inputs])
    assert_same_pixels(pixels, expected["pixel_values"][0].reshape(len(pixels), 3, -1), IDEFICS)
    assert expected["pixel_attention_mask"].all()


# ---- files ----


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("config", [QWEN, GEMMA, IDEFICS], ids=["qwen", "gemma", "idefics"])
def test_pictures_in_files(name: str, config: MediaConfig) -> None:
    """Files are turned as their EXIF data says, and what is transparent shows white."""
    with Image.open(io.BytesIO(FILES[name])) as image:
        picture = ImageOps.exif_transpose(image)
        found = preprocess_file(IMAGE, FILES[name], config, {}, LIMITS, "image")
        if config is QWEN:
            return assert_like_qwen(found, picture)
        if config is GEMMA:
            expected = Gemma3ImageProcessorPil(do_pan_and_scan=False)(picture, return_tensors="np")["pixel_values"]
        else:
            processor = Idefics3ImageProcessorPil(size={"longest_edge": 224}, max_image_size={"longest_edge": 56})
            expected = processor(picture, return_tensors="np")["pixel_values"][0]
    pixels = np.stack([pixels_of(data).reshape(3, -1) for data in found.inputs])
    assert_same_pixels(pixels, expected.reshape(len(pixels), 3, -1), config)
    return None


def test_a_turned_file_is_upright() -> None:
    (data,) = preprocess_file(IMAGE, FILES["turned"], QWEN, {}, LIMITS, "image").inputs
    assert data.grid[1] > data.grid[2]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("first", [True, False])
def test_arrays_with_channels_in_front_and_behind(channels: int, first: bool) -> None:
    array = drawn(60, 40, channels)
    given_array = np.moveaxis(array, -1, 0) if first else array
    assert_like_qwen(ours(QWEN, given_array), given_array)


def test_floats_and_tensors_are_the_same_picture() -> None:
    import torch

    array = drawn(60, 40)
    expected = ours(QWEN, array).inputs
    assert ours(QWEN, array / 255).inputs == expected
    assert ours(QWEN, torch.from_numpy(array)).inputs == expected
    assert ours(QWEN, torch.from_numpy(array).permute(2, 0, 1)).inputs == expected
    assert ours(QWEN, array.astype(np.int64)).inputs == expected


# ---- texts around rows ----


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (1, 2), (3, 2)])
def test_texts_of_idefics(rows: int, columns: int) -> None:
    theirs = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=1,
    )
    expected = Idefics3Processor.replace_image_token(theirs, {"rows": [[rows]], "cols": [[columns]]}, 0)
    assert FAMILIES["idefics3"].replacement(IMAGE, Preprocessed([], rows, columns), "<image>") == expected


@pytest.mark.parametrize("num_crops", [0, 1, 3])
def test_texts_of_gemma(num_crops: int) -> None:
    whole = "\n\n<start_of_image><row><end_of_image>\n\n"
    theirs = SimpleNamespace(full_image_sequence=whole)
    expected = Gemma3Processor.replace_image_token(theirs, {"num_crops": [num_crops]}, 0)
    assert FAMILIES["gemma3"].replacement(IMAGE, Preprocessed([], tile_columns=num_crops), "<row>") == expected
