"""What block accounting knows about a token sequence, and about the cross table that sequences may share. The
scheduler's branches add policy to it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ratoon.core.encoder import EncoderInput
from ratoon.memory.block_pool import Block
from ratoon.memory.hashing import NO_EXTRA_KEYS, ExtraKeys


class TokenSequence:
    """Tokens, how many of them are computed, and the blocks that hold them.

    The scheduler changes `token_ids`, `num_tokens` and `num_computed_tokens`; the KVCacheManager everything below them.
    """

    __slots__ = (
        "block_hashes",
        "block_tables",
        "branch_id",
        "cross",
        "extra_keys",
        "num_computed_tokens",
        "num_registered_tokens",
        "num_tokens",
        "stays_in_memory",
        "token_ids",
        "write_limit",
    )

    def __init__(self, branch_id: str, token_ids: list[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        self.branch_id = branch_id
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)  # kept beside the list: it is read for every branch in every step
        self.num_computed_tokens = 0
        self.extra_keys = extra_keys
        self.stays_in_memory = False  # its blocks are not written to files
        # Of full blocks, from the first on, by block size
        self.block_hashes: defaultdict[int, list[bytes]] = defaultdict(list)
        self.block_tables: list[list[Block]] = []  # one for each KV group; empty while it holds no memory
        self.num_registered_tokens = 0  # whose full blocks were added to the prefix cache
        self.cross: CrossTable | None = None  # for an encoder-decoder model: what cross-attention reads
        # Up to this many tokens in all can be written in place without calling the manager: the blocks are allocated
        # and not shared. 0: call it.
        self.write_limit = 0


@dataclass(slots=True, eq=False)
class CrossTable:
    """The blocks of one input on the device. The pool counts one reference to each, for all holders."""

    key: bytes
    num_positions: int
    blocks: list[Block]
    encoder_input: EncoderInput | None  # set: to be written in the step being planned
    holders: dict[TokenSequence, None] = field(default_factory=dict)  # in order of arrival
    is_findable: bool = True  # False: a step that wrote or read it failed. Holders keep it; no other sequence gets it

    @property
    def is_settled(self) -> bool:
        """Whether its content is written and valid for other sequences."""
        return self.encoder_input is None and self.is_findable

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
