"""A continuation gives the tokens that the whole text gives when it is sent afresh, and computes only what is new."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from ratoon import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from ratoon.core.errors import UnknownParentError
from ratoon.core.params import RequestOutputKind
from ratoon.engine.front_end import Prepared
from tests.depths import both_depths
from tests.faults.processes import SETTINGS, model_name
from tests.golden.engines import engine, scheduler_of
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE

FAMILIES = [
    "llama with grouped heads",
    "mistral with a window shorter than the sequence",
    "qwen3 with heads wider than hidden size / heads",
    "gpt2",
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=6, ignore_eos=True)


def tokens_of(output, choice: int = 0) -> list[int]:
    return list(output.outputs[choice].token_ids)


def whole(output, choice: int = 0) -> list[int]:
    return output.prompt_token_ids + tokens_of(output, choice)


def num_computed(llm: LLM) -> int:
    """The runner's own count."""
    return llm._client.core.executor._worker.runner.num_computed_tokens


def afresh(llm: LLM, tokens: list[int], params: SamplingParams) -> list[int]:
    llm.reset_prefix_cache()
    return tokens_of(llm.generate(tokens, params, progress=False)[0])


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.one_in(5)
def test_a_leased_continuation_equals_the_whole_text_at_every_offset(family, params):
    suffix = [7, 3]
    with engine(family, block_size=4, num_blocks=200) as llm:
        for length in range(3, 12):
            (parent,) = llm.generate(random_token_ids(length, seed=length), params, retain_kv=60, progress=False)
            before = num_computed(llm)
            child = llm.generate_continuation(parent, suffix, params)
            assert child.continuation.source == "lease"
            # The suffix and the parent's last token; then every new token but the last is computed.
            assert num_computed(llm) - before == len(suffix) + 1 + params.max_tokens - 1
            assert child.continuation.inherited_tokens == len(whole(parent)) - 1
            assert child.continuation.computed_tokens == len(suffix) + 1
            assert tokens_of(child) == afresh(llm, whole(parent) + suffix, params)


@pytest.mark.one_in(2)
@both_depths
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_parent(family):
    with engine(family, block_size=4, num_blocks=300) as llm:
        several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=7, ignore_eos=True)
        (parent,) = llm.generate(random_token_ids(9, seed=1), several, retain_kv=60, progress=False)
        children = [(llm.generate_continuation(parent, [5], GREEDY, choice=choice), choice) for choice in range(3)]
        again = llm.generate_continuation(children[1][0], [9, 9], GREEDY)  # not leased: what is found is found
        early = {at: llm.generate_continuation(parent, [5, 6], GREEDY, choice=2, at=at) for at in (1, 4, 9, 12, 15, 16)}
        for child, choice in children:
            assert tokens_of(child) == afresh(llm, [*whole(parent, choice), 5], GREEDY)
        assert tokens_of(again) == afresh(llm, [*whole(children[1][0]), 9, 9], GREEDY)
        for at, child in early.items():
            assert tokens_of(child) == afresh(llm, [*whole(parent, 2)[:at], 5, 6], GREEDY), at


@both_depths
def test_a_parent_without_a_lease_is_found_in_whole_blocks_or_computed_again():
    with engine("llama with grouped heads", block_size=4) as llm:
        (parent,) = llm.generate(random_token_ids(10, seed=1), GREEDY, progress=False)
        found = llm.generate_continuation(parent, [5], GREEDY)
        assert (found.continuation.source, found.continuation.inherited_tokens) == ("prefix_cache", 12)
        llm.reset_prefix_cache()
        gone = llm.generate_continuation(parent, [5], GREEDY)
        assert (gone.continuation.source, gone.continuation.inherited_tokens) == ("recomputed", 0)
        assert tokens_of(found) == tokens_of(gone) == afresh(llm, [*whole(parent), 5], GREEDY)


@both_depths
def test_a_parent_that_a_stop_string_ended_keeps_its_lease():
    with engine("llama with grouped heads", block_size=4, skip_tokenizer=False) as llm:
        (plain,) = llm.generate(random_token_ids(6, seed=2), GREEDY, progress=False)
        word = llm.get_tokenizer().decode(tokens_of(plain)[2:3])
        stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[word])
        (parent,) = llm.generate(random_token_ids(6, seed=2), stopping, retain_kv=60, progress=False)
        assert parent.outputs[0].stop_reason == word
        child = llm.generate_continuation(parent, [4], GREEDY)
        assert child.continuation.source == "lease" and child.continuation.computed_tokens <= 2
        assert tokens_of(child) == afresh(llm, [*whole(parent), 4], GREEDY)


