"""What Moonshine's encoder reads: samples of one channel at 16 kHz, as they are, and how many states become of them.

Numpy only, like log_mel.py: this runs in the server. Files are decoded, mixed down and resampled elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ratoon.models.log_mel import FRAMES_PER_SECOND, HOP, SAMPLE_RATE, WINDOW_FRAMES, WINDOW_SAMPLES

CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))  # window and stride of each
FEWEST_SAMPLES = 895  # that give a state
# A recording is cut where it is quietest in the last seconds of a window.
CUT_FRAMES = 5 * FRAMES_PER_SECOND
QUIET_FRAMES = 10  # over which loudness is measured


def num_states(num_samples: int) -> int:
    """The states of the encoder for so many samples."""
    for window, stride in CONVOLUTIONS:
        num_samples = (num_samples - window) // stride + 1
    return max(num_samples, 0)


MAX_STATES = num_states(WINDOW_SAMPLES)


def waveform_features(waveform: np.ndarray) -> np.ndarray:
    """[1, samples] float32, with silence behind what is too short for a state."""
    samples = np.asarray(waveform, np.float32)
    if len(samples) < FEWEST_SAMPLES:
        samples = np.concatenate((samples, np.zeros(FEWEST_SAMPLES - len(samples), np.float32)))
    return np.ascontiguousarray(samples[None])


@dataclass(frozen=True, slots=True)
class Waveform:
    """A whole recording, from which windows of up to 30 seconds are cut at quiet places. As Spectrogram, it is counted
    in frames of 10 ms."""

    samples: np.ndarray  # float32

    @property
    def num_frames(self) -> int:
        return len(self.samples) // HOP

    @property
    def duration(self) -> float:
        """The recording's length in seconds."""
        return len(self.samples) / SAMPLE_RATE

    def starts(self) -> list[int]:
        """The frames at which windows begin."""
        starts = [0]
        while self.num_frames - starts[-1] > WINDOW_FRAMES:
            starts.append(self._quietest(starts[-1] + WINDOW_FRAMES - CUT_FRAMES, starts[-1] + WINDOW_FRAMES))
        return starts

    def window(self, start: int) -> np.ndarray:
        """The samples from this frame, at which a window begins, to the end of the window: float32 [1, samples]."""
        starts = [*self.starts(), None]
        stop = starts[starts.index(start) + 1]
        return waveform_features(self.samples[start * HOP : None if stop is None else stop * HOP])

    def _quietest(self, first: int, last: int) -> int:
        """The frame in the middle of the quietest stretch between two frames, the last one if several are as quiet."""
        part = self.samples[first * HOP : last * HOP].reshape(-1, HOP)
        energy = np.convolve(np.square(part, dtype=np.float64).sum(axis=1), np.ones(QUIET_FRAMES), "valid")
        quietest = len(energy) - 1 - int(np.argmin(energy[::-1]))
        return first + quietest + QUIET_FRAMES // 2


class WaveformStream:
    """Collects the samples of a recording."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []

    def add(self, samples: np.ndarray) -> None:
        self._pieces.append(np.asarray(samples, np.float32))

    def finish(self) -> Waveform:
        return Waveform(np.concatenate([np.zeros(0, np.float32), *self._pieces]))
