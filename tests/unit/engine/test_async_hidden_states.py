"""AsyncLLM and hidden states: callers get theirs, errors are what they were, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.core.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnknownParentError,
)
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutput, FinishReason
from ratoon.engine.async_llm import AsyncLLM
from tests.unit.engine.fakes import hidden_state
from tests.unit.engine.fakes_async import FakeAsyncClient, FakeSource, fake_source, on_event_loop

EVERYTHING = HiddenStatesParams(positions="all")


@pytest.fixture(autouse=True)
def source(monkeypatch) -> FakeSource:
    found = fake_source()
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: found)
    return found


def make(client: FakeAsyncClient, **options) -> AsyncLLM:
    return AsyncLLM("fake", client=client, **options)


def with_states(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "return_hidden_states": EVERYTHING, **fields})


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams, **options) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def assert_nothing_left(llm: AsyncLLM) -> None:
    assert llm.num_unfinished_requests() == 0
    assert llm.engine is None or not llm.engine.output_processor.has_unfinished_requests()


@on_event_loop
async def test_a_prompts_states_come_as_an_array():
    async with make(FakeAsyncClient()) as llm:
        output = await llm.extract_hidden_states(
            "abcde", HiddenStatesParams(positions=[-1, 0], layers=[0, "norm"]), "x"
        )
        assert output.request_id == "x" and output.error is None and output.source is None
        assert output.tensor.tolist() == [[hidden_state(position, layer) for position in (4, 0)] for layer in (0, 4)]
        default = await llm.extract_hidden_states([97, 98])
        assert (default.positions, default.layers, default.token_ids) == ([1], [3], [98])
        assert_nothing_left(llm)


@on_event_loop
async def test_a_request_that_has_ended_or_runs_can_be_read_by_its_owner():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        running = asyncio.create_task(collect(llm, "abc", SamplingParams(max_tokens=20), request_id="r", owner="me"))
        client.step()
        await turns()
        reading = asyncio.create_task(llm.extract_hidden_states(original_request_id="r", owner="me"))
        client.step(30)
        assert (await reading).token_ids == [ord("c")], "as far as it had come"
        await running
        ended = await llm.extract_hidden_states(None, EVERYTHING, original_request_id="r", owner="me")
        assert bytes(ended.token_ids[:6]) == b"abccba" and ended.source == "lease"
        for owner in (None, "somebody else"):
            with pytest.raises(UnknownParentError) as unknown:
                await llm.extract_hidden_states(original_request_id="r", owner=owner)
            assert unknown.value.field == "original_request_id"
        assert_nothing_left(llm)


@on_event_loop
async def test_one_of_prompt_and_original_is_needed():
    async with make(FakeAsyncClient()) as llm:
        for sources in ({}, {"prompt": "a", "original_request_id": "r"}):
            with pytest.raises(RequestError, match="one of the two"):
                await llm.extract_hidden_states(**sources)


@on_event_loop
async def test_what_is_refused_is_raised_as_what_it_is():
    client = FakeAsyncClient()
    async with make(client, max_hidden_states_bytes="1KiB") as llm:
        with pytest.raises(TooLargeError, match="1024 bytes"):
            await llm.extract_hidden_states("a" * 60, EVERYTHING)
        client.core.refuse = lambda request: QueueFullError("hidden_states", "is full")
        with pytest.raises(QueueFullError) as refused:
            await llm.extract_hidden_states("abc")
        assert refused.value.field == "hidden_states"
        assert_nothing_left(llm)


@on_event_loop
async def test_a_deadline_passes_even_if_the_engine_says_nothing(monkeypatch):
    monkeypatch.setattr("ratoon.engine.async_llm_engine.DEADLINE_GRACE", 0.0)
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        with pytest.raises(DeadlineError, match=r"its 0\.01 s are over"):
            await llm.extract_hidden_states("abc", HiddenStatesParams(deadline=0.01), "x")
        assert client.core.aborted == [client.core.added[0].request_id]
        assert_nothing_left(llm)


@on_event_loop
async def test_an_extraction_that_fails_is_an_error_and_one_that_is_left_is_aborted():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        failing = asyncio.create_task(llm.extract_hidden_states("abc"))
        await turns()
        client.send(
            EngineCoreOutput(client.core.added[0].request_id, [], finish_reason=FinishReason.ERROR, error="NaN")
        )
        with pytest.raises(EngineError, match="NaN"):
            await failing
        left = asyncio.create_task(llm.extract_hidden_states("abc"))
        await turns()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert client.core.aborted == [client.core.added[1].request_id]
        aborted = asyncio.create_task(llm.extract_hidden_states("abc", request_id="x"))
        await turns()
        await llm.abort("x")
        with pytest.raises(EngineError, match="aborted"):
            await aborted
        assert_nothing_left(llm)


# ---- together with a text ----


@on_event_loop
async def test_the_last_output_of_a_stream_carries_the_states_and_nothing_of_the_text_is_lost():
    async with make(FakeAsyncClient()) as llm:
        for kind in RequestOutputKind:
            outputs = await collect(llm, "abc", with_states(output_kind=kind))
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert all(output.hidden_states is None for output in outputs[:-1])
            texts = [output.outputs[0].text for output in outputs]
            assert ("".join(texts) if kind == RequestOutputKind.DELTA else texts[-1]) == "cba"
            (states,) = outputs[-1].hidden_states
            assert states.positions == list(range(7)) and states.tensor.shape == (1, 7, 8)
        assert_nothing_left(llm)


@on_event_loop
async def test_a_reader_that_is_behind_gets_the_states_too():
    client = FakeAsyncClient()
    async with make(client) as llm:
        stream = llm.generate("abc", with_states(output_kind=RequestOutputKind.DELTA))
        first = await anext(stream)
        await turns(100)  # all the rest has come by now, and was joined
        rest = [output async for output in stream]
        assert first.hidden_states is None and rest[-1].hidden_states is not None
        assert "".join(output.outputs[0].text for output in [first, *rest]) == "cba"


@on_event_loop
async def test_a_caller_who_leaves_while_states_are_read_ends_the_reading():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        task = asyncio.create_task(collect(llm, "abc", with_states()))
        await turns()
        client.step(4)  # the text ends, its states are not there
        await turns()
        (reading,) = client.core.readings
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.core.aborted == [reading.request_id] and not client.core.has_work()
        assert_nothing_left(llm)


@on_event_loop
async def test_a_text_whose_states_have_no_room_is_delivered_and_the_engine_stops_reading():
    client = FakeAsyncClient()
    async with make(client, max_total_hidden_states_bytes=800) as llm:
        held = await llm.extract_hidden_states("abcde" * 4, EVERYTHING)
        (output,) = await collect(llm, "abc", with_states(output_kind=RequestOutputKind.FINAL_ONLY))
        assert output.outputs[0].text == "cba" and isinstance(output.hidden_states[0].refusal, QueueFullError)
        assert client.core.aborted == [client.core.readings[0].request_id] and not client.core.has_work()
        assert held.tensor.nbytes == 640
        assert_nothing_left(llm)


@on_event_loop
async def test_a_text_that_was_done_is_delivered_when_the_engine_is_gone_for_good():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        reading = asyncio.create_task(collect(llm, "abc", with_states(output_kind=RequestOutputKind.FINAL_ONLY)))
        await turns()
        client.step(4)
        await turns()
        generating = asyncio.create_task(collect(llm, "xyz", with_states()))
        alone = asyncio.create_task(llm.extract_hidden_states("abc"))
        await turns()
        client.die()
        (output,) = await reading
        assert output.outputs[0].text == "cba" and output.hidden_states[0].error == "gone"
        for task in (generating, alone):
            with pytest.raises(EngineDeadError):
                await task
        assert_nothing_left(llm)


@on_event_loop
async def test_a_continuation_waits_until_the_states_of_its_parent_are_read():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        parent = asyncio.create_task(collect(llm, "abc", with_states(), request_id="r"))
        await turns()
        client.step(4)
        await turns()
        waiting = asyncio.create_task(llm.find_parent("r"))
        await turns()
        assert not waiting.done()
        client.step(10)
        root = await waiting
        assert bytes(root.choices[0][:3]) == b"cba" and not root.leased
        await parent


# ---- how much is held at a time ----


@on_event_loop
async def test_what_callers_hold_is_bounded_over_all_requests():
    async with make(FakeAsyncClient(), max_total_hidden_states_bytes=1000) as llm:
        budget = llm.hidden_states_budget
        first = await llm.extract_hidden_states("abcde", EVERYTHING)
        size = first.tensor.nbytes
        assert budget.num_bytes == size
        held = [first] + [await llm.extract_hidden_states("abcde", EVERYTHING) for _ in range(1000 // size - 1)]
        with pytest.raises(QueueFullError, match="max_total_hidden_states_bytes"):
            await llm.extract_hidden_states("abcde", EVERYTHING)
        assert (await llm.extract_hidden_states("abcde", EVERYTHING, owner="another")).error is None, "it has a share"
        view = held.pop().tensor[0, 1:]
        with pytest.raises(QueueFullError):
            await llm.extract_hidden_states("abcde", EVERYTHING)
        del view
        again = await llm.extract_hidden_states("abcde", EVERYTHING)
        assert budget.num_bytes == size * (1000 // size)
        del first, again
        held.clear()
        assert budget.num_bytes == 0
        assert_nothing_left(llm)


def test_the_total_can_not_be_less_than_one_request_may_ask_for():
    assert make(FakeAsyncClient(), max_total_hidden_states_bytes="1KiB").config.max_hidden_states_bytes == 1024
    with pytest.raises(ConfigError, match="max_total_hidden_states_bytes"):
        make(FakeAsyncClient(), max_total_hidden_states_bytes="1KiB", max_hidden_states_bytes="2KiB")


@on_event_loop
async def test_room_is_free_again_when_a_request_fails_or_is_taken_back():
    client = FakeAsyncClient(by_hand=True)
    async with make(client, max_total_hidden_states_bytes=1000) as llm:
        reading = asyncio.create_task(llm.extract_hidden_states("abcde", EVERYTHING))
        await turns()
        assert llm.hidden_states_budget.num_bytes > 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await turns()
        del reading
        assert llm.hidden_states_budget.num_bytes == 0


@on_event_loop
async def test_an_answer_has_its_text_where_there_is_no_room_for_its_states():
    async with make(FakeAsyncClient(), max_total_hidden_states_bytes=1000) as llm:
        held = [await llm.extract_hidden_states("abcdefgh", EVERYTHING)]
        num_more = 1000 // held[0].tensor.nbytes - 1
        held += [await llm.extract_hidden_states("abcdefgh", EVERYTHING) for _ in range(num_more)]
        (*_, last) = await collect(llm, "abcdefgh", with_states())
        assert last.finished and last.outputs[0].text and last.error is None
        (states,) = last.hidden_states
        assert states.tensor is None and isinstance(states.refusal, QueueFullError)
        assert_nothing_left(llm)


@on_event_loop
async def test_half_a_million_repeated_positions_do_not_keep_the_event_loop():
    """They are put in order beside it. Others have their turn all the time."""
    async with make(FakeAsyncClient()) as llm:
        asked = HiddenStatesParams(positions=[[0, None]] * 60_000)
        reading = asyncio.create_task(llm.extract_hidden_states("abcdefgh", asked))
        num_turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            num_turns += 1
        output = await reading
        assert output.tensor.shape[1] == len(output.positions) == len(output.token_ids) == 480_000
        assert output.positions[:9] == [*range(8), 0]
        assert (output.tensor[0, 8:16] == output.tensor[0, :8]).all()
        assert num_turns > 100
