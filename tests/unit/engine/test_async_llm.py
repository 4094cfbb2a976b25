"""AsyncLLM: callers get what is theirs, and whatever becomes of a caller or of the engine, nothing is left behind."""

from __future__ import annotations

import array
import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

import pytest

from ratoon.core.errors import ConfigError, EngineDeadError, EngineError, ModelError, RequestError
from ratoon.core.health import EngineState
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, FinishReason
from ratoon.core.stats import PrefixCacheStats, SchedulerStats
from ratoon.core.wire import WireTensor
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.async_llm_engine import _slices
from ratoon.engine.output.detokenizer import FastDetokenizer
from ratoon.engine.output.output_collector import OutputCollector
from ratoon.models.tokenizer import LONG_TEXT
from ratoon.observe.metrics import EngineMetrics
from tests.real_models import needs_embedded_model
from tests.unit.engine.fakes import byte_tokenizer, model_config
from tests.unit.engine.fakes_async import MAX_MODEL_LEN, FakeAsyncClient, FakeSource, fake_source, on_event_loop
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def source(monkeypatch) -> FakeSource:
    """The model that every name leads to."""
    found = fake_source()
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: found)
    return found


def make(client: FakeAsyncClient, **options) -> AsyncLLM:
    return AsyncLLM("fake", client=client, **options)


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "output_kind": RequestOutputKind.DELTA, **fields})


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def text_of(outputs: AsyncGenerator[RequestOutput, None], choice: int = 0) -> str:
    """The joined deltas of one choice."""
    return "".join(one.text for output in await collect(outputs) for one in output.outputs if one.index == choice)


