"""What a beam search may be asked for, without a model."""

import math

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import MAX_BEAM_STOP_TOKENS, MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, BeamSearchParams


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 1},
        {"beam_width": 1024, "n": 1024},
        {"beam_width": MAX_BEAM_WIDTH},
        {"beam_width": 4, "max_tokens": None, "min_tokens": 1000},
        {"beam_width": 4, "max_tokens": 3, "min_tokens": 3},
        {"beam_width": 4, "length_penalty": -MAX_LENGTH_PENALTY},
        {"beam_width": 4, "length_penalty": 0},
        {"beam_width": 4, "early_stopping": True},
        {"beam_width": 4, "early_stopping": "never"},
        {"beam_width": 4, "stop_token_ids": [0, 5], "ignore_eos": True},
    ],
)
def test_what_has_a_meaning_is_taken(fields):
    BeamSearchParams(**fields).verify()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", -1),
        ("beam_width", MAX_BEAM_WIDTH + 1),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("n", 0),
        ("n", 5),  # more than beams
        ("n", "2"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 17),  # more than max_tokens
        ("length_penalty", math.nan),
        ("length_penalty", math.inf),
        ("length_penalty", MAX_LENGTH_PENALTY + 1),
        ("length_penalty", "1"),
        ("length_penalty", None),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("early_stopping", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [0] * (MAX_BEAM_STOP_TOKENS + 1)),
        ("ignore_eos", "yes"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", {"a": 1.0}),
        ("allowed_token_ids", []),
        ("bad_words", [1]),
    ],
)
def test_what_has_none_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as error:
        BeamSearchParams(**{"beam_width": 4, field: value}).verify()
    assert error.value.field == field


def test_no_length_and_penalty_overflow():
    assert math.isfinite(float(10**7) ** MAX_LENGTH_PENALTY)
    assert float(10**7) ** -MAX_LENGTH_PENALTY > 0


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_they_travel_over_the_wire_unchanged(early_stopping):
    params = BeamSearchParams(
        beam_width=32, n=4, early_stopping=early_stopping, length_penalty=-0.5, all_stop_token_ids=[2, 7]
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=BeamSearchParams)
    assert again == params
    assert again.early_stopping is early_stopping or early_stopping == "never"


def test_a_copy_can_be_changed():
    params = BeamSearchParams(beam_width=2)
    copy = params.clone()
    copy.all_stop_token_ids = [1]
    assert params.all_stop_token_ids is None
