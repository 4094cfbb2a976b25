"""What front ends share: outputs by client index, requests by id, roots, and requests that are taken over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratoon.core.errors import UnknownParentError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.messages import EngineReady
from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.engine.output.roots import Root
from ratoon.engine.processes.hub import MAX_STEPS_BEHIND, EngineHub
from tests.unit.engine.fakes_async import on_event_loop


class FakeClient:
    ready = EngineReady({}, 64, 16)

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.forgotten: list[str] = []
        self.num_taken = 0
        self.num_engines = 2
        self.state = EngineState.OK
        self.state_changed = lambda: None

    def health(self) -> Health:
        return Health([EngineHealth(index, self.state) for index in range(self.num_engines)])

    def add_request(self, request: EngineCoreRequest) -> None:
        self.added.append(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def forget_roots(self, branch_ids: list[str]) -> None:
        self.forgotten += branch_ids

    async def add_replica(self) -> int:
        self.num_engines += 1
        return self.num_engines - 1

    async def drain_replica(self, index: int) -> None: ...

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        found = [await self.outputs.get()]
        self.num_taken += 1
        return found


class FakeLink:
    num_unsent_bytes = 0

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def tell(self, name: str, *arguments: Any) -> None:
        self.told.append((name, arguments[0]))

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        return [output for name, step in self.told if name == "outputs" for output in step.outputs]


def request(name: str, owner: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(f"{name}-12345678", [1, 2], SamplingParams(), external_id=name, owner=owner)


def root(name: str) -> Root:
    return Root(name, f"{name}-12345678", [1, 2], [[7, 8]], ended_at=1.0)


class Hub:
    def __init__(self, survives=lambda owner, name: False) -> None:
        self.client = FakeClient()
        self.hub = EngineHub(self.client, 8, lambda index: None, survives, notes_dropped_roots=True)  # type: ignore[arg-type]
        self.links = [FakeLink(), FakeLink()]
        self.calls = [self.hub.handlers(index) for index in (0, 1)]
        for index, link in enumerate(self.links):
            self.hub.add_reader(index, link)  # type: ignore[arg-type]
        self.hub.start()

    async def step(self, *outputs: EngineCoreOutput) -> None:
        self.client.outputs.put_nowait(EngineCoreOutputs(list(outputs), engine_index=1))
        for _ in range(5):
            await asyncio.sleep(0)


def tokens(name: str, *new: int, reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(f"{name}-12345678", list(new), finish_reason=reason)


@on_event_loop
async def test_outputs_go_to_the_front_end_of_their_request():
    made = Hub()
    made.calls[0]["add_request"](request("a"))
    made.calls[1]["add_request"](request("b"))
    await made.step(tokens("a", 5), tokens("b", 6), EngineCoreOutput("b-12345678.states", []), tokens("gone", 1))
    assert [output.request_id for output in made.links[0].outputs] == ["a-12345678"]
    assert [output.request_id for output in made.links[1].outputs] == ["b-12345678", "b-12345678.states"]
    await made.hub.stop()


@on_event_loop
async def test_front_ends_know_that_an_engine_is_back_before_they_get_its_outputs():
    made = Hub()
    for state in (EngineState.RESTARTING, EngineState.OK):
        made.client.state = state
        made.client.state_changed()
    made.calls[0]["add_request"](request("a"))
    await made.step(tokens("a", 5))
    told = [value.state if name == "health" else name for name, value in made.links[0].told]
    assert told[-3:] == [EngineState.RESTARTING, EngineState.OK, "outputs"]
    await made.hub.stop()


@on_event_loop
async def test_an_id_is_in_use_for_all_front_ends_of_its_owner():
    made = Hub()
    made.calls[0]["add_request"](request("a"))
    made.calls[1]["add_request"](request("a", owner="another"))
    made.calls[1]["add_request"](request("a"))
    (refused,) = made.links[1].outputs
    assert refused.refusal is not None and "in use" in refused.error and made.client.added == ["a-12345678"] * 2
    await made.hub.stop()


@on_event_loop
async def test_a_request_that_runs_is_forked_or_waited_for():
    made = Hub()
    made.calls[0]["add_request"](request("a"))
    await made.step(tokens("a", 7))
    found = await made.hub.find_root(None, "a", wait=False)
    assert (found.choices, found.engine) == ([[7]], 1)
    with pytest.raises(UnknownParentError):
        await made.hub.find_root("another", "a", wait=True)
    waiting = asyncio.create_task(made.hub.find_root(None, "a", wait=True))
    await made.step(tokens("a", 8, reason=FinishReason.STOP))
    late = asyncio.create_task(made.hub.find_root(None, "a", wait=False))
    await asyncio.sleep(0)
    assert not waiting.done() and not late.done(), "its front end has not said what the root is"
    made.calls[0]["request_ended"](None, "a", "a-12345678", root("a"))
    assert await waiting == await late == root("a")
    await made.hub.stop()


@on_event_loop
async def test_requests_of_a_front_end_that_is_gone_are_aborted_unless_another_takes_them_over():
    made = Hub(survives=lambda owner, name: name == "kept")
    for name in ("lost", "kept"):
        made.calls[0]["add_request"](request(name))
    await made.step(tokens("lost", 1), tokens("kept", 5), tokens("kept", 6))
    made.hub.remove_reader(0)
    assert made.client.aborted == ["lost-12345678"]
    await made.step(tokens("kept", 7))
    made.calls[1]["take_over"]("kept-12345678", 2)
    assert [output.new_token_ids for output in made.links[1].outputs] == [[5, 6]]
    await made.step(tokens("kept", 8, reason=FinishReason.LENGTH))
    assert len(made.links[1].outputs) == 1, "the rest was not asked for"
    made.calls[1]["take_over"]("kept-12345678", None)
    last = made.links[1].outputs[-1]
    assert (last.new_token_ids, last.finish_reason) == ([7, 8], FinishReason.LENGTH)
    await made.hub.stop()


@on_event_loop
async def test_log_probabilities_of_what_is_taken_over_come_with_its_tokens():
    made = Hub(survives=lambda owner, name: name == "kept")
    scored = request("kept")
    scored.params.logprobs = 1
    made.calls[0]["add_request"](scored)
    for token in (5, 6, 7):
        output = tokens("kept", token)
        output.new_logprobs = LogprobsLists([[token, 9]], [[-0.1 * token, -2.0]], [token])
        await made.step(output)
    made.hub.remove_reader(0)
    for num_tokens in (2, None):
        made.calls[1]["take_over"]("kept-12345678", num_tokens)
    first, rest = (output.new_logprobs for output in made.links[1].outputs)
    assert (first.token_ids, first.sampled_ranks) == ([[5, 9], [6, 9]], [5, 6])
    assert (rest.token_ids, rest.logprobs) == ([[7, 9]], [[-0.1 * 7, -2.0]])
    await made.hub.stop()


@on_event_loop
async def test_all_front_ends_know_a_new_engine_before_its_index_is_told():
    made = Hub()
    await asyncio.sleep(0)
    assert await made.calls[0]["add_replica"]() == 2
    for link in made.links:
        told = [value for name, value in link.told if name == "health"]
        assert len(told[-1].engines) == 3
    await made.hub.stop()


@on_event_loop
async def test_the_engines_wait_for_a_front_end_that_is_behind():
    made = Hub()
    made.calls[0]["add_request"](request("a"))
    for _ in range(MAX_STEPS_BEHIND + 3):
        await made.step(tokens("a", 1))
    assert made.client.num_taken == MAX_STEPS_BEHIND
    made.calls[0]["outputs_taken"](MAX_STEPS_BEHIND)
    await made.step()
    assert made.client.num_taken > MAX_STEPS_BEHIND
    await made.hub.stop()


@on_event_loop
async def test_engines_are_told_which_texts_are_those_of_no_root():
    made = Hub()
    for name in ("kept", "failed", "removed"):
        made.calls[0]["add_request"](request(name))
    made.calls[1]["add_request"](request("orphan"))
    made.calls[0]["request_ended"](None, "kept", "kept-12345678", root("kept"))
    made.calls[0]["request_ended"](None, "removed", "removed-12345678", root("removed"))
    assert made.client.forgotten == []
    made.calls[0]["request_ended"](None, "failed", "failed-12345678", None)
    assert made.client.forgotten == ["failed-12345678"]
    await made.calls[0]["remove_root"](None, "removed")
    made.hub.remove_reader(1)
    assert made.client.forgotten == ["failed-12345678", "removed-12345678", "orphan-12345678"]
    for number in range(8):
        made.calls[0]["add_request"](request(str(number)))
        made.calls[0]["request_ended"](None, str(number), f"{number}-12345678", root(str(number)))
    assert made.client.forgotten[3:] == ["kept-12345678"]
    await made.hub.stop()


@on_event_loop
async def test_a_request_is_ended_by_the_front_end_that_it_came_from():
    made = Hub()
    made.calls[0]["add_request"](request("a", owner="me"))
    made.calls[1]["add_request"](request("a", owner="another"))
    assert made.calls[1]["abort_by_id"]("a", "somebody", False) == 0
    assert made.calls[1]["abort_by_id"]("a", "me", False) == 1
    assert ("abort_running", "me") in made.links[0].told
    assert not any(name == "abort_running" for name, _ in made.links[1].told)
    assert made.calls[0]["abort_by_id"]("a", None, True) == 2
    assert ("abort_running", "another") in made.links[1].told
    await made.hub.stop()
