"""One API key beside another: how long a short request of one key takes while another key has the engine busy.

For each load of key A: the time of B's request, the gap between two of its tokens, and both as a multiple of what they
are on an idle server. B asks again and again while the load lasts; the medians are to be at most four times the idle
time, and twice the idle gap.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attack_parts.clients import COMPLETIONS, MODEL, RESPONSES, headers_of

BUSY_KEY, SHORT_KEY = "attack-key-a", "attack-key-b"
OPTIONS = ("--api-key", BUSY_KEY, "--api-key", SHORT_KEY)  # of the server
MOST_TIME, MOST_GAP = 4.0, 2.0  # of B beside a load, as multiples of the idle ones
SHORT_TOKENS = 8
NUM_IDLE, MAX_BESIDE = 20, 40
SECONDS_TO_SETTLE = 60.0
SECONDS_TO_BEGIN = 0.3  # before B asks for the first time
WORDS = ("river", "mill", "bridge", "boat", "morning", "light", "field", "stone", "rain", "road", "hill", "bird")


@dataclass(frozen=True)
class Load:
    """The load of key A: so many clients at once, each of which repeats its request."""

    name: str
    path: str
    body: Callable[[int], dict[str, Any]]  # of the client with this number
    num_clients: int


def _text(number: int, num_words: int) -> str:
    return f"{number} " + " ".join(WORDS[(number + place) % len(WORDS)] for place in range(num_words))


def _completion(prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


LOADS = (
    Load(
        "16 × prompt_logprobs 64, 1,900 tokens",
        COMPLETIONS,
        lambda number: _completion(_text(number, 1850), 1, prompt_logprobs=64),
        16,
    ),
    Load("16 prompts of 1,900 tokens", COMPLETIONS, lambda number: _completion(_text(number, 1850), 1), 16),
    Load(
        "100 responses in the background",
        RESPONSES,
        lambda number: {"model": MODEL, "input": _text(number, 20), "max_output_tokens": 64, "background": True},
        100,
    ),
    Load(
        "batches of 256 prompts",
        COMPLETIONS,
        lambda number: _completion([_text(256 * number + place, 12) for place in range(256)], 16),
        4,
    ),
    Load("400 short requests", COMPLETIONS, lambda number: _completion(_text(number, 8), SHORT_TOKENS), 400),
    Load("64 streams", COMPLETIONS, lambda number: _completion(_text(number, 8), 400, stream=True), 64),
)


@dataclass
class Times:
    seconds: list[float] = field(default_factory=list)  # of whole requests
    gaps: list[float] = field(default_factory=list)  # mean gap between two tokens of a request
    longest_gap: float = 0.0


def ask_short(address: str, number: int, times: Times) -> None:
    """One short request of key B, streamed."""
    connection = http.client.HTTPConnection(address, timeout=120)
    body = json.dumps(_completion(_text(100_000 + number, 8), SHORT_TOKENS, stream=True))
    start = time.monotonic()
    connection.request("POST", COMPLETIONS, body, headers_of(SHORT_KEY))
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    arrivals = [time.monotonic() for line in answer if line.startswith(b"data: {")]
    times.seconds.append(time.monotonic() - start)
    connection.close()
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    times.gaps.append((arrivals[-1] - arrivals[0]) / (SHORT_TOKENS - 1))
    times.longest_gap = max([times.longest_gap, *gaps])


class BusyKey:
    """The clients of key A. Each sends its request, and once more when it has the answer, until the load ends."""

    def __init__(self, address: str, load: Load, seconds: float) -> None:
        self._address, self._load = address, load
        self._ends = time.monotonic() + seconds
        self.num_answers = 0
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(load.num_clients)]
        for thread in self._threads:
            thread.start()

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self._ends

    def _send(self, number: int) -> None:
        while self.lasts:
            body = json.dumps(self._load.body(number)).encode()
            number += self._load.num_clients
            left = max(0.1, self._ends - time.monotonic())
            connection = http.client.HTTPConnection(self._address, timeout=left)
            try:
                connection.request("POST", self._load.path, body, headers_of(BUSY_KEY))
                answer = connection.getresponse()
                while self.lasts and answer.read(65536):
                    pass
                self.num_answers += answer.status == 200
                if self._load.path == RESPONSES:  # the answer comes at once, and the work later
                    return
                if answer.status != 200:  # the queue is full
                    time.sleep(0.5)
            except (OSError, http.client.HTTPException):
                return
            finally:
                connection.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def measure_idle(address: str) -> Times:
    ask_short(address, -1, Times())  # what the first request makes is not counted
    times = Times()
    for number in range(NUM_IDLE):
        ask_short(address, number, times)
    return times


def measure_beside(address: str, load: Load, seconds: float) -> tuple[Times, int]:
    """B's times beside a load, and how many answers A got meanwhile."""
    times = Times()
    busy = BusyKey(address, load, seconds)
    time.sleep(SECONDS_TO_BEGIN)
    while busy.lasts and len(times.seconds) < MAX_BESIDE:
        ask_short(address, 1000 + len(times.seconds), times)
        time.sleep(0.05)
    busy.join()
    return times, busy.num_answers


def line(name: str, times: Times, idle: Times, answers: int | str) -> str:
    median, longest = statistics.median(times.seconds), max(times.seconds)
    gap = statistics.median(times.gaps)
    ratio, gap_ratio = median / statistics.median(idle.seconds), gap / statistics.median(idle.gaps)
    verdict = "met" if ratio <= MOST_TIME and gap_ratio <= MOST_GAP else "NOT MET"
    return (
        f"{name:40}{1000 * median:8.0f}{1000 * longest:9.0f}{ratio:8.1f}×{1000 * gap:9.1f}"
        f"{1000 * times.longest_gap:9.0f}{gap_ratio:8.1f}×{answers:>9}   {verdict}"
    )


def run(address: str, only: str, seconds: float) -> None:
    """Print the table."""
    print("a short request of key B (8 tokens, streamed) beside the load of key A; times in ms")
    print(f"asked: at most {MOST_TIME:g}× the idle time, and {MOST_GAP:g}× the idle gap between tokens\n")
    print(
        f"{'load of A':40}{'B':>8}{'longest':>9}{'ratio':>9}{'gap':>9}{'longest':>9}{'ratio':>9}{'A done':>9}",
        flush=True,
    )
    idle = measure_idle(address)
    print(line("none", idle, idle, "-"), flush=True)
    for load in LOADS:
        if only not in load.name:
            continue
        times, num_answers = measure_beside(address, load, seconds)
        print(line(load.name, times, idle, num_answers), flush=True)
        settle(address, statistics.median(idle.seconds))


def settle(address: str, usual: float) -> None:
    """Wait until what the load has left behind is done."""
    ends = time.monotonic() + SECONDS_TO_SETTLE
    while time.monotonic() < ends:
        times = Times()
        ask_short(address, 2000, times)
        if times.seconds[0] < 1.5 * usual:
            return
        time.sleep(1)
