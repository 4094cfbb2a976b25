from __future__ import annotations

import struct
import subprocess
import sys

from ratoon.memory.hashing import NO_EXTRA_KEYS, ROOT_DIGEST, BlockHasher, encode_extra_keys, hash_block


def hashes_of(
    token_ids: list[int], num_blocks: int, block_size: int = 4, extra_keys: bytes = NO_EXTRA_KEYS
) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size).extend(hashes, token_ids, num_blocks, extra_keys)
    return hashes


def test_equal_prefixes_have_equal_names_up_to_the_first_other_token() -> None:
    left = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], 3)
    right = hashes_of([1, 2, 3, 4, 5, 6, 7, 0, 9, 9, 9, 9], 3)
    assert left[0] == right[0]
    assert left[1] != right[1]
    assert left[2] != right[2], "a block's name depends on everything before it"


def test_the_same_tokens_at_another_place_have_another_name() -> None:
    first, second = hashes_of([1, 2, 3, 4, 1, 2, 3, 4], 2)
    assert first != second


def test_extending_gives_the_names_of_computing_at_once() -> None:
    tokens = list(range(20))
    hashes = hashes_of(tokens, 2)
    BlockHasher(4).extend(hashes, tokens, 5, NO_EXTRA_KEYS)
    assert hashes == hashes_of(tokens, 5)


def test_known_names_are_not_computed_again() -> None:
    hashes = [b"kept" * 8]
    BlockHasher(4).extend(hashes, [0, 0, 0, 0, 1, 2, 3, 4], 2, NO_EXTRA_KEYS)
    assert hashes == [b"kept" * 8, hash_block(b"kept" * 8, struct.pack("<4i", 1, 2, 3, 4))]


def test_tags_salts_and_tokens_can_not_imitate_each_other() -> None:
    encodings = [
        encode_extra_keys([]),
        encode_extra_keys([("salt", "a")]),
        encode_extra_keys([("adapter", "a")]),
        encode_extra_keys([("salt", "a"), ("adapter", "b")]),
        encode_extra_keys([("salt", "b"), ("adapter", "a")]),
        encode_extra_keys([("salt", "aadapter"), ("", "b")]),
        encode_extra_keys([("salta", "")]),
        encode_extra_keys([("", "salta")]),
    ]
    assert len(set(encodings)) == len(encodings)
    tokens = struct.pack("<4i", 1, 2, 3, 4)
    named = {hash_block(ROOT_DIGEST, tokens, keys) for keys in encodings}
    assert len(named) == len(encodings)
    for one in encodings:
        for other in encodings:
            assert one == other or not one.startswith(other), (
                "no encoding is the beginning of another with tokens behind it"
            )


def test_names_are_the_same_in_every_process() -> None:
    program = (
        "from ratoon.memory.hashing import *; names = []; keys = encode_extra_keys([('salt', 'x')]);"
        "BlockHasher(2).extend(names, [5, 6], 1, keys); print(names[0].hex())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert elsewhere == hashes_of([5, 6], 1, 2, encode_extra_keys([("salt", "x")]))[0].hex()
