"""GET /v1/models: what this server serves, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.protocol.service import Model, Models
from ratoon.api.server.responses import json_response
from ratoon.api.server.routes.documented import answers

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", summary="List the models", responses=answers(Models), response_model=None)
async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json_response(
        request, {"object": "list", "data": [describe_model(context, name) for name in context.served_names]}
    )


# A model's name may have slashes.
@router.get("/v1/models/{model:path}", summary="Describe one", responses=answers(Model, 404), response_model=None)
async def get_model(request: Request, model: str) -> Response:
    context = context_of(request)
    context.check_model(model)
    return json_response(request, describe_model(context, model))


def describe_model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "ratoon",
        "root": context.llm.source.name,
        "parent": None,
        "max_model_len": context.max_model_len,
    }
