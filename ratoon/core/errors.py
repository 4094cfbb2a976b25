"""The errors that users see. Each says what was wrong, where, and what would be right.

An error is reported to the user that can act on it: RequestError to the sender of the request, ModelError and
ConfigError to the operator that started the engine. No other request is affected by any of them.
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
        """Returns this error for a request nested in another: `outer.field`."""
        return type(self)(f"{outer}.{self.subject}", self.problem, self.expected)


class UnknownParentError(RequestError):
    """A continuation of a request that never existed, is forgotten, or belongs to another owner."""


class QueueFullError(RequestError):
    """The queue for this kind of request is full: retry later."""


class TooLargeError(RequestError):
    """The answer would exceed a size limit."""


class DeadlineError(RequestError):
    """The request's deadline passed before it finished."""


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
    """The engine failed during a step; every request in that step gets this error."""


class AbortedError(EngineError):
    """The request was aborted by its id while its caller waited."""


class StepSkippedError(EngineError):
    """A step was not executed because an earlier one failed."""


class DeviceLostError(EngineError):
    """The device can't be used by this process any more (a sticky CUDA error): only a new process can."""


class EngineAwayError(EngineError):
    """The engine process died and is being restarted: retry later."""


class EngineDeadError(EngineError):
    """The engine process died and could not be restarted. No further request is answered."""
