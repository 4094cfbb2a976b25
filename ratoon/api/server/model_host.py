"""Several models behind one address, each with an engine process of its own: loads them when they are first asked for,
within one memory budget, and puts them away when they were idle for long.

A model is put away only while no request uses it, so no accepted request is lost. All changes of a model's state are
tasks of its own, one at a time: a client that disconnects ends no load that others wait for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import SERVER_ERROR, ApiError, model_not_found
from ratoon.api.server.exchange import AsgiApp
from ratoon.api.server.model_slots import (
    FOREVER,
    Claim,
    ModelMemory,
    ModelState,
    SleepLevel,
    kv_share,
    room_for,
)
from ratoon.api.server.response_log import ResponseLog
from ratoon.api.server.response_store import ResponseStore
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError, ModelError, RatoonError
from ratoon.core.sizes import format_size
from ratoon.engine.output.record_log import open_log_of_model
from ratoon.observe.logging import get_logger
from ratoon.observe.metrics import EngineMetrics

logger = get_logger(__name__)

PATIENCE = 10.0  # seconds that a model waits for memory of models in use; then these get no further requests
POLL = 0.1  # seconds between looks at work that ends without notice, such as responses in the background
LEASE_POLL = 5.0  # seconds between looks at leases of a model that would be put to sleep


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the command line or the configuration file names it."""

    name: str  # in requests and answers
    model: str  # a folder, a GGUF file, a hub id or an embedded name
    llm_settings: Mapping[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)
    further_names: tuple[str, ...] = ()  # aliases, and adapters
    weight_bytes: int = 0  # of its files; 0: unknown
    keep_alive: float | None = None  # None: that of the server

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.further_names)


class LoadedModel(Protocol):
    """A model with its engine process."""

    context: ServerContext
    app: AsgiApp  # the routes, without the layers in front of them
    memory: ModelMemory

    @property
    def is_dead(self) -> bool: ...

    @property
    def num_unfinished(self) -> int:
        """The number of prompts under way, those in the background included."""
        ...

    async def num_leases(self) -> int: ...

    async def sleep(self, level: SleepLevel) -> None: ...

    async def wake_up(self) -> None: ...

    async def end(self, drain_seconds: float = 0.0) -> None: ...


Load = Callable[["ModelSlot", int | None], Awaitable[LoadedModel]]  # with the memory for the KV cache, if it is chosen


