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
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from ratoon.core.errors import ModelError, RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, MediaInput
from ratoon.media.families import FAMILIES
from ratoon.media.families.base import Preprocessed, VideoFacts
from ratoon.media.families.idefics3 import Edge, number_in_words
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


# ---- videos of SmolVLM ----

SMOLVLM_FILES = {
    "size": {"longest_edge": 224},
    "max_image_size": {"longest_edge": 56},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 56}},
}
SMOLVLM = replace(IDEFICS, processor=SMOLVLM_FILES)
SMOL = FAMILIES["idefics3"]


@given(
    st.integers(1, 9000),
    st.sampled_from([1.0, 5.0, 12.0, 23.976, 24.0, 29.97, 30.0, 60.0]),
    st.none() | st.sampled_from([0.1, 0.5, 2.0, 7.5]),
    st.none() | st.integers(1, 100),
)
@settings(max_examples=200, deadline=None)
def test_smolvlm_takes_the_frames_that_transformers_takes(
    total: int, rate: float, fps: float | None, num_frames: int | None
) -> None:
    """The processor itself needs torchvision, but not to choose frames."""
    asked = {"fps": fps, "num_frames": num_frames}
    found = SMOL.sample(total, rate, SMOLVLM, SMOL.options(SMOLVLM, asked), 10**6)
    theirs = SimpleNamespace(fps=1, num_frames=64)  # as it reads them from the same file
    metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    assert found == SmolVLMVideoProcessor.sample_frames(theirs, metadata, **asked).tolist()


def test_options_of_smolvlms_videos_come_from_files_settings_and_requests() -> None:
    def of(files, **asked):
        return SMOL.options(replace(IDEFICS, processor=files), asked).video

    assert (of(SMOLVLM_FILES).fps, of(SMOLVLM_FILES).num_frames) == (1, 64)
    assert of(SMOLVLM_FILES).size.longest_edge == 224, "the size beside it takes precedence, as in transformers"
    assert of({"video_sampling": SMOLVLM_FILES["video_sampling"]}).size.longest_edge == 56
    assert (of({}).fps, of({}).num_frames, of({}).size) == (1, 64, None)
    own = {"size": {"longest_edge": 100}, "fps": 3, "num_frames": 7}
    found = of({**SMOLVLM_FILES, "video_processor": own})
    assert (found.fps, found.num_frames, found.size.longest_edge) == (3, 7, 100)
    found = of({**SMOLVLM_FILES, "video_processor": own}, fps=2, num_frames=5, size={"longest_edge": 50})
    assert (found.fps, found.num_frames, found.size.longest_edge) == (2, 5, 50)
    of_images = SMOL.options(replace(IDEFICS, processor={**SMOLVLM_FILES, "video_processor": own}), {}).image
    assert of_images.size == Edge(224)
    with pytest.raises(ModelError, match="video_sampling"):
        of({"video_sampling": 5})
    with pytest.raises(RequestError, match="mm_processor_kwargs"):
        of({}, num_frames=0)
    assert SMOL.sample(9000, 30.0, SMOLVLM, SMOL.options(SMOLVLM, {}), 3) == [30, 4500, 8970], "max_video_frames"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_frames_of_smolvlm_are_pictures_that_are_not_cut(width: int, height: int) -> None:
    frames = [Image.fromarray(drawn(width, height)), Image.fromarray(255 - drawn(width, height))]
    found = ours(SMOLVLM, frames, VIDEO)
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}, do_image_splitting=False
    )
    expected = processor([frames], return_tensors="np")["pixel_values"][0]
    assert [(data.modality, data.num_rows, data.grid) for data in found.inputs] == [(VIDEO, 4, (1, 4, 4))] * 2
    pixels = np.stack([pixels_of(data).reshape(3, -1) for data in found.inputs])
    assert_same_pixels(pixels, expected.reshape(2, 3, -1), SMOLVLM)


