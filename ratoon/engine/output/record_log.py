"""Records that outlive the process: a file to which records are appended, each with a checksum.

A process that is killed in the middle of a record leaves it cut: reading ends there, and what is behind is dropped. The
file belongs to one process at a time, by a lock that ends with the process; further ones have files of their own. What
records mean is known to the callers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.core.prepared import prepared
from ratoon.core.private_folders import make_private_folder
from ratoon.core.wire import Buffer
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

HEAD = struct.Struct("<Q16s")  # bytes of the record, and their checksum
MAGIC = b"ratoon records 1\n"
MOST_FILES = 64  # of one name, each of another process
CONTENTS = {  # by the name of the log, for messages
    "roots": "finished requests that can be continued",
    "names": "names of finished requests",
    "responses": "stored responses",
}

Record = Sequence[Buffer]  # frames, as core/wire.py has them
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(prepared(list[bytes])).decode


def open_record_log(config: EngineConfig, name: str) -> RecordLog | None:
    """The log of this name that belongs to a model, in the folder of its files. None: nothing outlives the process."""
    return open_log_of_model(config.cache.kv_files, config.model, name)


def open_log_of_model(kv_files: str | None, model: str, name: str) -> RecordLog | None:
    """The log of this name that belongs to a model without a configuration yet; see open_record_log."""
    if kv_files is None:
        return None
    model = os.path.abspath(model) if os.path.exists(model) else model
    below = ("roots", hashlib.sha256(model.encode()).hexdigest()[:32])
    return RecordLog(Path(kv_files).expanduser(), name, below)


class RecordLog:
    def __init__(self, folder: Path, name: str, below: Sequence[str] = ()) -> None:
        """Opens the first file of this name that no other process has, in the folder that `kv_files` names or in the
        last of these folders below it. ConfigError: there is none, or it can't be written."""
        self._has_failed = False
        self._contents = CONTENTS[name]
        try:
            folder = make_private_folder(folder, *below)
            for number in range(MOST_FILES):
                self._path = folder / f"{name}-{number}.log"
                handle = _open_locked(self._path)
                if handle is not None:
                    self._handle = handle
                    return
        except OSError as error:
            raise ConfigError("kv_files", f"{folder} can't be written: {error.strerror}", "another folder") from error
        raise ConfigError("kv_files", f"{folder} is used by {MOST_FILES} processes", "another folder")

    def read(self) -> list[list[bytes]]:
        """All whole records, in their order. What is behind the last whole one is cut off."""
        with open(self._path, "rb") as file:
            data = file.read()
        records, place = [], len(MAGIC)
        if data[:place] != MAGIC:
            place = 0
        while place and place + HEAD.size <= len(data):
            size, checksum = HEAD.unpack_from(data, place)
            body = data[place + HEAD.size : place + HEAD.size + size]
            if len(body) != size or xxhash.xxh3_128_digest(body) != checksum:
                break
            try:
                records.append(_decode(body))
            except msgspec.MsgspecError:
                break
            place += HEAD.size + size
        if place < len(data):
            logger.warning("%s is cut after %d records: what follows is not whole", self._path, len(records))
        self._cut(place)
        return records

    def _cut(self, place: int) -> None:
        os.ftruncate(self._handle, place)
        if place == 0:
            os.write(self._handle, MAGIC)

    def append(self, record: Record) -> None:
        """A record that can't be written is logged once, and lost: the process goes on without it."""
        try:
            _write_whole(self._handle, _framed(record))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                message = "%s can't be written, so that %s may not outlive the process: %s"
                logger.warning(message, self._path, self._contents, error)
            self._has_failed = True

    def replace(self, records: Iterable[Record]) -> None:
        """These records in the place of all. A process that is killed meanwhile leaves the file as it was."""
        unfinished = self._path.with_suffix(".new")
        try:
            with suppress(FileNotFoundError):
                unfinished.unlink()
            handle = _open_locked(unfinished)
            assert handle is not None, "only the process that has the file writes to this one"
            _write_whole(handle, MAGIC + b"".join(map(_framed, records)))
            os.rename(unfinished, self._path)
        except OSError as error:
            logger.warning("%s can't be written anew: %s", self._path, error)
            return
        os.close(self._handle)
        self._handle = handle

    def close(self) -> None:
        os.close(self._handle)


def _open_locked(path: Path) -> int | None:
    """None: another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, its process may have put another file in its place.
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    except BlockingIOError:
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _framed(record: Record) -> bytes:
    body = _encode([bytes(frame) for frame in record])
    return HEAD.pack(len(body), xxhash.xxh3_128_digest(body)) + body


def _write_whole(handle: int, data: bytes) -> None:
    """A write that is cut short leaves a record that is not whole, which is removed again."""
    place = os.fstat(handle).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(handle, left) :]
    except OSError:
        os.ftruncate(handle, place)
        raise
