"""`ratoon bench serve --url URL`: a load test of a server.

The parser, and the order of things. The load generator itself is in loadgen/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options
from ratoon.api.remote.options import add_remote_options, open_client

if TYPE_CHECKING:
    from ratoon.benchmarks.loadgen.run import Round
    from ratoon.benchmarks.loadgen.settings import LoadSettings
    from ratoon.benchmarks.loadgen.target import Target

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
DESCRIPTION = """Send requests to an OpenAI-compatible server and measure latency and throughput.

Requests are sent at a rate (--request-rate), as earlier ones end (--concurrency), or all at once (neither)."""


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser("serve", help="load test of a server", description=DESCRIPTION)
    add_remote_options(parser, always=True)
    parser.add_argument("--endpoint", choices=("completions", "chat"), help="default: what the dataset needs")
    _add_dataset_options(parser.add_argument_group("what is sent"))
    _add_load_options(parser.add_argument_group("when"))
    _add_output_options(parser.add_argument_group("what comes out"))
    add_common_options(parser)
    parser.set_defaults(run=run)


def _add_dataset_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset", choices=("random", "shared-prefix", "multi-turn", "jsonl"), default="random", help="default random"
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="default 100; of a file, all")
    group.add_argument("--input-len", default="128", metavar="N", help="tokens of a prompt: 128, or 64-256")
    group.add_argument("--output-len", default="128", metavar="N", help="tokens of an answer: 128, or 64-256")
    group.add_argument("--prefix-len", type=int, default=256, metavar="N", help="shared-prefix: tokens of a prefix")
    group.add_argument("--prefix-groups", type=int, default=4, metavar="N", help="shared-prefix: different prefixes")
    group.add_argument("--turns", type=int, default=4, metavar="N", help="multi-turn: requests of a conversation")
    group.add_argument("--think-time", type=float, default=0.0, metavar="S", help="multi-turn: seconds between turns")
    group.add_argument("--file", metavar="FILE", help="jsonl: lines with prompt or messages, and output_len")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of full length (default: yes, not of files)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0")
    group.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="arrivals a second; inf: all at once"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson arrivals; lower: in bursts; higher: even"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="at most N requests (or conversations) at once")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="warm-up requests, not measured (default 2)")
    group.add_argument("--repeat", type=int, default=1, metavar="K", help="rounds, each with new prompts")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request (default 600)")


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput", nargs="+", metavar="LIMIT", help="count requests within all of: ttft:500 tpot:50 e2e:10000 (ms)"
    )
    group.add_argument("--json", metavar="FILE", help="write every request and the figures")
    group.add_argument("--plot", metavar="FILE.png", help="draw latencies and the run over time")


def run(args: argparse.Namespace) -> int:
    from ratoon.benchmarks.loadgen.plot import check_plotting
    from ratoon.benchmarks.loadgen.run import measure
    from ratoon.benchmarks.loadgen.settings import check_writable, settings_of

    settings = settings_of(args)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, path)
    if args.plot is not None:
        check_plotting(args.plot)
    client = open_client(args, settings.timeout)
    allow_many_connections()
    with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
        target, rounds = runner.run(measure(client, settings, args.remote_model))
    if not any(one.records for one in rounds):
        raise KeyboardInterrupt
    return report(client.url, target, settings, rounds, args)


def report(url: str, target: Target, settings: LoadSettings, rounds: list[Round], args: argparse.Namespace) -> int:
    import msgspec

    from ratoon.benchmarks.loadgen.measures import summarize
    from ratoon.benchmarks.loadgen.plot import draw
    from ratoon.benchmarks.loadgen.report import as_object, format_report, format_warnings

    summaries = [summarize(one.records, one.seconds, settings.limits_ms) for one in rounds]
    title = f"{target.model} at {url}: {describe(settings)}"
    print(f"{title}\n\n{format_report(summaries, settings.limits_ms)}")
    all_new = settings.dataset == "random" and not settings.chat
    for note in (*target.notes, *format_warnings(summaries, all_new)):
        print(f"note: {note}", file=sys.stderr)
    if args.json is not None:
        facts = {"url": url, "model": target.model, "path": target.path, **settings.as_dict()}
        Path(args.json).write_bytes(msgspec.json.encode(as_object(facts, rounds, summaries)))
    if args.plot is not None:
        draw(args.plot, title, rounds, settings.limits_ms)
    if rounds[-1].interrupted:
        print("interrupted: these are the figures so far", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(summary.num_failed for summary in summaries) else 0


def describe(settings: LoadSettings) -> str:
    """A short description of the load."""
    shape = settings.shape
    parts = [f"{shape.num_requests} requests", f"{settings.dataset} dataset"]
    if settings.repeat > 1:
        parts[0] = f"{settings.repeat} × {parts[0]}"
    if settings.dataset != "jsonl":
        lengths = [f"{r.low}" if r.low == r.high else f"{r.low}–{r.high}" for r in (shape.input_len, shape.output_len)]
        parts.append(f"tokens in {lengths[0]}, out {lengths[1]}")
    if not math.isinf(settings.request_rate):
        parts.append(f"{settings.request_rate:g} a second")
    if settings.concurrency is not None:
        parts.append(f"{settings.concurrency} at once")
    elif math.isinf(settings.request_rate):
        parts.append("all at once")
    return ", ".join(parts)


def allow_many_connections() -> None:
    """Raises the limit on open files as far as allowed: each stream is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def fast_loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it halves the cost of a chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
