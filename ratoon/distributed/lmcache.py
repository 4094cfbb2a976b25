"""The connector `lmcache`: blocks of the KV cache in an LMCache server, which outlives the engine and has tiers of its
own behind its memory.

    index   LOOKUP → WAIT_PREFETCH_STATUS → FREE_LOOKUP_LOCKS → END_SESSION
    load    LOOKUP → WAIT_PREFETCH_STATUS → PREPARE_RETRIEVE → copy → COMMIT_RETRIEVE → END_SESSION
    save    PREPARE_STORE → copy → COMMIT_STORE → END_SESSION

Requests go over ZMQ, and blocks through the server's shared memory, from which they are copied here: the server never
touches the memory of the engine, and nothing is pickled. LMCache knows chunks of tokens. To it, a block is a prompt of
one chunk, whose token ids are made of the block's key; its content is bytes, behind which there is a checksum of ours.
The server does not answer a request that fails: all waits have limits, and after one the server is left alone for a
while. What it can't give back is computed.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import shake_256
from typing import Any, NamedTuple, NoReturn

import msgspec
import xxhash

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector
from ratoon.distributed.block_bytes import fill
from ratoon.distributed.write_behind import WriteBehind

logger = logging.getLogger(__name__)

SECONDS_WITHOUT_ANSWER = 2.0  # after which the server counts as gone
SECONDS_TO_CONNECT = 10.0
SECONDS_AFTER_FAILURE = 10.0  # in which it is not asked
SECONDS_BETWEEN_REGISTRATIONS = 300.0  # a server drops what it has not heard of for an hour
SECONDS_OF_A_MISS = 1.0  # in which a block that was not there is not asked for again
MAX_KEYS = 200_000  # that an index remembers
BLOCKS_AT_ONCE = 64  # that are asked for, before their answers are read
MIN_CHUNK = 8  # tokens of a chunk: as many 31-bit numbers are made of a key
CHECKSUM_BYTES = 16

# The numbers of operations on the wire, as LMCache 0.4 and 0.5 have them
LOOKUP, WAIT_PREFETCH_STATUS, FREE_LOOKUP_LOCKS, END_SESSION = 8, 10, 12, 13
REGISTER, UNREGISTER = 14, 15
PREPARE_STORE, COMMIT_STORE, PREPARE_RETRIEVE, COMMIT_RETRIEVE = 16, 17, 18, 19
GET_CHUNK_SIZE = 21

Call = tuple[int, list[Any]]  # an operation, and its arguments


class ServerGoneError(Exception):
    """The server has not answered."""


class LMCacheConnector(KVConnector):
    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"url"})
        url = options.get("url")
        if unknown or not isinstance(url, str) or not url.startswith(("tcp://", "ipc://")):
            raise ValueError('{"url": "tcp://HOST:PORT"} is needed, the address of an LMCache server')
        self._url = url

    def open_index(self, fingerprint: KVFingerprint) -> LMCacheIndex:
        return LMCacheIndex(Server(self._url, fingerprint))

    def open_mover(self, fingerprint: KVFingerprint) -> LMCacheMover:
        return LMCacheMover(Server(self._url, fingerprint), Server(self._url, fingerprint))


class Slot(NamedTuple):
    """A place in the server's shared memory."""

    offset: int
    length: int


