"""The OpenAPI document: FastAPI's description of the routes, with the models of bodies and answers.

Routes read their bodies themselves (request_bodies.py), so FastAPI does not know these models; they are added here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from ratoon.api.server.protocol.base import ErrorAnswer, RequestModel
from ratoon.api.server.responses import EVENT_STREAM
from ratoon.version import __version__

TITLE = "Ratoon"
DESCRIPTION = "OpenAI's protocol and some extensions. Fields that OpenAI does not have are ordinary fields here."
API_KEY = {"type": "http", "scheme": "bearer", "description": "An API key of this server"}
ADMIN_KEY = {"type": "http", "scheme": "bearer", "description": "The admin key of this server"}


def build_document(
    app: FastAPI, needs_key: bool, open_paths: frozenset[str], is_admin_path: Callable[[str], bool], model: str
) -> dict[str, Any]:
    """Builds the OpenAPI document. `model` is the name that examples call it by."""
    document = get_openapi(title=TITLE, version=__version__, description=DESCRIPTION, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemes: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        if is_admin_path(path):
            scheme, schemes["adminKey"] = "adminKey", ADMIN_KEY
        elif needs_key and path not in open_paths:
            scheme, schemes["key"] = "key", API_KEY
        else:
            scheme = ""
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own error, which this server never sends
            if scheme:
                operation["security"] = [{scheme: []}]
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["example"] = model
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if "model" in content.get("example", {}):
                    content["example"] = {**content["example"], "model": model}
            for place in (operation.get("requestBody", {}), *operation["responses"].values()):
                for content in place.get("content", {}).values():
                    content["schema"] = _move(content["schema"], schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if schemes:
        components["securitySchemes"] = schemes
    return document


def _move(schema: Any, schemas: dict[str, Any]) -> Any:
    """Moves the definitions inside a model's schema to the document's one place for them, and leave
    references."""
    if isinstance(schema, list):
        return [_move(part, schemas) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "title" in schema and "properties" in schema:
        schemas.update(schema.pop("$defs", {}))
        schemas[schema["title"]] = schema
        return {"$ref": f"#/components/schemas/{schema['title']}"}
    return {key: _move(part, schemas) for key, part in schema.items()}


# ---- descriptions by the routes ----

Answers = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    400: "The request is invalid; the message names the field and the expected value",
    401: "No API key, or an unknown one",
    403: "The key is not valid for this path, or the web page's origin is not allowed",
    404: "No such model, no such request, or no such path",
    405: "The path does not support this method",
    408: "The body did not arrive in time",
    409: "The request was aborted by its id",
    410: "Events of the response were dropped; the message says from which number on they are there",
    413: "The body is too large, or the answer would be",
    415: "The body's type is not supported; the message names it",
    417: "The header Expect has anything but 100-continue",
    429: "Too many unfinished requests; try again later",
    500: "The server or the engine failed",
    503: "The server is shutting down or has no memory for the body, or its engine is not running",
    504: "The request's own deadline has passed",
}
MODEL = "MODEL"  # in examples; the document has the served model's name in its place
ALWAYS = (401, 403, 417, 500, 503)
WITH_BODY = (400, 408, 413, 415)


def answers(
    model: type[BaseModel],
    *errors: int,
    stream_of: type[BaseModel] | None = None,
    files: Sequence[str] = (),
    error: type[BaseModel] = ErrorAnswer,
) -> Answers:
    """Describes the successful answer, and the possible errors (beside those of every route). `files` are further media
    types of the answer, `error` is the form of errors."""
    documented: Answers = {200: {"model": model, "description": "The answer"}}
    others = {name: {"schema": {"type": "string", "format": "binary"}} for name in files}
    if stream_of is not None:
        others[EVENT_STREAM] = {"schema": _event(stream_of)}
    if others:
        documented[200]["content"] = others
    for status in sorted({*ALWAYS, *errors}):
        documented[status] = {"model": error, "description": DESCRIPTIONS[status]}
    return documented


def body(model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    """Describes a body in JSON. The example works unchanged, with the served model's name inserted."""
    return _request_body("application/json", model, example)


def form(model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    """Describes a form with files, which the example leaves out."""
    return _request_body("multipart/form-data", model, example)


def _request_body(kind: str, model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": _inlined_schema(model), "example": example}
    return {"requestBody": {"required": True, "content": {kind: content}}}


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """Describes one event of a stream."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _inlined_schema(model)}
    data = {"anyOf": [chunk, {"const": "[DONE]"}], "description": "A chunk; an error; or, at the end, [DONE]"}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns a model's schema with its definitions inside; the document's builder moves them."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")