@both_depths
def test_a_running_parent_is_waited_for_or_forked():
    with engine("llama with grouped heads", block_size=4) as llm:
        long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        stream = llm.stream(random_token_ids(7, seed=5), long)
        got: list[int] = []
        for output in stream:
            got += output.outputs[0].token_ids
            if len(got) >= 4:
                break
        forked = llm.generate_continuation(output.request_id, [8], GREEDY, wait=False)
        at_fork = len(forked.prompt_token_ids) - 1
        waited = llm.generate_continuation(output.request_id, [8], GREEDY)
        got += [token for rest in stream for token in rest.outputs[0].token_ids]
        prompt = random_token_ids(7, seed=5)
        assert len(waited.prompt_token_ids) == 7 + 12 + 1
        assert at_fork < 7 + 12
        assert forked.prompt_token_ids == [*(prompt + got)[:at_fork], 8]
        assert tokens_of(forked) == afresh(llm, forked.prompt_token_ids, GREEDY)
        assert tokens_of(waited) == afresh(llm, [*prompt, *got, 8], GREEDY)


@both_depths
def test_many_children_of_one_parent_run_together_beside_others():
    with engine("llama with grouped heads", block_size=4, num_blocks=300) as llm:
        (parent,) = llm.generate(random_token_ids(13, seed=1), SEEDED, retain_kv=60, progress=False)
        processor, roots = llm.engine.input_processor, llm.engine.output_processor
        requests = [
            Prepared(processor.process_continuation(f"c{i}", roots.find_root(parent.request_id), [i], GREEDY))
            for i in range(20)
        ]
        requests.append(Prepared(processor.process("other", random_token_ids(5, seed=9), GREEDY)))
        outputs = {output.request_id: output for output in llm.engine.run(requests) if output.finished}
        for i in range(20):
            assert tokens_of(outputs[f"c{i}"]) == afresh(llm, [*whole(parent), i], GREEDY)
        scheduler_of(llm).check()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"parent_request_id": "never"}, "continuation_of"),
        ({"parent_request_id": 7}, "continuation_of"),
        ({"at": 0}, "at"),
        ({"at": 17}, "at"),
        ({"at": True}, "at"),
        ({"choice": 1}, "choice"),
        ({"suffix": 5}, "continuation_suffix"),
        ({"suffix": [1, -1]}, "continuation_suffix[1]"),
        ({"suffix": [1] * 500}, "continuation_suffix"),
        ({"retain_kv": 0}, "retain_kv"),
        ({"retain_kv": 1e9}, "retain_kv"),
        ({"retain_kv": "long"}, "retain_kv"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(arguments, field):
    with engine("llama with grouped heads") as llm:
        (parent,) = llm.generate(random_token_ids(10, seed=1), GREEDY, progress=False)
        with pytest.raises(RequestError) as refused:
            llm.generate_continuation(**{"parent_request_id": parent, "sampling_params": GREEDY, **arguments})
        assert refused.value.field == field
        assert isinstance(refused.value, UnknownParentError) == (field == "continuation_of")


def test_what_failed_or_was_taken_back_is_no_parent():
    with engine("llama with grouped heads") as llm:
        stream = llm.stream(random_token_ids(5, seed=1), SamplingParams(max_tokens=50, ignore_eos=True))
        request_id = next(stream).request_id
        stream.close()
        with pytest.raises(UnknownParentError):
            llm.generate_continuation(request_id, "", GREEDY)


# ---- in other processes ----


async def collect(generator) -> object:
    async for output in generator:
        last = output
    return last


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_continuations_over_the_process_border(num_replicas):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=8, ignore_eos=True)
    final = SamplingParams(
        temperature=0.8, seed=4, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def run() -> None:
        async with AsyncLLM(model_name(), num_replicas=num_replicas, **SETTINGS) as llm:
            parents = await asyncio.gather(
                *(
                    collect(llm.generate(random_token_ids(20, seed=i), params, f"p{i}", retain_kv=60, owner="me"))
                    for i in range(4)
                )
            )
            children = await asyncio.gather(
                *(collect(llm.generate_continuation(f"p{i}", [3], final, owner="me")) for i in range(4))
            )
            for parent, child in zip(parents, children):
                assert child.continuation.source == "lease" and child.continuation.computed_tokens == 2
                fresh = await collect(llm.generate([*whole(parent), 3], final, cache_salt="other"))
                assert tokens_of(child) == tokens_of(fresh)
            for stranger in (None, "you"):
                with pytest.raises(UnknownParentError):
                    await collect(llm.generate_continuation("p0", [3], final, owner=stranger))
            running = asyncio.create_task(
                collect(llm.generate(random_token_ids(9, seed=7), params, "running", owner="me"))
            )
            await asyncio.sleep(0)
            waited = await collect(llm.generate_continuation("running", [3], final, owner="me"))
            assert waited.prompt_token_ids == [*whole(await running), 3]

    asyncio.run(run())


def test_a_parent_outlives_the_process_that_computed_it():
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            await collect(llm.generate(random_token_ids(20, seed=1), params, "p", retain_kv=60))
            before = await collect(llm.generate_continuation("p", [3], params))
            os.kill(llm.health().engines[0].pid, signal.SIGKILL)
            after = await collect(llm.generate_continuation("p", [3], params))
            assert (before.continuation.source, after.continuation.source) == ("lease", "recomputed")
            assert tokens_of(before) == tokens_of(after)

    asyncio.run(run())


def test_a_lease_ends_in_an_idle_engine_too():
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            await collect(llm.generate(random_token_ids(20, seed=2), params, "kept", retain_kv=600))
            await collect(llm.generate(random_token_ids(20, seed=1), params, "p", retain_kv=0.3))
            end = time.monotonic() + PATIENCE
            while (await llm.stats())[0].leases.expired < 1:
                assert time.monotonic() < end, "the lease does not end"
            (stats,) = await llm.stats()
            assert (stats.leases.num_active, stats.leases.expired) == (1, 1)
            await llm.forget("kept")
            (stats,) = await llm.stats()
            assert (stats.leases.num_active, stats.kv_usage) == (0, 0.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"lease_fraction": 1.5}, "lease_fraction"), ({"max_lease_seconds": 0}, "max_lease_seconds")],
)
def test_settings_of_leases_are_checked(settings, field):
    with pytest.raises(ConfigError) as refused:
        LLM(model_name(), **{**SETTINGS, **settings})
    assert refused.value.field == field