async def turns(count: int = 20) -> None:
    """Let everybody else have so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def assert_nothing_left(llm: AsyncLLM) -> None:
    assert llm.num_unfinished_requests() == 0
    if llm.engine is not None:
        assert not llm.engine.output_processor.has_unfinished_requests()


# ---- answers ----


@on_event_loop
async def test_outputs_come_in_the_kind_that_was_asked_for():
    async with make(FakeAsyncClient()) as llm:
        cumulative = await collect(llm.generate("abc", params(output_kind=RequestOutputKind.CUMULATIVE)))
        deltas = await collect(llm.generate("abc", params()))
        final = await collect(llm.generate("abc", params(output_kind=RequestOutputKind.FINAL_ONLY)))
        assert cumulative[-1].outputs[0].text == "cba"
        assert "".join(output.outputs[0].text for output in deltas) == "cba"
        assert [(output.outputs[0].text, output.outputs[0].finish_reason) for output in final] == [("cba", "stop")]
        for outputs in (cumulative, deltas, final):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == ("abc", [97, 98, 99])
        assert_nothing_left(llm)


@on_event_loop
async def test_requests_run_side_by_side_and_get_their_own_answers():
    async with make(FakeAsyncClient()) as llm:
        prompts = [f"p{number}" for number in range(50)]
        assert await asyncio.gather(*(text_of(llm.generate(prompt, params())) for prompt in prompts)) == [
            prompt[::-1] for prompt in prompts
        ]


@on_event_loop
async def test_choices_are_merged_under_one_request():
    client = FakeAsyncClient(lambda request, choice: [*b"xyz"[: choice + 1], 256])
    async with make(client) as llm:
        outputs = await collect(llm.generate("p", params(n=3), "r"))
        assert {output.request_id for output in outputs} == {"r"}
        texts = ["", "", ""]
        for output in outputs:
            for choice in output.outputs:
                texts[choice.index] += choice.text
        assert texts == ["x", "xy", "xyz"]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@on_event_loop
async def test_params_that_are_left_out_are_the_models_defaults():
    client = FakeAsyncClient()
    async with make(client) as llm:
        await collect(llm.generate("abc"))
        assert client.core.added[0].params.temperature == 0.5
        assert llm.get_default_sampling_params().temperature == 0.5


@on_event_loop
async def test_a_stop_string_ends_the_choice_in_the_engine_too():
    client = FakeAsyncClient(lambda request, choice: list(b"a.bcdefgh" if choice else b"abcdefg."))
    async with make(client) as llm:
        outputs = await collect(llm.generate("p", params(n=2, stop=["."])))
        internal = client.core.added[0].request_id
        assert client.core.stopped == [f"{internal}#1", internal] and client.core.aborted == []
        assert outputs[-1].finished and outputs[-1].outputs[-1].stop_reason == "."
        assert_nothing_left(llm)


@on_event_loop
async def test_a_slow_reader_gets_everything_in_one_piece():
    client = FakeAsyncClient(lambda request, choice: list(b"abcdefghij"), by_hand=True)
    async with make(client) as llm:
        outputs = llm.generate("p", params(max_tokens=10))
        client.step()
        first = await anext(outputs)
        client.step(9)
        await turns(40)
        assert client.num_steps == 10
        second = await anext(outputs)
        assert (first.outputs[0].text, second.outputs[0].text) == ("a", "bcdefghij")
        assert second.outputs[0].token_ids == list(b"bcdefghij")
        assert second.finished


@on_event_loop
async def test_a_conversation_goes_through_the_models_template():
    async with make(FakeAsyncClient()) as llm:
        assert llm.has_chat_template
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
        assert prompt == {"prompt": "[user]hi\n[assistant]", "prompt_token_ids": list(b"[user]hi\n[assistant]")}
        assert await text_of(llm.generate(prompt, params(max_tokens=30))) == "]tnatsissa[\nih]resu["


@on_event_loop
async def test_internal_ids_are_the_callers_id_and_something_that_nobody_can_guess():
    client = FakeAsyncClient()
    async with make(client) as llm:
        await collect(llm.generate("a", params(), "mine"))
        await collect(llm.generate("a", params()))
        await collect(llm.generate("a", params()))
        given, first, second = (request.external_id for request in client.core.added)
        assert given == "mine"
        assert len(first) >= 32 and first != second
        assert client.core.added[0].request_id.startswith("mine-") and len(client.core.added[0].request_id) == 13


# ---- requests that can't be served, or fail ----


@on_event_loop
async def test_a_bad_request_raises_at_the_first_step_and_the_engine_never_hears_of_it():
    client = FakeAsyncClient()
    async with make(client) as llm:
        outputs = llm.generate("", params())
        with pytest.raises(RequestError) as caught:
            await anext(outputs)
        assert caught.value.field == "prompt"
        for bad in (
            llm.generate("p", params(), priority=1),
            llm.generate("p", params(), data_parallel_rank=1),
            llm.generate("p", params(top_p=7.0)),
        ):
            with pytest.raises(RequestError):
                await collect(bad)
        assert client.core.added == [] and client.core.aborted == []
        assert_nothing_left(llm)


@on_event_loop
async def test_a_request_that_the_engine_refuses_raises_what_it_said():
    client = FakeAsyncClient()
    client.core.refuse = lambda request: RequestError("prompt", "needs 9 blocks of 4", "a shorter one")
    async with make(client) as llm:
        with pytest.raises(RequestError) as caught:
            await collect(llm.generate("abc", params()))
        assert (caught.value.field, caught.value.problem, caught.value.expected) == (
            "prompt", "needs 9 blocks of 4", "a shorter one",
        )  # fmt: skip
        assert client.core.aborted == []
        assert_nothing_left(llm)


@on_event_loop
async def test_a_request_that_fails_later_ends_with_the_reason():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        outputs = llm.generate("abc", params(), "r")
        client.step()
        await anext(outputs)
        internal = client.core.added[0].request_id
        client.send(EngineCoreOutput(internal, [], finish_reason=FinishReason.ERROR, error="logits are not finite"))
        (last,) = await collect(outputs)
        assert (last.error, last.outputs[0].finish_reason) == ("logits are not finite", "error")
        assert client.core.aborted == []


@on_event_loop
async def test_an_id_in_use_is_refused_and_its_owner_is_not_disturbed():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        owner = asyncio.create_task(text_of(llm.generate("abc", params(), "same")))
        await turns()
        with pytest.raises(RequestError) as caught:
            await anext(llm.generate("xyz", params(), "same"))
        assert caught.value.field == "request_id"
        client.step(10)
        assert await owner == "cba"


@on_event_loop
async def test_a_request_that_breaks_the_front_end_is_the_only_one_to_fail(monkeypatch):
    decode = FastDetokenizer._decode_token

    def break_at_x(self, token):
        if token == ord("x"):
            raise ZeroDivisionError("no text for x")
        return decode(self, token)

    monkeypatch.setattr(FastDetokenizer, "_decode_token", break_at_x)
    client = FakeAsyncClient()
    async with make(client) as llm:
        good, bad = await asyncio.gather(
            text_of(llm.generate("abc", params(), "good")), collect(llm.generate("xa", params(), "bad"))
        )
        assert good == "cba"
        assert bad[-1].outputs[0].finish_reason == "error" and "no text for x" in bad[-1].error
        assert [name.startswith("bad-") for name in client.core.aborted] == [True]
        assert_nothing_left(llm)


@on_event_loop
async def test_an_output_that_can_not_be_handed_over_fails_its_request_alone(monkeypatch):
    put = OutputCollector.put

    def break_for_bad(self, output):
        if output.request_id == "bad":
            raise ZeroDivisionError("a bug")
        put(self, output)

    monkeypatch.setattr(OutputCollector, "put", break_for_bad)
    client = FakeAsyncClient()
    async with make(client) as llm:
        good, bad = await asyncio.gather(
            text_of(llm.generate("abc", params(), "good")),
            collect(llm.generate("xyz", params(), "bad")),
            return_exceptions=True,
        )
        assert good == "cba"
        assert isinstance(bad, EngineError) and "a bug" in str(bad)
        assert len(client.core.aborted) == 1
        assert_nothing_left(llm)


# ---- callers who leave ----


@on_event_loop
async def test_closing_a_stream_aborts_it_once():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        outputs = llm.generate("abcdef", params())
        client.step()
        await anext(outputs)
        await outputs.aclose()
        await outputs.aclose()
        assert client.core.aborted == [client.core.added[0].request_id]
        assert_nothing_left(llm)


@on_event_loop
async def test_cancelling_who_waits_for_an_output_aborts_it_once():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        waiting = asyncio.create_task(collect(llm.generate("abcdef", params(n=2))))
        client.step(2)
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.core.aborted == [client.core.added[0].request_id]
        assert_nothing_left(llm)
        client.step(5)
        await turns()  # what the engine still had under way is nobody's


@on_event_loop
async def test_a_stream_that_was_never_read_costs_nothing():
    client = FakeAsyncClient()
    async with make(client) as llm:
        await llm.generate("abc", params()).aclose()
        assert client.core.added == []


@on_event_loop
async def test_a_finished_stream_is_not_aborted():
    client = FakeAsyncClient()
    async with make(client) as llm:
        outputs = llm.generate("abc", params())
        await collect(outputs)
        await outputs.aclose()
        assert client.core.aborted == []


@on_event_loop
async def test_an_aborted_request_ends_with_what_it_had():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        streams = [llm.generate("abcdef", params(), name) for name in ("one", "two", "three")]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await turns()
        client.step(2)
        await turns()
        await llm.abort("one")
        await llm.abort(["two", "unknown"])
        for task in tasks[:2]:
            outputs = await task
            assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
            assert "".join(output.outputs[0].text for output in outputs) == "fe"
        assert len(client.core.aborted) == 2
        client.step(20)
        assert (await tasks[2])[-1].outputs[0].finish_reason == "stop"
        assert_nothing_left(llm)


class Checks:
    """Checks of grammars that take until a test says so."""

    def __init__(self, llm: AsyncLLM) -> None:
        assert llm.engine is not None
        self.futures: list[Future[Any]] = []
        llm.engine.input_processor._params.grammars.check = self.check

    def check(self, asked: Any, owner: str | None = None) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


@on_event_loop
async def test_a_request_can_be_aborted_while_its_grammar_is_checked():
    client = FakeAsyncClient()
    async with make(client) as llm:
        checks = Checks(llm)
        structured = params(structured_output={"regex": "a"}, n=2)
        mine, other = (
            asyncio.create_task(collect(llm.generate("abc", structured, "one", owner=owner))) for owner in ("me", "you")
        )
        await turns()
        await llm.abort("one", owner="me")
        (output,) = await mine
        assert output.finished and [choice.finish_reason for choice in output.outputs] == ["abort"] * 2
        assert output.request_id == "one" and output.outputs[0].text == ""
        assert [future.cancelled() for future in checks.futures] == [True, False]
        assert not other.done() and not client.core.added
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert_nothing_left(llm)


@on_event_loop
async def test_a_caller_that_leaves_ends_the_check_of_its_grammar():
    client = FakeAsyncClient()
    async with make(client) as llm:
        checks = Checks(llm)
        task = asyncio.create_task(collect(llm.generate("abc", params(structured_output={"regex": "a"}), "one")))
        await turns()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turns()
        assert checks.futures[0].cancelled() and not client.core.added
        assert_nothing_left(llm)


@on_event_loop
async def test_shutdown_aborts_a_request_whose_grammar_is_checked():
    async with make(FakeAsyncClient()) as llm:
        checks = Checks(llm)
        task = asyncio.create_task(collect(llm.generate("abc", params(structured_output={"regex": "a"}), "one")))
        await turns()
    (output,) = await task
    assert output.outputs[0].finish_reason == "abort" and checks.futures[0].cancelled()


@on_event_loop
async def test_leaving_late_does_not_abort_the_next_one_with_the_same_id():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        first = llm.generate("ab", params(), "same")
        client.step()
        await anext(first)
        client.step(5)
        await turns()  # it has ended, but its reader has not seen that
        second = asyncio.create_task(text_of(llm.generate("xyz", params(), "same")))
        await turns()
        await first.aclose()
        client.step(10)
        assert await second == "zyx"
        assert client.core.aborted == []


# ---- the engine goes, or is told to ----


@on_event_loop
async def test_when_the_engine_is_gone_all_who_wait_and_all_who_come_hear_of_it():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        waiting = [asyncio.create_task(collect(llm.generate("abc", params()))) for _ in range(3)]
        vector = asyncio.create_task(llm.embed("abc"))
        await turns()
        client.die()
        errors = await asyncio.gather(*waiting, vector, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDeadError] * 4
        assert len({id(error) for error in errors}) == 4
        with pytest.raises(EngineDeadError):
            await collect(llm.generate("abc", params()))
        with pytest.raises(EngineDeadError):
            await llm.pause()
        assert llm.health().state == EngineState.DEAD
        assert_nothing_left(llm)


@on_event_loop
async def test_an_unexpected_failure_of_the_client_counts_as_the_engines_death():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        waiting = asyncio.create_task(collect(llm.generate("abc", params())))
        await turns()
        client.die(ValueError("a bug"))
        with pytest.raises(EngineDeadError, match="a bug"):
            await waiting


@on_event_loop
async def test_a_request_on_its_way_when_the_engine_dies_leaves_nothing():
    client = FakeAsyncClient()
    async with make(client) as llm:
        client._dead = True  # and the output handler has not heard of it yet
        with pytest.raises(EngineDeadError):
            await collect(llm.generate("abc", params()))
        assert_nothing_left(llm)


@on_event_loop
async def test_shutdown_waits_for_what_is_under_way_and_takes_nothing_new():
    client = FakeAsyncClient(by_hand=True)
    llm = make(client)
    await llm.start()
    stream = asyncio.create_task(text_of(llm.generate("abc", params())))
    await turns()
    ending = asyncio.create_task(llm.shutdown(drain_seconds=10))
    await turns()
    with pytest.raises(EngineError):
        await collect(llm.generate("xyz", params()))
    client.step(10)
    assert await stream == "cba"
    await ending
    assert (client.core.aborted, client.num_shutdowns) == ([], 1)


@on_event_loop
async def test_shutdown_aborts_what_is_still_unfinished_and_happens_once():
    client = FakeAsyncClient(by_hand=True)
    llm = make(client)
    await llm.start()
    stream = asyncio.create_task(collect(llm.generate("abc", params())))
    await turns()
    patient = asyncio.create_task(llm.shutdown(drain_seconds=1000))
    await turns()
    await llm.shutdown()
    await patient
    await llm.shutdown()
    assert (await stream)[-1].outputs[0].finish_reason == "abort"
    assert len(client.core.aborted) == 1 and client.num_shutdowns == 1
    assert_nothing_left(llm)


@on_event_loop
async def test_what_was_shut_down_does_not_start_again():
    client = FakeAsyncClient()
    llm = make(client)
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    await llm.shutdown()
    with pytest.raises(EngineError, match="while it started"):
        await starting
    assert client.num_shutdowns == 1
    with pytest.raises(EngineError, match="build another"):
        await llm.start()


@on_event_loop
async def test_before_the_start_nothing_can_be_asked():
    llm = make(FakeAsyncClient())
    with pytest.raises(EngineError, match="not started"):
        await collect(llm.generate("abc", params()))
    await llm.abort("x")
    await llm.shutdown()


# ---- start ----


def test_bad_settings_are_refused_before_anything_starts():
    for settings in ({"block_size": 0}, {"num_replicas": 0}, {"policy": "random"}):
        with pytest.raises(ConfigError):
            AsyncLLM("fake", **settings)
    with pytest.raises(TypeError):
        AsyncLLM("fake", no_such_setting=1)


@on_event_loop
async def test_an_engine_that_does_not_start_is_cleaned_up():
    client = FakeAsyncClient()
    client.fail_to_start = ConfigError("num_blocks", "do not fit")
    with pytest.raises(ConfigError):
        await make(client).start()
    assert client.num_shutdowns == 1


@on_event_loop
async def test_a_model_that_can_not_be_read_ends_the_engine_that_was_starting(monkeypatch):
    def resolve(name, *_):
        raise ModelError(name, "is no file")

    monkeypatch.setattr("ratoon.models.source.resolve_model", resolve)
    client = FakeAsyncClient()
    with pytest.raises(ModelError):
        await make(client).start()
    assert client.num_shutdowns == 1


@on_event_loop
async def test_the_engine_starts_while_the_tokenizer_is_read(source):
    client = FakeAsyncClient()
    loop = asyncio.get_running_loop()

    def load_tokenizer():
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(client.started.wait(), PATIENCE), loop).result()
        return byte_tokenizer()

    source.load_tokenizer = load_tokenizer
    async with make(client):
        pass


@on_event_loop
async def test_the_resolved_settings_can_be_read():
    client = FakeAsyncClient()
    llm = make(client, skip_tokenizer=True)
    assert llm.health().state == EngineState.OK
    async with llm:
        assert llm.config.max_model_len == MAX_MODEL_LEN
        assert llm.describe() == {"device": "fake"}
        assert llm.source.name == "fake"
        assert not llm.has_chat_template
        with pytest.raises(RequestError):
            llm.get_tokenizer()
    assert AsyncLLM("fake", num_replicas=2).health().state == EngineState.STARTING


@needs_embedded_model
def test_the_front_end_never_loads_torch():
    code = """
