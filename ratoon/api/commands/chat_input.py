"""Reads what a user says in `ratoon chat`: a message, which may have several lines, or a command.

On a terminal an editor reads it (prompt_toolkit): pasted lines are one message, Alt-Enter begins a new line. In a pipe
a line is a message. In both, three double quotes open a message that ends with the next three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
CONTINUATION = ". "
QUOTES = '"""'


class Entry(NamedTuple):
    text: str
    is_command: bool = False  # such as /help


def read_entry(read_text: Callable[[], str]) -> Entry | None:
    """What comes next; None at the end of input. Ctrl-C discards the input; the program goes on."""
    try:
        return parse_entry(read_text())
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /exit leaves)")
        return Entry("")


def parse_entry(typed: str) -> Entry:
    """A text in quotes, or of several lines, is never a command."""
    text = typed.strip()
    if text.startswith(QUOTES):
        return Entry(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
    return Entry(text, is_command=text.startswith("/") and "\n" not in text)


def is_open(typed: str) -> bool:
    """Quotes were opened, and not closed yet."""
    text = typed.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def read_lines() -> str:
    """A line of standard input, or the lines up to closing quotes. EOFError at its end."""
    text = input()
    while is_open(text):
        try:
            text += "\n" + input()
        except EOFError:
            break
    return text


def terminal_reader() -> Callable[[], str]:
    """Reads from the terminal, with line editing and a history."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        PROMPT, multiline=True, prompt_continuation=CONTINUATION, key_bindings=_key_bindings()
    )
    return session.prompt


def _key_bindings() -> KeyBindings:
    """Enter sends, unless quotes are open; Alt-Enter does not. Pasted line breaks are text, as they are by default."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")  # what terminals send for Alt-Enter
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
