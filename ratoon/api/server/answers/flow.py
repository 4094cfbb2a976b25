"""From a checked request to its answer, whole or streamed. The same for all kinds of generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.answers.renderer import Renderer
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.generation import collect, stream
from ratoon.api.server.large_json import slices
from ratoon.api.server.responses import json_response, large_json_response
from ratoon.api.server.sse import EventStream, event, event_parts


async def answer_whole(request: Request, renderer: Renderer) -> Response:
    outputs = await collect(renderer.context, renderer.batch)
    is_large = any(output.hidden_states is not None for output in outputs)
    return (large_json_response if is_large else json_response)(request, renderer.whole(outputs))


async def answer_stream(request: Request, renderer: Renderer) -> Response:
    """Waits for the first events: what is refused until then is refused with a status, not inside a stream."""
    events = _events(renderer)
    first = await anext(events, b"")
    return EventStream(first, events, exchange_of(request.scope).headers())


async def _events(renderer: Renderer) -> AsyncGenerator[bytes, None]:
    """Encoded events. All chunks of one output travel together: they come from one step. Only those with hidden states
    may be so large that they go in slices."""
    async with aclosing(stream(renderer.context, renderer.batch)) as outputs:
        async for index, output in outputs:
            chunks = renderer.chunks(index, output)
            if output.hidden_states is not None:
                for piece in slices(part for chunk in chunks for part in event_parts(chunk)):
                    yield piece
                    await asyncio.sleep(0)
            elif body := b"".join([event(chunk) for chunk in chunks]):
                yield body
    if renderer.include_usage:
        yield event(renderer.usage_chunk())
