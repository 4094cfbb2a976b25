"""Engines that share a folder of blocks, killed by `kill -9` while they write and read it: no answer changes, and every
file that has its name is whole.

RATOON_KILLS=50 asks for more kills than a run of all tests has time for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from ratoon import AsyncLLM
from ratoon.core.health import EngineState
from ratoon.distributed import kv_files
from ratoon.engine.processes.ledger import MAX_STRIKES
from tests.faults.kills import number_of_kills
from tests.faults.processes import SETTINGS, is_running, model_name
from tests.faults.test_engine_death import read_stream
from tests.waiting import until

NUM_STREAMS = 6
NUM_FILES = 12  # fewer than the streams have blocks: files are removed and written all the time


def is_whole(path: Path) -> bool:
    """Whether a file has the content and the checksum that its name asks for."""
    data, key = path.read_bytes(), bytes.fromhex(path.stem)
    start = kv_files.HEADER.size
    magic, version, key_bytes, size, checksum = kv_files.HEADER.unpack_from(data)
    content = bytearray(data[start + len(key) :])
    is_named = (magic, version, key_bytes, data[start : start + len(key)]) == (
        kv_files.MAGIC,
        kv_files.VERSION,
        len(key),
        key,
    )
    return is_named and size == len(content) and checksum == kv_files._checksum(key, [content])


async def survive(folder: Path, num_kills: int) -> None:
    dice, killed, seen = random.Random(4), set(), set()
    interrupted: set[int] = set()  # engines whose last start was ended by a kill
    settings = SETTINGS | {"kv_files": str(folder), "swap_memory": "1MiB", "num_blocks": 40, "data_parallel_size": 2}

    async def keep_streaming(llm: AsyncLLM, seed: int, right: dict[int, list[int]]) -> None:
        while len(killed) < num_kills:
            assert await read_stream(llm, seed) == right

    async def keep_killing(llm: AsyncLLM) -> None:
        while len(killed) < num_kills:
            await asyncio.sleep(0.3 * dice.random())
            # One that was killed a moment ago may not be missed yet
            engines = [one for one in llm.health().engines if one.pid is not None and one.pid not in killed]
            # A request that sees three deaths and no token counts as their cause: wait for its token.
            has_strikes = any(entry.strikes >= MAX_STRIKES - 1 for entry in llm._client._ledger._entries.values())
            if len(engines) < 2 or llm.health().state != EngineState.OK or has_strikes:
                continue
            seen.update(one.pid for one in engines)
            chosen = dice.choice(engines)
            # While it starts, too, but not again and again: an engine whose starts fail five times in a row is given up
            if chosen.state == EngineState.OK:
                interrupted.discard(chosen.index)
            elif chosen.index in interrupted:
                continue
            else:
                interrupted.add(chosen.index)
            with suppress(ProcessLookupError):
                os.kill(chosen.pid, signal.SIGKILL)
                killed.add(chosen.pid)

    async with AsyncLLM(model_name(), **SETTINGS) as llm:
        right = [await read_stream(llm, seed) for seed in range(NUM_STREAMS)]
    async with AsyncLLM(model_name(), **settings) as llm:
        await read_stream(llm, 0)
        await until("a file is written", lambda: any(folder.rglob("*.kv")))
        size = next(folder.rglob("*.kv")).stat().st_size
    async with AsyncLLM(model_name(), **settings, kv_files_size=NUM_FILES * size) as llm:
        streams = (keep_streaming(llm, seed, right[seed]) for seed in range(NUM_STREAMS))
        await asyncio.gather(*streams, keep_killing(llm))
        await until("they are back", lambda: llm.health().ok)
        seen.update(one.pid for one in llm.health().engines)
        for books in await llm._client.call_utility("check"):
            assert books["num_used_blocks"] == 0 and books["num_requests"] == 0
    await until("all processes have ended", lambda: not any(is_running(pid) for pid in seen if pid is not None))


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(number_of_kills(12), marks=pytest.mark.full)])
def test_engines_that_are_killed_leave_whole_files_and_change_no_answer(num_kills: int, tmp_path: Path) -> None:
    asyncio.run(survive(tmp_path, num_kills))
    files = list(tmp_path.rglob("*.kv"))
    assert files and all(map(is_whole, files))
    assert len(files) <= 2 * NUM_FILES
    assert len(list(tmp_path.rglob(f"*{kv_files.UNFINISHED}"))) <= num_kills, "more parts of files than deaths"
