"""Takes back the work for clients that went away: their routes are cancelled, which aborts what they had asked for."""

from __future__ import annotations

import asyncio
import contextlib

from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send


class CancelOnDisconnect:
    """Watches `receive`, which belongs to nobody else once the body is read."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            await self._app(scope, _nothing_to_receive, send)

        work = asyncio.create_task(answer())
        watch = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            # Reached by three ways: answered, client gone, or this task itself was cancelled (the server ends).
            watch.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing_to_receive() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}
