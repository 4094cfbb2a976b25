"""The errors that reach people. Each says what was wrong, where, and what would be right.

An error belongs to whoever can act on it: a RequestError to the sender of one request, a ModelError to whoever named
the model, a ConfigError to whoever started the engine. Nothing else may be disturbed by any of them.
"""

from __future__ import annotations


class RatoonError(Exception):
    """Base of every error that Ratoon raises on purpose."""


class RequestError(RatoonError, ValueError):
    """One request asks for something that can't be done. `field` names the part of the request that is wrong."""

    def __init__(self, field: str, problem: str, expected: str = "") -> None:
        self.field = field
        self.problem = problem
        self.expected = expected
        super().__init__(f"{field}: {problem}" + (f"; {expected}" if expected else ""))


class ConfigError(RatoonError, ValueError):
    """The engine can't be built as asked (sizes, devices, memory). `field` names the setting."""

    def __init__(self, field: str, problem: str, expected: str = "") -> None:
        self.field = field
        self.problem = problem
        self.expected = expected
        super().__init__(f"{field}: {problem}" + (f"; {expected}" if expected else ""))


class ModelError(RatoonError):
    """A model can't be found, read or understood."""

    def __init__(self, source: str, problem: str, expected: str = "") -> None:
        self.source = source
        self.problem = problem
        self.expected = expected
        super().__init__(f"{source}: {problem}" + (f"; {expected}" if expected else ""))


class EngineError(RatoonError):
    """The engine failed while it carried out a step; the requests of that step get this."""
