"""What a streamed token costs each process on its way to a client: the server, its engine process, the load generator.

    .venv/bin/python bench/http_stream.py --json stream.json
    .venv/bin/python bench/http_stream.py --streams 1 --requests 32     # one after the other: what a request costs

The server and `ratoon bench serve` are real, and only the device is a stub, whose steps take --step-ms. Costs are
processor time, so other work on the machine changes them little; what clients see (tokens a second, time to the first
one) depends on how many cores there are. The peer is a bare server: it writes the same events to as many sockets, and
does nothing else. The ratio says how much of the server's time is not the system's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from export_hf import MODEL
from harness import Program, align, count, say
from service.bare import run_bare
from service.server import STUB, ServerFailedError, ServerProcess, send_load
from stub_executor import STEP_SECONDS_VARIABLE

MAX_MODEL_LEN = 4096
WARM_UP_REQUESTS = 32
LOAD_SECONDS = 300.0


@dataclass(frozen=True)
class Round:
    """Microseconds of processor time for an output token, by process, and what the clients saw."""

    server: float
    engine: float
    load_generator: float
    tokens_per_second: float
    tokens_per_chunk: float
    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float


def measure_round(server: ServerProcess, args: argparse.Namespace, requests: int, seed: int) -> Round:
    options = ["--num-requests", str(requests), "--concurrency", str(args.streams), "--seed", str(seed)]
    options += ["--input-len", args.input_len, "--output-len", args.output_len]
    before, begin = server.cpu_seconds(), os.times()
    summary = send_load(f"http://{server.host}:{server.port}", options, LOAD_SECONDS)
    after, end = server.cpu_seconds(), os.times()
    seconds = end.children_user + end.children_system - begin.children_user - begin.children_system
    tokens = summary["num_output_tokens"]
    if summary["num_failed"] or not tokens:
        raise ServerFailedError(f"{summary['num_failed']} of {summary['num_requests']} requests failed")
    used = {role: 1e6 * (after[role] - before[role]) / tokens for role in before}
    return Round(
        used["server"],
        used["engine"],
        1e6 * seconds / tokens,
        summary["output_tokens_per_second"],
        summary["tokens_per_chunk"],
        summary["ttft_ms"]["median"],
        summary["itl_ms"]["median"],
        summary["itl_ms"]["p99"],
    )


def format_rounds(rounds: list[Round], bare: float) -> str:
    rows = [["µs of processor time for a token", "median", "lowest", "highest"]]
    for name, label in (("server", "server"), ("engine", "engine process"), ("load_generator", "load generator")):
        values = [getattr(one, name) for one in rounds]
        rows.append([label, f"{median(values):.1f}", f"{min(values):.1f}", f"{max(values):.1f}"])
    server = median(one.server for one in rounds)
    rows.append(["bare server, for an event", f"{bare:.1f}", "", ""])
    # A few streams end within one tick of the clock that counts processor time.
    rows.append(["ratio", f"{server / bare:.1f}×" if bare else "– (too few streams)", "", ""])
    rows.append([])
    for name, label in (
        ("tokens_per_second", "output tokens a second"),
        ("tokens_per_chunk", "tokens in a chunk"),
        ("ttft_ms", "time to first token, p50 (ms)"),
        ("itl_ms", "time between chunks, p50 (ms)"),
        ("itl_p99_ms", "time between chunks, p99 (ms)"),
    ):
        values = [getattr(one, name) for one in rounds]
        rows.append([label, f"{median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}"])
    return align(rows)


class HttpStream(Program):
    doc = __doc__
    rounds = 3
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        count(parser, "--streams", 256, "at once")
        count(parser, "--requests", None, "in a round; default: as many as streams")
        parser.add_argument("--input-len", default="100-1024", metavar="N", help="default: %(default)s")
        parser.add_argument("--output-len", default="100-400", metavar="N", help="default: %(default)s")
        parser.add_argument("--step-ms", type=float, default=3.0, metavar="X", help="of the stub; default: %(default)s")

    def measure(self) -> None:
        args = self.args
        self.requests = args.requests or args.streams
        options = [MODEL, "--executor", STUB, "--max-num-seqs", str(args.streams), "--max-num-batched-tokens", "8192"]
        options += ["--max-model-len", str(MAX_MODEL_LEN)]
        self.bare = run_bare(args.streams)
        self.each: list[Round] = []
        with ServerProcess(options, {STEP_SECONDS_VARIABLE: str(args.step_ms / 1000)}) as server:
            measure_round(server, args, WARM_UP_REQUESTS, 1000)
            for index in range(args.rounds):
                say(f"round {index + 1}/{args.rounds}")
                self.each.append(measure_round(server, args, self.requests, index))

    def title(self) -> str:
        return f"{self.requests} requests, {self.args.streams} at once"

    def report(self) -> Iterator[str]:
        yield format_rounds(self.each, self.bare)

    def figures(self) -> dict[str, Any]:
        return {"bare": self.bare, "rounds": [asdict(one) for one in self.each]}


if __name__ == "__main__":
    sys.exit(HttpStream().run())
