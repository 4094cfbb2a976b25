"""GET /health, /version and /metrics, without a key; GET /v1/models; and /admin/…, control of the engine, which is
served only with --admin."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.model_directory import OneModel, describe_entry
from ratoon.api.server.openapi import answers
from ratoon.api.server.protocol.base import AnswerModel
from ratoon.api.server.responses import json_response
from ratoon.version import __version__


class Model(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = Field(None, description="Of an adapter: the model that it adapts")
    max_model_len: int | None = Field(description="null: it is known when the model has been loaded")
    input_modalities: list[Literal["text", "image", "video", "audio"]] | None = Field(
        None, description="What it reads; null: it is known when the model has been loaded"
    )
    sampling_defaults: dict[str, float | None] | None = Field(
        None,
        description="Values of fields that a request leaves out; max_tokens null: what the context leaves. "
        "null: they are known when the model has been loaded",
    )
    state: str | None = Field(None, description="loaded, loading, asleep or unloaded")
    memory_bytes: int | None = Field(None, description="Weights and KV cache that are in memory now")
    error: str | None = Field(None, description="Why it could not be loaded, if so")


class Models(AnswerModel):
    object: Literal["list"]
    data: list[Model]


class EngineHealthAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    index: int
    state: str


class HealthAnswer(AnswerModel):
    status: str
    pid: int = Field(description="The process that answers: one of several front ends, perhaps")
    engines: list[EngineHealthAnswer]
    models: dict[str, str] | None = Field(None, description="Of a server with several: their states")


class Version(AnswerModel):
    version: str


class AdminAnswer(BaseModel):
    """The result of a call."""

    model_config = ConfigDict(extra="allow")

    ok: bool


class AddedReplica(AnswerModel):
    ok: bool
    index: int


class Stats(AnswerModel):
    health: HealthAnswer
    engines: list[dict[str, Any]]
    settings: dict[str, Any]
    num_unfinished_requests: int


# ---- /health, /version, /metrics ----

router = APIRouter(tags=["Service"])


@router.get(
    "/health",
    summary="Whether requests are answered",
    responses={
        200: {"model": HealthAnswer, "description": "They are"},
        503: {"model": HealthAnswer, "description": "They are not: the engine is starting, restarting or dead"},
    },
)
async def health(request: Request) -> Response:
    context = context_of(request)
    healthy = context.llm.health().ok and not context.draining
    return json_response(request, describe_health(context), 200 if healthy else 503)


def describe_health(context: ServerContext) -> dict[str, Any]:
    found = context.llm.health()
    status = "shutting down" if context.draining else str(found.state)
    return {"status": status, "pid": os.getpid(), "engines": [asdict(engine) for engine in found.engines]}


@router.get(
    "/version",
    summary="The server's version",
    responses={200: {"model": Version, "description": "The version"}},
)
async def version(request: Request) -> Response:
    return json_response(request, {"version": __version__})


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Text format"}},
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    found = await context_of(request).shared.metrics()
    content, content_type = (b"", "text/plain; charset=utf-8") if found is None else found.render()
    headers = {**exchange_of(request.scope).headers(), "Content-Type": content_type}
    return Response(content, headers=headers)


# ---- /v1/models ----

models_router = APIRouter(tags=["OpenAI"])


@models_router.get("/v1/models", summary="List the models", responses=answers(Models))
async def list_models(request: Request) -> Response:
    entries = OneModel(context_of(request)).entries_by_name()
    return json_response(request, {"object": "list", "data": [describe_entry(entry, name) for name, entry in entries]})


# A model's name may have slashes.
@models_router.get("/v1/models/{model:path}", summary="Describe one", responses=answers(Model, 404))
async def get_model(request: Request, model: str) -> Response:
    return json_response(request, describe_entry(OneModel(context_of(request)).find_entry(model), model))


# ---- /admin ----

admin_router = APIRouter(prefix="/admin", tags=["Administration"])
ADMIN_ANSWERS: dict[str, Any] = {"responses": answers(AdminAnswer, 400)}


@admin_router.post("/pause", summary="Accept requests, but run no step", **ADMIN_ANSWERS)
async def pause(request: Request) -> Response:
    await context_of(request).llm.pause()
    return json_response(request, {"ok": True})


@admin_router.post("/resume", summary="Run steps again after a pause", **ADMIN_ANSWERS)
async def resume(request: Request) -> Response:
    await context_of(request).llm.resume()
    return json_response(request, {"ok": True})


@admin_router.post(
    "/reset_prefix_cache", summary="Empty the prefix cache; refused while requests are running", **ADMIN_ANSWERS
)
async def reset_prefix_cache(request: Request) -> Response:
    return json_response(request, {"ok": await context_of(request).llm.reset_prefix_cache()})


@admin_router.post("/sleep", summary="Free memory until the engine is woken up", **ADMIN_ANSWERS)
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    await context_of(request).llm.sleep(level)
    return json_response(request, {"ok": True})


@admin_router.post("/wake_up", summary="Allocate the memory again", **ADMIN_ANSWERS)
async def wake_up(request: Request) -> Response:
    await context_of(request).llm.wake_up()
    return json_response(request, {"ok": True})


@admin_router.post("/profile/start", summary="Start profiling steps", **ADMIN_ANSWERS)
async def start_profile(request: Request) -> Response:
    await context_of(request).llm.start_profile()
    return json_response(request, {"ok": True})


@admin_router.post("/profile/stop", summary="Stop profiling, and return the files' paths", **ADMIN_ANSWERS)
async def stop_profile(request: Request) -> Response:
    return json_response(request, {"ok": True, "files": await context_of(request).llm.stop_profile()})


@admin_router.post(
    "/replicas", summary="Start another engine; answers when it is ready", responses=answers(AddedReplica, 400)
)
async def add_replica(request: Request) -> Response:
    return json_response(request, {"ok": True, "index": await context_of(request).llm.add_replica()})


@admin_router.post(
    "/replicas/{index}/drain",
    summary="End an engine when it has answered its requests; the others continue what is left after `seconds`",
    **ADMIN_ANSWERS,
)
async def drain_replica(
    request: Request, index: int, seconds: Annotated[float, Query(ge=0, le=86400)] = 3600.0
) -> Response:
    await context_of(request).llm.drain_replica(index, seconds)
    return json_response(request, {"ok": True})


@admin_router.get("/stats", summary="State and settings of the engines", responses=answers(Stats))
async def stats(request: Request) -> Response:
    context = context_of(request)
    engines = await context.llm.stats()
    return json_response(
        request,
        {
            "health": describe_health(context),
            "engines": [msgspec.to_builtins(engine) for engine in engines],
            "settings": context.llm.describe(),
            "num_unfinished_requests": await context.shared.num_unfinished(),
        },
    )
