"""The choice of the engine that a request is sent to: it is the one with the least work for it.

The work for a request is what its engine still has to do, and the part of its own prompt that is not in that engine's
cache. The former is estimated here, without asking the engines. Pure: no clock, no sockets.

What engines have in their caches is remembered at marks, which are places in a prompt: every piece of its beginning,
then eight for each doubling of its length. A conversation of n pieces has some 8·log2(n) marks, and what is known of it
falls short by an eighth at most. A choice then looks at some ten engines, however many there are.

Engines may also tell which blocks they hold (kv_index.py). Marks are then kept only for prompts that are on their way:
from the first token on, the engine has told what it holds of them. What an engine has evicted to its host memory, it
tells nothing of; where there is such memory, marks count beside what is told.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.engine.processes.kv_index import KVIndex
from ratoon.scheduling.branch import extra_keys_of
from ratoon.scheduling.media import media_of

TOKENS_TO_COME = 64  # cost of a generating request, in prompt tokens
MARKS_BY_DOUBLING = 8
MARKS_BY_ENGINE = 4096  # that are remembered: some hundred bytes each
LEAST_MARKS = 1 << 16
ENTRIES_BY_ENGINE = 8  # of the queue of loads
MAX_HOMES = 8  # engines that are remembered for a mark: the last ones that had it


Mark = tuple[int, int]  # its position in pieces, and a hash chained over all tokens before it


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
    marks: list[Mark]  # of its prompt


class LoadBalancer:
    def __init__(
        self,
        num_engines: int,
        piece: int = 16,
        index: KVIndex | None = None,
        keeps_evicted: bool = False,  # engines have host memory for what leaves their caches
        whole_images: bool = False,  # EngineReady.whole_images
    ) -> None:
        self._piece = piece  # tokens; the engine's block size, the unit of sharing
        self._index = index
        self._forgets_started = index is not None and not keeps_evicted
        self._whole_images = whole_images
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
        self._begin_run(engine)
        self._add_load(engine, 0)
        return engine

    def choose(self, request: EngineCoreRequest, candidates: Collection[int]) -> int:
        """The engine for this request, which is added to its load."""
        marks = self._marks_behind(_beginning(request), request.prompt_token_ids)
        known = self._known(request, marks)
        # A range is looked up as fast as a set, and nothing is made of it
        engine = self._cheapest(known, candidates if isinstance(candidates, range) else set(candidates))
        load = self.loads[engine]
        work = len(request.prompt_token_ids) - known.get(engine, 0) + _work_behind_prompt(request)
        self._work[request.request_id] = Work(engine, work, marks)
        load.num_chosen += 1
        load.num_requests += 1
        self._add_load(engine, work)
        self._remember(engine, marks)
        return engine

    def known(self, request: EngineCoreRequest) -> dict[int, int]:
        """How many tokens of its prompt engines probably have in their caches, for those that have some."""
        return self._known(request, self._marks_behind(_beginning(request), request.prompt_token_ids))

    def started(self, request_id: str) -> None:
        """Takes note that a request's prompt is computed: only generation is left."""
        self.relieve(request_id)
        self._forget_marks(self._work.get(request_id))

    def relieve(self, request_id: str) -> None:
        """Takes note that another engine computes the request's prompt."""
        work = self._work.get(request_id)
        if work is not None and work.num_tokens > TOKENS_TO_COME:
            self._add_load(work.engine, TOKENS_TO_COME - work.num_tokens)
            work.num_tokens = TOKENS_TO_COME

    def ended(self, request_id: str) -> None:
        work = self._work.pop(request_id, None)
        if work is not None:
            self.loads[work.engine].num_requests -= 1
            self._add_load(work.engine, -work.num_tokens)
            self._forget_marks(work)

    def learn(self, engine: int, request: EngineCoreRequest, token_ids: Sequence[int]) -> None:
        """Takes note that this engine has these tokens in its cache now. For a request that has not `ended`, they begin
        with its prompt."""
        if self._forgets_started:
            return  # the engine itself tells what it holds
        work = self._work.get(request.request_id)
        is_there = work is not None and work.engine == engine and work.marks
        last = work.marks[-1] if work is not None and is_there else _beginning(request)
        self._remember(engine, self._marks_behind(last, token_ids))

    def forget(self, engine: int) -> None:
        """Forgets what an engine had in its cache, which is empty when it was started again."""
        if self._index is not None:
            self._index.forget(engine)
        self._begin_run(engine)

    def _begin_run(self, engine: int) -> None:
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

    def _known(self, request: EngineCoreRequest, marks: Sequence[Mark]) -> dict[int, int]:
        """Returns how many tokens of a prompt engines hold, by what they have told and by its marks."""
        known = self._known_tokens(marks)
        if self._index is not None:
            keys = extra_keys_of(request, media_of(request, self._whole_images))
            for engine, num_tokens in self._index.held(request.prompt_token_ids, keys):
                known[engine] = max(num_tokens, known.get(engine, 0))
        return known

    def _known_tokens(self, marks: Sequence[Mark]) -> dict[int, int]:
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

    def _forget_marks(self, work: Work | None) -> None:
        """Forgets the marks of a request's prompt, if its engine tells what it holds of it."""
        if work is None or not self._forgets_started:
            return
        run, homes = self.loads[work.engine].run, self._homes
        for _, key in work.marks:
            rest = tuple(other for other in homes.get(key, ()) if other != run)
            if rest:
                homes[key] = rest
            else:
                homes.pop(key, None)
        work.marks = []

    def _remember(self, engine: int, marks: Sequence[Mark]) -> None:
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

    def _marks_behind(self, last: Mark, token_ids: Sequence[int]) -> list[Mark]:
        """Returns the marks of a sequence behind one of them."""
        marks: list[Mark] = []
        (position, key), piece = last, self._piece
        num_pieces = len(token_ids) // piece
        while True:
            stride = 1 << max(0, (position // MARKS_BY_DOUBLING).bit_length() - 1)
            if position + stride > num_pieces:
                return marks
            key = hash((key, *token_ids[position * piece : (position + stride) * piece]))
            position += stride
            marks.append((position, key))


def _beginning(request: EngineCoreRequest) -> Mark:
    """The mark before the first token: requests that differ in it share nothing."""
    digest = None if request.adapter is None else request.adapter.digest
    return 0, hash((request.cache_salt, digest))


def _work_behind_prompt(request: EngineCoreRequest) -> int:
    if isinstance(request.params, Extraction):
        return len(request.params.positions)
    return 0 if request.generation_params is None else TOKENS_TO_COME
