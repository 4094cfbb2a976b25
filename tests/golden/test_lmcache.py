"""Blocks in a real LMCache server: what one engine computes is loaded by the next one, with the same tokens; a server
that is stopped, killed or started again costs time and nothing else.

The server is the command `lmcache` of the package (`pip install ratoon[lmcache]`), or the one that RATOON_LMCACHE
names: it may be installed apart, as it shares nothing with the engine but a socket and memory. `make test-connectors`
installs one, and runs these tests with it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.kv import KVFingerprint, PageLayout
from ratoon.core.kv_connector import block_key
from ratoon.distributed import lmcache
from ratoon.distributed.lmcache import LMCacheConnector, LMCacheIndex, LMCacheMover
from tests.golden.engines import engine, greedy, run, tokens_of
from tests.golden.tiny_models import random_token_ids
from tests.ports import free_port
from tests.waiting import wait_until

COMMAND = os.environ.get("RATOON_LMCACHE") or shutil.which("lmcache")
if COMMAND is None or sys.platform != "linux":
    pytest.skip("there is no LMCache", allow_module_level=True)

FAMILY = "llama with grouped heads"
PROMPTS = [random_token_ids(length, seed=length) for length in (70, 33, 90)]
KIND = KVFingerprint(weights="w", layout=PageLayout((1000, 24), ()))
SIZES = (1000, 24)


class LMCacheServer:
    def __init__(self, log: Path) -> None:
        self.port, self._http_port = free_port(), free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.memory = f"ratoon_test_{os.getpid()}"
        self._log = log
        self.start()

    def start(self) -> None:
        assert COMMAND is not None
        command = [
            COMMAND, "server", "--host", "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1",
            "--http-port", str(self._http_port), "--supported-transfer-mode", "engine_driven", "--chunk-size", "16",
            "--l1-size-gb", "0.05", "--no-l1-use-lazy", "--shm-name", self.memory, "--eviction-policy", "LRU",
            "--disable-observability",
        ]  # fmt: skip
        environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        environment.pop("PYTHONPATH", None)
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        wait_until("the server listens", self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")[-3000:]
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for path in Path("/dev/shm").glob(f"*{self.memory}*"):
            path.unlink()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    made = LMCacheServer(tmp_path_factory.mktemp("lmcache") / "log")
    try:
        yield made
    finally:
        made.kill()


def key(number: int) -> bytes:
    return block_key(0, number.to_bytes(32, "big"))


def content(number: int) -> list[bytes]:
    return [random.Random(number).randbytes(size) for size in SIZES]


@contextmanager
def opened(server: LMCacheServer) -> Iterator[tuple[LMCacheIndex, LMCacheMover]]:
    connector = LMCacheConnector({"url": server.url})
    mover, index = connector.open_mover(KIND), connector.open_index(KIND)
    try:
        yield index, mover
    finally:
        index.close()
        mover.close()


def save(index: LMCacheIndex, mover: LMCacheMover, *numbers: int) -> None:
    for number in numbers:
        if index.offer(key(number)):
            mover.save(key(number), [memoryview(part) for part in content(number)])
    mover.flush()


def read(mover: LMCacheMover, *numbers: int) -> list[list[bytes] | None]:
    parts = {number: [bytearray(size) for size in SIZES] for number in numbers}
    found = mover.load_all([(key(number), [memoryview(part) for part in parts[number]]) for number in numbers])
    return [[bytes(part) for part in parts[number]] if is_there else None for number, is_there in zip(numbers, found)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_finds_what_the_last_one_computed(server: LMCacheServer, ranks: int) -> None:
    settings: dict[str, Any] = {
        "kv_connector": "lmcache", "kv_connector_options": {"url": server.url}, "swap_memory": "1MiB",
        "tensor_parallel_size": ranks,
    }  # fmt: skip
    with engine(FAMILY) as llm:
        expected = tokens_of(run(llm, PROMPTS, greedy(20)))
    for cached in ([0, 0, 0], [64, 32, 80]):
        with engine(FAMILY, **settings) as llm:
            outputs = run(llm, PROMPTS, greedy(20))
            assert (tokens_of(outputs), [one.num_cached_tokens for one in outputs]) == (expected, cached)


def test_blocks_are_found_by_other_engines_and_a_wrong_byte_is_not_read(server: LMCacheServer) -> None:
    numbers = range(100)
    with opened(server) as (index, mover):
        save(index, mover, *numbers)
        with opened(server) as (other, reader):
            other.look_ahead([key(number) for number in range(120)])
            assert [other.find(key(number)) for number in (0, 50, 99, 100, 119)] == [True, True, True, False, False]
            assert read(reader, *numbers, 100) == [*map(content, numbers), None]
        (memory,) = Path("/dev/shm").glob(f"*{server.memory}*")
        data = bytearray(memory.read_bytes())
        place = data.index(content(7)[0])
        with open(memory, "r+b") as file:
            file.seek(place + 500)
            file.write(bytes([data[place + 500] ^ 4]))
        assert read(mover, 7, 8) == [None, content(8)]


def test_a_server_that_is_stopped_or_started_again_costs_time_alone(
    server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache, "SECONDS_WITHOUT_ANSWER", 1.0)
    monkeypatch.setattr(lmcache, "SECONDS_AFTER_FAILURE", 2.0)
    with opened(server) as (index, mover):
        save(index, mover, 201)
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert not index.find(key(202)) and read(mover, 201) == [None]
        assert not index.find(key(203)) and read(mover, 201) == [None]  # it is not asked
        save(index, mover, 204)
        assert time.monotonic() - began < 60  # each half waits once
        server.process.send_signal(signal.SIGCONT)
        wait_until("it is asked again", lambda: read(mover, 201) == [content(201)])
        server.kill()
        assert read(mover, 201) == [None]
        server.start()
        index.lose(key(201))
        wait_until("it takes blocks again", lambda: _is_saved_again(index, mover))


def _is_saved_again(index: LMCacheIndex, mover: LMCacheMover) -> bool:
    save(index, mover, 201)
    if read(mover, 201) == [content(201)]:
        return True
    index.lose(key(201))
    return False
