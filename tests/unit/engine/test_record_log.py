"""Records that outlive the process: what was written is read, up to the first record that is not whole."""

from __future__ import annotations

import errno
import os
import random

import pytest

from ratoon.core.errors import ConfigError, UnknownParentError
from ratoon.engine.output import record_log
from ratoon.engine.output.record_log import RecordLog, open_log_of_model
from ratoon.engine.output.roots import Root, RootLog, RootTable

RECORDS = [[b"first", b""], [b"x" * 1000], [b"third", b"frames", b"3"]]


def log_of(folder, records=()):
    log = RecordLog(folder, "names")
    log.read()
    for record in records:
        log.append(record)
    return log


def read(folder):
    log = RecordLog(folder, "names")
    found = log.read()
    log.close()
    return found


def test_records_are_read_in_their_order_by_a_later_process(tmp_path):
    log_of(tmp_path, RECORDS).close()
    assert read(tmp_path) == RECORDS
    assert (tmp_path / "names-0.log").stat().st_mode & 0o777 == 0o600


def test_only_the_user_may_read_the_logs_of_a_model(tmp_path):
    folder = tmp_path / "kv"
    log = open_log_of_model(str(folder), "a model", "roots")
    assert log is not None
    log.close()
    (file,) = folder.rglob("*.log")
    assert list(file.parents)[2] == folder
    assert {one.stat().st_mode & 0o777 for one in list(file.parents)[:3]} == {0o700}


def test_a_file_cut_anywhere_gives_its_whole_records_and_takes_further_ones(tmp_path):
    log_of(tmp_path, RECORDS).close()
    file = tmp_path / "names-0.log"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        found = read(tmp_path)
        assert found == RECORDS[: len(found)] and len(found) < len(RECORDS)
        log_of(tmp_path, [[b"more"]]).close()
        assert read(tmp_path) == [*found, [b"more"]]


def test_a_wrong_byte_is_never_read(tmp_path):
    log_of(tmp_path, RECORDS).close()
    file = tmp_path / "names-0.log"
    data = file.read_bytes()
    draws = random.Random(5)
    for place in draws.sample(range(len(data)), 60):
        damaged = bytearray(data)
        damaged[place] ^= 1 << draws.randrange(8)
        file.write_bytes(damaged)
        found = read(tmp_path)
        assert found == RECORDS[: len(found)] and len(found) < len(RECORDS)


def test_processes_at_the_same_time_have_files_of_their_own(tmp_path):
    first, second = log_of(tmp_path, [[b"a"]]), log_of(tmp_path, [[b"b"]])
    first.replace([[b"c"]])
    third = log_of(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["names-0.log", "names-1.log", "names-2.log"]
    for log in (first, second, third):
        log.close()
    assert read(tmp_path) == [[b"c"]]


def test_a_full_disk_loses_records_and_leaves_the_file_whole(tmp_path, monkeypatch, caplog):
    log = log_of(tmp_path, RECORDS[:1])
    real = os.write

    def cut_short(handle, data):
        if len(data) > 8:
            return real(handle, data[:8])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(record_log.os, "write", cut_short)
        log.append(RECORDS[1])
        log.append(RECORDS[1])
        log.replace([[b"anew"]])
    log.append(RECORDS[2])
    log.close()
    assert read(tmp_path) == [RECORDS[0], RECORDS[2]]
    assert caplog.text.count("so that names of finished requests may not outlive the process") == 1


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_files"):
        RecordLog(tmp_path / "file", "names")


def root(name: str, owner: str | None = None, num_tokens: int = 3) -> Root:
    return Root(name, f"{name}-1", [1, 2], [list(range(num_tokens))], owner=owner, engine=3)


def test_roots_outlive_their_table(tmp_path):
    table = RootTable(3, log=RootLog(RecordLog(tmp_path, "roots")))
    for number in range(5):
        table.add(root(f"r{number}", owner="a"))
    table.add(root("r4", owner="b", num_tokens=9))
    table.remove("r3", "a")
    table.close()
    later = RootTable(3, log=RootLog(RecordLog(tmp_path, "roots")))
    assert [one.request_id for one in later.list("a")] == ["r4"] and later.find("r4", "b").choices == [list(range(9))]
    assert later.find("r4", "a").engine is None
    for name in ("r0", "r3"):
        with pytest.raises(UnknownParentError):
            later.find(name, "a")


def test_a_log_of_roots_is_written_anew_when_most_of_it_is_outdated(tmp_path, monkeypatch):
    monkeypatch.setattr("ratoon.engine.output.roots.SPARE_RECORDS", 10)
    table = RootTable(4, log=RootLog(RecordLog(tmp_path, "roots")))
    for number in range(100):
        table.add(root(f"r{number}"))
    table.close()
    log = RecordLog(tmp_path, "roots")
    assert len(log.read()) <= 2 * 4 + 10 + 2
    log.close()
    later = RootTable(4, log=RootLog(RecordLog(tmp_path, "roots")))
    assert sorted(one.request_id for one in later.list()) == ["r96", "r97", "r98", "r99"]