class Server:
    """A connection, for one thread at a time, and the server's memory."""

    def __init__(self, url: str, fingerprint: KVFingerprint) -> None:
        import zmq

        self._url = url
        self._model = f"ratoon-{fingerprint.digest}"
        self._size = sum(fingerprint.layout.tensor_bytes) + CHECKSUM_BYTES
        self._instance = secrets.randbits(62)
        self._num_requests = 0
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._socket: Any = None
        self._memory: mmap.mmap | None = None
        self._registered_at = -SECONDS_BETWEEN_REGISTRATIONS
        self._silent_until = 0.0
        self._chunk_size = 0
        self._register(SECONDS_TO_CONNECT)

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer of late."""
        return time.monotonic() < self._silent_until

    @property
    def size(self) -> int:
        """Bytes of a block in the server's memory."""
        return self._size

    def close(self) -> None:
        if self._socket is not None:
            if not self.is_silent:
                with suppress(ServerGoneError):
                    self._ask([(UNREGISTER, [self._instance])], SECONDS_WITHOUT_ANSWER)
            self._socket.close(linger=0)
            self._socket = None
        self._drop_memory()

    # ---- calls ----

    def call(self, calls: Sequence[Call], seconds: float = SECONDS_WITHOUT_ANSWER) -> list[Any]:
        """The answers to these calls, which are sent at once. Raises ServerGoneError if none arrives for so long; it is
        raised at once for a while afterwards."""
        if self.is_silent:
            raise ServerGoneError
        try:
            if time.monotonic() > self._registered_at + SECONDS_BETWEEN_REGISTRATIONS:
                self._register(SECONDS_WITHOUT_ANSWER)
            return self._ask(calls, seconds)
        except (ConfigError, msgspec.MsgspecError, LookupError, TypeError, ValueError, OSError) as error:
            self._fail(f"its answer is of no use: {error}")

    def key(self, block: bytes, request_id: str) -> dict[str, Any]:
        """Returns a key as LMCache has them: it names a chunk of the tokens of a request."""
        numbers = struct.unpack(f"<{self._chunk_size}I", shake_256(block).digest(4 * self._chunk_size))
        return {
            "model_name": self._model,
            "world_size": 1,
            "worker_id": 0,
            "token_ids": [number & 0x7FFFFFFF for number in numbers],
            "start": 0,
            "end": self._chunk_size,
            "request_id": request_id,
            "cache_salt": "",
            "request_configs": None,
            "num_kv_readers": 1,
        }

    def new_request(self) -> str:
        self._num_requests += 1
        return f"ratoon-{self._instance:x}-{self._num_requests}"

    @property
    def instance(self) -> int:
        return self._instance

    def _ask(self, calls: Sequence[Call], seconds: float) -> list[Any]:
        import zmq

        waiting = self._send(calls)
        answers: dict[int, Any] = {}
        while waiting:
            if not self._socket.poll(int(seconds * 1000), zmq.POLLIN):
                self._fail(f"it has not answered for {seconds:g} seconds")
            number, _, *response = self._socket.recv_multipart()
            number = msgspec.msgpack.decode(number)
            if number in waiting:  # else it is late
                waiting.remove(number)
                answers[number] = msgspec.msgpack.decode(response[0]) if response else None
        return [answers[number] for number in sorted(answers)]

    def _send(self, calls: Iterable[Call]) -> set[int]:
        sent = set()
        for operation, arguments in calls:
            self._num_requests += 1
            sent.add(self._num_requests)
            frames = [msgspec.msgpack.encode(one) for one in (self._num_requests, operation, *arguments)]
            self._socket.send_multipart(frames)
        return sent

    def _fail(self, problem: str) -> NoReturn:
        """Its answers may come late, to a socket that is not read any more. The next call registers again: a server
        that was started anew knows nothing of this engine."""
        self._silent_until = time.monotonic() + SECONDS_AFTER_FAILURE
        self._registered_at = -SECONDS_BETWEEN_REGISTRATIONS
        logger.warning("the LMCache server at %s is left alone for a while: %s", self._url, problem)
        raise ServerGoneError(problem)

    # ---- registration, and memory ----

    def _register(self, seconds: float) -> None:
        """Raises ConfigError if it answers, and is not of use; for a first answer also ServerGoneError."""
        import zmq

        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a server that is gone lets no call wait in `send`
        self._socket.connect(self._url)
        payload = {
            "instance_id": self._instance,
            "model_name": self._model,
            "world_size": 1,
            "block_size": 1,
            "num_layers": 1,
            "hidden_dim_size": self._size,
            "dtype_str": "uint8",
            "use_mla": True,  # one tensor, not one of keys and one of values
            "num_physical_slots": 1,
        }
        try:
            (self._chunk_size,) = self._ask([(GET_CHUNK_SIZE, [])], seconds)
            (answer,) = self._ask([(REGISTER, [payload])], seconds)
        except ServerGoneError as error:
            if self._memory is not None:
                raise
            problem = f"no LMCache server at {self._url} takes a registration: {error}"
            expected = "lmcache server --supported-transfer-mode engine_driven …, see docs/tiers.md"
            raise ConfigError("kv_connector_options", problem, expected) from None
        if self._chunk_size < MIN_CHUNK:
            problem = f"the server at {self._url} has chunks of {self._chunk_size} tokens"
            raise ConfigError("kv_connector_options", problem, f"--chunk-size {MIN_CHUNK} or more")
        self._open_memory(answer["shm_name"], answer["pool_size"])
        self._registered_at = time.monotonic()

    def _open_memory(self, name: str, size: int) -> None:
        if not name or "/" in name.strip("/"):
            problem = f"the LMCache server at {self._url} shares no memory"
            raise ConfigError("kv_connector_options", problem, "lmcache server --shm-name NAME --no-l1-use-lazy …")
        try:
            handle = os.open(f"/dev/shm/{name.strip('/')}", os.O_RDWR)
        except OSError as error:
            problem = f"the memory {name} of the LMCache server can't be opened: {error.strerror}"
            raise ConfigError("kv_connector_options", problem, "a server of the same host and user") from None
        try:
            self._drop_memory()
            self._memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def slot_of(self, answer: Any) -> Slot | None:
        """The only slot of an answer; None: there is none that is as it should be."""
        slots = answer["context"].get("slots") if isinstance(answer, dict) else None
        if not slots:
            return None
        slot = Slot(int(slots[0]["offset"]), int(slots[0]["length"]))
        fits = self._memory is not None and 0 <= slot.offset <= len(self._memory) - self._size
        return slot if fits and slot.length >= self._size else None

    def write(self, slot: Slot, key: bytes, content: bytes | bytearray) -> None:
        assert self._memory is not None
        self._memory[slot.offset : slot.offset + self._size] = content + checksum(key, content)

    def read(self, slot: Slot, key: bytes) -> bytes | None:
        """None: it is not what was saved."""
        assert self._memory is not None
        data = self._memory[slot.offset : slot.offset + self._size]
        content = data[:-CHECKSUM_BYTES]
        return content if checksum(key, content) == data[-CHECKSUM_BYTES:] else None


