"""A server whose engine is killed and whose clients drop, over HTTP: streams stay whole, and nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import requests

from tests.e2e.servers import ADMIN_KEY, AS_ADMIN, Server, serving
from tests.faults.processes import resident_bytes
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

NUM_KILLS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    with serving(folder, "--admin", RATOON_ADMIN_KEY=ADMIN_KEY) as running:
        yield running


def health(server: Server) -> requests.Response:
    return requests.get(f"{server.url}/health", timeout=PATIENCE)


def engine_pid(server: Server) -> int | None:
    return health(server).json()["engines"][0]["pid"]


def is_idle(server: Server) -> bool:
    """Nothing under way, on either side of the border, and no block in use."""
    answer = requests.get(f"{server.url}/admin/stats", headers=AS_ADMIN, timeout=PATIENCE)
    if answer.status_code != 200:
        return False
    stats = answer.json()
    engine = stats["engines"][0]
    busy = stats["num_unfinished_requests"] or engine["num_running"] or engine["num_waiting"] or engine["kv_usage"]
    return not busy


def request(seed: int, max_tokens: int = 120) -> dict:
    """Greedy ones and seeded ones, with stop strings that never come, several choices, log-probabilities."""
    return {
        "model": MODEL,
        "prompt": f"Prompt number {seed} 🙂",
        "max_tokens": max_tokens,
        "temperature": 0 if seed % 2 else 0.9,
        "seed": seed,
        "n": 2 if seed % 3 == 0 else 1,
        "logprobs": 1 if seed % 4 == 0 else None,
        "extra_body": {"ignore_eos": True},
    }


async def read_stream(client: openai.AsyncOpenAI, seed: int) -> dict[int, tuple[str, int]]:
    """Text and number of log-probabilities by choice, from the chunks of a stream."""
    texts: dict[int, str] = {}
    counts: dict[int, int] = {}
    reasons: dict[int, str] = {}
    async for chunk in await client.completions.create(stream=True, **request(seed)):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                counts[choice.index] = counts.get(choice.index, 0) + len(choice.logprobs.tokens or [])
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert set(reasons.values()) == {"length"} and reasons.keys() == texts.keys()
    return {index: (text, counts.get(index, 0)) for index, text in texts.items()}


def test_streams_go_on_while_the_engine_dies_again_and_again(server: Server) -> None:
    wait_until("it is well", lambda: health(server).status_code == 200)
    num_restarts = health(server).json()["engines"][0]["num_restarts"]

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=300) as client:
            right = {}
            for seed in range(8):
                answer = await client.completions.create(**request(seed))
                right[seed] = {
                    choice.index: (choice.text, len(choice.logprobs.tokens) if choice.logprobs else 0)
                    for choice in answer.choices
                }
            dice = random.Random(3)
            killed: set[int] = set()

            async def keep_streaming(seed: int) -> None:
                while len(killed) < NUM_KILLS:
                    assert await read_stream(client, seed) == right[seed]

            async def keep_killing() -> None:
                while len(killed) < NUM_KILLS:
                    await asyncio.sleep(0.05 + 0.3 * dice.random())
                    answer = await asyncio.to_thread(health, server)
                    pid = answer.json()["engines"][0]["pid"]
                    if answer.status_code == 200 and pid not in killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)

            await asyncio.gather(*(keep_streaming(seed) for seed in range(8)), keep_killing())

    asyncio.run(run())
    # The last one may have been killed a moment ago, and another has to load its model first.
    wait_until("nothing is left", lambda: is_idle(server))
    assert health(server).json()["engines"][0]["num_restarts"] == num_restarts + NUM_KILLS


def test_a_response_in_the_background_survives_its_engine(server: Server) -> None:
    wait_until("it is well", lambda: health(server).status_code == 200)
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=300) as client:
        fields = {"model": MODEL, "input": "Hello", "max_output_tokens": 300, "temperature": 0}
        fields["extra_body"] = {"ignore_eos": True}
        right = client.responses.create(**fields)
        made = client.responses.create(background=True, **fields)
        wait_until("it runs", lambda: client.responses.retrieve(made.id).status != "queued")
        os.kill(engine_pid(server), signal.SIGKILL)
        wait_until("it ends", lambda: client.responses.retrieve(made.id).status not in ("queued", "in_progress"))
        found = client.responses.retrieve(made.id)
        assert (found.status, found.output_text) == ("incomplete", right.output_text)
        # Its memory is lost, and its tokens are not.
        again = client.responses.create(previous_response_id=right.id, **{**fields, "max_output_tokens": 2})
        assert again.model_extra["continuation"]["parent"] == right.id
        for response in (right, found, again):
            client.responses.delete(response.id)


def test_requests_that_come_while_the_engine_is_away_are_answered(server: Server) -> None:
    wait_until("it is well", lambda: health(server).status_code == 200)
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=300) as client:
        right = client.completions.create(**request(5)).choices[0].text
        os.kill(engine_pid(server), signal.SIGKILL)
        wait_until("its death is seen", lambda: health(server).status_code == 503)
        assert health(server).json()["engines"][0]["state"] == "restarting"
        assert client.completions.create(**request(5)).choices[0].text == right
    page = requests.get(f"{server.url}/metrics", timeout=PATIENCE).text
    assert 'ratoon_engine_up{engine="0"} 1.0' in page
    restarts = next(line for line in page.splitlines() if line.startswith("ratoon_engine_restarts{"))
    assert float(restarts.split()[-1]) >= 1


def test_clients_that_drop_leave_nothing_and_memory_stays_flat(server: Server) -> None:
    wait_until("it is well", lambda: health(server).status_code == 200)
    dice = random.Random(9)

    async def drop(client: openai.AsyncOpenAI, seed: int) -> None:
        stream = await client.completions.create(stream=True, **request(seed, 400))
        for _ in range(dice.randrange(6)):
            await anext(stream)
        await stream.close()

    async def drop_many() -> None:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(*(drop(client, seed) for seed in range(24)))

    asyncio.run(drop_many())
    wait_until("nothing is left", lambda: is_idle(server))
    pids = (server.process.pid, engine_pid(server))
    before = [resident_bytes(pid) for pid in pids]
    for _ in range(8):
        asyncio.run(drop_many())
    wait_until("nothing is left", lambda: is_idle(server))
    after = [resident_bytes(pid) for pid in pids]
    assert all(late - early < 16 * 2**20 for early, late in zip(before, after)), (before, after)


def test_the_engine_is_not_ended_by_signals_that_are_meant_for_the_server(server: Server) -> None:
    wait_until("it is well", lambda: health(server).status_code == 200)
    pid = engine_pid(server)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=300) as client:
        assert client.completions.create(**request(1)).choices[0].finish_reason == "length"
    assert engine_pid(server) == pid


def test_a_server_that_is_killed_takes_its_engine_with_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / MODEL)
    with serving(folder) as running:
        pid = engine_pid(running)
        running.process.kill()
        wait_until("the engine ends", lambda: not Path(f"/proc/{pid}").exists())