def test_without_a_budget_there_are_no_leases_and_a_shorter_limit_holds():
    with engine("llama with grouped heads", block_size=4, lease_fraction=0.0, max_lease_seconds=10) as llm:
        (parent,) = llm.generate(random_token_ids(10, seed=1), GREEDY, retain_kv=5, progress=False)
        assert llm.generate_continuation(parent, [5], GREEDY).continuation.source == "prefix_cache"
        with pytest.raises(RequestError, match="at most 10"):
            llm.generate(random_token_ids(10, seed=1), GREEDY, retain_kv=11, progress=False)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_prompt_in_the_place_of_a_forgotten_parent_gives_what_the_continuation_gives(params):
    suffix = [7, 3]
    with engine("llama with grouped heads", block_size=4, num_blocks=200) as llm:
        (parent,) = llm.generate(random_token_ids(11, seed=5), params, retain_kv=60, progress=False)
        prompt = whole(parent) + suffix
        child = llm.generate_continuation(parent, suffix, params, prompt=prompt)
        assert (child.continuation.source, child.continuation.fallback) == ("lease", False)
        llm.engine.output_processor.roots.remove(parent.request_id)
        fallen_back = llm.generate_continuation(parent, suffix, params, prompt=prompt)
        assert tokens_of(fallen_back) == tokens_of(child) and fallen_back.prompt_token_ids == child.prompt_token_ids
        assert (fallen_back.continuation.source, fallen_back.continuation.fallback) == ("prefix_cache", True)
        assert fallen_back.continuation.inherited_tokens == len(prompt) // 4 * 4 - (4 if len(prompt) % 4 == 0 else 0)
        with pytest.raises(UnknownParentError):
            llm.generate_continuation(parent, suffix, params)
        llm.reset_prefix_cache()
