"""A command line of command modules: finds the subcommand, runs it, and turns errors into one line and an exit code.

The `ratoon` command (ratoon/cli.py) is this with the commands below and those of other rooms.

Exit codes: 0 done, 1 the engine failed, 2 bad input (arguments, model, settings), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from ratoon.api.commands import (
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
from ratoon.api.option_names import in_terms_of_options
from ratoon.api.parser import CommandParser
from ratoon.core.errors import ConfigError, ModelError, RatoonError, RequestError
from ratoon.observe.logging import configure_logging
from ratoon.version import __version__

COMMANDS = (generate, chat, complete, embed, hidden_states, transcribe, serve, models, pull, info, demo)
EXIT_ENGINE = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


def build_parser(commands: Sequence[ModuleType] = COMMANDS) -> argparse.ArgumentParser:
    parser = CommandParser(prog="ratoon", description="An inference engine for language models.")
    parser.add_argument("--version", action="version", version=f"ratoon {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        command.add_parser(subparsers)
    return parser


def parse_arguments(argv: Sequence[str] | None, commands: Sequence[ModuleType] = COMMANDS) -> argparse.Namespace:
    """As argparse does, but prompts may follow options, which argparse reports as unknown arguments."""
    parser = build_parser(commands)
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "prompts"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.prompts += rest
    return args


def main(argv: Sequence[str] | None = None, commands: Sequence[ModuleType] = COMMANDS) -> int:
    args = parse_arguments(argv, commands)
    configure_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print a replacement for characters that the terminal lacks
    debug = args.debug or os.environ.get("RATOON_DEBUG", "0") not in ("", "0")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output closed the pipe (`| head`). Python would fail again while it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return report(in_terms_of_options(error, args))


def report(error: Exception) -> int:
    """Print the error in one line; return the exit code."""
    if isinstance(error, RatoonError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_INPUT if isinstance(error, (RequestError, ConfigError, ModelError)) else EXIT_ENGINE
    problem = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: {problem} (unexpected; --debug shows where)", file=sys.stderr)
    return EXIT_ENGINE
