"""`ratoon bench latency|throughput MODEL`: how fast this machine is with this model, on random prompts.

Latency: a small batch, again and again. Throughput: many requests at once. `bench serve`, `bench two-stage`, `bench
profile` and `bench products` have modules of their own; comparisons with other engines are programs under bench/.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.api.terminal import request_progress
from ratoon.benchmarks import bench_products, bench_profile, bench_serve, bench_two_stage
from ratoon.core.errors import EngineError, RequestError

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.outputs import RequestOutput

WARM_UP_TOKENS = 8


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    for kind, help_text, num_requests, repeat in (
        ("latency", "a batch of requests, again and again", 1, 5),
        ("throughput", "many requests at once", 32, 1),
    ):
        one = kinds.add_parser(kind, help=help_text, description=f"Measure {kind}: {help_text}.")
        one.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
        one.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (default 128)")
        one.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
        one.add_argument(
            "--batch" if kind == "latency" else "--num-requests",
            type=int,
            default=num_requests,
            metavar="N",
            dest="num_requests",
            help=f"requests at once (default {num_requests})",
        )
        one.add_argument("--repeat", type=int, default=repeat, metavar="N", help=f"times (default {repeat})")
        one.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
        one.add_argument("--json", action="store_true", help="print a JSON object")
        add_engine_options(one)
        add_common_options(one)
        one.set_defaults(run=run, kind=kind)
    bench_serve.add_parser(kinds)
    bench_two_stage.add_parser(kinds)
    bench_profile.add_parser(kinds)
    bench_products.add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "num_requests", "repeat"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')}", f"{getattr(args, name)} is out of range", "at least 1")
    with open_llm(args, skip_tokenizer=True) as llm:
        longest = llm.config.max_model_len or 0
        if args.input_len + args.output_len > longest:
            raise RequestError(
                "--input-len",
                f"and --output-len are {args.input_len + args.output_len} tokens together",
                f"{longest} at most",
            )
        rounds = measure(llm, args)
        facts = llm.describe()
    result = summarize(rounds, args)
    if args.json:
        engine = {name: facts[name] for name in ("device", "dtype", "num_threads")}
        print(json.dumps({"kind": args.kind, "model": args.model, **engine, **result}, indent=2))
    else:
        print_result(result, args)
    return 0


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each repetition. Prompts are never repeated, so no round finds cached blocks of another."""
    source = random.Random(args.seed)
    with request_progress(args.repeat * args.num_requests, wanted=True, label=args.kind) as advance:
        run_round(llm, source, args, output_len=min(args.output_len, WARM_UP_TOKENS))
        rounds = []
        for _ in range(args.repeat):
            rounds.append(run_round(llm, source, args, args.output_len))
            advance(args.num_requests, args.num_requests * args.output_len)
    return rounds


def run_round(llm: LLM, source: random.Random, args: argparse.Namespace, output_len: int) -> dict[str, Any]:
    from ratoon.core.params import SamplingParams

    vocab_size = llm.source.config.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(args.input_len)] for _ in range(args.num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    begin = time.monotonic()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.monotonic() - begin
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
    return {
        "seconds": seconds,
        "time_to_first_token": [_time_to_first_token(output) for output in outputs],
        "time_per_output_token": [_time_per_token(output, output_len) for output in outputs if output_len > 1],
    }


def _time_to_first_token(output: RequestOutput) -> float:
    assert output.metrics is not None and output.metrics.time_to_first_token is not None
    return output.metrics.time_to_first_token


def _time_per_token(output: RequestOutput, output_len: int) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    return (metrics.finished_time - metrics.first_token_time) / (output_len - 1)


def summarize(rounds: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    seconds = [one["seconds"] for one in rounds]
    num_output = args.num_requests * args.output_len
    num_total = args.num_requests * (args.input_len + args.output_len)
    return {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "num_requests": args.num_requests,
        "repeat": args.repeat,
        "seconds": spread(seconds),
        "output_tokens_per_second": spread([num_output / value for value in seconds]),
        "total_tokens_per_second": spread([num_total / value for value in seconds]),
        "requests_per_second": spread([args.num_requests / value for value in seconds]),
        "time_to_first_token_ms": spread([1e3 * value for one in rounds for value in one["time_to_first_token"]]),
        "time_per_output_token_ms": spread([1e3 * value for one in rounds for value in one["time_per_output_token"]]),
    }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_result(result: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"{args.kind} of {args.model}: requests at once {args.num_requests}, tokens in {args.input_len}, "
        f"out {args.output_len}, repetitions {args.repeat}"
    )
    print(f"{'':<26}{'median':>10}{'min':>10}{'max':>10}")
    for name, unit in (
        ("seconds", "s"),
        ("time_to_first_token_ms", "ms"),
        ("time_per_output_token_ms", "ms"),
        ("output_tokens_per_second", "tok/s"),
        ("total_tokens_per_second", "tok/s"),
        ("requests_per_second", "req/s"),
    ):
        values = result[name]
        if values is not None:
            label = name.removesuffix("_ms").removesuffix("_per_second").replace("_", " ")
            numbers = "".join(f"{values[column]:>10.2f}" for column in ("median", "min", "max"))
            print(f"{label:<26}{numbers}  {unit}")
