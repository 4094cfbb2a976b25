"""`ratoon serve` on two hosts of one engine: one serves HTTP, the other runs ranks for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("ranks on several hosts need Linux", allow_module_level=True)

from ratoon.distributed.cluster import SECRET_VARIABLE
from tests.e2e.servers import serve_command, serving
from tests.faults.processes import model_name
from tests.golden.nodes import SECRET
from tests.ports import free_port


def complete(api: str) -> str:
    body = {"model": "m", "prompt": "w1 w2 w3", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{api}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return str(answer["choices"][0]["text"])


@pytest.mark.slow
def test_a_server_on_two_hosts_answers_as_on_one(tmp_path: Path) -> None:
    model, port = model_name(), free_port()
    (tmp_path / "secret").write_text(SECRET)
    names = ("--served-model-name", "m")
    with serving(model, *names) as server:
        right = complete(server.api)
    shared = ("--nnodes", "2", "--master-port", str(port), "--cluster-secret-file", str(tmp_path / "secret"))
    command = serve_command(model, *shared, "--node-rank", "1")
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None and node.stdout.readline() == f"node 1 joins 127.0.0.1:{port}\n"
        with serving(model, *names, *shared, "-pp", "2") as server:
            assert complete(server.api) == right
        assert node.poll() is None, "it waits for the next run"
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0


@pytest.mark.slow
def test_a_host_without_the_secret_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    command = serve_command(model_name(), "--nnodes", "2", "--node-rank", "1")
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "--nnodes: hosts authenticate each other by a secret, and there is none" in ended.stderr
