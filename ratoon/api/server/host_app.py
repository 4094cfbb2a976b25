"""A server with several models, as an ASGI application and as a program: its own routes (the list of models, health,
metrics, pages), the router in front of the models' routes, and the loader of models."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client.metrics_core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.app import add_layers, build_routes
from ratoon.api.server.body_budget import BodyBudget
from ratoon.api.server.context import ServerContext
from ratoon.api.server.engine_watch import EngineWatch
from ratoon.api.server.exchange import AsgiApp, Exchange, Scope, exchange_of
from ratoon.api.server.middleware import AllowedHosts, KeyRing
from ratoon.api.server.model_directory import ModelEntry, describe_entry, sampling_defaults
from ratoon.api.server.model_host import LoadedModel, ModelHost, ModelSlot, ModelSpec
from ratoon.api.server.model_router import ModelRouter
from ratoon.api.server.model_slots import FOREVER, ModelMemory, ModelState, SleepLevel, parse_keep_alive
from ratoon.api.server.openapi import answers
from ratoon.api.server.responses import json_response, large_response
from ratoon.api.server.routes.requests import ROOT_SIZE, EndedRequests, describe_root
from ratoon.api.server.routes.service import HealthAnswer, Model, Models
from ratoon.api.server.runner import HttpRunner, allowed_hosts, loop_factory
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import OwnState
from ratoon.api.server.unknown_fields import IgnoredFieldsLog
from ratoon.core.engine_map import EngineMapReport
from ratoon.core.errors import EngineError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.json_extent import ExtentLimit, extent_limit
from ratoon.core.stats import SchedulerStats
from ratoon.engine.async_llm import AsyncLLM
from ratoon.observe.metrics import NAMESPACE, EngineMetrics

# ---- a model that is loaded ----


class EngineModel:
    """A model with an engine process, and the routes that answer its requests."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.app: AsgiApp = build_routes(context)
        figures = context.llm.describe()
        num_engines = context.llm.front_end_config.num_engines
        self.memory = ModelMemory(
            num_engines * (figures.get("weight_bytes") or 0), num_engines * (figures.get("kv_bytes") or 0)
        )

    @property
    def is_dead(self) -> bool:
        return self.context.llm.health().state == EngineState.DEAD

    @property
    def num_unfinished(self) -> int:
        return max(self.context.num_unfinished, self.context.llm.num_unfinished_requests())

    async def num_leases(self) -> int:
        leases = [stats.leases for stats in await self.context.llm.stats()]
        return sum(one.num_active + one.num_in_host_memory for one in leases)

    async def sleep(self, level: SleepLevel) -> None:
        await self.context.llm.sleep(int(level))

    async def wake_up(self) -> None:
        await self.context.llm.wake_up()

    async def end(self, drain_seconds: float = 0.0) -> None:
        await self.context.llm.shutdown(drain_seconds)


async def load_model(slot: ModelSlot, kv_memory: int | None) -> LoadedModel:
    """Starts an engine. ModelError, ConfigError or EngineError if it does not start."""
    spec = slot.spec
    settings = dict(spec.llm_settings) if kv_memory is None else {**spec.llm_settings, "kv_memory": kv_memory}
    llm = AsyncLLM(spec.model, metrics=EngineMetrics(spec.name), **settings)
    await llm.start()
    try:
        llm.start_grammars()
        if llm.tracer is not None:
            llm.tracer.model_name = spec.name
        names = (spec.name, *(name for name in spec.further_names if name not in llm.list_adapters()))
        state = OwnState(llm, spec.settings, slot.store)
        return EngineModel(ServerContext(llm, replace(spec.settings, served_names=names), given_state=state))
    except BaseException:
        await llm.shutdown()
        raise


# ---- the server's own routes ----


@dataclass
class HostContext:
    """What the routes of the server itself share."""

    host: ModelHost
    settings: ServerSettings
    allowed_hosts: AllowedHosts | None = None
    draining: bool = False
    bodies: BodyBudget = field(init=False)
    metrics: EngineMetrics = field(init=False)  # of requests, whatever model answered them
    ignored_fields: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.settings.max_total_body)
        self.metrics = EngineMetrics("")

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.host.names

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.host.names

    @property
    def awake(self) -> list[ServerContext]:
        return [loaded.context for _, loaded in awake_models(self.host)]

    @cached_property
    def watch(self) -> EngineWatch:
        labels = KeyRing(self.settings.api_keys).labels()
        engines = HostEngines(self.host)
        return EngineWatch(engines, lambda: self.model_names, engines.model_of, labels, lambda: self.draining)

    @property
    def extent_limit(self) -> ExtentLimit:
        """The limits on the contents of bodies for the server itself, which are small."""
        return extent_limit(1, 1, 1)

    # The directory of models (model_directory.py)

    def entries(self) -> list[ModelEntry]:
        return [entry_of(slot, self.host.now) for slot in self.host.slots]

    def find_entry(self, name: str) -> ModelEntry:
        return entry_of(self.host.find(name), self.host.now)

    def entries_by_name(self) -> Iterator[tuple[str, ModelEntry]]:
        for slot in self.host.slots:
            entry = entry_of(slot, self.host.now)
            yield from ((name, entry) for name in slot.names)


