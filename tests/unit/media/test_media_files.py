"""Files of strangers are decoded in children with limits: what is wrong with one is an error that names it."""

import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

import msgspec
import numpy as np
import pytest
from PIL import Image

from ratoon.core.config import MediaSettings
from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO
from ratoon.media import process
from ratoon.media.decode import VideoFile
from ratoon.media.families import FAMILIES
from ratoon.media.items import MediaItem
from ratoon.media.preprocess import MediaLimits, preprocess_decoded, preprocess_file, read_decoded
from ratoon.media.process import Job, MediaProcesses, make_job
from ratoon.media.processor import MediaProcessor
from tests.golden.media_oracle import GEMMA, IDEFICS, QWEN, drawn, files, saved

LIMITS = MediaLimits(2**22, 16)
FIELD = "messages[0].content[1].image_url"
FILES = files()


def in_child(data: bytes, modality: str = IMAGE, limits: MediaLimits = LIMITS, config=QWEN, **asked):
    return shared_child().ask(make_job(modality, config, asked, limits, FIELD), data)


@cache
def shared_child() -> MediaProcesses:
    """For tests of answers alone: a child takes half a second to start, and serves on after a refusal."""
    return MediaProcesses(1)


@pytest.fixture(scope="module", autouse=True)
def _close_the_shared_child() -> Iterator[None]:
    yield
    shared_child().close()
    shared_child.cache_clear()


