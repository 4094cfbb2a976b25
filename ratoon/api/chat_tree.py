"""A conversation as a tree: every message is a node, and what is asked next continues the current one.

Another answer to the same message, and another message after the same answer, are branches. Data only: `ratoon chat`
prints it, and the engine's prefix cache keeps what branches share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # its content may be a list of parts
LONGEST_LINE = 60  # characters of a message in the drawing


@dataclass
class Node:
    number: int  # from 1, in the order in which they came
    message: Message
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        before = [] if self.parent is None else self.parent.path()
        return [*before, self]


class ConversationTree:
    def __init__(self, opening: Sequence[Message] = ()) -> None:
        """`opening` are messages before all branches: that of the system."""
        self._opening = list(opening)
        self._roots: list[Node] = []
        self._nodes: dict[int, Node] = {}
        self._next_number = 1
        self.current: Node | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the current message, as the model gets it."""
        return [*self._opening, *([] if self.current is None else [node.message for node in self.current.path()])]

    def add(self, message: Message) -> Node:
        node = Node(self._next_number, message, self.current)
        self._next_number += 1
        self._nodes[node.number] = node
        self._siblings(node).append(node)
        self.current = node
        return node

    def drop_current(self) -> None:
        """Takes the current message back, which has none behind it."""
        node = self.current
        assert node is not None and not node.children
        self._siblings(node).remove(node)
        del self._nodes[node.number]
        self.current = node.parent

    def find(self, number: int) -> Node | None:
        return self._nodes.get(number)

    def step_back(self) -> Node | None:
        """Goes to where the last message of the user was written, so that the next one is another branch. Returns that
        message; None: there is none."""
        node = self.current
        while node is not None and node.message["role"] != "user":
            node = node.parent
        if node is not None:
            self.current = node.parent
        return node

    def _siblings(self, node: Node) -> list[Node]:
        return self._roots if node.parent is None else node.parent.children

    # ---- drawing and saving ----

    def draw(self) -> Iterator[str]:
        """Yields a line for each message. A message that is the only one behind another is not indented further; the
        current one is marked."""
        current = [] if self.current is None else self.current.path()
        yield from self._draw(self._roots, "", current)

    def _draw(self, nodes: list[Node], indent: str, current: list[Node]) -> Iterator[str]:
        for node in nodes:
            mark = "▶" if self.current is node else "*" if node in current else " "
            yield f"{mark} {indent}{node.number:>2} {node.message['role']}: {line_of(node.message)}"
            deeper = indent + "   " if len(node.children) > 1 else indent
            yield from self._draw(node.children, deeper, current)

    def as_data(self) -> list[dict[str, Any]]:
        """Returns all messages with their numbers and those of the messages before them."""
        return [
            {"number": node.number, "parent": None if node.parent is None else node.parent.number, **node.message}
            for node in self._nodes.values()
        ]


def text_of(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", f"[{part.get('type')}]") for part in content)


def line_of(message: Message) -> str:
    """A message as one line, cut where it is long."""
    line = " ".join(text_of(message).split())
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"
