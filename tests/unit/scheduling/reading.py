"""Helpers to drive a scheduler with requests for hidden states: requests, leased parents, and answers to plans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import CaptureStep, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction
from ratoon.core.wire import WireTensor
from ratoon.scheduling.extraction import ExtractionQueue
from ratoon.scheduling.kinds.extraction import ExtractionKind
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import answer_of, request_of

PROMPT = list(range(100, 121))  # five blocks and a token


def extractions_of(scheduler: Scheduler) -> ExtractionQueue:
    return next(kind.queue for kind in scheduler.kinds.all if isinstance(kind, ExtractionKind))


def extraction_request(
    request_id: str,
    tokens: int | list[int],
    positions: Sequence[int] | None = None,  # all, unless said
    layers: Sequence[int] = (2,),
    parent: str | None = None,
    deadline: float | None = None,
    **rest: object,
) -> EngineCoreRequest:
    request = request_of(request_id, tokens, **rest)
    numbers = list(range(len(request.prompt_token_ids)) if positions is None else positions)
    request.prompt_token_ids = request.prompt_token_ids[: numbers[-1] + 1]
    request.params = Extraction(numbers, list(layers), deadline=deadline)
    if parent is not None:
        request.continuation_of, request.continuation_token_ids = parent, []
    return request


def read(scheduler: Scheduler, *args: object, **rest: object) -> None:
    scheduler.add_request(extraction_request(*args, **rest))


def states_for(capture: CaptureStep) -> WireTensor:
    """[layers, rows, 1]; the numbers do not matter here."""
    shape = (len(capture.layers), len(capture.captured), 1)
    return WireTensor("float32", shape, array("f", [0.5] * (shape[0] * shape[1])).tobytes())


def answer_to(plan: SchedulerOutput) -> ModelRunnerOutput:
    result = answer_of(plan)
    result.hidden_states = {capture.req_id: states_for(capture) for capture in plan.captures if capture.captured}
    return result


def step(scheduler: Scheduler) -> tuple[SchedulerOutput, dict[str, EngineCoreOutput]]:
    """Plan, answer with tokens and states, update, check. Outputs by request."""
    plan = scheduler.schedule()
    scheduler.check()
    outputs = scheduler.update_from_output(plan, answer_to(plan))
    scheduler.check()
    return plan, {output.request_id: output for output in outputs}


def finish(scheduler: Scheduler) -> dict[str, list[EngineCoreOutput]]:
    """Run to the end. What came for each request."""
    received: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(500):
        if not scheduler.has_requests():
            return received
        for request_id, output in step(scheduler)[1].items():
            received.setdefault(request_id, []).append(output)
    raise AssertionError("it does not end")


def captures_of(plan: SchedulerOutput) -> dict[str, CaptureStep]:
    return {capture.req_id: capture for capture in plan.captures}


def lease(scheduler: Scheduler, request_id: str = "g", prompt: list[int] = PROMPT) -> list[int]:
    """A request that ends and keeps its memory: its tokens, all but the last of them computed."""
    request = request_of(request_id, prompt, max_tokens=3)
    request.retain_kv = 1000.0
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    assert scheduler.leases.find(request_id) is not None
    return [*prompt, 7, 7, 7]
