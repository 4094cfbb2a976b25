"""Front ends that are killed or stopped under load: only their own connections notice."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from tests.e2e.front_ends import MODEL, FrontEnd, each_front_end
from tests.e2e.servers import Server, serving
from tests.faults.kills import number_of_kills
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import wait_until

NUM_CLIENTS = 6
NUM_KILLS = number_of_kills(4)
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
                one = FrontEnd(self._server, None)
                status, answer = one.ask("POST", "/v1/completions", {"model": MODEL, "prompt": prompt, **PARAMS})
                one.close()
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


def answers_of(front_end: FrontEnd) -> dict[str, str]:
    return {
        prompt: front_end.post("/v1/completions", prompt=prompt, **PARAMS)["choices"][0]["text"] for prompt in PROMPTS
    }


def test_front_ends_are_killed_and_one_is_stopped_under_load(folder):
    with serving(folder, "--api-servers", "2", "--admin", "--admin-key", "root") as server:
        with each_front_end(server, 1, None) as (one,):
            expected = answers_of(one)
        draw = random.Random(0)
        with Load(server, expected) as load:
            for _ in range(NUM_KILLS):
                with each_front_end(server, key=None) as front_ends:
                    pids = [front_end.pid for front_end in front_ends]
                time.sleep(draw.random() / 2)
                os.kill(draw.choice(pids), signal.SIGKILL)
            with each_front_end(server, key=None) as (stopped, other):
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
