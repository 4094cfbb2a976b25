"""The connector `files`: blocks of the KV cache as files of a folder, which outlive the engine and are shared by all
engines of a host that use the folder.

A file is a block. Its name is the block's key, and its first bytes are a header with a checksum over the key and the
content, so that a torn or damaged file is found when it is read: it is removed, and the block is computed. A file gets
its name when it is complete. Files are written behind the steps by one thread, and read by several; how their bytes are
moved is in kv_file_io.py. Together they take
no more than the given number of bytes: those that were not used for the longest time are removed. The time of a file's
last change says when it was used: in the distant past for what only superseded roots of sessions need, in the future
for what is to be kept for a day. Only the user that runs the engine may read them. What is not here: which blocks are
offered, and whether a load is worth its time.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import xxhash

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector
from ratoon.core.private_folders import make_missing_folders, make_private_folder
from ratoon.core.sizes import parse_size
from ratoon.distributed.block_bytes import fill
from ratoon.distributed.kv_file_io import SYSTEM, Buffer, FileIO, open_file_io, verify_file_io
from ratoon.distributed.write_behind import WriteBehind

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
UNFINISHED = ".new"  # the suffix of a file that is being written
MAGIC = b"ratoonKV"
VERSION = 1
# Magic, version, bytes of the key, bytes of the content, checksum; the key follows. block_file.c knows the places.
HEADER = struct.Struct("<8sIIQ16s")
CHECKSUM_BYTES = 16
DEFAULT_BYTES = 16 * 2**30
NUM_READERS = 12  # threads that load blocks: a disk is fastest with several requests, and memory with several readers
SECONDS_WITHOUT_PROGRESS = 5.0  # after which what is read or written is given up: the device has stalled
SECONDS_BETWEEN_LOOKS = 2.0  # at what other engines wrote and removed
SECONDS_AFTER_FAILURE = 10.0  # in which nothing is written, for example because the disk is full
SHARE_KEPT = 0.9  # of the bytes, when files are removed because there are too many
SHARE_BETWEEN_COUNTS = 1 / 16  # of the bytes that one mover writes before it counts what all of them have written
SUPERSEDED = 1.0  # the time of last use, since 1970, of what is to be removed before all else
SECONDS_OF_A_DAY = 24 * 3600.0
SECONDS_UNFINISHED = 600.0  # after which an unfinished file belongs to an engine that is gone


class FilesConnector(KVConnector):
    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"folder", "max_bytes", "io"})
        folder, size = options.get("folder"), options.get("max_bytes", DEFAULT_BYTES)
        if unknown or not isinstance(folder, str) or not folder:
            raise ValueError('{"folder": PATH} is needed, and "max_bytes" and "io" may be given')
        try:
            self._max_bytes = parse_size("max_bytes", size)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        self._io = verify_file_io(options.get("io", SYSTEM))
        self._root = Path(folder).expanduser()

    def open_index(self, fingerprint: KVFingerprint) -> FilesIndex:
        return FilesIndex(self._folder_for(fingerprint))

    def open_mover(self, fingerprint: KVFingerprint) -> FilesMover:
        return FilesMover(self._root, self._folder_for(fingerprint), self._max_bytes, self._io)

    def open_encoder_store(self, fingerprint: KVFingerprint) -> FilesMover:
        return self.open_mover(fingerprint)

    def _folder_for(self, fingerprint: KVFingerprint) -> Path:
        """Blocks of other models, or of the same one in another layout, lie in another folder."""
        try:
            return make_private_folder(self._root, fingerprint.digest)
        except OSError as error:
            folder = self._root / fingerprint.digest
            raise ConfigError("kv_files", f"{folder} can't be made: {error.strerror}", "another folder") from error


def _path_of(folder: Path, key: bytes) -> str:
    """Files are divided among 256 folders by a byte of the hash: the first two bytes of a key are its group."""
    name = key.hex()
    return f"{folder}/{name[4:6]}/{name}{SUFFIX}"


class FilesIndex(BlockIndex):
    """The keys that have a file, in memory. A thread looks from time to time at what other engines changed."""

    keeps_ended_texts = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: set[bytes] = set()
        self._own: dict[bytes, float] = {}  # keys that were offered here, and may not have a file yet; with the time
        self._seen: dict[str, int] = {}  # folders, and when they had last changed as they were read
        self._of_folder: dict[str, set[bytes]] = {}
        self._marks: dict[bytes, float] = {}  # times of last use that files are to get
        self._leased: dict[bytes, float] = {}  # keys that leases hold, and until when
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._keep_looking, name="kv-files-index", daemon=True)
        self._thread.start()

    def find(self, key: bytes) -> bool:
        return key in self._keys

    def offer(self, key: bytes) -> bool:
        """A block counts as there from now on: it is in the queue of the mover before any later plan could load it."""
        if key in self._keys:
            return False
        with self._lock:
            self._own[key] = time.monotonic()
            self._keys.add(key)
        return True

    def supersede(self, key: bytes) -> None:
        with self._lock:
            if key in self._keys and self._leased.get(key, 0.0) <= time.time():
                self._marks[key] = SUPERSEDED

    def prolong(self, key: bytes) -> None:
        self._use_until(key, time.time() + SECONDS_OF_A_DAY)

    def keep(self, key: bytes, seconds: float) -> None:
        end = time.time() + seconds
        if self._use_until(key, end):
            with self._lock:
                self._leased[key] = max(self._leased.get(key, 0.0), end)

    def _use_until(self, key: bytes, when: float) -> bool:
        """Lets the file of this key have its last use in the future. False: there is none."""
        if key not in self._keys:
            return False
        with self._lock:
            self._marks[key] = max(self._marks.get(key, 0.0), when)
        return True

    def _mark(self) -> None:
        """Writes down when files are to go. Those that are not written yet are marked later."""
        with self._lock:
            marks, self._marks = self._marks, {}
            now = time.time()
            self._leased = {key: end for key, end in self._leased.items() if end > now}
        for key, used_at in marks.items():
            path = _path_of(self._folder, key)
            try:
                if used_at == SUPERSEDED or used_at > os.stat(path).st_mtime:
                    os.utime(path, (used_at, used_at))
            except FileNotFoundError:
                with self._lock:
                    if key in self._own:
                        self._marks.setdefault(key, used_at)
            except OSError:  # of a disk that can't be written: it goes by when it was last used
                pass

    def lose(self, key: bytes) -> None:
        with self._lock:
            self._own.pop(key, None)
            self._keys.discard(key)
            for keys in self._of_folder.values():
                keys.discard(key)

    def look(self) -> None:
        """Reads the folders that have changed since the last time, and marks files."""
        self._mark()
        changed = False
        with suppress(OSError), os.scandir(self._folder) as folders:
            for entry in folders:
                with suppress(OSError):
                    when = entry.stat().st_mtime_ns
                    if self._seen.get(entry.path) != when and entry.is_dir():
                        self._of_folder[entry.path] = _keys_in(entry.path)
                        self._seen[entry.path] = when
                        changed = True
        oldest = time.monotonic() - 10 * SECONDS_BETWEEN_LOOKS
        with self._lock:
            written = [key for key, when in self._own.items() if when < oldest]
            for key in written:  # by now it has a file, or was not kept
                del self._own[key]
            if changed or written:
                self._keys = set(self._own).union(*self._of_folder.values())

    def _keep_looking(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_LOOKS):
            self.look()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(SECONDS_WITHOUT_PROGRESS)  # a daemon: it may look at a device that has stalled
        self._mark()


def _keys_in(folder: str) -> set[bytes]:
    found = set()
    with os.scandir(folder) as files:
        for file in files:
            name, dot, suffix = file.name.partition(".")
            if dot + suffix == SUFFIX:
                with suppress(ValueError):
                    found.add(bytes.fromhex(name))
    return found


class FilesMover(BlockMover):
    def __init__(self, root: Path, folder: Path, max_bytes: int, io: str = SYSTEM) -> None:
        self._root = root
        self._folder = folder
        self._max_bytes = max_bytes
        self._io_name = io
        self._io_of_writer: FileIO | None = None
        self._silent_until = 0.0
        self._num_bytes = sum(file.size for file in _files_of(root))  # as far as is known: others write, too
        self._num_bytes_since_count = 0
        self._num_written = 0
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_all, name=f"kv-files-read-{number}", daemon=True)
            for number in range(NUM_READERS)
        ]
        for reader in self._readers:
            reader.start()
        self._stalled_until = 0.0
        self._queue = WriteBehind("kv-files-write", self._write_all)

    # ---- save ----

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Takes a copy, which is written later."""
        if time.monotonic() >= self._silent_until:
            self._queue.put(key, parts)

    def _write_all(self, blocks: Mapping[bytes, bytearray]) -> None:
        for key, content in blocks.items():
            try:
                if time.monotonic() >= self._silent_until:
                    self._write(key, content)
            except OSError as error:
                self._silent_until = time.monotonic() + SECONDS_AFTER_FAILURE
                logger.warning("blocks are not written to %s for a while: %s", self._folder, error)

    def _write(self, key: bytes, content: bytearray) -> None:
        path = _path_of(self._folder, key)
        if _is_written(path, HEADER.size + len(key) + len(content)):  # by another engine, with the same content
            return
        if self._io_of_writer is None:
            self._io_of_writer = open_file_io(self._io_name)
        make_missing_folders(Path(path).parent)
        self._num_written += 1
        unfinished = f"{path}.{os.getpid()}-{self._num_written}{UNFINISHED}"
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                head = HEADER.pack(MAGIC, VERSION, len(key), len(content), _checksum(key, [content])) + key
                self._io_of_writer.write(handle, [head, content])
            finally:
                os.close(handle)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        self._num_bytes += len(head) + len(content)
        self._num_bytes_since_count += len(head) + len(content)
        if max(self._num_bytes, self._num_bytes_since_count / SHARE_BETWEEN_COUNTS) > self._max_bytes:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Counts the files, and removes the oldest if there are too many. Another engine, or another rank of this one,
        may do the same at the same time: a file that is gone is none that has to be removed."""
        files = sorted(_files_of(self._root))
        num_bytes, most = sum(file.size for file in files), int(self._max_bytes * SHARE_KEPT)
        self._num_bytes_since_count = 0
        if num_bytes <= self._max_bytes:
            files = []
        for file in files:
            if num_bytes <= most:
                break
            with suppress(OSError):
                os.unlink(file.path)
            num_bytes -= file.size
        self._num_bytes = num_bytes

    # ---- load ----

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        (is_there,) = self.load_all([(key, parts)])
        return is_there

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        """A device that stalls is waited for as long as one block after another arrives. What has not arrived then
        counts as lost, and nothing is asked for in the next seconds."""
        if time.monotonic() < self._stalled_until:
            return [False] * len(wanted)
        done: SimpleQueue[None] = SimpleQueue()
        reads = [Read(key, parts, done) for key, parts in wanted]
        for read in reads:
            self._reads.put(read)
        try:
            for _ in reads:
                done.get(timeout=SECONDS_WITHOUT_PROGRESS)
        except Empty:
            self._stalled_until = time.monotonic() + SECONDS_AFTER_FAILURE
            logger.warning(
                "%s has given nothing for %g seconds: its blocks are computed for a while",
                self._folder,
                SECONDS_WITHOUT_PROGRESS,
            )
        return [read.end() for read in reads]

    def _read_all(self) -> None:
        buffer, io = bytearray(), None
        while (read := self._reads.get()) is not None:
            try:
                if not read.has_ended:
                    io = io or open_file_io(self._io_name)
                    self._read(read, buffer, io)
            except Exception:
                logger.warning("block %s can't be loaded from %s", read.key.hex(), self._folder, exc_info=True)
            finally:
                read.done.put(None)
                read = None  # the memory of a block that has arrived is not kept here

    def _read(self, read: Read, buffer: bytearray, io: FileIO) -> None:
        """Reads a block, from the queue or from its file. One that is damaged is removed."""
        key = read.key
        waiting = self._queue.get(key)
        if waiting is not None:
            read.fill(lambda parts: fill(parts, waiting))
            return
        path = _path_of(self._folder, key)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            is_good: bool | None = None
            if os.fstat(handle).st_size == HEADER.size + len(key) + read.num_bytes:
                head = HEADER.pack(MAGIC, VERSION, len(key), read.num_bytes, bytes(CHECKSUM_BYTES))
                # Straight to its memory, if no device is waited for: that memory is held meanwhile
                is_good = read.fill(lambda parts: io.read_cached_block(handle, head, key, parts))
            if is_good is None:
                is_good = _read_by_buffer(read, handle, buffer, io)
            if is_good:
                with suppress(OSError):
                    _note_use(handle)
        finally:
            os.close(handle)
        if not is_good:
            logger.warning("%s is damaged, and is removed", path)
            with suppress(OSError):
                os.unlink(path)

    def flush(self) -> None:
        """Waits until all that was saved is written."""
        self._queue.flush()

    def close(self) -> None:
        for _ in self._readers:
            self._reads.put(None)
        num_left = self._queue.close(SECONDS_WITHOUT_PROGRESS)
        if num_left:
            logger.warning("%s has stalled: %d blocks are not written", self._folder, num_left)


class Read:
    """A block that is to be loaded. A reader fills its memory before `end`, or not at all."""

    def __init__(self, key: bytes, parts: Sequence[memoryview], done: SimpleQueue[None]) -> None:
        self.key = key
        self.parts = parts
        self.num_bytes = sum(part.nbytes for part in parts)
        self.done = done  # gets an item when a reader is through with it
        self.has_ended = False
        self._lock = threading.Lock()
        self._is_filled = False

    def fill(self, write: Callable[[Sequence[memoryview]], bool | None]) -> bool | None:
        """Lets `write` fill the memory, and returns what it says. None: it does not know, or it is too late."""
        with self._lock:
            if self.has_ended:
                return None
            is_filled = write(self.parts)
            self._is_filled = bool(is_filled)
            return is_filled

    def end(self) -> bool:
        """Returns whether the memory has been filled. It is not written to from now on."""
        with self._lock:
            self.has_ended = True
            return self._is_filled


class _File(NamedTuple):
    used_at: int  # the first field: files are sorted by it
    size: int
    path: str


def _files_of(root: Path) -> Iterator[_File]:
    """The files of all kinds of blocks in the folder. What an engine that is gone left unfinished is removed."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            with suppress(OSError):
                facts = os.stat(path)
                if name.endswith(SUFFIX):
                    yield _File(facts.st_mtime_ns, facts.st_size, path)
                elif name.endswith(UNFINISHED) and time.time() - facts.st_mtime > SECONDS_UNFINISHED:
                    os.unlink(path)


