"""Wrong bodies with millions of entries, and texts that are far too long: how long a refusal takes, and what it needs.

One server meets all bodies, one after the other. Another client has a text of 1,500 words tokenised again and again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from attack_parts.clients import COMPLETIONS, MEBIBYTE, MODEL, PATIENCE_SECONDS, Server, request, watching

CHAT = "/v1/chat/completions"
OTHER_PROMPT_WORDS = 1500
SETTLE_SECONDS = 4.0


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Callable[[int], bytes]  # of so many bytes
    num_clients: int = 1
    patience: float = PATIENCE_SECONDS  # seconds until a client hangs up


@dataclass
class Figures:
    seconds: float = 0.0  # until the last client has an answer, or has gone
    status: int | None = None
    peak: int = 0  # bytes beyond what the server had before
    left: int = 0  # the same, some seconds after the last client has gone
    longest_wait: float = 0.0  # of the other client


def entries(before: str, entry: str, after: str) -> Callable[[int], bytes]:
    return lambda size: f"{before}{(entry * (size // len(entry)))[:-1]}{after}".encode()


def words(before: str, after: str) -> Callable[[int], bytes]:
    return lambda size: f"{before}{'far too long ' * (size // 13)}{after}".encode()


START = f'{{"model": "{MODEL}", '
ATTACKS = (
    Attack("messages of numbers", CHAT, entries(START + '"messages": [', "0,", "]}")),
    Attack("tools of numbers", CHAT, entries(START + '"messages": [{"role": "user"}], "tools": [', "0,", "]}")),
    Attack("stop_token_ids of text", COMPLETIONS, entries(START + '"prompt": "x", "stop_token_ids": [', '"",', "]}")),
    Attack("a prompt of lists", COMPLETIONS, entries(START + '"prompt": [', "[],", "]}")),
    Attack("negative tokens", "/detokenize", entries('{"tokens": [', "-1,", "]}")),
    Attack("8 long prompts, hung up", COMPLETIONS, words(START + '"prompt": "', '"}'), 8, 2.0),
    Attack("8 long chats, hung up", CHAT, words(START + '"messages": [{"role": "user", "content": "', '"}]}'), 8, 2.0),
    Attack("8 long texts to count, hung up", "/tokenize", words('{"prompt": "', '"}'), 8, 2.0),
)  # fmt: skip


def other_text(number: int) -> bytes:
    return json.dumps({"prompt": f"{number} " + "word " * OTHER_PROMPT_WORDS}).encode()


def measure(attack: Attack, server: Server, size: int) -> Figures:
    figures, ended = Figures(), threading.Event()
    for number in range(2):  # what the first requests make is not the attack's
        request(server, "POST", "/tokenize", other_text(-number))
    waits: list[float] = []

    def ask() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            start = time.monotonic()
            request(server, "POST", "/tokenize", other_text(number))
            waits.append(time.monotonic() - start)
            ended.wait(0.05)

    def send() -> None:
        status = request(server, "POST", attack.path, body, attack.patience).status
        figures.status = figures.status or status

    body = attack.body(size)
    asking = threading.Thread(target=ask)
    attackers = [threading.Thread(target=send) for _ in range(attack.num_clients)]
    with watching(server) as watched:
        asking.start()
        start = time.monotonic()
        for thread in attackers:
            thread.start()
        for thread in attackers:
            thread.join()
        figures.seconds = time.monotonic() - start
        time.sleep(SETTLE_SECONDS)
        ended.set()
        asking.join()
    figures.peak, figures.left, figures.longest_wait = watched.peak, watched.left, max(waits)
    return figures


def run(server: Server, only: str, mebibytes: float) -> None:
    """Print the table."""
    size = int(mebibytes * MEBIBYTE) - 1024
    print(f"bodies of {mebibytes:g} MiB; memory in MiB, beyond what the server had before\n")
    print(f"{'attack':32}{'status':>8}{'seconds':>10}{'peak':>8}{'left':>8}{'others wait':>13}", flush=True)
    for attack in ATTACKS:
        if only not in attack.name:
            continue
        found = measure(attack, server, size)
        print(
            f"{attack.name:32}{found.status or '-':>8}{found.seconds:10.2f}{found.peak / MEBIBYTE:8.0f}"
            f"{found.left / MEBIBYTE:8.0f}{found.longest_wait:11.2f} s",
            flush=True,
        )
