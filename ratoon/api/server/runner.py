"""Runs the server as a program: logs, start, serve, and one of three ends.

a signal              new requests are refused, running ones get time to finish, then the rest is aborted: exit 0
a second signal       everything ends immediately: exit 128 + the signal's number
the engine is dead    clients get an error, and the exit code is 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from ratoon.api.server.app import build_app
from ratoon.api.server.connection_limit import ConnectionLimit, allow_descriptors
from ratoon.api.server.connections import BoundedHttpProtocol, HttpServer, is_local, release
from ratoon.api.server.context import ServerContext
from ratoon.api.server.exchange import AsgiApp
from ratoon.api.server.middleware import AllowedHosts
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import ServiceState
from ratoon.core.health import EngineState, Health
from ratoon.observe.logging import ROOT, VARIABLE, get_logger, set_up_logging

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_DONE = 0
EXIT_ENGINE = 1
WATCH_INTERVAL = 0.25  # seconds between checks of the engine
LAST_WORDS = 3  # seconds to send the last responses
KEEP_ALIVE = 75  # idle time of a connection in seconds; more than that of clients' pools
HTTP_LOGGER = "uvicorn"
TRACE_LOGGER = "opentelemetry"  # logs that a collector does not answer
# What operators see without a level of their own.
SHOWN_LOGGERS = ("ratoon.observe.throughput", "ratoon.api.server.model_host")

logger = get_logger(__name__)


def run_server(
    llm: AsyncLLM,
    settings: ServerSettings,
    bound: socket.socket,
    on_ready: Callable[[], None],
    on_drain: Callable[[int], None] = lambda num_prompts: None,
) -> int:
    """Serves until the end, on a new event loop; returns the exit code. Errors at the engine's start are raised.
    `on_drain` is called with the number of unfinished prompts when shutdown begins."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(ServerRunner(llm, settings, bound, on_drain).run(on_ready))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def allowed_hosts(bound: socket.socket, settings: ServerSettings) -> AllowedHosts | None:
    """Returns the accepted Host names; None for any: for a Unix socket (browsers can't reach it), and for an address
    that other machines reach under names unknown here."""
    if bound.family == socket.AF_UNIX:
        return None
    if settings.allowed_hosts or is_local(bound):
        return AllowedHosts((settings.host, *settings.allowed_hosts))
    return None


