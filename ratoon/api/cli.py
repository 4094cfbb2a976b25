"""The `ratoon` command: finds the subcommand, runs it, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the engine failed, 2 bad input (arguments, model, settings), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ratoon.api.commands import (
    bench,
    chat,
    complete,
    demo,
    embed,
    generate,
    hidden_states,
    info,
    models,
    pull,
    serve,
    transcribe,
)
from ratoon.api.parser import CommandParser
from ratoon.core.errors import ConfigError, ModelError, RatoonError, RequestError
from ratoon.observe.logging import configure_logging
from ratoon.version import __version__

COMMANDS = (generate, chat, complete, embed, hidden_states, transcribe, serve, models, pull, info, bench, demo)
EXIT_ENGINE = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="ratoon", description="An inference engine for language models.")
    parser.add_argument("--version", action="version", version=f"ratoon {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """As argparse does, except that prompts may stand behind options, where it gives them up as unknown."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "prompts"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.prompts += rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    configure_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    debug = args.debug or os.environ.get("RATOON_DEBUG", "0") not in ("", "0")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output is gone (`| head`). Python would complain once more while it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return report(error)


def report(error: Exception) -> int:
    """Say what went wrong in one line; the exit code says whose turn it is."""
    if isinstance(error, RatoonError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_INPUT if isinstance(error, (RequestError, ConfigError, ModelError)) else EXIT_ENGINE
    problem = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: {problem} (unexpected; --debug shows where)", file=sys.stderr)
    return EXIT_ENGINE


if __name__ == "__main__":
    sys.exit(main())
