"""Front ends that are killed or stopped under load, and the engines and ranks behind them: only connections to a front
end that was killed break, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.e2e.front_ends import MODEL, FrontEnd, each_front_end
from tests.e2e.servers import Server, serving
from tests.faults.kills import number_of_kills
from tests.faults.processes import is_running, shared_memory_names, workers_of
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import PATIENCE, wait_until

NUM_CLIENTS = 6
NUM_KILLS = number_of_kills(4)
NUM_ENGINES = NUM_RANKS = 2
PROMPTS = ["Once upon", "a time", "there was", "x"]
PARAMS = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
BROKEN = (ConnectionError, http.client.HTTPException, TimeoutError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


class Load:
    """Clients that ask without a pause. An answer is complete and right, or its connection breaks."""

    def __init__(self, server: Server, expected: dict[str, str]) -> None:
        self._server = server
        self._expected = expected
        self.wrong: list[Any] = []
        self.num_right = self.num_broken = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            prompt = draw.choice(PROMPTS)
            try:
                status, answer = complete(self._server, prompt)
            except (*BROKEN, json.JSONDecodeError):
                self.num_broken += 1
                continue
            if status == 200 and answer["choices"][0]["text"] == self._expected[prompt]:
                self.num_right += 1
            else:
                self.wrong.append((status, answer))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def complete(server: Server, prompt: str) -> tuple[int, Any]:
    """By a connection of its own."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE)) as connection:
        body = json.dumps({"model": MODEL, "prompt": prompt, **PARAMS})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def processes_of(server: Server) -> dict[str, list[int]]:
    """Returns the processes of a server with two front ends: these, the engines, and their ranks. All of them work."""
    found: dict[str, list[int]] = {}

    def all_work() -> bool:
        try:
            with each_front_end(server, key=None) as front_ends:
                engines = [one["pid"] for one in front_ends[0].get("/health")["engines"] if one["state"] == "ok"]
                found.update(front_ends=[front_end.pid for front_end in front_ends], engines=engines)
        except (AssertionError, *BROKEN):  # of a front end that begins, or whose engines do
            return False
        found["ranks"] = [rank for engine in engines for rank in workers_of(engine)]
        return len(engines) == NUM_ENGINES and len(found["ranks"]) == NUM_ENGINES * NUM_RANKS

    wait_until("all of the group works", all_work)
    return found


def answers_of(front_end: FrontEnd) -> dict[str, str]:
    return {
        prompt: front_end.post("/v1/completions", prompt=prompt, **PARAMS)["choices"][0]["text"] for prompt in PROMPTS
    }


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers in processes need Linux")
def test_any_process_of_a_group_is_killed_under_load(folder):
    """Two front ends serve two engines of two ranks each. Only connections to a front end that is killed break."""
    draw, shared_memory = random.Random(2), shared_memory_names()
    seen: set[int] = set()
    num_killed_front_ends = 0
    group = ("--api-servers", "2", "--replicas", str(NUM_ENGINES), "--tensor-parallel-size", str(NUM_RANKS))
    with serving(folder, *group) as server:
        processes_of(server)
        expected = {prompt: complete(server, prompt)[1]["choices"][0]["text"] for prompt in PROMPTS}
        with Load(server, expected) as load:
            num_kills = 0
            while num_kills < number_of_kills(3):
                processes = processes_of(server)
                seen.update(*processes.values())
                time.sleep(draw.random() / 2)
                kind = draw.choice(list(processes))
                with suppress(ProcessLookupError):  # it has just ended, with the one that was killed before
                    os.kill(draw.choice(processes[kind]), signal.SIGKILL)
                    num_kills += 1
                    num_killed_front_ends += kind == "front_ends"
            seen.update(*processes_of(server).values())
        assert not load.wrong and load.num_right > 0
        assert load.num_broken <= num_killed_front_ends * NUM_CLIENTS
        server.stop()
        assert server.wait() == 0
    wait_until("all processes have ended", lambda: not any(map(is_running, seen)))
    assert shared_memory_names() <= shared_memory


@pytest.mark.full
def test_front_ends_are_killed_and_one_is_stopped_under_load(folder):
    shared_memory = shared_memory_names()
    seen: set[int] = set()
    with serving(folder, "--api-servers", "2", "--admin", "--admin-key", "root") as server:
        with each_front_end(server, 1, None) as (one,):
            expected = answers_of(one)
        draw = random.Random(0)
        with Load(server, expected) as load:
            for _ in range(NUM_KILLS):
                with each_front_end(server, key=None) as front_ends:
                    pids = [front_end.pid for front_end in front_ends]
                    seen.update(pids, (one["pid"] for one in front_ends[0].get("/health")["engines"]))
                time.sleep(draw.random() / 2)
                os.kill(draw.choice(pids), signal.SIGKILL)
            with each_front_end(server, key=None) as (stopped, other):
                seen.update((stopped.pid, other.pid))
                os.kill(stopped.pid, signal.SIGSTOP)
                time.sleep(2)
                assert answers_of(other) == expected, "the others go on"
                os.kill(stopped.pid, signal.SIGCONT)
                assert answers_of(stopped) == expected, "and so does it"
        assert not load.wrong and load.num_right > 0
        assert load.num_broken <= NUM_KILLS * NUM_CLIENTS

        def is_idle() -> bool:
            with each_front_end(server, 1, None) as (one,):
                stats = one.ask("GET", "/admin/stats", key="root")[1]
            engine = stats["engines"][0]
            return not (stats["num_unfinished_requests"] or engine["num_running"] or engine["kv_usage"])

        wait_until("nothing is left of what was lost", is_idle)
        server.stop()
        assert server.wait() == 0
    wait_until("all processes have ended", lambda: not any(map(is_running, seen)))
    assert shared_memory_names() <= shared_memory
