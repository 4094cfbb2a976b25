"""The console: the page for browsers at /, and its files below /console/. They need no key and have no data: what the
page shows, it asks for, with the key that is typed into it.

Files are read and compressed once, and again when they have changed. Only those of the types below are served. The page
names them below a tag of their contents (/console/v-TAG/…), under which a browser keeps them: opening the page again is
one request for it and those for its data.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import exchange_of, header
from ratoon.api.server.responses import json_response
from ratoon.version import __version__

FOLDER = Path(__file__).parents[3] / "console"
PAGE = "index.html"
MAX_FILES = 256
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TAG_MARK = "v-"  # begins the part of a path that has the tag
LASTING = "public, max-age=31536000, immutable"
REFERENCE = b'="console/'  # of the page to a file
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/console/config.json")
async def config(request: Request) -> Response:
    answer = json_response(request, describe(context_of(request)))
    answer.headers.update(HEADERS)
    return answer


@router.get("/console/{path:path}")
async def file(request: Request, path: str) -> Response:
    answer = file_response(request, path)
    if answer is None:
        raise ApiError(404, f"The console has no file {path[:100]!r}")
    return answer


def describe(context: ServerContext) -> dict[str, Any]:
    """What the page has to know before it has a key."""
    settings = context.settings
    needs_key = bool(settings.api_keys)
    return {
        "version": __version__,
        "needs_key": needs_key,
        "needs_admin_key": needs_key,  # to see the requests of all keys
        "admin": settings.admin,
        "models": [] if needs_key else list(context.model_names),
    }


def page_response(request: Request) -> Response | None:
    """The page; None where it is turned off, or not installed."""
    page = find(PAGE) if context_of(request).settings.console else None
    return None if page is None else _respond(request, _with_tag(page, contents_tag()))


def file_response(request: Request, path: str) -> Response | None:
    """A file by its path, which may begin with a tag. Below the tag of another version it is the file of this one, and
    is not kept."""
    tag, _, name = path.partition("/")
    if not tag.startswith(TAG_MARK):
        tag, name = "", path
    found = find(name)
    return None if found is None else _respond(request, found, lasts=tag == TAG_MARK + contents_tag())


def _respond(request: Request, found: ConsoleFile, lasts: bool = False) -> Response:
    headers = {**exchange_of(request.scope).headers(), **HEADERS, "ETag": found.etag, "Vary": "Accept-Encoding"}
    if lasts:
        headers["Cache-Control"] = LASTING
    if _has_token(header(request.scope, b"if-none-match"), found.etag):
        return Response(status_code=304, headers=headers)
    body = found.body
    if found.compressed is not None and _has_token(header(request.scope, b"accept-encoding"), "gzip"):
        body = found.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers={**headers, "Content-Type": found.content_type})


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    content_type: str
    body: bytes
    compressed: bytes | None  # None: it would not be shorter
    etag: str


def find(name: str) -> ConsoleFile | None:
    """A file of the folder, by its path in it. None: there is none, or it is not to be served."""
    parts = name.split("/")
    if any(not part or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        return None
    path = FOLDER.joinpath(*parts)
    if path.suffix not in TYPES:
        return None
    try:
        if not path.is_file() or not path.resolve().is_relative_to(FOLDER.resolve()):
            return None
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size)
    except OSError:
        return None


@lru_cache(MAX_FILES)
def _read(path: Path, changed: int, size: int) -> ConsoleFile:
    return _pack(TYPES[path.suffix], path.read_bytes())


def _pack(content_type: str, body: bytes) -> ConsoleFile:
    compressed = gzip.compress(body, mtime=0)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return ConsoleFile(content_type, body, compressed if len(compressed) < len(body) else None, etag)


def contents_tag() -> str:
    """Returns a text that changes with the contents of the files. A change is noticed within a second."""
    return _tag_of(FOLDER, int(time.monotonic()))


@lru_cache(1)
def _tag_of(folder: Path, second: int) -> str:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in TYPES)
    found = [(name, file.etag) for name in names if (file := find(name)) is not None]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


@lru_cache(1)
def _with_tag(page: ConsoleFile, tag: str) -> ConsoleFile:
    return _pack(page.content_type, page.body.replace(REFERENCE, REFERENCE + f"{TAG_MARK}{tag}/".encode()))


def _has_token(value: bytes | None, token: str) -> bool:
    """Whether a header's list has this entry, and does not rule it out."""
    for entry in (value or b"").decode("latin-1").split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name.removeprefix("W/") == token and "q=0" not in parameters:
            return True
    return False
