"""Blocks as files: what is read is what was written, or nothing, whatever happens to the files in between."""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import block_key, open_connector
from ratoon.distributed import kv_file_io, kv_files, write_behind
from ratoon.distributed.kv_files import FilesConnector, FilesIndex, FilesMover
from tests.seeds import examples
from tests.waiting import wait_until

KIND = KVFingerprint(weights="w")
SIZES = (480, 1000)  # of the parts of a block


def key(number: int) -> bytes:
    return block_key(0, number.to_bytes(32, "big")[::-1])


def content(number: int) -> list[memoryview]:
    return [memoryview(random.Random(number).randbytes(size)) for size in SIZES]


def connector(folder: Path, **options: object) -> FilesConnector:
    return FilesConnector({"folder": str(folder), **options})


class Opened:
    """Both halves over one folder."""

    def __init__(self, folder: Path, **options: object) -> None:
        made = connector(folder, **options)
        self.mover: FilesMover = made.open_mover(KIND)
        self.index: FilesIndex = made.open_index(KIND)

    def save(self, *numbers: int) -> None:
        for number in numbers:
            if self.index.offer(key(number)):
                self.mover.save(key(number), content(number))

    def read(self, number: int) -> list[bytes] | None:
        parts = [memoryview(bytearray(size)) for size in SIZES]
        (is_there,) = self.mover.load_all([(key(number), parts)])
        return [bytes(part) for part in parts] if is_there else None

    def close(self) -> None:
        self.index.close()
        self.mover.close()


@pytest.fixture
def opened(tmp_path):
    made = Opened(tmp_path / "kv")
    yield made
    made.close()


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def whole(number: int) -> list[bytes]:
    return [bytes(part) for part in content(number)]


def test_a_block_is_read_as_it_was_saved_before_and_after_it_is_written_and_by_a_later_engine(opened, tmp_path):
    opened.save(1, 2)
    assert opened.read(1) == whole(1)  # perhaps from the queue
    opened.mover.flush()
    assert len(files_in(tmp_path)) == 2 and opened.read(2) == whole(2)
    later = Opened(tmp_path / "kv")
    assert later.index.find(key(1)) and not later.index.find(key(3))
    assert (later.read(1), later.read(2), later.read(3)) == (whole(1), whole(2), None)
    later.close()


def test_only_the_user_may_read_them(opened, tmp_path):
    opened.save(1)
    opened.mover.flush()
    (file,) = files_in(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folders = list(file.parents)[:3]
    assert folders[-1] == tmp_path / "kv"
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "of another block"])
def test_a_wrong_byte_is_never_read_and_its_file_is_removed(opened, tmp_path, damage):
    opened.save(1, 2)
    opened.mover.flush()
    first, second = (Path(kv_files._path_of(tmp_path / "kv" / KIND.digest, key(number))) for number in (1, 2))
    data = bytearray(first.read_bytes())
    random.seed(7)
    for place in random.sample(range(len(data)), 40) if damage == "flipped" else [0]:
        damaged = bytearray(data)
        if damage == "flipped":
            damaged[place] ^= 1 << random.randrange(8)
        elif damage == "cut":
            del damaged[-1:]
        elif damage == "longer":
            damaged += b"x"
        elif damage == "empty":
            damaged.clear()
        else:
            damaged[:] = second.read_bytes()
        first.write_bytes(damaged)
        assert opened.read(1) is None
        assert not first.exists()
    assert opened.read(2) == whole(2)
    opened.index.lose(key(1))
    opened.save(1)
    assert opened.read(1) == whole(1)


def test_a_full_disk_loses_blocks_and_nothing_else(opened, monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(kv_files.time, "monotonic", lambda: now[0])

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "writev", refuse)
        opened.save(1)
        opened.mover.flush()
        opened.save(2)  # in the pause after a failure
        opened.mover.flush()
    assert opened.read(1) is None and not list(tmp_path.rglob("*.*"))
    now[0] += kv_files.SECONDS_AFTER_FAILURE
    opened.save(3)
    opened.mover.flush()
    assert opened.read(3) == whole(3)


