"""What `ratoon chat` reads: typed, pasted and piped. The editor runs on keys from a pipe, without a terminal."""

from __future__ import annotations

import io

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from ratoon.api.commands.chat import Entry, is_open, parse_entry, read_entry, read_lines, terminal_reader

ALT_ENTER = "\x1b\r"


def paste(text: str) -> str:
    """As terminals send what is pasted: between marks, with carriage returns."""
    return "\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~"


def entries(keys: str) -> list[Entry]:
    """What is read of these keys until they end."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys + "\x04")
        read_text = terminal_reader()
        found = []
        while (entry := read_entry(read_text)) is not None:
            found.append(entry)
        return found


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ("one\rtwo\r", ["one", "two"]),
        (paste("one\ntwo\n\nthree") + "\r", ["one\ntwo\n\nthree"]),
        ("see " + paste("a\nb") + " there\r", ["see a\nb there"]),
        (f"one{ALT_ENTER}two\r", ["one\ntwo"]),
        ('"""one\rtwo\r"""\r', ["one\ntwo"]),
        ('"""\rone\r"""\rnext\r', ["one", "next"]),
    ],
    ids=["lines", "paste", "paste inside", "alt-enter", "quotes", "quotes alone on a line"],
)
def test_a_message_may_have_several_lines(keys: str, texts: list[str]) -> None:
    assert [entry.text for entry in entries(keys)] == texts


def test_a_command_is_one_line_that_nobody_quoted() -> None:
    assert entries("/help\r") == [Entry("/help", is_command=True)]
    assert not any(entry.is_command for entry in entries('"""/help"""\r' + paste("/usr/bin\n/bin") + "\r"))


def test_ctrl_c_gives_up_what_was_typed(capsys) -> None:
    assert entries("half a mess\x03whole\r") == [Entry(""), Entry("whole")]
    assert "/exit" in capsys.readouterr().out


def test_in_a_pipe_a_line_is_a_message_and_quotes_join_lines(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('one\n"""two\nthree"""\n/stats\n"""four\nfive'))
    read = [read_entry(read_lines) for _ in range(5)]
    assert read == [Entry("one"), Entry("two\nthree"), Entry("/stats", True), Entry("four\nfive"), None]


@pytest.mark.parametrize("text", ['"""', '"""a', '"""a\n""', '""""', '"""a\n""" b'])
def test_quotes_that_are_open(text: str) -> None:
    assert is_open(text)


@pytest.mark.parametrize("text", ["", "a", '""""""', '"""a"""', '"""a\n"""', 'say """ this'])
def test_quotes_that_are_not(text: str) -> None:
    assert not is_open(text)
    assert parse_entry('"""\n  indented\n"""').text == "  indented"
