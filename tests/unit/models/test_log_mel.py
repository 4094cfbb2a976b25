"""Features of sound, against transformers' extractor: its numpy way is exact, its torch way is in float32."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from ratoon.models.log_mel import LogMelStream, log_mel, mel_filters

transformers = pytest.importorskip("transformers")

SECOND = 16_000
generator = np.random.default_rng(0)
RECORDINGS = {
    "noise": generator.standard_normal(30 * SECOND) * 0.1,
    "a short noise": generator.standard_normal(5 * SECOND) * 0.1,
    "silence": np.zeros(30 * SECOND),
    "one sample": np.ones(1),
    "nothing": np.zeros(0),
    "a tone": np.sin(np.arange(3 * SECOND) * 2 * np.pi * 440 / SECOND),
    "a fading chord": sum(np.sin(np.arange(9 * SECOND) * 2 * np.pi * f / SECOND) for f in (55, 1200, 7000))
    * np.exp(-np.arange(9 * SECOND) / SECOND),
    "more than a window": generator.standard_normal(31 * SECOND) * 0.1,
}


def extractor(num_mel_bins: int):
    return transformers.WhisperFeatureExtractor(feature_size=num_mel_bins)


def exact_reference(waveform: np.ndarray, num_mel_bins: int) -> np.ndarray:
    return extractor(num_mel_bins)._np_extract_fbank_features(waveform[None].astype(np.float32), "cpu")[0]


def one_window(waveform: np.ndarray) -> np.ndarray:
    cut = waveform[: 30 * SECOND]
    return np.pad(cut, (0, 30 * SECOND - len(cut)))


@pytest.mark.slow
@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.one_in(3)
def test_a_window_is_what_transformers_makes_of_it(name, num_mel_bins):
    waveform = RECORDINGS[name].astype(np.float32)
    features = log_mel(waveform, num_mel_bins)
    assert features.shape == (num_mel_bins, 3000)
    assert features.dtype == np.float32
    assert features.flags.c_contiguous
    np.testing.assert_allclose(features, exact_reference(one_window(waveform), num_mel_bins), atol=1e-5, rtol=0)
    if len(waveform):
        usual = extractor(num_mel_bins)(waveform, sampling_rate=SECOND, return_tensors="np").input_features[0]
        np.testing.assert_allclose(features, usual, atol=2e-4, rtol=0)


@pytest.mark.parametrize("num_mel_bins", [80, 128])
def test_the_filters_are_those_of_transformers(num_mel_bins):
    np.testing.assert_allclose(mel_filters(num_mel_bins), extractor(num_mel_bins).mel_filters, atol=1e-12)


def test_speech_is_what_transformers_makes_of_it(speech):
    features = log_mel(speech, 80)
    np.testing.assert_allclose(features, exact_reference(one_window(speech), 80), atol=1e-5, rtol=0)


@pytest.fixture
def speech() -> np.ndarray:
    with wave.open(str(Path(__file__).parents[2] / "data/audio/jfk.wav")) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def long_noise() -> np.ndarray:
    """65.01 s, with its loudest second near the end."""
    waveform = generator.standard_normal(65 * SECOND + 161).astype(np.float32) * 0.01
    waveform[60 * SECOND : 61 * SECOND] *= 50
    return waveform


def test_windows_of_a_long_recording_are_cut_from_the_features_of_the_whole():
    waveform = long_noise()
    stream = LogMelStream(80)
    stream.add(waveform)
    spectrogram = stream.finish()
    whole = exact_reference(waveform, 80)  # [80, 6501]
    assert spectrogram.num_frames == whole.shape[1] == 6501
    assert spectrogram.duration == pytest.approx(65 + 161 / SECOND)
    np.testing.assert_allclose(spectrogram.window(0), whole[:, :3000], atol=1e-5, rtol=0)
    np.testing.assert_allclose(spectrogram.window(1234), whole[:, 1234:4234], atol=1e-5, rtol=0)
    last = spectrogram.window(6000)
    np.testing.assert_allclose(last[:, :501], whole[:, 6000:], atol=1e-5, rtol=0)
    assert not last[:, 501:].any()
    assert not np.allclose(spectrogram.window(0), log_mel(waveform, 80)), "the loud second sets the floor for all"


def test_samples_may_come_in_pieces_of_any_size():
    waveform = long_noise()
    whole = LogMelStream(80)
    whole.add(waveform)
    in_pieces = LogMelStream(80)
    start = 0
    while start < len(waveform):
        size = int(generator.choice([1, 7, 160, 399, 400, 4096, 200_000]))
        in_pieces.add(waveform[start : start + size])
        start += size
    np.testing.assert_array_equal(in_pieces.finish().frames, whole.finish().frames)


def test_the_silence_behind_a_short_recording_is_no_part_of_it():
    stream = LogMelStream(80)
    stream.add(np.ones(SECOND, dtype=np.float32))
    spectrogram = stream.finish()
    assert (spectrogram.num_frames, len(spectrogram.frames), spectrogram.duration) == (100, 3000, 1.0)
