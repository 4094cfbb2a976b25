"""A keyword that does not exist is named, with what may have been meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.settings import engine_config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temprature=1), "SamplingParams has no 'temprature'; did you mean temperature?"),
        (lambda: BeamSearchParams(beam_with=2), "BeamSearchParams has no 'beam_with'; did you mean beam_width?"),
        (lambda: PoolingParams(normalise=True), "PoolingParams has no 'normalise'; did you mean normalize?"),
        (lambda: SamplingParams(whatever=1), "SamplingParams has no 'whatever'"),
        (lambda: engine_config("m", max_modellen=5), "the engine has no 'max_modellen'; did you mean max_model_len?"),
        (lambda: engine_config("m", skip_tokeniser=True), "did you mean skip_tokenizer?"),
        (lambda: engine_config("m", whatever=1), "the engine has no 'whatever'"),
    ],
)
def test_unknown_keywords_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert message in str(raised.value)
    assert ("did you mean" in str(raised.value)) == ("did you mean" in message)


def test_params_cross_processes_and_can_be_changed_as_before() -> None:
    params = msgspec.structs.replace(SamplingParams(n=2, stop="x"), seed=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