import asyncio, sys
from ratoon import AsyncLLM, SamplingParams
import ratoon.engine.processes.async_client
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes_async import FakeAsyncClient

async def main():
    client = FakeAsyncClient(lambda request, choice: [1, 2, 3])
    metrics = EngineMetrics("smollm2-135m")
    async with AsyncLLM("smollm2-135m", client=client, metrics=metrics) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
        async for output in llm.generate(prompt, SamplingParams(max_tokens=3)):
            pass
    metrics.render()

asyncio.run(main())
print([name for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


# ---- vectors ----


def pooled(request_id: str, *values: float, **fields) -> EngineCoreOutput:
    tensor = WireTensor("float32", (len(values),), array.array("f", values).tobytes())
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.STOP, pooled=tensor, **fields)


async def ask_for_vector(llm: AsyncLLM, client: FakeAsyncClient, *arguments) -> tuple[asyncio.Task, str]:
    task = asyncio.create_task(llm.embed("abc", *arguments))
    await turns()
    return task, client.core.added[-1].request_id


@on_event_loop
async def test_a_vector_is_cut_first_and_then_brought_to_length_one():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        task, internal = await ask_for_vector(llm, client, PoolingParams(dimensions=2))
        client.send(pooled(internal, 3.0, 4.0, 12.0, num_cached_tokens=2))
        output = await task
        assert output.embedding.tolist() == pytest.approx([0.6, 0.8])
        assert (str(output.embedding.dtype), output.num_cached_tokens) == ("float32", 2)
        assert output.prompt_token_ids == [97, 98, 99]
        assert client.core.aborted == []
        assert_nothing_left(llm)


@on_event_loop
async def test_a_vector_that_failed_raises():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        task, internal = await ask_for_vector(llm, client)
        client.send(EngineCoreOutput(internal, [], finish_reason=FinishReason.ERROR, error="it broke"))
        with pytest.raises(EngineError, match="it broke"):
            await task
        with pytest.raises(RequestError):
            await llm.embed("abc", PoolingParams(pooling="worst"))
        client.core.refuse = lambda request: RequestError("prompt", "is too long")
        with pytest.raises(RequestError, match="too long"):
            await llm.embed("abc")
        assert_nothing_left(llm)


@on_event_loop
async def test_a_caller_who_no_longer_wants_a_vector_aborts_it():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        task, internal = await ask_for_vector(llm, client)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.core.aborted == [internal]
        task, internal = await ask_for_vector(llm, client, None, "mine")
        await llm.abort("mine")
        with pytest.raises(EngineError, match="aborted"):
            await task
        assert_nothing_left(llm)


# ---- the event loop stays free ----


@on_event_loop
async def test_a_step_with_very_many_outputs_leaves_others_their_turns():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        tasks = [asyncio.create_task(text_of(llm.generate("ab", params()))) for _ in range(1000)]
        while len(client.core.added) < 1000:
            await asyncio.sleep(0)
        await turns()
        num_turns = 0
        slices: list[tuple[int, int]] = []  # when each came, and how large it was
        handle = llm.engine._handle

        def note_slice(steps):
            slices.append((num_turns, sum(len(step.outputs) for step in steps)))
            handle(steps)

        llm.engine._handle = note_slice
        client.step()
        while sum(size for _, size in slices) < 1000:
            num_turns += 1
            await asyncio.sleep(0)
        assert max(size for _, size in slices) < 200
        assert len({turn for turn, _ in slices}) == len(slices), "two slices without a turn for others between them"
        client.step(5)
        assert await asyncio.gather(*tasks) == ["ba"] * 1000


def step_of(*tokens: tuple[str, int], timestamp: float = 0.0) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(name, [token]) for name, token in tokens], timestamp=timestamp)