def test_files_are_bounded_and_those_not_used_for_longest_go_first(tmp_path):
    size = kv_files.HEADER.size + len(key(0)) + sum(SIZES)
    opened = Opened(tmp_path / "kv", max_bytes=10 * size)
    opened.save(*range(10))
    opened.mover.flush()
    for number, file in enumerate(Path(kv_files._path_of(tmp_path / "kv" / KIND.digest, key(n))) for n in range(10)):
        os.utime(file, ns=(number, number))
    assert opened.read(0) == whole(0)  # it is used
    opened.save(10)
    opened.mover.flush()
    kept = [number for number in range(11) if opened.read(number) is not None]
    assert kept == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    opened.close()


def test_superseded_blocks_are_removed_first_and_those_of_a_day_last(tmp_path):
    """Also where others were used longer ago."""
    size = kv_files.HEADER.size + len(key(0)) + sum(SIZES)
    opened = Opened(tmp_path, max_bytes=10 * size)
    opened.save(*range(10))
    opened.mover.flush()
    for number in range(10):
        os.utime(kv_files._path_of(opened.index._folder, key(number)), (1e9 + number, 1e9 + number))
    opened.index.prolong(key(0))
    opened.index.supersede(key(8))
    opened.index.supersede(key(77))  # that is not there
    opened.index.look()
    opened.save(10)
    opened.mover.flush()
    left = [number for number in range(11) if opened.read(number) is not None]
    assert left == [0, 2, 3, 4, 5, 6, 7, 9, 10], "one had to go beside the superseded one: the oldest of the others"
    assert os.stat(kv_files._path_of(opened.index._folder, key(0))).st_mtime > time.time() + 3600, "reading leaves it"
    opened.close()


def test_blocks_of_a_lease_stay_as_long_as_it_runs_also_as_superseded_ones(tmp_path, monkeypatch):
    opened, now = Opened(tmp_path), time.time()
    opened.save(1, 2)
    opened.mover.flush()
    opened.index.keep(key(1), 60)
    opened.index.keep(key(2), 60)
    opened.index.prolong(key(2))
    opened.index.supersede(key(1))
    opened.index.look()
    used_at = [os.stat(kv_files._path_of(opened.index._folder, key(number))).st_mtime for number in (1, 2)]
    assert [round((when - now) / 60) for when in used_at] == [1, 24 * 60], "the later of two ends"
    opened.index.keep(key(2), 60)
    opened.index.look()
    assert os.stat(kv_files._path_of(opened.index._folder, key(2))).st_mtime == used_at[1]
    monkeypatch.setattr(kv_files.time, "time", lambda: now + 100)
    opened.index.supersede(key(1))
    opened.index.look()
    assert os.stat(kv_files._path_of(opened.index._folder, key(1))).st_mtime == kv_files.SUPERSEDED
    opened.close()


def test_a_block_that_is_not_written_yet_is_marked_when_it_is(tmp_path):
    opened = Opened(tmp_path)
    assert opened.index.offer(key(1))
    opened.index.supersede(key(1))
    opened.index.look()
    opened.mover.save(key(1), content(1))
    opened.mover.flush()
    opened.close()
    (file,) = tmp_path.rglob("*.kv")
    assert file.stat().st_mtime == kv_files.SUPERSEDED


def test_engines_see_what_others_write_and_remove(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_files, "SECONDS_BETWEEN_LOOKS", 0.01)
    other = Opened(tmp_path / "kv")
    opened.save(1)
    opened.mover.flush()
    wait_until("the other engine knows the block", lambda: other.index.find(key(1)))
    files_in(tmp_path)[0].unlink()
    wait_until("the other engine knows that it is gone", lambda: not other.index.find(key(1)))
    other.close()


def read_at_once(io: kv_file_io.SystemIO, path: Path, number: int, parts: list[memoryview]) -> bool | None:
    with path.open("rb") as file:
        head = file.read(kv_files.HEADER.size)
        return io.read_cached_block(file.fileno(), head, key(number), parts)


