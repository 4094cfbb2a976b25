"""What block accounting knows about a token sequence. The scheduler's branches add policy to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratoon.memory.block_pool import Block
from ratoon.memory.hashing import NO_EXTRA_KEYS, ExtraKeys

if TYPE_CHECKING:
    from ratoon.memory.cross_tables import CrossTable


class TokenSequence:
    """Tokens, how many of them are computed, and the blocks that hold them.

    The scheduler moves `token_ids`, `num_tokens` and `num_computed_tokens`; the KVCacheManager everything below them.
    """

    __slots__ = (
        "block_hashes",
        "block_tables",
        "branch_id",
        "cross",
        "extra_keys",
        "num_computed_tokens",
        "num_registered_blocks",
        "num_tokens",
        "token_ids",
        "write_limit",
    )

    def __init__(self, branch_id: str, token_ids: list[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        self.branch_id = branch_id
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)  # kept beside the list: it is read for every branch in every step
        self.num_computed_tokens = 0
        self.extra_keys = extra_keys
        self.block_hashes: list[bytes] = []  # of full blocks, from the first on
        self.block_tables: list[list[Block]] = []  # one for each KV group; empty while it holds no memory
        self.num_registered_blocks = 0  # full blocks from the first on that were offered to the prefix cache
        self.cross: CrossTable | None = None  # of an encoder-decoder model: what cross-attention reads
        # Tokens that can be written in place, up to this many in all, without asking the manager: memory is there and
        # nobody shares it. 0 means: ask.
        self.write_limit = 0