def _checksum(key: bytes, parts: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(key)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _note_use(file: int | str) -> None:
    """A file was used. If it is kept for a day, it stays so."""
    if os.stat(file).st_mtime < time.time():
        os.utime(file)


def _is_written(path: str, size: int) -> bool:
    """Whether a file of this name is there, which then counts as used. One that is damaged is found when it is read."""
    try:
        if os.stat(path).st_size != size:
            return False
        _note_use(path)
    except OSError:
        return False
    return True


def _read_by_buffer(read: Read, handle: int, buffer: bytearray, io: FileIO) -> bool:
    """Reads a file from a device by a reader's own buffer: what comes from one that had stalled must not reach memory
    that has another use by then. False: the file is not what it should be."""
    if len(buffer) != read.num_bytes:
        buffer[:] = bytes(read.num_bytes)
    is_good = _read_content(io, handle, read.key, buffer)
    if is_good:
        read.fill(lambda parts: fill(parts, buffer))
    return is_good


def _read_content(io: FileIO, handle: int, key: bytes, content: bytearray) -> bool:
    """False: the file is not what it should be."""
    head = bytearray(HEADER.size + len(key))
    if not io.read(handle, [head, content]):
        return False
    magic, version, key_bytes, num_bytes, checksum = HEADER.unpack_from(head)
    expected = (MAGIC, VERSION, len(key), len(content), key)
    if (magic, version, key_bytes, num_bytes, bytes(head[HEADER.size :])) != expected:
        return False
    return _checksum(key, [content]) == checksum
