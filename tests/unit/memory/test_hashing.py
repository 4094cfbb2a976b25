from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from ratoon.memory.hashing import (
    NO_EXTRA_KEYS,
    ROOT_DIGEST,
    BlockHasher,
    ExtraKeys,
    MediaSpan,
    encode_extra_keys,
    hash_block,
)


def hashes_of(
    token_ids: list[int], num_blocks: int, block_size: int = 4, extra_keys: ExtraKeys = NO_EXTRA_KEYS
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
        "from ratoon.memory.hashing import *; names = []; keys = ExtraKeys([('salt', 'x')]);"
        "BlockHasher(2).extend(names, [5, 6], 1, keys); print(names[0].hex())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert elsewhere == hashes_of([5, 6], 1, 2, ExtraKeys([("salt", "x")]))[0].hex()


# ---- keys by block ----

TEXT = list(range(96))  # six blocks of 16
CAT, DOG = MediaSpan(40, 20, "cat"), MediaSpan(40, 20, "dog")


def names_with(*media: MediaSpan, salt: str | None = None) -> list[bytes]:
    return hashes_of(TEXT, 6, 16, ExtraKeys([] if salt is None else [("salt", salt)], media))


def num_shared(left: list[bytes], right: list[bytes]) -> int:
    """Blocks from the first on; behind the first that differs, none may be equal."""
    equal = [one == other for one, other in zip(left, right, strict=True)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


def test_another_image_changes_the_blocks_that_it_covers_and_all_behind_it() -> None:
    assert num_shared(names_with(CAT), names_with(DOG)) == 2
    assert num_shared(names_with(CAT), names_with()) == 2, "the text before an image is shared with plain text"
    assert names_with(CAT) == names_with(CAT)


def test_a_salt_separates_from_the_first_block_on_with_and_without_images() -> None:
    assert num_shared(names_with(salt="x"), names_with()) == 0
    assert num_shared(names_with(CAT, salt="x"), names_with(CAT)) == 0


@pytest.mark.parametrize(
    ("other", "num_expected"),
    [
        (MediaSpan(41, 20, "cat"), 2),  # another part of the picture at each token
        (MediaSpan(40, 21, "cat"), 3),  # tokens in the fourth block
        (MediaSpan(40, 20, "cat", is_whole=True), 2),  # the first rows have seen the last ones
        (MediaSpan(48, 20, "cat"), 2),
        (MediaSpan(32, 1, "cat"), 2),
        (MediaSpan(31, 1, "cat"), 1),
        (MediaSpan(0, 1, "cat"), 0),
    ],
)
def test_the_place_of_an_image_counts(other: MediaSpan, num_expected: int) -> None:
    assert num_shared(names_with(CAT), names_with(other)) == num_expected


def test_an_image_that_ends_with_a_block_is_the_same_as_a_longer_one_up_to_there() -> None:
    """As in a continuation that begins within an image."""
    assert num_shared(names_with(MediaSpan(40, 24, "cat")), names_with(MediaSpan(40, 30, "cat"))) == 4
    long, short = ExtraKeys([], [MediaSpan(40, 30, "cat")]), ExtraKeys([], [MediaSpan(40, 12, "cat")])
    assert long.agree(short, 52) and not long.agree(short, 53)
    whole = [ExtraKeys([], [MediaSpan(40, length, "cat", is_whole=True)]) for length in (30, 12)]
    assert whole[0].agree(whole[1], 40) and not whole[0].agree(whole[1], 41)


def test_tokens_that_end_within_an_image_of_one_step_end_before_it() -> None:
    keys = ExtraKeys([], [MediaSpan(4, 6, "a", is_whole=True), MediaSpan(10, 3, "b", is_whole=True)])
    assert [keys.before_part(count) for count in range(15)] == [0, 1, 2, 3, *[4] * 6, 10, 10, 10, 13, 14]
    cut = ExtraKeys([], [MediaSpan(4, 6, "a")])
    assert [cut.before_part(count) for count in range(12)] == list(range(12))


def test_a_second_image_changes_nothing_before_it() -> None:
    assert num_shared(names_with(CAT), names_with(CAT, MediaSpan(64, 10, "dog"))) == 4
    assert num_shared(names_with(CAT, MediaSpan(60, 3, "a")), names_with(CAT, MediaSpan(60, 3, "b"))) == 3
    assert names_with(CAT, MediaSpan(64, 10, "dog")) == names_with(MediaSpan(64, 10, "dog"), CAT), "in any order"


def test_names_of_text_are_what_they_always_were() -> None:
    name = ROOT_DIGEST
    for start in range(0, 96, 16):
        name = hash_block(name, struct.pack("<16i", *TEXT[start : start + 16]), encode_extra_keys([("salt", "x")]))
    assert names_with(salt="x")[-1] == name
    assert names_with(MediaSpan(95, 1, "cat"), salt="x")[:5] == names_with(salt="x")[:5]
    # Written down: a name that changed would lose every block that is kept under it outside of a process.
    assert names_with()[0].hex() == "6f92969ddd3a1c8d355637fc7d59361b5a4afb438544a02d07f735f4fceead1e"


def test_images_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        ExtraKeys([], [CAT, MediaSpan(59, 3, "dog")])


def test_only_images_among_the_first_tokens_must_agree_before_they_are_shared() -> None:
    cat, dog = ExtraKeys([("salt", "x")], [CAT]), ExtraKeys([("salt", "x")], [DOG])
    assert cat.agree(dog, 40) and not cat.agree(dog, 41)
    assert not cat.agree(ExtraKeys([], [CAT]), 1)
