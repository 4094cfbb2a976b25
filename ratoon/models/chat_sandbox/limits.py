"""The limits of one render, what it has used of them, and the measuring of values before they are walked.

Knows nothing of Jinja. The guards ask `current_budget()`, which belongs to the render that runs in this thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import thread_time
from typing import Any, NamedTuple

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_TEMPLATE_TOKENS = 20_000  # words and signs of its program; they take the time when it is compiled
MAX_SECONDS = 2.0
MAX_STEPS = 2_000_000  # loop bodies and calls, each counted with what it can make
MAX_OUTPUT_CHARACTERS = 8 * 2**20
MAX_TEXT_CHARACTERS = 8 * 2**20  # of one text
MAX_ENTRIES = 1_000_000  # of one list, and of all that a nested value holds
MAX_DEPTH = 100  # of lists in lists
MAX_MADE_CHARACTERS = 64 * 2**20  # of all texts and lists together, also those that were dropped again
MAX_INTEGER_BITS = 4096
MAX_FORMAT_DIGITS = 4  # of a width or a precision
MAX_SMALL_CHARACTERS = 64 * 1024  # for what takes more than linear time
MAX_SEARCH_STEPS = 2**28  # length of a text times length of what is searched, where Python compares them naively

SHORT_TEXT = 1024  # made by an expression, it is not worth counting; the steps bound how many there are
STEPS_BETWEEN_LOOKS = 100  # asking for the time takes about as long as a few steps
ENTRY_COST = 16  # an entry of a list, in characters
CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class LimitReached(Exception):
    """The template goes over a limit, which the text names. No ValueError: Jinja's filters swallow those."""


class RenderBudget:
    """What one render may still spend."""

    __slots__ = ("_start", "made", "next_look", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.made = 0
        self.next_look = 0
        self._start = thread_time()

    def step(self, cost: int = 1) -> None:
        self.steps += cost
        if self.steps > self.next_look:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Counts the time of this thread: a render that waits for a busy machine is not to blame for that."""
        self.next_look = self.steps + STEPS_BETWEEN_LOOKS
        if self.steps > MAX_STEPS:
            raise LimitReached(f"takes more than {MAX_STEPS} steps")
        if thread_time() - self._start > MAX_SECONDS:
            raise LimitReached(f"takes more than {MAX_SECONDS:g} seconds")

    def make_text(self, characters: int) -> None:
        """To be called before a text of this length is made."""
        if characters > MAX_TEXT_CHARACTERS:
            raise LimitReached(f"makes a text of more than {MAX_TEXT_CHARACTERS} characters")
        self.charge(characters)

    def make_entries(self, entries: int) -> None:
        """To be called before a list of this length is made."""
        if entries > MAX_ENTRIES:
            raise LimitReached(f"makes a list of more than {MAX_ENTRIES} entries")
        self.charge((entries + 4) * ENTRY_COST)

    def charge(self, characters: int) -> None:
        self.made += characters
        if self.made > MAX_MADE_CHARACTERS:
            raise LimitReached(f"makes texts and lists of more than {MAX_MADE_CHARACTERS} characters in all")
        self.steps += 1
        if characters > SHORT_TEXT:
            self.look_at_clock()


_budget: ContextVar[RenderBudget] = ContextVar("chat_template_budget")
current_budget = _budget.get


@contextmanager
def new_budget() -> Iterator[RenderBudget]:
    budget = RenderBudget()
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


class Extent(NamedTuple):
    """The size of a value as a walk over it sees it: a part that appears twice counts twice."""

    nodes: int
    characters: int
    depth: int


def measure(value: Any) -> Extent:
    """To be called before a value is printed, compared or hashed, all of which walk it in one go. Stops at a limit."""
    nodes = characters = depth = 0
    level = [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise LimitReached(f"uses a value that is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, CONTAINERS):
                nodes += len(item)
                if nodes > MAX_ENTRIES:
                    raise LimitReached(f"uses a value of more than {MAX_ENTRIES} entries")
                below.extend(item)
                if isinstance(item, dict):
                    below.extend(item.values())
        level = below
    if characters > MAX_TEXT_CHARACTERS:
        raise LimitReached(f"uses a value of more than {MAX_TEXT_CHARACTERS} characters")
    budget = current_budget()
    budget.step() if nodes + characters < SHORT_TEXT else budget.look_at_clock()
    return Extent(nodes + 1, characters, depth)
