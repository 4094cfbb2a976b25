"""One API key against another: many requests of one neither push out what the other keeps, nor keep it waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.servers import ADMIN_KEY, AS_ADMIN, Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MAX_ROOTS, MAX_QUEUE = 24, 48
LIMITS = ("--max-roots", str(MAX_ROOTS), "--max-queue", str(MAX_QUEUE), "--max-num-seqs", "4", "--num-blocks", "200")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    with serving(folder, *LIMITS, "--admin", RATOON_API_KEY="ada,bob", RATOON_ADMIN_KEY=ADMIN_KEY) as running:
        yield running


def complete(server: Server, key: str, **fields: Any) -> requests.Response:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{server.api}/completions", json=body, headers=headers, timeout=120)


def num_sequences(server: Server) -> int:
    """Those that run or wait in the engine."""
    (engine,) = requests.get(f"{server.url}/admin/stats", headers=AS_ADMIN, timeout=120).json()["engines"]
    return engine["num_running"] + engine["num_waiting"]


def ask_engine(server: Server, what: str) -> None:
    requests.post(f"{server.url}/admin/{what}", headers=AS_ADMIN, timeout=120).raise_for_status()


def test_roots_and_leases_outlive_the_requests_of_another_key(server: Server) -> None:
    assert complete(server, "bob", prompt="what bob keeps", retain_kv=600, request_id="kept").status_code == 200
    for number in range(3 * MAX_ROOTS // 8):
        prompts = [f"short {number} {index} and a few words more" for index in range(8)]
        assert complete(server, "ada", prompt=prompts, retain_kv=600).status_code == 200
    answer = complete(server, "bob", continuation_of="cmpl-kept", continuation_suffix=" goes on")
    assert answer.status_code == 200, answer.text
    assert answer.json()["continuation"]["source"] == "lease"


def test_a_queue_that_one_key_has_filled_is_open_to_another(server: Server) -> None:
    ended: list[tuple[str, int]] = []

    def ask(key: str, **fields: Any) -> None:
        ended.append((key, complete(server, key, **fields).status_code))

    ask_engine(server, "pause")  # so that nothing ends before all have asked
    filling = {"prompt": ["a long answer"] * 12, "max_tokens": 300}
    threads = [threading.Thread(target=ask, args=("ada",), kwargs=filling) for _ in range(MAX_QUEUE // 12)]
    for thread in threads:
        thread.start()
    wait_until("the queue is full", lambda: num_sequences(server) == MAX_QUEUE)
    assert complete(server, "ada", prompt="one too many", max_tokens=1).status_code == 429
    threads.append(threading.Thread(target=ask, args=("bob",), kwargs={"prompt": "a short one"}))
    threads[-1].start()
    wait_until("the other is let in", lambda: num_sequences(server) == MAX_QUEUE + 1)
    ask_engine(server, "resume")
    for thread in threads:
        thread.join()
    assert sorted(ended) == [("ada", 200)] * (len(threads) - 1) + [("bob", 200)]
    assert ended[-1][0] == "ada", "it waited behind everything that the other key had asked for"
