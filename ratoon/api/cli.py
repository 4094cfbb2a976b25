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
    remove,
    rerank,
    serve,
    served,
    transcribe,
)
from ratoon.api.options import in_terms_of_options
from ratoon.api.parser import EXIT_INPUT, CommandParser
from ratoon.api.terminal import print_error
from ratoon.core.errors import ConfigError, ModelError, RatoonError, RequestError
from ratoon.observe.logging import configure_logging
from ratoon.version import __version__

COMMANDS = (
    generate, chat, complete, embed, rerank, hidden_states, transcribe, serve, served, models, pull, remove, info, demo,
)  # fmt: skip
# Commands of Ollama and others: those that a command here does, and what to do instead of the rest.
SYNONYMS = {"list": "models", "ls": "models", "show": "info"}
ELSEWHERE = {
    "run": "`ratoon chat MODEL` talks with a model, `ratoon generate MODEL PROMPT` answers a prompt",
    "version": "`ratoon --version` prints it",
}
SEVERAL = ("prompts", "models")  # arguments of which there may be any number
EXIT_ENGINE = 1
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
    """Parses arguments as argparse does, but prompts and models may follow options, which argparse reports as unknown
    arguments."""
    parser = build_parser(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        sys.exit(EXIT_INPUT)
    args, rest = parser.parse_known_args(in_our_commands(words))
    several = next((name for name in SEVERAL if hasattr(args, name)), None)
    if rest and several is None:
        parser.error(f"{rest[0]!r} is one argument too many")
    if rest and several is not None:
        setattr(args, several, getattr(args, several) + rest)
    return args


def in_our_commands(words: list[str]) -> list[str]:
    """The command line, where it began with a command of another program. Ends the program with what to do instead,
    where no command does the same."""
    first = words[0]
    if first == "help":
        return [*words[1:2], "--help"]
    if first in ELSEWHERE:
        print_error(f"{first!r} is no command of `ratoon`; {ELSEWHERE[first]}")
        sys.exit(EXIT_INPUT)
    return [SYNONYMS.get(first, first), *words[1:]]


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
        print_error(str(error))
        return EXIT_INPUT if isinstance(error, (RequestError, ConfigError, ModelError)) else EXIT_ENGINE
    print_error(f"{type(error).__name__}: {error} (unexpected; --debug shows where)")
    return EXIT_ENGINE