def test_of_several_steps_a_requests_outputs_are_in_one_slice_and_in_order():
    names = [f"r{number}" for number in range(300)]
    steps = [step_of(*((name, turn) for name in names[turn:]), timestamp=1.0 + turn) for turn in range(3)]
    parts = list(_slices(steps))
    assert len(parts) == 3
    found: dict[str, list[tuple[float, int]]] = {}
    for part in parts:
        seen = {output.request_id for step in part for output in step.outputs}
        assert len(seen) <= 128 and not seen & found.keys()
        for step in part:
            for output in step.outputs:
                found.setdefault(output.request_id, []).append((step.timestamp, output.new_token_ids[0]))
    assert found["r299"] == [(1.0, 0), (2.0, 1), (3.0, 2)]
    assert found["r0"] == [(1.0, 0)] and len(found) == 300


def test_steps_with_much_for_one_request_stay_apart():
    light, heavy = step_of(("a", 1)), EngineCoreOutputs([EngineCoreOutput("a", [1] * 300)])
    assert list(_slices([light, heavy, light])) == [[light], [heavy], [light]]


@on_event_loop
async def test_the_many_texts_of_a_beam_search_leave_others_their_turns(source):
    source.config = model_config(max_position=1000)
    client = FakeAsyncClient(lambda request, choice: [97 + choice % 20] * 300, by_hand=True)
    client.ready.max_model_len = 1000
    async with make(client) as llm:
        search = BeamSearchParams(beam_width=200, n=200, max_tokens=300)
        task = asyncio.create_task(collect(llm.generate("ab", search)))
        await turns()
        sizes: list[int] = []
        handle = llm.engine._handle

        def note_slice(steps):
            sizes.append(sum(len(output.new_token_ids) for step in steps for output in step.outputs))
            handle(steps)

        llm.engine._handle = note_slice
        client.step(300)
        (output,) = await task
        assert max(sizes) < 1000 and sum(sizes) == 200 * 300
        assert [choice.text for choice in output.outputs[:2]] == ["a" * 300, "b" * 300] and len(output.outputs) == 200


