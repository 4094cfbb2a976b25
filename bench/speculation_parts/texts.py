"""Conversations to generate from. Every round has texts of its own, with other names in them, so that what an engine
has kept of an earlier round does not help in the next one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, TypeAlias

from ratoon.scheduling.drafters.ngrams import NgramIndex

Messages: TypeAlias = list[dict[str, str]]

SESSION_FILE = Path(__file__).with_name("agent_session.json")
THINGS = (
    "parcel", "ticket", "recipe", "lesson", "invoice", "booking", "song", "plant", "device", "letter", "meal", "tool"
)  # fmt: skip
TOPICS = (
    "why the sky is blue", "how bread rises", "what a glacier is", "how a bicycle stays upright", "what causes tides",
    "why leaves change colour", "how a refrigerator works", "how bees find flowers", "why glass is transparent",
    "how a piano makes sound", "what a black hole is", "how vaccines work", "why ice floats", "how maps are made",
    "what inflation is", "how a camera lens works", "why we dream", "how rivers shape valleys", "what a fossil is",
    "how a violin is built", "why metals rust", "how birds migrate", "what a volcano is", "how paper is made",
)  # fmt: skip

FILE = '''"""Keeps {thing}s by their number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

MAX_{THING}S = 100


@dataclass
class {Thing}:
    number: int
    title: str
    price: float = 0.0
    labels: list[str] = field(default_factory=list)

    def matches(self, word: str) -> bool:
        word = word.lower()
        return word in self.title.lower() or any(word in label.lower() for label in self.labels)


class {Thing}Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.{thing}s: dict[int, {Thing}] = {{}}

    def add(self, {thing}: {Thing}) -> None:
        if len(self.{thing}s) >= MAX_{THING}S:
            raise ValueError("the store is full")
        self.{thing}s[{thing}.number] = {thing}

    def remove(self, number: int) -> {Thing}:
        return self.{thing}s.pop(number)

    def find(self, word: str) -> list[{Thing}]:
        return [one for one in self.{thing}s.values() if one.matches(word)]

    def total(self) -> float:
        return sum(one.price for one in self.{thing}s.values())

    def save(self) -> None:
        rows = [vars(one) for one in self.{thing}s.values()]
        self.path.write_text(json.dumps(rows, indent=2))
'''
EDITS = """Rewrite this file with three changes, and nothing else: raise MAX_{THING}S to 250, rename the method `find` \
to `search`, and let `total` round its result to two digits. Answer with the whole file.

```python
{file}```"""
FENCE = "```python\n"  # the answer begins with this

SYSTEM = """You are a coding agent. You work on one file and answer with the whole file in a Python block when you \
change it. After each answer you get the result of a tool: the tests, the type checker, or a reviewer's wish."""
TASK = """This is the module of {thing}s. Begin with a method `cheapest` of the store that returns the {thing} \
of lowest price.

```python
{file}```"""
RESULTS = (
    "tool: pytest\n14 passed in 0.31s\n\nreviewer: `remove` should raise KeyError with a message that has the number.",
    "tool: mypy\nSuccess: no issues found in 1 source file\n\nreviewer: add a method `load` that reads what was saved.",
    "tool: pytest\n15 passed, 1 failed in 0.35s\nFAILED test_load: labels are missing\n\nMake `load` robust.",
    "tool: pytest\n16 passed in 0.33s\n\nreviewer: the limit MAX_{THING}S should be an argument of the store.",
    "tool: ruff\nAll checks passed!\n\nreviewer: `find` should also take a highest price, which may be left out.",
    "tool: pytest\n17 passed in 0.36s\n\nreviewer: sort what `find` returns by price.",
    "tool: mypy\nerror: returning Any from `cheapest`\n\nGive it an exact return type.",
    "tool: pytest\n17 passed in 0.34s\n\nreviewer: write a docstring of one line for every method.",
    "tool: ruff\nAll checks passed!\n\nreviewer: `total` should take a tax rate, 0 by default.",
)


def names_of(thing: str) -> dict[str, str]:
    return {"thing": thing, "Thing": thing.capitalize(), "THING": thing.upper()}


def thing_of_round(index: int) -> str:
    return THINGS[index % len(THINGS)] + ("" if index < len(THINGS) else f"{index // len(THINGS)}")


def rewriting(index: int) -> Messages:
    names = names_of(thing_of_round(index))
    return [{"role": "user", "content": EDITS.format(file=FILE.format(**names), **names)}]


def begun_rewriting(index: int) -> tuple[Messages, str]:
    """Returns the same task, and an answer that is begun: the new file up to behind the first change."""
    names = names_of(thing_of_round(index))
    head, _, _ = FILE.format(**names).partition("class ")
    return rewriting(index), FENCE + head.replace("S = 100", "S = 250")


def questions(index: int, number: int) -> list[Messages]:
    """Returns questions without anything to repeat; those of different rounds are different."""
    rng = random.Random(index)
    return [
        [{"role": "user", "content": f"Explain {topic} to a {rng.choice(THINGS)} maker, in a few sentences."}]
        for topic in rng.sample(TOPICS, number)
    ]


def share_of_repeats(prompt: list[int], answer: list[int], least: int = 3, most: int = 16) -> float:
    """Returns the share of an answer's tokens that came before behind the longest match of so many tokens: those that
    prompt lookup guesses."""
    tokens, num_guessed = prompt.copy(), 0
    index = NgramIndex(tokens, least, most)
    for token in answer:
        index.extend(len(tokens))
        position, _ = index.find(tokens)
        num_guessed += position >= 0 and tokens[position] == token
        tokens.append(token)
    return num_guessed / max(len(answer), 1)


def session_texts(thing: str) -> list[str]:
    """Returns what the agent gets before each of its ten turns."""
    names = names_of(thing)
    return [TASK.format(file=FILE.format(**names), **names), *(text.format(**names) for text in RESULTS)]


def read_session(index: int) -> list[Messages]:
    """Returns the conversation before each turn of the recorded session, with the names of this round."""
    recorded: dict[str, Any] = json.loads(SESSION_FILE.read_text(encoding="utf-8"))
    old, new = names_of(recorded["thing"]), names_of(thing_of_round(index))
    messages, turns = [{"role": "system", "content": SYSTEM}], []
    for text, answer in zip(session_texts(recorded["thing"]), recorded["answers"], strict=True):
        messages = [*messages, {"role": "user", "content": text}]
        turns.append(messages)
        messages = [*messages, {"role": "assistant", "content": answer}]
    renamed = json.dumps(turns)
    for form in ("Thing", "THING", "thing"):
        renamed = renamed.replace(old[form], new[form])
    found: list[Messages] = json.loads(renamed)
    return found
