"""A service of many replicas, simulated: prefix hits, queueing, and what the choice of a replica is worth.

    python bench/scale_simulation.py                                             # 1,000 replicas, a million sessions
    python bench/scale_simulation.py --replicas 16 --sessions 4000               # a small one, in half a minute

What is real: each replica is a `Scheduler` with its `KVCacheManager`, block pool, hashes and eviction, as an engine has
them, and requests are given to replicas by the `LoadBalancer` of the server. What is modelled: the device, by the
seconds that a step takes (`StepCosts`, measured on a GPU); the network, which takes no time; and the traffic. To make
millions of requests possible, a token of the simulation stands for 32 tokens, and a block for 256: prompts share blocks
as they would in an engine with blocks of that size, and a step decodes 32 tokens of each sequence. A request that
arrives during a step waits for its end, up to 0.15 seconds, where an engine would begin it within 5 milliseconds: first
tokens are late by that, in all rows alike.

Sessions arrive at random. A session begins with one of many system prompts, which are popular by Zipf's law; most are
chats of a few turns, some are agents of 40 turns, and a turn's prompt is all of the turn before with its answer and
something new. A row of the table is one way to choose replicas, for the same traffic.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import multiprocessing
import random
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.messages import BlocksTold
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.processes.balancer import LoadBalancer
from ratoon.engine.processes.kv_index import KVIndex
from ratoon.memory.block_events import BlockEvents
from ratoon.scheduling.scheduler import Scheduler

UNIT = 32  # tokens that one token of the simulation stands for
BLOCK_SIZE = 8  # of these
NO_STOP = [1 << 30]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a replica's device: Llama-3-8B in bfloat16 on an H200 (docs/gpu.md)."""

    decode_step: float = 3.85e-3
    decode_sequence: float = 20e-6  # more for each sequence of a decode step
    prompt_token: float = 25e-6

    def of_decode_step(self, num_sequences: int) -> float:
        return self.decode_step + self.decode_sequence * num_sequences if num_sequences else 0.0


@dataclass(frozen=True)
class Traffic:
    """Describes what the users of the service do. Lengths are in tokens."""

    num_sessions: int
    sessions_per_second: float
    agent_share: float = 0.01
    agent_turns: int = 40
    chat_turns: float = 1.5  # on average
    num_prefixes: int = 20_000
    zipf_exponent: float = 1.05
    prefix_tokens: tuple[int, int] = (512, 4096)  # of system prompts, the shortest and the longest
    chat_tokens: tuple[int, int] = (64, 512)  # new in a turn
    agent_tokens: tuple[int, int] = (128, 1024)  # results of tools
    answer_tokens: tuple[int, int] = (64, 256)
    chat_pause: float = 20.0  # seconds from an answer to the next turn, on average
    agent_pause: float = 2.0


@dataclass(slots=True)
class Session:
    number: int
    tokens: list[int]
    turns: list[tuple[int, int, float]]  # still to come, the last first: new tokens, tokens of the answer, pause before
    is_agent: bool
    replicas: set[int] = field(default_factory=set)


