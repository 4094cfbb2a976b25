"""Streams over several front ends against one: tokens a second, latencies, and what each process spends on a token.

    .venv/bin/python bench/front_ends.py --json front_ends.json
    .venv/bin/python bench/front_ends.py --streams 2000 --front-ends 1,2,4,8 --generators 8 --replicas 2

Servers and load generators (`ratoon bench serve`, several at once: one could not read so many streams) are real; only
the device is a stub, whose steps take --step-ms. The peer is the server with one front end. It needs a core for each
front end, engine and load generator, and one for the service: with fewer, they take each other's time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from export_hf import MODEL
from harness import Program, align, count, positive, say
from peers.machine import PROC, processes_of
from service.server import STUB, ServerFailedError, ServerProcess, send_load
from stub_executor import STEP_SECONDS_VARIABLE

MAX_MODEL_LEN = 4096
LOAD_SECONDS = 150.0


@dataclass(frozen=True)
class Round:
    """The result of one run: what the clients saw, and the microseconds of processor time for an output token."""

    tokens_per_second: float
    tokens_per_chunk: float
    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    front_ends: float  # all together; with one, it is the server's process
    service: float  # the process that owns engines and state; 0 with one front end
    engines: float
    busiest_front_end: float  # its share of the time of all


def cpu_seconds(pid: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"service": [], "front end": [], "engine": []}
    for one, seconds in processes_of(pid).items():
        with suppress(OSError):  # it has ended meanwhile
            command = (PROC / str(one) / "cmdline").read_bytes()
            if b"core_process" in command:
                found["engine"].append(seconds)
            elif b"front_end_process" in command:
                found["front end"].append(seconds)
            elif one == pid:
                found["service"].append(seconds)
    if not found["front end"]:
        found["front end"], found["service"] = found["service"], [0.0]
    return found


def measure_round(server: ServerProcess, args: argparse.Namespace, streams: int, seed: int) -> Round:
    each = max(1, streams // args.generators)
    options = ["--num-requests", str(each), "--concurrency", str(each)]
    options += ["--input-len", args.input_len, "--output-len", args.output_len]
    url = f"http://{server.host}:{server.port}"
    before = cpu_seconds(server.pid)
    with ThreadPoolExecutor(args.generators) as pool:
        loads = [
            pool.submit(send_load, url, [*options, "--seed", str(seed * 100 + number)], LOAD_SECONDS)
            for number in range(args.generators)
        ]
        found = [load.result() for load in loads]
    after = cpu_seconds(server.pid)
    failed = sum(one["num_failed"] for one in found)
    tokens = sum(one["num_output_tokens"] for one in found)
    if failed or not tokens:
        raise ServerFailedError(f"{failed} of {each * args.generators} requests failed")
    used = {role: [b - a for a, b in zip(before[role], after[role])] for role in before}
    per_token = {role: 1e6 * sum(seconds) / tokens for role, seconds in used.items()}
    return Round(
        tokens_per_second=sum(one["output_tokens_per_second"] for one in found),
        tokens_per_chunk=median(one["tokens_per_chunk"] for one in found),
        ttft_ms=median(one["ttft_ms"]["median"] for one in found),
        itl_ms=median(one["itl_ms"]["median"] for one in found),
        itl_p99_ms=max(one["itl_ms"]["p99"] for one in found),
        front_ends=per_token["front end"],
        service=per_token["service"],
        engines=per_token["engine"],
        busiest_front_end=max(used["front end"]) / max(sum(used["front end"]), 1e-9),
    )


ROWS = (
    ("tokens_per_second", "output tokens a second", 0),
    ("tokens_per_chunk", "tokens in a chunk", 2),
    ("ttft_ms", "time to first token, p50 (ms)", 0),
    ("itl_ms", "time between chunks, p50 (ms)", 1),
    ("itl_p99_ms", "time between chunks, p99 (ms)", 1),
    ("front_ends", "front ends, µs for a token", 1),
    ("service", "service, µs for a token", 1),
    ("engines", "engines, µs for a token", 1),
    ("busiest_front_end", "busiest front end's share", 2),
)


class FrontEnds(Program):
    doc = __doc__
    rounds = 2
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--streams", 2000, "at once")
        parser.add_argument("--front-ends", default="1,2,4", metavar="N,…", help="default: %(default)s")
        count(parser, "--generators", 4, "load generators")
        count(parser, "--replicas", 1, "engines")
        parser.add_argument("--input-len", default="64", metavar="N", help="default: %(default)s")
        parser.add_argument("--output-len", default="100", metavar="N", help="default: %(default)s")
        parser.add_argument(
            "--step-ms", type=float, default=20.0, metavar="X", help="of the stub; default: %(default)s"
        )

    def measure(self) -> None:
        args = self.args
        self.each: dict[int, list[Round]] = {}
        for number in [positive(text) for text in args.front_ends.split(",")]:
            options = [MODEL, "--executor", STUB, "--max-num-seqs", str(args.streams), "--max-num-batched-tokens"]
            options += ["8192", "--max-model-len", str(MAX_MODEL_LEN), "--replicas", str(args.replicas)]
            options += ["--api-servers", str(number), "--max-total-body", "1GiB"]
            with ServerProcess(options, {STEP_SECONDS_VARIABLE: str(args.step_ms / 1000)}) as server:
                measure_round(server, args, 8 * args.generators, 1000)
                for index in range(args.rounds):
                    say(f"{number} front ends, round {index + 1}/{args.rounds}")
                    self.each.setdefault(number, []).append(measure_round(server, args, args.streams, index))

    def title(self) -> str:
        return f"{self.args.streams} streams at once, {self.args.generators} load generators"

    def report(self) -> Iterator[str]:
        numbers = list(self.each)
        rows = [["front ends", *map(str, numbers)]]
        for name, label, digits in ROWS:
            medians = [median(getattr(one, name) for one in self.each[number]) for number in numbers]
            rows.append([label, *(f"{value:.{digits}f}" for value in medians)])
        rates = [median(one.tokens_per_second for one in self.each[number]) for number in numbers]
        rows.append(["ratio to the first", *(f"{rate / rates[0]:.2f}×" for rate in rates)])
        yield align(rows)

    def figures(self) -> dict[str, Any]:
        return {"rounds": {str(number): [asdict(one) for one in each] for number, each in self.each.items()}}


if __name__ == "__main__":
    sys.exit(FrontEnds().run())
