"""The connector `nixl`: as `peers`, but blocks are read from the sender's memory by NIXL, over RDMA where both hosts
have it, else over what UCX finds: TCP, or shared memory within a host.

Messages go over the sockets of kv_exchange.py, encrypted between hosts; the blocks themselves go as NIXL sends them,
which is not encrypted. The receiver reads several blocks at once into memory that it has registered, and then checks
each.
NIXL is an extra of the package (`ratoon[nixl]`), and is imported where it is asked for.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.distributed.kv_exchange import Link, PeerExchange, Welcome
from ratoon.distributed.kv_peers import PeersConnector

logger = logging.getLogger(__name__)

BACKEND = "UCX"
MAX_STAGING_BYTES = 64 * 2**20  # that are read at once
SECONDS_TO_READ = 10.0
SECONDS_BETWEEN_LOOKS = 0.0005


class NixlExchange(PeerExchange):
    def __init__(self, *arguments: Any) -> None:
        self._agent: Any = None
        super().__init__(*arguments)

    def _open_agent(self) -> Any:
        """The agent of this engine, in the thread that uses it: its memory is registered when it is first needed."""
        if self._agent is None:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent = nixl_agent(f"ratoon-{secrets.token_hex(8)}", nixl_agent_config(backends=[BACKEND]))
            first, num_bytes = self.outbox.memory
            self._agent.register_memory([(first, num_bytes, 0, "")], "DRAM")
            block_bytes = self.outbox.block_bytes
            self._num_at_once = max(1, min(self.outbox.num_slots, MAX_STAGING_BYTES // block_bytes))
            self._staging = mmap.mmap(-1, self._num_at_once * block_bytes)
            self._staging_address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
            self._agent.register_memory([(self._staging_address, len(self._staging), 0, "")], "DRAM")
        return self._agent

    def _welcome(self) -> Welcome:
        return Welcome("", self._open_agent().get_agent_metadata(), self.outbox.memory[0])

    def _greet(self, link: Link, message: Welcome) -> None:
        if link.agent is None and message.agent:
            link.agent, link.memory = self._open_agent().add_remote_agent(message.agent), message.memory

    def _read(self, link: Link, slots: Sequence[int]) -> list[bytearray] | None:
        if link.agent is None:
            return None
        found: list[bytearray] = []
        for start in range(0, len(slots), self._num_at_once):
            some = slots[start : start + self._num_at_once]
            try:
                found += self._read_some(link, some)
            except Exception as error:  # of the library, which has classes of its own
                logger.warning("NIXL can't read blocks of another engine: %s", error)
                found += [bytearray() for _ in some]
        return found

    def _read_some(self, link: Link, slots: Sequence[int]) -> list[bytearray]:
        agent, size = self._open_agent(), self.outbox.block_bytes
        own = [(self._staging_address + place * size, size, 0) for place in range(len(slots))]
        others = [(link.memory + slot * size, size, 0) for slot in slots]
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(others, "DRAM"), link.agent, b""
        )
        try:
            state, until = agent.transfer(handle), time.monotonic() + SECONDS_TO_READ
            while state == "PROC" and time.monotonic() < until:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TimeoutError(f"the state of a read is {state} after {SECONDS_TO_READ:g} seconds")
        return [bytearray(self._staging[place * size : (place + 1) * size]) for place in range(len(slots))]


class NixlConnector(PeersConnector):
    exchange_class = NixlExchange

    def __init__(self, options: Mapping[str, Any]) -> None:
        """The options are those of `peers`."""
        try:
            import nixl._api  # noqa: F401
        except ImportError as error:
            raise ValueError(f"NIXL can't be imported ({error}): pip install 'ratoon[nixl]'") from None
        super().__init__(options)
