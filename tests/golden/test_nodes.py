"""An engine whose stages are on several hosts answers as one worker does; a host that can't be reached, or has ended,
ends the engine run and not more; and a host that does not belong to it is refused with the reason."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import LLM, SamplingParams
from ratoon.core.errors import ConfigError, DeviceLostError
from ratoon.core.settings import configure, engine_config
from ratoon.distributed import node as node_module
from ratoon.distributed.cluster import SECRET_VARIABLE
from tests.golden import every_kind
from tests.golden.engines import model_folder
from tests.golden.every_kind import answers, ask_everything, right_answers
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.nodes import SECRET, Relay, beat_fast, running_node
from tests.golden.test_encoder_decoder_api import INPUTS, folder_of
from tests.golden.test_steps_in_flight import EVERYTHING, LLAMA
from tests.golden.test_worker_processes import PROMPTS, is_running
from tests.ports import free_port
from tests.waiting import wait_until

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
STAGES = {"nnodes": 2, "pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def _beats(monkeypatch: pytest.MonkeyPatch) -> None:
    beat_fast(monkeypatch)


def open_engine(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "num_threads": 1, "skip_tokenizer": True, "max_num_seqs": 8, "num_blocks": 96}
    return LLM(str(folder), **(common | settings))


def keep_generating(llm: LLM) -> None:
    while True:
        llm.generate(PROMPTS, LONG, progress=False)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (LLAMA, {}),
        pytest.param(LLAMA, {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("bart", {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_stages_on_two_hosts_answer_as_one_worker_run_after_run(family: str, settings: dict[str, Any]) -> None:
    folder, prompts = (folder_of("bart"), INPUTS[:3]) if family == "bart" else (model_folder(family), PROMPTS)
    with open_engine(folder) as llm:
        right, states = answers(llm, prompts), llm.extract_hidden_states(prompts[0], EVERYTHING).tensor
    port = free_port()
    relay = Relay(port)
    with running_node(folder, relay.port) as node:
        for _ in range(2):
            with open_engine(folder, master_port=port, **STAGES, **settings) as llm:
                pids = node.pids
                assert answers(llm, prompts) == right
                found = llm.extract_hidden_states(prompts[0], EVERYTHING).tensor
                assert found == pytest.approx(states, abs=1e-5)
            wait_until("its workers have ended", lambda pids=pids: pids and not any(map(is_running, pids)))
    relay.close()
    assert len(relay.seen) > 10_000
    for clear in (b"choose", b"allocate", b"sampled", SECRET.encode()):
        assert clear not in relay.seen, "what passes between hosts is encrypted"


@pytest.mark.parametrize(
    ("nnodes", "settings"),
    [
        (2, {"tensor_parallel_size": 2}),
        pytest.param(2, {"tensor_parallel_size": 4}, marks=pytest.mark.full),  # two ranks on each host
        pytest.param(4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_of_a_stage_on_several_hosts_answer_as_one_worker(nnodes: int, settings: dict[str, Any]) -> None:
    folder, port = model_folder(LLAMA), free_port()
    with open_engine(folder) as llm:
        right, states = answers(llm, PROMPTS), llm.extract_hidden_states(PROMPTS[0], EVERYTHING).tensor
    with ExitStack() as nodes:
        for node_rank in range(1, nnodes):
            nodes.enter_context(running_node(folder, port, nnodes=nnodes, node_rank=node_rank))
        with open_engine(folder, master_port=port, nnodes=nnodes, **settings) as llm:
            assert answers(llm, PROMPTS) == right
            found = llm.extract_hidden_states(PROMPTS[0], EVERYTHING).tensor
            assert found == pytest.approx(states, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_requests_of_every_kind_are_answered_on_two_hosts_as_by_one_worker(ranks: str) -> None:
    folder, port = grammar_folder(FAMILY), free_port()
    with running_node(folder, port), every_kind.open_engine(folder, master_port=port, nnodes=2, **{ranks: 2}) as llm:
        ask_everything(llm).check(right_answers())


def test_a_network_that_is_cut_ends_the_run_on_both_sides_and_the_host_joins_again() -> None:
    folder, port = model_folder(LLAMA), free_port()
    relay = Relay(port)
    before = set(os.listdir("/dev/shm"))
    with running_node(folder, relay.port) as node:
        with open_engine(folder, master_port=port, **STAGES) as llm:
            right = answers(llm, PROMPTS)
            pids = [*node.pids, *(worker.pid for worker in llm._client.core.executor._workers)]
            relay.is_cut.set()
            with pytest.raises(DeviceLostError, match="node 1 has been silent for 10 seconds"):
                keep_generating(llm)
            wait_until("all workers have ended", lambda: not any(map(is_running, pids)))
        relay.is_cut.clear()
        with open_engine(folder, master_port=port, **STAGES) as llm:
            assert answers(llm, PROMPTS) == right
    relay.close()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_worker_of_another_host_that_is_killed_ends_the_run() -> None:
    folder, port = model_folder(LLAMA), free_port()
    with running_node(folder, port) as node, open_engine(folder, master_port=port, **STAGES) as llm:
        (pid,) = node.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=r"worker 1 has (ended|closed its socket)"):
            llm.generate(PROMPTS, LONG, progress=False)


def test_a_host_that_ends_is_noticed_while_there_is_no_work() -> None:
    folder, port = model_folder(LLAMA), free_port()
    problems: list[str] = []
    with running_node(folder, port) as node, open_engine(folder, master_port=port, **STAGES) as llm:
        llm._client.core.executor.when_failed = problems.append
        node.node.stop()
        wait_until("it is noticed", lambda: problems)
    assert "node 1 has been silent" in problems[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype: the host was given 'float16', and node 0 has 'auto'"),
        ({"nnodes": 3}, "nnodes: the host was given 3, and node 0 2"),
        ({"version": "0.0.1"}, "version: the host has 0.0.1, and node 0"),
        ({"secret": "another secret of many characters"}, "cluster secret: node 0 at .* does not have this one"),
    ],
    ids=str,
)
def test_a_host_that_does_not_belong_is_refused_and_node_0_waits_on(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, port = model_folder(LLAMA), free_port()
    if version := settings.pop("version", None):
        monkeypatch.setattr(node_module, "__version__", version)
    if secret := settings.pop("secret", None):
        (tmp_path / "secret").write_text(secret)
        settings["cluster_secret_file"] = str(tmp_path / "secret")
    opened: list[LLM] = []
    waiting = threading.Thread(target=lambda: opened.append(open_engine(folder, master_port=port, **STAGES)))
    waiting.start()
    with running_node(folder, port, **settings) as stranger:
        wait_until("it is refused", lambda: stranger.error is not None)
    with pytest.raises(ConfigError, match=message):
        raise stranger.error  # type: ignore[misc]
    monkeypatch.undo()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with running_node(folder, port):
        waiting.join()
        with opened[0] as llm:
            assert answers(llm, PROMPTS)


def test_other_files_on_another_host_are_refused() -> None:
    port = free_port()
    with (
        running_node(model_folder("llama with one key head"), port),
        pytest.raises(ConfigError, match="model: the files that rank 1 reads are not those of rank 0"),
    ):
        open_engine(model_folder(LLAMA), master_port=port, **STAGES)


def test_settings_of_hosts_that_can_not_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, message in [
        ({"nnodes": 2}, "nnodes: 2 hosts can't have equal parts of 1 stages"),
        ({"nnodes": 2, "pipeline_parallel_size": 3}, "nnodes: 2 hosts can't have equal parts of 3 stages"),
        ({"node_rank": 1}, "node_rank: 1 is none of 1 nodes"),
        ({**STAGES, "node_rank": 1}, "node_rank: node 1 has no engine"),
        ({**STAGES, "num_replicas": 2}, "num_replicas: 2 engines can't share the hosts of one"),
        ({**STAGES, "executor": "uniproc"}, "executor: 'uniproc' has no ranks on other hosts"),
        ({**STAGES, "master_port": 0}, "master_port: 0 is out of range"),
    ]:
        with pytest.raises(ConfigError, match=message):
            configure("m", settings)
    folder = model_folder(LLAMA)
    with pytest.raises(ConfigError, match=r"master_addr: node 0 can't listen at 192\.0\.2\.1:"):
        open_engine(folder, master_addr="192.0.2.1", **STAGES)
    for secret, message in [("", "nnodes: hosts authenticate each other by a secret"), ("short", "can be guessed")]:
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        with pytest.raises(ConfigError, match=message):
            open_engine(folder, **STAGES)
    assert engine_config("m", nnodes=2, node_rank=1).pipeline_parallel_size == 1, "node 0's settings count"
