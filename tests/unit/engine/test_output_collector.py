"""What a reader gets is what was put in, however slow the reader is; and at most one output waits for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.errors import EngineDeadError
from ratoon.core.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from ratoon.core.params import RequestOutputKind
from ratoon.engine.output.output_collector import OutputCollector
from tests.unit.engine.fakes_async import on_event_loop

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def delta(index: int, text: str = "", token_ids=(), logprobs=None, reason=None, total=None) -> CompletionOutput:
    return CompletionOutput(index, text, list(token_ids), total, logprobs, reason)


def output(*choices: CompletionOutput, finished: bool = False, **fields) -> RequestOutput:
    return RequestOutput("r", "p", [1], list(choices), finished, **fields)


def test_nothing_is_there_before_something_was_put():
    assert OutputCollector(DELTA).get_nowait() is None


def test_an_output_is_taken_once():
    collector = OutputCollector(DELTA)
    collector.put(output(delta(0, "a", [1])))
    assert collector.get_nowait().outputs[0].text == "a"
    assert collector.get_nowait() is None


def test_deltas_of_the_same_choice_are_joined_and_of_others_kept_apart():
    collector = OutputCollector(DELTA)
    collector.put(output(delta(1, "x", [7])))
    collector.put(output(delta(0, "a", [1]), delta(1, "y", [8])))
    collector.put(output(delta(0, "b", [2], reason="stop")))
    joined = collector.get_nowait()
    assert [(choice.index, choice.text, choice.token_ids, choice.finish_reason) for choice in joined.outputs] == [
        (0, "ab", [1, 2], "stop"),
        (1, "xy", [7, 8], None),
    ]


def test_a_choice_that_ended_stays_ended_while_others_go_on():
    collector = OutputCollector(DELTA)
    collector.put(output(delta(0, "a", [1], reason="length"), delta(1, "x", [5])))
    collector.put(output(delta(1, "y", [6], reason="stop"), finished=True))
    joined = collector.get_nowait()
    assert [choice.finish_reason for choice in joined.outputs] == ["length", "stop"]
    assert joined.finished


def test_prompt_logprobs_and_errors_survive_the_joining():
    for kind in (DELTA, CUMULATIVE):
        collector = OutputCollector(kind)
        collector.put(output(delta(0, "a", [1]), prompt_logprobs=[None, {3: Logprob(-1.0)}]))
        collector.put(output(delta(0, "ab", [1, 2], reason="error"), finished=True, error="it broke"))
        joined = collector.get_nowait()
        assert joined.prompt_logprobs == [None, {3: Logprob(-1.0)}]
        assert (joined.error, joined.finished, joined.outputs[0].finish_reason) == ("it broke", True, "error")


def test_of_outputs_that_hold_everything_the_newest_counts():
    collector = OutputCollector(CUMULATIVE)
    collector.put(output(delta(0, "a", [1]), delta(1, "x", [5], reason="stop")))
    collector.put(output(delta(0, "ab", [1, 2])))
    newest = collector.get_nowait()
    assert [(choice.text, choice.finish_reason) for choice in newest.outputs] == [("ab", None), ("x", "stop")]


def test_a_vector_comes_out_as_it_was_put():
    collector = OutputCollector(RequestOutputKind.FINAL_ONLY)
    vector = EmbeddingOutput("r", None, [1], embedding=[0.5])
    collector.put(vector)
    assert collector.get_nowait() is vector


def test_a_failure_comes_behind_what_was_there():
    collector = OutputCollector(DELTA)
    collector.put(output(delta(0, "a", [1])))
    collector.fail(EngineDeadError("gone"))
    assert collector.get_nowait() is not None
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            collector.get_nowait()


@on_event_loop
async def test_a_reader_that_waits_is_woken_by_an_output_and_by_a_failure():
    collector = OutputCollector(DELTA)
    reading = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output(delta(0, "a", [1])))
    collector.put(output(delta(0, "b", [2])))
    assert (await reading).outputs[0].text == "ab"
    reading = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await reading


@on_event_loop
async def test_a_reader_that_was_cancelled_takes_nothing_with_it():
    collector = OutputCollector(DELTA)
    reading = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output(delta(0, "a", [1])))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (await collector.get()).outputs[0].text == "a"


steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 3), st.lists(st.integers(0, 99), max_size=3), min_size=1),  # tokens by choice
        st.booleans(),  # does the reader come before the next step?
    ),
    max_size=20,
)


@given(steps)
@settings(deadline=None)
def test_joined_deltas_are_the_deltas_joined(script):
    collector = OutputCollector(DELTA)
    wanted: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    totals: dict[int, float] = {}
    ends: dict[int, str | None] = {}

    def read() -> None:
        taken = collector.get_nowait()
        assert collector.get_nowait() is None, "one output at most is waiting"
        assert [choice.index for choice in taken.outputs] == sorted({choice.index for choice in taken.outputs})
        for choice in taken.outputs:
            got.setdefault(choice.index, []).extend(choice.token_ids)
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            totals[choice.index] = choice.cumulative_logprob
            assert [list(position) for position in choice.logprobs] == [[token] for token in choice.token_ids]
            assert ends.get(choice.index) is None, "nothing comes behind a choice's end"
            ends[choice.index] = choice.finish_reason

    last = {index: number for number, (tokens, _) in enumerate(script) for index in tokens}
    for number, (tokens, reader_comes) in enumerate(script):
        choices = []
        for index, token_ids in sorted(tokens.items()):
            wanted.setdefault(index, []).extend(token_ids)
            choices.append(
                delta(
                    index,
                    "".join(f"{token} " for token in token_ids),
                    token_ids,
                    [{token: Logprob(-1.0)} for token in token_ids],
                    "stop" if last[index] == number else None,
                    total=-float(len(wanted[index])),
                )
            )
        collector.put(output(*choices, finished=number == len(script) - 1))
        if reader_comes or number == len(script) - 1:
            read()
    assert got == wanted
    assert texts == {index: "".join(f"{token} " for token in token_ids) for index, token_ids in wanted.items()}
    assert totals == {index: -float(len(token_ids)) for index, token_ids in wanted.items()}
    assert set(ends.values()) <= {"stop"}


# ---- a function that takes outputs in the place of a waiting caller ----


@on_event_loop
async def test_outputs_are_offered_only_while_the_caller_waits_and_never_the_last():
    offered: list[str] = []
    collector = OutputCollector(DELTA, lambda one: offered.append(one.outputs[0].text) is None)
    collector.put(output(delta(0, "a", [1])))
    assert (await collector.get()).outputs[0].text == "a"
    assert offered == []
    caller = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output(delta(0, "b", [2])))
    collector.put(output(delta(0, "c", [3])))
    assert offered == ["b", "c"] and not caller.done()
    collector.put(output(delta(0, "d", [4], reason="stop"), finished=True))
    assert (await caller).outputs[0].text == "d"
    assert offered == ["b", "c"]


@on_event_loop
async def test_what_is_not_taken_goes_to_the_caller_joined_with_what_follows():
    refused: list[str] = []
    collector = OutputCollector(DELTA, lambda one: refused.append(one.outputs[0].text) is not None)
    caller = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output(delta(0, "a", [1])))
    collector.put(output(delta(0, "b", [2])))
    assert refused == ["a"], "the second one would come before the first"
    assert (await caller).outputs[0].token_ids == [1, 2]
