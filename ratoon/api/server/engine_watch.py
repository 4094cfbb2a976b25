"""What the engines are doing, as streams of events show it: a snapshot, then what changed.

One task asks the engines while there is at least one stream, for all streams of this process. What it finds is kept
here, and every stream compares it with what it has sent. Requests and leases have no texts. A stream that belongs to
one API key has the requests, leases and blocks of that key alone, and no steps: their sizes are those of other keys'
prompts as well.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from ratoon.core.engine_map import NUM_STEPS, BlockCode, EngineMapReport, MapFigures, MappedStep, Ranges
from ratoon.core.errors import EngineError
from ratoon.version import __version__

if TYPE_CHECKING:
    from ratoon.core.health import Health

RATE_SECONDS = 3.0  # over which rates are averaged
# Making a report takes time of an engine. It is asked so rarely that this is a small part of the engine's time.
REPORTS_PER_SECOND_OF_WORK = 250.0
SECONDS_TO_ANSWER = 1.0  # for the engines; then only their health is told, until they do
HEARTBEAT_SECONDS = 10.0  # without an event, after which a comment shows that the stream is alive
PATIENCE = 0.25  # seconds between looks at whether the server shuts down
MANY_CHANGES = 4  # the whole map is sent where more than one block in so many changed
HEARTBEAT = b": \n\n"

Entry: TypeAlias = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class View:
    """What a stream may show. `owner` counts only where it is not of all."""

    of_all: bool
    owner: str | None = None

    def shows(self, owner: str | None) -> bool:
        return self.of_all or owner == self.owner


@dataclass(slots=True)
class Kept:
    """A request or a lease. `version` counts its changes, but for its age."""

    owner: str | None
    entry: Entry
    time: float  # when it began, or ends, in seconds since 1970
    blocks: Ranges
    version: int = 0


@dataclass(slots=True)
class EngineState:
    """One engine, as its reports tell."""

    index: int
    block_size: int = 0
    num_groups: int = 0
    codes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # a BlockCode for each block
    host_blocks: dict[str, int] | None = None
    requests: dict[str, Kept] = field(default_factory=dict)  # by the engine's id
    leases: dict[tuple[str | None, str], Kept] = field(default_factory=dict)  # by owner, and the owner's id
    figures: MapFigures = field(default_factory=MapFigures)
    # Of the last seconds: when, and how many tokens of prompts and answers there had been
    history: deque[tuple[float, int, int]] = field(default_factory=deque)
    run_id: str = ""
    num_steps: int = 0  # of this run that are known

    def new_steps(self, report: EngineMapReport) -> list[MappedStep]:
        """The steps that no earlier report had: what is whole may have known ones."""
        if report.run_id != self.run_id:
            self.run_id, self.num_steps = report.run_id, 0
        num_new = min(report.num_steps - self.num_steps, len(report.steps))
        self.num_steps = report.num_steps
        return report.steps[len(report.steps) - num_new :]

    def take(self, report: EngineMapReport, now: float, label: Callable[[str | None], str | None]) -> None:
        if report.is_whole:
            assert report.blocks is not None
            self.requests.clear()
            self.leases.clear()
            self.history.clear()
            self.codes = np.frombuffer(report.blocks, np.uint8).copy()
        for block_id, code in report.changed.items():
            self.codes[block_id] = code
        self.block_size, self.num_groups = report.block_size, report.num_groups
        if report.num_host_blocks:
            self.host_blocks = {"total": report.num_host_blocks, "used": report.num_used_host_blocks}
        self.requests = {
            one.request_id: _keep(
                self.requests.get(one.request_id),
                one.owner,
                {
                    "key": self._key(label(one.owner), one.external_id),
                    "id": one.external_id,
                    "engine": self.index,
                    "owner": label(one.owner),
                    "state": "running" if one.is_running else "waiting",
                    "kind": one.kind,
                    "prompt_tokens": one.num_prompt_tokens,
                    "output_tokens": one.num_output_tokens,
                },
                one.began,
                one.blocks,
            )
            for one in report.requests
        }
        self.leases = {
            (one.owner, one.root_id): _keep(
                self.leases.get((one.owner, one.root_id)),
                one.owner,
                {
                    "key": self._key(label(one.owner), one.root_id),
                    "id": one.root_id,
                    "engine": self.index,
                    "owner": label(one.owner),
                    "tokens": one.num_tokens,
                    "place": one.place,
                },
                one.ends,
                one.blocks,
            )
            for one in report.leases
        }
        self.figures = report.figures
        self.history.append((now, report.figures.num_prompt_tokens, report.figures.num_output_tokens))
        while len(self.history) > 2 and now - self.history[1][0] > RATE_SECONDS:
            self.history.popleft()

    def _key(self, label: str | None, external_id: str) -> str:
        """Returns what a request or a lease is called in events: two owners may have chosen the same id."""
        return f"{self.index}/{label or ''}/{external_id}"

    def lose(self) -> None:
        """It has no process, or one that does not answer: what it held is gone."""
        self.codes = np.zeros(len(self.codes), np.uint8)
        self.requests.clear()
        self.leases.clear()
        self.history.clear()
        self.figures = MapFigures()

    def codes_for(self, view: View) -> np.ndarray:
        """The map that a stream may show."""
        if view.of_all or not len(self.codes):
            return self.codes
        codes = np.zeros(len(self.codes), np.uint8)
        codes[0] = BlockCode.NULL
        for kept, code in ((self.leases.values(), BlockCode.LEASED), (self.requests.values(), BlockCode.USED)):
            for one in kept:
                if view.shows(one.owner):
                    for first, last in one.blocks:
                        codes[first : last + 1] = code
        return codes

    def tokens_per_second(self) -> tuple[float, float]:
        if len(self.history) < 2:
            return 0.0, 0.0
        (began, prompt_before, output_before), (now, prompt, output) = self.history[0], self.history[-1]
        return (prompt - prompt_before) / (now - began), (output - output_before) / (now - began)


def _keep(known: Kept | None, owner: str | None, entry: Entry, time: float, blocks: Ranges | None) -> Kept:
    if known is None:
        return Kept(owner, entry, time, blocks or [])
    if blocks is None:
        blocks = known.blocks
    changed = known.entry != entry or known.time != time or known.blocks != blocks
    return Kept(owner, entry, time, blocks, known.version + changed)


class WatchedEngines(Protocol):
    """The engines of one model, as an AsyncLLM has them, or of several (host_app.py)."""

    def health(self) -> Health: ...

    async def engine_maps(self, watcher_id: str) -> list[EngineMapReport]: ...


class EngineWatch:
    """The engines as this process knows them. It asks them while there are streams."""

    def __init__(
        self,
        watched: WatchedEngines,
        models: Callable[[], Iterable[str]],
        model_of: Callable[[int], str],
        labels: Mapping[str | None, str],
        is_ending: Callable[[], bool],
    ) -> None:
        """`model_of` returns the name of the model of an engine, `labels` are what owners are called in events."""
        self._watched = watched
        self._models = models
        self.model_of = model_of
        self._labels = labels
        self._is_ending = is_ending
        self._watcher_id = secrets.token_hex(8)
        self._intervals: dict[object, float] = {}  # of the streams
        self._task: asyncio.Task[None] | None = None
        self._asked_sooner = asyncio.Event()
        self._news = asyncio.Event()
        self._num_rounds = 0
        self.engines: dict[int, EngineState] = {}
        self.steps: deque[list[Any]] = deque(maxlen=NUM_STEPS)
        self.num_steps = 0

    async def events(self, view: View, interval: float, count: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yields encoded events: a snapshot, then what changed, at intervals of so many seconds or more; comments where
        nothing does. `count` is the number of events after which it ends."""
        stream = object()
        self._intervals[stream] = interval
        if self._task is None:
            self._task = asyncio.create_task(self._ask())
        self._asked_sooner.set()
        try:
            seen = self._num_rounds
            while self._num_rounds < seen + 1 and not self._is_ending():
                await self._wait_for_news(PATIENCE)
            sent = SentState(self, view)
            yield encode_event("snapshot", sent.snapshot(self._watched.health(), list(self._models())))
            num_sent, last = 1, time.monotonic()
            while (count is None or num_sent < count) and not self._is_ending():
                silence = time.monotonic() - last
                if silence < interval:
                    await asyncio.sleep(min(interval - silence, PATIENCE))
                    continue
                await self._wait_for_news(PATIENCE)
                delta = sent.delta(self._watched.health())
                if delta is not None:
                    yield encode_event("delta", delta)
                    num_sent, last = num_sent + 1, time.monotonic()
                elif silence > HEARTBEAT_SECONDS:
                    yield HEARTBEAT
                    last = time.monotonic()
        finally:
            del self._intervals[stream]
            if not self._intervals and self._task is not None:
                self._task.cancel()
                self._task = None
                self._watcher_id = secrets.token_hex(8)  # an answer may have been on its way

    async def _wait_for_news(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _ask(self) -> None:
        """Asks the engines again and again. What they take to answer, and how often streams want news, says when."""
        while True:
            start = time.monotonic()
            self._asked_sooner.clear()
            asking = asyncio.create_task(self._watched.engine_maps(self._watcher_id))
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=SECONDS_TO_ANSWER)
                    if not asking.done():
                        self._tell()
                reports = asking.result()
            except EngineError:  # none is there, or one has ended since: what it would have told is lost
                reports = []
                self._watcher_id = secrets.token_hex(8)
            finally:
                asking.cancel()
            self._take(reports)
            self._tell()
            work = max((report.seconds for report in reports), default=0.0)
            pause = max(min(self._intervals.values(), default=1.0), work * REPORTS_PER_SECOND_OF_WORK)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, start + pause - time.monotonic())):
                    await self._asked_sooner.wait()

    def _tell(self) -> None:
        self._num_rounds += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _take(self, reports: list[EngineMapReport]) -> None:
        now = time.monotonic()
        for report in reports:
            engine = self.engines.setdefault(report.index, EngineState(report.index))
            engine.take(report, now, self._labels.get)
            new_steps = engine.new_steps(report)
            self.steps += ([report.index, *msgspec.structs.astuple(step)] for step in new_steps)
            self.num_steps += len(new_steps)
        told = {report.index for report in reports}
        for index, engine in self.engines.items():
            if index not in told:
                engine.lose()

    def rates(self) -> dict[str, Any]:
        engines = self.engines.values()
        figures = [engine.figures for engine in engines]
        speeds = [engine.tokens_per_second() for engine in engines]
        num_blocks = sum(len(engine.codes) for engine in engines)
        used = sum(engine.figures.kv_usage * len(engine.codes) for engine in engines)
        num_drafts = sum(one.num_draft_tokens for one in figures)
        num_queries = sum(one.prefix_queries for one in figures)
        return {
            "prompt_tokens_per_s": round(sum(prompt for prompt, _ in speeds), 1),
            "output_tokens_per_s": round(sum(output for _, output in speeds), 1),
            "prefix_hit_rate": round(sum(one.prefix_hits for one in figures) / num_queries, 4) if num_queries else 0.0,
            "draft_acceptance": (
                round(sum(one.num_accepted_tokens for one in figures) / num_drafts, 4) if num_drafts else None
            ),
            "kv_usage": round(used / num_blocks, 4) if num_blocks else 0.0,
            "memory_bytes": sum(one.memory_bytes for one in figures),
            "num_running": sum(one.num_running for one in figures),
            "num_waiting": sum(one.num_waiting for one in figures),
        }


