"""Small memories with a cross group and a host pool, and sequences that use them."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.core.encoder import EncoderInput, tokens_for_encoder
from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import BlockTransfer
from ratoon.memory.hashing import ExtraKeys
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence

BLOCK_SIZE = 4
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16")
CROSS = KVCacheGroup(CrossAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,))


def memory_of(
    num_blocks: int,
    num_host_blocks: int = 0,
    *specs: FullAttentionSpec | SlidingWindowSpec,
    caching: bool = True,
) -> KVCacheManager:
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs or (FULL,)))
    config = KVCacheConfig(num_blocks, BLOCK_SIZE, groups, CROSS, num_host_blocks)
    return KVCacheManager(config, max_model_len=1000, enable_caching=caching)


def document(length: int) -> EncoderInput:
    return tokens_for_encoder(list(range(length)))


def sequence_of(name: str, num_tokens: int = 6, salt: str = "") -> TokenSequence:
    """A sequence whose tokens no other one has."""
    first = 1000 * int.from_bytes(name.encode(), "little")
    return TokenSequence(name, list(range(first, first + num_tokens)), ExtraKeys([("salt", salt)]))


def compute(memory: KVCacheManager, sequence: TokenSequence, num_tokens: int) -> None:
    assert memory.allocate_slots(sequence, num_tokens) is not None
    sequence.num_computed_tokens += num_tokens


def forked(memory: KVCacheManager, parent: TokenSequence) -> TokenSequence:
    """A child with one token more than its parent has computed."""
    child = TokenSequence(f"{parent.branch_id}#1", parent.token_ids.copy(), parent.extra_keys)
    memory.fork(parent, child, parent.num_computed_tokens)
    append(child, 1)
    return child


def append(sequence: TokenSequence, *tokens: int) -> None:
    sequence.token_ids.extend(tokens)
    sequence.num_tokens += len(tokens)


def finish_step(memory: KVCacheManager, lost: Sequence[int] = ()) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
    """Carry out all pending copies, stores, loads and writes. Transfers from and to the slots `lost` fail. Returns the
    stores and loads."""
    memory.take_encoder_writes()
    memory.take_block_copies()
    stores, loads = memory.store.take_transfers()
    memory.take_report(
        TransferReport(
            [load.block for load in loads if load.slot not in lost],
            [load.block for load in loads if load.slot in lost],
            [store.slot for store in stores if store.slot not in lost],
            [store.slot for store in stores if store.slot in lost],
        )
    )
    return stores, loads


def bring_back(memory: KVCacheManager, sequence: TokenSequence) -> list[BlockTransfer]:
    """Load a saved sequence, which then runs again. Returns what was loaded."""
    assert memory.load(sequence)
    _, loads = finish_step(memory)
    assert not memory.is_arriving(sequence)
    memory.settle(sequence, set())
    memory.resumed(sequence)
    return loads


def running(
    memory: KVCacheManager, name: str, encoder_input: EncoderInput | None, num_tokens: int = 6, salt: str = ""
) -> TokenSequence:
    """A sequence that is past its first step."""
    sequence = sequence_of(name, num_tokens, salt)
    if encoder_input is not None:
        assert memory.attach_cross(sequence, encoder_input)
    compute(memory, sequence, num_tokens)
    finish_step(memory)
    return sequence
