"""Requests that are cheap to send and were expensive to refuse: how long a refusal takes, what memory it needs, and how
long others wait meanwhile.

    .venv/bin/python bench/attacks.py                                # this checkout
    .venv/bin/python bench/attacks.py --tree ../other --mebibytes 2  # another one, with bodies that are smaller
    .venv/bin/python bench/attacks.py --part grammars                # another part

The part `bodies` is in this file, the others are in attack_parts. One server meets all bodies, one after the other.
Another client has a text of 1,500 words tokenised again and again. What counts is the process that speaks HTTP; the
engine's is another one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from attack_parts import grammars, keys

MEBIBYTE = 2**20
MODEL = "smollm2-135m"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OTHER_PROMPT_WORDS = 1500
SETTLE_SECONDS = 4.0
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Callable[[int], bytes]  # of so many bytes
    num_clients: int = 1
    patience: float = 600.0  # seconds until a client hangs up


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


@contextmanager
def serving(args: argparse.Namespace, *options: str) -> Iterator[tuple[int, str]]:
    """Process id and address of a server of the checkout, with these options."""
    # An earlier checkout (`--tree`) can't be run as a package.
    module = "ratoon" if (args.tree / "ratoon" / "__main__.py").exists() else "ratoon.api.cli"
    command = [sys.executable, "-m", module, "serve", MODEL, "--port", "0", "--max-model-len", "2048", *options]
    environment = {**os.environ, "PYTHONPATH": str(args.tree.resolve())}
    process = subprocess.Popen(
        command, cwd=args.tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        yield process.pid, urlsplit(line.split()[0]).netloc
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def post(address: str, path: str, body: bytes, patience: float) -> int | None:
    """The status; None: there was none in time."""
    connection = http.client.HTTPConnection(address, timeout=patience)
    try:
        connection.request("POST", path, body, HEADERS)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return None
    finally:
        connection.close()


def other_text(number: int) -> bytes:
    return json.dumps({"prompt": f"{number} " + "word " * OTHER_PROMPT_WORDS}).encode()


def run(attack: Attack, pid: int, address: str, size: int) -> Figures:
    figures, ended = Figures(), threading.Event()
    for number in range(2):  # what the first requests make is not the attack's
        post(address, "/tokenize", other_text(-number), 600)
    before = resident_bytes(pid)
    waits: list[float] = []

    def look() -> None:
        while not ended.wait(0.01):
            figures.peak = max(figures.peak, resident_bytes(pid) - before)

    def ask() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            start = time.monotonic()
            post(address, "/tokenize", other_text(number), 600)
            waits.append(time.monotonic() - start)
            ended.wait(0.05)

    def send() -> None:
        status = post(address, attack.path, body, attack.patience)
        figures.status = figures.status or status

    body = attack.body(size)
    watchers = [threading.Thread(target=look), threading.Thread(target=ask)]
    attackers = [threading.Thread(target=send) for _ in range(attack.num_clients)]
    for thread in watchers:
        thread.start()
    start = time.monotonic()
    for thread in attackers:
        thread.start()
    for thread in attackers:
        thread.join()
    figures.seconds = time.monotonic() - start
    time.sleep(SETTLE_SECONDS)
    ended.set()
    for thread in watchers:
        thread.join()
    figures.left = resident_bytes(pid) - before
    figures.longest_wait = max(waits)
    return figures


def run_bodies(args: argparse.Namespace) -> None:
    size = int(args.mebibytes * MEBIBYTE) - 1024
    print(f"bodies of {args.mebibytes:g} MiB; memory in MiB, beyond what the server had before\n")
    print(f"{'attack':32}{'status':>8}{'seconds':>10}{'peak':>8}{'left':>8}{'others wait':>13}", flush=True)
    with serving(args) as (pid, address):
        for attack in ATTACKS:
            if args.only not in attack.name:
                continue
            found = run(attack, pid, address, size)
            print(
                f"{attack.name:32}{found.status or '-':>8}{found.seconds:10.2f}{found.peak / MEBIBYTE:8.0f}"
                f"{found.left / MEBIBYTE:8.0f}{found.longest_wait:11.2f} s",
                flush=True,
            )


def run_grammars(args: argparse.Namespace) -> None:
    with serving(args, *grammars.OPTIONS) as (pid, address):
        grammars.run(address, pid, args.bombs, args.rounds)


def run_keys(args: argparse.Namespace) -> None:
    with serving(args, "--api-key", keys.BUSY_KEY, "--api-key", keys.SHORT_KEY) as (_, address):
        keys.run(address, args.only, args.seconds)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "bodies": run_bodies,
    "grammars": run_grammars,
    "keys": run_keys,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout whose server is run")
    parser.add_argument("--part", choices=list(PARTS), default="bodies", help="default bodies")
    parser.add_argument("--mebibytes", type=float, default=15.9, help="bodies: size of a body; default 15.9")
    parser.add_argument("--only", default="", help="bodies, keys: attacks, or loads, whose name has this in it")
    parser.add_argument("--seconds", type=float, default=20.0, help="keys: of each load; default 20")
    parser.add_argument("--bombs", type=int, default=64, help="grammars: how many at once; default 64")
    parser.add_argument("--rounds", type=int, default=2, help="grammars: how often they are sent; default 2")
    args = parser.parse_args()
    PARTS[args.part](args)


if __name__ == "__main__":
    main()
