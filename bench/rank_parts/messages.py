"""A step plan on its way through the ring to two readers, which are processes: what writing, waking and reading take.

Run as a program, it is a reader: it tells when it had each message, and when it had decoded it. All processes of a
host have the same monotonic clock.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack

from ratoon.core.plan import CachedRequestData, SchedulerOutput
from ratoon.distributed.broadcast import RingReader, RingWriter
from ratoon.distributed.plan_frames import PlanDecoder, encode_plan

NUM_READERS = 2
NUM_BRANCHES = 256
PAUSE = 0.002  # seconds between plans, after which readers sleep, as between the steps of a model
WARM_UP = 50
SECONDS = 30.0
_TIMES = struct.Struct("<QQ")


def plan_of(num_branches: int) -> SchedulerOutput:
    """A step of a decode: one token of every branch."""
    ids = [f"request-{number:04d}" for number in range(num_branches)]
    return SchedulerOutput(
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        sampled_req_ids=ids,
        total_num_scheduled_tokens=num_branches,
        scheduled_cached_reqs=CachedRequestData(ids, [1000] * num_branches, [None] * num_branches),
    )


def measure_broadcast(count: int, pause: float = PAUSE) -> dict[str, list[float]]:
    """Seconds of so many broadcasts: `encode`, `write` (until the writer goes on), `read` (from its begin until all
    readers have the message) and `whole` (from before encoding until all readers have the plan)."""
    plan = plan_of(NUM_BRANCHES)
    times: dict[str, list[float]] = {"encode": [], "write": [], "read": [], "whole": []}
    with ExitStack() as stack:
        writer = RingWriter(NUM_READERS)
        stack.callback(writer.close)
        back = [_start_reader(stack, writer, number) for number in range(NUM_READERS)]
        writer.close_sides()
        for number in range(count + WARM_UP):
            time.sleep(pause)
            begin = time.monotonic_ns()
            frames = encode_plan(plan)
            encoded = time.monotonic_ns()
            writer.write(frames, SECONDS)
            written = time.monotonic_ns()
            ends = [_TIMES.unpack(os.read(each, _TIMES.size)) for each in back]
            if number >= WARM_UP:
                times["encode"].append((encoded - begin) / 1e9)
                times["write"].append((written - encoded) / 1e9)
                times["read"].append((max(had for had, _ in ends) - encoded) / 1e9)
                times["whole"].append((max(decoded for _, decoded in ends) - begin) / 1e9)
    return times


def _start_reader(stack: ExitStack, writer: RingWriter, number: int) -> int:
    ours, theirs = os.pipe()
    side = writer.sides[number].fileno()
    arguments = [str(each) for each in (writer.fileno, side, number, theirs)]
    reader = subprocess.Popen([sys.executable, __file__, *arguments], pass_fds=[writer.fileno, side, theirs])
    os.close(theirs)
    stack.callback(os.close, ours)
    stack.callback(reader.wait)
    stack.callback(reader.kill)
    return ours


def read_forever(descriptor: int, side: int, number: int, back: int) -> None:
    ring = RingReader(descriptor, number, NUM_READERS, socket.socket(fileno=side))
    plans = PlanDecoder()
    while True:
        with ring.read(SECONDS) as frames:
            had = time.monotonic_ns()
            plans.decode(frames)
        os.write(back, _TIMES.pack(had, time.monotonic_ns()))


if __name__ == "__main__":
    read_forever(*map(int, sys.argv[1:5]))
