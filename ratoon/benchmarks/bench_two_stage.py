"""`ratoon bench two-stage`: sample an answer, then run a beam search after it, with each kind of reuse.

The parser, and the order of things. What is measured is in two_stage/.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.api.remote.options import add_remote_options, open_client, refuse_engine_options
from ratoon.benchmarks.two_stage.settings import SIZES, TwoStageSettings, check_model, fitting_engine, settings_of
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.benchmarks.two_stage.trips import Measured

DEFAULT_MODEL = "smollm2-135m"
EXIT_DISAGREED = 1
EXIT_INTERRUPTED = 130
HTTP_OPTIONS = ("file", "num_conversations", "request_rate", "remote_model", "api_key")
DESCRIPTION = """Sample an answer, then run a beam search after it and a suffix: with no reuse, from the prefix cache,
and as a continuation of a leased parent; the last two also after other requests have filled the KV cache.
All must find the same beams; otherwise the exit code is 1.

With --url the stages are requests to a running server, stage 2 of each conversation as soon as its stage 1 has ended;
a client can't fill the server's memory, so the last two variants are left out."""


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "two-stage", help="beam search after a sampled answer, with each kind of reuse", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"default {DEFAULT_MODEL}; without --url")
    for name, default, help_text, _ in SIZES:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{help_text} (default {default})")
    parser.add_argument(
        "--requests", "--concurrency", type=int, metavar="N", dest="requests", help="conversations at once (default 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every turn and the figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the variants side by side")
    add_remote_options(parser, always=False)
    _add_http_options(parser.add_argument_group("with --url"))
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def _add_http_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-conversations", type=int, metavar="N", help="in each round (default 8; of a file, all of its lines)"
    )
    group.add_argument(
        "--file", metavar="FILE", help="JSONL: lines with prompt or messages, and perhaps suffix, reference, output_len"
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="conversations that start per second, instead of --requests",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson arrivals; lower: in bursts; higher: even"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request (default 600)")


def run(args: argparse.Namespace) -> int:
    from ratoon.benchmarks.loadgen.plot import check_plotting
    from ratoon.benchmarks.loadgen.settings import check_writable
    from ratoon.benchmarks.two_stage.report import describe

    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, path)
    if args.plot is not None:
        check_plotting(args.plot)
    refuse_other_options(args)
    settings = settings_of(args)
    target, facts, measured = (run_in_process if args.url is None else run_over_http)(args, settings)
    if not any(turn.trips for one in measured.rounds for turn in one.values()):
        raise KeyboardInterrupt
    return report(describe(target, settings), {**facts, "settings": settings.as_dict()}, measured, args)


def refuse_other_options(args: argparse.Namespace) -> None:
    """RequestError for options that belong to the other transport."""
    if args.url is not None:
        if args.model is not None:
            problem = f"{args.model!r}: the model is the server's"
            raise RequestError("MODEL", problem, "--model NAME names one of several")
        refuse_engine_options(args)
        return
    for name in HTTP_OPTIONS:
        default = math.inf if name == "request_rate" else None
        if getattr(args, name) != default:
            option = "--" + name.removeprefix("remote_").replace("_", "-")
            raise RequestError(option, "needs a server", "give its address (--url), or leave it out")


def run_in_process(args: argparse.Namespace, settings: TwoStageSettings) -> tuple[str, dict[str, Any], Measured]:
    from ratoon.models.source import resolve_model

    args.model = args.model or DEFAULT_MODEL
    model = resolve_model(args.model).config
    check_model(settings, model, args.max_model_len)
    with open_llm(args, skip_tokenizer=True, **fitting_engine(settings, model, args)) as llm:
        from ratoon.benchmarks.two_stage.experiment import ConversationSource, measure
        from ratoon.benchmarks.two_stage.in_process import EngineTransport

        transport = EngineTransport(llm, settings)
        measured = measure(transport, settings, ConversationSource(settings, transport.prompts))
        return args.model, {"model": args.model, "engine": llm.describe()}, measured


def run_over_http(args: argparse.Namespace, settings: TwoStageSettings) -> tuple[str, dict[str, Any], Measured]:
    from ratoon.benchmarks.bench_serve import allow_many_connections, fast_loop_factory
    from ratoon.benchmarks.two_stage.experiment import measure
    from ratoon.benchmarks.two_stage.http_transport import open_transport

    client = open_client(args, args.timeout)
    allow_many_connections()
    with open_transport(client, settings, args.remote_model, fast_loop_factory()) as transport:
        measured = measure(transport, settings, transport.source)
        return f"{transport.model} at {client.url}", {"url": client.url, "model": transport.model}, measured


def report(title: str, facts: dict[str, Any], measured: Measured, args: argparse.Namespace) -> int:
    import msgspec

    from ratoon.benchmarks.two_stage.measures import all_well, summarize
    from ratoon.benchmarks.two_stage.plot import draw
    from ratoon.benchmarks.two_stage.report import as_object, format_latencies, format_notes, format_ways

    summaries = summarize(measured)
    print(f"{title}\n\n{format_latencies(summaries)}\n\n{format_ways(summaries)}")
    for note in format_notes(measured, summaries):
        print(f"note: {note}", file=sys.stderr)
    if args.json is not None:
        Path(args.json).write_bytes(msgspec.json.encode(as_object(facts, measured, summaries)))
    if args.plot is not None:
        draw(args.plot, title, measured, summaries)
    if measured.interrupted:
        print("interrupted: these are the figures so far", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if all_well(summaries.values()) else EXIT_DISAGREED
