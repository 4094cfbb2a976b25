"""`ratoon bench profile MODEL`: where the time of decode steps goes, on the device and on the host's threads.

The parser, and the order of things. What is measured is in timeline/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.benchmarks.timeline.measure import Timeline

DEFAULT_BATCHES = "1,32,256"
DESCRIPTION = """Record decode steps of batches of requests: what the device executes and what the engine's threads do.

For each batch a trace that ui.perfetto.dev opens and, with matplotlib, a picture of a few steps are written, and the
share of a step's time in which the device works is printed. On a CPU the steps thread computes, and stands for the
device."""


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "profile", help="a timeline of steps, on the device and on the host", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument(
        "--batches", default=DEFAULT_BATCHES, metavar="N,…", help="requests at once (default %(default)s)"
    )
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (default 128)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="decode steps to record (default 16)")
    parser.add_argument(
        "--output", default="profile", metavar="DIR", help="folder of traces and pictures (default profile)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ratoon.benchmarks.timeline.measure import BatchRun

    batches = parse_batches(args.batches)
    for name in ("input_len", "steps"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')}", f"{getattr(args, name)} is out of range", "at least 1")
    folder = make_folder(args.output)
    with open_llm(args, skip_tokenizer=True) as llm:
        verify_sizes(llm, batches, args)
        batch_run = BatchRun(llm)
        timelines = []
        for batch in batches:
            timelines.append(batch_run.measure(batch, args.input_len, args.steps))
            write(folder, args.model, timelines[-1])
        facts = llm.describe()
    if args.json:
        engine = {name: facts[name] for name in ("device", "dtype", "num_threads")}
        print(json.dumps({"model": args.model, **engine, "batches": [one.as_dict() for one in timelines]}, indent=2))
    else:
        print(format_table(timelines))
        print(
            f"\nTraces for https://ui.perfetto.dev are in {folder}: {', '.join(trace_name(one) for one in timelines)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        print("note: no pictures: matplotlib is not installed", file=sys.stderr)
    return 0


def parse_batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise RequestError("--batches", f"{text!r} is no list of batch sizes", f"such as {DEFAULT_BATCHES}")
    return batches


def make_folder(name: str) -> Path:
    """Before anything is loaded: nothing that was measured may be lost."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("--output", f"{name!r} can't be created: {error.strerror}", "another folder") from None
    return folder


def verify_sizes(llm: LLM, batches: list[int], args: argparse.Namespace) -> None:
    from ratoon.benchmarks.timeline.measure import BatchRun

    most = llm.config.scheduler.max_num_seqs
    if max(batches) > most:
        raise RequestError("--batches", f"{max(batches)} requests at once", f"at most max_num_seqs, which is {most}")
    longest = llm.config.max_model_len or 0
    needed = args.input_len + BatchRun(llm).num_tokens(max(batches), args.input_len, args.steps)
    if needed > longest:
        raise RequestError("--input-len", f"and --steps need sequences of {needed} tokens", f"{longest} at most")


def write(folder: Path, model: str, timeline: Timeline) -> None:
    from ratoon.benchmarks.timeline.plot import draw
    from ratoon.benchmarks.timeline.spans import DEVICE
    from ratoon.benchmarks.timeline.trace import write_trace

    path = folder / trace_name(timeline)
    write_trace(path, [span for span in timeline.spans if span.lane != DEVICE], timeline.device_events)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(path.with_suffix(".png"), f"{Path(model).name}: {timeline.batch} requests at once", timeline)


def trace_name(timeline: Timeline) -> str:
    return f"batch-{timeline.batch}.json"


def format_table(timelines: list[Timeline]) -> str:
    rows = [["requests", "step", "recorded", "device busy", "steps thread", "core thread"]]
    for timeline in timelines:
        facts = timeline.as_dict()
        shares = (facts["device_busy"], facts["steps_thread_busy"], facts["core_thread_busy"])
        times = (f"{facts[name]:.3f} ms" for name in ("step_ms", "recorded_step_ms"))
        rows.append([str(timeline.batch), *times, *map(_percent, shares)])
    return "\n".join("".join(f"{cell:>14}" for cell in row) for row in rows)


def _percent(share: Any) -> str:
    return "–" if share is None else f"{share:.0%}"
