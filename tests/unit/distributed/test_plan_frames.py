"""Plans arrive at workers as they were sent, whatever is in them, and no id is decoded twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ratoon.core.media import IMAGE, MediaInput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from ratoon.core.wire import WireError, WireTensor, encode
from ratoon.distributed.plan_frames import SEPARATOR, PlanDecoder, encode_plan

IDS = ["a-1", "b", "ü"]
KNOWN = CachedRequestData(list(IDS), [7, 0, 1 << 40], [None, None, None])
NEW = NewRequestData("b", [1, 2], 2, SamplingParams(max_tokens=3), 5, ([4],), 0)


def plan_with(**fields: Any) -> SchedulerOutput:
    usual = {
        "step": 9,
        "num_scheduled_tokens": dict.fromkeys(IDS, 1),
        "total_num_scheduled_tokens": 3,
        "sampled_req_ids": list(IDS),
        "scheduled_cached_reqs": KNOWN,
    }
    return SchedulerOutput(**(usual | fields))


@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput(),
        SchedulerOutput(finished_req_ids=["a"]),
        plan_with(),
        plan_with(sampled_req_ids=IDS[:2]),
        plan_with(sampled_req_ids=IDS[::-1]),
        plan_with(num_scheduled_tokens={"b": 2, "a-1": 1, "ü": 30}),
        plan_with(num_scheduled_tokens={**dict.fromkeys(IDS, 1), f"x{SEPARATOR}y": 1}),
        plan_with(num_scheduled_tokens={"": 1}),
        plan_with(num_scheduled_tokens={"": 1, **dict.fromkeys(IDS, 1)}),
        plan_with(scheduled_cached_reqs=CachedRequestData(list(IDS), [1, 2, 3], [None, ([5], [6]), None])),
        plan_with(scheduled_cached_reqs=CachedRequestData(IDS[:1], [1], [None]), scheduled_new_reqs=[NEW]),
        plan_with(scheduled_cached_reqs=CachedRequestData(list(IDS), [1, 2, 3], [None] * 3, [[7], [], [8, 9]])),
        plan_with(block_copies=[BlockCopy("b", 0, 1, 2, 3)], fanout={"b": [("c", 3)]}, step=1 << 40),
        plan_with(
            scheduled_encoder_inputs={"k": MediaInput(IMAGE, 2, WireTensor("uint8", (1, 8), b"12345678"), (1, 2, 4))},
            free_encoder_mm_hashes=["j"],
        ),
    ],
    ids=lambda plan: f"{len(plan.num_scheduled_tokens)} branches",
)
def test_a_plan_arrives_as_it_was_sent(plan: SchedulerOutput) -> None:
    before = msgspec.msgpack.encode(plan, enc_hook=repr)
    assert PlanDecoder().decode([bytes(frame) for frame in encode_plan(plan)]) == plan
    assert msgspec.msgpack.encode(plan, enc_hook=repr) == before, "the sender's plan is as it was"


def test_ids_of_a_decode_travel_once() -> None:
    message = b"".join(bytes(frame) for frame in encode_plan(plan_with()))
    assert message.count(b"a-1") == 1


def test_frames_that_are_no_plan_are_refused() -> None:
    for frames in ([], [b"\xc1"], encode("text")):
        with pytest.raises(WireError):
            PlanDecoder().decode(frames)
