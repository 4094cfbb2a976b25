"""Files of blocks under random damage: torn and flipped files, lost ones, a full disk, a read-only folder, engines that
end without notice, several that share the folder. What is read is what was saved, or nothing; nothing waits forever;
no file, thread or descriptor is left behind."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.distributed import kv_files
from tests.unit.distributed.test_kv_files import SIZES, Opened, key, whole
from tests.waiting import wait_until

NUMBERS = st.integers(0, 5)  # of blocks: few, so that the same ones are damaged, lost and saved again
FILE_BYTES = kv_files.HEADER.size + len(key(0)) + sum(SIZES)
MAX_FILES = 4
FAULTS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}

actions = st.one_of(
    st.tuples(st.sampled_from(["save", "save", "read", "read", "look"]), NUMBERS, st.integers(0, 1)),
    st.tuples(st.sampled_from(["flip", "cut", "swap", "remove", "longer"]), NUMBERS, st.integers(0, 10_000)),
    st.tuples(st.sampled_from(["end", "kill", "heal", *FAULTS]), NUMBERS, st.integers(0, 1)),
)


class Host:
    """Two engines over one folder, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fault: int | None = None
        self.now = 0.0
        self.engines = [self.start(), self.start()]

    def start(self) -> Opened:
        return Opened(self.folder, max_bytes=MAX_FILES * FILE_BYTES)

    def do(self, name: str, number: int, other: int) -> None:
        if name in FAULTS:
            self.fault = FAULTS[name]
        elif name == "heal":
            self.fault = None
            self.now += kv_files.SECONDS_AFTER_FAILURE
        elif name in ("save", "read", "look", "end", "kill"):
            getattr(self, name)(other % 2, number)
        else:
            self.damage(name, number, other)

    def save(self, which: int, number: int) -> None:
        self.engines[which].save(number)
        self.flush()

    def flush(self) -> None:
        for engine in self.engines:
            engine.mover.flush()

    def read(self, which: int, number: int) -> None:
        engine = self.engines[which]
        found = engine.read(number)
        assert found is None or found == whole(number), "a wrong byte was read"
        if found is None:
            engine.index.lose(key(number))

    def look(self, which: int, number: int) -> None:
        self.engines[which].index.look()

    def end(self, which: int, number: int) -> None:
        self.engines[which].close()
        self.engines[which] = self.start()

    def kill(self, which: int, number: int) -> None:
        """An engine ends within a write: a part of a file is left, under another name."""
        path = Path(kv_files._path_of(self.engines[which].mover._folder, key(number)))
        path.parent.mkdir(exist_ok=True)
        left = path.with_name(f"{path.name}.1-{random.Random(number).random()}{kv_files.UNFINISHED}")
        left.write_bytes(b"ratoonKV and a part")
        os.utime(left, (0, 0))
        self.end(which, number)

    def damage(self, name: str, number: int, other: int) -> None:
        path = Path(kv_files._path_of(self.engines[0].mover._folder, key(number)))
        if not path.exists():
            return
        data = bytearray(path.read_bytes() or b"x")  # it may have been cut to nothing
        if name == "flip":
            data[other % len(data)] ^= 1 << other % 8
        elif name == "cut":
            del data[other % len(data) :]
        elif name == "longer":
            data += bytes(1 + other % 7)
        elif name == "swap":  # the content of another block, with a checksum that is right for that one
            twin = Path(kv_files._path_of(self.engines[0].mover._folder, key((number + 1) % 6)))
            data = bytearray(twin.read_bytes() if twin.exists() else b"")
        if name == "remove":
            path.unlink()
        else:
            path.write_bytes(data)


@contextmanager
def host() -> Iterator[Host]:
    """A fault of the disk is what the system answers to a write or to the making of a file."""
    with tempfile.TemporaryDirectory() as folder, patch.object(kv_files, "NUM_READERS", 2):
        made: Host | None = None
        open_file, write = os.open, os.writev

        def checked_open(path, flags, *arguments, **others):
            if made is not None and made.fault is not None and flags & os.O_CREAT:
                raise OSError(made.fault, os.strerror(made.fault))
            return open_file(path, flags, *arguments, **others)

        def short_write(handle, parts):
            if made is not None and made.fault is not None:
                raise OSError(made.fault, os.strerror(made.fault))
            return write(handle, [memoryview(parts[0])[:61]])  # a disk may take less than it is given

        with (
            patch.object(kv_files.os, "open", checked_open),
            patch.object(kv_files.os, "writev", short_write),
            patch.object(kv_files.time, "monotonic", lambda: 0.0 if made is None else made.now),
        ):
            made = Host(Path(folder) / "kv")
            yield made


def threads() -> int:
    return sum(thread.name.startswith("kv-files") for thread in threading.enumerate())


@settings(max_examples=25, deadline=None)
@given(st.lists(actions, min_size=10, max_size=60))
def test_what_is_read_is_what_was_saved_or_nothing(happening: list[tuple[str, int, int]]) -> None:
    num_threads, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    with host() as made:
        for name, number, other in happening:
            made.do(name, number, other)
            size = sum(path.stat().st_size for path in made.folder.rglob("*.kv"))
            assert size <= 2 * MAX_FILES * FILE_BYTES, "files are not bounded"
        made.do("heal", 0, 0)
        for number in range(3):  # after all that, the folder is as good as a new one
            made.engines[0].index.lose(key(number))
            made.read(0, number)
            made.save(0, number)
            assert made.engines[1].read(number) == whole(number)
        for engine in made.engines:
            engine.close()
        assert not any(len(engine.mover._queue) or engine.mover._queue._num_bytes for engine in made.engines)
        last = made.start()
        last.close()
        assert not list(made.folder.rglob(f"*{kv_files.UNFINISHED}")), "a part of a file is left"
    wait_until("all threads have ended", lambda: threads() == num_threads)
    wait_until("all files are closed", lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_device_that_stalls_is_given_up_and_what_it_gives_later_is_not_used(tmp_path, monkeypatch) -> None:
    """A pipe in the place of a file stands for the device: it can't be opened before something writes to it."""
    monkeypatch.setattr(kv_files, "SECONDS_WITHOUT_PROGRESS", 0.2)
    opened = Opened(tmp_path)
    opened.save(1, 2)
    opened.mover.flush()
    path = Path(kv_files._path_of(opened.mover._folder, key(1)))
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    memory = [bytearray(size) for size in SIZES]
    assert opened.mover.load_all([(key(1), [memoryview(part) for part in memory])]) == [False]
    assert opened.read(2) is None, "the device is left alone for a while"
    opened.mover._stalled_until = 0.0
    assert opened.read(2) == whole(2), "another reader is free"
    with open(path, "wb") as pipe:  # it goes on
        pipe.write(content)
    opened.close()
    wait_until("the reader is through", lambda: threads() == 0)
    assert memory == [bytearray(size) for size in SIZES], "memory was written that may have another use by now"


def test_a_device_that_stalls_in_a_write_does_not_keep_an_engine_from_ending(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kv_files, "SECONDS_WITHOUT_PROGRESS", 0.05)
    goes_on = threading.Event()
    write = os.writev

    def stalled(handle, parts):
        goes_on.wait()
        return write(handle, parts)

    monkeypatch.setattr(kv_files.os, "writev", stalled)
    opened = Opened(tmp_path)
    opened.save(1, 2)
    wait_until("the writer has begun", lambda: opened.mover._queue.num_waiting == 1)
    assert opened.read(1) == whole(1), "what waits is read from memory"
    opened.close()
    goes_on.set()
    wait_until("the writer has ended", lambda: threads() == 0)
