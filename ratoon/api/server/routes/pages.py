"""GET / and /docs: pages for browsers: the server, and its API with examples. They load nothing from other servers.
Where the console is served (console.py), it has the place of the first one.

Both need no key, so on a server with keys they do not name the model. /docs is a static file;
it reads /openapi.json, with the key that is typed into it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.exchange import exchange_of, preferred_type
from ratoon.api.server.responses import JSON, json_response
from ratoon.api.server.routes import console
from ratoon.version import __version__

FILES = Path(__file__).parent.parent / "pages"
HTML = "text/html"
TEXT = "text/plain"
LINKS = {
    "/docs": "the API, with examples to send",
    "/v1/models": "the models that it serves",
    "/health": "whether requests are answered",
    "/metrics": "metrics for Prometheus",
    "/openapi.json": "the API for programs",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def home(request: Request) -> Response:
    context = context_of(request)
    form = preferred_type(request.scope, (TEXT, HTML, JSON))
    if form == JSON:
        return json_response(request, describe(context))
    if form == TEXT:
        headers = exchange_of(request.scope).headers()
        return Response(as_text(context, str(request.base_url)), headers=headers, media_type=TEXT)
    page = console.page_response(request)
    if page is not None:
        return page
    links = [
        f'<tr><td><a href="{path[1:]}">{path}</a></td><td>{html.escape(purpose)}</td></tr>'
        for path, purpose in LINKS.items()
    ]
    plain = fill(
        "home.html",
        version=__version__,
        model=html.escape(served(context)),
        links="\n".join(links),
        example=html.escape(example(context, str(request.base_url))),
    )
    return page_response(request, plain)


@router.get("/docs")
async def docs(request: Request) -> Response:
    return page_response(request, fill("docs.html", script=read("docs.js")), script=read("docs.js"))


def describe(context: ServerContext) -> dict[str, Any]:
    models = {} if context.settings.api_keys else {"models": list(context.served_names)}
    return {
        "name": "ratoon",
        "version": __version__,
        **models,
        "needs_api_key": bool(context.settings.api_keys),
        "links": list(LINKS),
    }


def served(context: ServerContext) -> str:
    if context.settings.api_keys:
        return "It requires an API key, as the header “Authorization: Bearer KEY”."
    return f"It serves {', '.join(context.served_names)}."


def as_text(context: ServerContext, base: str) -> str:
    lines = [
        f"Ratoon {__version__}, an inference engine for language models, in OpenAI's protocol.",
        served(context),
        "",
    ]
    lines += [f"{base.rstrip('/')}{path:16}{purpose}" for path, purpose in LINKS.items()]
    return "\n".join([*lines, "", example(context, base), ""])


def example(context: ServerContext, base: str) -> str:
    model = "MODEL" if context.settings.api_keys else context.served_names[0]
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    key = ["  -H 'Authorization: Bearer KEY' \\"] if context.settings.api_keys else []
    return "\n".join(
        [
            f"curl {base.rstrip('/')}/v1/chat/completions \\",
            *key,
            "  -H 'Content-Type: application/json' \\",
            f"  -d '{json.dumps(body)}'",
        ]
    )


def page_response(request: Request, page: str, script: str | None = None) -> Response:
    """Nothing from other servers is loaded or run, whatever text a name in the page contains."""
    allowed = [f"style-src '{_hash(read('style.css'))}'", "img-src data:", "connect-src 'self'", "base-uri 'none'"]
    if script is not None:
        allowed.append(f"script-src '{_hash(script)}'")
    headers = {
        **exchange_of(request.scope).headers(),
        "Content-Security-Policy": "; ".join(["default-src 'none'", "frame-ancestors 'none'", *allowed]),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, headers=headers, media_type=HTML)


def fill(name: str, **values: str) -> str:
    page = read(name)
    for key, value in {"style": read("style.css"), **values}.items():
        page = page.replace("{{" + key + "}}", value)
    return page


@cache
def read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
