"""`ratoon serve` and `vllm serve` on one GPU under the same load, from light to saturated, one server after the other.

    python3 bench/gpu/compare_http.py --engines ratoon --models qwen3-0.6b
    python3 bench/gpu/compare_http.py --vllm-path /tmp/vllm --rates 1,8,32,inf --json http.json

The load comes from `ratoon bench serve`. Each rate of each server is printed at once as a line `RESULT {json}`: time to
first token and time between tokens, 50th and 99th percentile, output tokens a second, and the processor time that each
process took for a token. Before the first rate, a server answers a burst that is not counted, in which engines compile
and capture what their steps need.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import VARIANTS, add_options, engine_settings, gpu_name, module_path, settle_options
from compare_parts.models import prepare_model
from compare_parts.records import ERROR_MARK, MARK
from compare_parts.servers import Server
from harness import OURS, align, format_number
from peers.process import EngineFailedError
from service.server import ServerFailedError, send_load

RATES = (1.0, 8.0, 32.0, math.inf)
LOAD_SECONDS = 15.0  # how long requests arrive, at a rate
FEWEST_REQUESTS, MOST_REQUESTS = 8, 512
SATURATING = 256  # requests that are sent at once
WARMUP_SEED = 1000  # rates have their own: no prompt of the warm-up comes again
MAX_MODEL_LEN = 4096
OUR_BUDGET = {"max_num_batched_tokens": 8192}  # of tokens in a step: what vLLM's server chooses on a large GPU


@dataclass(frozen=True)
class Load:
    """One server at one rate. Times in milliseconds."""

    model: str
    variant: str
    engine: str
    rate: float | None  # requests a second; None: all at once
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    output_tokens_per_second: float
    requests: int
    failed: int
    # Microseconds of processor time for an output token, prompts included: of the process that serves HTTP, of the
    # engine's processes, of the load generator
    server_cpu_us: float
    engine_cpu_us: float
    client_cpu_us: float

    @property
    def rate_text(self) -> str:
        return "all at once" if self.rate is None else f"{self.rate:g} a second"

    @property
    def times(self) -> tuple[float, ...]:
        return self.ttft_p50, self.ttft_p99, self.itl_p50, self.itl_p99

    @property
    def cpu_text(self) -> str:
        return " / ".join(f"{used:.0f}" for used in (self.server_cpu_us, self.engine_cpu_us, self.client_cpu_us))


class HttpComparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.loads: list[Load] = []
        self.errors: list[dict[str, str]] = []
        self._deadline = time.monotonic() + args.limit_seconds

    def measure(self) -> None:
        for shape in self.args.shapes:
            for engine in self.args.engines:
                try:
                    self._measure_server(shape, engine)
                except EngineFailedError as error:
                    self._fail(shape.name, engine, str(error))

    def _measure_server(self, shape: Path, engine: str) -> None:
        args = self.args
        model = prepare_model(shape, args.work_folder)
        settings = {"max_model_len": MAX_MODEL_LEN}
        settings |= engine_settings(args, args.variant, engine)
        if engine == OURS:
            settings |= OUR_BUDGET | args.settings
        log = args.work_folder / "logs" / f"http-{shape.name}-{engine}.log"
        seconds = min(args.start_seconds, self._seconds_left())
        print(f"# start {shape.name} {engine} {json.dumps(settings)}", flush=True)
        begin = time.monotonic()
        with Server(engine, model, settings, module_path(engine, args.vllm_path), log, seconds) as server:
            print(f"# healthy after {time.monotonic() - begin:.1f} s", flush=True)
            if args.warmup:
                begin = time.monotonic()
                self._send(server, args.warmup, math.inf, WARMUP_SEED)
                print(f"# warmed up by {args.warmup} requests in {time.monotonic() - begin:.1f} s", flush=True)
            for index, rate in enumerate(args.rates):
                requests = args.requests or num_requests(rate, args.load_seconds)
                before = cpu_seconds(server)
                try:
                    summary = self._send(server, requests, rate, index)
                except ServerFailedError as error:
                    self._fail(shape.name, engine, f"at {rate:g} requests a second: {error}")
                else:
                    used = [end - begin for begin, end in zip(before, cpu_seconds(server))]
                    self._add(summarize(summary, used, shape.name, args.variant, engine, rate))

    def _send(self, server: Server, requests: int, rate: float, seed: int) -> dict[str, Any]:
        """Returns the summary of a load from a process of its own."""
        args = self.args
        options = ["--num-requests", str(requests), "--request-rate", str(rate), "--seed", str(seed)]
        options += ["--input-len", args.input_len, "--output-len", args.output_len]
        environment = {**os.environ, "PYTHONPATH": module_path(OURS, None)}
        try:
            return send_load(server.url, options, self._seconds_left(), environment)
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"the time limit ended {requests} requests, {rate:g} a second") from None

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EngineFailedError("the time limit is over")
        return left

    def _add(self, load: Load) -> None:
        self.loads.append(load)
        print(MARK + json.dumps(asdict(load)), flush=True)

    def _fail(self, model: str, engine: str, error: str) -> None:
        self.errors.append({"model": model, "engine": engine, "error": error[-3000:]})
        print(ERROR_MARK + json.dumps(self.errors[-1]), flush=True)


def num_requests(rate: float, seconds: float) -> int:
    if math.isinf(rate):
        return SATURATING
    return min(MOST_REQUESTS, max(FEWEST_REQUESTS, math.ceil(rate * seconds)))


def cpu_seconds(server: Server) -> tuple[float, float, float]:
    """Of the process that serves HTTP, of the engine's, and of load generators that have ended."""
    times = os.times()
    return *server.cpu_seconds(), times.children_user + times.children_system


