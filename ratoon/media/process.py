"""Decodes and preprocesses images and videos of strangers: in child processes that can be killed at any time.

A child has imported what it needs, and forks for each job: the fork has limits on processor time and memory and ends
with its job, so nothing of an image stays behind for the next one. The parent kills a child that takes too long by the
clock. Children are started on demand, reused, and replaced when they die. Callers wait in a thread.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import BoundedSemaphore, Timer
from typing import IO, Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.limited_process import (
    MAX_FRAME_BYTES,
    LimitedProcess,
    address_space,
    limit_processor_time,
    limit_resources,
    read_frame,
    reason_of,
    silence_errors,
    write_frame,
)
from ratoon.core.machine import usable_cores
from ratoon.core.media import IMAGE, MediaConfig
from ratoon.core.prepared import prepared
from ratoon.core.wire import Buffer, Decoder, encode
from ratoon.media.families.base import Preprocessed
from ratoon.media.preprocess import MediaLimits, preprocess_file
from ratoon.media.resize import prepare_to_resize

MAX_PROCESSES = min(max(usable_cores() // 2, 2), 8)
MAX_IMAGE_SECONDS = 10.0  # of processor time
MAX_VIDEO_SECONDS = 60.0
MAX_WAIT_SECONDS = 180.0  # by the clock, its start included: the machine may be busy
BASE_MEMORY_BYTES = 256 * 2**20
BYTES_PER_PIXEL = 24  # of a picture that is decoded, laid over white and resized, with copies
VIDEO_MEMORY_BYTES = 2 * 2**30  # for the resized frames of a video, with copies
MAX_PARTS = 4096  # of a message


class Job(msgspec.Struct, frozen=True):
    modality: str
    config: MediaConfig
    asked: dict[str, Any]  # options of preprocessing
    limits: MediaLimits
    field: str
    seconds: float  # of processor time, at most
    memory_bytes: int  # of address space, beyond what the child has taken when it forks


def make_job(modality: str, config: MediaConfig, asked: dict[str, Any], limits: MediaLimits, field: str) -> Job:
    memory_bytes = BASE_MEMORY_BYTES + BYTES_PER_PIXEL * limits.max_pixels
    if modality == IMAGE:
        return Job(modality, config, asked, limits, field, MAX_IMAGE_SECONDS, memory_bytes)
    return Job(modality, config, asked, limits, field, MAX_VIDEO_SECONDS, memory_bytes + VIDEO_MEMORY_BYTES)


class Answer(msgspec.Struct, frozen=True):
    result: Preprocessed | None = None
    error: tuple[str, str, str] | None = None  # field, problem, expected


def preprocess_in_child(job: Job, data: Buffer) -> Preprocessed:
    """`preprocess_file` in a child, within limits. Waits while all children are busy."""
    return _children.ask(job, data)


class MediaProcesses:
    """Child processes for images and videos: at most `size` at once, of which idle ones are reused."""

    def __init__(self, size: int) -> None:
        self._places = BoundedSemaphore(size)
        self._idle: list[_Child] = []

    def ask(self, job: Job, data: Buffer) -> Preprocessed:
        with self._places:
            child = self._take() or _Child()
            try:
                answer = child.ask(job, data)
            except BaseException:
                child.close()
                raise
            self._idle.append(child)
        if answer.error is not None:
            raise RequestError(*answer.error)
        assert answer.result is not None
        return answer.result

    def _take(self) -> _Child | None:
        """None: none is idle."""
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                return child
            child.close()
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Child(LimitedProcess):
    def __init__(self) -> None:
        super().__init__(__name__)
        self._was_too_slow = False
        self._decoder = Decoder(Answer)

    def ask(self, job: Job, data: Buffer) -> Answer:
        assert self.process.stdin is not None and self.process.stdout is not None
        watch = Timer(MAX_WAIT_SECONDS, self._stop)
        watch.start()
        try:
            write_message(self.process.stdin, [msgspec.msgpack.encode(job), data])
            received = read_message(self.process.stdout)
        except OSError:
            received = None
        finally:
            watch.cancel()
        if received is None:
            raise self._explain_death(job)
        return self._decoder.decode(received)

    def close(self) -> None:
        with suppress(OSError):  # the fork, too: they are a session of their own
            os.killpg(self.process.pid, signal.SIGKILL)
        super().close()

    def _stop(self) -> None:
        self._was_too_slow = True
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _explain_death(self, job: Job) -> RequestError:
        self.process.wait()  # it closed its pipe, so it is exiting
        if self._was_too_slow:
            problem = f"was not decoded within {MAX_WAIT_SECONDS:g} seconds"
            return RequestError(job.field, problem, "a smaller one, or try again")
        problem = f"the process that decoded it was ended ({reason_of(self.process.returncode)})"
        return RequestError(job.field, problem, "try another one")


_children = MediaProcesses(MAX_PROCESSES)
atexit.register(_children.close)


# ---- messages: a frame with the sizes of the parts, then the parts, in frames that are not too long ----


def write_message(pipe: IO[bytes], parts: Sequence[Buffer]) -> None:
    views = [memoryview(part).cast("B") for part in parts]
    write_frame(pipe, msgspec.msgpack.encode([view.nbytes for view in views]))
    for view in views:
        for start in range(0, view.nbytes, MAX_FRAME_BYTES):
            write_frame(pipe, view[start : start + MAX_FRAME_BYTES])


def read_message(pipe: IO[bytes]) -> list[Buffer] | None:
    """None: the other side closed the pipe."""
    head = read_frame(pipe)
    if head is None:
        return None
    parts: list[Buffer] = []
    for num_bytes in msgspec.msgpack.decode(head, type=prepared(list[int]))[:MAX_PARTS]:
        frames: list[bytes] = []
        while num_bytes > 0:
            frame = read_frame(pipe)
            if not frame:
                return None
            frames.append(frame)
            num_bytes -= len(frame)
        parts.append(frames[0] if len(frames) == 1 else b"".join(frames))
    return parts


# ---- in the child ----


def serve() -> None:
    """Answers jobs until the parent closes the pipe."""
    import numpy  # noqa: F401  (before the first job: forks have it then)

    with suppress(ImportError):
        from PIL import Image

        Image.init()
        prepare_to_resize()
    with suppress(ImportError):
        import av  # noqa: F401
    silence_errors()  # decoders must not write to it
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while (received := read_message(jobs)) is not None:
        job = msgspec.msgpack.decode(received[0], type=prepared(Job))
        problem = _run_fork(job, received[1], answers)
        del received
        if problem is not None:
            write_message(answers, encode(Answer(error=(job.field, *problem))))


def _run_fork(job: Job, data: Buffer, answers: IO[bytes]) -> tuple[str, str] | None:
    """Problem and expectation, if the fork ended without an answer. One that ends within its answer ends this process
    too, since the parent could not tell what comes next."""
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(begun)
        _answer_and_exit(job, data, answers, begins)
    os.close(begins)
    _, status = os.waitpid(pid, 0)
    has_begun = bool(os.read(begun, 1))
    os.close(begun)
    code = os.waitstatus_to_exitcode(status)
    if has_begun:
        if code != 0:
            os._exit(1)
        return None
    if code == -signal.SIGPROF:
        return f"takes more than {job.seconds:g} seconds of processor time to decode", "a smaller one"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return f"the process that decoded it was ended ({reason_of(code)})", "another file"
    return f"the process that decoded it was ended ({reason_of(code)})", "try again"


def _answer_and_exit(job: Job, data: Buffer, answers: IO[bytes], begins: int) -> None:
    status = 1
    try:
        sys.stdin.close()
        limit_resources(address_space() + job.memory_bytes)
        limit_processor_time(job.seconds)
        frames = encode(_answer(job, data))
        limit_processor_time(0)
        os.write(begins, b"1")
        write_message(answers, frames)
        status = 0
    finally:
        os._exit(status)


def _answer(job: Job, data: Buffer) -> Answer:
    try:
        return Answer(preprocess_file(job.modality, data, job.config, job.asked, job.limits, job.field))
    except RequestError as error:
        return Answer(error=(error.field, error.problem, error.expected))
    except MemoryError:
        problem = f"takes more than {job.memory_bytes // 2**20} MiB of memory to decode"
        return Answer(error=(job.field, problem, "a smaller one"))
