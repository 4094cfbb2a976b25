"""Messages from one process to several, through shared memory: all of them, in order, whole, and within time limits."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

if sys.platform != "linux":
    pytest.skip("the ring needs Linux", allow_module_level=True)

from ratoon.distributed.broadcast import RingReader, RingTimeoutError, RingWriter

NUM_SLOTS, SLOT_BYTES = 4, 1024

READER = """
import hashlib, socket, sys, time
from ratoon.distributed.broadcast import RingReader
descriptor, side, number, num_readers, count, pause = map(int, sys.argv[1:7])
ring = RingReader(descriptor, number, num_readers, socket.socket(fileno=side), num_slots=4, slot_bytes=1024)
found = hashlib.sha256()
for _ in range(count):
    with ring.read(20.0) as frames:
        for frame in frames:
            found.update(len(frame).to_bytes(8, "little") + frame)
    time.sleep(pause / 1000)
print(found.hexdigest(), flush=True)
"""


def start_readers(writer: RingWriter, num_readers: int, count: int, pause: int = 0) -> list[subprocess.Popen[str]]:
    """Each reads so many messages, with so many milliseconds after each, and prints a digest of all of them."""
    readers = []
    for number, side in enumerate(writer.sides):
        arguments = [writer.fileno, side.fileno(), number, num_readers, count, pause]
        readers.append(
            subprocess.Popen(
                [sys.executable, "-c", READER, *map(str, arguments)],
                pass_fds=[writer.fileno, side.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    writer.close_sides()
    return readers


def write_plans(writer: RingWriter, count: int, seconds: float) -> None:
    for _ in range(count):
        writer.write([b"a plan"], seconds)


def digest(messages: list[list[bytes]]) -> str:
    found = hashlib.sha256()
    for frames in messages:
        for frame in frames:
            found.update(len(frame).to_bytes(8, "little") + frame)
    return found.hexdigest()


@pytest.mark.parametrize("pause", [0, 1], ids=["fast readers", "readers that are slower than the writer"])
def test_every_reader_gets_all_messages_in_order(pause: int) -> None:
    """Of no frame, of empty frames, that fill a slot, and that are too large for one."""
    choose = random.Random(0)
    sizes = [[], [0], [1], [1000], [1008], [1009], [5000, 0, 3], [300_000]]
    messages = [[choose.randbytes(size) for size in each] for each in sizes]
    messages += [[choose.randbytes(choose.choice([1, 50, 400, 2000])) for _ in range(3)] for _ in range(200)]
    writer = RingWriter(2, NUM_SLOTS, SLOT_BYTES)
    readers = start_readers(writer, 2, len(messages), pause)
    for frames in messages:
        writer.write(frames, 20.0)
    assert [reader.communicate(timeout=60)[0].strip() for reader in readers] == [digest(messages)] * 2
    writer.close()


def test_a_reader_that_is_stopped_holds_the_writer_up_until_its_time_is_over() -> None:
    writer = RingWriter(1, NUM_SLOTS, SLOT_BYTES)
    (reader,) = start_readers(writer, 1, 100)
    try:
        write_plans(writer, 10, 20.0)
        os.kill(reader.pid, signal.SIGSTOP)
        with pytest.raises(RingTimeoutError, match=r"worker 0 has read nothing for 0\.5 seconds"):
            write_plans(writer, NUM_SLOTS + 2, 0.5)
    finally:
        reader.kill()
        reader.communicate()
        writer.close()


@pytest.mark.parametrize("seconds", [0.5, pytest.param(10.0, marks=[pytest.mark.slow, pytest.mark.full])])
def test_a_reader_that_is_stopped_for_a_while_gets_all_that_was_written_meanwhile(seconds: float) -> None:
    """The ring is full by then, of small messages and of those that travel beside it; the other reader goes on."""
    choose = random.Random(1)
    messages = [[choose.randbytes(choose.choice([10, 900, 20_000]))] for _ in range(40)]
    writer = RingWriter(2, NUM_SLOTS, SLOT_BYTES)
    readers = start_readers(writer, 2, len(messages))
    try:
        os.kill(readers[1].pid, signal.SIGSTOP)
        again = threading.Timer(seconds, os.kill, [readers[1].pid, signal.SIGCONT])
        again.start()
        begin = time.monotonic()
        for frames in messages:
            writer.write(frames, 20.0)
        assert time.monotonic() - begin > 0.9 * seconds, "a full ring holds the writer up"
        assert [reader.communicate(timeout=60)[0].strip() for reader in readers] == [digest(messages)] * 2
    finally:
        again.cancel()
        for reader in readers:
            reader.kill()
            reader.communicate()
        writer.close()


def test_a_reader_waits_no_longer_than_it_was_told_to() -> None:
    writer = RingWriter(1, NUM_SLOTS, SLOT_BYTES)
    reader = RingReader(writer.fileno, 0, 1, writer.sides[0], NUM_SLOTS, SLOT_BYTES)
    begin = time.monotonic()
    with pytest.raises(RingTimeoutError, match="no plan has come"), reader.read(0.1):
        pass
    assert time.monotonic() - begin >= 0.1, "a plan may come until then"
    writer.write([b"one", b"two"], 1.0)
    with reader.read(1.0) as frames:
        first, second = frames
        assert bytes(first) == b"one"
    assert second == b"two", "frames behind the first are copies"
    writer.close()


def test_nothing_is_left_behind_with_a_name() -> None:
    before = set(os.listdir("/dev/shm"))
    writer = RingWriter(2)
    (first, second) = start_readers(writer, 2, 5)
    for reader in (first, second):
        reader.kill()
        reader.communicate()
    assert set(os.listdir("/dev/shm")) <= before
    writer.close()
