"""Errors cross the process border as what they were."""

from __future__ import annotations

import pytest

from ratoon.core.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    ExplainedError,
    ModelError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnknownParentError,
)
from ratoon.core.faults import error_of, fault_of, refusal_of
from ratoon.core.messages import Fault


@pytest.mark.parametrize(
    "kind",
    [RequestError, UnknownParentError, QueueFullError, TooLargeError, DeadlineError, ConfigError, ModelError],
)
def test_an_explained_error_comes_back_with_its_class_and_its_words(kind: type[ExplainedError]):
    error = error_of(fault_of(kind("field", "is wrong", "right")))
    assert type(error) is kind and isinstance(error, ExplainedError)
    assert (error.subject, error.problem, error.expected) == ("field", "is wrong", "right")
    refusal = refusal_of(fault_of(kind("field", "is wrong", "right")))
    assert type(refusal) is (kind if issubclass(kind, RequestError) else RequestError)
    assert str(refusal) == str(error)


def test_anything_else_is_the_engines_failure():
    for error, text in ((EngineError("lost"), "lost"), (KeyError("x"), "KeyError: 'x'")):
        back = error_of(fault_of(error))
        assert type(back) is EngineError and str(back) == text
    assert type(error_of(Fault("NoSuchError", "", "odd"))) is EngineError


def test_an_error_inside_another_field_stays_what_it_is():
    error = TooLargeError("positions", "too many").inside("return_hidden_states")
    assert type(error) is TooLargeError and error.field == "return_hidden_states.positions"
