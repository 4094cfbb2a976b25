"""The parser of the command line: argparse, with a help that fits on a screen and errors of one line.

`--help` shows the options that are used every day, `--help-all` all of them. Which ones are left out of the first is
said where they are added (`leave_out`, `show_everyday`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ratoon.api.terminal import print_error
from ratoon.core.suggestions import did_you_mean

EXIT_INPUT = 2
MAX_WIDTH = 110  # columns of a help
MAX_COMPLETIONS = 4  # options that an error names which begin with what was typed
HELP_COLUMN = 27  # where descriptions begin
SHORT_HELP = 80 - 2 - HELP_COLUMN  # characters of a description
# Messages of argparse, in words of our own
INVALID_CHOICE = re.compile(r"argument (?P<name>.+?): invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)")
INVALID_VALUE = re.compile(r"argument (?P<name>.+?): invalid (?P<kind>\w+) value: (?P<value>.*)", re.DOTALL)
OF_ARGUMENT = re.compile(r"argument (?P<name>.+?): (?P<problem>.*)", re.DOTALL)
REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
# Attributes of argparse's objects, since options are also added to other parsers than CommandParser.
LEFT_OUT = "ratoon_left_out"
EVERYDAY = "ratoon_everyday"
KINDS = {"int": "a whole number", "float": "a number"}


class CommandParser(argparse.ArgumentParser):
    """argparse makes subparsers of the class of their parent, so that each command answers for its own options. A
    description of several paragraphs keeps its line breaks. The beginning of an option's name is no option: it may be
    a typing error, and may mean another one in the next version."""

    def __init__(self, **options: Any) -> None:
        if "\n\n" in (options.get("description") or ""):
            options.setdefault("formatter_class", _RawFormatter)
        fixed = {"add_help": False, "allow_abbrev": False}
        super().__init__(**{"formatter_class": _Formatter, **options, **fixed})
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action=_Print, text=self.everyday_help, help="show this and exit")
        self.add_argument("--help-all", action=_Print, text=self.format_help, help="show all options and exit")

    # ---- help ----

    def everyday_help(self) -> str:
        """Returns the text of `--help`, with a line for each option."""
        shown = self._everyday_actions()
        has_more = len(shown) < len(self._actions) or any(action.help != shown[id(action)] for action in self._actions)
        formatter = self._begin_help()
        for group in self._action_groups:
            formatter.start_section(group.title)
            for action in group._group_actions:
                if id(action) in shown and (has_more or "--help-all" not in action.option_strings):
                    formatter.add_argument(_described(action, shown[id(action)]))
            formatter.end_section()
        if has_more:
            num_options = sum(bool(action.option_strings) for action in self._actions)
            formatter.add_text(f"{self.prog} --help-all shows all {num_options} options.")
        return formatter.format_help()

    def format_help(self) -> str:
        """All of it: what `--help-all` prints."""
        formatter = self._begin_help()
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.everyday_help())

    def format_usage(self) -> str:
        """Formats the usage on one line."""
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage(), [], [])
        return formatter.format_help()

    def _begin_help(self) -> argparse.HelpFormatter:
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage(), [], [])
        formatter.add_text(self.description)
        return formatter

    def _short_usage(self) -> str:
        positionals = [action for action in self._actions if not action.option_strings]
        formatter = self._get_formatter()
        words = [formatter._format_args(action, str(action.metavar or action.dest)) for action in positionals]
        return " ".join([self.prog, "[OPTION ...]", *words]).replace("%", "%%")

    def _everyday_actions(self) -> dict[int, str | None]:
        """Actions that `--help` shows, with their descriptions."""
        shown: dict[int, str | None] = {}
        for group in self._action_groups:
            for action in group._group_actions:
                if hasattr(action, EVERYDAY):
                    shown[id(action)] = getattr(action, EVERYDAY)
                elif not hasattr(action, LEFT_OUT) and not hasattr(group, LEFT_OUT):
                    shown[id(action)] = _beginning(action.help)
        return shown

    # ---- errors ----

    def parse_known_args(  # type: ignore[override]  # argparse declares it by overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        unknown = [word for word in rest if word.startswith("-") and word != "-"]
        if unknown:
            self.refuse_option(unknown[0].split("=")[0])
        return found, rest

    def refuse_option(self, name: str) -> NoReturn:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        meant = _options_meant(name, known) or f"`{self.prog} --help` lists them"
        self._refuse(f"{name} is no option of `{self.prog}`; {meant}")

    def error(self, message: str) -> NoReturn:
        """argparse's own message, in one line."""
        self._refuse(self._in_our_words(message))

    def _refuse(self, message: str) -> NoReturn:
        print_error(message)
        sys.exit(EXIT_INPUT)

    def _in_our_words(self, message: str) -> str:
        if (found := INVALID_CHOICE.fullmatch(message)) is not None:
            choices = [choice.strip(" '") for choice in found["choices"].split(",")]
            meant = did_you_mean(found["word"], choices, f"`{self.prog} --help` lists them")
            if not found["name"].startswith("-"):
                return f"{found['word']!r} is no {found['name'].lower()} of `{self.prog}`; {meant}"
            return f"{_name(found['name'])}: {found['word']!r} is unknown; one of {', '.join(choices)}"
        if (found := INVALID_VALUE.fullmatch(message)) is not None:
            return f"{_name(found['name'])}: {found['value']} is not {KINDS.get(found['kind'], 'valid')}"
        if (found := OF_ARGUMENT.fullmatch(message)) is not None:
            problem = re.sub(r"^expected (.*) arguments?$", r"needs \1 value", found["problem"])
            return f"{_name(found['name'])}: {problem}"
        if (found := REQUIRED.fullmatch(message)) is not None:
            first = found["names"].split(",")[0]
            return f"{first} is missing; {self.format_usage().strip()} (see `{self.prog} --help`)"
        return f"{message} (see `{self.prog} --help`)"


