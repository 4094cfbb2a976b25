"""Items as a stored response keeps them: encoded, so that what they take is what is counted, and in pieces, so that one
of them is decoded without the others. Python's objects take several times as much as their JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ratoon.api.server.response_items import FoundItem, Item

PIECE_BYTES = 64 * 1024  # a piece has this much, or one item that is larger
ENTRY_BYTES = 200  # what an item takes beside its JSON and the characters of its id: an entry of the index

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[dict]).decode


@dataclass(frozen=True, slots=True)
class StoredItems:
    pieces: tuple[bytes, ...]  # each is the inside of a JSON list
    places: dict[str, int]  # the piece that has the item with this id
    num_bytes: int

    def __iter__(self) -> Iterator[Item]:
        for number in range(len(self.pieces)):
            yield from self.piece(number)

    def piece(self, number: int) -> list[Item]:
        return _decode(b"[%b]" % self.pieces[number])

    def as_json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[%b]" % b",".join(self.pieces))


def store_items(items: Iterable[Item]) -> StoredItems:
    pieces: list[bytes] = []
    places: dict[str, int] = {}
    gathered: list[bytes] = []
    size = num_bytes = 0
    for item in items:
        encoded = _encode(item)
        places[item["id"]] = len(pieces)
        num_bytes += len(encoded) + len(item["id"]) + ENTRY_BYTES
        gathered.append(encoded)
        size += len(encoded)
        if size >= PIECE_BYTES:
            pieces.append(b",".join(gathered))
            gathered, size = [], 0
    if gathered:
        pieces.append(b",".join(gathered))
    return StoredItems(tuple(pieces), places, num_bytes)


NO_ITEMS = store_items(())


def find_items(ids: Iterable[str], stored: Sequence[StoredItems]) -> dict[str, FoundItem]:
    """Finds the items with these ids that are stored. The first that has an id counts. Each piece is decoded at most
    once, and only if one of the items is in it."""
    missing, found = set(ids), {}
    for items in stored:
        here = missing & items.places.keys()
        if not here:
            continue
        for number in {items.places[item_id] for item_id in here}:
            for item in items.piece(number):
                if item["id"] in here:
                    found[item["id"]] = FoundItem(item, len(_encode(item)))
        missing -= here
        if not missing:
            break
    return found
