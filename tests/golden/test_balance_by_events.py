"""Two engines tell which blocks they hold, and a request goes to the one that holds most of its prompt, even where
another one was sent more of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from ratoon import LLM, ConfigError, RequestOutput, SamplingParams
from ratoon.core.messages import BlocksTold
from ratoon.core.settings import configure
from ratoon.engine.processes.kv_index import KVIndex
from ratoon.engine.processes.replica import Replica
from tests.golden.engines import model_folder
from tests.golden.test_kv_events import Router, free_addresses
from tests.golden.tiny_models import random_token_ids
from tests.waiting import wait_until

FAMILY = "llama with grouped heads"
NUM_BLOCKS = 24  # of 16 tokens, for each engine
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
DOCUMENT = random_token_ids(100, seed=1)
NUM_HELD = 96  # tokens of it, in full blocks


def open_engines(**settings: Any) -> LLM:
    common = {"device": "cpu", "num_threads": 1, "skip_tokenizer": True, "num_blocks": NUM_BLOCKS, "max_num_seqs": 8}
    engines = {} if "prefill_engines" in settings else {"num_replicas": 2}
    return LLM(str(model_folder(FAMILY)), **(common | engines | settings))


def ask(llm: LLM, prompt: Sequence[int], engine: int | None = None) -> RequestOutput:
    (output,) = llm.generate([prompt], ONE_TOKEN, data_parallel_rank=engine, progress=False)
    return output


def engine_of(llm: LLM, output: RequestOutput) -> int | None:
    return llm.find_parent(output.request_id).engine


def client_of(llm: LLM) -> Any:
    return llm._client._client


def index_of(llm: LLM) -> KVIndex:
    return client_of(llm)._index


def ask_short_ones(llm: LLM, engine: int) -> None:
    """Sends an engine more requests than the other has had: of two engines that seem equal, the other one is then
    chosen."""
    for seed in range(8):
        ask(llm, random_token_ids(3, seed=seed), engine)


@pytest.mark.parametrize("by_events", [True, False])
def test_an_engine_that_has_evicted_a_prompt_is_not_chosen_for_it(by_events: bool) -> None:
    with open_engines(balance_by_events=by_events) as llm:
        ask(llm, DOCUMENT, 0)
        ask(llm, DOCUMENT, 1)
        for seed in range(2, 6):
            ask(llm, random_token_ids(120, seed=seed), 0)
        ask_short_ones(llm, 1)
        found = ask(llm, DOCUMENT)
        assert (engine_of(llm, found), found.num_cached_tokens) == ((1, NUM_HELD) if by_events else (0, 0))


@pytest.mark.parametrize("by_events", [True, False])
def test_what_goes_on_from_another_choice_of_a_request_is_found(by_events: bool) -> None:
    """Without events, the balancer remembers only the first choice of each answer."""
    begin = random_token_ids(20, seed=9)
    with open_engines(balance_by_events=by_events) as llm:
        params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=80, ignore_eos=True)
        (drawn,) = llm.generate([begin], params, data_parallel_rank=0, progress=False)
        ask(llm, begin, 1)
        ask_short_ones(llm, 0)
        found = ask(llm, begin + list(drawn.outputs[1].token_ids))
        assert (engine_of(llm, found), found.num_cached_tokens) == ((0, NUM_HELD) if by_events else (1, 16))


def test_the_index_follows_the_events_that_are_published() -> None:
    """The index is right again after a message of an engine was lost, its cache was cleared, or its process has
    ended."""
    address, replay = free_addresses(num_engines=2)
    with open_engines(kv_events=address, kv_events_replay=replay, kv_events_topic="topic") as llm:
        router = Router(address, replay)  # of engine 0

        def agrees() -> bool:
            router.catch_up()
            return {one for one, mask in index_of(llm)._masks.items() if mask & 1} == set(router.known)

        for seed in range(5):
            ask(llm, random_token_ids(90, seed=seed), seed % 2)
        wait_until("the index has what engine 0 tells", agrees)
        assert index_of(llm).num_blocks_of(0) >= 15 and index_of(llm).num_blocks_of(1) >= 10
        lost: list[BlocksTold] = []
        client, note = client_of(llm), client_of(llm)._note_blocks

        def lose_one(replica: Replica, told: BlocksTold) -> None:
            if lost:
                note(replica, told)
            else:
                lost.append(told)

        client._note_blocks = lose_one
        ask(llm, DOCUMENT, 0)
        ask(llm, random_token_ids(40, seed=7), 0)
        assert lost
        wait_until("it was told again", agrees)
        assert index_of(llm).num_blocks_of(0) > 10
        assert llm.reset_prefix_cache()
        wait_until("nothing is left", lambda: index_of(llm).num_blocks == 0 and agrees())
        router.close()
        ask(llm, DOCUMENT, 1)
        assert index_of(llm).num_blocks_of(1) == NUM_HELD // 16
        os.kill(llm.health().engines[1].pid or 0, signal.SIGKILL)
        wait_until("what it held is forgotten", lambda: index_of(llm).num_blocks == 0)
        found = ask(llm, DOCUMENT, 1)
        assert found.num_cached_tokens == 0 and index_of(llm).num_blocks_of(1) == NUM_HELD // 16


def test_prompts_are_computed_apart_where_engines_tell_what_they_hold() -> None:
    with open_engines() as llm:
        right = ask(llm, DOCUMENT).outputs[0].token_ids
    with open_engines(prefill_engines=1, decode_engines=2, balance_by_events=True) as llm:
        first = ask(llm, DOCUMENT)
        again = ask(llm, DOCUMENT)
        assert [one.outputs[0].token_ids for one in (first, again)] == [right, right]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, NUM_HELD)
        assert engine_of(llm, again) == engine_of(llm, first)
        assert client_of(llm).balancer.known(request_for(DOCUMENT)) == {0: NUM_HELD, engine_of(llm, first): NUM_HELD}


def request_for(prompt: list[int]) -> Any:
    from ratoon.core.request import EngineCoreRequest

    return EngineCoreRequest("x", prompt, ONE_TOKEN)


def test_settings_say_whether_engines_tell() -> None:
    for settings, expected in [
        ({}, False),
        ({"kv_events": "tcp://127.0.0.1:5557"}, True),
        ({"kv_events": "tcp://127.0.0.1:5557", "balance_by_events": False}, False),
        ({"balance_by_events": True}, True),
        ({"balance_by_events": True, "data_parallel_external_lb": True}, False),
    ]:
        own, config = configure("m", settings)
        assert own.balances_by_events(config.cache) is expected
    with pytest.raises(ConfigError, match="balance_by_events: no block can be found"):
        open_engines(balance_by_events=True, enable_prefix_caching=False)