def refused(data: bytes, modality: str = IMAGE, limits: MediaLimits = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as error:
        in_child(data, modality, limits)
    assert error.value.field == FIELD
    return error.value


def png_of(width: int, height: int, pixels: bytes) -> bytes:
    """A grey picture with this header, whatever its pixels are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def video(num_frames: int = 10, rate: int = 5, size: tuple[int, int] = (64, 48), format: str = "mp4") -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream("mpeg4" if format == "mp4" else "mjpeg", rate=Fraction(rate))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p" if format == "mp4" else "yuvj420p"
        for index in range(num_frames):
            picture = np.full((size[1], size[0], 3), 20 * index, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


# ---- images ----


def test_a_child_gives_what_this_process_would() -> None:
    children = MediaProcesses(1)
    try:
        for name in ("jpeg", "16 bit", "turned", "animated webp"):
            expected = preprocess_file(IMAGE, FILES[name], GEMMA, {}, LIMITS, FIELD)
            assert children.ask(make_job(IMAGE, GEMMA, {}, LIMITS, FIELD), FILES[name]) == expected
        (child,) = children._idle
        assert child.process.poll() is None
    finally:
        children.close()


def test_a_large_answer_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's own pieces are as long as ever: those of the question are short here."""
    monkeypatch.setattr(process, "MAX_FRAME_BYTES", 1000)
    assert in_child(FILES["png"]) == preprocess_file(IMAGE, FILES["png"], QWEN, {}, LIMITS, FIELD)


def test_too_many_pixels_are_refused_by_the_header_alone() -> None:
    error = refused(png_of(100_000, 100_000, b""))
    assert "100000 × 100000 pixels" in error.problem and str(LIMITS.max_pixels) in error.expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a picture",
        FILES["png"][:200],
        FILES["jpeg"][: len(FILES["jpeg"]) // 2],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        png_of(10, 10, b"\0" * 5),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "postscript", "too few pixels"],
)
def test_damaged_and_unknown_files_are_refused(data: bytes) -> None:
    error = refused(data)
    assert error.expected


def problem_with(data: bytes, **changed: float) -> str:
    """What a child says that has other limits for this job, and answers the next one."""
    children = MediaProcesses(1)
    job = make_job(IMAGE, QWEN, {}, LIMITS, FIELD)
    try:
        with pytest.raises(RequestError) as error:
            children.ask(msgspec.structs.replace(job, **changed), data)
        (child,) = children._idle
        assert children.ask(job, data).inputs
        assert children._idle == [child]
    finally:
        children.close()
    assert error.value.field == FIELD
    return error.value.problem


BOMB = png_of(2000, 2000, b"\0" * (2001 * 2000))  # a few thousand bytes


def test_a_file_that_takes_much_memory_ends_its_own_job_alone() -> None:
    assert len(BOMB) < 10_000
    assert "MiB of memory" in problem_with(BOMB, memory_bytes=2**20)


def test_a_file_that_takes_long_ends_its_own_job_alone() -> None:
    assert "processor time" in problem_with(BOMB, seconds=0.001)


def test_a_child_that_dies_is_replaced() -> None:
    children = MediaProcesses(1)
    job = make_job(IMAGE, QWEN, {}, LIMITS, FIELD)
    try:
        expected = children.ask(job, FILES["png"])
        (child,) = children._idle
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        assert children.ask(job, FILES["png"]) == expected
    finally:
        children.close()


def test_a_child_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_WAIT_SECONDS", 0.01)
    children = MediaProcesses(1)  # the start of a child takes longer
    try:
        with pytest.raises(RequestError, match=r"within 0\.01 seconds"):
            children.ask(make_job(IMAGE, QWEN, {}, LIMITS, FIELD), FILES["png"])
    finally:
        children.close()


# ---- videos ----


def test_frames_of_a_file_are_taken_at_equal_distances() -> None:
    data = video(num_frames=12, rate=6)
    found = in_child(data, VIDEO, min_pixels=784, max_pixels=8 * 784)  # 2 s, of which 2 frames a second are taken
    assert found.inputs[0].grid[0] == 2 and found.seconds_per_step == pytest.approx(2 / (4 / 12 * 6))
    pixels = np.asarray(found.inputs[0].features.view()).reshape(2, -1, 3, 2, 196)
    levels = pixels.mean(axis=(1, 2, 4)).flatten()
    np.testing.assert_allclose(levels, [20 * index for index in (0, 3, 6, 9)], atol=6)


def test_options_say_how_many_frames_are_taken() -> None:
    small = {"min_pixels": 784, "max_pixels": 8 * 784}
    data = video(num_frames=12, rate=6)
    assert in_child(data, VIDEO, fps=4.0, **small).inputs[0].grid[0] == 4
    assert in_child(data, VIDEO, num_frames=6, **small).inputs[0].grid[0] == 3
    assert in_child(data, VIDEO, MediaLimits(2**22, 2), num_frames=6, **small).inputs[0].grid[0] == 1


@pytest.mark.parametrize(
    ("total", "rate", "asked", "number", "first", "last"),
    [
        (300, 30.0, {}, 20, 15, 285),
        (300, 29.97, {"fps": 0.5}, 4, 75, 225),
        (4725, 24.0, {"num_frames": 55, "max_frames": 11}, 56, 84, 4640),
        (1446, 12.0, {"fps": 7.5, "max_frames": 43}, 42, 34, 1411),
        (9, 60.0, {}, 4, 2, 6),
        (2, 60.0, {}, 2, 1, 1),
    ],
)
def test_frames_of_qwen_are_those_that_transformers_takes(
    total: int, rate: float, asked: dict, number: int, first: int, last: int
) -> None:
    """Recorded of transformers 5.22.2, whose module needs torchvision: the number, the second and the last frame of
    Qwen2VLVideoProcessor(fps=2.0).sample_frames(VideoMetadata(total, rate), **asked)."""
    family = FAMILIES["qwen2_5_vl"]
    found = family.sample(total, rate, QWEN, family.options(QWEN, asked), 1000)
    assert (len(found), found[0], found[1], found[-1]) == (number, 0, first, last)


def test_frames_are_counted_if_the_header_does_not_say_how_many() -> None:
    data = video(num_frames=7, rate=5, format="matroska")
    file = VideoFile(data, FIELD, 2**22)
    assert file.num_frames == 7 and file.fps == 5
    assert len(list(file.frames([0, 3, 9]))) == 3  # the last one takes the place of one that is not there


@pytest.mark.parametrize(
    "data", [b"", b"no video", FILES["png"][:100], video()[:300]], ids=["empty", "text", "cut png", "cut mp4"]
)
def test_damaged_videos_are_refused(data: bytes) -> None:
    assert "video" in refused(data, VIDEO).problem


def avi(scale: int, rate: int, length: int) -> bytes:
    """Eight frames, of which the header says that `length` of them are seen in `scale` / `rate` seconds each."""
    data = video(8, format="avi")
    place = data.index(b"strh") + 28
    return data[:place] + struct.pack("<IIII", scale, rate, 0, length) + data[place + 16 :]


@pytest.mark.parametrize("config", [QWEN, IDEFICS], ids=lambda config: config.family)
@pytest.mark.parametrize(
    ("scale", "rate", "length", "part"),
    [
        (2**31 - 1, 1, 8, "4.65661e-10 frames in a second"),
        (1, 2**31 - 1, 8, "2.14748e+09 frames in a second"),
        (1, 5, 2**31 - 1, "2147483647 frames"),
        (10**6, 1, 10**4, "1e+10 seconds"),
    ],
)
def test_a_header_that_names_impossible_times_is_refused(config, scale: int, rate: int, length: int, part: str) -> None:
    with pytest.raises(RequestError) as error:
        preprocess_file(VIDEO, avi(scale, rate, length), config, {}, LIMITS, FIELD)
    assert error.value.field == FIELD and part in error.value.problem


def test_large_frames_are_refused() -> None:
    assert "64 × 48 pixels" in refused(video(2), VIDEO, MediaLimits(1000, 16)).problem


# ---- what callers have decoded ----


def decoded(data, modality: str = IMAGE, **asked):
    return preprocess_decoded(read_decoded(MediaItem(modality, data, FIELD), asked, LIMITS), QWEN, asked)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (np.zeros((3000, 3000, 3), np.uint8), "3000 × 3000 pixels"),
        (np.zeros((10, 10, 2), np.uint8), "shape [10, 10, 2]"),
        (np.full((4, 4, 3), 1.5), "from 1.5 to 1.5"),
        (np.full((4, 4, 3), np.nan), "nan"),
        (np.full((4, 4, 3), 256), "from 256 to 256"),
        (np.zeros((4, 4, 3), complex), "complex"),
        (np.zeros((0, 4, 3), np.uint8), "4 × 0 pixels"),
        (np.zeros((700, 1, 3), np.uint8), "1 × 700 pixels"),
        (Image.new("L", (3000, 3000)), "3000 × 3000 pixels"),
    ],
)
def test_arrays_that_are_no_pictures_are_refused(data, part: str) -> None:
    with pytest.raises(RequestError) as error:
        decoded(data)
    assert error.value.field == FIELD and part in error.value.problem


