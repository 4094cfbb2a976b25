"""The models of a server that has several: what each holds of the memory budget, and which one is put away first.

Data and rules only: time is an argument, and nothing is loaded here (model_host.py does that).
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ratoon.core.errors import ConfigError

FOREVER = math.inf
LEAST_KV_MEMORY = 64 * 2**20  # of a model whose weights take its share of the budget


class ModelState(enum.StrEnum):
    UNLOADED = "unloaded"  # it has no process
    LOADING = "loading"  # or waking up, or waiting for memory
    LOADED = "loaded"
    ASLEEP = "asleep"  # its process is there, and has freed memory


class SleepLevel(enum.IntEnum):
    AWAKE = 0
    WITHOUT_KV = 1  # the KV cache is freed
    WITHOUT_WEIGHTS = 2  # the weights are freed as well


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that a model takes when it is loaded."""

    weights: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv

    def at(self, level: SleepLevel) -> int:
        return (self.total, self.weights, 0)[level]


@dataclass
class Claim:
    """What the rules need to know of a model."""

    name: str
    memory: ModelMemory = field(default_factory=ModelMemory)  # an estimate, until it was loaded once
    level: SleepLevel | None = None  # None: it holds no memory, because it has no process
    last_used: float = 0.0

    @property
    def held(self) -> int:
        return 0 if self.level is None else self.memory.at(self.level)


class PutAway(NamedTuple):
    claim: Claim
    level: SleepLevel


def room_for(needed: int, claims: Sequence[Claim], idle: Sequence[Claim], budget: float) -> list[PutAway] | None:
    """Returns what has to be put away so that `needed` further bytes fit into the budget: of the least recently used
    idle model first the KV cache, then the weights, then those of the next one. None: all idle ones are not enough."""
    excess = sum(claim.held for claim in claims) + needed - budget
    steps: list[PutAway] = []
    for claim in sorted(idle, key=lambda one: one.last_used):
        if excess <= 0:
            break
        held, chosen = claim.held, None
        for level in (SleepLevel.WITHOUT_KV, SleepLevel.WITHOUT_WEIGHTS):
            if claim.level is not None and level > claim.level and claim.memory.at(level) < held:
                chosen = level
                if excess - (held - claim.memory.at(level)) <= 0:
                    break
        if chosen is not None:
            steps.append(PutAway(claim, chosen))
            excess -= held - claim.memory.at(chosen)
    return steps if excess <= 0 else None


def kv_share(weights: int, num_models: int, budget: int) -> int:
    """Returns the memory for the KV cache of a model that has no setting for it: what its share of the budget leaves
    beside its weights, so that all models fit at once if they can."""
    left = budget - weights
    return max(min(max(budget // num_models - weights, LEAST_KV_MEMORY), left), 0)


def parse_keep_alive(value: object, field: str = "keep_alive") -> float:
    """Returns seconds, from a number of them or from text such as 90s, 5m, 1h30m or -1 (forever), as Ollama writes
    it. ConfigError for anything else."""
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = _duration(value.strip())
    if seconds is None or math.isnan(seconds):
        raise ConfigError(field, f"{value!r} is not a duration", "seconds, or text such as 90s, 5m or 1h; -1: forever")
    return FOREVER if seconds < 0 else seconds


UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(text: str) -> float | None:
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d+(\.\d+)?", digits):
        return sign * float(digits)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        return None
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
