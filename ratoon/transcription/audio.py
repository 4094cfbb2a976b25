"""Recordings in whatever form a caller has them, as samples of one channel at 16 kHz, and as the spectrogram that
windows are cut from.

A recording is a file's path, its bytes, an open file, or samples with their rate. Containers and codecs are PyAV's
(av_decoding.py); without it, plain WAV files at 16 kHz are read by the standard library.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
import wave
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ratoon.core.errors import RequestError
from ratoon.models.log_mel import SAMPLE_RATE, LogMelStream, Spectrogram
from ratoon.models.waveform import Waveform, WaveformStream
from ratoon.transcription.options import verify_rate

# A path, bytes, an open file, (samples, rate), or {"audio": samples, "sampling_rate": rate}
Recording: TypeAlias = Spectrogram | Waveform
Audio: TypeAlias = Any
AUDIO_FORMS = "a path, the bytes of a file, an open file, or (samples, sampling rate)"
HOW_TO_INSTALL = 'pip install "ratoon[audio]"'
PIECE_SECONDS = 60
MAX_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What a recording may be. Counted while it is decoded: a small file can hold much."""

    max_seconds: float = 24 * 3600.0
    max_bytes: int = 4 * 2**30  # of the file


def read_samples(audio: Audio, limits: AudioLimits) -> Iterator[np.ndarray]:
    """float32, from -1 to 1. RequestError names `file` and says what is wrong; it may come after some pieces."""
    num_samples = 0
    for piece in _pieces(audio, limits):
        num_samples += len(piece)
        if num_samples > limits.max_seconds * SAMPLE_RATE:
            raise RequestError(
                "file", f"is longer than {limits.max_seconds:g} seconds", "a shorter one, or parts of it"
            )
        yield piece
    if num_samples == 0:
        raise RequestError("file", "is 0 seconds long", "at least one sample")


def recording_name(audio: Audio, index: int) -> str:
    """The displayed name of a recording among several."""
    return Path(audio).name if isinstance(audio, (str, os.PathLike)) else f"recording {index}"


def _pieces(audio: Audio, limits: AudioLimits) -> Iterator[np.ndarray]:
    if isinstance(audio, Mapping):
        if audio.keys() != {"audio", "sampling_rate"}:
            raise RequestError("file", f"a mapping with {sorted(audio)}", '{"audio": samples, "sampling_rate": rate}')
        audio = (audio["audio"], audio["sampling_rate"])
    if isinstance(audio, tuple) and len(audio) == 2:
        return _from_array(*audio)
    if isinstance(audio, (str, os.PathLike)):
        return _from_path(Path(audio), limits)
    if isinstance(audio, (bytes, bytearray, memoryview)):
        return _from_file(io.BytesIO(audio), limits)
    if isinstance(audio, io.TextIOBase):
        raise RequestError("file", "is open as text", 'open(path, "rb")')
    if hasattr(audio, "read") and hasattr(audio, "seek"):
        return _from_file(audio if audio.seekable() else io.BytesIO(audio.read(limits.max_bytes + 1)), limits)
    raise RequestError("file", f"{type(audio).__name__} is not a recording", AUDIO_FORMS)


def _from_path(path: Path, limits: AudioLimits) -> Iterator[np.ndarray]:
    try:
        with path.open("rb") as file:
            yield from _from_file(file, limits)
    except OSError as error:
        raise RequestError("file", f"can't read {path} ({error.strerror})", "a file that exists") from None


def _from_file(file: BinaryIO, limits: AudioLimits) -> Iterator[np.ndarray]:
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if num_bytes == 0:
        raise RequestError("file", "is empty", "a recording")
    if num_bytes > limits.max_bytes:
        raise RequestError("file", f"has {num_bytes} bytes", f"at most {limits.max_bytes}")
    try:
        from ratoon.transcription.av_decoding import decode
    except ImportError:
        return _from_plain_wav(file)
    return decode(file)


def _from_plain_wav(file: BinaryIO) -> Iterator[np.ndarray]:
    """Files that need no decoder and no resampling."""
    try:
        with wave.open(file) as reader:
            yield from _wav_pieces(reader)
    except (wave.Error, EOFError):
        raise RequestError("file", "is not a plain WAV file, and PyAV is not installed", HOW_TO_INSTALL) from None


def _wav_pieces(reader: wave.Wave_read) -> Iterator[np.ndarray]:
    rate, num_bits, num_channels = reader.getframerate(), 8 * reader.getsampwidth(), reader.getnchannels()
    if (rate, num_bits) != (SAMPLE_RATE, 16):
        problem = f"has {rate} Hz and {num_bits} bits, and PyAV is not installed"
        raise RequestError("file", problem, f"{SAMPLE_RATE} Hz and 16 bits, or {HOW_TO_INSTALL}")
    while data := reader.readframes(PIECE_SECONDS * SAMPLE_RATE):
        num_whole = len(data) // (2 * num_channels)  # a file may be cut off
        yield _mixed_down(np.frombuffer(data, "<i2", num_whole * num_channels).reshape(num_whole, num_channels))


def _from_array(samples: Any, rate: Any) -> Iterator[np.ndarray]:
    rate = verify_rate(rate)
    try:
        array = np.asarray(samples)
    except (ValueError, TypeError) as error:
        raise RequestError("file", f"the samples are not an array ({error})", AUDIO_FORMS) from None
    if array.dtype.kind not in "fi" or (array.dtype.kind == "i" and array.dtype.itemsize > 4):
        raise RequestError(
            "file", f"the samples are {array.dtype}", "floats from -1 to 1, or whole numbers of 8 to 32 bits"
        )
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not 1 <= array.shape[1] <= MAX_CHANNELS:
        raise RequestError(
            "file", f"the samples have the shape {list(array.shape)}", "[samples] or [samples, channels]"
        )
    size = PIECE_SECONDS * rate
    pieces = (_mixed_down(array[start : start + size]) for start in range(0, len(array), size))
    if rate == SAMPLE_RATE:
        return pieces
    try:
        from ratoon.models.resample import resample
    except ImportError:
        problem = f"has {rate} Hz, and PyAV is not installed"
        raise RequestError("file", problem, f"{SAMPLE_RATE} Hz, or {HOW_TO_INSTALL}") from None
    return resample(pieces, rate)


def _mixed_down(samples: np.ndarray) -> np.ndarray:
    """[samples, channels] to float32 [samples]."""
    if samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / (1 << (8 * samples.dtype.itemsize - 1))
    mono = samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise RequestError("file", "has samples that are not finite", "numbers from -1 to 1")
    return mono


# Separate: threads that decode for minutes must not delay work that takes milliseconds.
_threads = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="decode")


async def read_recording(audio: Audio, num_mel_bins: int | None, limits: AudioLimits) -> Recording:
    """RequestError: it can't be read. If cancelled, it ends soon."""
    given_up = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(
            _threads, make_recording, audio, num_mel_bins, limits, given_up
        )
    finally:
        given_up.set()


def make_recording(
    audio: Audio, num_mel_bins: int | None, limits: AudioLimits, given_up: threading.Event | None = None
) -> Recording:
    """`num_mel_bins`: None for a model that reads samples as they are."""
    stream = WaveformStream() if num_mel_bins is None else LogMelStream(num_mel_bins)
    for piece in read_samples(audio, limits):
        if given_up is not None and given_up.is_set():
            raise InterruptedError("it was cancelled")
        stream.add(piece)
    return stream.finish()
