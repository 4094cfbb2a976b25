"""Grammars that are wrong, hostile or merely large, over HTTP: each gets an answer of its own, which names the reason,
and the server answers others meanwhile. A client that leaves takes the check of its grammar with it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from bench.attack_parts.grammar_bombs import bombs
from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import PATIENCE, cpu_seconds, wait_until

pytestmark = pytest.mark.slow

HOSTILE, PLAIN = "key-of-the-hostile", "key-of-others"
LONGEST_HEALTH_SECONDS = 1.0
CHECK_SECONDS = 5.0  # of processor time, that a check may take
END = "<|end|>"

DEEP = json.loads('{"items": ' * 300 + "{}" + "}" * 300)
BOMBS = bombs()
ENDLESS = BOMBS["lark, intersected lengths"]

# Fields of structured_outputs, and what their refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule of itself": ({"grammar": "start: start"}, "allows no text: each text of the rule 'start'"),
    "a rule of itself, GBNF": ({"grammar": "root ::= root"}, "allows no text: each text of the rule 'root'"),
    "a rule without an end": ({"grammar": 'start: "a" start'}, "allows no text: each text of the rule 'start'"),
    "the end of a text": ({"grammar": f"start: {END}"}, f"has the token {END}, which ends the text of this model"),
    "no character": ({"regex": r"[^\x00-\x{10FFFF}]"}, "allows no token of the model at its beginning"),
    "not an expression": ({"regex": "(a"}, "regex"),
    "deep schema": ({"json": DEEP}, "is nested 301 levels deep"),
    "deep parentheses, GBNF": (BOMBS["gbnf, deep parentheses"], "is nested too deeply"),
    "deep parentheses, Lark": (BOMBS["lark, deep parentheses"], "too deeply nested"),
    "deep parentheses, regex": (BOMBS["regex, deep parentheses"], "regex"),
    "unknown type": ({"json": {"type": "strin"}}, "'type' at # is"),
    "too much work to compile": (BOMBS["lark, doubled terminals"], "exceeds the limit initial_lexer_fuel"),
    "too much work for a token": (BOMBS["lark, terminals or twice"], "exceeds the limit step_lexer_fuel"),
    "multiplied alternatives": (
        BOMBS["schema, alternatives multiplied"],
        "'allOf' at # can't be used: schema too large",
    ),
    "endless": (ENDLESS, f"takes more than {CHECK_SECONDS:g} seconds of processor time"),
}
# Fields of structured_outputs, and how their texts begin.
LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "5,000 alternatives": ({"grammar": "start: " + " | ".join(f'"a{k}" x' for k in range(5000)) + '\nx: "y"'}, "a"),
    "100,000 choices": ({"choice": [f"word {index}" for index in range(100_000)]}, "word "),
    "a long repetition, Lark": ({"grammar": 'start: "a"~100000'}, "aaaaaaaa"),
    "a squared repetition": ({"regex": "(a{1000}){1000}"}, "aaaaaaaa"),
    "nested repetitions": (BOMBS["regex, nested repetitions"], "aaaaaaaa"),
    "repeated windows": (BOMBS["regex, repeated windows"], ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    with serving(folder, "--api-key", HOSTILE, "--api-key", PLAIN) as running:
        assert ask(running, PLAIN, {"regex": "a"}).status_code == 200
        yield running


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", "max_tokens": 8, "structured_outputs": fields}


def ask(server: Server, key: str, fields: dict[str, Any]) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{server.api}/completions", json=body_of(fields), headers=headers, timeout=4 * PATIENCE)


@contextmanager
def watching_health(server: Server) -> Iterator[None]:
    """Fails if an answer took longer than a second, and than the machine takes to wake a thread."""
    ended = threading.Event()
    waits, stalls = [0.0], [0.0]

    def watch() -> None:
        with requests.Session() as session:
            while not ended.is_set():
                start = time.monotonic()
                assert session.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
                waits.append(time.monotonic() - start)
                time.sleep(0.02)

    def sleep() -> None:
        while not ended.is_set():
            start = time.monotonic()
            time.sleep(0.02)
            stalls.append(time.monotonic() - start - 0.02)

    with ThreadPoolExecutor(2) as threads:
        watched = [threads.submit(watch), threads.submit(sleep)]
        try:
            yield
        finally:
            ended.set()
    for future in watched:
        future.result()
    assert len(waits) > 10
    assert max(waits) < LONGEST_HEALTH_SECONDS + 10 * max(stalls)


def test_each_grammar_has_its_own_answer_and_others_do_not_wait(server: Server) -> None:
    asked = {name: fields for name, (fields, _) in {**REFUSED, **LARGE}.items()}
    with watching_health(server), ThreadPoolExecutor(len(asked)) as threads:
        answers = {name: threads.submit(ask, server, HOSTILE, fields) for name, fields in asked.items()}
        for number in range(5):  # another key's
            schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}
            assert ask(server, PLAIN, {"json": schema}).status_code == 200
        assert not all(answer.done() for answer in answers.values()), "the others have not waited for them"
        found = {name: answer.result() for name, answer in answers.items()}
    for name, (fields, told) in REFUSED.items():
        assert found[name].status_code == 400, (name, found[name].text)
        error = found[name].json()["error"]
        (field,) = fields
        assert told in error["message"], (name, error)
        assert error["param"] == f"structured_outputs.{field}" and len(error["message"]) < 1000, (name, error)
    for name, (_, begin) in LARGE.items():
        assert found[name].status_code == 200, (name, found[name].text)
        assert found[name].json()["choices"][0]["text"].startswith(begin), name


def test_a_client_that_leaves_takes_its_check_with_it(server: Server) -> None:
    checker = checker_of(server)
    wait_until("no check is left, and at most one process waits for the next", lambda: len(children_of(checker)) <= 1)
    used_before = {pid: cpu_seconds_of(pid) for pid in children_of(checker)}

    def busy() -> list[int]:
        return [pid for pid in children_of(checker) if cpu_seconds_of(pid) > used_before.get(pid, 0.0) + 0.2]

    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    data = json.dumps(body_of(bombs(1)["lark, intersected lengths"])).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {HOSTILE}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + data)
        wait_until("it is checked", busy)
        (check,) = busy()
    used = 0.0
    while check in children_of(checker):
        used = max(used, cpu_seconds_of(check) - used_before.get(check, 0.0))
        time.sleep(0.005)
    assert used < CHECK_SECONDS - 1, "it went on to its limit"
    assert ask(server, HOSTILE, {"regex": "b"}).status_code == 200


def checker_of(server: Server) -> int:
    """The process in which grammars are checked."""
    (found,) = (
        pid for pid in children_of(server.process.pid) if b"check_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def cpu_seconds_of(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except OSError:  # it has ended
        return 0.0
