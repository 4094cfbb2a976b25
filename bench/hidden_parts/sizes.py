"""How much of everything, and the words that all parts use."""

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

    before: int = 1000  # the finished request, and the text of which all positions are read
    repeats: int = 9  # readings of the last token in a round: they are short
    decode_tokens: int = 21  # the first ends the prefill of a suffix, the others say what a step takes
    requests: int = 32  # at once, for the throughput
    input: int = 128
    shortest_output: int = 32  # answers end one by one, so that states are read while others are generated
    longest_output: int = 96
    shares: tuple[int, ...] = (0, 20, 100)  # per cent of the requests that ask for their states
    idle_before: int = 16  # short, so that whatever a step has to do beside the model shows
    idle_tokens: int = 129

    @property
    def outputs(self) -> list[int]:
        """Tokens of each answer, spread evenly."""
        span = self.longest_output - self.shortest_output
        return [self.shortest_output + span * index // max(self.requests - 1, 1) for index in range(self.requests)]


QUICK = Sizes(
    before=40, repeats=2, decode_tokens=4, requests=5, input=8, shortest_output=2, longest_output=6, idle_tokens=5
)  # does it work at all? says nothing about speed
