"""The server as an ASGI application: the routes, and the layers that every request passes on its way to them.

exchange     the state of the request that all layers share; counts answers
host         403 for host names that are not the server's, on a loopback address
CORS         only where origins were given
draining     503 once the server shuts down
key          401, 403
body         413, 408, 417, 503; from here on the body is in memory
disconnect   cancels the request when the client disconnects
routes       FastAPI
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.body_budget import BodyBudget
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import ApiError, as_api_error, shutting_down
from ratoon.api.server.exchange import IGNORED_HEADER, NOTE_HEADER, AsgiApp, Exchange, Scope
from ratoon.api.server.middleware import (
    OPEN_PATHS,
    AllowedHosts,
    BodyLimit,
    BoundedBody,
    CancelOnDisconnect,
    CheckHost,
    ExchangeLayer,
    KeyRing,
    RefuseWhileDraining,
    RequireKey,
    is_admin_path,
)
from ratoon.api.server.openapi import build_document
from ratoon.api.server.request_bodies import explain
from ratoon.api.server.responses import error_response
from ratoon.api.server.routes import (
    adapters,
    audio,
    chat,
    completions,
    console,
    conversations,
    embeddings,
    engine_events,
    hidden_states,
    messages,
    ollama,
    pages,
    requests,
    responses,
    scoring,
    service,
    tokens,
)
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import EngineDeadError, EngineError, RequestError
from ratoon.core.suggestions import nearest_name
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    conversations.router,
    messages.router,
    ollama.router,
    requests.router,
    embeddings.router,
    scoring.router,
    audio.router,
    hidden_states.router,
    service.models_router,
    tokens.router,
    engine_events.router,
    service.router,
    pages.router,
)
EXPOSED_HEADERS = ("X-Request-Id", NOTE_HEADER, IGNORED_HEADER, "Retry-After")
# Headers that web pages may send beside those that need no preflight: ours, and those of OpenAI's
# and Anthropic's JavaScript clients.
ALLOWED_HEADERS = (
    "Authorization", "Content-Type", "X-Request-Id", "Traceparent", "Tracestate",
    "X-Api-Key", "Anthropic-Version", "Anthropic-Beta",
    "OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta", "Idempotency-Key",
    *(f"X-Stainless-{name}" for name in (
        "Arch", "Lang", "OS", "Package-Version", "Retry-Count", "Runtime", "Runtime-Version", "Timeout",
        "Helper-Method", "Poll-Helper", "Custom-Poll-Interval",
    )),
)  # fmt: skip

VERSION_PREFIX = "/v1"
MAX_SHOWN_PATH = 100
# Paths of Ollama that this server has not, and the command that does the same
PATHS_OF_COMMANDS = {"/api/pull": "ratoon pull", "/api/delete": "ratoon rm"}

logger = get_logger(__name__)


def create_app(llm: AsyncLLM, settings: ServerSettings) -> AsgiApp:
    """Makes the application. The engine must be started before the first request comes."""
    return build_app(ServerContext(llm, settings))


def build_app(context: ServerContext) -> AsgiApp:
    return add_layers(build_routes(context), context, _counter(context))


class RouteContext(Protocol):
    """What the routes of every server need to know."""

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def served_names(self) -> tuple[str, ...]: ...


class LayerContext(Protocol):
    """What the layers in front of the routes need to know of a server: of one model, or of several."""

    settings: ServerSettings
    bodies: BodyBudget
    allowed_hosts: AllowedHosts | None
    draining: bool


def add_layers(app: AsgiApp, context: LayerContext, count: Callable[[Scope, Exchange], None]) -> AsgiApp:
    """Puts the layers in front of an application. `count` is called with each request that has been answered."""
    settings = context.settings
    app = CancelOnDisconnect(app)
    audio_limit = BodyLimit(settings.max_audio, "--max-audio")
    app = BoundedBody(
        app,
        BodyLimit(settings.max_body, "--max-body"),
        settings.body_timeout,
        context.bodies,
        {route.path: audio_limit for route in audio.router.routes if isinstance(route, APIRoute)},
    )
    if settings.api_keys or settings.admin:
        app = RequireKey(app, KeyRing(settings.api_keys), KeyRing(settings.admin_keys if settings.admin else ()))
    app = RefuseWhileDraining(app, lambda: context.draining)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=ALLOWED_HEADERS,
            expose_headers=EXPOSED_HEADERS,
        )
    if context.allowed_hosts is not None:
        app = CheckHost(app, context.allowed_hosts)
    return ExchangeLayer(app, count)


def build_routes(context: RouteContext, first: Sequence[APIRouter] = ()) -> FastAPI:
    """Makes the application without the layers. The routes of `first` come before those of the same path."""
    app = FastAPI(title="Ratoon", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    hidden = {route.path for router in first for route in router.routes if isinstance(route, APIRoute)}
    for router in (*first, *(_without(router, hidden) for router in routers_of(context.settings))):
        # The routes as they are: `include_router` would derive all of them anew for each application.
        app.router.routes.extend(router.routes)
    for kind in (ApiError, RequestError, EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)
    needs_key = bool(context.settings.api_keys)
    app.openapi = lambda: build_document(  # type: ignore[method-assign]
        app, needs_key, OPEN_PATHS, is_admin_path, context.served_names[0]
    )
    return app


def _without(router: APIRouter, paths: set[str]) -> APIRouter:
    """Returns the router without routes that others of the same path hide."""
    left = APIRouter()
    left.routes.extend(route for route in router.routes if getattr(route, "path", None) not in paths)
    return router if len(left.routes) == len(router.routes) else left


def routers_of(settings: ServerSettings) -> tuple[APIRouter, ...]:
    """Returns the routers of a server of one model."""
    routers = (*ROUTERS, console.router) if settings.console else ROUTERS
    if not settings.admin:
        return routers
    assert settings.admin_keys, "administration needs an admin key (ServerSettings.verify)"
    return (*routers, service.admin_router, adapters.router)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # from the router: unknown path or method
        error = ApiError(error.status_code, _explain_routing(request, error), headers=dict(error.headers or {}))
    elif isinstance(error, RequestValidationError):  # of path and query; bodies are read by the routes themselves
        problem = error.errors()[0]
        error = explain({**problem, "loc": problem["loc"][1:]})  # the first part says where: query or path
    elif isinstance(error, EngineError) and context_of(request).draining and not isinstance(error, EngineDeadError):
        error = shutting_down()
    answer = as_api_error(error)
    if answer.status == 500:
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
    return error_response(request.scope, answer)


def _explain_routing(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        routers = routers_of(context_of(request).settings)
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        return no_such_path(request.url.path, (route.path for route in routes))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"{request.method} is not supported for this path" + (f"; use {allowed}" if allowed else "")
    return str(error.detail)


def no_such_path(path: str, known: Iterable[str]) -> str:
    """Answers with a 404; `known` are the paths of the server's routes."""
    paths = set(known)
    message = f"There is no {path[:MAX_SHOWN_PATH]!r} here"
    if is_admin_path(path) and not any(is_admin_path(one) for one in paths):
        return f"{message}: administration is off; ratoon serve --admin turns it on, with an admin key"
    if path in PATHS_OF_COMMANDS:
        return f"{message}: `{PATHS_OF_COMMANDS[path]} MODEL` does that"
    meant = _nearest_path(path, paths)
    return message if meant is None else f"{message}; did you mean {meant}?"


def _nearest_path(path: str, paths: set[str]) -> str | None:
    plain = path.rstrip("/")
    for candidate in (
        plain,
        VERSION_PREFIX + plain,
        plain.removeprefix(VERSION_PREFIX),
    ):  # a base URL without /v1, or with it twice
        if candidate in paths and candidate != path:
            return candidate
    return nearest_name(plain, paths)


def _counter(context: ServerContext) -> Callable[[Scope, Exchange], None]:
    def count(scope: Scope, exchange: Exchange) -> None:
        metrics = context.llm.metrics
        if metrics is not None and exchange.status:
            route = scope.get("route")
            metrics.record_http(getattr(route, "path", "other"), exchange.status)

    return count
