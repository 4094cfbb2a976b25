"""With --kv-files, answers outlive every process of the service: after `kill -9` of all of them and a new start, a
continuation finds its parent by id and by name, gives the same tokens, and computes what is new."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.front_ends import MODEL, FrontEnd
from tests.e2e.servers import serving
from tests.faults.processes import is_running
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import wait_until

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = {"prompt": list(range(3, 80)), "max_tokens": 30, **GREEDY}
NEXT = {"continuation_suffix": [5, 6, 7], "max_tokens": 6, **GREEDY}
TURN = {"temperature": 0, "max_output_tokens": 40}
BLOCK = 16


def processes_of(parent: int) -> list[int]:
    """The process and all that it started, in any depth."""
    with open(f"/proc/{parent}/task/{parent}/children", encoding="utf-8") as file:
        children = [int(one) for one in file.read().split()]
    return [parent, *(pid for child in children for pid in processes_of(child))]


def kill_all(server, path, num_blocks: int) -> None:
    pids = processes_of(server.process.pid)
    wait_until("the blocks of the answers are written", lambda: len(list(path.rglob("*.kv"))) >= num_blocks)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    wait_until("all processes are gone", lambda: not any(map(is_running, pids)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("front_ends", [1, 2])
def test_answers_outlive_all_processes(tmp_path, front_ends):
    folder, files = write_tiny_model(tmp_path / MODEL), tmp_path / "kv"
    options = ["--kv-files", str(files), "--swap-memory", "2MiB", "--api-servers", str(front_ends)]
    with serving(folder, *options, has_forks=False) as server:
        client = FrontEnd(server, key=None)
        first = client.post("/v1/completions", **PROMPT, request_id="named")
        wanted = client.post("/v1/completions", continuation_of="named", **NEXT)
        assert wanted["continuation"]["source"] == "prefix_cache"
        response = client.post("/v1/responses", input="Once upon a time", **TURN)
        # The last token of a text is not computed. The continuation shares the blocks of its parent.
        lengths = (
            len(PROMPT["prompt"]) + PROMPT["max_tokens"] + 3 + NEXT["max_tokens"],
            response["usage"]["total_tokens"],
        )
        kill_all(server, files, sum((length - 1) // BLOCK for length in lengths))
    with serving(folder, *options) as server:
        client = FrontEnd(server, key=None)
        num_tokens = len(PROMPT["prompt"]) + PROMPT["max_tokens"]
        for parent in ("named", first["id"]):
            found = client.post("/v1/completions", continuation_of=parent, **NEXT)
            assert found["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
            assert found["continuation"]["inherited_tokens"] >= (num_tokens - 1) // BLOCK * BLOCK
            assert not found["continuation"]["fallback"]
        kept = client.get(f"/v1/responses/{response['id']}")
        assert kept["output"] == response["output"] and kept["usage"] == response["usage"]
        turn = client.post("/v1/responses", input="And then?", previous_response_id=response["id"], **TURN)
        num_tokens = response["usage"]["total_tokens"]
        assert turn["usage"]["input_tokens_details"]["cached_tokens"] >= (num_tokens - 1) // BLOCK * BLOCK > 0
        status, gone = client.ask("POST", "/v1/completions", {"model": MODEL, "continuation_of": "other", **NEXT})
        assert status == 404, gone
