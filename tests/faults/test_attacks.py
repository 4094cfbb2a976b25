"""Cheap requests with a large cost: large wrong bodies, prompts that are far too long, hostile templates. They
are refused at a small cost, and other clients are answered meanwhile. bench/attacks.py has them in full size."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from tests.e2e.servers import Server, serving
from tests.faults.processes import resident_bytes
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import PATIENCE, cpu_seconds, wait_until

pytestmark = pytest.mark.slow

MEBIBYTE = 2**20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT = {"model": MODEL, "prompt": "x", "max_tokens": 1}
MOST_CPU_SECONDS = 10.0  # of the server, for a refusal and other clients meanwhile: one with nothing else to do


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_tiny_model(tmp_path_factory.mktemp("models") / MODEL), "--allow-request-template") as running:
        for _ in range(3):  # allocations of the first request do not count as growth
            requests.post(running.url + COMPLETIONS, json={**SHORT, "prompt": "x" * 100_000}, timeout=60)
        yield running


@dataclass
class Watch:
    growth: int = 0  # bytes that the server had in memory at most, beyond what it had before
    cpu_seconds: float = 0.0  # that the server used
    num_answers: int = 0  # to another client


@contextmanager
def watching(server: Server) -> Iterator[Watch]:
    watch, ended = Watch(), threading.Event()
    before = resident_bytes(server.process.pid)
    cpu_before = cpu_seconds(server.process.pid)

    def look() -> None:
        while not ended.wait(0.01):
            watch.growth = max(watch.growth, resident_bytes(server.process.pid) - before)

    def ask() -> None:
        with requests.Session() as session:
            while not ended.wait(0.1):
                session.post(server.url + COMPLETIONS, json=SHORT, timeout=PATIENCE).raise_for_status()
                watch.num_answers += 1

    with ThreadPoolExecutor(2) as threads:
        tasks = [threads.submit(work) for work in (look, ask)]
        try:
            yield watch
        finally:
            ended.set()
        for task in tasks:
            task.result()
    watch.cpu_seconds = cpu_seconds(server.process.pid) - cpu_before


def many(entry: str) -> bytes:
    return (entry * (MEBIBYTE // len(entry))).encode()[:-1]


BODIES = {
    "messages": (CHAT, b'{"model": "tiny", "messages": [%s]}' % many("0,")),
    "messages that are wrong": (CHAT, b'{"model": "tiny", "messages": [%s]}' % many('{"role":1},')),
    "tools": (CHAT, b'{"model": "tiny", "messages": [], "tools": [%s]}' % many("0,")),
    "stop_token_ids": (COMPLETIONS, b'{"model": "tiny", "prompt": "x", "stop_token_ids": [%s]}' % many('"",')),
    "logit_bias": (
        COMPLETIONS,
        json.dumps({"model": "tiny", "prompt": "x", "logit_bias": {str(key): "" for key in range(90_000)}}).encode(),
    ),
    "prompts": (COMPLETIONS, b'{"model": "tiny", "prompt": [%s]}' % many("[],")),
    "positions": ("/v1/hidden_states", b'{"model": "tiny", "prompt": "x", "positions": [%s]}' % many("[0],")),
    "tokens": ("/detokenize", b'{"tokens": [%s]}' % many("-1,")),
    "an unknown field": (COMPLETIONS, b'{"model": "tiny", "prompt": "x", "unknown": [%s]}' % many("{},")),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.one_in(2)
def test_a_wrong_body_costs_little_and_keeps_nobody_waiting(server: Server, kind: str) -> None:
    path, body = BODIES[kind]
    with watching(server) as watch:
        headers = {"Content-Type": "application/json"}
        answer = requests.post(server.url + path, data=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1000
    assert watch.cpu_seconds < MOST_CPU_SECONDS
    assert watch.growth < 100 * MEBIBYTE, "about ten times the body; it was hundreds"


def send_and_leave(server: Server, path: str, body: dict) -> None:
    """Sends the whole body, and does not read the answer."""
    address = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "too long " * (3 * MEBIBYTE // 9)}),
        (CHAT, {"messages": [{"role": "user", "content": "too long " * (3 * MEBIBYTE // 9)}]}),
    ],
)
def test_prompts_that_are_far_too_long_are_not_tokenised(server: Server, path: str, fields: dict) -> None:
    before = resident_bytes(server.process.pid)
    with watching(server) as watch:
        answer = requests.post(server.url + path, json={"model": MODEL, **fields}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        attackers = [
            threading.Thread(target=send_and_leave, args=(server, path, {"model": MODEL, **fields})) for _ in range(8)
        ]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()
        seen = watch.num_answers
        wait_until("others are answered", lambda: watch.num_answers > seen + 3)
    assert watch.cpu_seconds < MOST_CPU_SECONDS
    assert watch.growth < 8 * 3 * 10 * MEBIBYTE, "ten times the bodies; it was a hundred times"
    wait_until("memory is given back", lambda: resident_bytes(server.process.pid) - before < 48 * MEBIBYTE)


def ask_with(server: Server, template: str) -> requests.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template": template}
    return requests.post(server.url + CHAT, json=body, timeout=120)


def template_processes(server: Server) -> set[int]:
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return {pid for pid in children if b"template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_templates_of_requests_hurt_nobody(server: Server) -> None:
    hostile = [
        "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ ''.__class__.__mro__ }}",
    ]
    with watching(server) as watch, ThreadPoolExecutor(len(hostile)) as attackers:
        answers = list(attackers.map(lambda template: ask_with(server, template), hostile))
        assert watch.num_answers > 0, "no other client was answered while they were rendered"
    assert [answer.status_code for answer in answers] == [400] * len(hostile)
    assert watch.cpu_seconds < MOST_CPU_SECONDS
    assert watch.growth < 32 * MEBIBYTE
    assert ask_with(server, "{{ messages[0].content }}").status_code == 200


def test_a_template_process_that_is_killed_fails_one_request(server: Server) -> None:
    ask_with(server, "x")
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask_with, server, "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4)
        (pid,) = template_processes(server)
        idle = cpu_seconds(pid)
        wait_until("it is being rendered", lambda: cpu_seconds(pid) > idle + 0.1)
        os.kill(pid, signal.SIGKILL)
        error = answer.result().json()["error"]
    assert (error["param"], "chat_template: " in error["message"]) == ("chat_template", True)
    assert ask_with(server, "{{ messages[0].content }}").status_code == 200
    wait_until("only the new one is left", lambda: len(template_processes(server) - {pid}) == 1)
