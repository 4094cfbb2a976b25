"""What is written to a terminal, as opposed to a pipe or a file: colour, lines that break between words, and a
progress bar."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

RED, DIM, PLAIN = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"
TAB = 8
OTHER_WIDTHS = {"W": 2, "F": 2}  # of characters that take two cells


def is_coloured(stream: TextIO) -> bool:
    """Whether a stream is coloured, by the conventions of terminals: NO_COLOR set to anything, or TERM=dumb, means no
    colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_error(message: str) -> None:
    """One line on standard error."""
    mark = f"{RED}error:{PLAIN}" if is_coloured(sys.stderr) else "error:"
    print(f"{mark} {' '.join(message.split())}", file=sys.stderr)


class WordWriter:
    """Writes text as it comes and breaks lines between words. A word that turns out to be too long for the rest of its
    line is taken back and written on the next one.

    The last cell of a line is left empty: terminals differ in where the cursor is once that is filled.
    """

    def __init__(self, stream: TextIO, num_columns: int | None = None) -> None:
        """`num_columns`: None is the terminal's, which may change."""
        self._stream = stream
        self._num_columns = num_columns
        self._column = 0
        self._word = ""  # the part of it that is written
        self._word_width = 0

    def write(self, text: str, before: str = "", after: str = "") -> None:
        """`before` and `after` are sequences that take no place, such as colours."""
        width = (self._num_columns or shutil.get_terminal_size().columns) - 1
        self._stream.write(before + "".join(self._placed(character, width) for character in text) + after)
        self._stream.flush()

    def _placed(self, character: str, width: int) -> str:
        """The character, and what must be written before it."""
        if character == "\n":
            self._begin_line()
            return character
        cells = _num_cells(character, self._column)
        if character.isspace():
            self._word, self._word_width = "", 0
            if self._column + cells > width:  # the break takes its place
                self._begin_line()
                return "\n"
            self._column += cells
            return character
        moved = self._break_before() if self._column + cells > width else ""
        self._column += cells
        # A line may break after each character of a script without spaces.
        is_part = cells < 2
        self._word = self._word + character if is_part else ""
        self._word_width = self._word_width + cells if is_part else 0
        return moved + character

    def _break_before(self) -> str:
        """Begin a line with the word so far. A word that fills a line is broken."""
        word, width, is_whole_line = self._word, self._word_width, self._word_width >= self._column
        self._begin_line()
        if not word or is_whole_line:
            return "\n"
        self._word, self._word_width, self._column = word, width, width
        return f"\x1b[{width}D\x1b[K\n{word}"

    def _begin_line(self) -> None:
        self._column = 0
        self._word, self._word_width = "", 0


def _num_cells(character: str, column: int) -> int:
    if character == "\t":
        return TAB - column % TAB
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return 0
    return OTHER_WIDTHS.get(unicodedata.east_asian_width(character), 1)


# ---- progress ----

Advance = Callable[[int, int], None]  # (requests that ended, tokens they have)


@contextmanager
def request_progress(num_requests: int, wanted: bool, label: str = "requests") -> Iterator[Advance]:
    """Yields a function to call when requests end. In a pipe, or if not wanted, that function does nothing."""
    if not wanted or not sys.stderr.isatty():
        yield lambda num_requests, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin = time.monotonic()
    num_tokens_so_far = 0
    with bar:
        task = bar.add_task(label, total=num_requests, speed="")

        def advance(num_ended: int, num_tokens: int) -> None:
            nonlocal num_tokens_so_far
            num_tokens_so_far += num_tokens
            seconds = max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=num_ended, speed=f"{num_tokens_so_far / seconds:.0f} tok/s")

        yield advance