def entry_of(slot: ModelSlot, now: float) -> ModelEntry:
    loaded = slot.loaded
    adapters = {} if loaded is None else loaded.context.llm.list_adapters()
    return ModelEntry(
        name=slot.name,
        names=slot.names,
        model=slot.spec.model,
        state=slot.state,
        created=slot.created,
        memory=slot.memory,
        held=slot.held,
        overrides=slot.spec.llm_settings.get("hf_overrides"),
        source=None if loaded is None else loaded.context.llm.source,
        max_model_len=None if loaded is None else loaded.context.max_model_len,
        adapters={name: adapter.path for name, adapter in adapters.items()},
        seconds_left=None if slot.keep_alive == FOREVER else max(slot.expires_at - now, 0.0),
        num_unfinished=0 if loaded is None else loaded.num_unfinished,
        error=slot.error,
        figures={} if loaded is None else loaded.context.llm.describe(),
        sampling_defaults=None if loaded is None else sampling_defaults(loaded.context.llm),
    )


def awake_models(host: ModelHost) -> list[tuple[ModelSlot, LoadedModel]]:
    """The models whose engines may have requests and leases. To ask these wakes no model."""
    return [
        (slot, slot.loaded)
        for slot in host.slots
        if slot.loaded is not None and slot.state == ModelState.LOADED and not slot.loaded.is_dead
    ]


