"""Sound at another sampling rate, by PyAV (FFmpeg), which is an extra: importing this raises ImportError without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from ratoon.models.log_mel import SAMPLE_RATE


def resample(pieces: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Yields samples of one channel at SAMPLE_RATE. Each piece, at `rate`, is the continuation of the one before."""
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    for piece in pieces:
        frame = AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate = rate
        yield from (out.to_ndarray()[0] for out in resampler.resample(frame))
    yield from (out.to_ndarray()[0] for out in resampler.resample(None))
