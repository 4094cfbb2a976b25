"""Encoding of errors between an engine and its client, and back to the original exceptions."""

from __future__ import annotations

from ratoon.core.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    ExplainedError,
    ModelError,
    QueueFullError,
    RatoonError,
    RequestError,
    TooLargeError,
    UnknownParentError,
)
from ratoon.core.messages import Fault

_KINDS: dict[str, type[ExplainedError]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        UnknownParentError,
        QueueFullError,
        TooLargeError,
        DeadlineError,
        ConfigError,
        ModelError,
    )
}


def fault_of(error: BaseException) -> Fault:
    """An error as it travels."""
    if isinstance(error, ExplainedError):
        return Fault(type(error).__name__, error.subject, error.problem, error.expected)
    return Fault(
        "EngineError", "", str(error) if isinstance(error, RatoonError) else f"{type(error).__name__}: {error}"
    )


def error_of(fault: Fault) -> RatoonError:
    """The error that travelled."""
    kind = _KINDS.get(fault.kind)
    return EngineError(fault.problem) if kind is None else kind(fault.subject, fault.problem, fault.expected)


def refusal_of(fault: Fault) -> RequestError:
    """Returns the error of a request that was turned away."""
    error = error_of(fault)
    return error if isinstance(error, RequestError) else RequestError(fault.subject, fault.problem, fault.expected)
