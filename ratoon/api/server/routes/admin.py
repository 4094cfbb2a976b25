"""POST /admin/…, GET /admin/stats: control over the engine. Served only where the operator asked for it (--admin)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import context_of
from ratoon.api.server.protocol.service import AdminAnswer, Stats
from ratoon.api.server.responses import json_response
from ratoon.api.server.routes.documented import answers
from ratoon.api.server.routes.service import describe_health

router = APIRouter(prefix="/admin", tags=["Administration"])
ANSWERS: dict[str, Any] = {"responses": answers(AdminAnswer, 400), "response_model": None}


@router.post("/pause", summary="Take requests, but run no step", **ANSWERS)
async def pause(request: Request) -> Response:
    await context_of(request).llm.pause()
    return json_response(request, {"ok": True})


@router.post("/resume", summary="Go on after a pause", **ANSWERS)
async def resume(request: Request) -> Response:
    await context_of(request).llm.resume()
    return json_response(request, {"ok": True})


@router.post("/reset_prefix_cache", summary="Forget cached prefixes; not while requests are under way", **ANSWERS)
async def reset_prefix_cache(request: Request) -> Response:
    return json_response(request, {"ok": await context_of(request).llm.reset_prefix_cache()})


@router.post("/sleep", summary="Give memory back until the engine is woken up", **ANSWERS)
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    await context_of(request).llm.sleep(level)
    return json_response(request, {"ok": True})


@router.post("/wake_up", summary="Take the memory again", **ANSWERS)
async def wake_up(request: Request) -> Response:
    await context_of(request).llm.wake_up()
    return json_response(request, {"ok": True})


@router.post("/profile/start", summary="Begin to record what steps spend their time on", **ANSWERS)
async def start_profile(request: Request) -> Response:
    await context_of(request).llm.start_profile()
    return json_response(request, {"ok": True})


@router.post("/profile/stop", summary="End the record, and say where it is", **ANSWERS)
async def stop_profile(request: Request) -> Response:
    return json_response(request, {"ok": True, "files": await context_of(request).llm.stop_profile()})


@router.get("/stats", summary="How the engines are, and their settings", responses=answers(Stats), response_model=None)
async def stats(request: Request) -> Response:
    context = context_of(request)
    engines = await context.llm.stats()
    return json_response(
        request,
        {
            "health": describe_health(context),
            "engines": [msgspec.to_builtins(engine) for engine in engines],
            "settings": context.llm.describe(),
            "num_unfinished_requests": context.num_unfinished,
        },
    )
