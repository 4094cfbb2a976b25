"""What a terminal shows: words are not broken, and errors have a colour where there are colours."""

from __future__ import annotations

import io
import re
import sys
from random import Random

import pytest

from ratoon.api.commands.chat_answerers import PrintedAnswer
from ratoon.api.terminal import WordWriter, print_error


class Screen(io.StringIO):
    """Keeps the lines that a terminal of 12 columns would show; it knows the sequences that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for piece in re.findall(r"\x1b\[\d*[A-Zm]|\x1b\[[\d;]*m|.", text, re.DOTALL):
            if piece.endswith("D") and piece.startswith("\x1b"):
                num_back = int(piece[2:-1])
                assert num_back <= len(self.lines[-1])
                self._kept = len(self.lines[-1]) - num_back
            elif piece == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self._kept]
            elif piece == "\n":
                self.lines.append("")
            elif not piece.startswith("\x1b"):
                self.lines[-1] += piece
                assert len(self.lines[-1]) < 12
        return len(text)


@pytest.mark.parametrize("seed", range(20))
def test_lines_break_between_words_however_the_text_comes(seed):
    random = Random(seed)
    words = ["".join(random.choices("abcdefgh", k=random.randint(1, 11))) for _ in range(30)]
    text = "".join(word + random.choice([" ", " ", " ", "\n"]) for word in words)
    screen = Screen()
    writer = WordWriter(screen, 12)
    while text:
        size = random.randint(1, 6)
        writer.write(text[:size])
        text = text[size:]
    assert " ".join(screen.lines).split() == words  # none is broken
    assert max(map(len, screen.lines)) <= 11


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("aaaa bbbb cccc", ["aaaa bbbb ", "cccc"]),
        ("a" * 25, ["a" * 11, "a" * 11, "aaa"]),
        ("aaaaa bbbbb c", ["aaaaa bbbbb", "c"]),
        ("a\n\n  b", ["a", "", "  b"]),
    ],
)
def test_long_words_and_full_lines(text, lines):
    screen = Screen()
    writer = WordWriter(screen, 12)
    for character in text:
        writer.write(character)
    assert screen.lines == lines


def test_wide_characters_take_two_cells():
    out = io.StringIO()
    WordWriter(out, 8).write("日本語日本語")
    assert out.getvalue() == "日本語\n日本語"


def test_answers_of_a_chat_break_between_words(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.delenv("NO_COLOR", raising=False)
    answer = PrintedAnswer()
    for piece in ("Hmm, think", "ing hard"):
        answer.add_reasoning(piece)
    for piece in ("The cap", "ital", " of Fran", "ce is Paris."):
        answer.add(piece)
    assert screen.lines == ["Hmm, ", "thinking ", "hard", "", "The capital", "of France ", "is Paris."]
    assert answer.text == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("is_terminal", "variables", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_errors_are_red_on_a_terminal_with_colours(monkeypatch, is_terminal, variables, coloured):
    stream = Screen() if is_terminal else io.StringIO()
    written = []
    monkeypatch.setattr(stream, "write", written.append)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    print_error("something\nis wrong")
    mark = "\x1b[1;31merror:\x1b[0m" if coloured else "error:"
    assert "".join(written) == f"{mark} something is wrong\n"


@pytest.mark.parametrize("has_reasoning", [False, True])
def test_answers_are_written_to_the_output_that_is_there_when_they_begin(has_reasoning, monkeypatch):
    """While `ratoon chat` waits, a spinner is standard output, and makes a line of each piece that is written to it."""
    spinner, screen = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", spinner)
    monkeypatch.setenv("COLUMNS", "12")
    answer = PrintedAnswer(on_first=lambda: monkeypatch.setattr(sys, "stdout", screen))
    if has_reasoning:
        answer.add_reasoning("Hm.")
    for piece in ("The cap", "ital", " of Fran", "ce is Paris."):
        answer.add(piece)
    assert spinner.lines == [""]
    assert screen.lines[-3:] == ["The capital", "of France ", "is Paris."]
