"""Messages to frames and back: arrays travel raw, and garbage is always a WireError, never anything else."""

from __future__ import annotations

import contextlib
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.messages import Fault, Heartbeat, UtilityCall, UtilityResult
from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Extraction,
    FinishReason,
    ResumedChoice,
)
from ratoon.core.stats import SchedulerStats
from ratoon.core.wire import Decoder, WireError, WireTensor, encode

MESSAGE_TYPES = (EngineCoreRequest, EngineCoreOutputs, UtilityCall, UtilityResult, Heartbeat, list[str])


def there_and_back(message):
    return Decoder(type(message)).decode([bytes(frame) for frame in encode(message)])


@pytest.mark.parametrize(
    "message",
    [
        EngineCoreRequest("r-1", [1, 2, 3], SamplingParams(temperature=0.5, stop=["x"], seed=2**63 - 1)),
        EngineCoreRequest(
            "r-2",
            [7],
            SamplingParams(n=2),
            cache_salt="tenant",
            resumed=[ResumedChoice([1, 2]), ResumedChoice([3], finished=True)],
        ),
        EngineCoreRequest("r-3", [7], BeamSearchParams(beam_width=4, all_stop_token_ids=[2])),
        EngineCoreRequest("r-4", [7], PoolingParams(pooling="mean")),
        EngineCoreRequest("r-5", [7, 8], Extraction([0, 1], [2], deadline=1.0)),
        EngineCoreOutputs(
            [
                EngineCoreOutput("r-1", [5], 1, FinishReason.STOP, 5, LogprobsLists([[5]], [[-0.5]], [1])),
                EngineCoreOutput("r-2", [], refusal=Fault("RequestError", "prompt", "is long", "a short one")),
            ],
            SchedulerStats(num_running=3),
            engine_index=2,
        ),
        UtilityCall(3, "sleep", [2]),
        UtilityResult(3, {"a": [1, None]}),
        Heartbeat(1.5, 2, True),
    ],
)
def test_messages_arrive_as_they_were_sent(message):
    assert there_and_back(message) == message


def test_arrays_travel_as_frames_of_their_own():
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    second = np.array([[1, 2]], np.int64)
    message = EngineCoreOutputs(
        [
            EngineCoreOutput("a", [], pooled=WireTensor("float32", first.shape, first.data)),
            EngineCoreOutput("b", [], pooled=WireTensor("int64", second.shape, second.data)),
        ]
    )
    frames = encode(message)
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [48, 16]
    arrived = Decoder(EngineCoreOutputs).decode([bytes(frame) for frame in frames])
    for output, sent in zip(arrived.outputs, (first, second)):
        np.testing.assert_array_equal(np.asarray(output.pooled.view()).reshape(output.pooled.shape), sent)


def test_sending_an_array_does_not_copy_it():
    values = array("f", [1.0, 2.0])
    frames = encode(EngineCoreOutputs([EngineCoreOutput("a", [], pooled=WireTensor("float32", (2,), values))]))
    values[0] = 9.0
    assert memoryview(frames[1]).cast("f")[0] == 9.0


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("float32", (3,), 8), ("float32", (-1, -2), 8), ("object", (1,), 8)]
)
def test_an_array_must_be_what_it_says(dtype, shape, size):
    with pytest.raises(WireError):
        WireTensor(dtype, shape, b"\0" * size)


def test_a_frame_that_is_missing_short_or_out_of_range_is_refused():
    message = EngineCoreOutputs([EngineCoreOutput("a", [], pooled=WireTensor("float32", (2,), b"\0" * 8))])
    payload, data = encode(message)
    decoder = Decoder(EngineCoreOutputs)
    for frames in ([payload], [payload, bytes(data)[:-1]], [], [b""]):
        with pytest.raises(WireError):
            decoder.decode(frames)
    assert decoder.decode([payload, bytes(data)]) == message  # and none of that has hurt the decoder


@given(st.sampled_from(MESSAGE_TYPES), st.lists(st.binary(max_size=64), max_size=3))
def test_garbage_is_a_wire_error_and_nothing_else(message_type, frames):
    with contextlib.suppress(WireError):
        Decoder(message_type).decode(frames)


def test_deeply_nested_garbage_is_a_wire_error():
    with pytest.raises(WireError):
        Decoder(UtilityCall).decode([b"\x93\x01\xa1a" + b"\x91" * 200_000])


def test_nothing_but_known_types_travels():
    with pytest.raises(NotImplementedError):
        encode(UtilityResult(1, object()))
