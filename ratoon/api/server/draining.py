"""At shutdown: what is under way goes on, and what is new is sent elsewhere."""

from __future__ import annotations

from ratoon.api.server.auth import OPEN_PATHS
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import shutting_down
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send
from ratoon.api.server.responses import send_error


class RefuseWhileDraining:
    def __init__(self, app: AsgiApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._context.draining and scope["path"] not in OPEN_PATHS:
            return await send_error(scope, send, shutting_down())
        await self._app(scope, receive, send)