def test_an_image_of_pillow_whose_file_is_cut_is_refused() -> None:
    with pytest.raises(RequestError, match="can't be read"):
        decoded(Image.open(io.BytesIO(FILES["jpeg"][:900])))


def test_frames_of_several_sizes_and_too_many_of_them_are_refused() -> None:
    with pytest.raises(RequestError, match="first frame 30 × 40") as error:
        decoded([drawn(30, 40), drawn(40, 40)], VIDEO)
    assert error.value.field == f"{FIELD}[1]"
    with pytest.raises(RequestError, match="17 frames"):
        decoded([drawn(30, 40)] * 17, VIDEO)
    with pytest.raises(RequestError, match="no frames"):
        decoded([], VIDEO)
    with pytest.raises(RequestError, match="str is not a frame"):
        decoded([drawn(30, 40), "x"], VIDEO)
    with pytest.raises(RequestError, match="number of frames in a second"):
        decoded(([drawn(30, 40)], {"fps": 0}), VIDEO)


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"fps": 1e-30}, "[1].fps"),
        ({"fps": 1e300}, "[1].fps"),
        ({"fps": 1, "duration": 1e300}, "[1].duration"),
        ({"fps": 1, "frames_indices": [0, 10**400]}, "[1].frames_indices"),
        ({"fps": 1, "frames_indices": [0, 1], "total_num_frames": 1e300}, "[1].total_num_frames"),
        ({"fps": 1e-6, "frames_indices": [0, 10**4]}, ""),
    ],
)
def test_facts_of_a_video_that_no_video_has_are_refused(facts: dict, field: str) -> None:
    with pytest.raises(RequestError) as error:
        decoded(([drawn(30, 40)] * 2, facts), VIDEO)
    assert error.value.field == FIELD + field


