"""One of several front ends of a service: HTTP, JSON, templates, tokens to text. Engines and state are the service's.

Run as `python -m ratoon.api.server.front_end_process LINK LISTENING`, which are descriptors: its end of the link to the
service, and the socket that all front ends accept connections from. It ends with the link.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec

from ratoon.api.server.exchange import Exchange
from ratoon.api.server.protocol.responses import ResponsesRequest
from ratoon.api.server.response_runs import make_run
from ratoon.api.server.runner import EXIT_DONE, ServerRunner, configure_server_logging, loop_factory
from ratoon.api.server.service_calls import FRONT_END, SERVICE, FrontEndLaunch, ResponseProgress, ResponseRecord, stored
from ratoon.api.server.shared_state import SharedState
from ratoon.core.errors import RatoonError
from ratoon.core.faults import fault_of
from ratoon.core.processes import (
    continue_when_parent_dies,
    hold_lifeline,
    ignore_signals_of_the_group,
    name_process,
    read_launch,
)
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.processes.hub_client import HubClient
from ratoon.engine.processes.link import Link
from ratoon.observe.logging import forget_live_display, get_logger
from ratoon.observe.metrics import EngineMetrics, MetricsFigures

logger = get_logger(__name__)

METRICS_INTERVAL = 1.0  # seconds between reports: what a front end has counted outlives it
SECONDS_TO_TELL = 5.0  # for the service to hear why the front end did not start


class FrontEndProcess:
    def __init__(self, launch: FrontEndLaunch, end: socket.socket, listening: socket.socket) -> None:
        self._launch = launch
        self._end = end
        self._listening = listening
        self._link: Link
        self._runner: ServerRunner | None = None

    async def run(self) -> int:
        launch, client = self._launch, HubClient()
        names = launch.settings.served_names
        model_name = names[0] if names else launch.model
        self._metrics = EngineMetrics(model_name)
        self._state = SharedState(lambda: self._link, model_name, launch.service_pid)
        self._state.health = client.health
        handlers = client.handlers() | {
            "drain": self._drain,
            "metrics": self._metrics.figures,
            "answer_of_run": self._answer_of_run,
            "cancel_run": self._cancel_run,
            "go_on_with_response": self._go_on,
            "note_adapters": self._state.note_adapters,
            "abort_running": self._state.abort_running,
        }
        self._link = client.link = await Link.open(self._end, FRONT_END, SERVICE, handlers)
        self._link.lost.add_done_callback(lambda _: os._exit(1))  # the service is gone
        try:
            llm = AsyncLLM(launch.model, metrics=self._metrics, client=client, **launch.llm_settings)
            self._state.llm = llm
            runner = self._runner = ServerRunner(llm, launch.settings, self._listening, state=self._state)
            reporting = asyncio.create_task(self._report())
            try:
                code = await runner.run(lambda: self._begin(llm, names))
            finally:
                reporting.cancel()
        except RatoonError as error:
            await asyncio.wait_for(self._link.call("start_failed", fault_of(error)), SECONDS_TO_TELL)
            return 1
        self._link.tell("note_metrics", self._metrics.figures())
        await asyncio.wait_for(self._link.call("num_unfinished"), SECONDS_TO_TELL)  # all before it has arrived
        return code

    def _begin(self, llm: AsyncLLM, names: tuple[str, ...]) -> None:
        if llm.tracer is not None and names:
            llm.tracer.model_name = names[0]
        forget_live_display()
        self._link.tell("started", llm.source.name)

    async def _report(self) -> None:
        last: MetricsFigures | None = None
        while True:
            await asyncio.sleep(METRICS_INTERVAL)
            figures = self._metrics.figures()
            if figures != last:
                last = figures
                self._link.tell("note_metrics", figures)

    def _drain(self) -> None:
        if self._runner is None:
            os._exit(EXIT_DONE)  # nothing has begun
        self._runner.end()

    # ---- responses ----

    async def _answer_of_run(self, response_id: str, owner: str | None) -> list[bytes]:
        return await self._state.responses.own[owner, response_id].answer_parts()

    def _cancel_run(self, response_id: str, owner: str | None, error: dict[str, str] | None) -> None:
        response = self._state.responses.own.get((owner, response_id))
        if response is not None and response.work is not None:
            response.error = error
            response.work.cancel()

    async def _go_on(self, record: ResponseRecord, begun: EngineCoreRequest | None) -> None:
        """Generates a response in the background that another front end has begun. `begun`: its request, if the engine
        has it."""
        assert self._runner is not None, "the service knows that it has started"
        context, resumed = self._runner.context, stored(record, ResponseProgress("queued"), None)
        asked = ResponsesRequest.model_validate(msgspec.json.decode(record.body))
        exchange = Exchange(f"go-on-{record.id}", _sends_nothing, tenant=record.owner, body_size=len(record.body))
        async with context.preparation.place(record.owner, exchange.body_size) as place:
            run = await make_run(context, asked, exchange, place, resumed)
        self._state.responses.take_over(run.response)
        if record.is_logged:
            self._state.responses.open_log(run.response)
        run.go_on(resumed, begun)


async def _sends_nothing(message: Any) -> None:
    """There is no client that waits."""


def main() -> int:
    ignore_signals_of_the_group()
    continue_when_parent_dies()
    link, listening = (int(argument) for argument in sys.argv[1:3])
    for descriptor in (link, listening):
        os.set_inheritable(descriptor, False)
    launch = read_launch(sys.stdin.buffer, FrontEndLaunch)
    name_process(f"ratoon-http-{launch.index}")
    configure_server_logging(None, None, launch.settings.access_log)
    hold_lifeline()
    process = FrontEndProcess(launch, socket.socket(fileno=link), socket.socket(fileno=listening))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(process.run())
    return EXIT_DONE if code == EXIT_DONE else 1


if __name__ == "__main__":
    sys.exit(main())
