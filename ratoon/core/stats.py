"""Figures that the engine reports about itself."""

from __future__ import annotations

import msgspec


class PrefixCacheStats(msgspec.Struct, gc=False):
    """Counted since the engine started (or since the cache was reset)."""

    queries: int = 0  # prompt tokens looked up, those of continuations included
    hits: int = 0  # tokens found, or inherited from the parent of a continuation

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


class LeaseStats(msgspec.Struct, gc=False):
    """Memory of ended requests that is kept for continuations. The first two are current, the others since the
    start."""

    num_active: int = 0
    num_blocks: int = 0
    granted: int = 0
    refused: int = 0  # larger than the whole budget
    expired: int = 0
    evicted: int = 0  # for a newer lease, or for a request that needed memory
    continued: int = 0  # continuations that found their lease
    num_in_host_memory: int = 0  # current: leases that gave their place on the device up
    num_in_files: int = 0  # likewise, and have no place in host memory any more
    moved: int = 0  # leases that moved to host memory or files, since the start


class SessionStats(msgspec.Struct, gc=False):
    """Sessions whose newest roots are kept longer than what only superseded ones need. The last figure counts since
    the start."""

    num_sessions: int = 0
    num_roots: int = 0  # newest ones
    num_blocks: int = 0  # that these need, counted for each root
    superseded: int = 0  # roots


class StoreStats(msgspec.Struct, gc=False):
    """Blocks outside the device pool. The first figure is current, the others count blocks since the start."""

    num_blocks: int = 0  # that can be found by their hash
    stored: int = 0
    loaded: int = 0
    failed: int = 0  # transfers either way: such a block is computed again


class GraphStats(msgspec.Struct, gc=False):
    """What CUDA graphs of small steps have cost so far."""

    num_graphs: int = 0
    num_bytes: int = 0  # of the device's memory
    seconds: float = 0.0  # to capture them


class DraftStats(msgspec.Struct, gc=False):
    """Drafts of one source that steps have checked, since the start."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = []  # by place in the draft

    def copy(self) -> DraftStats:
        return DraftStats(self.drafts, self.draft_tokens, self.accepted_tokens, self.accepted_per_pos.copy())

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        self.accepted_per_pos += [0] * (num_drafted - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1


class AdapterStats(msgspec.Struct, gc=False):
    """Adapters (LoRA) on the device. The first three are current, as is the last; the others since the start."""

    num_slots: int = 0
    num_loaded: int = 0  # slots that have an adapter
    num_waiting: int = 0  # requests that wait until theirs is loaded
    loads: int = 0
    failed: int = 0
    evicted: int = 0  # for another one
    seconds: float = 0.0  # that loads took, one after the other
    holders: dict[str, int] = {}  # requests that are queued or run with each adapter, by its digest


class SchedulerStats(msgspec.Struct, gc=False):
    """A snapshot after a step."""

    num_running: int = 0  # branches
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of the pool's blocks that are referenced, 0 to 1
    num_preemptions: int = 0  # since the start
    num_scheduled_tokens: int = 0  # in this step
    num_steps: int = 0
    prefix_cache: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    leases: LeaseStats = msgspec.field(default_factory=LeaseStats)
    num_encoder_runs: int = 0  # encoder inputs that were run, since the start
    num_media_runs: int = 0  # images, tiles of images and videos that the encoder has read, since the start
    store: StoreStats = msgspec.field(default_factory=StoreStats)
    graphs: GraphStats = msgspec.field(default_factory=GraphStats)
    drafts: dict[str, DraftStats] = {}  # by source; sources that drafted nothing are not there
    adapters: AdapterStats = msgspec.field(default_factory=AdapterStats)
    sessions: SessionStats = msgspec.field(default_factory=SessionStats)
    # Rows that each expert of a layer has got since the start, by layer. Not in every snapshot; empty: it is not there
    experts: dict[int, list[int]] = {}
