"""Prompts that one engine computes and others go on with, and roots that move to another engine: the same answers as of
one engine, to the bit, for requests of every kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, SamplingParams
from ratoon.core.config import FrontEndConfig
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.kv_transfer import KVTransfer
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest
from ratoon.core.settings import configure
from ratoon.engine.core import EngineCore
from ratoon.engine.processes import moving_client
from ratoon.engine.processes.moving_client import MovingClient
from tests.depths import both_depths
from tests.golden.engines import engine, scheduler_of
from tests.golden.every_kind import answers as answers_of
from tests.golden.every_kind import ask_everything, encoder_prompts, greedy, open_engine, right_answers
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.test_encoder_decoder_api import folder_of
from tests.golden.tiny_models import random_token_ids
from tests.waiting import wait_until

SPLIT = {"prefill_engines": 1, "decode_engines": 2, "prefill_threshold": 1, "swap_memory": "4MiB"}
LONG = [random_token_ids(length, seed=length) for length in (100, 67, 90)]


def client_of(llm: LLM) -> MovingClient:
    client = llm._client._client
    assert isinstance(client, MovingClient)
    return client


def figures_of(llm: LLM) -> list[dict[str, Any]]:
    """The figures of each engine's block store."""
    client = llm._client
    return [stats["store"] for stats in client._wait(client._client.call_utility("stats"))]


# ---- a service ----


