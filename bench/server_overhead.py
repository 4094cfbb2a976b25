"""What the way through HTTP costs: the same work through `LLM.generate` in one process and through `ratoon serve`.

    .venv/bin/python bench/server_overhead.py --json overhead.json

Both load the same folder and get the same prompts as token ids; decoding is greedy and does not stop at an end token.
They take turns, another one first in every round. The client of the server runs on the same cores and is part of what
is measured. The aim is a ratio of 0.95 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cpu_peers import QUIET_LIMIT_SECONDS, format_spread, say, spread
from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from peers.machine import describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineFailedError, EngineProcess
from peers.protocol import MAX_MODEL_LEN
from service.server import ServerFailedError, ServerProcess
from service.streams import Exchange, StreamFailedError, completion_body, read_answer, run_exchanges
from workloads import Call, PromptSource

SEED = 1
AIM = 0.95
DIRECT, SERVED = "LLM.generate", "ratoon serve"


class Comparison:
    def __init__(self, args: argparse.Namespace, engine: EngineProcess, server: ServerProcess) -> None:
        self.args = args
        self._engine = engine
        self._server = server
        self._prompts = PromptSource(SEED)
        self.rates: dict[str, list[float]] = {DIRECT: [], SERVED: []}  # output tokens a second
        self.client_cpu_share: list[float] = []  # of the time that a served round takes

    def warm_up(self) -> None:
        call = self._call()
        self._direct(call)
        self._served(call)

    def measure(self) -> None:
        for index in range(self.args.rounds):
            call = self._call()
            ways = [(DIRECT, self._direct), (SERVED, self._served)]
            for name, way in ways if index % 2 == 0 else reversed(ways):
                say(f"round {index + 1}/{self.args.rounds}: {name}")
                self.rates[name].append(call.num_output_tokens / way(call))

    def ratios(self) -> list[float]:
        return [served / direct for served, direct in zip(self.rates[SERVED], self.rates[DIRECT])]

    def _call(self) -> Call:
        return Call([self._prompts.prompt(self.args.input) for _ in range(self.args.requests)], self.args.output)

    def _direct(self, call: Call) -> float:
        return self._engine.generate(call.prompts, call.num_tokens).seconds

    def _served(self, call: Call) -> float:
        return asyncio.run(self._exchange(call))

    async def _exchange(self, call: Call) -> float:
        exchanges = [
            Exchange(completion_body(MODEL, prompt, call.num_tokens, SEED, stream=not self.args.no_stream))
            for prompt in call.prompts
        ]
        begin, cpu_before = time.perf_counter(), time.process_time()
        await run_exchanges(self._server.host, self._server.port, exchanges)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_before
        self.client_cpu_share.append(cpu_seconds / seconds)
        for exchange in exchanges:
            answer = read_answer(exchange)
            if answer.num_tokens != call.num_tokens:
                raise StreamFailedError(f"an answer has {answer.num_tokens} tokens instead of {call.num_tokens}")
        return seconds


def print_report(comparison: Comparison, quiet: bool | None) -> None:
    args, machine = comparison.args, describe_machine()
    way = "whole answers" if args.no_stream else "streams"
    print(f"{MODEL} in fp32, {args.threads} threads; {machine['cpu']}, {machine['cores']} cores")
    print(f"{args.requests} requests at once, {args.input} tokens in, {args.output} out; {way}; {args.rounds} rounds")
    if quiet is False:
        print(f"Warning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")
    print("Output tokens a second, median (min–max)")
    for name, rates in comparison.rates.items():
        print(f"  {name:<14}{format_spread(spread(rates))}")
    ratio = spread(comparison.ratios())
    verdict = "reached" if ratio["median"] >= AIM else "missed"
    print(f"  {'ratio':<14}{format_spread(ratio, '×')}; the aim of {AIM} is {verdict}")
    print(f"  The client took {spread(comparison.client_cpu_share)['median']:.1%} of a core while it was served.")


def as_json(comparison: Comparison, quiet: bool | None) -> dict[str, Any]:
    settings = {name: value for name, value in vars(comparison.args).items() if name != "json"}
    return {
        "machine": describe_machine(),
        "model": MODEL,
        "settings": settings,
        "quiet_at_start": quiet,
        "tokens_per_second": comparison.rates,
        "ratios": comparison.ratios(),
        "client_cpu_share": comparison.client_cpu_share,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="at once; default: %(default)s")
    parser.add_argument("--input", type=int, default=128, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--output", type=int, default=128, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--no-stream", action="store_true", help="ask for whole answers instead of streams")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N", help="default: all cores")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all figures")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    args = parser.parse_args()
    for option in ("requests", "input", "output", "rounds", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: {getattr(args, option)}; expected at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all processes are ended
    folder = export_model(MODEL, DEFAULT_FOLDER)
    quiet = None if args.no_wait else wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    log = CACHE_FOLDER / "logs" / "ratoon-overhead.log"
    engine = EngineProcess("ratoon", sys.executable, folder, args.threads, log)
    # What peers/ratoon_worker.py gives its LLM.
    options = [str(folder.resolve()), "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32"]
    options += ["--threads", str(args.threads), "--max-model-len", str(MAX_MODEL_LEN), "--kv-memory", "2GiB"]
    try:
        with ExitStack() as stack:
            stack.callback(engine.close)
            engine.start(PromptSource(SEED + 1).prompt(args.input))
            comparison = Comparison(args, engine, stack.enter_context(ServerProcess(options)))
            comparison.warm_up()
            comparison.measure()
    except (EngineFailedError, ServerFailedError, StreamFailedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_report(comparison, quiet)
    if args.json:
        args.json.write_text(json.dumps(as_json(comparison, quiet), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
