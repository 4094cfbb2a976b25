"""From a run to its answer, whole or streamed: what the protocols with typed events have in common, OpenAI's Responses
and Anthropic's Messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import BodyWriter, exchange_of
from ratoon.api.server.generation import Batch
from ratoon.api.server.responses import EventStream
from ratoon.core.outputs import RequestOutput


class TypedRun(Protocol):
    """One request while it is generated."""

    batch: Batch
    has_begun: bool  # its first output has come

    def take(self, output: RequestOutput) -> list[bytes]:
        """Returns the events of an output of the engine."""
        ...

    def takes_long(self, output: RequestOutput) -> bool:
        """Whether `take` would keep the event loop. `generate` prepares such an output in a thread."""
        ...

    def generate(self) -> AsyncGenerator[list[bytes], None]:
        """Yields the events of all outputs, those of one output together."""
        ...


async def run_to_end(run: TypedRun) -> None:
    """Runs to the end, for an answer in one piece, which the run has then."""
    async with aclosing(run.generate()) as chunks:
        async for _ in chunks:
            pass


async def answer_typed_stream(
    request: Request,
    run: TypedRun,
    error_event: Callable[[ApiError], bytes],
    kind: type[EventStream] = EventStream,
) -> Response:
    """Waits for the first token: errors until then get an HTTP status instead of an event."""
    exchange = exchange_of(request.scope)
    if exchange.writer is not None:
        run.batch.take = partial(_write, exchange.writer, run)
    events = _joined(run)
    first = await anext(events, b"")
    return kind(first, events, exchange.headers(), end=b"", error_event=error_event)


async def _joined(run: TypedRun) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.generate()) as chunks:
        async for events in chunks:
            yield b"".join(events)


def _write(writer: BodyWriter, run: TypedRun, output: RequestOutput) -> bool:
    """Writes events, as in generated_answers.py, without waking the stream's task. False: its task must do it."""
    if not run.has_begun or not writer.is_ready or run.takes_long(output):
        return False
    if events := run.take(output):
        writer.write(b"".join(events))
    return True
