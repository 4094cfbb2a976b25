"""A request's body to a checked model: strict JSON, strict types, and no field that nobody reads.

Everything that can be wrong with a body is a 400 (or 415) that names the place.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.exchange import Scope, exchange_of, header
from ratoon.api.server.lanes import WorkLanes
from ratoon.api.server.problems import explain
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.protocol.unsupported import find_hint
from ratoon.core.json_extent import ExtentLimit, find_excess
from ratoon.core.suggestions import did_you_mean

Model = TypeVar("Model", bound=RequestModel)

HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")  # or one half of a whole one: worth a closer look
LONE_HALF = re.compile(  # of a text without escaped backslashes
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
MAX_SHOWN_NAME = 64
LONG_BODY = 16 * 1024  # bytes: what is shorter is read before a thread would have begun

_lanes = WorkLanes("body", LONG_BODY)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body as `model`. ApiError for anything that is not exactly that."""
    _check_content_type(request.scope)
    context, body = context_of(request), exchange_of(request.scope).body
    lenient = context.settings.lenient
    return await _lanes.run(len(body), lambda: parse_body(body, model, lenient, context.extent_limit))


def parse_body(body: bytes, model: type[Model], lenient: bool, limit: ExtentLimit) -> Model:
    """How much it holds is known before it is decoded, and what is wrong with it is found no more than once: a refusal
    costs no more than a few times the body, in time and in memory."""
    excess = find_excess(body, limit)
    if excess is not None:
        raise ApiError(400, f"The body holds more than {excess}, which no request needs", code="body_too_large")
    decoded = decode_json(body)
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body is not a JSON object", code="invalid_json")
    fields = check_fields(decoded, model, lenient)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise explain_first(error) from None


def decode_json(body: bytes) -> Any:
    """JSON as the standard has it: no NaN, no key twice, whole characters only, and within reason."""
    if not body:
        raise _invalid_json("the body is empty")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None
    except ValueError:  # Python's limit on the length of a whole number
        raise _invalid_json("a number has too many digits") from None
    if HALF_CHARACTER.search(body):
        _check_whole_characters(body)
    return value


def _check_content_type(scope: Scope) -> None:
    # A web page can post other types to this server without asking it first.
    given = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'")
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise ApiError(415, "The body must not be compressed")


def check_fields(body: dict[str, Any], model: type[RequestModel], lenient: bool, path: str = "") -> dict[str, Any]:
    """The fields that the model has. The others are refused, each kind in its own words."""
    known = {}
    for name, value in body.items():
        if name in model.model_fields:
            inner = model.INNER.get(name)
            if inner is not None and isinstance(value, dict):
                value = check_fields(value, inner, lenient, f"{name}.")
            known[name] = value
        elif (hint := find_hint(model.UNSUPPORTED, name)) is not None:
            if not model.is_harmless(name, value):
                raise refused(path + _shorten(name), "is not supported", hint, code="unsupported_parameter")
        elif value is not None and not lenient:  # null means "left out"
            raise _unknown_field(path, name, model)
    return known


def _unknown_field(path: str, name: str, model: type[RequestModel]) -> ApiError:
    otherwise = "leave it out (ratoon serve --lenient ignores such fields)"
    expected = did_you_mean(name, model.model_fields, otherwise)
    return refused(path + _shorten(name), "is not a field of this request", expected, code="unknown_parameter")


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_SHOWN_NAME else name[:MAX_SHOWN_NAME] + "…"


def explain_first(error: ValidationError) -> ApiError:
    """What was found wrong first."""
    return explain(error.errors(include_url=False, include_input=False)[0])


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _invalid_json(f"the key {twice[:64]!r} stands in one object twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is no number in JSON")


def _check_whole_characters(body: bytes) -> None:
    """Escapes can write half a character (a lone surrogate), which no text can hold."""
    if LONE_HALF.search(body.replace(b"\\\\", b"__")):
        raise _invalid_json("an escape \\uD800 to \\uDFFF stands without its other half")


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {problem}", code="invalid_json")
