"""The tree of `ratoon chat`: branches, alternatives, the drawing and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratoon.api.chat_tree import ConversationTree
from ratoon.api.commands.chat import Conversation, parse_entry
from ratoon.api.commands.chat_answerers import PrintedAnswer


class Numbered:
    """Answers with the number of its answers so far, and notes what it was asked."""

    name = "numbered"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.varied: list[bool] = []

    def answer(self, messages: Any, answer: PrintedAnswer, varies: bool = False) -> None:
        self.asked.append([message["content"] for message in messages])
        self.varied.append(varies)
        answer.add(f"answer {len(self.asked)}")

    def describe_state(self) -> str:
        return ""


def converse(*lines: str) -> Numbered:
    answerer = Numbered()
    conversation = Conversation(answerer, "Be brief.")
    for line in lines:
        conversation.handle(parse_entry(line))
    return answerer


def test_a_branch_goes_on_from_any_earlier_message() -> None:
    answerer = converse("first", "second", "/branch 2", "third", "/branch", "fourth")
    assert answerer.asked == [
        ["Be brief.", "first"],
        ["Be brief.", "first", "answer 1", "second"],
        ["Be brief.", "first", "answer 1", "third"],
        ["Be brief.", "first", "answer 1", "fourth"],
    ]


def test_a_branch_from_a_message_of_the_user_answers_it_again() -> None:
    answerer = converse("first", "/branch 1", "next")
    assert answerer.asked[1:] == [["Be brief.", "first"], ["Be brief.", "first", "answer 2", "next"]]
    assert answerer.varied == [False, True, False], "else the further answer could be the first one again"


def test_a_branch_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    converse("one\ntwo " + "word " * 40, "/branch 2", "/branch")
    *_, at, back = capsys.readouterr().out.splitlines()
    assert at == "(from message 2: answer 1)"
    assert back.startswith("(from the beginning, before: one two word") and len(back) < 100 and back.endswith("…)")


def test_alternatives_are_sampled_answers_to_the_same_message() -> None:
    answerer = converse("first", "/alternatives 2", "next")
    assert answerer.varied == [False, True, True, False]
    assert answerer.asked[1] == answerer.asked[2] == ["Be brief.", "first"]
    assert answerer.asked[3] == ["Be brief.", "first", "answer 3", "next"]


def test_the_tree_is_drawn_with_numbers_and_the_current_way(capsys: pytest.CaptureFixture[str]) -> None:
    converse("first", "/alternatives", "next", "/branch 2", "/tree")
    shown = capsys.readouterr().out
    assert shown.endswith(
        "* " + " 1 user: first\n▶     2 assistant: answer 1\n      3 assistant: answer 2\n      4 user: next\n"
        "      5 assistant: answer 3\n"
    )


def test_the_tree_is_saved_with_the_current_conversation(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    converse("first", "/alternatives", f"/save {file}")
    saved = json.loads(file.read_text())
    assert saved["model"] == "numbered"
    assert [message["content"] for message in saved["messages"]] == ["Be brief.", "first", "answer 2"]
    assert [(node["number"], node["parent"], node["content"]) for node in saved["tree"]] == [
        (1, None, "first"), (2, 1, "answer 1"), (3, 1, "answer 2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/branch 9", "there is no message 9; /tree shows their numbers"),
        ("/branch x", "there is no message x"),
        ("/branch", "there is no message to go back from"),
        ("/alternatives", "there is no message to answer"),
        ("/tree", "there is no message yet"),
        ("/save", "/save FILE"),
    ],
)
def test_what_can_not_be_done_is_said(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    converse(line)
    assert told in capsys.readouterr().out


def test_a_file_that_can_not_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converse("first", f"/save {tmp_path}/none/tree.json")
    assert "can't be written: No such file or directory" in capsys.readouterr().err


def test_what_failed_leaves_no_trace() -> None:
    tree = ConversationTree([{"role": "system", "content": "s"}])
    tree.add({"role": "user", "content": "a"})
    tree.drop_current()
    assert len(tree) == 0 and tree.current is None and [one["role"] for one in tree.messages] == ["system"]
