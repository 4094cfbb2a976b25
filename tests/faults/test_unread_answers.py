"""Clients that ask for hidden states and never read them: what they hold is bounded, and ends."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import requests

from tests.e2e.servers import Server, serving
from tests.faults.processes import resident_bytes
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MEBIBYTE = 2**20
LENGTH, HIDDEN, NUM_LAYERS = 4000, 128, 2
ANSWER_BYTES = LENGTH * HIDDEN * 4 * (NUM_LAYERS + 1)  # all positions and layers, each once: 6 MB
TOTAL = 3 * ANSWER_BYTES
WRITE_SECONDS = 10.0  # three answers are computed meanwhile, on a machine that may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "max_position_embeddings": LENGTH + 96}
    (folder / "config.json").write_text(json.dumps(config))
    limits = ("--write-timeout", str(WRITE_SECONDS), "--max-total-hidden-states-bytes", str(TOTAL))
    with serving(folder, *limits) as running:
        yield running


def ask_repeatedly(times: int = 30, **fields: object) -> dict:
    """All positions, over and over: a body of a few kilobytes."""
    return {"model": MODEL, "prompt": "x" * LENGTH, "positions": [[0, None]] * times, "layers": "all", **fields}


def open_unread(server: Server, body: dict) -> socket.socket:
    """Sends a request, and reads nothing."""
    address = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.hostname, address.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/hidden_states HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


def status_of(server: Server, body: dict) -> int:
    with requests.post(f"{server.api}/hidden_states", json=body, timeout=120, stream=True) as answer:
        return answer.status_code


def test_repeated_positions_are_sent_once(server: Server) -> None:
    answer = requests.post(f"{server.api}/hidden_states", json=ask_repeatedly(1000, prompt="abc"), timeout=60).json()
    assert (answer["positions"], answer["shape"]) == ([0, 1, 2], [NUM_LAYERS + 1, 3, HIDDEN])


def test_what_unread_answers_hold_is_bounded_and_given_back(server: Server) -> None:
    body = ask_repeatedly()
    before = resident_bytes(server.process.pid)
    clients = [open_unread(server, body) for _ in range(10)]
    try:
        wait_until("there is room for no more", lambda: status_of(server, body) == 429)
        held = resident_bytes(server.process.pid) - before
        assert held < TOTAL + 200 * MEBIBYTE, f"{held / MEBIBYTE:.0f} MiB"
        wait_until("the others are given up", lambda: status_of(server, body) == 200)
    finally:
        for client in clients:
            client.close()
