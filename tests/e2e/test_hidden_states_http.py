"""Hidden states of a real server, by the clients that people have: openai, requests, and `ratoon hidden-states`.

All numbers are compared with those of LLM.hidden_states in this process.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
from safetensors import safe_open
from safetensors.numpy import load, load_file

from ratoon.api.llm import LLM
from ratoon.cli import main
from ratoon.core.params import HiddenStatesParams
from tests.e2e.servers import Server, serving
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, write_tiny_model

pytestmark = pytest.mark.slow

KEYS = ("sk-mine", "sk-yours")
PROMPT = "a prompt that fills more than one block"
ASKED = {"positions": [-1, [3, 6]], "layers": [-1, 0, "pre_norm"]}
FILE_TYPE = "application/octet-stream"
# As much as may be asked for, in several parts.
LONG_PROMPT = "x" * 480
MUCH = {"positions": "all", "layers": "all"}
MOST_BYTES = 480 * 3 * 32 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--max-hidden-states-bytes", str(MOST_BYTES), RATOON_API_KEY=",".join(KEYS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key=KEYS[0], max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Callable[..., np.ndarray]]:
    with LLM(str(folder), **TINY_SETTINGS) as llm:

        def read(token_ids: list[int], **asked: Any) -> np.ndarray:
            return llm.extract_hidden_states(token_ids, HiddenStatesParams(**asked)).tensor.numpy()

        yield read


def ask(server: Server, key: str = KEYS[0], accept: str = "*/*", **fields: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}", "Accept": accept}
    body = {"model": MODEL, **fields}
    return requests.post(f"{server.api}/hidden_states", json=body, headers=headers, timeout=120)


def numbers(states: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(states["data"]), np.float32).reshape(states["shape"])


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


# ---- the raw route ----


def test_a_prompts_states_as_json_and_as_a_file(server, expected, tmp_path):
    wanted = expected(list(PROMPT.encode()), **ASKED)
    close(numbers(ask(server, prompt=PROMPT, **ASKED).json()), wanted)
    answer = ask(server, prompt=PROMPT, accept=FILE_TYPE, **ASKED)
    file = tmp_path / "states.safetensors"
    file.write_bytes(answer.content)
    with safe_open(file, "np") as opened:
        close(opened.get_tensor("hidden_states"), wanted)
        notes = opened.metadata()
    assert json.loads(notes["positions"]) == [38, 3, 4, 5] and json.loads(notes["layers"]) == [2, 0, "pre_norm"]
    assert bytes(json.loads(notes["token_ids"])) == b"k" + PROMPT[3:6].encode()


def test_what_is_asked_for_twice_comes_once(server, expected):
    twice = {"positions": [*ASKED["positions"], 3, [4, 6]], "layers": [*ASKED["layers"], 0]}
    answer = ask(server, prompt=PROMPT, **twice).json()
    assert (answer["positions"], answer["layers"]) == ([38, 3, 4, 5], [2, 0, "pre_norm"])
    close(numbers(answer), expected(list(PROMPT.encode()), **ASKED))


def test_half_precision_is_the_rounded_whole(server, expected):
    wanted = expected(list(PROMPT.encode()), positions="all")
    found = load(ask(server, prompt=PROMPT, accept=FILE_TYPE, positions="all", dtype="float16").content)
    np.testing.assert_allclose(found["hidden_states"], wanted.astype(np.float16), rtol=0, atol=1e-3)


def test_an_ended_request_by_its_id_for_its_own_key_alone(server, client, expected):
    fields = {"retain_kv": 60, "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, seed=1, n=2, extra_body=fields)
    body = ask(server, original_request_id=answer.id, choice=1).json()
    assert (body["computed_tokens"], body["source"]) == (1, "lease")
    tokens = [*PROMPT.encode(), *answer.choices[1].token_ids]
    close(numbers(body), expected(tokens))
    other = ask(server, key=KEYS[1], original_request_id=answer.id)
    unknown = ask(server, key=KEYS[1], original_request_id="cmpl-never")
    assert other.status_code == unknown.status_code == 404
    assert other.text.replace(answer.id, "cmpl-never") == unknown.text


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"positions": 39}, 400, None),
        ({"layers": 3}, 400, None),
        ({"dtype": "float8"}, 400, None),
        ({"prompt": None, "original_request_id": "cmpl-never"}, 404, "request_not_found"),
        ({"prompt": LONG_PROMPT + "x", **MUCH}, 413, "answer_too_large"),
        ({"deadline": 1e-9}, 504, "deadline_exceeded"),
    ],
)
def test_what_can_not_be_read_has_its_status(server, fields, status, code):
    answer = ask(server, **{"prompt": PROMPT, **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_a_large_answer_arrives_whole(server, expected):
    wanted = expected(list(LONG_PROMPT.encode()), **MUCH)
    answer = ask(server, prompt=LONG_PROMPT, accept=FILE_TYPE, **MUCH)
    assert len(answer.content) > MOST_BYTES
    close(load(answer.content)["hidden_states"], wanted)
    close(numbers(ask(server, prompt=LONG_PROMPT, **MUCH).json()), wanted)


def test_a_reader_that_stalls_holds_up_nobody(server, client):
    host, port = server.url.removeprefix("http://").split(":")
    stalled = []
    for accept in ("application/json", FILE_TYPE):
        body = json.dumps({"model": MODEL, "prompt": LONG_PROMPT, **MUCH}).encode()
        head = (
            f"POST /v1/hidden_states HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            f"Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection((host, int(port)), timeout=120)
        connection.sendall(head.encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        stalled.append(connection)
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert ask(server, prompt=PROMPT).status_code == 200
    for connection in stalled:
        connection.close()
    assert ask(server, prompt=PROMPT).status_code == 200


# ---- return_hidden_states ----


def test_the_openai_client_gets_states_with_its_answer(client, expected):
    extra = {"return_hidden_states": ASKED, "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, seed=1, n=2, extra_body=extra)
    for choice in answer.choices:
        close(numbers(choice.hidden_states), expected([*PROMPT.encode(), *choice.token_ids], **ASKED))
    extra["return_hidden_states"] = True
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, extra_body=extra)
    close(numbers(chat.choices[0].hidden_states), expected([*chat.prompt_token_ids, *chat.choices[0].token_ids]))


def test_the_openai_client_gets_states_with_a_streams_last_chunk(client, expected):
    extra = {"return_hidden_states": {"positions": "all"}, "return_token_ids": True, "ignore_eos": True}
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, stream=True, extra_body=extra)
    *earlier, last = stream
    assert not any(hasattr(chunk.choices[0], "hidden_states") for chunk in earlier)
    tokens = [token for chunk in (*earlier, last) for token in chunk.choices[0].token_ids]
    close(numbers(last.choices[0].hidden_states), expected([*PROMPT.encode(), *tokens], positions="all"))


def test_a_deadline_that_passes_leaves_the_text(client):
    extra = {"return_hidden_states": {"deadline": 1e-9}, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_body=extra)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].hidden_states["error"]["code"] == "deadline_exceeded"


# ---- the command ----


@pytest.fixture
def here(folder: Path) -> list[str]:
    return [str(folder), "--load-format", "dummy", "--device", "cpu", "--threads", "1", "--num-blocks", "200"]


@pytest.fixture
def there(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("RATOON_API_KEY", KEYS[0])
    return ["--url", server.url]


def test_the_command_writes_the_same_file_here_and_there(here, there, expected, tmp_path, capsys):
    wanted = expected(list(PROMPT.encode()), **ASKED)
    asked = [PROMPT, "--positions=-1,3:6", "--layers=-1,0,pre_norm", "--output"]
    for name, where in (("here", here), ("there", there)):
        file = tmp_path / name
        assert main(["hidden-states", *where, *asked, str(file)]) == 0
        close(load_file(file)["hidden_states"], wanted)
        line = f'{file}: float32 [3, 4, 32], layers [2,0,"pre_norm"], 39 tokens computed\n'
        assert capsys.readouterr().out == line or name == "there"  # the server has seen the prompt before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_the_command_prints_a_line_for_each_layer_and_position(here, there, expected, capsys):
    wanted = expected(list(b"abc"), positions="all", layers=[0, "norm"])
    asked = ["abc", "--positions", "all", "--layers", "0,norm"]
    for where in (here, there):
        for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 1e-1)):
            assert main(["hidden-states", *where, *asked, "--states-dtype", dtype]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            places = [(line["layer"], line["position"], line["token_id"]) for line in lines]
            assert places == [(layer, place, 97 + place) for layer in (0, "norm") for place in range(3)]
            found = np.array([line["hidden_state"] for line in lines]).reshape(2, 3, 32)
            np.testing.assert_allclose(found, wanted, atol=tolerance)


def test_the_command_reads_an_answer_of_the_server(there, client, expected, capsys):
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=4, n=2, seed=1, extra_body=extra)
    words = ["--original-request-id", answer.id, "--choice", "1", "--scope", "output", "--positions", "0"]
    assert main(["hidden-states", *there, *words]) == 0
    line = json.loads(capsys.readouterr().out)
    tokens = answer.choices[1].token_ids
    assert (line["position"], line["token_id"]) == (3, tokens[0])
    close(np.array(line["hidden_state"]), expected([*b"abc", *tokens], positions=3)[0, 0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["abc", "--positions", "9"], "positions"),
        (["abc", "--layers", "9"], "layers"),
    ],
)
def test_the_command_passes_refusals_on_and_leaves_no_file(here, there, tmp_path, capsys, words, message):
    file = tmp_path / "states.safetensors"
    for where in (here, there):
        assert main(["hidden-states", *where, *words, "--output", str(file)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and "9 is out of range" in error
    assert not list(tmp_path.iterdir())
