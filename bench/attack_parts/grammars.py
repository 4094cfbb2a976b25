"""Hostile grammars of one API key: what they cost a plain schema of another key, its stream, and the memory.

Key A sends all bombs at once (grammar_bombs.py). Key B has a stream, and sends requests with new schemas of its own,
before and meanwhile. Wanted: B's requests take twice as long at most, the gap between its tokens grows by a quarter at
most, server and engine by 300 MiB at most, and what grew comes back. Further rounds, with other bombs of the same
kinds, tell what a server keeps for good from what its first use makes.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import threading
import time
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from attack_parts.clients import COMPLETIONS, MEBIBYTE, MODEL, Server, headers_of, post
from attack_parts.grammar_bombs import bombs

BOMB_KEY, PLAIN_KEY = "attack-key-a", "attack-key-b"
NUM_BLOCKS = 320
OPTIONS = ("--api-key", BOMB_KEY, "--api-key", PLAIN_KEY, "--num-blocks", str(NUM_BLOCKS))  # of the server
NUM_QUIET = 8  # requests of B
STREAM_TOKENS = 512
PATIENCE_SECONDS = 600.0
SETTLE_SECONDS = 5.0


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, **fields}


def touch_kv_cache(server: Server) -> None:
    """Prompts that together fill the KV cache: pages of it count when they are first written to, and no grammar is to
    blame for that."""
    for number in range(1, 4):
        prompt = [number * 1000 + index % 997 for index in range(NUM_BLOCKS * 16 // 3 + 16)]
        status, told = post(server, COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1}, key=PLAIN_KEY)
        assert status == 200, told


def plain_request(server: Server, number: int) -> float:
    """Seconds of a request of B, with a schema that no cache knows."""
    properties = {f"name{number}": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    start = time.monotonic()
    status, told = post(server, COMPLETIONS, completion(structured_outputs={"json": schema}), key=PLAIN_KEY)
    assert status == 200, told
    return time.monotonic() - start


class Stream:
    """A stream of B, begun again when it ends: when its tokens came."""

    def __init__(self, server: Server) -> None:
        self._address = server.address
        self._ended = threading.Event()
        self.gaps: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = completion(stream=True, ignore_eos=True, max_tokens=STREAM_TOKENS)
        while not self._ended.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_SECONDS)
            connection.request("POST", COMPLETIONS, json.dumps(body).encode(), headers_of(PLAIN_KEY))
            arrivals = []
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    arrivals.append(time.monotonic())
                if self._ended.is_set():
                    break
            connection.close()
            self.gaps += [after - before for before, after in pairwise(arrivals)]

    def end(self) -> list[float]:
        self._ended.set()
        self._thread.join()
        return self.gaps


class Memory:
    """The resident bytes of the server and of its engine, watched."""

    def __init__(self, server: int) -> None:
        children = [int(pid) for pid in _children_of(server)]
        engine = max(children, key=_resident_bytes)
        self._pids = {"server": server, "engine": engine}
        self._before = self._now()
        self.peak = dict.fromkeys(self._pids, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        return {name: _resident_bytes(pid) for name, pid in self._pids.items()}

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.peak = {name: max(self.peak[name], grown) for name, grown in self.growth().items()}

    def growth(self) -> dict[str, int]:
        return {name: now - self._before[name] for name, now in self._now().items()}

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _children_of(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attack(server: Server, num_bombs: int, round: int = 0) -> tuple[list[threading.Thread], Counter[int | None]]:
    """So many bombs of A at once, others in each round: the threads of their clients, and the statuses as they come."""
    num_sets = -(-num_bombs // len(bombs()))
    numbers = range(round * num_sets, (round + 1) * num_sets)
    all_bombs = ((name, fields) for number in numbers for name, fields in bombs(number).items())
    statuses: Counter[int | None] = Counter()

    def send(name: str, fields: Any) -> None:
        status, told = post(server, COMPLETIONS, completion(structured_outputs=fields), PATIENCE_SECONDS, BOMB_KEY)
        statuses[status] += 1
        if status not in (200, 400, 429):
            print(f"{name}: {status} {told[:200]!r}", flush=True)

    threads = [threading.Thread(target=send, args=bomb) for bomb in islice(all_bombs, num_bombs)]
    for thread in threads:
        thread.start()
    return threads, statuses


def run(server: Server, num_bombs: int = 64, num_rounds: int = 2) -> None:
    """Print what B notices."""
    print(f"{num_bombs} grammars of key A at once; a plain schema and a stream of key B\n", flush=True)
    plain_request(server, -1)  # what the first one makes is not counted
    touch_kv_cache(server)
    stream = Stream(server)
    quiet = [plain_request(server, number) for number in range(NUM_QUIET)]
    quiet_gap = statistics.median(stream.end())
    memory, stream = Memory(server.pid), Stream(server)
    start = time.monotonic()
    threads, statuses = attack(server, num_bombs)
    beside = []
    while any(thread.is_alive() for thread in threads) or len(beside) < NUM_QUIET:
        beside.append(plain_request(server, 1000 + len(beside)))
    seconds = time.monotonic() - start
    gaps = stream.end()
    time.sleep(SETTLE_SECONDS)
    left = [memory.growth()]
    for number in range(1, num_rounds):
        for thread in attack(server, num_bombs, number)[0]:
            thread.join()
        time.sleep(SETTLE_SECONDS)
        left.append(memory.growth())
    memory.end()
    usual, median, gap = statistics.median(quiet), statistics.median(beside), statistics.median(gaps)
    print(f"A's answers: {dict(sorted(statuses.items(), key=str))}, the last after {seconds:.1f} s")
    print(f"B's requests: {1000 * usual:.0f} ms quiet, {1000 * median:.0f} ms beside: {median / usual:.2f}×")
    print(f"    the longest of {len(beside)}: {1000 * max(beside):.0f} ms")
    print(f"B's tokens: {1000 * quiet_gap:.1f} ms apart quiet, {1000 * gap:.1f} ms beside: {gap / quiet_gap:.2f}×")
    print(f"    the longest gap of {len(gaps)}: {1000 * max(gaps):.0f} ms")
    for name in ("server", "engine"):
        after_rounds = ", ".join(f"{grown[name] / MEBIBYTE:.0f}" for grown in left)
        print(f"{name}: {memory.peak[name] / MEBIBYTE:.0f} MiB more at most; left after each round: {after_rounds}")