class ModelSlot(Claim):
    """One of the models, loaded or not."""

    def __init__(self, index: int, spec: ModelSpec, memory: ModelMemory) -> None:
        super().__init__(spec.name, memory)
        self.index = index
        self.spec = spec
        self.created = int(time.time())
        self.state = ModelState.UNLOADED
        self.loaded: LoadedModel | None = None
        self.num_users = 0
        self.num_waiting = 0  # of these, those that wait until it is ready
        self.keep_alive = FOREVER
        self.error = ""  # of the last load, if it failed
        self.num_loads = 0
        self.is_leaving = False  # it gets no further requests, because another model waits for its memory
        self.change: asyncio.Task[None] | None = None  # of its state
        settings = spec.settings
        # Stored responses outlive the engine and, with kv_files, this process.
        records = open_log_of_model(spec.llm_settings.get("kv_files"), spec.model, "responses")
        log = None if records is None else ResponseLog(records)
        self.store = ResponseStore(settings.max_responses, settings.max_response_bytes, log)
        self.past = EngineMetrics(spec.name)  # of engines that have ended

    @property
    def is_ready(self) -> bool:
        loaded = self.loaded
        return self.state == ModelState.LOADED and not self.is_leaving and loaded is not None and not loaded.is_dead

    @property
    def is_idle(self) -> bool:
        """Whether it could be put away now. What waits for a model that is about to leave does not keep it."""
        num_users = self.num_users - (self.num_waiting if self.is_leaving else 0)
        unused = num_users == 0 and self.change is None
        return unused and (self.loaded is None or self.loaded.num_unfinished == 0)

    @property
    def expires_at(self) -> float:
        return self.last_used + self.keep_alive

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use; adapters can be added to a loaded model."""
        if self.loaded is None:
            return self.spec.names
        return tuple(dict.fromkeys((*self.spec.names, *self.loaded.context.model_names)))


class ModelHost:
    def __init__(
        self,
        specs: Sequence[ModelSpec],
        load: Load,
        *,
        keep_alive: float = FOREVER,
        memory_budget: int | None = None,
        unload_idle: bool = False,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
    ) -> None:
        """`keep_alive`: idle seconds after which a model is put to sleep, or unloaded with `unload_idle`."""
        self._load = load
        self.budget: float = math.inf if memory_budget is None else memory_budget
        self._keep_alive = keep_alive
        self._unload_idle = unload_idle
        self._clock = clock
        self._patience = patience
        self._room = asyncio.Lock()  # in the order of arrival
        self._changed = asyncio.Event()
        self._is_ending = False
        self.slots = [
            ModelSlot(index, spec, self._expected_memory(spec, len(specs))) for index, spec in enumerate(specs)
        ]
        for slot in self.slots:
            slot.keep_alive = self._usual_keep_alive(slot)

    def _usual_keep_alive(self, slot: ModelSlot) -> float:
        return self._keep_alive if slot.spec.keep_alive is None else slot.spec.keep_alive

    def _expected_memory(self, spec: ModelSpec, num_models: int) -> ModelMemory:
        given = spec.llm_settings
        if given.get("kv_memory") is not None:
            return ModelMemory(spec.weight_bytes, given["kv_memory"])
        if self._chooses_kv(spec):
            return ModelMemory(spec.weight_bytes, kv_share(spec.weight_bytes, num_models, int(self.budget)))
        return ModelMemory(spec.weight_bytes)

    def _chooses_kv(self, spec: ModelSpec) -> bool:
        """Whether the size of the KV cache follows from the budget."""
        names = ("kv_memory", "num_blocks", "num_gpu_blocks_override", "kv_memory_fraction", "gpu_memory_utilization")
        return not math.isinf(self.budget) and all(spec.llm_settings.get(name) is None for name in names)

    @property
    def now(self) -> float:
        return self._clock()

    # ---- names ----

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for slot in self.slots for name in slot.names)

    def find(self, name: str) -> ModelSlot:
        """Returns the model with this name. ApiError: there is none."""
        found = self.look_for(name)
        if found is None:
            raise model_not_found(name, self.names)
        return found

    def look_for(self, name: str) -> ModelSlot | None:
        plain = name.removesuffix(":latest")  # as Ollama's clients write it
        for wanted in (name, plain):
            for slot in self.slots:
                if wanted in slot.names:
                    return slot
        return None

    # ---- requests ----

    def enter(self, slot: ModelSlot) -> None:
        """A request uses the model from now on, loaded or not. `leave` must follow."""
        slot.num_users += 1
        slot.last_used = self._clock()

    def leave(self, slot: ModelSlot, keep_alive: float | None = None) -> None:
        """The request has ended. `keep_alive` is its own wish, in seconds."""
        slot.num_users -= 1
        slot.last_used = self._clock()
        slot.keep_alive = self._usual_keep_alive(slot) if keep_alive is None else keep_alive
        self._changed.set()

    async def ready(self, slot: ModelSlot) -> LoadedModel:
        """Waits until the model answers. ApiError: it can't be loaded."""
        slot.num_waiting += 1
        try:
            while not slot.is_ready:
                if slot.change is None and not slot.is_leaving:
                    self._begin(slot, self._bring(slot))
                if slot.change is not None:
                    await asyncio.shield(slot.change)
                else:  # it is about to be put away
                    await self._wait_for_change()
        finally:
            slot.num_waiting -= 1
        assert slot.loaded is not None
        return slot.loaded

    def _begin(self, slot: ModelSlot, work: Any) -> asyncio.Task[None]:
        """Makes the work the slot's change of state; there is none other."""
        assert slot.change is None

        async def run() -> None:
            try:
                await work
            finally:
                slot.change = None
                self._changed.set()

        slot.change = asyncio.create_task(run())
        # An error is reported to those that wait, and there may be none left.
        slot.change.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return slot.change

    async def _wait_for_change(self, seconds: float = POLL) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # ---- loading ----

    async def _bring(self, slot: ModelSlot) -> None:
        if self._is_ending:
            raise ApiError(503, "The server is shutting down", kind=SERVER_ERROR, code="shutting_down")
        begin = time.monotonic()
        before = slot.state
        if slot.loaded is not None and slot.loaded.is_dead:
            logger.error("the engine of %s is dead, and is started again", slot.name)
            await self._end(slot)
            before = ModelState.UNLOADED
        slot.state = ModelState.LOADING
        try:
            async with self._room:
                await self._make_room(slot)
                slot.level = SleepLevel.AWAKE  # reserved
            verb = "loading" if slot.loaded is None else "waking up"
            logger.info("%s %s; %d requests wait for it", verb, slot.name, slot.num_users)
            if slot.loaded is None:
                chosen = slot.memory.kv if self._chooses_kv(slot.spec) else None
                slot.loaded = await self._load(slot, chosen)
                slot.num_loads += 1
                slot.memory = slot.loaded.memory
            else:
                await slot.loaded.wake_up()
            await self._check_size(slot)
        except BaseException as error:
            await self._give_up(slot, before, error)
            raise self._refusal(slot, error) from error
        slot.state, slot.error = ModelState.LOADED, ""
        logger.info("%s is loaded after %.1f s", slot.name, time.monotonic() - begin)

    async def _give_up(self, slot: ModelSlot, before: ModelState, error: BaseException) -> None:
        if before == ModelState.ASLEEP and isinstance(error, ApiError) and slot.loaded is not None:
            slot.state = before  # there was no room for it
            return
        slot.error = str(error)
        logger.error("%s can't be loaded: %s", slot.name, error)
        await self._end(slot)

    def _refusal(self, slot: ModelSlot, error: BaseException) -> BaseException:
        if isinstance(error, (ModelError, ConfigError)):  # the same next time
            return ApiError(
                400, f"The model {slot.name!r} can't be loaded: {error}", param="model", code="model_not_loadable"
            )
        if isinstance(error, RatoonError):
            message = f"The model {slot.name!r} can't be loaded: {error}"
            headers = {"Retry-After": "5"}
            return ApiError(503, message, kind=SERVER_ERROR, param="model", code="model_load_failed", headers=headers)
        return error

    async def _check_size(self, slot: ModelSlot) -> None:
        """The true size is known when a model was loaded for the first time."""
        if slot.memory.total > self.budget:
            raise self._too_large(slot)
        excess = room_for(0, self.slots, self._idle_ones(slot), self.budget)
        for step in excess or ():
            await self._sleep(self._slot_of(step.claim), step.level)
        if sum(one.held for one in self.slots) > self.budget:
            logger.warning(
                "loaded models hold %s, more than the memory budget of %s",
                format_size(sum(one.held for one in self.slots)),
                format_size(self.budget),
            )

    def _too_large(self, slot: ModelSlot) -> ApiError:
        memory = slot.memory
        message = (
            f"The model {slot.name!r} can never be loaded: it needs {format_size(memory.weights)} for weights and "
            f"{format_size(memory.kv)} for the KV cache, and the memory budget of this server is "
            f"{format_size(self.budget)} (--memory-budget)"
        )
        return ApiError(400, message, param="model", code="model_too_large")

    def _idle_ones(self, beside: ModelSlot) -> list[ModelSlot]:
        return [slot for slot in self.slots if slot is not beside and slot.is_idle and slot.level is not None]

    def _slot_of(self, claim: Claim) -> ModelSlot:
        assert isinstance(claim, ModelSlot)
        return claim

    async def _make_room(self, slot: ModelSlot) -> None:
        """Returns when the model fits into the budget. Idle models go first; models in use get no further requests when
        this one has waited for long, so that it does not wait forever."""
        if slot.memory.total > self.budget:
            raise self._too_large(slot)
        since = self._clock()
        while True:
            needed = slot.memory.total - slot.held
            steps = room_for(needed, self.slots, self._idle_ones(slot), self.budget)
            if steps is not None:
                for step in steps:
                    await self._sleep(self._slot_of(step.claim), step.level)
                if not steps:
                    return
                continue
            if self._clock() - since >= self._patience:
                self._ask_to_leave(slot, needed)
            await self._wait_for_change()

    def _ask_to_leave(self, slot: ModelSlot, needed: int) -> None:
        others = [one for one in self.slots if one is not slot and one.level is not None and one.change is None]
        for step in room_for(needed, self.slots, others, self.budget) or ():
            leaving = self._slot_of(step.claim)
            if not leaving.is_leaving and not leaving.is_idle:
                logger.info("%s gets no further requests until %s is loaded", leaving.name, slot.name)
                leaving.is_leaving = True

    # ---- putting away ----

    async def _sleep(self, slot: ModelSlot, level: SleepLevel) -> None:
        """Puts an idle model to sleep, if it is still idle."""
        if slot.is_idle and slot.loaded is not None:
            await self._begin(slot, self._put_to_sleep(slot, level))

    async def _put_to_sleep(self, slot: ModelSlot, level: SleepLevel) -> None:
        assert slot.loaded is not None
        begin = time.monotonic()
        try:
            await slot.loaded.sleep(level)
            slot.state, slot.level = ModelState.ASLEEP, level
            what = "its KV cache" if level == SleepLevel.WITHOUT_KV else "its KV cache and its weights"
            logger.info("%s sleeps, without %s, after %.1f s", slot.name, what, time.monotonic() - begin)
        except RatoonError as error:
            logger.error("%s can't be put to sleep, and is unloaded: %s", slot.name, error)
            await self._end(slot)
        finally:
            slot.is_leaving = False

    async def unload(self, slot: ModelSlot) -> bool:
        """Ends the process of a model when no request uses it. Returns whether it had one."""
        while slot.change is not None or not slot.is_idle:
            await self._wait_for_change()
        if slot.loaded is None:
            return False
        await self._begin(slot, self._end(slot))
        logger.info("%s is unloaded", slot.name)
        return True

    async def _end(self, slot: ModelSlot, drain_seconds: float = 0.0) -> None:
        loaded, slot.loaded = slot.loaded, None
        slot.state, slot.level, slot.is_leaving = ModelState.UNLOADED, None, False
        if loaded is None:
            return
        metrics = loaded.context.llm.metrics
        if metrics is not None:
            slot.past.add(metrics.figures())
        await loaded.end(drain_seconds)

    async def put_idle_away(self) -> None:
        """Puts away every model that was idle for its time."""
        for slot in self.slots:
            if not self._can_expire(slot) or self._clock() < slot.expires_at:
                continue
            assert slot.loaded is not None
            if self._is_unloaded_when_idle(slot):
                await self.unload(slot)
            elif await slot.loaded.num_leases():
                slot.last_used = self._clock() - slot.keep_alive + LEASE_POLL  # a lease is a promise
            else:
                await self._sleep(slot, SleepLevel.WITHOUT_KV)

    def _is_unloaded_when_idle(self, slot: ModelSlot) -> bool:
        return self._unload_idle or slot.keep_alive == 0

    def _can_expire(self, slot: ModelSlot) -> bool:
        """Whether it would be put away after its time."""
        if not slot.is_idle or slot.loaded is None:
            return False
        return slot.state == ModelState.LOADED or self._is_unloaded_when_idle(slot)

    async def keep_house(self) -> None:
        """Puts idle models away, forever."""
        while True:
            left = min((slot.expires_at for slot in self.slots if self._can_expire(slot)), default=FOREVER)
            left -= self._clock()
            if left > 0:
                await self._wait_for_change(min(left, 1.0))
            try:
                await self.put_idle_away()
            except Exception:
                logger.exception("an idle model could not be put away")
            await asyncio.sleep(0)

    # ---- the end ----

    @property
    def num_unfinished(self) -> int:
        return sum(slot.loaded.num_unfinished for slot in self.slots if slot.loaded is not None)

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Loads nothing more, and ends all models. Their requests have this long to finish."""
        self._is_ending = True
        for slot in self.slots:
            if slot.change is not None and slot.loaded is None:
                slot.change.cancel()
        await asyncio.gather(*(slot.change for slot in self.slots if slot.change), return_exceptions=True)
        await asyncio.gather(*(self._end(slot, drain_seconds) for slot in self.slots), return_exceptions=True)
        for slot in self.slots:
            slot.store.close()