# Of drawn(640, 480), by transformers 5.22.2 and torchvision 0.28, with the files above as preprocessor_config.json:
# SmolVLMVideoProcessor.from_pretrained(folder)(frames, do_rescale=False, do_normalize=False, return_tensors="np")
# ["pixel_values"][0][0, :, 5::20, 5::20]
BY_TORCHVISION = [
    [[147, 134, 131], [127, 123, 125], [122, 125, 132]],
    [[122, 149, 176], [141, 170, 194], [162, 187, 211]],
    [[178, 179, 174], [175, 179, 174], [181, 180, 170]],
]


def test_frames_of_smolvlm_are_near_those_that_torchvision_makes() -> None:
    """Torchvision's filter has weights of fewer bits than Pillow's: pixels differ by one level here and there."""
    found = ours(SMOLVLM, drawn(640, 480)[None], VIDEO)
    some = pixels_of(found.inputs[0])[:, 5::20, 5::20].astype(int)
    assert np.abs(some - np.array(BY_TORCHVISION)).max() <= 1


@pytest.mark.parametrize(
    ("indices", "fps", "duration"),
    [([0, 30, 61, 3700], 30.0, 125.9), ([0], 24.0, 0.5), ([*range(104)], 1.0, None), ([9000, 123456], 2.0, 90000.0)],
)
def test_texts_of_smolvlms_videos(
    indices: list[int], fps: float, duration: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", number_in_words)  # is tested below
    theirs = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        image_token="<image>",
        image_seq_len=1,
    )
    metadata = VideoMetadata(total_num_frames=200_000, fps=fps, duration=duration, frames_indices=indices)
    inputs = {"pixel_values": np.zeros((1, len(indices), 3, 1, 1)), "video_metadata": [metadata]}
    expected = SmolVLMProcessor.replace_video_token(theirs, inputs, 0)
    frames = [np.zeros((1, 1, 3), np.uint8)] * len(indices)
    facts = VideoFacts(fps, [index / fps for index in indices], duration)
    read = SMOL.read_video(frames, facts, SMOLVLM, SMOL.options(SMOLVLM, {}), "video")
    assert SMOL.replacement(VIDEO, read, "<image>") == expected


def test_facts_of_frames_have_the_names_of_transformers() -> None:
    frames = np.zeros((3, 8, 8, 3), np.uint8)
    facts = {"fps": 10, "total_num_frames": 60, "frames_indices": np.array([0, 20, 40]), "duration": 6.0}
    found = ours(SMOLVLM, (frames, facts), VIDEO)
    assert found.frame_seconds == [0, 2, 4] and found.duration == 6.0
    assert ours(QWEN, (frames, facts), VIDEO).seconds_per_step == 2 / (3 / 60 * 10)
    assert ours(SMOLVLM, (frames, {"fps": 2.0}), VIDEO).frame_seconds == [0, 0.5, 1]
    assert ours(SMOLVLM, frames, VIDEO).frame_seconds == [0, 1 / 24, 2 / 24]
    for wrong, field in [
        ({"frames_indices": [0, 1]}, "frames_indices"),
        ({"frames_indices": [0, 1, -1]}, "frames_indices"),
        ({"frames_indices": "abc"}, "frames_indices"),
        ({"duration": "long"}, "duration"),
        ({"total_num_frames": 0}, "total_num_frames"),
        ({"fps": float("nan")}, "fps"),
    ]:
        with pytest.raises(RequestError) as error:
            ours(SMOLVLM, (frames, facts | wrong), VIDEO)
        assert error.value.field == f"image[1].{field}"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"), (13, "thirteen"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred"),
        (128, "one hundred and twenty-eight"), (1000, "one thousand"), (1001, "one thousand and one"),
        (1100, "one thousand, one hundred"), (2345, "two thousand, three hundred and forty-five"),
        (100_099, "one hundred thousand and ninety-nine"),
    ],
)  # fmt: skip
def test_numbers_in_words_are_those_of_num2words(number: int, words: str) -> None:
    """Recorded of num2words 0.5.14, which was asked for all numbers below 20,000 and some of those below a million."""
    assert number_in_words(number) == words


# ---- files ----


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("config", [QWEN, GEMMA, IDEFICS], ids=["qwen", "gemma", "idefics"])
@pytest.mark.one_in(3)
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
