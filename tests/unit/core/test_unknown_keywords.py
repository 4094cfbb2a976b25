"""A keyword that does not exist is named, with what may have been meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.param_types import verify_types
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, PoolingParams, SamplingParams
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temperature="hot"), "temperature: 'hot' is not a number"),
        (lambda: SamplingParams(n=True), "n: True is not a whole number"),
        (lambda: SamplingParams(max_tokens=1.5), "max_tokens: 1.5 is not a whole number"),
        (lambda: SamplingParams(stop=5), "stop: 5 is not a list of texts or text"),
        (lambda: SamplingParams(stop_token_ids=["a"]), "stop_token_ids: ['a'] is not a list of whole numbers"),
        (lambda: SamplingParams(logit_bias=[1]), "logit_bias: [1] is not a mapping"),
        (lambda: SamplingParams(ignore_eos="no"), "ignore_eos: 'no' is neither true nor false; true or false"),
        (lambda: SamplingParams(timestamps=3), "timestamps: 3 is not a TimestampRules"),
        (lambda: BeamSearchParams(beam_width="4"), "beam_width: '4' is not a whole number"),
        (lambda: BeamSearchParams(beam_width=4, early_stopping="x"), "early_stopping: 'x' is not"),
        (lambda: PoolingParams(normalize=1), "normalize: 1 is neither true nor false"),
        (lambda: SamplingParams(seed="x" * 1000), "seed: '" + "x" * 59 + "…"),
    ],
)
def test_values_of_a_wrong_type_are_named_where_they_are_written(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        make()
    assert str(raised.value).startswith(message)


def test_every_field_has_a_type_that_is_checked_and_its_default_passes() -> None:
    for params in (SamplingParams(), BeamSearchParams(beam_width=2), PoolingParams(), HiddenStatesParams()):
        values = {name: getattr(params, name) for name in params.__struct_fields__}
        verify_types(type(params), values)
        unchecked = {name for name in values if _accepts(type(params), name, object())}
        assert unchecked <= {"structured_output", "positions", "layers", "cross_heads"}
    SamplingParams(
        stop="x", stop_token_ids=(1,), forced_eos_token_id=3, return_hidden_states=True, top_k=-1, temperature=1
    )


def _accepts(params: type, name: str, value: Any) -> bool:
    try:
        verify_types(params, {name: value})
    except RequestError:
        return False
    return True


def test_the_limit_of_logprobs_is_named() -> None:
    for count in (-1, 65):
        with pytest.raises(RequestError, match="at most 64 \\(the engine's max_logprobs\\)"):
            SamplingParams(logprobs=count).verify()


def test_params_cross_processes_and_can_be_changed_as_before() -> None:
    params = msgspec.structs.replace(SamplingParams(n=2, stop="x"), seed=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
