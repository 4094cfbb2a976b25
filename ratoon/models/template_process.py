"""Renders chat templates that come with a request: in child processes that can be killed at any time.

A child has a limit on its memory and on the processor time of each template, and the parent kills it when it takes too
long by the clock. It has no open files but its two pipes and nothing of the parent's environment; messages are msgpack.
It is started on demand, reused, and replaced when it dies. Works without a GPU, torch or an event loop; callers wait in
a thread.
"""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Mapping, Sequence
from threading import BoundedSemaphore, Timer
from typing import Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.limited_process import (
    MAX_FRAME_BYTES,  # above the sandbox's limits on input and output in UTF-8
    LimitedProcess,
    limit_processor_time,
    limit_resources,
    read_frame,
    reason_of,
    silence_errors,
    write_frame,
)
from ratoon.core.prepared import prepared
from ratoon.models.chat_template import NO_MEDIA, RenderedChat, render_chat

MAX_PROCESSES = 2
MAX_SECONDS = 2.0  # of processor time, for one template
MAX_WAIT_SECONDS = 60.0  # by the clock, its start included: the machine may be busy
MAX_MEMORY_BYTES = 512 * 2**20  # of address space, the interpreter's included


class Job(msgspec.Struct, frozen=True):
    template: str
    messages: Any
    variables: dict[str, Any]
    continue_final_message: bool
    placeholders: dict[str, str]
    seconds: float


class RenderResult(msgspec.Struct, frozen=True):
    text: str = ""
    notes: tuple[str, ...] = ()
    error: tuple[str, str, str] | None = None  # field, problem, expected
    is_out_of_memory: bool = False


def render_in_child(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
    placeholders: Mapping[str, str] = NO_MEDIA,
) -> RenderedChat:
    """render_chat in a child, within limits. Waits while all children are busy."""
    job = Job(template, messages, dict(variables), continue_final_message, dict(placeholders), MAX_SECONDS)
    try:
        frame = msgspec.msgpack.encode(job, enc_hook=_encode_other)
    except UnicodeEncodeError:
        raise RequestError("messages", "are no valid Unicode", "expected texts of whole characters") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError("messages", f"can't be given to a chat template: {error}", "JSON values") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise RequestError("messages", f"hold more than {MAX_FRAME_BYTES} bytes", "a shorter conversation")
    answer = _children.ask(frame)
    if answer.error is not None:
        raise RequestError(*answer.error)
    return RenderedChat(answer.text, answer.notes)


def _encode_other(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


class TemplateProcesses:
    """Child processes that render templates: at most `size` at once, of which idle ones are reused."""

    def __init__(self, size: int) -> None:
        self._places = BoundedSemaphore(size)
        self._idle: list[_Child] = []

    def ask(self, frame: bytes) -> RenderResult:
        with self._places:
            child = self._take()
            is_new = child is None
            answer = self._ask(child or _Child(), frame)
            if answer.is_out_of_memory and not is_new:  # earlier templates may be the cause: retry in a new child
                answer = self._ask(_Child(), frame)
            return answer

    def _ask(self, child: _Child, frame: bytes) -> RenderResult:
        try:
            answer = child.ask(frame)
        except BaseException:
            child.close()
            raise
        if answer.is_out_of_memory:
            child.close()
        else:
            self._idle.append(child)
        return answer

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

    def ask(self, frame: bytes) -> RenderResult:
        watch = Timer(MAX_WAIT_SECONDS, self._stop)
        watch.start()
        try:
            self.send(frame)
            received = self.receive()
        except OSError:
            received = None
        finally:
            watch.cancel()
        if received is None:
            raise self._explain_death()
        return msgspec.msgpack.decode(received, type=prepared(RenderResult))

    def _stop(self) -> None:
        self._was_too_slow = True
        self.process.kill()

    def _explain_death(self) -> RequestError:
        self.process.wait()  # it closed its pipe, so it is exiting
        status = self.process.returncode
        if status == -signal.SIGPROF:
            return RequestError("chat_template", f"takes more than {MAX_SECONDS:g} seconds")
        if self._was_too_slow:
            return RequestError("chat_template", f"was not rendered within {MAX_WAIT_SECONDS:g} seconds")
        problem = f"the process that rendered it was ended ({reason_of(status)})"
        return RequestError("chat_template", problem, "try another one")


_children = TemplateProcesses(MAX_PROCESSES)
atexit.register(_children.close)


# ---- in the child ----


def serve() -> None:
    """Answers jobs until the parent closes the pipe."""
    import ratoon.models.template_sandbox  # noqa: F401  (before limits are set and the first job arrives)

    limit_resources(MAX_MEMORY_BYTES)
    silence_errors()  # templates must not write to it
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while (frame := read_frame(jobs)) is not None:
        job = msgspec.msgpack.decode(frame, type=prepared(Job))
        limit_processor_time(job.seconds)
        answer = _encode_answer(_answer(job))
        limit_processor_time(0)
        write_frame(answers, answer)


def _answer(job: Job) -> RenderResult:
    try:
        rendered = render_chat(
            job.template,
            job.messages,
            job.variables,
            continue_final_message=job.continue_final_message,
            placeholders=job.placeholders,
        )
        return RenderResult(rendered.text, rendered.notes)
    except RequestError as error:
        is_out_of_memory = isinstance(error.__cause__, MemoryError)
        return RenderResult(error=(error.field, error.problem, error.expected), is_out_of_memory=is_out_of_memory)


def _encode_answer(answer: RenderResult) -> bytes:
    try:
        return msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(RenderResult(error=("chat_template", "makes no valid Unicode", "")))
