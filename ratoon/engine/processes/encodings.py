"""Images and videos of requests that engines of their own encode, before the requests go to the engines that answer.

A request waits in its client while one of these engines makes the rows of its images and writes them to a folder that
all engines of the client share. The engine that computes the prompt loads them from there. Engines on several hosts
have no such folder: the one that has encoded keeps the rows, and the request tells where they are to be fetched from.
Whatever becomes of an encoding, its request goes on: an engine that finds no rows runs its own encoder.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace as with_fields

from ratoon.core.media import EMBEDS, MediaFeature
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest

MARK = "^e"  # in the ids of encodings, behind that of the request
MAX_KNOWN = 1 << 16  # outputs that are remembered as made


@dataclass(slots=True)
class Encoding:
    """The inputs of one request, in an engine that encodes."""

    request_id: str  # its own
    engine: int
    keys: list[tuple[str | None, str]]  # salt and content of its inputs
    num_rows: int
    has_ended: bool = False


class Encodings:
    def __init__(self, engines: range, outlive_engines: bool = True) -> None:
        """`outlive_engines`: outputs are in a folder, and not in the memory of the engine that made them."""
        self.engines = engines  # those that only encode
        self._outlive_engines = outlive_engines
        self._of_request: dict[str, Encoding] = {}
        self._known: OrderedDict[tuple[str | None, str], int] = OrderedDict()  # outputs that were made, and by which
        self._num_rows: Counter[int] = Counter()  # that each engine is to make

    def __len__(self) -> int:
        """The number of requests whose inputs are being encoded."""
        return sum(not one.has_ended for one in self._of_request.values())

    def is_waited_for(self, request_id: str) -> bool:
        found = self._of_request.get(request_id)
        return found is not None and not found.has_ended

    def begin(self, request: EngineCoreRequest, able: Collection[int]) -> tuple[int, EngineCoreRequest] | None:
        """What is to be sent to which of these engines, so that the inputs of a request are encoded. None: it has none
        that were not made, it was tried before, or there is no engine for it."""
        name = request.request_id
        if not able or not request.mm_features or name in self._of_request:
            return None
        new = [
            one
            for one in request.mm_features
            if one.data.modality != EMBEDS and (request.cache_salt, one.content_hash) not in self._known
        ]
        if not new:
            return None
        engine = min(able, key=lambda index: (self._num_rows[index], index))
        encoding = Encoding(
            f"{name}{MARK}",
            engine,
            [(request.cache_salt, one.content_hash) for one in new],
            sum(one.data.num_rows for one in new),
        )
        self._of_request[name] = encoding
        self._num_rows[engine] += encoding.num_rows
        return engine, with_fields(
            request,
            request_id=encoding.request_id,
            params=SamplingParams(temperature=0.0, max_tokens=1),
            mm_features=new,
            external_id=None,
            continuation_of=None,
            continuation_token_ids=None,
            parent_id=None,
            retain_kv=None,
            resumed=None,
            trace_headers=None,
        )

    def note_end(self, request_id: str, is_made: bool) -> None:
        """An encoding of this id has ended."""
        found = self._of_request.get(request_id.removesuffix(MARK))
        if found is None or found.has_ended or not request_id.endswith(MARK):
            return
        self._end(found)
        if is_made:
            self._known.update(dict.fromkeys(found.keys, found.engine))
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _end(self, encoding: Encoding) -> None:
        encoding.has_ended = True
        self._num_rows[encoding.engine] -= encoding.num_rows

    def made_by(self, features: Sequence[MediaFeature], salt: str | None) -> dict[str, int]:
        """The engines that have made the outputs of these inputs, by the hashes of these."""
        found = {one.content_hash: self._known.get((salt, one.content_hash)) for one in features}
        return {name: engine for name, engine in found.items() if engine is not None}

    def give_up(self, engine: int) -> int:
        """This engine is gone, or does not answer. Returns how many requests no longer wait for it."""
        if not self._outlive_engines:
            self._known = OrderedDict((key, maker) for key, maker in self._known.items() if maker != engine)
        lost = [one for one in self._of_request.values() if one.engine == engine and not one.has_ended]
        for one in lost:
            self._end(one)
        return len(lost)

    def forget(self, request_id: str) -> tuple[int, str] | None:
        """A request has ended. Returns the engine and the id of its encoding, if that is under way."""
        found = self._of_request.pop(request_id, None)
        if found is None or found.has_ended:
            return None
        self._end(found)
        return found.engine, found.request_id
