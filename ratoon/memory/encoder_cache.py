"""Outputs of the encoder of media on the device: which inputs have rows of embeddings there, and who reads them.
Accounting only; the rows themselves are the runner's.

An output is known by a key, which requests with equal content and salt share. Sequences hold the outputs that they are
about to read; those that no sequence holds stay until others need the room, the least recently used go first. The
scheduler decides when an input runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import blake2b

from ratoon.core.media import EMBEDS, MediaInput
from ratoon.memory.hashing import encode_extra_keys

Holder = Hashable  # a sequence that reads outputs


def key_of_media(content_hash: str, cache_salt: str | None) -> str:
    """The key of an output. Requests with another salt have another one: how long a request takes must not tell them
    that an image was seen. The encoder's weights have no adapters, so an adapter makes no difference."""
    if cache_salt is None:
        return content_hash
    return blake2b(encode_extra_keys([("salt", cache_salt), ("media", content_hash)]), digest_size=32).hexdigest()


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """The rows of one input, on the device or to be made in the step being planned."""

    key: str
    num_rows: int
    holders: set[Holder] = field(default_factory=set)


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        """`capacity`: rows."""
        self.capacity = capacity
        self.num_rows = 0  # of all outputs, those to be made included
        self.num_rows_to_run = 0  # that the encoder makes in the step being planned
        self._outputs: dict[str, EncoderOutput] = {}
        self._unheld: OrderedDict[str, EncoderOutput] = OrderedDict()  # the least recently used first
        self._num_unheld_rows = 0
        self._held: dict[Holder, set[str]] = {}
        self._scheduled: dict[str, MediaInput] = {}  # to be run in the step being planned
        self._freed: dict[str, None] = {}  # for the next plan, each once

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, key: str) -> bool:
        """Whether an output is there, or made in the step being planned."""
        return key in self._outputs

    @property
    def num_holders(self) -> int:
        return len(self._held)

    def scheduled_keys(self) -> AbstractSet[str]:
        """The inputs of the step being planned."""
        return self._scheduled.keys()

    def keys_held_by(self, holder: Holder) -> frozenset[str]:
        return frozenset(self._held.get(holder, ()))

    # ---- holders ----

    def has_room(self, num_rows: int) -> bool:
        """Whether an input with so many rows fits beside what is held."""
        return self.num_rows - self._num_unheld_rows + num_rows <= self.capacity

    def hold(self, holder: Holder, key: str) -> bool:
        """Lets a sequence hold an output. False: it is not there."""
        output = self._outputs.get(key)
        if output is None:
            return False
        if not output.holders:
            self._unheld.pop(key, None)
            self._num_unheld_rows -= output.num_rows
        self._add_holder(output, holder)
        return True

    def schedule(self, holder: Holder, key: str, media: MediaInput) -> bool:
        """Lets the encoder run over an input in the step being planned, for a sequence that holds its output. False:
        what is held leaves no room for it, and nothing changed."""
        assert key not in self._outputs, f"the output {key} is there"
        if not self.has_room(media.num_rows):
            return False
        while self.num_rows + media.num_rows > self.capacity:
            _, oldest = self._unheld.popitem(last=False)
            self._num_unheld_rows -= oldest.num_rows
            self._drop(oldest)
        output = self._outputs[key] = EncoderOutput(key, media.num_rows)
        self.num_rows += media.num_rows
        self._scheduled[key] = media
        if media.modality != EMBEDS:
            self.num_rows_to_run += media.num_rows
        self._add_holder(output, holder)
        return True

    def release(self, holder: Holder, keep: str | None = None, trusted: bool = True) -> None:
        """Ends the holds of a sequence, but for that on `keep`. An input of the step being planned that no sequence
        holds any more is not run. `trusted=False`: the sequence failed, and what it held is made again for others."""
        keys = self._held.get(holder)
        if keys is None:
            return
        for key in [key for key in keys if key != keep]:
            keys.remove(key)
            output = self._outputs[key]
            output.holders.remove(holder)
            if not trusted:
                self._forget(output)
            elif not output.holders:
                self._unhold(output)
        if not keys:
            del self._held[holder]

    def _add_holder(self, output: EncoderOutput, holder: Holder) -> None:
        output.holders.add(holder)
        self._held.setdefault(holder, set()).add(output.key)

    def _unhold(self, output: EncoderOutput) -> None:
        if output.key in self._scheduled:
            self._drop(output)
        else:
            self._unheld[output.key] = output
            self._num_unheld_rows += output.num_rows

    # ---- steps ----

    def take_scheduled(self) -> dict[str, MediaInput]:
        """The inputs of the step being planned. Their outputs count as made from now on."""
        scheduled, self._scheduled = self._scheduled, {}
        self.num_rows_to_run = 0
        return scheduled

    def take_freed(self) -> list[str]:
        """The outputs that the runner drops before the next inputs run. Each is returned once."""
        freed, self._freed = self._freed, {}
        return list(freed)

    def plan_failed(self, scheduled: Iterable[str], freed: Iterable[str]) -> None:
        """A plan was not executed, or failed midway: what it should have made is not there, and what it should have
        freed is freed again."""
        for key in scheduled:
            output = self._outputs.get(key)
            if output is not None:
                self._forget(output)
        self._freed.update(dict.fromkeys(key for key in freed if key not in self._outputs))

    def reset(self) -> None:
        """Drops all outputs. No sequence may hold any."""
        assert not self._held and not self._scheduled, "outputs are held"
        for output in list(self._unheld.values()):
            self._forget(output)

    def _forget(self, output: EncoderOutput) -> None:
        if output.key in self._unheld:
            del self._unheld[output.key]
            self._num_unheld_rows -= output.num_rows
        for holder in output.holders:
            keys = self._held[holder]
            keys.discard(output.key)
            if not keys:
                del self._held[holder]
        output.holders.clear()
        self._drop(output)

    def _drop(self, output: EncoderOutput) -> None:
        del self._outputs[output.key]
        self.num_rows -= output.num_rows
        media = self._scheduled.pop(output.key, None)
        if media is None:
            self._freed[output.key] = None
        elif media.modality != EMBEDS:
            self.num_rows_to_run -= media.num_rows

    def check(self) -> None:
        """Raise AssertionError unless outputs, holders and counts agree with each other. Slow: for tests."""
        outputs = self._outputs.values()
        assert all(key == output.key for key, output in self._outputs.items()), "an output under another key"
        assert self.num_rows == sum(output.num_rows for output in outputs), "miscounted rows"
        assert self.num_rows <= self.capacity, f"{self.num_rows} rows, {self.capacity} fit"
        held = {(holder, key) for holder, keys in self._held.items() for key in keys}
        assert all(self._held.values()), "a sequence without holds"
        assert held == {(holder, output.key) for output in outputs for holder in output.holders}, "holders differ"
        unheld = {output.key for output in outputs if not output.holders}
        assert unheld == self._unheld.keys(), "the outputs without holders are not those that may be evicted"
        assert self._num_unheld_rows == sum(output.num_rows for output in self._unheld.values())
        assert self._scheduled.keys() <= self._outputs.keys() - unheld, "an input is run that no sequence needs"
        rows = sum(media.num_rows for media in self._scheduled.values() if media.modality != EMBEDS)
        assert self.num_rows_to_run == rows, "miscounted rows of the step"
