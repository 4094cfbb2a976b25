"""Containers and codecs, by PyAV (FFmpeg). It is an extra: only sources.py imports this.

Only the given file is opened, never files that it refers to: playlists are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.error import FFmpegError

from ratoon.core.errors import RequestError
from ratoon.models.log_mel import SAMPLE_RATE
from ratoon.transcription.options import verify_rate

# FFmpeg's names for containers that hold audio. Those that only refer to other files are excluded.
CONTAINERS = (
    "3g2,3gp,aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,eac3,flac,flv,gsm,m4a,matroska,mj2,mov,mp3,mp4,mpc,mpeg,"
    "mpegts,ogg,tta,voc,w64,wav,webm,wv"
)
# Into 16 bits FFmpeg averages channels, whatever the codec; into floats it may add them up. openai-whisper has 16, too.
SAMPLE_FORMAT = "s16"
LOUDEST = 32768
# Titles in unknown encodings must not make a file unreadable. PyAV 19 has no option for it any more, and needs none: it
# decodes any bytes.
LENIENT_METADATA: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "ignore"}
READABLE = "a recording in a common format (WAV, MP3, FLAC, Ogg, Opus, AAC, MP4, WebM), complete and undamaged"


def decode(file: BinaryIO) -> Iterator[np.ndarray]:
    """The first audio stream of a file. Parts that are broken are left out; if nothing can be read, it is refused."""
    with _open(file) as container:
        resampler: AudioResampler | None = None
        kind = None
        for frame in _frames(container):
            if kind != (frame.format.name, frame.layout.name, frame.sample_rate):  # it may change on the way
                yield from _convert(resampler, None)
                kind = (frame.format.name, frame.layout.name, frame.sample_rate)
                verify_rate(frame.sample_rate)
                resampler = AudioResampler(format=SAMPLE_FORMAT, layout="mono", rate=SAMPLE_RATE)
            yield from _convert(resampler, frame)
        yield from _convert(resampler, None)


def _open(file: BinaryIO) -> InputContainer:
    options = {"format_whitelist": CONTAINERS}
    try:
        container = av.open(file, mode="r", options=options, **LENIENT_METADATA)
    except (FFmpegError, OSError) as error:
        raise _not_readable(error) from None
    if not container.streams.audio:
        container.close()
        raise RequestError("file", "has no audio", READABLE)
    return container


def _frames(container: InputContainer) -> Iterator[AudioFrame]:
    stream = container.streams.audio[0]
    problem: Exception | None = None
    num_frames = 0
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except FFmpegError as error:  # the container is truncated; the part before is used
            problem, packet = error, None
        if packet is None:
            break
        try:
            frames = packet.decode()
        except FFmpegError as error:  # of this packet alone
            problem = error
            continue
        num_frames += len(frames)
        yield from frames
    if problem is not None and not num_frames:
        raise _not_readable(problem)


def _convert(resampler: AudioResampler | None, frame: AudioFrame | None) -> Iterator[np.ndarray]:
    """Yields the samples of a frame; without a frame, what the resampler still holds."""
    if resampler is None:
        return
    try:
        converted = resampler.resample(frame)
    except FFmpegError as error:  # nine channels, for example: their layout is not known
        raise _not_readable(error) from None
    for part in converted:
        yield part.to_ndarray()[0].astype(np.float32) / LOUDEST


def _not_readable(error: Exception) -> RequestError:
    reason = getattr(error, "strerror", None) or str(error)
    return RequestError("file", f"can't be read as a recording ({reason})", READABLE)
