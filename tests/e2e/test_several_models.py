"""`ratoon serve` with several models, as a process of its own: requests choose by name, models are loaded when they are
asked for and put away, and what the command line has is in a file as well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.e2e.servers import TINY_OPTIONS, Server, serving
from tests.forked_engines import ForkedCommand, run_forked
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        write_tiny_model(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """Two models that are there, and one that can't be loaded. Engines take their time to start: a request that waits
    for one is told so after a while."""
    options = (f"second={models / 'two'}", str(models / "broken"), "--log-file", str(models / "log"))
    with serving(models / "one", *options, has_forks=False, OPENAI_API_KEY="") as started:
        yield started


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=PATIENCE)


def listed(server: Server) -> dict[str, dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=PATIENCE) as answer:
        return {model["id"]: model for model in json.load(answer)["data"]}


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def unload(server: Server, *names: str) -> None:
    """Puts models away. One that is not loaded stays so."""
    for name in names:
        assert post(server, "/api/generate", {"model": name, "keep_alive": 0})[0] == 200


def ratoon(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RATOON_", "OPENAI_"))}
    return run_forked(*words, env=environment)


def test_a_model_is_loaded_by_the_first_request_for_it_which_is_told_so(
    server: Server, client: OpenAI, models: Path
) -> None:
    unload(server, "one", "second")
    assert {name: model["state"] for name, model in listed(server).items()} == {
        "one": "unloaded", "second": "unloaded", "broken": "unloaded",
    }  # fmt: skip
    body = {"model": "second", "prompt": "abc", "max_tokens": 4, "temperature": 0, "stream": True}
    status, stream = post(server, "/v1/completions", body)
    assert status == 200 and stream.endswith(b"data: [DONE]\n\n")
    assert stream.startswith(b": waiting for second: loading, ")
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    found = listed(server)
    assert (found["second"]["state"], found["one"]["state"]) == ("loaded", "unloaded")
    assert found["second"]["memory_bytes"] > 0 and found["second"]["max_model_len"] == 512
    assert "loading second; 1 requests wait for it" in (models / "log").read_text()
    whole = client.completions.create(model="second", prompt="abc", max_tokens=4, temperature=0)
    assert whole.model == "second"
    assert whole.choices[0].text == "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_requests_that_continue_others_find_the_model_that_made_them(server: Server, client: OpenAI) -> None:
    first = client.completions.create(model="second", prompt="abc", max_tokens=4, temperature=0)
    client.completions.create(model="one", prompt="abc", max_tokens=4, temperature=0)
    status, answer = post(
        server, "/v1/completions", {"continuation_of": first.id, "prompt": "d", "max_tokens": 2, "temperature": 0}
    )
    assert status == 200
    assert json.loads(answer)["model"] == "second" and json.loads(answer)["continuation"]["parent"] == first.id
    response = client.responses.create(model="one", input="hi", max_output_tokens=4)
    assert client.responses.retrieve(response.id).model == "one"
    ids = [one["id"] for one in json.loads(urllib.request.urlopen(f"{server.url}/v1/requests").read())["data"]]
    assert first.id in ids and response.id in ids
    client.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)


def test_a_conversation_belongs_to_the_model_that_it_was_made_for(server: Server, client: OpenAI) -> None:
    made = client.conversations.create(extra_body={"model": "second"})
    body = {"input": "Hello", "conversation": made.id, "max_output_tokens": 2}
    status, answer = post(server, "/v1/responses", body)
    assert status == 200 and json.loads(answer)["model"] == "second", "that of the conversation"
    assert len(list(client.conversations.items.list(made.id))) == 2
    with pytest.raises(NotFoundError, match="another key or model"):
        client.responses.create(model="one", **body)
    with pytest.raises(BadRequestError, match="model: is missing"):
        client.conversations.create()
    client.conversations.delete(made.id)
    with pytest.raises(NotFoundError, match="there is no conversation"):
        client.conversations.retrieve(made.id)


def test_wrong_names_and_models_that_can_not_be_loaded_are_errors_of_their_request(
    server: Server, client: OpenAI
) -> None:
    with pytest.raises(NotFoundError, match="'three' does not exist; this server has 'one', 'second', 'broken'"):
        client.completions.create(model="three", prompt="abc")
    with pytest.raises(BadRequestError, match="'broken' can't be loaded") as refused:
        client.completions.create(model="broken", prompt="abc")
    assert refused.value.code == "model_not_loadable"
    status, answer = post(server, "/v1/completions", {"prompt": "abc"})
    assert status == 400 and b"model: is missing; one of one, second, broken" in answer
    assert post(server, "/v1/completions", {"model": "one", "prompt": 7})[0] == 400
    assert listed(server)["broken"]["error"]


def test_health_metrics_and_pages_are_those_of_all(server: Server, client: OpenAI) -> None:
    client.completions.create(model="second", prompt="abc", max_tokens=1)
    health = json.loads(urllib.request.urlopen(f"{server.url}/health").read())
    assert health["status"] == "ok" and set(health["models"]) == {"one", "second", "broken"}
    metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    assert 'ratoon_model_memory_bytes{model="second",state="loaded"}' in metrics
    assert metrics.count("# TYPE ratoon_generation_tokens_total counter") == 1
    document = json.loads(urllib.request.urlopen(f"{server.url}/openapi.json").read())
    assert {"/v1/models", "/v1/chat/completions", "/api/chat"} <= set(document["paths"])
    assert b"It serves one, second, broken." in urllib.request.urlopen(f"{server.url}/").read()


def test_commands_list_and_unload_models(server: Server, client: OpenAI) -> None:
    client.completions.create(model="one", prompt="abc", max_tokens=1)
    shown = ratoon("ps", "--url", server.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1] for line in shown.stdout.splitlines()}
    assert rows["model"] == "state" and rows["one"] == "loaded" and rows["broken"] == "unloaded"
    stopped = ratoon("stop", "one", "--url", server.url)
    assert (stopped.returncode, stopped.stdout) == (0, "one is unloaded\n")
    assert listed(server)["one"]["state"] == "unloaded"
    wrong = ratoon("stop", "three", "--url", server.url)
    assert wrong.returncode != 0 and "'three' does not exist" in wrong.stderr


def test_ollamas_package_lists_loads_and_unloads(server: Server) -> None:
    client = ollama.Client(host=server.url, timeout=PATIENCE)
    assert [model.model for model in client.list().models] == ["one", "second", "broken"]
    answer = client.generate("second:latest", "abc", options={"num_predict": 2, "temperature": 0}, keep_alive="1h")
    assert answer.eval_count == 2 and answer.done_reason == "length"
    (running,) = [model for model in client.ps().models if model.model == "second"]
    assert running.context_length == 512 and (running.size or 0) > 0
    shown = client.show("second")
    assert (shown.modelinfo or {})["general.architecture"] == "llama"
    assert "completion" in (shown.capabilities or ())
    vectors = client.embed("second", ["a", "b"]).embeddings
    assert len(vectors) == 2 and len(vectors[0]) == 32
    assert client.embeddings("second", "a").embedding == pytest.approx(vectors[0])
    assert client.generate("second", keep_alive=0).done_reason == "unload"
    assert listed(server)["second"]["state"] == "unloaded"
    with pytest.raises(ollama.ResponseError, match="'three' does not exist") as refused:
        client.chat("three", [{"role": "user", "content": "x"}])
    assert refused.value.status_code == 404


def test_a_file_has_what_the_command_line_has_and_idle_models_sleep(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "ratoon.toml"
    file.write_text(
        f"""
