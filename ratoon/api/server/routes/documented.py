"""What the OpenAPI document says about routes beyond their paths: bodies, and every answer that may come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from ratoon.api.server.protocol.answers import ErrorAnswer
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.sse import EVENT_STREAM

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
    content = {"schema": _schema(model), "example": example}
    return {"requestBody": {"required": True, "content": {kind: content}}}


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(model)}
    data = {"anyOf": [chunk, {"const": "[DONE]"}], "description": "A chunk; an error; or, at the end, [DONE]"}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """With all that it refers to inside. openapi.py moves it where it belongs."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")