def leave_out(*parts: argparse.Action | argparse._ArgumentGroup) -> None:
    """Leave options, or all options of a group, out of `--help`."""
    for part in parts:
        setattr(part, LEFT_OUT, True)


def show_everyday(action: argparse.Action, help: str) -> None:
    """Show an option of a group that is left out, with a short description."""
    setattr(action, EVERYDAY, help)


class _Print(argparse.Action):
    """Prints a text and ends the program."""

    def __init__(self, *, text: Callable[[], str], **options: Any) -> None:
        super().__init__(**{**options, "nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(self._text())
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns - 2, MAX_WIDTH)
        super().__init__(prog, **{"width": width, **options, "max_help_position": HELP_COLUMN})
        self._action_max_length = 20  # at least: argparse forgets the indentation of subcommands

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """-n, --n N: argparse would write the value behind each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(sorted(action.option_strings, key=len))} {value}"


class _RawFormatter(_Formatter, argparse.RawDescriptionHelpFormatter):
    pass


def _beginning(help: str | None) -> str | None:
    """The first part of a description that is longer than a line."""
    for end in ("; ", " ("):
        if help is not None and len(help) > SHORT_HELP:
            help = help.split(end)[0]
    return help


def _described(action: argparse.Action, help: str | None) -> argparse.Action:
    """Returns the option with another description, and without its further long names."""
    if not action.option_strings:
        return action
    long = next((name for name in action.option_strings if name.startswith("--")), None)
    names = [name for name in action.option_strings if name == long or not name.startswith("--")]
    return argparse.Action(names, action.dest, action.nargs, metavar=action.metavar, help=help)


def _options_meant(name: str, known: Sequence[str]) -> str:
    """Returns a question about the options that begin so or are written nearly so, for the end of an error message.
    Empty: there are none, or many."""
    begin_so = sorted(option for option in known if option.startswith(name))
    if len(begin_so) == 1:
        return f"did you mean {begin_so[0]}?"
    near = did_you_mean(name, known)
    if near or not 1 < len(begin_so) <= MAX_COMPLETIONS:
        return near
    return f"did you mean {', '.join(begin_so[:-1])} or {begin_so[-1]}?"


def _name(argument: str) -> str:
    """The longest way to write an option: argparse writes "-n/--n"."""
    return max(argument.split("/"), key=len)
