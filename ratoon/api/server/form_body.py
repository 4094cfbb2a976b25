"""A form with a file (multipart/form-data) to a checked model. Everything that can be wrong with it is a 400 or 415.

Values of a form are text; numbers and switches are read from it. One that is empty counts as left out.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.requests import Request

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.exchange import Scope, exchange_of, header
from ratoon.api.server.json_body import check_fields, explain_first
from ratoon.api.server.protocol.base import RequestModel

Model = TypeVar("Model", bound=RequestModel)

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_FIELD_BYTES = 2**20  # of a part that is no file
LIST = "[]"  # at the end of a name: it may come several times


async def read_form(request: Request, model: type[Model]) -> Model:
    """The body as `model`. Files are its fields of type bytes."""
    settings = context_of(request).settings
    _check_origin(request.scope, settings.cors_origins)
    boundary = _boundary(request.scope)
    exchange = exchange_of(request.scope)
    # A recording is large: it takes its time, and should not be in memory twice for longer than that.
    fields = await asyncio.to_thread(parse_form, exchange.body, boundary)
    exchange.body = b""
    try:
        return model.model_validate(check_fields(fields, model, settings.lenient))
    except ValidationError as error:
        raise explain_first(error) from None


def parse_form(body: bytes, boundary: bytes) -> dict[str, Any]:
    """By name: files as bytes, other values as text, or as a list of texts where the name ends with []."""
    form = _Form()
    config = {"MAX_MEMORY_FILE_SIZE": float("inf"), "UPLOAD_ERROR_ON_BAD_CTE": True}
    try:
        parser = FormParser(FORM, form.add_field, form.add_file, form.end, boundary=boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise _invalid("its parts are not as multipart/form-data has them") from None
    if not form.ended:
        raise _invalid("it breaks off")
    return form.values


class _Form:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.ended = False
        self._num_parts = 0

    def add_field(self, field: Field) -> None:
        name, data = _text(field.field_name or b"", "a name"), field.value or b""
        if len(data) > MAX_FIELD_BYTES:
            raise refused(name[:64], f"has {len(data)} bytes", "a file is sent as one, with a filename")
        value = _text(data, name)
        if not value:
            return
        if name.endswith(LIST):
            self._count()
            self.values.setdefault(name.removesuffix(LIST), []).append(value)
        else:
            self._add(name, value)

    def add_file(self, file: File) -> None:
        file.file_object.seek(0)
        self._add(_text(file.field_name or b"", "a name"), file.file_object.read())

    def end(self) -> None:
        self.ended = True

    def _add(self, name: str, value: str | bytes) -> None:
        self._count()
        if name in self.values:
            raise refused(name[:64], "is there twice", "once")
        self.values[name] = value

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise refused(name[:64], "is not UTF-8", "text; a file is sent with a filename") from None


def _boundary(scope: Scope) -> bytes:
    kind, options = parse_options_header(header(scope, b"content-type"))
    if kind.lower() != FORM.encode() or not options.get(b"boundary"):
        raise ApiError(415, f"The body must be a form, with the header 'Content-Type: {FORM}; boundary=…'")
    return options[b"boundary"]


def _check_origin(scope: Scope, allowed: tuple[str, ...]) -> None:
    """A web page can post forms to any server without asking it first. Those of other origins are turned away here."""
    origin = (header(scope, b"origin") or b"").decode("latin-1")
    if not origin or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != (header(scope, b"host") or b"").decode("latin-1"):
        raise ApiError(403, "Web pages of this origin may not ask this server (--cors-origin)", code="origin_refused")


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"The body is not a valid form: {problem}", code="invalid_form")
