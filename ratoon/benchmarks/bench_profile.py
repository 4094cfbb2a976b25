"""`ratoon bench profile MODEL`: where the time of steps goes, on the device and on the host's threads.

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

DEFAULT_BATCHES, DEFAULT_BATCHES_OF_CPU = "1,32,256", "1,32"
DEFAULT_PROMPT_OF_CPU = 1024
DESCRIPTION = """Record decode steps of batches of requests: what the device executes and what the engine's threads do.

For each batch a trace that ui.perfetto.dev opens and, with matplotlib, a picture of a few steps are written, and the
share of a step's time in which the device works is printed. On a CPU each kernel is timed: a second table has the time
of a step by kind of work (products, attention, sampling and others), and a prompt is recorded too."""


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "profile", help="a timeline of steps, on the device and on the host", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument(
        "--batches",
        metavar="N,…",
        help=f"requests at once (default {DEFAULT_BATCHES}; on a CPU {DEFAULT_BATCHES_OF_CPU})",
    )
    parser.add_argument(
        "--prompts",
        metavar="N,…",
        help=f"also record how a prompt of N tokens is computed; 0: none (default on a CPU {DEFAULT_PROMPT_OF_CPU})",
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

    batches = None if args.batches is None else parse_batches(args.batches)
    prompts = None if args.prompts is None else parse_prompts(args.prompts)
    for name in ("input_len", "steps"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')}", f"{getattr(args, name)} is out of range", "at least 1")
    folder = make_folder(args.output)
    with open_llm(args, skip_tokenizer=args.load_format == "dummy") as llm:
        facts = llm.describe()
        on_cpu = facts["device"] == "cpu"
        if batches is None:
            batches = parse_batches(DEFAULT_BATCHES_OF_CPU if on_cpu else DEFAULT_BATCHES)
        if prompts is None:
            prompts = [min(DEFAULT_PROMPT_OF_CPU, facts["max_model_len"] - 1)] if on_cpu else []
        verify_sizes(llm, batches, prompts, args)
        batch_run = BatchRun(llm)
        timelines = []
        for batch in batches:
            timelines.append(batch_run.measure(batch, args.input_len, args.steps))
            write(folder, args.model, timelines[-1])
        for length in prompts:
            timelines.append(batch_run.measure_prompt(length))
            write(folder, args.model, timelines[-1])
    if args.json:
        engine = {name: facts[name] for name in ("device", "dtype", "num_threads")}
        print(json.dumps({"model": args.model, **engine, "batches": [one.as_dict() for one in timelines]}, indent=2))
    else:
        print(format_table(timelines))
        if any(one.parts for one in timelines):
            print(f"\n{format_parts([one for one in timelines if one.parts])}")
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


def parse_prompts(text: str) -> list[int]:
    try:
        prompts = [int(part) for part in text.split(",")]
    except ValueError:
        prompts = [-1]
    if prompts == [0]:
        return []
    if min(prompts) < 1 or len(set(prompts)) != len(prompts):
        raise RequestError("--prompts", f"{text!r} is no list of lengths", f"such as {DEFAULT_PROMPT_OF_CPU}, or 0")
    return prompts


def make_folder(name: str) -> Path:
    """Makes the folder before anything is loaded: nothing that was measured may be lost."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("--output", f"{name!r} can't be created: {error.strerror}", "another folder") from None
    return folder


def verify_sizes(llm: LLM, batches: list[int], prompts: list[int], args: argparse.Namespace) -> None:
    from ratoon.benchmarks.timeline.measure import BatchRun

    most = llm.config.scheduler.max_num_seqs
    if max(batches) > most:
        raise RequestError("--batches", f"{max(batches)} requests at once", f"at most max_num_seqs, which is {most}")
    longest = llm.config.max_model_len or 0
    needed = args.input_len + BatchRun(llm).num_tokens(max(batches), args.input_len, args.steps)
    if needed > longest:
        raise RequestError("--input-len", f"and --steps need sequences of {needed} tokens", f"{longest} at most")
    if prompts and max(prompts) >= longest:
        raise RequestError(
            "--prompts", f"a prompt of {max(prompts)} tokens", f"at most {longest - 1}, for a token after it"
        )


def write(folder: Path, model: str, timeline: Timeline) -> None:
    from ratoon.benchmarks.timeline.plot import draw
    from ratoon.benchmarks.timeline.spans import DEVICE
    from ratoon.benchmarks.timeline.trace import write_trace

    path = folder / trace_name(timeline)
    write_trace(path, [span for span in timeline.spans if span.lane != DEVICE], timeline.device_events)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(path.with_suffix(".png"), f"{Path(model).name}: {timeline.title}", timeline)


def trace_name(timeline: Timeline) -> str:
    return f"{timeline.name}.json"


def format_table(timelines: list[Timeline]) -> str:
    rows = [["", "step", "recorded", "device busy", "steps thread", "core thread"]]
    for timeline in timelines:
        facts = timeline.as_dict()
        shares = (facts["device_busy"], facts["steps_thread_busy"], facts["core_thread_busy"])
        times = (f"{facts[name]:.3f} ms" for name in ("step_ms", "recorded_step_ms"))
        rows.append([timeline.title, *times, *map(_percent, shares)])
    return "\n".join(f"{row[0]:<24}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


def format_parts(timelines: list[Timeline]) -> str:
    """What recorded steps spent their time on: milliseconds, and the share of the step."""
    rows = [["of a recorded step", *(timeline.title for timeline in timelines)]]
    for part in timelines[0].parts:
        cells = []
        for timeline in timelines:
            milliseconds = timeline.parts[part]
            cells.append(f"{milliseconds:.3f} ms {milliseconds / 1e3 / timeline.recorded_seconds:>5.0%}")
        rows.append([part, *cells])
    return "\n".join(f"{row[0]:<24}" + "".join(f"{cell:>20}" for cell in row[1:]) for row in rows)


def _percent(share: Any) -> str:
    return "–" if share is None else f"{share:.0%}"