def test_times_without_positions_are_refused_before_they_are_rounded_to_whole_numbers() -> None:
    facts = {"fps": 1e-6, "frames_indices": [0, 1, 2, 3], "total_num_frames": 10**8}
    item = MediaItem(VIDEO, ([drawn(30, 40)] * 4, facts), FIELD)
    processor = MediaProcessor(QWEN, None, MediaSettings(), rope_axes=3)
    with pytest.raises(RequestError, match="seconds between two steps") as error:
        processor.process("prompt", [QWEN.video_token_id], [item], {})
    assert error.value.field == FIELD


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (QWEN, {"num_frames": 10**30}),
        (QWEN, {"min_pixels": 10**400}),
        (QWEN, {"size": {"longest_edge": 10**30}}),
        (QWEN, {"fps": 1e300}),
        (IDEFICS, {"num_frames": 10**30}),
        (IDEFICS, {"size": {"longest_edge": 10**30}}),
        (IDEFICS, {"fps": 1e-300}),
        (GEMMA, {"pan_and_scan_min_crop_size": 10**30}),
    ],
)
def test_numbers_of_options_that_are_too_large_for_a_message_are_refused_and_named(config, asked: dict) -> None:
    (name,) = asked
    with pytest.raises(RequestError) as error:
        FAMILIES[config.family].options(config, asked)
    assert error.value.field == "mm_processor_kwargs" and f"$.{name}" in error.value.problem


@pytest.mark.parametrize("asked", [{"max_pixels": 2**40, "min_pixels": 2**39}, {"size": {"longest_edge": 0}}])
def test_sizes_that_no_encoder_reads_are_refused(asked) -> None:
    with pytest.raises(RequestError):
        decoded(drawn(30, 40), **asked)


# ---- what was decoded before ----


def test_a_file_that_comes_again_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def preprocess(job: Job, data: bytes):
        jobs.append(job.asked)
        return preprocess_file(job.modality, data, job.config, job.asked, job.limits, job.field)

    monkeypatch.setattr("ratoon.media.processor.preprocess_in_child", preprocess)
    processor = MediaProcessor(QWEN, None, MediaSettings(mm_processor_kwargs={"min_pixels": 784}))

    def features(**asked):
        return processor.process("prompt", [5], [MediaItem(IMAGE, FILES["png"], FIELD)], asked).features

    first = features()
    assert features() == first and len(jobs) == 1
    assert features(min_pixels=100 * 784)[0].content_hash != first[0].content_hash and len(jobs) == 2


def test_equal_pixels_have_equal_hashes_whatever_the_file() -> None:
    processor = MediaProcessor(QWEN, None, MediaSettings())
    picture = Image.fromarray(drawn(60, 60))
    forms = [picture, np.asarray(picture), saved(picture, "PNG"), saved(picture, "BMP")]
    hashes = [
        processor.process("prompt", [5], [MediaItem(IMAGE, data, FIELD)], {}).features[0].content_hash for data in forms
    ]
    assert len(set(hashes)) == 1
    others = MediaProcessor(replace(QWEN, family="qwen2_vl"), None, MediaSettings())
    assert others.process("p", [5], [MediaItem(IMAGE, picture, FIELD)], {}).features[0].content_hash != hashes[0]