@on_event_loop
async def test_long_texts_are_tokenised_beside_the_event_loop(source):
    source.config = model_config(max_position=100_000)
    client = FakeAsyncClient()
    client.ready.max_model_len = 100_000
    threads: list[str] = []
    encode = source.tokenizer.encode
    hold = threading.Event()

    def note_thread(text, **options):
        if len(text) > LONG_TEXT:
            threads.append(threading.current_thread().name)
            hold.wait(PATIENCE)
        return encode(text, **options)

    source.tokenizer.encode = note_thread
    async with make(client) as llm:
        long = asyncio.create_task(text_of(llm.generate("ab" * LONG_TEXT, params())))
        left = asyncio.create_task(text_of(llm.generate("cd" * LONG_TEXT, params())))
        assert await text_of(llm.generate("abc", params())) == "cba"  # meanwhile
        while len(threads) < 2:
            await asyncio.sleep(0.001)
        left.cancel()
        hold.set()
        assert await long == "ba" * 10
        assert len(threads) == 2 and threading.current_thread().name not in threads
        assert len(client.core.added) == 2 and client.core.aborted == []
        assert_nothing_left(llm)


@on_event_loop
async def test_a_long_suffix_is_tokenised_beside_the_event_loop(source):
    source.config = model_config(max_position=100_000)
    client = FakeAsyncClient()
    client.ready.max_model_len = 100_000
    threads: list[str] = []
    encode = source.tokenizer.encode

    def note_thread(text, **options):
        threads.append(threading.current_thread().name)
        return encode(text, **options)

    async with make(client) as llm:
        await collect(llm.generate("abc", params(), "parent"))
        source.tokenizer.encode = note_thread
        await collect(llm.generate_continuation("parent", "xy" * LONG_TEXT, params()))
        await collect(llm.generate_continuation("parent", "short", params()))
        here = threading.current_thread().name
        assert [name == here for name in threads] == [False, True]
        prompt = client.core.added[1].prompt_token_ids
        assert prompt[:7] == [*b"abccba", 256] and bytes(prompt[7:]) == b"xy" * LONG_TEXT
        assert_nothing_left(llm)


