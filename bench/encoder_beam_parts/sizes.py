"""How much of everything, and the words that all modules use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from peers.process import EngineProcess

Say: TypeAlias = Callable[[str], None]
Engines: TypeAlias = dict[str, EngineProcess]  # by name, as in the table


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    input: int = 512  # of the encoder
    tokens: int = 32  # of an answer
    width: int = 5
    full_models: bool = True  # or tiny ones


QUICK = Sizes(input=20, tokens=4, width=3, full_models=False)  # does it work at all? says nothing about speed