class HostEngines:
    """The engines of all models that are loaded, by the numbers that engine_number gives them. To watch a model does
    not count as using it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._num_failures = [0] * len(host.slots)

    def health(self) -> Health:
        return host_health(self._host)

    def model_of(self, index: int) -> str:
        return self._host.slots[index // ENGINES_OF_MODEL].name

    async def engine_maps(self, watcher_id: str) -> list[EngineMapReport]:
        asked = [self._maps_of(slot, loaded, watcher_id) for slot, loaded in awake_models(self._host)]
        return [report for reports in await asyncio.gather(*asked) for report in reports]

    async def _maps_of(self, slot: ModelSlot, loaded: LoadedModel, watcher_id: str) -> list[EngineMapReport]:
        """Returns nothing if the model's engines end, or one of several is started again: what they would have told is
        lost, and they are asked for all of it the next time."""
        try:
            reports = await loaded.context.llm.engine_maps(f"{watcher_id}-{self._num_failures[slot.index]}")
        except EngineError:
            self._num_failures[slot.index] += 1
            return []
        for report in reports:
            report.index = engine_number(slot, report.index)
        return reports


def host_of(request: Request) -> HostContext:
    context: HostContext = request.app.state.context
    return context


router = APIRouter()


@router.get("/v1/models", summary="List the models", responses=answers(Models), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    entries = host_of(request).entries_by_name()
    return json_response(request, {"object": "list", "data": [describe_entry(entry, name) for name, entry in entries]})


@router.get("/v1/models/{model:path}", summary="Describe one", responses=answers(Model, 404), tags=["OpenAI"])
async def get_model(request: Request, model: str) -> Response:
    return json_response(request, describe_entry(host_of(request).find_entry(model), model))


@router.get(
    "/health",
    summary="Whether requests are answered",
    responses={200: {"model": HealthAnswer}, 503: {"model": HealthAnswer, "description": "The server shuts down"}},
    tags=["Service"],
)
async def health(request: Request) -> Response:
    context = host_of(request)
    engines = [asdict(engine) for engine in host_health(context.host).engines]
    status = "shutting down" if context.draining else "ok"
    models = {slot.name: str(slot.state) for slot in context.host.slots}
    body = {"status": status, "pid": os.getpid(), "engines": engines, "models": models}
    return json_response(request, body, 503 if context.draining else 200)


def host_health(host: ModelHost) -> Health:
    """All engines, numbered by the model's place in the list and the engine's own number."""
    engines: list[EngineHealth] = []
    for slot in host.slots:
        if slot.loaded is not None:
            found = slot.loaded.context.llm.health().engines
            engines += [replace(one, index=engine_number(slot, one.index)) for one in found]
    return Health(engines)


ENGINES_OF_MODEL = 100  # numbers of engines that a model has


def engine_number(slot: ModelSlot, index: int) -> int:
    return ENGINES_OF_MODEL * slot.index + index


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Text format"}},
    response_class=Response,
    tags=["Service"],
)
async def metrics(request: Request) -> Response:
    content, content_type = sum_of_metrics(host_of(request)).render()
    headers = {**exchange_of(request.scope).headers(), "Content-Type": content_type}
    return Response(content, headers=headers)


class HostMetrics(EngineMetrics):
    """The metrics of all models together, and what each of them holds."""

    entries: Sequence[ModelEntry] = ()

    def collect(self) -> Iterator[Any]:
        yield from super().collect()
        held = GaugeMetricFamily(
            f"{NAMESPACE}_model_memory_bytes", "What a model holds of the memory budget.", labels=("model", "state")
        )
        for entry in self.entries:
            held.add_metric((entry.name, entry.state), entry.held)
        yield held


def sum_of_metrics(context: HostContext) -> EngineMetrics:
    total = HostMetrics(", ".join(slot.name for slot in context.host.slots))
    total.entries = context.entries()
    total.watch(lambda: host_health(context.host))
    total.add(context.metrics.figures())
    for slot in context.host.slots:
        parts = [slot.past]
        if slot.loaded is not None and slot.loaded.context.llm.metrics is not None:
            parts.append(slot.loaded.context.llm.metrics)
        for part in parts:
            figures = part.figures()
            figures.engines = {engine_number(slot, index): one for index, one in figures.engines.items()}
            if part is slot.past:  # its engines have ended: what they counted stays, their gauges do not
                for one in figures.engines.values():
                    one.newest = SchedulerStats()
            total.add(figures)
    return total


@router.get(
    "/v1/requests",
    summary="List finished requests that can be continued",
    responses=answers(EndedRequests, 400),
    tags=["Continuations"],
)
async def list_requests(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    owner = exchange_of(request.scope).tenant
    roots = []
    for slot in host_of(request).host.slots:
        if slot.loaded is not None:
            roots += await slot.loaded.context.shared.list_roots(owner)
    roots.sort(key=lambda root: root.ended_at, reverse=True)
    listed = roots[:limit]

    def build() -> dict[str, Any]:
        return {"object": "list", "data": [describe_root(root) for root in listed], "has_more": len(roots) > limit}

    return await large_response(request, ROOT_SIZE * len(listed), build)


def build_host_app(context: HostContext) -> AsgiApp:
    def count(scope: Scope, exchange: Exchange) -> None:
        if exchange.status:
            context.metrics.record_http(getattr(scope.get("route"), "path", "other"), exchange.status)

    return add_layers(ModelRouter(context.host, build_routes(context, (router,))), context, count)


# ---- the program ----


class HostRunner(HttpRunner):
    def __init__(
        self,
        host: ModelHost,
        settings: ServerSettings,
        bound: socket.socket,
        on_drain: Callable[[int], None] = lambda num_prompts: None,
    ) -> None:
        super().__init__(settings, bound, on_drain)
        self.context = HostContext(host, settings, allowed_hosts(bound, settings))
        self._house: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        """Models are loaded when they are asked for."""
        self._house = asyncio.create_task(self.context.host.keep_house())

    async def _shutdown(self, drain_seconds: float = 0.0) -> None:
        if self._house is not None:
            self._house.cancel()
            with suppress(asyncio.CancelledError):
                await self._house
            self._house = None
        await self.context.host.shutdown(drain_seconds)

    def _app(self) -> AsgiApp:
        return build_host_app(self.context)

    def _num_unfinished(self) -> int:
        return self.context.host.num_unfinished

    def _refuse_requests(self) -> None:
        self.context.draining = True
        for slot in self.context.host.slots:
            if slot.loaded is not None:
                slot.loaded.context.draining = True

    def _health(self) -> Health:
        """An engine that is dead is started again by the next request: the server itself goes on."""
        return Health([EngineHealth(0, EngineState.OK)])


def run_host(
    specs: Sequence[ModelSpec],
    settings: ServerSettings,
    bound: socket.socket,
    on_ready: Callable[[], None],
    on_drain: Callable[[int], None] = lambda num_prompts: None,
) -> int:
    """Serves several models until the end, on a new event loop; returns the exit code."""

    async def serve() -> int:
        host = ModelHost(
            specs,
            load_model,
            keep_alive=FOREVER if settings.keep_alive is None else parse_keep_alive(settings.keep_alive),
            memory_budget=settings.memory_budget,
            unload_idle=settings.unload_idle,
        )
        return await HostRunner(host, settings, bound, on_drain).run(on_ready)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve())
