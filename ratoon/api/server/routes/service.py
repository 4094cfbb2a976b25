"""GET /health, /version and /metrics: for whoever operates the server. Open to everybody."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.protocol.service import HealthAnswer, Version
from ratoon.api.server.responses import json_response
from ratoon.version import __version__

router = APIRouter(tags=["Service"])


@router.get(
    "/health",
    summary="Whether requests are answered",
    responses={
        200: {"model": HealthAnswer, "description": "They are"},
        503: {"model": HealthAnswer, "description": "They are not: the engine starts, restarts or is gone"},
    },
    response_model=None,
)
async def health(request: Request) -> Response:
    context = context_of(request)
    healthy = context.llm.health().ok and not context.draining
    return json_response(request, describe_health(context), 200 if healthy else 503)


def describe_health(context: ServerContext) -> dict[str, Any]:
    found = context.llm.health()
    status = "shutting down" if context.draining else str(found.state)
    return {"status": status, "engines": [asdict(engine) for engine in found.engines]}


@router.get(
    "/version",
    summary="The server's version",
    responses={200: {"model": Version, "description": "The version"}},
    response_model=None,
)
async def version(request: Request) -> Response:
    return json_response(request, {"version": __version__})


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Text format"}},
    response_class=Response,
    response_model=None,
)
async def metrics(request: Request) -> Response:
    found = context_of(request).llm.metrics
    content, content_type = (b"", "text/plain; charset=utf-8") if found is None else found.render()
    headers = {**exchange_of(request.scope).headers(), "Content-Type": content_type}
    return Response(content, headers=headers)
