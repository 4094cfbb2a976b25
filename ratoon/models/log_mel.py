"""Whisper's input features: the logarithm of the energy in mel bands, a hundred frames a second.

Equal to transformers' WhisperFeatureExtractor. Numpy only: this runs in the server, which does not import torch. Files
are decoded, mixed down and resampled elsewhere; here sound is samples of one channel at 16 kHz, from -1 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

SAMPLE_RATE = 16_000
FRAME_SIZE = 400  # samples per frame, under a Hann window
HOP = 160  # samples from one frame to the next
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
WINDOW_SECONDS = 30  # what the encoder reads at a time
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE
WINDOW_FRAMES = WINDOW_SECONDS * FRAMES_PER_SECOND

HALF_FRAME = FRAME_SIZE // 2
BLOCK_FRAMES = 1000  # transformed at a time: large enough for numpy, small enough for the processor's cache
SMALLEST_ENERGY = 1e-10
DYNAMIC_RANGE = 8.0  # powers of ten below the loudest; quieter values are clamped to this


def log_mel(waveform: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """One window's features, float32 [mel bins, 3000]: of 30 seconds, to which samples are padded or truncated."""
    stream = LogMelStream(num_mel_bins)
    stream.add(np.asarray(waveform)[:WINDOW_SAMPLES])
    return stream.finish().window(0)


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """The features of a whole recording, from which windows are cut.

    The maximum of the whole recording sets the floor for all windows, as in openai-whisper and in transformers'
    long-form generation. A recording of up to 30 seconds is followed by silence up to there; a longer one has none, and
    a window beyond its end is padded with zeros (also as there: a feature of 0 is not silence).
    """

    frames: np.ndarray  # float32 [frames, mel bins]
    num_samples: int  # of the recording itself

    @property
    def num_frames(self) -> int:
        """The number of frames of the recording itself, without padding."""
        return self.num_samples // HOP

    @property
    def duration(self) -> float:
        """The recording's length in seconds."""
        return self.num_samples / SAMPLE_RATE

    def starts(self) -> list[int]:
        """The frames at which windows begin that lie side by side."""
        return [*range(0, max(self.num_frames, 1), WINDOW_FRAMES)]

    def window(self, start: int) -> np.ndarray:
        """The features from this frame on: float32 [mel bins, 3000]."""
        part = self.frames[start : start + WINDOW_FRAMES]
        features = np.zeros((part.shape[1], WINDOW_FRAMES), dtype=np.float32)
        features[:, : len(part)] = part.T
        return features


class LogMelStream:
    """Computes a spectrogram from a stream of samples, so that a long recording is never in memory as a whole."""

    def __init__(self, num_mel_bins: int) -> None:
        self.num_samples = 0
        self._filters = mel_filters(num_mel_bins).astype(np.float32)
        self._window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME_SIZE) / FRAME_SIZE)  # Hann, periodic
        self._pending: list[np.ndarray] = []  # samples without frames yet
        self._num_pending = 0
        self._blocks: list[np.ndarray] = []  # [frames, mel bins], powers of ten

    def add(self, samples: np.ndarray) -> None:
        self.num_samples += len(samples)
        self._append(samples)
        if self._num_pending >= BLOCK_FRAMES * HOP + FRAME_SIZE:
            self._make_frames()

    def finish(self) -> Spectrogram:
        """The features of all samples. The stream can't be used afterwards."""
        if self.num_samples < WINDOW_SAMPLES:
            self._append(np.zeros(WINDOW_SAMPLES - self.num_samples))
        self._make_frames(last=True)
        num_frames = max(self.num_samples, WINDOW_SAMPLES) // HOP
        frames = np.concatenate(self._blocks)[:num_frames]
        self._blocks.clear()
        np.maximum(frames, frames.max() - DYNAMIC_RANGE, out=frames)
        frames += 4.0
        frames /= 4.0
        return Spectrogram(frames, self.num_samples)

    def _append(self, samples: np.ndarray) -> None:
        self._pending.append(np.asarray(samples, dtype=np.float64))
        self._num_pending += len(samples)

    def _make_frames(self, last: bool = False) -> None:
        """Makes frames from all pending samples. Frames are centred: at both ends the signal is mirrored."""
        samples = np.concatenate(self._pending)
        if not self._blocks:
            samples = np.concatenate((samples[HALF_FRAME:0:-1], samples))
        if last:
            samples = np.concatenate((samples, samples[-2 : -2 - HALF_FRAME : -1]))
        framed = np.lib.stride_tricks.sliding_window_view(samples, FRAME_SIZE)[::HOP]
        for start in range(0, len(framed), BLOCK_FRAMES):
            spectrum = np.fft.rfft(framed[start : start + BLOCK_FRAMES] * self._window)  # [frames, 201]
            # No subtractions follow, so float32 is sufficient.
            energy = (spectrum.real**2 + spectrum.imag**2).astype(np.float32) @ self._filters
            self._blocks.append(np.log10(np.maximum(energy, SMALLEST_ENERGY)))
        rest = samples[len(framed) * HOP :]
        self._pending, self._num_pending = [rest], len(rest)


@cache
def mel_filters(num_mel_bins: int) -> np.ndarray:
    """[frequencies, mel bins]: triangles, evenly spread over Slaney's mel scale up to 8 kHz, each of the same area."""
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, HALF_FRAME + 1)
    corners = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(SAMPLE_RATE / 2), num_mel_bins + 2))
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies[:, None] - left) / (peak - left)
    falling = (right - frequencies[:, None]) / (right - peak)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (right - left))


# Slaney's scale: even up to 1000 Hz, logarithmic above, with 27 steps to a factor of 6.4.
_LINEAR_STEP = 200.0 / 3
_BREAK_HERTZ = 1000.0
_BREAK_MEL = _BREAK_HERTZ / _LINEAR_STEP
_LOG_STEP = np.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    """Converts a frequency above the break."""
    return _BREAK_MEL + float(np.log(hertz / _BREAK_HERTZ)) / _LOG_STEP


def _mel_to_hertz(mels: np.ndarray) -> np.ndarray:
    above = _BREAK_HERTZ * np.exp(_LOG_STEP * (mels - _BREAK_MEL))
    return np.where(mels < _BREAK_MEL, mels * _LINEAR_STEP, above)