class Sessions:
    """Makes sessions with all their turns, in the order in which they begin: the traffic is the same whatever replicas
    do with it."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self._traffic = traffic
        self._random = random.Random(seed)
        weights = [1 / rank**traffic.zipf_exponent for rank in range(1, traffic.num_prefixes + 1)]
        self._popularity = list(itertools.accumulate(weights))
        self._next_token = 0
        self._prefixes: dict[int, list[int]] = {}
        self.num_opened = 0

    def open(self) -> Session:
        draw, traffic = self._random, self._traffic
        is_agent = draw.random() < traffic.agent_share
        rank = bisect(self._popularity, draw.random() * self._popularity[-1])
        prefix = self._prefixes.get(rank)
        if prefix is None:
            prefix = self._prefixes[rank] = self.new_tokens(draw.randint(*traffic.prefix_tokens))
        said, pause = traffic.chat_tokens, traffic.chat_pause
        num_turns = traffic.agent_turns
        if is_agent:
            said, pause = traffic.agent_tokens, traffic.agent_pause
        else:
            num_turns = 1
            while draw.random() < 1 - 1 / traffic.chat_turns:
                num_turns += 1
        turns = [
            (draw.randint(*said), draw.randint(*traffic.answer_tokens), draw.expovariate(1 / pause))
            for _ in range(num_turns)
        ]
        self.num_opened += 1
        return Session(self.num_opened, prefix.copy(), turns, is_agent)

    def until_next_session(self) -> float | None:
        if self.num_opened == self._traffic.num_sessions:
            return None
        return self._random.expovariate(self._traffic.sessions_per_second)

    def new_tokens(self, num_tokens: int) -> list[int]:
        """Returns units of the simulation that occur nowhere else."""
        first, self._next_token = self._next_token, self._next_token + max(1, num_tokens // UNIT)
        return list(range(first, self._next_token))


# ---- the choice of a replica ----


class Choice(Protocol):
    """Stands for the server's client, which asks the balancer for an engine and tells it what became of requests."""

    def choose(self, request: EngineCoreRequest, candidates: Sequence[int]) -> int: ...

    def started(self, request_id: str) -> None: ...

    def learn(self, engine: int, request: EngineCoreRequest, token_ids: Sequence[int]) -> None: ...

    def ended(self, request_id: str) -> None: ...


