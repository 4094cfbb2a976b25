"""The map of an engine, on the wire: which blocks are free, in use and leased, what runs, and the last steps.

An engine reports to watchers, which ask for it at intervals. A report has what changed since the last one to the same
watcher. It names requests by their ids, and has no texts and no tokens.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

Ranges: TypeAlias = list[tuple[int, int]]  # of block ids: the first and the last of each run

NUM_STEPS = 500  # that are kept for a watcher which comes later


class BlockCode(enum.IntEnum):
    """The state of a block: one byte in a map."""

    FREE = 0  # without content
    CACHED = 1  # free, with content that a prefix may be found in
    USED = 2  # by requests
    LEASED = 3  # by leases alone
    NULL = 4  # the null block


class MappedRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An unfinished request."""

    request_id: str  # the engine's own
    external_id: str  # its owner's
    owner: str | None
    is_running: bool
    kind: str  # generate, beams, extract or pool
    began: float  # when it came to the engine, in seconds since 1970
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Ranges | None = None  # None: as in the last report


class MappedLease(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is kept of one ended request: the leases of all of its texts."""

    root_id: str  # its owner's id of the request
    owner: str | None
    ends: float  # in seconds since 1970
    num_tokens: int
    blocks: Ranges | None = None  # None: as in the last report
    place: str = "device"  # or "host", "files": where it has moved


class MappedStep(msgspec.Struct, array_like=True, gc=False):
    ended: float  # in seconds since 1970
    milliseconds: float  # since the step before it ended, or since it was submitted
    num_prompt_tokens: int
    num_decode_tokens: int
    num_requests: int  # branches and searches in it
    waited_for: str  # "masks", "blocks", "adapters", "device", or "": for nothing that took most of its time


class MapFigures(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The first four are current. Tokens are counted while a watcher is there; the others since the start."""

    num_running: int = 0  # branches
    num_waiting: int = 0
    kv_usage: float = 0.0
    memory_bytes: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class EngineMapReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    index: int  # the engine's
    block_size: int
    num_blocks: int
    num_groups: int
    figures: MapFigures
    requests: list[MappedRequest]
    leases: list[MappedLease]
    steps: list[MappedStep]  # since the last report
    num_steps: int  # that there have been, these included
    run_id: str  # of the engine's process: another one counts from 0
    # A byte (BlockCode) for every block, for a watcher that the engine does not know yet; None: `changed` has the news.
    blocks: bytes | None = None
    changed: dict[int, int] = {}  # block id → its code
    num_host_blocks: int = 0  # in host memory; 0: there is none
    num_used_host_blocks: int = 0
    seconds: float = 0.0  # that the engine took to make it

    @property
    def is_whole(self) -> bool:
        """Whether nothing of earlier reports of this engine counts any more."""
        return self.blocks is not None
