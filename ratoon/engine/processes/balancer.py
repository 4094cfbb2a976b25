"""Which of several engines a request is sent to: the one with the least work for it.

The work for a request is what its engine still has to do, and the part of its own prompt that is not in that engine's
cache. Both are estimated here, without asking the engines. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratoon.core.request import EngineCoreRequest, Extraction

MAX_REMEMBERED = 1 << 16  # pieces of prompts
TOKENS_TO_COME = 64  # cost of a generating request, in prompt tokens


@dataclass(slots=True)
class Load:
    num_requests: int = 0
    num_tokens: int = 0  # of work that is left, in prompt tokens
    num_chosen: int = 0  # requests so far: breaks ties round-robin


class LoadBalancer:
    def __init__(self, num_engines: int, piece: int = 16) -> None:
        self._piece = piece  # tokens; the engine's block size, the unit of sharing
        self.loads = [Load() for _ in range(num_engines)]
        self._homes: OrderedDict[int, set[int]] = OrderedDict()  # chained hash of pieces → engines with them
        self._work: dict[str, tuple[int, int]] = {}  # request id → engine, and the tokens that are counted for it

    def choose(self, request: EngineCoreRequest, candidates: Sequence[int]) -> int:
        """The engine for this request, which is added to its load."""
        known = self._known_tokens(request, candidates)
        num_tokens = len(request.prompt_token_ids)

        def cost(index: int) -> tuple[int, int]:
            load = self.loads[index]
            return load.num_tokens + num_tokens - known.get(index, 0), load.num_chosen

        engine = min(candidates, key=cost)
        work = num_tokens - known.get(engine, 0) + _work_behind_prompt(request)
        self._work[request.request_id] = engine, work
        self.loads[engine].num_chosen += 1
        self.loads[engine].num_requests += 1
        self.loads[engine].num_tokens += work
        self.learn(engine, request, request.prompt_token_ids)
        return engine

    def started(self, request_id: str) -> None:
        """Takes note that a request's prompt is computed: only generation is left."""
        engine, work = self._work.get(request_id, (0, 0))
        if work > TOKENS_TO_COME:
            self.loads[engine].num_tokens -= work - TOKENS_TO_COME
            self._work[request_id] = engine, TOKENS_TO_COME

    def ended(self, request_id: str) -> None:
        if request_id in self._work:
            engine, work = self._work.pop(request_id)
            self.loads[engine].num_requests -= 1
            self.loads[engine].num_tokens -= work

    def learn(self, engine: int, request: EngineCoreRequest, token_ids: Sequence[int]) -> None:
        """Takes note that this engine has these tokens in its cache now."""
        for key in self._keys(request, token_ids):
            homes = self._homes.setdefault(key, set())
            homes.add(engine)
            self._homes.move_to_end(key)
        while len(self._homes) > MAX_REMEMBERED:
            self._homes.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Forgets what an engine had in its cache, which is empty when it was started again."""
        for homes in self._homes.values():
            homes.discard(engine)

    def _known_tokens(self, request: EngineCoreRequest, candidates: Sequence[int]) -> dict[int, int]:
        """Returns, for each engine, how many of the prompt's tokens it probably has."""
        known: dict[int, int] = {}
        left = set(candidates)
        for number, key in enumerate(self._keys(request, request.prompt_token_ids), start=1):
            left &= self._homes.get(key, set())
            if not left:
                break
            known.update(dict.fromkeys(left, number * self._piece))
        return known

    def _keys(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> Iterator[int]:
        key = hash((request.cache_salt, request.adapter))
        for start in range(0, len(token_ids) - self._piece + 1, self._piece):
            key = hash((key, *token_ids[start : start + self._piece]))
            yield key


def _work_behind_prompt(request: EngineCoreRequest) -> int:
    if isinstance(request.params, Extraction):
        return len(request.params.positions)
    return 0 if request.generation_params is None else TOKENS_TO_COME
