"""Which of several engines a request is sent to: the one with the least work for it.

The work for a request is what its engine still has to do, and the part of its own prompt that is not in that engine's
cache. Both are estimated here, without asking the engines. A choice looks at some ten of them, however many there are.
Pure: no clock, no sockets.

What engines have in their caches is remembered at marks, which are places in a prompt: every piece of its beginning,
then eight for each doubling of its length. A conversation of n pieces has some 8·log2(n) marks, and what is known of it
falls short by an eighth at most.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ratoon.core.request import EngineCoreRequest, Extraction

TOKENS_TO_COME = 64  # cost of a generating request, in prompt tokens
MARKS_BY_DOUBLING = 8
MARKS_BY_ENGINE = 4096  # that are remembered: some hundred bytes each
LEAST_MARKS = 1 << 16
ENTRIES_BY_ENGINE = 8  # of the queue of loads
MAX_HOMES = 8  # engines that are remembered for a mark: the last ones that had it


@dataclass(slots=True)
class Load:
    num_requests: int = 0
    num_tokens: int = 0  # of work that is left, in prompt tokens
    num_chosen: int = 0  # requests so far: breaks ties round-robin
    run: int = 0  # its number in `_homes` since it was last started


@dataclass(slots=True)
class Work:
    """A request in an engine."""

    engine: int
    num_tokens: int  # that are counted for it
    last_mark: tuple[int, int]  # of its prompt: position in pieces, chained hash


class LoadBalancer:
    def __init__(self, num_engines: int, piece: int = 16) -> None:
        self._piece = piece  # tokens; the engine's block size, the unit of sharing
        self.loads: list[Load] = []
        self._runs: list[int] = []  # the engine of each run
        # By the hash of a mark: runs of engines, the latest last
        self._homes: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._work: dict[str, Work] = {}  # by request id
        # A queue of loads: (num_tokens, num_chosen, engine). Each change of a load adds an entry; one that no longer
        # agrees with its load is dropped when it comes to the front.
        self._by_load: list[tuple[int, int, int]] = []
        for _ in range(num_engines):
            self.add_engine()

    def add_engine(self) -> int:
        """Makes room for another engine. Returns its index."""
        engine = len(self.loads)
        self.loads.append(Load())
        self.forget(engine)
        self._add_load(engine, 0)
        return engine

    def choose(self, request: EngineCoreRequest, candidates: Collection[int]) -> int:
        """The engine for this request, which is added to its load."""
        marks = self._marks_behind(_beginning(request), request.prompt_token_ids)
        known = self._known_tokens(marks)
        # A range is looked up as fast as a set, and nothing is made of it
        engine = self._cheapest(known, candidates if isinstance(candidates, range) else set(candidates))
        load = self.loads[engine]
        work = len(request.prompt_token_ids) - known.get(engine, 0) + _work_behind_prompt(request)
        self._work[request.request_id] = Work(engine, work, marks[-1] if marks else _beginning(request))
        load.num_chosen += 1
        load.num_requests += 1
        self._add_load(engine, work)
        self._remember(engine, marks)
        return engine

    def known(self, request: EngineCoreRequest) -> dict[int, int]:
        """How many tokens of its prompt engines probably have in their caches, for those that have some."""
        return self._known_tokens(self._marks_behind(_beginning(request), request.prompt_token_ids))

    def started(self, request_id: str) -> None:
        """Takes note that a request's prompt is computed: only generation is left."""
        work = self._work.get(request_id)
        if work is not None and work.num_tokens > TOKENS_TO_COME:
            self._add_load(work.engine, TOKENS_TO_COME - work.num_tokens)
            work.num_tokens = TOKENS_TO_COME

    def ended(self, request_id: str) -> None:
        work = self._work.pop(request_id, None)
        if work is not None:
            self.loads[work.engine].num_requests -= 1
            self._add_load(work.engine, -work.num_tokens)

    def learn(self, engine: int, request: EngineCoreRequest, token_ids: Sequence[int]) -> None:
        """Takes note that this engine has these tokens in its cache now. For a request that has not `ended`, they begin
        with its prompt."""
        work = self._work.get(request.request_id)
        last = work.last_mark if work is not None and work.engine == engine else _beginning(request)
        self._remember(engine, self._marks_behind(last, token_ids))

    def forget(self, engine: int) -> None:
        """Forgets what an engine had in its cache, which is empty when it was started again."""
        self.loads[engine].run = len(self._runs)
        self._runs.append(engine)

    # ---- loads ----

    def _add_load(self, engine: int, num_tokens: int) -> None:
        load = self.loads[engine]
        load.num_tokens += num_tokens
        heapq.heappush(self._by_load, (load.num_tokens, load.num_chosen, engine))
        if len(self._by_load) > ENTRIES_BY_ENGINE * len(self.loads):
            self._by_load = [(load.num_tokens, load.num_chosen, index) for index, load in enumerate(self.loads)]
            heapq.heapify(self._by_load)

    def _cheapest(self, known: Mapping[int, int], candidates: Collection[int]) -> int:
        """The candidate with the least of load and unknown tokens: one that knows a part of the prompt, or the one with
        the least load of all."""

        def cost(index: int) -> tuple[int, int]:
            load = self.loads[index]
            return load.num_tokens - known.get(index, 0), load.num_chosen

        return min((self._least_loaded(candidates), *(engine for engine in known if engine in candidates)), key=cost)

    def _least_loaded(self, candidates: Collection[int]) -> int:
        passed_over = []
        while True:
            entry = self._by_load[0]
            num_tokens, num_chosen, engine = entry
            load = self.loads[engine]
            is_current = num_tokens == load.num_tokens and num_chosen == load.num_chosen
            if is_current and engine in candidates:
                break
            heapq.heappop(self._by_load)
            if is_current:
                passed_over.append(entry)
        for other in passed_over:
            heapq.heappush(self._by_load, other)
        return engine

    # ---- prefixes ----

    def _known_tokens(self, marks: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Returns, for engines that were last seen with a part of the prompt, how many of its tokens they probably
        have. The deepest mark counts: an engine that has it has had all before it, and loses the ends first."""
        known: dict[int, int] = {}
        for position, key in reversed(marks):
            for run in reversed(self._homes.get(key, ())):
                engine = self._runs[run]
                if self.loads[engine].run == run:
                    known.setdefault(engine, position * self._piece)
            if len(known) >= MAX_HOMES:
                break
        return known

    def _remember(self, engine: int, marks: Sequence[tuple[int, int]]) -> None:
        run, homes = self.loads[engine].run, self._homes
        for _, key in marks:
            runs = homes.get(key)
            if runs is None:
                homes[key] = (run,)
                continue
            if run not in runs:
                homes[key] = (*runs[1 - MAX_HOMES :], run)
            homes.move_to_end(key)
        most = max(LEAST_MARKS, MARKS_BY_ENGINE * len(self.loads))
        while len(homes) > most:
            homes.popitem(last=False)

    def _marks_behind(self, last: tuple[int, int], token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """The marks of a sequence behind one of them: the position, in pieces, and a hash chained over all tokens
        before it."""
        marks: list[tuple[int, int]] = []
        (position, key), piece = last, self._piece
        num_pieces = len(token_ids) // piece
        while True:
            stride = 1 << max(0, (position // MARKS_BY_DOUBLING).bit_length() - 1)
            if position + stride > num_pieces:
                return marks
            key = hash((key, *token_ids[position * piece : (position + stride) * piece]))
            position += stride
            marks.append((position, key))


def _beginning(request: EngineCoreRequest) -> tuple[int, int]:
    """The mark before the first token: requests that differ in it share nothing."""
    digest = None if request.adapter is None else request.adapter.digest
    return 0, hash((request.cache_salt, digest))


def _work_behind_prompt(request: EngineCoreRequest) -> int:
    if isinstance(request.params, Extraction):
        return len(request.params.positions)
    return 0 if request.generation_params is None else TOKENS_TO_COME
