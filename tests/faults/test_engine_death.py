"""Engines that are killed, hang or crash because of a request: no answer is lost, no other request is
affected."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import subprocess
import time

import pytest
import zmq

from ratoon import LLM, AsyncLLM, BeamSearchParams, EngineDeadError, EngineError, ModelError, SamplingParams
from ratoon.core import processes
from ratoon.core.config import EngineConfig
from ratoon.core.health import EngineState
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import RequestOutputKind
from ratoon.engine.processes import replica
from ratoon.engine.processes.ledger import MAX_STRIKES
from ratoon.engine.processes.socket_directory import SocketDirectory
from tests.depths import both_depths
from tests.faults.executors import HALTING, HANG_TOKEN, KILL_TOKEN, NAME, RAISE_TOKEN
from tests.faults.processes import (
    PYTHONPATH,
    SETTINGS,
    engine_settings,
    is_running,
    model_name,
    resident_bytes,
)
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE, until, wait_until

MARKS = (KILL_TOKEN, RAISE_TOKEN, HANG_TOKEN)


@pytest.fixture
def misbehaving(monkeypatch) -> dict:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return engine_settings(executor=NAME)


def prompt(seed: int, length: int = 12) -> list[int]:
    return [token for token in random_token_ids(length, seed) if token not in MARKS]


def stream_params(seed: int, max_tokens: int = 60) -> SamplingParams:
    """Greedy ones, seeded ones, some with several choices."""
    return SamplingParams(
        temperature=0 if seed % 3 == 0 else 0.9,
        seed=seed,
        n=2 if seed % 5 == 0 else 1,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


async def read_stream(llm: AsyncLLM, seed: int, max_tokens: int = 60) -> dict[int, list[int]]:
    """Every token that the stream gave, by choice."""
    tokens: dict[int, list[int]] = {}
    last: RequestOutput | None = None
    async for output in llm.generate(prompt(seed), stream_params(seed, max_tokens)):
        for choice in output.outputs:
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
        last = output
    assert last is not None and last.finished and last.error is None, last
    return tokens


def num_requests_in(llm: AsyncLLM, engine: int) -> int:
    return sum(entry.engine == engine for entry in llm._client._ledger._entries.values())


def num_restarts(llm: AsyncLLM) -> int:
    return llm.health().engines[0].num_restarts


async def read_and_kill(llm: AsyncLLM, seed: int, max_tokens: int = 60) -> asyncio.Task[dict[int, list[int]]]:
    """A stream whose engine is killed before its end, however fast it is: the engine stands still from before the
    request until it is killed."""
    pid = llm.health().engines[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    reading = asyncio.create_task(read_stream(llm, seed, max_tokens))
    await until("it is handed to the engine", lambda: num_requests_in(llm, 0) == 1)
    os.kill(pid, signal.SIGKILL)
    return reading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "num_kills"),
    [(2, 5), pytest.param(2, 50, marks=pytest.mark.full), pytest.param(1, 8, marks=pytest.mark.full)],
)
def test_streams_survive_many_kills_without_losing_or_changing_a_token(depth, num_kills):
    """16 streams at any time; the engine is killed at random moments, while it starts, computes or idles."""
    dice = random.Random(5)

    async def run() -> None:
        async with AsyncLLM(model_name(), max_steps_in_flight=depth, **SETTINGS) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(16)}
            kills = 0
            killed: set[int] = set()
            sizes: list[int] = []

            async def keep_streaming(seed: int) -> int:
                streams = 0
                while kills < num_kills:
                    assert await read_stream(llm, seed) == right[seed]
                    streams += 1
                return streams

            async def keep_killing() -> None:
                nonlocal kills
                while kills < num_kills:
                    await asyncio.sleep(dice.choice([0.02, 0.1, 0.3, 0.8, 2.0]) * dice.random())
                    pid = llm.health().engines[0].pid
                    if pid is None or pid in killed:
                        continue
                    # A request that sees three deaths and no token counts as their cause: wait for its token.
                    if any(entry.strikes >= MAX_STRIKES - 1 for entry in llm._client._ledger._entries.values()):
                        continue
                    # While it starts, too, but rarely: five failed starts in a row end the engine.
                    if llm.health().state == EngineState.OK or dice.random() < 0.02:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                        kills += 1
                        sizes.append(resident_bytes(os.getpid()))

            streams = await asyncio.gather(*(keep_streaming(seed) for seed in range(16)), keep_killing())
            assert sum(streams[:-1]) >= 16
            await until("it is back", lambda: llm.health().ok)
            assert llm.health().engines[0].num_restarts == num_kills
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and books["num_requests"] == 0
            assert llm.num_unfinished_requests() == 0 and len(llm._client._ledger) == 0
            assert sizes[-1] - sizes[num_kills // 5] < 32 * 2**20, "memory grows with every kill"

    asyncio.run(run())


@pytest.mark.slow
def test_streams_with_drafts_go_on_with_the_same_tokens_in_a_new_engine():
    drafts = {"speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 64}

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(6)}
        async with AsyncLLM(model_name(), **SETTINGS, **drafts) as llm:
            for seed in range(6):
                tokens: dict[int, list[int]] = {}
                pid = llm.health().engines[0].pid
                assert pid is not None
                async for output in llm.generate(prompt(seed), stream_params(seed)):
                    if not tokens:
                        os.kill(pid, signal.SIGKILL)
                    for choice in output.outputs:
                        tokens.setdefault(choice.index, []).extend(choice.token_ids)
                assert tokens == right[seed]
                await until("it is back", lambda before=seed: llm.health().ok and num_restarts(llm) == before + 1)

    asyncio.run(run())


@pytest.mark.slow
def test_searches_that_output_nothing_before_their_end_survive_more_kills_than_a_culprit_would():
    """Each engine gets further with them than the one before, which is all that is known of them."""
    params = BeamSearchParams(
        beam_width=4, n=2, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def search(llm: AsyncLLM, seed: int) -> list[list[int]]:
        outputs = [output async for output in llm.beam_search(prompt(seed), params)]
        assert outputs[-1].error is None, outputs[-1].error
        return [choice.token_ids for choice in outputs[-1].outputs]

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            right = [await search(llm, seed) for seed in range(2)]
            searching = [asyncio.create_task(search(llm, seed)) for seed in range(2)]
            for _ in range(MAX_STRIKES + 1):
                for _ in range(500):
                    entries = llm._client._ledger._entries.values()
                    if any(task.done() for task in searching) or (
                        entries and all(entry.engine is not None and entry.progressed for entry in entries)
                    ):
                        break
                    await asyncio.sleep(0.01)
                pid = llm.health().engines[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                while llm.health().engines[0].pid in (pid, None):
                    await asyncio.sleep(0.01)
            assert await asyncio.gather(*searching) == right

    asyncio.run(run())


@both_depths
@pytest.mark.check
def test_a_killed_engine_is_reported_until_it_is_back():
    async def run() -> None:
        async with AsyncLLM(model_name(), **engine_settings()) as llm:
            right = await read_stream(llm, 3, 80)
            reading = await read_and_kill(llm, 3, 80)
            states = set()
            while not reading.done():
                states.add(llm.health().state)
                await asyncio.sleep(0)  # in every turn of the loop, so that no state is missed
            assert await reading == right
            assert EngineState.RESTARTING in states
            health = llm.health()
            assert health.ok and health.engines[0].num_restarts == 1

    asyncio.run(run())


@both_depths
@pytest.mark.slow
def test_a_beam_search_is_begun_again_and_ends_once_with_the_same_texts(halt):
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    searches = [
        BeamSearchParams(beam_width=8, n=3, max_tokens=60, ignore_eos=True, length_penalty=0.5, output_kind=kind)
        for kind in kinds
    ]

    async def run() -> None:
        async with AsyncLLM(model_name(), executor=HALTING, **engine_settings(num_blocks=512)) as llm:

            async def search(params: BeamSearchParams) -> list[tuple]:
                ends = []
                async for output in llm.generate(prompt(4), params):
                    if output.finished:
                        assert output.error is None
                        ends.append([(tuple(one.token_ids), one.finish_reason) for one in output.outputs])
                (end,) = ends
                return end

            right = [await search(params) for params in searches]
            assert right[0] == right[1] and len(right[0]) == 3
            halt.after(6)
            searching = [asyncio.create_task(search(params)) for params in searches]
            await until("both are under way", lambda: halt.is_reached)
            assert len(llm._client._ledger) == 2
            os.kill(llm.health().engines[0].pid, signal.SIGKILL)
            assert await asyncio.gather(*searching) == right
            assert llm.health().engines[0].num_restarts == 1
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and len(llm._client._ledger) == 0

    asyncio.run(run())


@both_depths
def test_a_replica_that_dies_hands_its_requests_to_the_other_and_comes_back():
    async def run() -> None:
        async with AsyncLLM(model_name(), num_replicas=2, **engine_settings()) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(8)}
            pid = llm.health().engines[0].pid
            os.kill(pid, signal.SIGSTOP)  # so that none of its requests ends before it is killed
            reading = [asyncio.create_task(read_stream(llm, seed)) for seed in range(8)]
            await until("it has requests", lambda: num_requests_in(llm, 0) > 0)
            os.kill(pid, signal.SIGKILL)
            assert [await task for task in reading] == list(right.values())
            assert llm.health().ok
            states = [EngineState.OK] * 2
            await until("both are well", lambda: [engine.state for engine in llm.health().engines] == states)
            for books in await llm._client.call_utility("check"):
                assert books["num_used_blocks"] == 0

    asyncio.run(run())


@both_depths
@pytest.mark.check
def test_a_request_that_kills_engines_fails_alone(misbehaving):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [prompt(seed) for seed in range(4)]
    with LLM(model_name(), **SETTINGS) as reference:
        right = [list(output.outputs[0].token_ids) for output in reference.generate(prompts, params, progress=False)]
    with LLM(model_name(), process=True, **misbehaving) as llm:
        outputs = llm.generate([*prompts[:2], [5, KILL_TOKEN, 6], *prompts[2:]], params, progress=False)
        killer = outputs.pop(2)
        assert killer.outputs[0].finish_reason == "error" and "died 3 times" in killer.error
        assert [list(output.outputs[0].token_ids) for output in outputs] == right
        assert llm._client.call_utility("check")["num_used_blocks"] == 0


@both_depths
def test_an_exception_in_a_step_fails_that_step_and_not_the_engine(misbehaving):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(model_name(), process=True, **misbehaving) as llm:
        pid = llm._client.health().engines[0].pid
        (failed,) = llm.generate([[5, RAISE_TOKEN]], params, progress=False)
        assert failed.outputs[0].finish_reason == "error" and "a marked prompt" in failed.error
        (fine,) = llm.generate([[5, 6, 7]], params, progress=False)
        assert fine.outputs[0].finish_reason == "length"
        assert llm._client.health().engines[0].pid == pid


def test_a_hanging_step_is_seen_ended_and_held_against_the_request(misbehaving, monkeypatch):
    monkeypatch.setattr(replica, "STEP_IS_STALLED", 0.5)

    async def run() -> None:
        async with AsyncLLM(model_name(), **misbehaving) as llm:

            async def ask() -> RequestOutput:
                async for output in llm.generate([5, HANG_TOKEN], SamplingParams(max_tokens=2)):
                    last = output
                return last

            asking = asyncio.create_task(ask())
            await until("its step is seen to hang", lambda: llm.health().state == EngineState.STALLED)
            assert not asking.done()
            monkeypatch.setattr(replica, "STEP_IS_DEATH", 0.5)
            await until("it is ended", lambda: llm.health().engines[0].num_restarts >= 1)
            assert "died 3 times" in (await asking).error

    asyncio.run(run())


def test_a_stopped_process_is_no_longer_called_well(monkeypatch):
    monkeypatch.setattr(replica, "SILENCE_IS_STALLED", 1.5)

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            pid = llm.health().engines[0].pid
            os.kill(pid, signal.SIGSTOP)
            try:
                await until("it is seen to be silent", lambda: llm.health().state == EngineState.STALLED)
            finally:
                os.kill(pid, signal.SIGCONT)
            await until("it is well again", lambda: llm.health().ok)

    asyncio.run(run())


def test_an_engine_that_can_not_be_started_again_is_given_up(monkeypatch, tmp_path):
    import shutil

    monkeypatch.setattr(replica, "MAX_FAILED_STARTS", 2)
    folder = shutil.copytree(model_name(), tmp_path / "model")

    async def run() -> None:
        async with AsyncLLM(str(folder), **SETTINGS) as llm:
            shutil.rmtree(folder)
            reading = await read_and_kill(llm, 4, 80)
            with pytest.raises(EngineDeadError):
                await reading
            assert llm.health().state == EngineState.DEAD
            with pytest.raises(EngineDeadError):
                await read_stream(llm, 5)

    asyncio.run(run())


def test_garbage_on_the_sockets_is_counted_and_ignored():
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            right = await read_stream(llm, 3)
            folder = llm._client._directory.path
            input_path, output_path = sorted(folder.glob("0-*"))
            context = zmq.Context()
            strangers = [context.socket(zmq.PUSH), context.socket(zmq.DEALER), context.socket(zmq.DEALER)]
            strangers[0].connect(f"ipc://{output_path}")
            strangers[1].connect(f"ipc://{input_path}")
            process = llm._client.replicas[0].process
            strangers[2].setsockopt(zmq.ROUTING_ID, process._identity)  # the engine's own name
            strangers[2].connect(f"ipc://{input_path}")
            reading = asyncio.create_task(read_stream(llm, 3))
            for length in (0, 1, 3, 1000):
                for stranger in strangers:
                    stranger.send_multipart([random.randbytes(length) for _ in range(4)], zmq.NOBLOCK)
            for path in (input_path, output_path):
                with socket.socket(socket.AF_UNIX) as raw:  # not even the protocol
                    raw.connect(str(path))
                    raw.sendall(random.randbytes(4096))
            assert await reading == right
            await until("they are counted", lambda: llm.health().engines[0].num_bad_messages >= 8)
            assert llm.health().ok and llm.health().engines[0].num_restarts == 0
            assert await read_stream(llm, 3) == right
            for stranger in strangers:
                stranger.close(linger=0)
            context.term()

    asyncio.run(run())


def test_garbage_from_the_clients_side_does_not_hurt_the_engine():
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            process = llm._client.replicas[0].process
            for frames in ([b"\x00", b"garbage"], [b"\x07", b""], [b"\x03"], [b""], [b"\x01", b"\xc1"], [b"\x02"]):
                process.inputs.send_multipart([process._identity, *frames])
            await read_stream(llm, 3)
            # A wave needs nothing done and is not garbage.
            await until("they are counted", lambda: llm.health().engines[0].num_bad_messages >= 5)
            assert llm.health().ok

    asyncio.run(run())


def test_an_engine_that_did_not_start_stays_until_its_parent_has_read_why(tmp_path):
    """It could take the message with it otherwise: what a socket has accepted is not yet sent, or not yet read."""
    context, directory = zmq.Context(), SocketDirectory()
    engine = replica.Replica(EngineConfig(model=str(tmp_path / "no-model")), 0, 1, context, directory)
    try:
        assert engine.start()
        pid = engine.process.pid
        assert engine.process.outputs.poll(PATIENCE * 1000)
        time.sleep(0.3)
        assert is_running(pid), "it has ended, and its message was not read"
        while engine.start_error is None:
            engine.take(engine.process.outputs.recv_multipart())  # or a heartbeat
        assert isinstance(engine.start_error, ModelError)
        wait_until("its end", lambda: not is_running(pid))
    finally:
        engine.end(grace_seconds=0)
        context.term()
        directory.remove()


class NoMoreProcesses:
    """In the place of Popen: the first call works, the next ones find no memory for a process."""

    def __init__(self, failures: int) -> None:
        self.calls = 0
        self.failures = failures

    def __call__(self, *arguments, **options):
        self.calls += 1
        if 1 < self.calls <= 1 + self.failures:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return subprocess.Popen(*arguments, **options)


def test_a_process_that_can_not_be_made_is_tried_again(monkeypatch):
    monkeypatch.setattr(processes, "Popen", NoMoreProcesses(failures=2))

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            right = await read_stream(llm, 3)
            reading = await read_and_kill(llm, 3)
            assert await reading == right
            assert llm.health().engines[0].num_restarts == 3

    asyncio.run(run())


@pytest.mark.parametrize("process", [True, False])
def test_a_first_process_that_can_not_be_made_is_an_error_at_once(monkeypatch, process, own_runtime_directory):
    def fail(*arguments, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes, "Popen", fail)

    def start() -> None:
        if process:
            LLM(model_name(), process=True, **SETTINGS)
        else:
            asyncio.run(AsyncLLM(model_name(), **SETTINGS).start())

    with pytest.raises(EngineError, match="Too many open files"):
        start()
    assert not list(own_runtime_directory.rglob("ratoon-*")), "it left a directory behind"


def test_a_pause_outlives_the_process_that_was_paused():
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            right = await read_stream(llm, 3)
            await llm.pause()
            reading = asyncio.create_task(read_stream(llm, 3))
            await until("it is handed to the engine", lambda: num_requests_in(llm, 0) == 1)
            os.kill(llm.health().engines[0].pid, signal.SIGKILL)
            await until("another is there", lambda: llm.health().engines[0].num_restarts == 1)
            await until("it is paused", lambda: llm.health().engines[0].paused)
            assert not reading.done()
            await llm.resume()
            assert await reading == right

    asyncio.run(run())