def checksum(key: bytes, content: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


class LMCacheIndex(BlockIndex):
    """Asks the server, and remembers what it has. Blocks that it has dropped since are noticed when they are loaded."""

    keeps_ended_texts = True
    looks_ahead = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: OrderedDict[bytes, float] = OrderedDict()  # until when a key is not there; 0: it is there

    def find(self, key: bytes) -> bool:
        if not self._is_known(key):
            self._ask([key])
        return self._known.get(key) == 0.0

    def look_ahead(self, keys: Sequence[bytes]) -> None:
        """Asks for a few, and for more if they are there: of most new prompts there is nothing."""
        unknown = [key for key in keys if not self._is_known(key)]
        count = 1
        while unknown:
            asked, unknown = unknown[:count], unknown[count:]
            self._ask(asked)
            if any(self._known.get(key) != 0.0 for key in asked):
                return
            count = min(8 * count, BLOCKS_AT_ONCE)

    def offer(self, key: bytes) -> bool:
        """A block counts as there from now on: it is in the queue of the mover before any later plan could load it."""
        if self.find(key):
            return False
        if self._server.is_silent:
            return False
        self._remember(key, 0.0)
        return True

    def lose(self, key: bytes) -> None:
        self._remember(key, time.monotonic() + SECONDS_OF_A_MISS)

    def _is_known(self, key: bytes) -> bool:
        until = self._known.get(key)
        return until is not None and (until == 0.0 or time.monotonic() < until)

    def _remember(self, key: bytes, until: float) -> None:
        self._known[key] = until
        self._known.move_to_end(key)
        if len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)

    def _ask(self, keys: Sequence[bytes]) -> None:
        server = self._server
        try:
            asked, found = look_up(server, keys)
            held = [one for one, is_there in zip(asked, found) if is_there]
            server.call([(FREE_LOOKUP_LOCKS, [one, 1]) for one in held])
            server.call([(END_SESSION, [one["request_id"]]) for one in asked])
        except ServerGoneError:
            return
        for key, is_there in zip(keys, found):
            self._remember(key, 0.0 if is_there else time.monotonic() + SECONDS_OF_A_MISS)

    def close(self) -> None:
        self._server.close()


