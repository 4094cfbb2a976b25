"""Which tokens may be forbidden, in sampling and in a beam search, without a model."""

from typing import Any

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, GenerationParams, SamplingParams, TimestampRules

KINDS: list[Any] = [SamplingParams, lambda **fields: BeamSearchParams(beam_width=4, **fields)]
WHISPER = TimestampRules(
    first_token_id=50364, no_timestamps_token_id=50363, end_token_id=50257, max_initial_index=50
)  # fmt: skip


def changed(**fields: Any) -> TimestampRules:
    return msgspec.structs.replace(WHISPER, **fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"suppressed_token_ids": []},
        {"suppressed_token_ids": [5, 5, 7], "suppressed_first_token_ids": (220, 50257)},
        {"timestamps": WHISPER},
        {"timestamps": changed(max_initial_index=None)},
        {"timestamps": changed(max_initial_index=0, no_timestamps_token_id=0)},
    ],
)
def test_what_has_a_meaning_is_taken(kind, fields):
    kind(**fields).verify()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("suppressed_token_ids", {"suppressed_token_ids": 5}),
        ("suppressed_token_ids", {"suppressed_token_ids": "5"}),
        ("suppressed_token_ids", {"suppressed_token_ids": [True]}),
        ("suppressed_first_token_ids", {"suppressed_first_token_ids": {5: 1.0}}),
        ("suppressed_first_token_ids", {"suppressed_first_token_ids": [1.5]}),
        ("timestamps", {"timestamps": True}),
        ("timestamps", {"timestamps": {"first_token_id": 50364}}),
        ("timestamps.first_token_id", {"timestamps": changed(first_token_id=-1)}),
        ("timestamps.first_token_id", {"timestamps": changed(first_token_id=None)}),
        ("timestamps.no_timestamps_token_id", {"timestamps": changed(no_timestamps_token_id=50364)}),
        ("timestamps.end_token_id", {"timestamps": changed(end_token_id=50364)}),
        ("timestamps.end_token_id", {"timestamps": changed(end_token_id=0)}),
        ("timestamps.max_initial_index", {"timestamps": changed(max_initial_index=-1)}),
        ("timestamps.max_initial_index", {"timestamps": changed(max_initial_index=2**70)}),
        ("timestamps.max_initial_index", {"timestamps": changed(max_initial_index=1.0)}),
    ],
)
def test_what_has_none_names_the_field(kind, field, fields):
    with pytest.raises(RequestError) as error:
        kind(**fields).verify()
    assert error.value.field == field


@pytest.mark.parametrize("kind", KINDS)
def test_rules_survive_the_wire(kind):
    params: GenerationParams = kind(suppressed_token_ids=[1], suppressed_first_token_ids=[2], timestamps=WHISPER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params)) == params