keep-alive = "100ms"
memory-budget = "1GiB"
num-blocks = 600
response-lease = 0

[[model]]
model = "{models / "one"}"
served-model-name = ["small", "alias"]
max-model-len = 128

[[model]]
model = "{models / "two"}"
keep-alive = "1h"
"""
    )
    process = ForkedCommand("serve", "--config", str(file), "--port", "0", *TINY_OPTIONS, env=dict(os.environ))
    try:
        server = Server(process, process.stdout.readline().split()[0])
        client = OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=PATIENCE)
        assert client.completions.create(model="alias", prompt="a", max_tokens=1).model == "alias"
        client.completions.create(model="two", prompt="a", max_tokens=1)
        wait_until("the first one sleeps", lambda: listed(server)["small"]["state"] == "asleep")
        assert listed(server)["small"]["max_model_len"] == 128
        assert listed(server)["two"]["state"] == "loaded"
        asleep = listed(server)["small"]["memory_bytes"]
        client.completions.create(model="small", prompt="a", max_tokens=1)  # it wakes up
        wait_until("it sleeps again", lambda: listed(server)["small"]["state"] == "asleep")
        assert listed(server)["small"]["memory_bytes"] == asleep < listed(server)["two"]["memory_bytes"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("port = ", "is not valid TOML"),
        ("prot = 1", "prot is no option of `ratoon serve`; did you mean port?"),
        ("[[model]]\nmax-model-len = 5", "model 1: has no model"),
        ('[[model]]\nmodl = "x"', "model 1: modl is no option of `ratoon serve`; did you mean model?"),
        ('[[model]]\nmodel = "x"\nport = 5', "port is an option of the whole server"),
        ("admin = 1", "admin = 1; true or false"),
        ("", "MODEL: is missing"),
    ],
)
@pytest.mark.one_in(5)
def test_what_is_wrong_in_a_file_is_said_in_one_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "ratoon.toml"
    file.write_text(content)
    refused = ratoon("serve", "--config", str(file))
    assert refused.returncode == 2
    assert told in refused.stderr and refused.stderr.count("\n") == 1
