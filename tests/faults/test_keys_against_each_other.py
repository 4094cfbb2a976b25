"""One API key against another: many requests of one neither push out what the other keeps, nor keep it waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model

pytestmark = pytest.mark.slow

MAX_ROOTS, MAX_QUEUE = 24, 48
LIMITS = ("--max-roots", str(MAX_ROOTS), "--max-queue", str(MAX_QUEUE), "--max-num-seqs", "4", "--num-blocks", "200")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    with serving(folder, *LIMITS, RATOON_API_KEY="ada,bob") as running:
        yield running


def complete(server: Server, key: str, **fields: Any) -> requests.Response:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{server.api}/completions", json=body, headers=headers, timeout=120)


def num_sequences(server: Server) -> int:
    """Those that run or wait in the engine."""
    text = requests.get(f"{server.url}/metrics", headers={"Authorization": "Bearer ada"}, timeout=120).text
    lines = [
        line for line in text.splitlines() if line.startswith(("ratoon_requests_running", "ratoon_requests_waiting"))
    ]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def test_roots_and_leases_outlive_the_requests_of_another_key(server: Server) -> None:
    assert complete(server, "bob", prompt="what bob keeps", retain_kv=600, request_id="kept").status_code == 200
    for number in range(3 * MAX_ROOTS // 8):
        prompts = [f"short {number} {index} and a few words more" for index in range(8)]
        assert complete(server, "ada", prompt=prompts, retain_kv=600).status_code == 200
    answer = complete(server, "bob", continuation_of="cmpl-kept", continuation_suffix=" goes on")
    assert answer.status_code == 200, answer.text
    assert answer.json()["continuation"]["source"] == "lease"


def test_a_queue_that_one_key_has_filled_is_open_to_another(server: Server) -> None:
    statuses: list[int] = []
    ended: list[float] = []

    def fill() -> None:
        answer = complete(server, "ada", prompt=["a long answer"] * 12, max_tokens=300)
        statuses.append(answer.status_code)
        ended.append(time.monotonic())

    threads = [threading.Thread(target=fill) for _ in range(MAX_QUEUE // 12)]
    for thread in threads:
        thread.start()
    while num_sequences(server) < MAX_QUEUE:
        assert all(thread.is_alive() for thread in threads), "the queue was never full"
        time.sleep(0.01)
    assert complete(server, "ada", prompt="one too many", max_tokens=1).status_code == 429
    answer = complete(server, "bob", prompt="a short one")
    bobs_end = time.monotonic()
    assert answer.status_code == 200, answer.text
    for thread in threads:
        thread.join()
    assert statuses == [200] * len(threads)
    assert bobs_end < max(ended), "it waited behind everything that the other key had asked for"
