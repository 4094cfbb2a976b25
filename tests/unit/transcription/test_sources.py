"""Recordings in all their forms, and what is none: decoded to one channel at 16 kHz, or refused with a reason."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import numpy as np
import pytest

from ratoon.core.errors import RequestError
from ratoon.transcription.audio import AudioLimits, read_samples
from tests.unit.transcription.speech import RATE, tone, wav

av = pytest.importorskip("av")


def read(audio, **limits) -> np.ndarray:
    pieces = list(read_samples(audio, AudioLimits(**limits)))
    assert all(piece.dtype == np.float32 and piece.ndim == 1 for piece in pieces)
    return np.concatenate(pieces)


def encoded(container: str, codec: str, rate: int, channels: int = 1, seconds: float = 2.0) -> bytes:
    file = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(file, "w", format=container) as writer:
        stream = writer.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(tone(seconds, rate, channels).reshape(1, -1), format="s16", layout=layout)
        frame.rate, frame.pts = rate, 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            writer.mux(packet)
    return file.getvalue()


def is_tone(samples: np.ndarray, hertz: float = 440.0) -> bool:
    middle = samples[RATE // 2 : RATE // 2 + RATE]
    return int(np.abs(np.fft.rfft(middle)).argmax()) == round(hertz) and abs(np.abs(middle).max() - 8000 / 32768) < 0.05


def test_a_wav_file_at_16_khz_comes_as_it_is():
    samples = tone(1.5)
    np.testing.assert_allclose(read(wav(samples)), samples[:, 0] / 32768, atol=1e-7)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (48000, 2), (44100, 2), (11025, 1), (96000, 2)])
def test_other_rates_are_resampled_and_channels_mixed_down(rate, channels):
    samples = read(wav(tone(2, rate, channels), rate))
    assert abs(len(samples) - 2 * RATE) <= 32
    assert is_tone(samples)


def test_channels_are_averaged():
    left, right = tone(2, hertz=440), tone(2, hertz=600)
    mixed = read(wav(np.concatenate([left, right], axis=1)))
    np.testing.assert_allclose(mixed, (left + right)[:, 0] / 2 / 32768, atol=1 / 32768)
    opposite = read(wav(np.concatenate([left, -left], axis=1)))
    assert np.abs(opposite).max() <= 1 / 32768


@pytest.mark.parametrize(
    ("container", "codec", "rate", "channels"),
    [
        ("mp3", "libmp3lame", 44100, 2),
        ("flac", "flac", 48000, 2),
        ("ogg", "libopus", 48000, 1),
        ("ogg", "flac", 8000, 1),
        ("mp4", "aac", 48000, 2),
        ("webm", "libopus", 48000, 2),
        ("matroska", "pcm_s16le", 8000, 1),
        ("adts", "aac", 16000, 1),
    ],
)
def test_containers_and_codecs(container, codec, rate, channels):
    samples = read(encoded(container, codec, rate, channels))
    assert abs(len(samples) - 2 * RATE) < 0.15 * RATE
    assert is_tone(samples)


def test_a_recording_is_a_path_or_bytes_or_an_open_file(tmp_path):
    data = wav(tone(1))
    path = tmp_path / "tone.wav"
    path.write_bytes(data)
    expected = read(data)
    for audio in (path, str(path), bytearray(data), memoryview(data), io.BytesIO(data)):
        np.testing.assert_array_equal(read(audio), expected)
    with path.open("rb") as file:
        np.testing.assert_array_equal(read(file), expected)
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        os.write(writing, data[:40_000])
        os.close(writing)
        np.testing.assert_array_equal(read(pipe), expected)
    with path.open(errors="replace") as file, pytest.raises(RequestError, match="file: is open as text"):
        read(file)


def test_a_recording_is_samples_with_their_rate():
    samples = tone(2, 48000, 2)
    for audio in ((samples, 48000), {"audio": samples, "sampling_rate": 48000}, (samples / 32768, 48000)):
        assert is_tone(read(audio))
    plain = np.linspace(-0.75, 0.75, 500, dtype=np.float32)
    np.testing.assert_array_equal(read((plain, RATE)), plain)
    np.testing.assert_array_equal(read((list(map(float, plain)), RATE)), plain)
    np.testing.assert_allclose(read(((plain * (2.0**31 - 1)).astype(np.int32), RATE)), plain, atol=1e-6)


def broken(data: bytes, where: slice) -> bytes:
    changed = bytearray(data)
    changed[where] = np.random.default_rng(0).bytes(len(changed[where]))
    return bytes(changed)


@pytest.mark.parametrize(
    ("audio", "problem"),
    [
        (b"", "is empty"),
        (b"x", "can't be read as a recording"),
        (b"RIFF" + bytes(40), "can't be read as a recording"),
        (np.random.default_rng(0).bytes(50_000), "can't be read as a recording"),
        (wav(tone(0)), "is 0 seconds long"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "can't be read as a recording"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "can't be read as a recording"),
        (broken(encoded("flac", "flac", 16000), slice(0, 200)), "can't be read as a recording"),
        (encoded("mp4", "aac", 48000)[:2000], "can't be read as a recording"),
        (wav(tone(1), rate=1), "the sampling rate is 1"),
        (wav(tone(1), rate=2**31 - 1), "the sampling rate is|can't be read"),
        (wav(tone(0.1, channels=200)), "can't be read as a recording"),
        ("/nowhere/at/all.wav", "can't read /nowhere/at/all.wav"),
        (5, "int is not a recording"),
        (np.zeros(5), "ndarray is not a recording"),
        ({"audio": [0.0]}, "a mapping with"),
        (([0.0], 0), "the sampling rate is 0"),
        (([0.0], "16000"), "the sampling rate is '16000'"),
        (([[0.0], [0.0, 1.0]], RATE), "the samples are not an array"),
        ((["a"], RATE), "the samples are <U1"),
        ((np.zeros((2, 16000)), RATE), r"the samples have the shape \[2, 16000\]"),
        (([float("nan")], RATE), "has samples that are not finite"),
        (([], RATE), "the samples|is 0 seconds long"),
    ],
)
def test_what_is_no_recording_is_refused_with_a_reason(audio, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read(audio)
    assert caught.value.field == "file"
    assert caught.value.expected


def test_a_video_without_sound_is_refused():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as writer:
        stream = writer.add_stream("ffv1", rate=10)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for packet in [*stream.encode(av.VideoFrame(16, 16, "yuv420p")), *stream.encode(None)]:
            writer.mux(packet)
    with pytest.raises(RequestError, match="file: has no audio"):
        read(file.getvalue())


def test_a_file_that_is_broken_in_the_middle_is_read_as_far_as_it_goes():
    data = encoded("mp3", "libmp3lame", 44100, seconds=5)
    half = read(data[: len(data) // 2])
    assert 2 * RATE < len(half) < 3 * RATE
    damaged = read(broken(data, slice(len(data) // 2, len(data) // 2 + 500)))
    assert len(damaged) > 4 * RATE


@pytest.mark.slow
def test_whatever_happens_to_a_file_it_is_read_or_refused():
    generator = np.random.default_rng(1)
    files = [wav(tone(0.2, 8000, 2), 8000), encoded("mp3", "libmp3lame", 44100), encoded("mp4", "aac", 48000)]
    for number in range(150):
        data = bytearray(files[number % len(files)])
        for place in generator.integers(0, 400, size=generator.integers(1, 20)):
            data[place] = generator.integers(0, 256)
        with contextlib.suppress(RequestError):
            read(bytes(data[: generator.integers(1, 2 * len(data))]), max_seconds=60)


def test_what_is_too_long_is_refused_before_all_of_it_is_decoded():
    data = io.BytesIO(encoded("flac", "flac", 48000, seconds=60))
    with pytest.raises(RequestError, match="file: is longer than 2 seconds"):
        list(read_samples(data, AudioLimits(max_seconds=2)))
    assert data.tell() < len(data.getvalue())
    assert len(read(wav(tone(2)), max_seconds=2)) == 2 * RATE


def test_a_file_that_is_too_large_is_refused():
    data = wav(tone(1))
    assert len(read(data, max_bytes=len(data))) == RATE
    with pytest.raises(RequestError, match=rf"file: has {len(data)} bytes; at most {len(data) - 1}"):
        read(data, max_bytes=len(data) - 1)


class TestWithoutPyAV:
    @pytest.fixture(autouse=True)
    def _no_av(self, monkeypatch):
        for module in ("ratoon.transcription.av_decoding", "ratoon.models.resample"):
            monkeypatch.setitem(sys.modules, module, None)

    @pytest.mark.parametrize("channels", [1, 2])
    def test_plain_wav_files_are_read_all_the_same(self, channels):
        samples = tone(2, channels=channels)
        np.testing.assert_allclose(read(wav(samples)), samples[:, 0] / 32768, atol=1e-7)

    def test_a_wav_file_that_was_cut_off_is_read_as_far_as_it_goes(self):
        assert len(read(wav(tone(2, channels=2))[:-3])) == 2 * RATE - 1

    @pytest.mark.parametrize("audio", [wav(tone(1, 8000), 8000), b"ID3 something else", ([0.0] * 10, 8000)])
    def test_for_everything_else_it_says_what_to_install(self, audio):
        with pytest.raises(RequestError, match="PyAV is not installed") as caught:
            read(audio)
        assert 'pip install "ratoon[audio]"' in caught.value.expected
