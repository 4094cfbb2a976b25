"""The OpenAPI document: what FastAPI makes of the routes, and what they say about bodies and answers.

Routes read their bodies themselves (request_bodies.py), so FastAPI does not know these models; they are put into place.
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
    """`model` is the name that examples call it by."""
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
            operation["responses"].pop("422", None)  # FastAPI's own way to say no, which never leaves this server
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
    """A model's schema comes with its parts inside; the document has one place for all of them. What stays is a
    reference."""
    if isinstance(schema, list):
        return [_move(part, schemas) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "title" in schema and "properties" in schema:
        schemas.update(schema.pop("$defs", {}))
        schemas[schema["title"]] = schema
        return {"$ref": f"#/components/schemas/{schema['title']}"}
    return {key: _move(part, schemas) for key, part in schema.items()}


# ---- what routes say ----

Answers = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    400: "The request is wrong; the message says where and what would be right",
    401: "No API key, or one that is not known",
    403: "The key is not for this path, or a web page asks that may not",
    404: "No such model, no such request, or no such path",
    405: "Not with this method",
    408: "The body did not arrive in time",
    413: "The body is too large, or what is asked for would be",
    415: "The body is of the wrong type, which is named",
    429: "Too many unfinished requests; try again later",
    500: "The server or the engine failed",
    503: "The server is shutting down, or its engine is not there",
    504: "The request's own deadline has passed",
}
MODEL = "MODEL"  # in examples; the document has the served model's name in its place
ALWAYS = (401, 403, 500, 503)
WITH_BODY = (400, 408, 413, 415)


def answers(
    model: type[BaseModel], *errors: int, stream_of: type[BaseModel] | None = None, files: Sequence[str] = ()
) -> Answers:
    """The answer in order, and the errors that may come in its place (beside those that always may). `files` are the
    types of other forms that the answer has, too."""
    documented: Answers = {200: {"model": model, "description": "The answer"}}
    others = {name: {"schema": {"type": "string", "format": "binary"}} for name in files}
    if stream_of is not None:
        others[EVENT_STREAM] = {"schema": _event(stream_of)}
    if others:
        documented[200]["content"] = others
    for status in sorted({*ALWAYS, *errors}):
        documented[status] = {"model": ErrorAnswer, "description": DESCRIPTIONS[status]}
    return documented


def body(model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    """The document's part for a body. The example works as it is, with the served model's name put in for its own."""
    return _request_body("application/json", model, example)


def form(model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    """The same for a form with files, which the example leaves out."""
    return _request_body("multipart/form-data", model, example)


def _request_body(kind: str, model: type[RequestModel], example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": _inlined_schema(model), "example": example}
    return {"requestBody": {"required": True, "content": {kind: content}}}


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _inlined_schema(model)}
    data = {"anyOf": [chunk, {"const": "[DONE]"}], "description": "A chunk; an error; or, at the end, [DONE]"}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """With all that it refers to inside. openapi.py moves it where it belongs."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")
