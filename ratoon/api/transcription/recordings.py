"""A recording to the spectrogram that windows are cut from, on a thread: the event loop has others to serve."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from ratoon.api.transcription.sources import Audio, AudioLimits, read_samples
from ratoon.models.log_mel import LogMelStream, Spectrogram

# Of its own: threads that decode for minutes must not stand in the way of those that take milliseconds.
_threads = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="decode")


async def read_recording(audio: Audio, num_mel_bins: int, limits: AudioLimits) -> Spectrogram:
    """RequestError: it can't be read. Given up, it ends soon."""
    given_up = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(
            _threads, make_spectrogram, audio, num_mel_bins, limits, given_up
        )
    finally:
        given_up.set()


def make_spectrogram(
    audio: Audio, num_mel_bins: int, limits: AudioLimits, given_up: threading.Event | None = None
) -> Spectrogram:
    stream = LogMelStream(num_mel_bins)
    for piece in read_samples(audio, limits):
        if given_up is not None and given_up.is_set():
            raise InterruptedError("nobody waits for it any more")
        stream.add(piece)
    return stream.finish()
