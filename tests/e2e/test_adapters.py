"""Adapters of a server with several front ends: loaded through one, known to all, and to those started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.models.build import collect_shapes
from ratoon.models.source import resolve_model
from tests.adapter_folders import write_adapter
from tests.e2e.servers import ADMIN_KEY, Server, serving
from tests.e2e.test_api_servers import MODEL, FrontEnd, each_front_end
from tests.faults.processes import is_running
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import wait_until

GREEDY = {"prompt": "Once upon", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    found, shapes = tmp_path_factory.mktemp("adapters"), collect_shapes(resolve_model(str(folder)).config)
    for seed, name in enumerate(("first", "second", "third"), start=1):
        write_adapter(found / name, shapes, seed)
    return found


@pytest.fixture(scope="module")
def server(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / MODEL)
    options = ["--api-servers", "2", "--data-parallel-size", "2", "--max-lora-rank", "8", "--max-loras", "2"]
    options += ["--admin", "--admin-key", ADMIN_KEY, "--adapter-root", str(adapters)]
    with serving(folder, *options, "--adapter", f"first={adapters / 'first'}") as started:
        yield started


def text(front_end: FrontEnd, model: str) -> str:
    answer: str = front_end.post("/v1/completions", **{"model": model, **GREEDY})["choices"][0]["text"]
    return answer


def admin(front_end: FrontEnd, path: str, **body: Any) -> tuple[int, Any]:
    return front_end.ask("POST", path, body, key=ADMIN_KEY)


def names(front_end: FrontEnd) -> list[str]:
    return [model["id"] for model in front_end.get("/v1/models")["data"]]


def test_an_adapter_that_one_front_end_loads_is_known_to_all_and_to_those_started_again(server, adapters):
    with each_front_end(server, key=None) as (first, second):
        assert names(first) == names(second) == [MODEL, "first"]
        base, tuned = text(first, MODEL), text(second, "first")
        assert base != tuned
        status, loaded = admin(first, "/v1/load_lora_adapter", lora_name="late", lora_path=str(adapters / "second"))
        assert status == 200, loaded
        late = text(second, "late")
        assert late not in (base, tuned) and names(second) == [MODEL, "first", "late"]
        status, refused = admin(second, "/v1/load_lora_adapter", lora_name="late", lora_path=str(adapters / "third"))
        assert status == 400 and "is the name of" in refused["error"]["message"]

        os.kill(first.pid, signal.SIGKILL)
        wait_until("the front end is gone", lambda: not is_running(first.pid))
        pids = {first.pid, second.pid}
    with each_front_end(server, key=None) as started:
        assert {one.pid for one in started} != pids
        for one in started:
            assert names(one) == [MODEL, "first", "late"]
            assert text(one, "late") == late

        for engine in started[0].get("/health")["engines"]:
            os.kill(engine["pid"], signal.SIGKILL)
        assert text(started[0], "late") == late and text(started[1], "first") == tuned

        first, second = started
        assert admin(second, "/v1/unload_lora_adapter", lora_name="late")[0] == 200
        assert names(first) == names(second) == [MODEL, "first"]
        assert first.ask("POST", "/v1/completions", {"model": "late", **GREEDY})[0] == 404
        assert admin(first, "/v1/unload_lora_adapter", lora_name="late")[0] == 404


def test_metrics_name_adapters(server, adapters):
    with each_front_end(server, key=None) as (first, second):
        response = first.begin("/v1/completions", **{"model": "first", **GREEDY, "max_tokens": 300, "stream": True})
        assert response.readline()
        assert admin(second, "/admin/pause")[0] == 200
        wait_until("the request is counted by its adapter", lambda: 'adapter="first"' in second.get("/metrics"))
        assert admin(second, "/admin/resume")[0] == 200
        response.read()
        assert "ratoon_adapter_loads_total" in second.get("/metrics")
