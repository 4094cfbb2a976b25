"""States of a continuation's parent: freed, still running, evicted, forgotten, another owner's.

The classes are the edge cases 6.1 to 6.5 of the specification. Whatever the matter is, the answer is a typed error or
the tokens of the whole text sent afresh.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from ratoon import RequestOutput
from ratoon.core.errors import UnknownParentError
from ratoon.engine.output.roots import MAX_ROOTS, Root, RootTable
from ratoon.scheduling.branch import BranchStatus
from tests.adapter_folders import write_adapter
from tests.depths import both_depths
from tests.engines_async import thread_engine
from tests.golden.driver import Driver, greedy, sampled
from tests.golden.engines import engine, model_folder
from tests.golden.test_continuation import num_computed, tokens_of, whole
from tests.golden.tiny_models import random_token_ids

LLAMA = "llama with grouped heads"
WINDOW = "mistral with a window shorter than the sequence"
TWO_GROUPS = "qwen2 with windows by layer type"
BLOCK_SIZE = 4
SUFFIX = [7, 3, 9, 1, 5, 2]
ASYNC_SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "num_threads": 1, "block_size": BLOCK_SIZE}


async def last_of(generator: Any) -> RequestOutput:
    async for output in generator:
        last = output
    return last


# ---- 6.1 the parent is freed already ----


def time_is_up(driver: Driver) -> None:
    core = driver.llm._client.core
    core._clock = lambda: time.monotonic() + 61
    core.expire_leases()  # an idle engine does so by itself


def its_owner_ends_it(driver: Driver) -> None:
    (sequence,) = driver.scheduler.leases.sequences()
    assert driver.llm._client.call_utility("end_leases", [sequence.branch_id]) == 1


def newer_leases_need_the_budget(driver: Driver) -> None:
    for seed in (50, 51, 52):
        driver.result(driver.add(random_token_ids(20, seed=seed), greedy(4), retain_kv=60))


def a_request_needs_the_memory(driver: Driver) -> None:
    driver.result(driver.add(random_token_ids(90, seed=60), greedy(16)))


class TestTheParentIsFreedAlready:
    """Its lease has ended, in one way or another: the prefix cache is asked, and it is said so."""

    @both_depths
    @pytest.mark.parametrize("make_params", [greedy, sampled])
    @pytest.mark.parametrize(
        ("free_it", "counted_as", "source"),
        [
            (time_is_up, "expired", "prefix_cache"),
            (its_owner_ends_it, None, "prefix_cache"),
            (newer_leases_need_the_budget, "evicted", "prefix_cache"),
            (a_request_needs_the_memory, "evicted", "recomputed"),
        ],
    )
    @pytest.mark.one_in(3)
    def test_it_is_looked_for_in_the_prefix_cache(self, make_params, free_it, counted_as, source):
        params = make_params(6)
        with engine(LLAMA, block_size=BLOCK_SIZE, num_blocks=28) as llm:
            driver = Driver(llm)
            parent = driver.result(driver.add(random_token_ids(10, seed=1), params, retain_kv=60))
            free_it(driver)
            child = driver.result(driver.generate_continuation(parent.request_id, [5], params))
            if counted_as is not None:
                assert getattr(llm.stats().leases, counted_as) >= 1
            assert child.continuation.source == source
            num_found = 12 if source == "prefix_cache" else 0  # 15 tokens were computed: three whole blocks
            assert child.continuation.inherited_tokens == num_found
            assert child.continuation.computed_tokens == 17 - num_found
            assert tokens_of(child) == driver.afresh([*whole(parent), 5], params)
            llm.reset_prefix_cache()


# ---- 6.2 the parent still runs ----


class TestTheParentStillRuns:
    @pytest.mark.parametrize("family", [LLAMA, WINDOW, TWO_GROUPS])
    @pytest.mark.one_in(2)
    def test_it_is_forked_now_after_any_of_its_steps(self, family):
        """In the middle of its prompt, behind it, and at every offset in a block; neither disturbs the other."""
        prompt, params, parent_params = random_token_ids(11, seed=4), greedy(5), sampled(12)
        with engine(family, block_size=BLOCK_SIZE, num_blocks=64, max_prefill_chunk=3, max_steps_in_flight=1) as llm:
            driver = Driver(llm)
            alone = driver.afresh(prompt, parent_params)
            for num_steps in range(15):
                driver.forget_unheld_memory()
                parent_id = driver.add(prompt, parent_params)
                for _ in range(num_steps):
                    driver.step()
                (branch,) = driver.scheduler.state.branches.values()
                there, before = branch.num_computed_tokens, num_computed(llm)
                child_id = driver.generate_continuation(parent_id, SUFFIX, params)
                child, parent = driver.result(child_id), driver.result(parent_id)
                assert child.prompt_token_ids == [*prompt, *alone[: max(0, num_steps - 3)], *SUFFIX]
                assert tokens_of(parent) == alone
                assert child.continuation.inherited_tokens == there
                assert child.continuation.source == ("lease" if there else "recomputed")
                computed_by_parent = len(prompt) + parent_params.max_tokens - 1 - there
                computed_by_child = len(child.prompt_token_ids) - there + params.max_tokens - 1
                assert num_computed(llm) - before == computed_by_parent + computed_by_child
                assert tokens_of(child) == driver.afresh(child.prompt_token_ids, params), num_steps

    @both_depths
    def test_it_has_ended_before_the_fork_gets_its_turn(self):
        """There is one row, and the parent has it."""
        with engine(LLAMA, block_size=BLOCK_SIZE, max_num_seqs=1) as llm:
            driver = Driver(llm)
            parent_id = driver.add(random_token_ids(9, seed=4), sampled(8))
            for _ in range(3):
                driver.step()
            child = driver.result(driver.generate_continuation(parent_id, SUFFIX, greedy(5)))
            assert driver.is_finished(parent_id) and child.continuation.source == "prefix_cache"
            assert tokens_of(child) == driver.afresh(child.prompt_token_ids, greedy(5))

    def test_it_is_waited_for_and_continued_like_one_that_has_ended(self):
        async def run() -> None:
            async with thread_engine(str(model_folder(LLAMA)), **ASYNC_SETTINGS) as llm:
                for retain_kv, source in ((60, "lease"), (None, "prefix_cache")):
                    name = f"parent of a {source}"
                    parent = asyncio.create_task(
                        last_of(llm.generate(random_token_ids(9, seed=7), sampled(20), name, retain_kv=retain_kv))
                    )
                    await asyncio.sleep(0)
                    child = await last_of(llm.generate_continuation(name, [3], greedy(5)))
                    assert child.continuation.source == source
                    assert child.prompt_token_ids == [*whole(await parent), 3]
                    fresh = await last_of(llm.generate(child.prompt_token_ids, greedy(5), cache_salt=source))
                    assert tokens_of(child) == tokens_of(fresh)

        asyncio.run(run())

    def test_it_is_taken_back_while_it_is_waited_for(self):
        async def run() -> None:
            async with thread_engine(str(model_folder(LLAMA)), **ASYNC_SETTINGS) as llm:
                await llm.pause()  # it comes to no end by itself
                parent = asyncio.create_task(last_of(llm.generate(random_token_ids(9, seed=7), sampled(20), "parent")))
                await asyncio.sleep(0)
                child = asyncio.create_task(last_of(llm.generate_continuation("parent", [3], greedy(5))))
                await asyncio.sleep(0.01)
                assert not child.done()
                await llm.abort("parent")
                assert (await parent).outputs[0].finish_reason == "abort"
                with pytest.raises(UnknownParentError):
                    await child
                assert llm.num_unfinished_requests() == 0

        asyncio.run(run())


# ---- 6.3 blocks are evicted ----


class TestBlocksAreEvictedUnderAContinuation:
    @both_depths
    def test_while_it_waits_its_lease_is_taken_for_those_who_run(self):
        with engine(LLAMA, block_size=BLOCK_SIZE, num_blocks=24, max_num_seqs=1) as llm:
            driver = Driver(llm)
            parent = driver.result(driver.add(random_token_ids(12, seed=1), greedy(6), retain_kv=60))
            grower_id = driver.add(random_token_ids(40, seed=2), sampled(50))
            driver.step()
            child_id = driver.generate_continuation(parent.request_id, SUFFIX, greedy(6))
            child, grower = driver.result(child_id), driver.result(grower_id)
            assert llm.stats().leases.evicted == 1 and child.continuation.source == "recomputed"
            assert tokens_of(child) == driver.afresh([*whole(parent), *SUFFIX], greedy(6))
            assert tokens_of(grower) == driver.afresh(random_token_ids(40, seed=2), sampled(50))

    @pytest.mark.parametrize("num_choices", [1, 3])
    def test_while_it_runs_it_gives_way_and_comes_back(self, num_choices):
        """An older request grows into its memory, sooner or later: during its prefill, or while it decodes."""
        suffix, params = random_token_ids(16, seed=90), sampled(8, n=num_choices)
        lost_with: set[int] = set()  # how many tokens it had when it lost its memory
        with engine(LLAMA, block_size=BLOCK_SIZE, num_blocks=24, max_prefill_chunk=3, max_steps_in_flight=1) as llm:
            driver = Driver(llm)
            for length in range(42, 60, 3):
                parent = driver.result(driver.add(random_token_ids(10, seed=length), greedy(6), retain_kv=60))
                grower_id = driver.add(random_token_ids(length, seed=2), greedy(20))
                while not driver.find(grower_id).choices[0]:
                    driver.step()
                child_id = driver.generate_continuation(parent.request_id, suffix, params)
                while not driver.is_finished(child_id):
                    driver.step()
                    lost_with |= {
                        branch.num_output_tokens
                        for branch in driver.scheduler.state.waiting
                        if branch.status == BranchStatus.PREEMPTED
                    }
                child = driver.result(child_id)
                assert child.prompt_token_ids == [*whole(parent), *suffix]
                driver.result(grower_id)
                fresh = driver.result(driver.add(child.prompt_token_ids, params, cache_salt=driver.new_id()))
                for choice in range(num_choices):
                    assert tokens_of(child, choice) == tokens_of(fresh, choice), length
            assert llm.stats().num_preemptions > 0
            assert 0 in lost_with and len(lost_with) > 3, lost_with

    @both_depths
    @pytest.mark.parametrize("family", [LLAMA, TWO_GROUPS])
    @pytest.mark.one_in(3)
    def test_parents_children_and_others_take_turns_in_too_little_memory(self, family):
        with engine(family, block_size=BLOCK_SIZE, num_blocks=40, max_num_batched_tokens=24) as llm:
            driver = Driver(llm)
            parents = [
                driver.result(driver.add(random_token_ids(8 + seed, seed=seed), sampled(7), retain_kv=60))
                for seed in range(4)
            ]
            others = {driver.add(random_token_ids(20, seed=seed), sampled(20)): seed for seed in (30, 31)}
            children = {
                driver.generate_continuation(parent.request_id, [token, *SUFFIX], sampled(16), retain_kv=60): parent
                for parent in parents
                for token in (1, 2)
            }
            outputs = {request_id: driver.result(request_id) for request_id in [*others, *children]}
            assert llm.stats().leases.evicted > 0 and llm.stats().num_preemptions > 0
            for request_id, seed in others.items():
                assert tokens_of(outputs[request_id]) == driver.afresh(random_token_ids(20, seed=seed), sampled(20))
            for request_id, parent in children.items():
                child = outputs[request_id]
                assert child.prompt_token_ids[: len(whole(parent))] == whole(parent)
                assert tokens_of(child) == driver.afresh(child.prompt_token_ids, sampled(16))
            llm.reset_prefix_cache()


# ---- 6.4 the table of ended requests overflows ----


class TestTheTableOfEndedRequestsOverflows:
    @pytest.mark.parametrize("retain_kv", [60, None])
    def test_a_forgotten_parent_is_unknown_and_its_text_sent_afresh_is_found_in_the_prefix_cache(self, retain_kv):
        with engine(LLAMA, block_size=BLOCK_SIZE) as llm:
            driver = Driver(llm)
            llm.engine.output_processor.roots = RootTable(max_roots=3)
            parent = driver.result(driver.add(random_token_ids(10, seed=1), sampled(6), retain_kv=retain_kv))
            continued = driver.result(driver.generate_continuation(parent.request_id, [5], greedy(6)))
            for seed in (2, 3):
                driver.result(driver.add(random_token_ids(5, seed=seed), greedy(2)))
            with pytest.raises(UnknownParentError) as refused:
                llm.generate_continuation(parent, [5], greedy(6))
            assert refused.value.field == "continuation_of"
            again = driver.result(driver.add([*whole(parent), 5], greedy(6)))
            assert again.num_cached_tokens == 16
            assert tokens_of(again) == tokens_of(continued)
            llm.reset_prefix_cache()

    def test_a_parent_that_is_continued_is_not_the_next_to_go(self):
        with engine(LLAMA) as llm:
            driver = Driver(llm)
            llm.engine.output_processor.roots = RootTable(max_roots=3)
            first, second = (driver.result(driver.add(random_token_ids(5, seed=seed), greedy(2))) for seed in range(2))
            for suffix in range(4):  # each is a root itself, when it has ended
                driver.result(driver.generate_continuation(first.request_id, [suffix], greedy(2)))
            with pytest.raises(UnknownParentError):
                driver.find(second.request_id)

    def test_it_holds_a_thousand_and_some(self):
        table = RootTable()
        for number in range(MAX_ROOTS + 1):
            table.add(Root(f"r{number}", f"r{number}-x", [1], [[2]]))
        assert len(table) == MAX_ROOTS == 1024
        with pytest.raises(UnknownParentError):
            table.find("r0")
        assert table.find("r1").prompt_token_ids == [1]


# ---- 6.5 another adapter, another salt, another owner ----

TAGS = [("", None), ("x", None), ("y", None), ("", "x"), ("x", "x")]  # names of adapters, and salts


class TestAnotherAdapterSaltOrOwner:
    @pytest.mark.parametrize("parent_ends", [True, False])
    def test_blocks_of_another_adapter_or_salt_are_not_inherited(self, parent_ends, tmp_path):
        """Whatever a request claims, the engine looks at its adapter and salt. Where they agree, all is inherited."""
        prompt, params = random_token_ids(10, seed=1), greedy(4)
        settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        with engine(LLAMA, block_size=BLOCK_SIZE, max_steps_in_flight=1, **settings) as llm:
            shapes = llm.source.tensors.shapes()
            for seed, name in enumerate("xy"):
                llm.load_adapter(name, write_adapter(tmp_path / name, shapes, seed, acts=False))
            adapters = llm.list_adapters()
            driver = Driver(llm)
            for parent_tags, child_tags in itertools.product(TAGS, TAGS):
                driver.forget_unheld_memory()
                request = llm.engine.input_processor.process(
                    driver.new_id(), prompt, sampled(6 if parent_ends else 12), retain_kv=60.0
                )
                request.adapter, request.cache_salt = adapters.get(parent_tags[0]), parent_tags[1]
                parent_id = driver.submit(request)
                while len(driver.find(parent_id).choices[0]) < 6:
                    driver.step()
                request = driver.continuation(driver.find(parent_id), [5], params)
                request.adapter, request.cache_salt = adapters.get(child_tags[0]), child_tags[1]
                child = driver.result(driver.submit(request))
                same = child_tags == parent_tags
                assert child.continuation.source == ("lease" if same else "recomputed"), (parent_tags, child_tags)
                assert child.continuation.inherited_tokens == (15 if same else 0)
                driver.result(parent_id)
                assert tokens_of(child) == driver.afresh(child.prompt_token_ids, params)
            llm.reset_prefix_cache()

    def test_a_continuation_has_its_parents_tags_and_so_have_its_own(self):
        with engine(LLAMA, block_size=BLOCK_SIZE) as llm:
            driver = Driver(llm)
            parent_id = driver.add(random_token_ids(10, seed=1), greedy(4), cache_salt="mine", retain_kv=60)
            for _ in range(3):
                driver.result(parent_id)
                request = driver.continuation(driver.find(parent_id), [5], greedy(4), retain_kv=60)
                assert request.cache_salt == "mine"
                parent_id = driver.submit(request)
            assert driver.result(parent_id).continuation.source == "lease"
            llm.reset_prefix_cache()

    def test_another_owners_parent_is_as_unknown_as_one_that_never_was(self):
        """Ended, leased or still running; to continue, to list, or to end. No owner waits for another owner's
        request."""

        async def refusal(work: Any) -> str:
            with pytest.raises(UnknownParentError) as refused:
                await asyncio.wait_for(work, 120)  # the engine is paused: to wait for it would be to wait forever
            return str(refused.value)

        async def run() -> None:
            async with thread_engine(str(model_folder(LLAMA)), **ASYNC_SETTINGS) as llm:
                prompt = random_token_ids(9, seed=7)
                await last_of(llm.generate(prompt, greedy(4), "ended", owner="me"))
                await last_of(llm.generate(prompt, greedy(4), "leased", owner="me", retain_kv=60))
                await last_of(llm.generate_continuation("leased", [3], greedy(4), "child", owner="me"))
                await llm.pause()
                running = asyncio.create_task(last_of(llm.generate(prompt, greedy(4), "running", owner="me")))
                await asyncio.sleep(0)
                for stranger in ("you", None, "ME", ""):
                    for name in ("ended", "leased", "child", "running"):
                        for wait in (True, False):
                            child = llm.generate_continuation(name, [3], greedy(4), owner=stranger, wait=wait)
                            text = await refusal(last_of(child))
                            never = llm.generate_continuation("never", [3], greedy(4), owner=stranger, wait=wait)
                            assert text == (await refusal(last_of(never))).replace("never", name)
                        assert await refusal(llm.forget(name, stranger))
                    assert llm.list_roots(stranger) == []
                await llm.resume()
                await running
                mine = await last_of(llm.generate_continuation("leased", [3], greedy(4), owner="me"))
                assert mine.continuation.source == "lease"

        asyncio.run(run())