class HttpRunner(ABC):
    """Serves an application until the end, whatever answers its requests."""

    def __init__(
        self,
        settings: ServerSettings,
        bound: socket.socket,
        on_drain: Callable[[int], None] = lambda num_prompts: None,
        is_one_of_several: bool = False,
    ) -> None:
        self._settings = settings
        self._on_drain = on_drain
        self._is_one_of_several = is_one_of_several
        self._bound = bound
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()

    @abstractmethod
    async def _start(self) -> None:
        """Starts what requests need. Errors are raised, and nothing is served."""

    @abstractmethod
    async def _shutdown(self, drain_seconds: float = 0.0) -> None:
        """Ends it. Requests under way have so long to finish. May be called again."""

    @abstractmethod
    def _app(self) -> AsgiApp: ...

    @abstractmethod
    def _num_unfinished(self) -> int: ...

    @abstractmethod
    def _refuse_requests(self) -> None:
        """Further requests get a 503."""

    @abstractmethod
    def _health(self) -> Health: ...

    def end(self, number: int = signal.SIGTERM) -> None:
        """Begins to shut down, as for a signal. A second call ends it immediately."""
        self._signals.append(number)
        (self._signalled_again if self._signalled.is_set() else self._signalled).set()

    async def run(self, on_ready: Callable[[], None]) -> int:
        with self._listening_to_signals() if not self._is_one_of_several else contextlib.nullcontext():
            try:
                if not await self._unless(self._signalled, self._start()):
                    return 128 + self._signals[0]
                return await self._serve(on_ready)
            finally:
                await self._shutdown()
                if not self._is_one_of_several:
                    release(self._bound, self._settings)

    async def _serve(self, on_ready: Callable[[], None]) -> int:
        server = HttpServer(self._http_config())
        server.write_timeout = self._settings.write_timeout
        server.shares_socket = self._is_one_of_several
        server.connection_limit = self._connection_limit()
        serving = asyncio.create_task(server.serve([self._bound]))
        dead = asyncio.create_task(self._engine_dead())
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            # What start-up has made stays: Python's garbage collector need not traverse it while streams wait.
            gc.collect()
            gc.freeze()
            on_ready()
            await self._unless(self._signalled, self._either(serving, dead))
            if self._signalled.is_set():
                return await self._drain()
            details = "; ".join(f"engine {engine.index}: {engine.detail}" for engine in self._health().engines)
            logger.error("no engine is left, and none can be started: %s", details)
            self._refuse_requests()
            return EXIT_ENGINE
        finally:
            dead.cancel()
            server.should_exit = True
            server.force_exit = self._signalled_again.is_set()
            await serving

    def _connection_limit(self) -> ConnectionLimit:
        asked = self._settings.max_connections
        allowed = allow_descriptors(asked)
        if allowed < asked:
            logger.warning(
                "the system's limit on open files leaves room for %d connections, not for %d (--max-connections)",
                allowed,
                asked,
            )
        return ConnectionLimit(allowed)

    async def _drain(self) -> int:
        """The engine waits for its requests and aborts the rest; their clients get the last outputs."""
        self._refuse_requests()
        seconds, num_unfinished = self._settings.drain_seconds, self._num_unfinished()
        self._on_drain(num_unfinished)
        logger.info("shutting down; %d prompts have %g seconds", num_unfinished, seconds)
        if await self._unless(self._signalled_again, self._shutdown(seconds)):
            return EXIT_DONE
        return 128 + self._signals[-1]

    async def _engine_dead(self) -> None:
        while self._health().state != EngineState.DEAD:
            await asyncio.sleep(WATCH_INTERVAL)

    @staticmethod
    async def _either(*tasks: asyncio.Task[None]) -> None:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Runs the work, or cancels it if the event comes first. Returns whether it was done."""
        working = asyncio.create_task(work)
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
            return False
        finally:
            waiting.cancel()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app(),
            http=BoundedHttpProtocol,
            log_config=None,
            access_log=self._settings.access_log,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_WORDS,
        )

    @contextlib.contextmanager
    def _listening_to_signals(self) -> Iterator[None]:
        with listening_to_signals(self.end):
            yield


class ServerRunner(HttpRunner):
    """Serves one model."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServerSettings,
        bound: socket.socket,
        on_drain: Callable[[int], None] = lambda num_prompts: None,
        state: ServiceState | None = None,
    ) -> None:
        """`state`: that of a service with several front ends, one of which this is. Then it is told when to end, and
        the socket is not its own."""
        super().__init__(settings, bound, on_drain, state is not None)
        self._llm = llm
        self._context = ServerContext(llm, settings, allowed_hosts=allowed_hosts(bound, settings), given_state=state)

    @property
    def context(self) -> ServerContext:
        return self._context

    async def _start(self) -> None:
        await self._llm.start()
        self._llm.start_grammars()
        await self._context.shared.begin()

    async def _shutdown(self, drain_seconds: float = 0.0) -> None:
        await self._llm.shutdown(drain_seconds)

    def _app(self) -> AsgiApp:
        return build_app(self._context)

    def _num_unfinished(self) -> int:
        return self._context.num_unfinished

    def _refuse_requests(self) -> None:
        self._context.draining = True

    def _health(self) -> Health:
        return self._llm.health()


@contextlib.contextmanager
def listening_to_signals(note: Callable[[int], None]) -> Iterator[None]:
    """`note` is called with the number of each signal that asks for the end."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, note, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def configure_server_logging(level: str | None, file: str | None, access_log: bool) -> None:
    set_up_logging(level, file)
    if VARIABLE not in os.environ:  # no level was given: the throughput and loads are logged nevertheless
        for name in SHOWN_LOGGERS:
            logging.getLogger(name).setLevel(logging.INFO)
    for name in (HTTP_LOGGER, TRACE_LOGGER):
        library = logging.getLogger(name)
        library.handlers = list(logging.getLogger(ROOT).handlers)
        library.propagate = False
        library.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)