def summarize(summary: dict[str, Any], used: list[float], model: str, variant: str, engine: str, rate: float) -> Load:
    ttft, itl = summary["ttft_ms"] or {}, summary["itl_ms"] or {}
    numbers = [ttft.get("median"), ttft.get("p99"), itl.get("median"), itl.get("p99")]
    return Load(
        model,
        variant,
        engine,
        None if math.isinf(rate) else rate,
        *(math.nan if number is None else round(number, 3) for number in numbers),
        round(summary["output_tokens_per_second"], 1),
        summary["num_requests"],
        summary["num_failed"],
        *(round(1e6 * seconds / max(1, summary["num_output_tokens"]), 1) for seconds in used),
    )


def format_table(loads: list[Load]) -> str:
    """Below the two servers at a rate, a line with their ratios: above 1, Ratoon is the faster one."""
    figures = ["TTFT p50", "p99", "ITL p50", "p99 (ms)", "output tok/s"]
    rows = [["model", "load", "engine", *figures, "server / engine / client µs", "failed"]]
    together: dict[tuple[str, float], list[Load]] = {}
    for load in sorted(loads, key=lambda one: (one.model, one.rate or math.inf, one.engine != OURS)):
        together.setdefault((load.model, load.rate or math.inf), []).append(load)
    for group in together.values():
        for load in group:
            figures = [format_number(figure) for figure in (*load.times, load.output_tokens_per_second)]
            failed = f"{load.failed} of {load.requests}"
            rows.append([load.model, load.rate_text, load.engine, *figures, load.cpu_text, failed])
        if len(group) == 2:
            rows.append(["", "", "ratio", *map(format_ratio, ratios(*group)), "", ""])
    return align(rows)


def ratios(ours: Load, theirs: Load) -> list[float]:
    """NaN where one of them has no figure."""
    pairs = [*zip(theirs.times, ours.times), (ours.output_tokens_per_second, theirs.output_tokens_per_second)]
    return [above / below if below else math.nan for above, below in pairs]


def format_ratio(ratio: float) -> str:
    return "" if math.isnan(ratio) else f"{format_number(ratio)}×"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--variant", default="bf16", choices=VARIANTS)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="default %(default)s")
    parser.add_argument("--requests", type=int, metavar="N", help="at each rate (default: by --load-seconds)")
    parser.add_argument(
        "--load-seconds",
        type=float,
        default=LOAD_SECONDS,
        metavar="S",
        help=f"of arrivals at a rate, {FEWEST_REQUESTS} to {MOST_REQUESTS} requests (default %(default)g)",
    )
    parser.add_argument(
        "--warmup", type=int, default=SATURATING, metavar="N", help="requests before, at once (default %(default)s)"
    )
    parser.add_argument("--input-len", default="100-1024", metavar="N", help="tokens in (default %(default)s)")
    parser.add_argument("--output-len", default="100-400", metavar="N", help="tokens out (default %(default)s)")
    args = settle_options(parser)
    args.rates = [float(rate) for rate in args.rates.split(",")]
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are ended
    comparison = HttpComparison(args)
    try:
        comparison.measure()
    except KeyboardInterrupt:
        print("interrupted: these are the figures so far", file=sys.stderr)
    print(f"\n{gpu_name()}\nRatios: above 1, Ratoon is the faster one.\n\n{format_table(comparison.loads)}")
    for failure in comparison.errors:
        print(f"failed: {failure['model']} {failure['engine']}: {failure['error'].strip().splitlines()[-1][:300]}")
    if args.json:
        result = {"gpu": gpu_name(), "loads": [asdict(load) for load in comparison.loads], "errors": comparison.errors}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if comparison.errors and not comparison.loads else 0


if __name__ == "__main__":
    sys.exit(main())