class RoundRobin:
    """Replicas take turns, as behind a balancer of connections."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: EngineCoreRequest, candidates: Sequence[int]) -> int:
        self._next += 1
        return candidates[self._next % len(candidates)]

    def started(self, request_id: str) -> None: ...

    def learn(self, engine: int, request: EngineCoreRequest, token_ids: Sequence[int]) -> None: ...

    def ended(self, request_id: str) -> None: ...


NEVER = 1 << 40  # a piece of this length is never full, so that no prefix is known
CHOICES: dict[str, Callable[[int, KVIndex], Choice]] = {
    "round robin": lambda num_replicas, index: RoundRobin(),
    "least work, no prefixes": lambda num_replicas, index: LoadBalancer(num_replicas, NEVER),
    "balancer": lambda num_replicas, index: LoadBalancer(num_replicas, 1),
    "balancer, by events": lambda num_replicas, index: LoadBalancer(num_replicas, 1, index),
}
TELLING = ("balancer, by events",)  # ways with which replicas tell which blocks they hold


# ---- replicas ----


class Replica:
    """A real scheduler over a device that is a clock."""

    def __init__(self, index: int, num_blocks: int, costs: StepCosts, max_model_len: int) -> None:
        kv = KVCacheConfig(
            num_blocks, BLOCK_SIZE, (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 8, 128, "float16"), (0,)),)
        )
        config = SchedulerConfig(max_num_batched_tokens=16_384 // UNIT, max_num_seqs=256)
        self.index = index
        self.scheduler = Scheduler(config, CacheConfig(block_size=BLOCK_SIZE), kv, max_model_len)
        self.is_busy = False
        self.prompt_seconds = 0.0
        self.num_told = 0  # messages about blocks
        self._costs = costs

    def collect_events(self) -> None:
        self.scheduler.kv_cache.prefix_cache.collect_events(BlockEvents("GPU"))

    def blocks_told(self) -> BlocksTold | None:
        """Returns what has happened to the engine's blocks since the last call. None: nothing has, or it tells
        nothing."""
        events = self.scheduler.kv_cache.prefix_cache.events
        found = [] if events is None else events.take()
        self.num_told += bool(found)
        return BlocksTold(self.num_told - 1, found) if found else None

    def begin_step(self, now: float) -> tuple[SchedulerOutput, float, float] | None:
        """Plans a step. Returns it with the times at which its prompts have their first tokens and at which it ends;
        None: there is no work."""
        if not self.scheduler.has_requests():
            return None
        self.scheduler.tick(now)
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return None
        prompt_units = sum(plan.num_scheduled_tokens.values()) - sum(
            1 for name in plan.scheduled_cached_reqs.req_ids if plan.num_scheduled_tokens[name] == 1
        )
        decode_step = self._costs.of_decode_step(len(plan.sampled_req_ids))
        prompts = prompt_units * UNIT * self._costs.prompt_token
        self.prompt_seconds += prompts
        return plan, now + prompts + decode_step, now + prompts + UNIT * decode_step


@dataclass
class Result:
    """The figures of one way to choose replicas."""

    name: str
    num_requests: int = 0
    num_observed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)  # seconds from arrival, of a sample of requests
    agent_first_tokens: list[float] = field(default_factory=list)
    replicas_by_agent: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)  # from the first token to the last, for each token
    prompt_shares: list[float] = field(
        default_factory=list
    )  # of the time in which devices computed prompts, by replica
    simulated_seconds: float = 0.0
    wall_seconds: float = 0.0
    choice_seconds: float = 0.0  # processor time in the balancer and the index of blocks, by a sample

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def figures(self) -> dict[str, float]:
        return {
            "requests": self.num_requests,
            "hit_rate": self.hit_rate,
            "computed_prompt_tokens_per_request": (self.prompt_tokens - self.cached_tokens) / max(1, self.num_observed),
            "first_token_p50": quantile(self.first_tokens, 0.5),
            "first_token_p99": quantile(self.first_tokens, 0.99),
            "agent_first_token_p50": quantile(self.agent_first_tokens, 0.5),
            "agent_first_token_p99": quantile(self.agent_first_tokens, 0.99),
            "replicas_by_agent": statistics.fmean(self.replicas_by_agent) if self.replicas_by_agent else 0.0,
            "token_p50": quantile(self.token_seconds, 0.5),
            "token_p99": quantile(self.token_seconds, 0.99),
            "prompts_mean": statistics.fmean(self.prompt_shares),
            "prompts_max": max(self.prompt_shares),
            "simulated_seconds": self.simulated_seconds,
            "wall_seconds": self.wall_seconds,
            "choice_microseconds": 1e6 * self.choice_seconds / self.num_requests,
        }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class Running:
    """A request in a replica."""

    session: Session
    request: EngineCoreRequest
    replica: int
    arrived: float
    is_observed: bool
    started: float | None = None
    answer: list[int] = field(default_factory=list)


class Service:
    """The events of a service, in order: sessions, turns, ends of steps."""

    def __init__(self, traffic: Traffic, num_replicas: int, num_blocks: int, choice: str, seed: int) -> None:
        longest = traffic.prefix_tokens[1] + traffic.agent_turns * (traffic.agent_tokens[1] + traffic.answer_tokens[1])
        self.replicas = [Replica(i, num_blocks, StepCosts(), longest // UNIT + 64) for i in range(num_replicas)]
        self.result = Result(choice)
        self._sessions = Sessions(traffic, seed)
        self._index = KVIndex()
        self._choice = CHOICES[choice](num_replicas, self._index)
        if choice in TELLING:
            for replica in self.replicas:
                replica.collect_events()
        self._all = range(num_replicas)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._running: dict[str, Running] = {}
        self._traffic = traffic
        self._num_asked = 0
        self._is_observed = False
        self._observed_from = 0.0
        self._computed_before: list[float] = []
        self.now = 0.0

    def run(self) -> Result:
        began = time.perf_counter()
        self._at(0.0, self._open_session)
        while self._events:
            self.now, _, handle, arguments = heapq.heappop(self._events)
            handle(*arguments)
        self.result.simulated_seconds = self.now
        self.result.wall_seconds = time.perf_counter() - began
        return self.result

    def _at(self, when: float, handle: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), handle, arguments))

    def _open_session(self) -> None:
        session = self._sessions.open()
        pause = self._sessions.until_next_session()
        if pause is not None:
            self._at(self.now + pause, self._open_session)
        self._observe()
        self._take_turn(session)

    def _timed(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Asks the balancer, and measures one call in 61: the clock of processor time is slow."""
        self._num_asked += 1
        if self._num_asked % 61:
            return ask(*arguments)
        began = time.thread_time()
        answer = ask(*arguments)
        self.result.choice_seconds += 61 * (time.thread_time() - began)
        return answer

    def _observe(self) -> None:
        """Figures are of the requests that arrive when a quarter of the sessions has begun and until the last one has:
        caches are empty before, and replicas idle behind."""
        num_opened, num_sessions = self._sessions.num_opened, self._traffic.num_sessions
        if num_opened not in (num_sessions // 4 + 1, num_sessions):
            return
        computed = [replica.prompt_seconds for replica in self.replicas]
        if num_opened == num_sessions // 4 + 1:
            self._is_observed, self._observed_from, self._computed_before = True, self.now, computed
        if num_opened == num_sessions:
            self._is_observed = False
            seconds = max(self.now - self._observed_from, 1e-9)
            self.result.prompt_shares = [
                (after - before) / seconds for before, after in zip(self._computed_before, computed)
            ]

    def _take_turn(self, session: Session) -> None:
        num_new, num_answered, _ = session.turns.pop()
        session.tokens += self._sessions.new_tokens(num_new)
        name = f"{session.number}-{len(session.turns)}"
        params = SamplingParams(max_tokens=max(1, num_answered // UNIT), all_stop_token_ids=NO_STOP)
        request = EngineCoreRequest(name, session.tokens.copy(), params)
        index = self._timed(self._choice.choose, request, self._all)
        session.replicas.add(index)
        self._running[name] = Running(session, request, index, self.now, self._is_observed)
        self.result.num_requests += 1
        replica = self.replicas[index]
        replica.scheduler.add_request(request, self.now)
        if not replica.is_busy:
            self._begin_step(replica)

    def _begin_step(self, replica: Replica) -> None:
        begun = replica.begin_step(self.now)
        replica.is_busy = begun is not None
        if begun is not None:
            plan, first_tokens_at, ends_at = begun
            self._at(first_tokens_at, self._note_first_tokens, replica, plan)
            self._at(ends_at, self._end_step, replica, plan)

    def _note_first_tokens(self, replica: Replica, plan: SchedulerOutput) -> None:
        self._hear_of_blocks(replica)
        for name in plan.sampled_req_ids:
            running = self._running[name]
            if running.started is not None:
                continue
            running.started = self.now
            self._choice.started(name)
            if not running.is_observed:
                continue
            self.result.first_tokens.append(self.now - running.arrived)
            if running.session.is_agent:
                self.result.agent_first_tokens.append(self.now - running.arrived)

    def _end_step(self, replica: Replica, plan: SchedulerOutput) -> None:
        sampled = [self._sessions.new_tokens(UNIT) for _ in plan.sampled_req_ids]
        outputs = replica.scheduler.update_from_output(plan, ModelRunnerOutput(plan.sampled_req_ids, sampled), self.now)
        self._hear_of_blocks(replica)
        for output in outputs:
            running = self._running[output.request_id]
            running.answer += output.new_token_ids
            if output.finished:
                assert output.error is None, output.error
                if running.is_observed:
                    self._note_end(running, output.num_cached_tokens)
                self._end_turn(self._running.pop(output.request_id))
        self._begin_step(replica)

    def _hear_of_blocks(self, replica: Replica) -> None:
        told = replica.blocks_told()
        if told is not None:
            assert self._timed(self._index.take, replica.index, told)

    def _note_end(self, running: Running, num_cached: int) -> None:
        assert running.started is not None
        self.result.num_observed += 1
        self.result.prompt_tokens += UNIT * len(running.request.prompt_token_ids)
        self.result.cached_tokens += UNIT * num_cached
        self.result.token_seconds.append((self.now - running.started) / (UNIT * len(running.answer)))

    def _end_turn(self, running: Running) -> None:
        session, request = running.session, running.request
        session.tokens += running.answer
        self._timed(self._choice.learn, running.replica, request, session.tokens)
        self._choice.ended(request.request_id)
        if session.turns:
            self._at(self.now + session.turns[-1][2], self._take_turn, session)
        elif session.is_agent:
            self.result.replicas_by_agent.append(len(session.replicas))


# ---- the program ----


def simulate(choice: str, traffic: Traffic, num_replicas: int, num_blocks: int, seed: int) -> Result:
    gc.disable()  # nothing here has cycles, and a pass over a thousand schedulers takes seconds
    try:
        return Service(traffic, num_replicas, num_blocks, choice, seed).run()
    finally:
        gc.enable()


def table(results: Sequence[Result]) -> str:
    head = (
        "",
        "hits",
        "computed",
        "first token, s",
        "",
        "of agents",
        "",
        "a token, ms",
        "",
        "replicas",
        "prompts",
        "",
        "choice",
    )
    units = ("", "", "a request", "p50", "p99", "p50", "p99", "p50", "p99", "an agent", "mean", "max", "µs")
    lines = [_row(head), _row(units)]
    for result in results:
        found = result.figures()
        seconds = [f"{found[f'{what}first_token_{share}']:.2f}" for what in ("", "agent_") for share in ("p50", "p99")]
        tokens = [f"{1e3 * found[f'token_{share}']:.1f}" for share in ("p50", "p99")]
        shares = [f"{found[f'prompts_{which}']:.0%}" for which in ("mean", "max")]
        hits, computed = f"{found['hit_rate']:.1%}", f"{found['computed_prompt_tokens_per_request']:,.0f}"
        agents, choice = f"{found['replicas_by_agent']:.1f}", f"{found['choice_microseconds']:.0f}"
        lines.append(_row((result.name, hits, computed, *seconds, *tokens, agents, *shares, choice)))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:<24}" + "".join(f"{cell:>{max(8, len(cell) + 1)}}" for cell in cells[1:])


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--replicas", type=int, default=1000, metavar="N", help="%(default)s")
    parser.add_argument("--sessions", type=int, default=1_000_000, metavar="N", help="%(default)s")
    rate = "new sessions a second for each replica; %(default)s"
    parser.add_argument("--rate", type=float, default=3.0, metavar="X", help=rate)
    parser.add_argument("--agents", type=float, default=Traffic.agent_share, metavar="SHARE", help="%(default)s")
    parser.add_argument("--prefixes", type=int, default=Traffic.num_prefixes, metavar="N", help="%(default)s")
    kv_tokens = "tokens that the KV cache of a replica holds; %(default)s"
    parser.add_argument("--kv-tokens", type=int, default=524_288, metavar="N", help=kv_tokens)
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES), metavar="NAME")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="rows at once; %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures")
    args = parser.parse_args(arguments)
    for name in ("replicas", "sessions", "rate", "prefixes", "processes"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name}: {getattr(args, name)}; expected more than 0")
    traffic = Traffic(args.sessions, args.rate * args.replicas, agent_share=args.agents, num_prefixes=args.prefixes)
    rows = [(name, traffic, args.replicas, args.kv_tokens // (UNIT * BLOCK_SIZE), args.seed) for name in args.choices]
    if args.processes > 1:
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(simulate, *zip(*rows)))
    else:
        results = [simulate(*row) for row in rows]
    some = results[0]
    print(f"{args.replicas:,} replicas, {args.sessions:,} sessions, {some.num_requests:,} requests, ", end="")
    print(f"{some.simulated_seconds:,.0f} simulated seconds; {max(one.wall_seconds for one in results):,.0f} s a row")
    print(table(results))
    if args.json:
        figures = {"traffic": asdict(traffic), "rows": {one.name: one.figures() for one in results}}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
