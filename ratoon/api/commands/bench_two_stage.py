"""`ratoon bench two-stage`: sample an answer, then search with beams behind it, and what each kind of reuse saves.

The parser, and the order of things. What is measured is in api/two_stage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.api.progress import request_progress

if TYPE_CHECKING:
    from ratoon.api.two_stage.experiment import Round
    from ratoon.api.two_stage.settings import TwoStageSettings

DEFAULT_MODEL = "smollm2-135m"
EXIT_DISAGREED = 1
DESCRIPTION = """Sample an answer, then search with beams behind it and a suffix: with no reuse, from the prefix cache,
and as a continuation of a leased parent; the last two also after other requests have filled the KV cache.
All must find the same beams; otherwise the exit code is 1."""
# Option, its default, and what it is.
SIZES = (
    ("--prompt-tokens", 500, "tokens of a prompt"),
    ("--stage1-tokens", 200, "tokens that stage 1 samples"),
    ("--suffix-tokens", 5, "tokens behind the answer, before the beams"),
    ("--beam-width", 32, "beams of stage 2"),
    ("--beam-tokens", 3, "tokens of each beam"),
    ("--rounds", 3, "times; the ways take turns"),
    ("--requests", 1, "conversations at once"),
    ("--seed", 0, "of prompts and samples"),
)


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "two-stage",
        help="beam search behind a sampled answer, by what is reused",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    for option, default, help_text in SIZES:
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{help_text} (default {default})")
    parser.add_argument("--json", metavar="FILE", help="write every turn and the figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the ways side by side")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ratoon.api.loadgen.plot import check_plotting
    from ratoon.api.loadgen.settings import check_writable
    from ratoon.api.two_stage.settings import check_model, fitting_engine, settings_of
    from ratoon.models.source import resolve_model

    settings = settings_of(args)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, path)
    if args.plot is not None:
        check_plotting(args.plot)
    model = resolve_model(args.model).config
    check_model(settings, model, args.max_model_len)
    with open_llm(args, skip_tokenizer=True, **fitting_engine(settings, model, args)) as llm:
        from ratoon.api.two_stage.experiment import TwoStageExperiment
        from ratoon.api.two_stage.ways import WAYS

        with request_progress(settings.rounds * len(WAYS), wanted=True, label="two-stage") as advance:
            rounds = TwoStageExperiment(llm, settings).run(on_turn=lambda: advance(1, settings.stage1_tokens))
        facts = llm.describe()
    return report(settings, facts, rounds, args)


def report(settings: TwoStageSettings, engine: dict[str, object], rounds: list[Round], args: argparse.Namespace) -> int:
    import msgspec

    from ratoon.api.two_stage.measures import compare, summarize
    from ratoon.api.two_stage.plot import draw
    from ratoon.api.two_stage.report import as_object, describe, format_agreement, format_notes, format_table

    summaries, agreement = summarize(rounds), compare(rounds)
    title = describe(args.model, settings)
    print(f"{title}\n\n{format_table(summaries)}\n")
    for line in format_agreement(agreement):
        print(line)
    for note in format_notes(summaries):
        print(f"note: {note}", file=sys.stderr)
    if args.json is not None:
        facts = {"model": args.model, "engine": engine, "settings": msgspec.to_builtins(settings)}
        Path(args.json).write_bytes(msgspec.json.encode(as_object(facts, rounds, summaries, agreement)))
    if args.plot is not None:
        draw(args.plot, title, rounds, summaries)
    return 0 if agreement.all_well else EXIT_DISAGREED