def test_what_the_system_has_in_memory_goes_straight_to_its_block(opened, monkeypatch):
    opened.save(1)
    opened.mover.flush()
    (file,) = files_in(opened.index._folder)
    parts = [memoryview(bytearray(size)) for size in SIZES]
    if read_at_once(kv_file_io.SystemIO(), file, 1, parts) is None:
        pytest.skip("there are no CPU kernels here, or the file system can't tell what is in memory")
    assert [bytes(part) for part in parts] == whole(1)
    monkeypatch.setattr(os, "readv", None)
    assert opened.read(1) == whole(1)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert opened.read(1) is None and not file.exists(), "a wrong byte"


def test_a_block_that_was_read_at_once_counts_as_used(opened):
    opened.save(1, 2)
    opened.mover.flush()
    for number, used_at in ((1, 1000.0), (2, time.time() + 1000)):
        path = kv_files._path_of(opened.index._folder, key(number))
        os.utime(path, (used_at, used_at))
        assert opened.read(number) == whole(number)
    first, second = (Path(kv_files._path_of(opened.index._folder, key(number))).stat().st_mtime for number in (1, 2))
    assert abs(first - time.time()) < 100, "used now"
    assert second > time.time() + 100, "kept for longer"


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_kernel_and_the_interpreter_agree_on_every_file(sizes, key_bytes, draw):
    """On a whole one, on one with a wrong bit anywhere, and on one that was cut."""
    name, content = draw.randbytes(key_bytes), draw.randbytes(sum(sizes))
    head = kv_files.HEADER.pack(
        kv_files.MAGIC, kv_files.VERSION, key_bytes, len(content), kv_files._checksum(name, [bytearray(content)])
    )
    whole_file = head + name + content
    flipped = bytearray(whole_file)
    flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    with tempfile.TemporaryDirectory() as folder:
        path, io = Path(folder) / "block", kv_file_io.SystemIO()
        for data, is_good in ((whole_file, True), (bytes(flipped), False), (whole_file[:-1], False)):
            path.write_bytes(data)
            parts = [memoryview(bytearray(size)) for size in sizes]
            with path.open("rb") as file:
                found = io.read_cached_block(file.fileno(), head, name, parts)
                assert found in (None, is_good)
                if found:
                    assert b"".join(parts) == content
                buffer = bytearray(len(content))
                assert kv_files._read_content(io, file.fileno(), name, buffer) is is_good


def cut_short(io, handle, head, key, parts):
    parts[0][:1] = b"?"


def test_what_the_system_has_not_in_memory_is_waited_for(opened, monkeypatch):
    opened.save(1)
    opened.mover.flush()
    monkeypatch.setattr(kv_file_io.SystemIO, "read_cached_block", cut_short)
    assert opened.read(1) == whole(1)


def test_without_cpu_kernels_blocks_are_read_by_the_way_of_a_buffer(opened, monkeypatch):
    opened.save(1)
    opened.mover.flush()
    monkeypatch.setattr(kv_file_io, "library", lambda: None)
    assert opened.read(1) == whole(1)


def test_what_waits_to_be_written_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(write_behind, "MAX_QUEUED_BYTES", 3 * sum(SIZES))
    monkeypatch.setattr(write_behind, "SECONDS_WITHOUT_ROOM", 0.05)
    goes_on, write = threading.Event(), os.writev

    def stalled(handle, parts):
        goes_on.wait()
        return write(handle, parts)

    monkeypatch.setattr(os, "writev", stalled)
    opened = Opened(tmp_path / "kv")
    opened.save(*range(5))
    assert [opened.read(number) is not None for number in range(5)] == [True, True, True, False, False]
    goes_on.set()
    opened.mover.flush()
    assert len(files_in(tmp_path)) == 3
    opened.close()