@pytest.mark.parametrize("settings", [{}, pytest.param({"quantization": "int8"}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.one_in(2)
def test_requests_of_every_kind_are_answered_as_by_one_engine(settings: dict[str, Any]) -> None:
    with open_engine(grammar_folder(FAMILY), **SPLIT, **settings) as llm:
        found = ask_everything(llm)
        stores = figures_of(llm)
        assert stores[0]["stored"] > 0 and sum(store["loaded"] for store in stores[1:]) > 0
        assert not client_of(llm)._prefills and not client_of(llm)._num_prefills
        for books in llm._client._wait(llm._client._client.call_utility("check")):
            assert books["num_requests"] == 0
    found.check(right_answers(**settings), tolerance=0)


def ask_long(llm: LLM) -> list[Any]:
    """Answers to prompts of several blocks, which are computed in several steps."""
    found: list[Any] = []

    def note(outputs: list[Any]) -> None:
        assert [output.error for output in outputs] == [None] * len(outputs)
        found.extend([list(one.token_ids) for output in outputs for one in output.outputs])

    note(llm.generate(LONG, SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True, logprobs=2), progress=False))
    note(llm.beam_search(LONG, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)))
    (root,) = llm.generate(LONG[:1], greedy(6), retain_kv=60, progress=False)
    note([llm.generate_continuation(root, random_token_ids(15, seed=2), greedy(6))])
    states = llm.extract_hidden_states(root, HiddenStatesParams(positions="all", layers=[0, -1]))
    found.append(states.tensor.tolist())
    schema = {"json_schema": {"enum": ["one", "three"]}}
    text = {"prompt_token_ids": LONG[1]}
    note(llm.generate([text], SamplingParams(seed=4, max_tokens=20, structured_output=schema), progress=False))
    return found


def test_prompts_of_several_steps_are_answered_as_by_one_engine() -> None:
    settings = {"max_num_batched_tokens": 32, "num_blocks": 64}
    with open_engine(grammar_folder(FAMILY), **settings) as llm:
        right = ask_long(llm)
    with open_engine(grammar_folder(FAMILY), **SPLIT, **settings) as llm:
        assert ask_long(llm) == right
        (again,) = llm.generate(LONG[:1], greedy(6), progress=False)
        assert again.num_cached_tokens  # by what was cached, not by what was sent
    with open_engine(grammar_folder(FAMILY), **SPLIT, **settings) as llm:
        (first,) = llm.generate(LONG[:1], greedy(6), progress=False)
        assert first.num_cached_tokens == 0


def test_short_prompts_and_what_is_cached_go_straight_to_the_engine_that_answers() -> None:
    with open_engine(grammar_folder(FAMILY), **SPLIT | {"prefill_threshold": 80, "decode_engines": 1}) as llm:
        llm.generate(LONG[1:2], greedy(4), progress=False)
        assert figures_of(llm)[1]["loaded"] == 0
        (root,) = llm.generate(LONG[:1], greedy(4), progress=False)
        assert figures_of(llm)[1]["loaded"] == 6
        llm.generate_continuation(root, random_token_ids(10, seed=3), greedy(4))
        llm.generate([LONG[0] + random_token_ids(10, seed=4)], greedy(4), progress=False)
        assert figures_of(llm)[1]["loaded"] == 6


def test_a_model_with_an_encoder_is_served_whole() -> None:
    prompts = encoder_prompts("t5")
    with open_engine(folder_of("t5"), skip_tokenizer=True) as llm:
        right = answers_of(llm, prompts)
    with open_engine(folder_of("t5"), skip_tokenizer=True, **SPLIT) as llm:
        assert client_of(llm)._serves_whole
        assert answers_of(llm, prompts) == right


def test_a_root_moves_to_an_engine_with_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_client, "LEAST_TO_MOVE", -(10**6))  # as if its engine always had more to do
    suffix = random_token_ids(15, seed=2)
    with open_engine(grammar_folder(FAMILY)) as llm:
        (root,) = llm.generate(LONG[:1], greedy(6), progress=False)
        right = [list(llm.generate_continuation(root, suffix, greedy(6)).outputs[0].token_ids) for _ in range(3)]
    with open_engine(grammar_folder(FAMILY), num_replicas=2, move_roots=True, swap_memory="4MiB") as llm:
        (root,) = llm.generate(LONG[:1], greedy(6), progress=False)
        found, homes = [], []
        for _ in range(3):
            child = llm.generate_continuation(root, suffix, greedy(6))
            found.append(list(child.outputs[0].token_ids))
            homes.append(llm.find_parent(child.request_id).engine)
            assert child.continuation.inherited_tokens >= 96
        assert found == right
        assert len({llm.find_parent(root.request_id).engine, *homes}) == 2
        assert sum(store["loaded"] for store in figures_of(llm)) == 6


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prefill_engines": 1}, "decode_engines: 0 is out of range"),
        ({"decode_engines": 2}, "prefill_engines: 0 is out of range"),
        ({**SPLIT, "num_replicas": 2}, "num_replicas: and prefill_engines"),
        ({**SPLIT, "tensor_parallel_size": 2, "executor": "ray"}, "prefill_engines: the ranks of executor 'ray'"),
        ({**SPLIT, "tensor_parallel_size": 2, "encode_engines": 1}, "encode_engines: an engine that only encodes"),
        ({**SPLIT, "kv_connector": "lmcache"}, "prefill_engines: kv_connector 'lmcache' moves no blocks"),
        ({"kv_connector": "lmcache", "kv_files": "/tmp"}, "kv_files: and kv_connector 'lmcache' both keep"),
        ({**SPLIT, "enable_prefix_caching": False}, "prefill_engines: blocks are found by hashes"),
        ({**SPLIT, "preemption_mode": "recompute"}, "prefill_engines: blocks pass through host memory"),
        ({"num_replicas": 2, "move_roots": True, "data_parallel_external_lb": True}, "move_roots: the caller"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure("fake", settings)


def test_the_number_of_engines() -> None:
    assert FrontEndConfig(prefill_engines=2, decode_engines=3).num_engines == 5
    assert FrontEndConfig(num_replicas=4).num_engines == 4
    assert not FrontEndConfig(move_roots=True).moves_blocks


# ---- two engines without a service between them ----

Outputs = list[EngineCoreOutput]


def peers(folder: Path, **changes: Any) -> dict[str, Any]:
    options = {"kv_connector": "peers", "kv_connector_options": {"folder": str(folder)}, "swap_memory": "4MiB"}
    return {**options, "max_num_batched_tokens": 32, **changes}


def core_of(llm: LLM) -> EngineCore:
    core: EngineCore = llm._client.core
    return core


def run(core: EngineCore, *requests: EngineCoreRequest) -> Outputs:
    outputs: Outputs = []
    for request in requests:
        core.add_request(request)
    while core.has_work():
        outputs += core.step().outputs
    return outputs


def tokens_of(outputs: Outputs) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


PEER_FAMILY = "llama with grouped heads"


@both_depths
@pytest.mark.parametrize("family", [PEER_FAMILY, "gemma3"])
def test_an_engine_goes_on_with_what_another_one_has_computed(family: str, tmp_path: Path) -> None:
    large = peers(tmp_path, num_blocks=128)
    asked = [EngineCoreRequest(str(index), prompt, greedy(8)) for index, prompt in enumerate(LONG)]
    with engine(family) as llm:
        right = tokens_of(run(core_of(llm), *asked))
    with engine(family, **large) as first, engine(family, **large) as second:
        sent = [
            EngineCoreRequest(
                f"p{one.request_id}", one.prompt_token_ids, greedy(1), kv_transfer=KVTransfer(one.request_id)
            )
            for one in asked
        ]
        told = [one.kv_transfer_params for one in run(core_of(first), *sent) if one.finished]
        assert {one["remote_request_id"]: one["remote_num_tokens"] for one in told if one} == {
            "0": 100, "1": 67, "2": 90
        }  # fmt: skip
        for one in asked:
            one.kv_transfer = KVTransfer(one.request_id, core_of(first).kv_address)
        outputs = run(core_of(second), *asked)
        assert tokens_of(outputs) == right
        cached = {output.request_id: output.num_cached_tokens for output in outputs}
        assert cached == {"0": 96, "1": 64, "2": 80}
        for llm in (first, second):
            scheduler_of(llm).check()


def test_lost_and_damaged_blocks_are_computed(tmp_path: Path) -> None:
    draws = random.Random(7)
    with engine(PEER_FAMILY) as llm:
        right = tokens_of(run(core_of(llm), EngineCoreRequest("a", LONG[0], greedy(8))))
    with engine(PEER_FAMILY, **peers(tmp_path)) as first, engine(PEER_FAMILY, **peers(tmp_path)) as second:
        outbox = core_of(first)._index.exchange.outbox
        for turn in range(6):
            name, prompt = f"turn-{turn}", [turn, *LONG[0][1:]] if turn else LONG[0]
            run(core_of(first), EngineCoreRequest(f"p{turn}", prompt, greedy(1), kv_transfer=KVTransfer(name)))
            wait_until("all blocks are kept, which a thread does", lambda: outbox.num_kept == 6)
            kept = sorted(outbox._kept.items(), key=lambda one: one[1].slot)
            victim = draws.randrange(6)
            if turn % 2:
                outbox.release(kept[victim][0], name)
            else:
                outbox.view(kept[victim][1].slot)[draws.randrange(outbox.block_bytes)] ^= 1 << draws.randrange(8)
            transfer = KVTransfer(name, core_of(first).kv_address)
            outputs = run(core_of(second), EngineCoreRequest("a", prompt, greedy(8), kv_transfer=transfer))
            assert outputs[0].num_cached_tokens < 96
            if not turn:
                assert tokens_of(outputs) == right
        assert core_of(second)._index.exchange.num_bad_blocks == 3


def test_a_prompt_of_another_tenant_or_model_is_not_found(tmp_path: Path) -> None:
    other_kind = peers(tmp_path, kv_cache_dtype="float16")
    with (
        engine(PEER_FAMILY, **peers(tmp_path)) as first,
        engine(PEER_FAMILY, **peers(tmp_path)) as second,
        engine(PEER_FAMILY, **other_kind) as third,
    ):
        run(core_of(first), EngineCoreRequest("p", LONG[0], greedy(1), kv_transfer=KVTransfer("a")))
        transfer = KVTransfer("a", core_of(first).kv_address)
        (output,) = run(core_of(third), EngineCoreRequest("x", LONG[0], greedy(1), kv_transfer=transfer))
        assert output.num_cached_tokens == 0
        salted = EngineCoreRequest("x", LONG[0], greedy(1), kv_transfer=transfer, cache_salt="other")
        assert run(core_of(second), salted)[0].num_cached_tokens == 0


def test_transfers_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with engine(PEER_FAMILY) as llm, pytest.raises(RequestError, match="kv_transfer_params: this engine has no conn"):
        core_of(llm).add_request(EngineCoreRequest("x", LONG[0], greedy(1), kv_transfer=KVTransfer("a")))
    with engine(PEER_FAMILY, **peers(tmp_path)) as llm:
        transfer = KVTransfer("a", "tcp://198.51.100.7:22")
        with pytest.raises(RequestError, match="is no socket in the folder"):
            core_of(llm).add_request(EngineCoreRequest("x", LONG[0], greedy(1), kv_transfer=transfer))


@pytest.mark.parametrize("kind", ["folder", "network", "nixl"])
def test_a_router_of_its_own_divides_a_request_by_kv_transfer_params(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATOON_CLUSTER_SECRET", "a secret of many characters")
    prompt, params = {"prompt_token_ids": LONG[0]}, greedy(8)
    with engine(PEER_FAMILY) as llm:
        (right,) = llm.generate([prompt], params, progress=False)
    settings = peers(tmp_path)
    if kind == "network":
        settings["kv_connector_options"] = {"listen": "tcp://127.0.0.1:0"}
    elif kind == "nixl":
        pytest.importorskip("nixl._api", reason="the extra nixl is not installed")
        settings["kv_connector"] = "nixl"
    with engine(PEER_FAMILY, **settings) as first:
        if kind == "network":
            settings["kv_connector_options"]["peers"] = [core_of(first).kv_address]
        with engine(PEER_FAMILY, **settings) as second:
            asked = {"do_remote_decode": True}
            (begun,) = first.generate([prompt], greedy(1), kv_transfer_params=asked, progress=False)
            told = begun.kv_transfer_params
            assert told["remote_num_tokens"] == len(LONG[0])
            (found,) = second.generate([prompt], params, kv_transfer_params=told, progress=False)
            assert found.outputs[0].token_ids == right.outputs[0].token_ids
            assert found.num_cached_tokens == 96
            with pytest.raises(RequestError, match="kv_transfer_params"):
                second.generate([prompt], params, kv_transfer_params={"do_remote_prefill": True}, progress=False)
