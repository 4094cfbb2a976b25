"""Hashes of full blocks: cryptographic, chained over the parent block, the tokens and tagged extra keys.

Two blocks have the same hash only if every token up to their end, and every extra key, is the same. Blocks of encoder
inputs are hashed by the input. Lookup and eviction are the pool's.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 32
EMPTY = blake2b(digest_size=DIGEST_BYTES)
# A fixed start of every chain, so that hashes are the same in every process and on every replica.
ROOT_DIGEST = blake2b(b"ratoon kv block chain, version 1", digest_size=DIGEST_BYTES).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Packs tokens as 32-bit integers: a fixed width, so that 1,23 and 12,3 differ. That takes less time than an array
    does. Raises struct.error if one of them is none."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def encode_extra_keys(keys: Iterable[tuple[str, str]]) -> bytes:
    """Tagged keys, such as ("salt", "tenant-a"), as unambiguous bytes: tag and value carry their lengths and the whole
    its count, so no value can imitate another key or a token.
    """
    parts = [
        struct.pack("<I", len(text)) + text
        for key in keys
        for text in (key[0].encode(), key[1].encode("utf-8", "surrogatepass"))
    ]
    return struct.pack("<I", len(parts) // 2) + b"".join(parts)


class MediaSpan(NamedTuple):
    """Placeholder tokens whose embeddings come from an image or other media, identified by a hash of that."""

    offset: int
    length: int
    content_hash: str
    is_whole: bool = False  # its rows see each other in both directions: they are computed in one step, or not at all

    @property
    def end(self) -> int:
        return self.offset + self.length


class ExtraKeys:
    """What besides tokens must be equal for two sequences to share a block.

    Tagged keys (adapter, salt) apply from the first block on. A media span applies to the blocks that it covers, with
    its place and where it ends in the block; blocks before it hash as plain text, and chaining separates all blocks
    after it. So a sequence that was cut within an image shares the blocks before the cut, unless the image's rows see
    those behind it.
    """

    __slots__ = ("_media_ends", "encoded", "media", "tagged")

    def __init__(self, tagged: Iterable[tuple[str, str]] = (), media: Iterable[MediaSpan] = ()) -> None:
        self.tagged = tuple(tagged)
        self.media = tuple(sorted(media))
        self.encoded = encode_extra_keys(self.tagged)  # the keys of a block without media
        self._media_ends = [span.end for span in self.media]
        if any(end > span.offset for end, span in zip(self._media_ends, self.media[1:])):
            raise ValueError("media spans overlap")

    def of_block(self, start: int, end: int) -> bytes:
        """The keys of the block with the tokens from `start` to `end`."""
        first = last = bisect_right(self._media_ends, start)
        while last < len(self.media) and self.media[last].offset < end:
            last += 1
        if first == last:
            return self.encoded
        spans = [_clip(span, end) for span in self.media[first:last]]
        keys = [("media", f"{span.offset - start}+{span.length} {span.content_hash}") for span in spans]
        return encode_extra_keys((*self.tagged, *keys))

    def agree(self, other: ExtraKeys, num_tokens: int) -> bool:
        """Whether the keys of the first `num_tokens` tokens are equal."""
        return self.tagged == other.tagged and self._media_in(num_tokens) == other._media_in(num_tokens)

    def _media_in(self, num_tokens: int) -> list[MediaSpan]:
        return [_clip(span, num_tokens) for span in self.media if span.offset < num_tokens]

    def before_part(self, num_tokens: int) -> int:
        """The most of the first `num_tokens` that end in no span whose rows are computed in one step."""
        place = bisect_right(self._media_ends, num_tokens)
        if place < len(self.media) and self.media[place].is_whole:
            return min(num_tokens, self.media[place].offset)
        return num_tokens


def _clip(span: MediaSpan, end: int) -> MediaSpan:
    return span if span.is_whole or span.end <= end else span._replace(length=end - span.offset)


NO_EXTRA_KEYS = ExtraKeys()


def hash_block(parent: bytes, token_bytes: bytes, extra_keys: bytes = NO_EXTRA_KEYS.encoded) -> bytes:
    """The hash of a full block, given its parent's."""
    digest = EMPTY.copy()  # a fifth less time than to make one with its options
    digest.update(parent + extra_keys + token_bytes)
    return digest.digest()


def hash_encoder_input(extra_keys: bytes, content_hash: bytes) -> bytes:
    """The hash of an encoder's output for an input. The content hash has a fixed width, so the concatenation is
    unambiguous."""
    return blake2b(extra_keys + content_hash, digest_size=DIGEST_BYTES).digest()


def hash_cross_block(key: bytes, index: int) -> bytes:
    """The hash of one block of an encoder input's cross table, given the input's."""
    return blake2b(key + index.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()


class BlockHasher:
    """Hashes the blocks of sequences, for one block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack  # as pack_tokens, for one block

    def extend(
        self, block_hashes: list[bytes], token_ids: list[int], num_full_blocks: int, extra_keys: ExtraKeys
    ) -> None:
        """Extend `block_hashes` to `num_full_blocks` entries. Existing ones are not computed again."""
        block_size, pack = self.block_size, self._pack
        keys, has_media = extra_keys.encoded, bool(extra_keys.media)
        digest = block_hashes[-1] if block_hashes else ROOT_DIGEST
        for index in range(len(block_hashes), num_full_blocks):
            start = index * block_size
            end = start + block_size
            if has_media:
                keys = extra_keys.of_block(start, end)
            hashing = EMPTY.copy()  # as in hash_block, without a call for each block
            hashing.update(digest + keys + pack(*token_ids[start:end]))
            digest = hashing.digest()
            block_hashes.append(digest)
