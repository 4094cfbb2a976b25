"""The network between hosts is cut while streams run: none of them is lost or changed.

RATOON_KILLS=50 asks for more cuts than a run of all tests has time for."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("ranks on several hosts need Linux", allow_module_level=True)

from ratoon import AsyncLLM
from ratoon.core.health import EngineState
from ratoon.engine.processes.ledger import MAX_STRIKES
from tests.faults.kills import number_of_kills
from tests.faults.processes import SETTINGS, is_running, model_name
from tests.faults.test_engine_death import num_restarts, read_stream
from tests.golden.nodes import SECRET, Relay, running_node
from tests.ports import free_port
from tests.waiting import until, wait_until

NUM_STREAMS = 6
SECONDS_HELD = 3.0  # less than the silence after which hosts end a run
WAYS = ("held", "broken", "cut")


@pytest.mark.slow
def test_streams_survive_a_network_between_hosts_that_is_cut_under_load(tmp_path: Path) -> None:
    """The network passes nothing for a while, breaks the connections, or loses all packets. Only the first leaves the
    run."""
    dice = random.Random(3)
    (tmp_path / "secret").write_text(SECRET)
    port, num_cuts = free_port(), 0
    relay = Relay(port)
    hosts = {"master_port": port, "cluster_secret_file": str(tmp_path / "secret"), "nnodes": 2}
    seen: set[int] = set()

    async def keep_streaming(llm: AsyncLLM, seed: int, right: Any) -> int:
        num_streams = 0
        while num_cuts < number_of_kills(len(WAYS)):
            assert await read_stream(llm, seed, 100) == right
            num_streams += 1
        return num_streams

    async def keep_cutting(llm: AsyncLLM) -> None:
        nonlocal num_cuts
        while num_cuts < number_of_kills(len(WAYS)):
            await asyncio.sleep(dice.random())
            if llm.health().state != EngineState.OK:
                continue
            # A request that sees three deaths and no token counts as their cause: wait for its token.
            if any(entry.strikes >= MAX_STRIKES - 1 for entry in llm._client._ledger._entries.values()):
                continue
            await cut(llm, WAYS[num_cuts % len(WAYS)])
            num_cuts += 1

    async def cut(llm: AsyncLLM, way: str) -> None:
        num_before = num_restarts(llm)
        if way == "held":
            relay.hold()
            await asyncio.sleep(SECONDS_HELD)
            relay.release()
            assert num_restarts(llm) == num_before, "it was no longer than hosts wait"
            return
        if way == "cut":
            relay.is_cut.set()
        else:
            relay.break_connections()
        await until("the run has ended", lambda: num_restarts(llm) > num_before)
        relay.is_cut.clear()

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as one:
            right = [await read_stream(one, seed, 100) for seed in range(NUM_STREAMS)]
        async with AsyncLLM(model_name(), pipeline_parallel_size=2, **hosts, **SETTINGS) as llm:
            seen.update(node.pids)
            streams = (keep_streaming(llm, seed, right[seed]) for seed in range(NUM_STREAMS))
            *num_streams, _ = await asyncio.gather(*streams, keep_cutting(llm))
            assert all(num_streams)
            await until("it is back", lambda: llm.health().ok)
            seen.update(node.pids)
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and books["num_requests"] == 0

    with running_node(Path(model_name()), relay.port, cluster_secret_file=str(tmp_path / "secret")) as node:
        asyncio.run(run())
    wait_until("all workers have ended", lambda: not any(map(is_running, seen)))
    relay.close()