def look_up(server: Server, keys: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Has the server bring these blocks to its memory, and lock them. Returns its names of them, and whether they are
    there. Raises ServerGoneError."""
    asked = [server.key(key, server.new_request()) for key in keys]
    server.call([(LOOKUP, [one, 1]) for one in asked])
    waits: list[Call] = [(WAIT_PREFETCH_STATUS, [one["request_id"], SECONDS_WITHOUT_ANSWER / 2]) for one in asked]
    return asked, [bool(count) for count in server.call(waits)]


class LMCacheMover(BlockMover):
    def __init__(self, server: Server, server_of_writer: Server) -> None:
        self._server = server
        self._writing = server_of_writer
        self._queue = WriteBehind("lmcache-save", self._save_all, BLOCKS_AT_ONCE)

    # ---- save ----

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Takes a copy, which is saved later."""
        if not self._writing.is_silent:
            self._queue.put(key, parts)

    def _save_all(self, blocks: Mapping[bytes, bytearray]) -> None:
        with suppress(ServerGoneError):  # it was logged
            self._save(blocks)

    def _save(self, blocks: Mapping[bytes, bytearray]) -> None:
        server = self._writing
        names = [server.key(key, server.new_request()) for key in blocks]
        answers = server.call([(PREPARE_STORE, [name, server.instance]) for name in names])
        commits: list[Call] = []
        for name, answer, (key, content) in zip(names, answers, blocks.items(), strict=True):
            slot = server.slot_of(answer)
            if slot is not None and len(content) == server.size - CHECKSUM_BYTES:
                server.write(slot, key, content)
                commits.append((COMMIT_STORE, [name, server.instance, b""]))
        server.call(commits)
        server.call([(END_SESSION, [name["request_id"]]) for name in names])

    # ---- load ----

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        (is_there,) = self.load_all([(key, parts)])
        return is_there

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        loaded = []
        for start in range(0, len(wanted), BLOCKS_AT_ONCE):
            loaded += self._load_some(wanted[start : start + BLOCKS_AT_ONCE])
        return loaded

    def _load_some(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        content: dict[bytes, bytes | bytearray] = {
            key: waiting for key, _ in wanted if (waiting := self._queue.get(key)) is not None
        }
        try:
            content |= self._fetch([key for key, _ in wanted if key not in content])
        except ServerGoneError:
            pass  # it was logged
        except Exception:
            logger.warning("blocks can't be loaded from the LMCache server", exc_info=True)
        return [key in content and fill(parts, content[key]) for key, parts in wanted]

    def _fetch(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        server = self._server
        asked, found = look_up(server, keys)
        there = [(key, name) for key, name, is_there in zip(keys, asked, found) if is_there]
        answers = server.call([(PREPARE_RETRIEVE, [name, server.instance]) for _, name in there])
        content = {}
        for (key, _), answer in zip(there, answers, strict=True):
            slot = server.slot_of(answer) if answer["success"] else None
            read = None if slot is None else server.read(slot, key)
            if read is not None:
                content[key] = read
        server.call([(COMMIT_RETRIEVE, [name, server.instance]) for _, name in there])
        server.call([(END_SESSION, [name["request_id"]]) for name in asked])
        return content

    def flush(self) -> None:
        """Waits until all that was taken is saved, or given up."""
        self._queue.flush()

    def close(self) -> None:
        while self._queue.close(SECONDS_WITHOUT_ANSWER):  # each of its calls has a limit
            pass
        self._server.close()
        self._writing.close()
