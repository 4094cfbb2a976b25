"""How much of everything, and the words that both parts use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from peers.process import EngineProcess

Say: TypeAlias = Callable[[str], None]
Engines: TypeAlias = dict[str, EngineProcess]  # by name, as in the table


@dataclass(frozen=True)
class Sizes:
    clips: int = 8  # at once
    longest_start: float = 1.0  # seconds of the recording that a clip leaves out at its start, at most
    longest_end: float = 2.5  # and at its end
    tokens: int = 60  # of an answer, at most
    step_tokens: int = 33  # the first tells what comes before decode steps, the others what a step takes


QUICK = Sizes(clips=2, tokens=4, step_tokens=3)  # does it work at all? says nothing about speed
