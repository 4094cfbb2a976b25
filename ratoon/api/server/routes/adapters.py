"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters while serving, under vLLM's names. Served only with
--admin, and for files below --adapter-root."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.adapter_files import allowed_path
from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.openapi import WITH_BODY, answers, body
from ratoon.api.server.protocol.base import AnswerModel, Int, RequestModel
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.responses import json_response


class LoadAdapterRequest(RequestModel):
    lora_name: str = Field(description="The name that requests use as their model")
    lora_path: str = Field(description="A PEFT folder or a .gguf file, below a folder that --adapter-root allows")
    load_inplace: bool | None = Field(None, description="Replace the adapter that has the name")
    base_model_name: str | None = Field(None, description="Accepted, without effect")


class UnloadAdapterRequest(RequestModel):
    lora_name: str
    lora_int_id: Int | None = Field(None, description="Accepted, without effect")


class LoadedAdapter(AnswerModel):
    ok: bool
    id: str
    root: str
    digest: str = Field(description="Of the files: cached prefixes are shared by requests with the same digest alone")
    rank: int


class UnloadedAdapter(AnswerModel):
    ok: bool
    id: str


router = APIRouter(tags=["Administration"])
EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@router.post(
    "/v1/load_lora_adapter",
    summary="Let requests name an adapter as their model",
    responses=answers(LoadedAdapter, *WITH_BODY),
    openapi_extra=body(LoadAdapterRequest, EXAMPLE),
)
async def load_lora_adapter(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, LoadAdapterRequest)
    if asked.lora_name in context.served_names:
        raise refused("lora_name", f"{asked.lora_name!r} is the model's own name", "another one")
    path = await asyncio.to_thread(allowed_path, asked.lora_path, context.settings.adapter_roots)
    adapter = await context.shared.load_adapter(asked.lora_name, path, bool(asked.load_inplace))
    described = {"id": asked.lora_name, "root": adapter.path, "digest": adapter.digest, "rank": adapter.rank}
    return json_response(request, {"ok": True, **described})


@router.post(
    "/v1/unload_lora_adapter",
    summary="End an adapter for new requests; those that run keep it",
    responses=answers(UnloadedAdapter, *WITH_BODY, 404),
    openapi_extra=body(UnloadAdapterRequest, {"lora_name": "sql"}),
)
async def unload_lora_adapter(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, UnloadAdapterRequest)
    if asked.lora_name not in context.llm.list_adapters():
        message = f"lora_name: there is no adapter {asked.lora_name[:100]!r}; GET /v1/models lists them"
        raise ApiError(404, message, param="lora_name", code="adapter_not_found")
    await context.shared.unload_adapter(asked.lora_name)
    return json_response(request, {"ok": True, "id": asked.lora_name})