# ---- owners ----


@on_event_loop
async def test_ids_are_an_owners_own():
    client = FakeAsyncClient(by_hand=True)
    async with make(client) as llm:
        mine = asyncio.create_task(text_of(llm.generate("abc", params(), "same", owner="me")))
        theirs = asyncio.create_task(text_of(llm.generate("xyz", params(), "same", owner="them")))
        vector = asyncio.create_task(llm.embed("abc", None, "same", owner="someone"))
        await turns()
        with pytest.raises(RequestError, match="in use"):
            await collect(llm.generate("abc", params(), "same", owner="me"))
        await llm.abort("same")  # nobody's
        await llm.abort("same", owner="someone")
        with pytest.raises(EngineError, match="aborted"):
            await vector
        waiting = asyncio.create_task(text_of(llm.generate_continuation("same", "", params(), owner="them")))
        await turns()
        client.step(30)
        assert (await mine, await theirs) == ("cba", "zyx")
        await waiting
        assert bytes(client.core.added[-1].prompt_token_ids[:6]) == b"xyzzyx"
        assert_nothing_left(llm)


# ---- beam searches ----


@on_event_loop
async def test_a_beam_search_gives_its_texts_and_on_request_the_best_so_far():
    client = FakeAsyncClient(lambda request, choice: [*b"xyz"[choice:], 256])
    async with make(client) as llm:
        (final,) = await collect(llm.generate("p", BeamSearchParams(beam_width=4, n=2, max_tokens=5)))
        assert [(choice.text, choice.score) for choice in final.outputs] == [("xyz", -0.5), ("yz", -5 / 6)]
        client.by_hand, client._steps_left = True, 0
        kind = RequestOutputKind.CUMULATIVE
        stream = llm.generate("p", BeamSearchParams(beam_width=4, n=2, max_tokens=5, output_kind=kind), "b")
        seen = []
        for _ in range(4):
            client.step()
            seen.append(await anext(stream))
        assert [[choice.text for choice in output.outputs] for output in seen] == [["y"], ["xy"], ["yz"], ["xyz", "yz"]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert_nothing_left(llm)


@on_event_loop
async def test_a_beam_search_is_continued_when_it_has_ended_and_not_before():
    client = FakeAsyncClient(lambda request, choice: [*b"xyz"[choice:], 256], by_hand=True)
    search = BeamSearchParams(beam_width=4, n=2, max_tokens=5, output_kind=RequestOutputKind.CUMULATIVE)
    async with make(client) as llm:
        running = asyncio.create_task(collect(llm.generate("p", search, "parent")))
        await turns()
        client.step()
        await turns()
        with pytest.raises(RequestError, match="has not ended; wait for its end"):
            await collect(llm.generate_continuation("parent", wait=False))
        waiting = asyncio.create_task(collect(llm.generate_continuation("parent", "!", search, choice=1)))
        await turns()
        assert len(client.core.added) == 1
        client.step(20)
        await running
        (*_, last) = await waiting
        assert bytes(last.prompt_token_ids[:3]) == b"pyz" and last.finished
        assert client.core.added[1].continuation_of == f"{client.core.added[0].request_id}#1"
        assert_nothing_left(llm)


# ---- utilities and figures ----


@on_event_loop
async def test_utilities_are_called_by_their_names():
    client = FakeAsyncClient()
    client.results = {
        "reset_prefix_cache": True,
        "stats": {"num_running": 3, "prefix_cache": {"queries": 4, "hits": 1}},
        "stop_profile": "/traces/one",
    }
    async with make(client) as llm:
        await llm.pause()
        await llm.resume()
        assert await llm.reset_prefix_cache() is True
        assert await llm.stats() == [SchedulerStats(num_running=3, prefix_cache=PrefixCacheStats(queries=4, hits=1))]
        await llm.start_profile()
        assert await llm.stop_profile() == ["/traces/one"]
        await llm.sleep(2)
        await llm.wake_up()
        names = ["pause", "resume", "reset_prefix_cache", "stats", "start_profile", "stop_profile", "sleep", "wake_up"]
        assert [call[0] for call in client.calls] == names
        assert client.calls[6] == ("sleep", 2)


@on_event_loop
async def test_what_requests_experience_is_measured():
    metrics = EngineMetrics("fake")
    client = FakeAsyncClient()
    async with make(client, metrics=metrics) as llm:
        await collect(llm.generate("abc", params()))  # cba and the end: four tokens
        await collect(llm.generate("ab", params(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)))
        client.core.refuse = lambda request: RequestError("prompt", "is too long")
        for prompt, rank in (("", 0), ("abc", 7), ("abc", 0)):
            with pytest.raises(RequestError):
                await collect(llm.generate(prompt, params(), data_parallel_rank=rank))
        client.core.refuse = lambda request: None
        client.by_hand = True
        stream = llm.generate("abcdef", params())
        client.step(-client._steps_left + 1)
        await anext(stream)
        await stream.aclose()
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (11, 6)
    assert dict(metrics.finished) == {"stop": 1, "length": 1, "abort": 1, "error": 0, "refused": 3}
    assert sum(metrics.time_to_first_token.counts) == 3
    assert sum(metrics.inter_token_latency.counts) == 3
    assert sum(metrics.e2e_request_latency.counts) == 2
    assert sum(metrics.time_per_output_token.counts) == 1
    assert metrics.engines[0].sums["engine_steps"].total == client.num_steps