def test_a_disk_that_is_slower_than_texts_end_gets_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(write_behind, "MAX_QUEUED_BYTES", 2 * sum(SIZES))
    write = os.writev

    def slow(handle, parts):
        time.sleep(0.02)
        return write(handle, parts)

    monkeypatch.setattr(os, "writev", slow)
    opened = Opened(tmp_path / "kv")
    opened.save(*range(12))
    opened.mover.flush()
    assert len(files_in(tmp_path)) == 12
    opened.close()


def test_what_another_engine_has_written_is_not_written_again(opened, tmp_path):
    opened.save(1)
    opened.mover.flush()
    (file,) = files_in(tmp_path)
    os.utime(file, (1e9, 1e9))
    before = file.stat()
    opened.mover.save(key(1), content(1))  # as an engine does that has not seen the file yet
    opened.mover.flush()
    assert file.stat().st_ino == before.st_ino, "it is the same file"
    assert file.stat().st_mtime > 1e9 + 1, "and was used"
    file.write_bytes(b"cut")
    opened.mover.save(key(1), content(1))
    opened.mover.flush()
    assert opened.read(1) == whole(1)


# ---- by NIXL ----


@pytest.fixture
def nixl():
    pytest.importorskip("nixl._api", reason="the extra nixl is not installed")


@pytest.mark.usefixtures("nixl")
def test_nixl_writes_and_reads_the_same_files_as_the_system(tmp_path):
    first = Opened(tmp_path / "kv", io="nixl")
    first.save(*range(20))
    first.mover.flush()
    by_system = Opened(tmp_path / "kv")
    by_system.save(20)
    by_system.mover.flush()
    assert len(files_in(tmp_path)) == 21
    assert all(by_system.read(number) == whole(number) for number in range(21))
    by_system.close()
    second = Opened(tmp_path / "kv", io="nixl")
    parts = [[memoryview(bytearray(size)) for size in SIZES] for _ in range(21)]
    assert second.mover.load_all([(key(number), parts[number]) for number in range(21)]) == [True] * 21
    assert [[bytes(part) for part in one] for one in parts] == [whole(number) for number in range(21)]
    for number, damage in enumerate((lambda data: data[:-1], lambda data: data + b"x", lambda data: b"")):
        file = Path(kv_files._path_of(tmp_path / "kv" / KIND.digest, key(number)))
        file.write_bytes(damage(file.read_bytes()))
        assert second.read(number) is None and not file.exists()
    first.close()
    second.close()


@pytest.mark.usefixtures("nixl")
def test_nixl_that_can_not_write_loses_blocks_and_nothing_else(tmp_path, monkeypatch):
    opened = Opened(tmp_path / "kv", io="nixl")
    with monkeypatch.context() as refusing:  # the file can be made, and not be written
        make = os.open
        refusing.setattr(os, "open", lambda path, flags, *rest: make(path, flags & ~os.O_WRONLY | os.O_RDONLY, *rest))
        opened.save(1)
        opened.mover.flush()
    assert opened.read(1) is None and not list(tmp_path.rglob("*.*"))
    opened.mover._silent_until = 0.0
    opened.index.lose(key(1))
    opened.save(1)
    opened.mover.flush()
    assert opened.read(1) == whole(1)
    opened.close()


def test_nixl_that_is_not_there_is_an_error_of_the_setting(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="kv_files_io: 'tape' is unknown"):
        connector(tmp_path, io="tape")
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"kv_files_io: NIXL can't be imported .*pip install 'ratoon\[nixl\]'"):
        open_connector("files", {"folder": str(tmp_path), "io": "nixl"})


@pytest.mark.parametrize("options", [{}, {"folder": 3}, {"folder": "a", "size": 1}, {"folder": "a", "max_bytes": "x"}])
def test_options_that_it_does_not_have_are_refused(options):
    with pytest.raises(ConfigError, match="kv_connector_options"):
        open_connector("files", options)


def test_a_folder_that_can_not_be_made_is_an_error_of_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_files"):
        connector(tmp_path / "file").open_index(KIND)
