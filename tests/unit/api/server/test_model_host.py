"""Several models in one memory budget: what is loaded, what is put away, and what waits. Engines are made up, and time
is an argument."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.api.server.errors import ApiError
from ratoon.api.server.model_host import ModelHost, ModelSlot, ModelSpec
from ratoon.api.server.model_slots import (
    FOREVER,
    LEAST_KV_MEMORY,
    Claim,
    ModelMemory,
    ModelState,
    SleepLevel,
    kv_share,
    parse_keep_alive,
    room_for,
)
from ratoon.core.errors import ConfigError, EngineError, ModelError
from tests.unit.api.server.test_response_log import end as end_response
from tests.waiting import until

LOADED, ASLEEP, UNLOADED = ModelState.LOADED, ModelState.ASLEEP, ModelState.UNLOADED


class FakeModel:
    """A loaded model that notes what is done to it."""

    def __init__(self, memory: ModelMemory, log: list[str], name: str) -> None:
        self.memory = memory
        self.context: Any = SimpleNamespace(model_names=(), llm=SimpleNamespace(metrics=None))
        self.app: Any = None
        self.is_dead = False
        self.num_unfinished = 0
        self.leases = 0
        self._log = log
        self._name = name

    async def num_leases(self) -> int:
        return self.leases

    async def sleep(self, level: SleepLevel) -> None:
        self._log.append(f"sleep {self._name} {level}")

    async def wake_up(self) -> None:
        self._log.append(f"wake {self._name}")

    async def end(self, drain_seconds: float = 0.0) -> None:
        self._log.append(f"end {self._name}")


class House:
    """A host of fakes, with a clock that stands still."""

    def __init__(self, sizes: dict[str, ModelMemory], **options: Any) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.gate: asyncio.Event | None = None
        self._sizes = sizes
        specs = [
            ModelSpec(name, name, {"kv_memory": size.kv}, weight_bytes=size.weights) for name, size in sizes.items()
        ]
        self.host = ModelHost(specs, self._load, clock=lambda: self.now, **options)

    async def _load(self, slot: ModelSlot, kv_memory: int | None) -> FakeModel:
        self.log.append(f"load {slot.name}")
        if self.gate is not None:
            await self.gate.wait()
        if slot.name in self.failures:
            raise self.failures[slot.name]
        return FakeModel(self._sizes[slot.name], self.log, slot.name)

    def __getitem__(self, name: str) -> ModelSlot:
        return self.host.find(name)

    async def ask(self, name: str, keep_alive: float | None = None) -> None:
        """A request that is answered at once."""
        slot = self[name]
        self.host.enter(slot)
        try:
            await self.host.ready(slot)
        finally:
            self.host.leave(slot, keep_alive)

    def states(self) -> list[ModelState]:
        return [slot.state for slot in self.host.slots]


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


TWO = {"a": ModelMemory(10, 30), "b": ModelMemory(10, 30)}
THREE = {**TWO, "c": ModelMemory(10, 30)}


# ---- the rules ----


def claim(name: str, last_used: float, level: SleepLevel | None = SleepLevel.AWAKE) -> Claim:
    return Claim(name, ModelMemory(10, 30), level, last_used)


def test_the_least_recently_used_one_gives_its_kv_cache_first_then_its_weights() -> None:
    old, new = claim("old", 1.0), claim("new", 2.0)
    both = [new, old]
    assert room_for(20, both, both, 100) == []
    assert room_for(20, both, both, 80) == [(old, SleepLevel.WITHOUT_KV)]
    assert room_for(40, both, both, 80) == [(old, SleepLevel.WITHOUT_WEIGHTS)]
    assert room_for(60, both, both, 80) == [(old, SleepLevel.WITHOUT_WEIGHTS), (new, SleepLevel.WITHOUT_KV)]
    assert room_for(40, both, [new], 60) is None  # the old one is in use


def test_a_share_of_the_budget_is_what_the_weights_leave_of_it() -> None:
    mebibyte = 2**20
    assert kv_share(100 * mebibyte, 2, 1000 * mebibyte) == 400 * mebibyte
    assert kv_share(600 * mebibyte, 2, 1000 * mebibyte) == LEAST_KV_MEMORY
    assert kv_share(990 * mebibyte, 2, 1000 * mebibyte) == 10 * mebibyte
    assert kv_share(2000 * mebibyte, 2, 1000 * mebibyte) == 0


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("7", 7), (7, 7), (0, 0), ("-1", FOREVER),
     (-1, FOREVER), ("-1m", FOREVER)],
)  # fmt: skip
def test_durations_as_ollama_writes_them(written: object, seconds: float) -> None:
    assert parse_keep_alive(written) == seconds


@pytest.mark.parametrize("written", ["", "soon", "5 m", "5x", True, None, [], float("nan")])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"keep_alive: .* is not a duration; seconds, or text such as"):
        parse_keep_alive(written)


# ---- the host ----


def test_a_model_is_loaded_once_for_all_that_wait_for_it() -> None:
    async def work() -> None:
        house = House(TWO)
        house.gate = asyncio.Event()
        asking = [asyncio.create_task(house.ask("a")) for _ in range(3)]
        await until("it loads", lambda: house.log)
        assert house.states() == [ModelState.LOADING, UNLOADED]
        asking[0].cancel()  # a client that leaves ends no load
        house.gate.set()
        await asyncio.gather(*asking, return_exceptions=True)
        assert house.log == ["load a"] and house.states() == [LOADED, UNLOADED]
        assert house["a"].num_users == 0

    run(work)


def test_what_does_not_fit_makes_the_least_recently_used_idle_model_go() -> None:
    async def work() -> None:
        house = House(THREE, memory_budget=80)
        for second, name in enumerate("aba"):
            house.now = second
            await house.ask(name)
        house.now = 3
        await house.ask("c")  # b was used before a
        assert house.log == ["load a", "load b", "sleep b 2", "load c"]
        house.now = 4
        await house.ask("b")  # 40 bytes, all of which a has to give
        assert house.log[4:] == ["sleep a 2", "wake b"]
        assert house.states() == [ASLEEP, LOADED, LOADED]
        assert sum(slot.held for slot in house.host.slots) <= 80

    run(work)


def test_a_model_in_use_stays_and_another_waits_for_it() -> None:
    async def work() -> None:
        house = House(TWO, memory_budget=50)
        host = house.host
        host.enter(house["a"])
        await host.ready(house["a"])
        waiting = asyncio.create_task(house.ask("b"))
        await until("b waits", lambda: house["b"].state == ModelState.LOADING)
        for _ in range(20):
            await asyncio.sleep(0)
        assert house.log == ["load a"]
        host.leave(house["a"])
        await waiting
        assert house.log == ["load a", "sleep a 1", "load b"]

    run(work)


def test_a_model_in_steady_use_does_not_keep_another_out_forever() -> None:
    async def work() -> None:
        house = House(TWO, memory_budget=50, patience=10)
        host = house.host
        host.enter(house["a"])
        await host.ready(house["a"])
        waiting = asyncio.create_task(house.ask("b"))
        await until("b waits", lambda: house["b"].state == ModelState.LOADING)
        house.now = 11
        host._changed.set()
        await until("a gets no further requests", lambda: house["a"].is_leaving)
        later = asyncio.create_task(house.ask("a"))
        await asyncio.sleep(0)
        host.leave(house["a"])  # the one that was accepted before: it has ended by itself
        # The later request counts as a user, and must not keep the model.
        await asyncio.wait_for(waiting, 60)
        await asyncio.wait_for(later, 60)
        assert house.log == ["load a", "sleep a 1", "load b", "sleep b 1", "wake a"]

    run(work)


def test_a_model_that_can_never_fit_is_refused_with_its_size() -> None:
    async def work() -> None:
        house = House({"big": ModelMemory(100, 1), "small": ModelMemory(1, 1)}, memory_budget=50)
        with pytest.raises(ApiError, match=r"'big' can never be loaded: it needs 100 B for weights .* 50 B") as refused:
            await house.ask("big")
        assert (refused.value.status, refused.value.code) == (400, "model_too_large")
        assert house.log == []
        await house.ask("small")

    run(work)


def test_a_size_that_turns_out_larger_than_the_budget_ends_the_load() -> None:
    async def work() -> None:
        house = House({"a": ModelMemory(10, 30)}, memory_budget=50)
        house._sizes["a"] = ModelMemory(60, 30)
        with pytest.raises(ApiError, match="can never be loaded"):
            await house.ask("a")
        assert house.log == ["load a", "end a"] and house.states() == [UNLOADED]

    run(work)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelError("a", "is damaged"), 400), (ConfigError("x", "bad"), 400), (EngineError("died"), 503)],
)
def test_a_load_that_fails_is_the_requests_error_and_the_next_one_tries_again(error: Exception, status: int) -> None:
    async def work() -> None:
        house = House(TWO)
        house.failures["a"] = error
        with pytest.raises(ApiError, match=f"'a' can't be loaded: {error}") as refused:
            await house.ask("a")
        assert refused.value.status == status
        assert house["a"].error == str(error) and house.states() == [UNLOADED, UNLOADED]
        await house.ask("b")
        house.failures.clear()
        await house.ask("a")
        assert house["a"].error == "" and house.states() == [LOADED, LOADED]

    run(work)


def test_idle_models_sleep_after_their_time_and_wake_up() -> None:
    async def work() -> None:
        house = House(TWO, keep_alive=60)
        await house.ask("a")
        house.now = 30
        await house.ask("b")
        house.now = 61
        await house.host.put_idle_away()
        assert house.states() == [ASLEEP, LOADED]
        assert house["a"].held == 10  # the weights
        await house.ask("a")
        assert house.log == ["load a", "load b", "sleep a 1", "wake a"]

    run(work)


def test_a_lease_keeps_an_idle_model_awake_until_it_ends() -> None:
    async def work() -> None:
        house = House(TWO, keep_alive=60)
        await house.ask("a")
        loaded = house["a"].loaded
        assert isinstance(loaded, FakeModel)
        loaded.leases = 1
        house.now = 61
        await house.host.put_idle_away()
        assert house.states() == [LOADED, UNLOADED]
        loaded.leases, house.now = 0, 70
        await house.host.put_idle_away()
        assert house.states() == [ASLEEP, UNLOADED]

    run(work)


def test_work_in_the_background_keeps_a_model_awake() -> None:
    async def work() -> None:
        house = House(TWO, keep_alive=60)
        await house.ask("a")
        loaded = house["a"].loaded
        assert isinstance(loaded, FakeModel)
        loaded.num_unfinished, house.now = 1, 100
        await house.host.put_idle_away()
        assert house.states() == [LOADED, UNLOADED]

    run(work)


def test_a_request_may_say_how_long_its_model_is_kept() -> None:
    async def work() -> None:
        house = House(TWO, keep_alive=60)
        await house.ask("a", keep_alive=0)
        await house.ask("b", keep_alive=FOREVER)
        house.now = 1000
        await house.host.put_idle_away()
        assert house.states() == [UNLOADED, LOADED]
        assert house.log == ["load a", "load b", "end a"]
        await house.ask("b")  # which says nothing: the server's time counts again
        house.now = 1061
        await house.host.put_idle_away()
        assert house.states() == [UNLOADED, ASLEEP]

    run(work)


def test_idle_models_are_unloaded_where_the_server_says_so() -> None:
    async def work() -> None:
        house = House(TWO, keep_alive=60, unload_idle=True)
        await house.ask("a")
        house.now = 60
        await house.host.put_idle_away()
        assert house.log == ["load a", "end a"]

    run(work)


def test_a_dead_engine_is_started_again_by_the_next_request() -> None:
    async def work() -> None:
        house = House(TWO)
        await house.ask("a")
        loaded = house["a"].loaded
        assert isinstance(loaded, FakeModel)
        loaded.is_dead = True
        await house.ask("a")
        assert house.log == ["load a", "end a", "load a"]

    run(work)


def test_shutdown_ends_loads_and_models() -> None:
    async def work() -> None:
        house = House(TWO)
        await house.ask("a")
        house.gate = asyncio.Event()  # never set
        loading = asyncio.create_task(house.ask("b"))
        await until("b loads", lambda: "load b" in house.log)
        await house.host.shutdown()
        assert house.log[-1] == "end a" and house.states() == [UNLOADED, UNLOADED]
        await asyncio.gather(loading, return_exceptions=True)
        with pytest.raises(ApiError, match="shutting down"):
            await house.ask("a")

    run(work)


def test_an_unknown_name_is_a_404_with_the_list() -> None:
    house = House(TWO)
    with pytest.raises(ApiError, match="'x' does not exist; this server has 'a', 'b'") as refused:
        house.host.find("x")
    assert refused.value.status == 404
    assert house.host.find("a:latest") is house["a"]


def test_stored_responses_of_several_models_outlive_the_process_with_kv_files(tmp_path):
    def slots() -> list[ModelSlot]:
        settings = {"kv_files": str(tmp_path)}
        specs = [ModelSpec("a", "a", settings), ModelSpec("b", "b", settings), ModelSpec("c", "c")]
        return [ModelSlot(index, spec, ModelMemory(0, 0)) for index, spec in enumerate(specs)]

    for slot in (before := slots()):
        end_response(slot.store, f"resp_{slot.spec.name}", owner="x")
        slot.store.close()
    after = slots()
    found = [[slot.store.find(f"resp_{name}", "x") is not None for name in "abc"] for slot in after]
    assert found == [[True, False, False], [False, True, False], [False] * 3], "each model has its own"
    for slot in (*before, *after):
        slot.store.close()
