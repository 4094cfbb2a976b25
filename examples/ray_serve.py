"""An application for Ray Serve: engines that Ray starts and ends by the number of requests, behind one HTTP address.

    pip install "ratoon[serve,ray]" "ray[serve]"
    serve run examples.ray_serve:application            # from the repository's root; Ctrl-C ends it
    curl localhost:8000/v1/completions -d '{"prompt": "One, two,", "max_tokens": 8}' -H 'Content-Type: application/json'

Each replica is Ratoon's whole server in an actor: all of its endpoints and their limits, with one engine process. Ray
Serve forwards requests, adds a replica when each has more than `target_ongoing_requests` under way, and lets one finish
its requests before it is ended. It chooses replicas by their queues alone, so that turns of a conversation lose their
cached prefix when they change replicas; `ratoon serve --ray` does not have that, nor autoscaling.

RATOON_MODEL names the model; RATOON_NUM_GPUS the GPUs of a replica (0).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

MODEL = os.environ.get("RATOON_MODEL", "smollm2-135m")
NUM_GPUS = float(os.environ.get("RATOON_NUM_GPUS", "0"))

AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 8,
    "target_ongoing_requests": 32,  # more than an engine's batch would only wait in it
    "upscale_delay_s": 10,
    "downscale_delay_s": 300,  # an engine that ends takes its cached prefixes with it
}


@serve.deployment(
    autoscaling_config=AUTOSCALING,
    max_ongoing_requests=256,
    ray_actor_options={"num_cpus": 1, "num_gpus": NUM_GPUS},
    graceful_shutdown_timeout_s=60,
)
class Engine:
    """One engine, behind the routes of `ratoon serve`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._app: Any = None
        self._starting = asyncio.Lock()

    async def _start(self) -> Any:
        """Starts the engine with the first request or health check, on the event loop that it then belongs to."""
        from ratoon import AsyncLLM
        from ratoon.api.server.app import create_app
        from ratoon.api.server.settings import ServerSettings
        from ratoon.observe.metrics import EngineMetrics

        async with self._starting:
            if self._app is None:
                self._llm = AsyncLLM(self._model, metrics=EngineMetrics(self._model))
                await self._llm.start()
                self._app = create_app(self._llm, ServerSettings())
        return self._app

    async def check_health(self) -> None:
        """Is called by Ray Serve now and then, and before a replica gets requests. Raises if it should be replaced."""
        await self._start()
        if str(self._llm.health().state) == "dead":
            raise RuntimeError("the engine could not be started again")

    async def __call__(self, request: Request) -> Response:
        return await forward(await self._start(), request)


async def forward(app: Any, request: Request) -> Response:
    """Passes a request on to an ASGI application. What it sends is streamed; it is cancelled with its client."""
    sent: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await app({**request.scope, "root_path": "", "state": {}}, request.receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    first = await sent.get()
    if first is None:
        await running  # raises what the application raised
        raise RuntimeError("the application has not answered")

    async def body() -> AsyncIterator[bytes]:
        try:
            while (message := await sent.get()) is not None:
                if part := message.get("body", b""):
                    yield part
        finally:
            running.cancel()

    response = StreamingResponse(body(), first["status"])
    response.raw_headers = list(first["headers"])
    return response


application = Engine.bind(MODEL)  # type: ignore[attr-defined]
