"""The parser of the command line: argparse, with a suggestion for misspelt words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ratoon.core.suggestions import did_you_mean

OPTION = re.compile(r"--[a-z][\w-]*")
INVALID_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """argparse makes subparsers of the class of their parent, so that each command answers for its own options. A
    description of several paragraphs keeps its line breaks."""

    def __init__(self, **options: Any) -> None:
        if "\n\n" in (options.get("description") or ""):
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def parse_known_args(  # type: ignore[override]  # argparse declares it by overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        unknown = [word for word in rest if word.startswith("-") and word != "-"]
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            meant = did_you_mean(unknown[0].split("=")[0], self._long_options())
            self.error(f"{message}; {meant}" if meant else message)
        return found, rest

    def error(self, message: str) -> NoReturn:
        wrong = INVALID_CHOICE.search(message)
        if wrong is not None:
            choices = [choice.strip(" '") for choice in wrong["choices"].split(",")]
            meant = did_you_mean(wrong["word"], choices)
            message += f"; {meant}" if meant else ""
        super().error(message)

    def _long_options(self) -> list[str]:
        return list(dict.fromkeys(OPTION.findall(self.format_usage())))
