"""The errors that reach people. Each says what was wrong, where, and what would be right.

An error belongs to whoever can act on it: a RequestError to the sender of one request, a ModelError to whoever named
the model, a ConfigError to whoever started the engine. Nothing else may be disturbed by any of them.
"""

from __future__ import annotations


class RatoonError(Exception):
    """Base of every error that Ratoon raises on purpose."""


class ExplainedError(RatoonError):
    """What is wrong with something that has a name, and what would be right."""

    def __init__(self, subject: str, problem: str, expected: str = "") -> None:
        self.subject = subject
        self.problem = problem
        self.expected = expected
        super().__init__(f"{subject}: {problem}" + (f"; {expected}" if expected else ""))


class RequestError(ExplainedError, ValueError):
    """One request asks for something that can't be done. `field` names the part of the request that is wrong."""

    @property
    def field(self) -> str:
        return self.subject

    def inside(self, outer: str) -> RequestError:
        """The same of a request, or a part of one, that stands in another: `outer.field`."""
        return type(self)(f"{outer}.{self.subject}", self.problem, self.expected)


class UnknownParentError(RequestError):
    """A continuation of a request that does not exist, any more or for this caller."""


class QueueFullError(RequestError):
    """So many requests of this kind wait already that another is turned away: ask later."""


class TooLargeError(RequestError):
    """The answer would be larger than may be asked for."""


class DeadlineError(RequestError):
    """The time that the request allowed itself was over before it was done."""


class ConfigError(ExplainedError, ValueError):
    """The engine can't be built as asked (sizes, devices, memory). `field` names the setting."""

    @property
    def field(self) -> str:
        return self.subject


class ModelError(ExplainedError):
    """A model can't be found, read or understood. `source` names it."""

    @property
    def source(self) -> str:
        return self.subject


class EngineError(RatoonError):
    """The engine failed while it carried out a step; the requests of that step get this."""


class StepSkippedError(EngineError):
    """A step was not carried out, because one before it failed."""


class EngineAwayError(EngineError):
    """The engine process died and is being started again: ask later."""


class EngineDeadError(EngineError):
    """The engine process is gone and could not be brought back. Nothing more will be answered."""