class SentState:
    """What one stream has sent so far."""

    def __init__(self, watch: EngineWatch, view: View) -> None:
        self._watch = watch
        self._view = view
        self._engines: dict[int, Entry] = {}  # without blocks
        self._codes: dict[int, np.ndarray] = {}
        self._requests: dict[Any, tuple[str, int]] = {}  # key in events, and version
        self._leases: dict[Any, tuple[str, int]] = {}
        self._num_steps = 0
        self._rates: dict[str, Any] = {}

    def snapshot(self, health: Health, models: list[str]) -> dict[str, Any]:
        """The whole state."""
        delta = self.delta(health) or {}
        whole = {"engines": [], "requests": [], "leases": [], "steps": [], "rates": self._rates, **delta}
        for gone in ("engines_gone", "requests_gone", "leases_gone"):
            whole.pop(gone, None)
        scope = "all" if self._view.of_all else "own"
        return {"time": round(time.time(), 3), "version": __version__, "models": models, "scope": scope, **whole}

    def delta(self, health: Health) -> dict[str, Any] | None:
        """What changed since the last call; None: nothing did."""
        now = time.time()
        engines, engines_gone = self._engine_news(health)
        states = self._watch.engines.values()
        requests, requests_gone = self._news(
            self._requests, {("r", state.index, name): one for state in states for name, one in state.requests.items()}
        )
        leases, leases_gone = self._news(
            self._leases, {("l", state.index, name): one for state in states for name, one in state.leases.items()}
        )
        num_new = min(self._watch.num_steps - self._num_steps, len(self._watch.steps)) if self._view.of_all else 0
        self._num_steps = self._watch.num_steps
        rates = self._watch.rates()
        news = (engines, engines_gone, requests, requests_gone, leases, leases_gone, num_new)
        is_news = any(news) or rates != self._rates
        self._rates = rates
        if not is_news:
            return None
        steps = self._watch.steps
        return {
            "time": round(now, 3),
            "engines": engines,
            "engines_gone": engines_gone,
            "requests": [
                {**one.entry, "age": round(max(0.0, now - one.time), 3), "blocks": one.blocks} for one in requests
            ],
            "requests_gone": requests_gone,
            "leases": [
                {**one.entry, "seconds_left": round(max(0.0, one.time - now), 3), "blocks": one.blocks}
                for one in leases
            ],
            "leases_gone": leases_gone,
            "steps": [steps[place] for place in range(len(steps) - num_new, len(steps))],
            "rates": rates,
        }

    def _engine_news(self, health: Health) -> tuple[list[Entry], list[int]]:
        """Returns what is new of the engines, and the numbers of those that have ended with their model."""
        found = []
        gone = sorted(self._engines.keys() - {one.index for one in health.engines})
        for index in gone:
            del self._engines[index]
            self._codes.pop(index, None)
        for one in health.engines:
            entry: Entry = {
                "model": self._watch.model_of(one.index),
                "state": str(one.state),
                "pid": one.pid,
                "num_restarts": one.num_restarts,
                "detail": one.detail,
                "paused": one.paused,
                "asleep": one.asleep,
            }
            blocks: str | dict[str, int] | None = None
            state = self._watch.engines.get(one.index)
            if state is not None:
                entry |= {
                    "block_size": state.block_size,
                    "num_blocks": len(state.codes),
                    "groups": state.num_groups,
                    "host_blocks": state.host_blocks,
                }
                blocks = self._block_news(one.index, state.codes_for(self._view))
            before = self._engines.get(one.index, {})
            self._engines[one.index] = entry
            news = {name: value for name, value in entry.items() if name not in before or before[name] != value}
            if blocks:
                news["blocks"] = blocks
            if news:
                found.append({"index": one.index, **news})
        return found, gone

    def _block_news(self, index: int, codes: np.ndarray) -> str | dict[str, int] | None:
        """The blocks that changed and their codes, or the whole map; None: none did."""
        before, self._codes[index] = self._codes.get(index), codes.copy()
        if before is not None and len(before) == len(codes):
            changed = np.nonzero(before != codes)[0]
            if len(changed) * MANY_CHANGES <= len(codes):
                return {str(place): int(codes[place]) for place in changed.tolist()} or None
        return base64.b64encode(codes.tobytes()).decode("ascii")

    def _news(self, sent: dict[Any, tuple[str, int]], current: dict[Any, Kept]) -> tuple[list[Kept], list[str]]:
        """Returns what is new or changed among these, and the keys of what is gone."""
        shown = {key: one for key, one in current.items() if self._view.shows(one.owner)}
        news = [one for key, one in shown.items() if sent.get(key) != (one.entry["key"], one.version)]
        there = {one.entry["key"] for one in shown.values()}
        gone = [name for key, (name, _) in sent.items() if key not in shown and name not in there]
        sent.clear()
        sent.update((key, (one.entry["key"], one.version)) for key, one in shown.items())
        return news, list(dict.fromkeys(gone))


def encode_event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(content))
