"""`ratoon serve` as users meet it: a process, driven by the real `openai` client, and ended by signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import requests

from tests.e2e.servers import ADMIN_KEY, AS_ADMIN, Server, serve_command, serving
from tests.forked_engines import run_forked
from tests.unit.api.server.harness import MODEL, write_tiny_model
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

KEY = "sk-of-the-tests"
HELLO = [{"role": "user", "content": "Hello 🙂"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    keys = {"RATOON_API_KEY": f"{KEY},another", "RATOON_ADMIN_KEY": ADMIN_KEY}
    with serving(folder, "--admin", is_forked=False, **keys) as running:  # as users start it: without torch
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0) as made:
        yield made


def stats(server: Server) -> dict:
    return requests.get(f"{server.url}/admin/stats", headers=AS_ADMIN, timeout=PATIENCE).json()


def is_busy(engine: dict) -> bool:
    return bool(engine["num_running"] or engine["num_waiting"])


def is_idle(server: Server) -> bool:
    found = stats(server)
    return not (found["num_unfinished_requests"] or is_busy(found["engines"][0]))


def forget_all(server: Server) -> None:
    """Ends the leases that other tests have left."""
    for key in (KEY, "another"):
        headers = {"Authorization": f"Bearer {key}"}
        for entry in requests.get(f"{server.api}/requests", headers=headers, timeout=PATIENCE).json()["data"]:
            requests.delete(f"{server.api}/requests/{entry['id']}", headers=headers, timeout=PATIENCE)
    assert stats(server)["engines"][0]["leases"]["num_active"] == 0


def ask_engine(server: Server, what: str) -> None:
    requests.post(f"{server.url}/admin/{what}", headers=AS_ADMIN, timeout=PATIENCE).raise_for_status()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.check
def test_completions(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 8, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None and whole.usage.prompt_tokens == 6
    texts = [""] * 4
    usage = None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and len(logprobs.tokens or ()) == len(logprobs.top_logprobs or ())


@pytest.mark.check
def test_chat(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 12, "seed": 2, "stop": ["z"]}
    extensions = {"top_k": 50, "min_p": 0.01, "return_token_ids": True}
    whole = client.chat.completions.create(**fields, extra_body=extensions, logprobs=True, top_logprobs=1)
    chunks = list(client.chat.completions.create(**fields, extra_body=extensions, stream=True))
    assert whole.id.startswith("chatcmpl-")
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
    streamed = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids", [])]
    assert streamed == whole.choices[0].model_extra["token_ids"]


def test_a_call_of_a_tool_and_its_result_go_back_as_clients_send_them(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, tools=[tool], max_tokens=1, extra_body={"return_token_ids": True}
    )
    prompt = bytes(answer.parse().model_extra["prompt_token_ids"]).decode()
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool>2' in prompt
    assert "[tools: 1]" in prompt  # the template knows tools, and not their calls
    assert "tool calls" in answer.headers["x-ratoon-note"]


def test_an_answer_that_was_begun_is_continued(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    begun = {"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True}
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=begun)
    assert bytes(answer.model_extra["prompt_token_ids"]).decode().endswith("<assistant>Well, ")


@pytest.mark.check
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "logprobs": 0}, {"stop": ["e"]}], ids=str)
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": "one two", "max_tokens": 100, "seed": 3, **fields}
    whole = client.completions.create(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(**asked, stream=True, stream_options=options)
    for place, choice in enumerate(whole.choices):
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == place]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            assert [token for piece in pieces for token in piece.logprobs.tokens] == choice.logprobs.tokens
            assert [place for piece in pieces for place in piece.logprobs.text_offset] == choice.logprobs.text_offset
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and last.usage == whole.usage and not last.choices


def test_a_client_that_reads_late_gets_the_whole_answer(server: Server, client: openai.OpenAI) -> None:
    """It has more text than the buffers of the system hold: the server merges what is left."""
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 400, "n": 64, "seed": 5}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
    body = json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        ask_engine(server, "pause")  # so that it does not end before it is seen
        connection.sendall(head.encode() + body)
        wait_until("it is under way", lambda: not is_idle(server))
        ask_engine(server, "resume")
        wait_until("the engine is done with it", lambda: not is_busy(stats(server)["engines"][0]))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    texts = [""] * 64
    num_events = 0
    for event in without_framing(received).split(b"\n\n"):
        if event.startswith(b"data: {"):
            num_events += 1
            for choice in json.loads(event[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice.text for choice in whole.choices]
    assert num_events < 400 * 64


def without_framing(response: bytes) -> bytes:
    """The body of a response in chunks."""
    _, _, rest = response.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def test_a_base_url_without_its_version_is_told(server: Server) -> None:
    with (
        openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"),
    ):
        client.chat.completions.create(model=MODEL, messages=HELLO)


def test_chat_with_the_clients_stream_helper(client: openai.OpenAI) -> None:
    words = {"allowed_token_ids": [97, 98, 256], "min_tokens": 3}  # it ends soon: the helper takes no answer cut off
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=1, extra_body=words) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content


def test_beam_search(server: Server, client: openai.OpenAI) -> None:
    """Whole and streamed, in both endpoints, from a prompt and behind an answer."""
    forget_all(server)
    search = {"use_beam_search": True, "beam_width": 8, "return_token_ids": True}

    def complete(prompt: str | list[int] | None, stream: bool = False, **extensions: object):
        body = {**search, **extensions}
        return client.completions.create(model=MODEL, prompt=prompt, n=3, max_tokens=6, stream=stream, extra_body=body)

    whole = complete("hello", retain_kv=60)
    scores = [choice.model_extra["score"] for choice in whole.choices]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert whole.usage.completion_tokens == sum(len(choice.model_extra["token_ids"]) for choice in whole.choices)
    texts, best = ["", "", ""], []
    for chunk in complete("hello", stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            best += [choice.model_extra["best_so_far"]] if "best_so_far" in choice.model_extra else []
    assert texts == [choice.text for choice in whole.choices]
    assert best and all(isinstance(text, str) for text in best)

    child = complete(None, continuation_of=whole.id, continuation_choice=2)
    assert child.model_extra["continuation"]["source"] == "lease"
    assert child.model_extra["continuation"]["computed_tokens"] == 1
    afresh = complete(child.choices[0].model_extra["prompt_token_ids"], cache_salt="another")
    assert [one.model_extra["token_ids"] for one in afresh.choices] == [
        one.model_extra["token_ids"] for one in child.choices
    ]
    assert stats(server)["engines"][0]["leases"]["num_active"] == 3
    headers = {"Authorization": f"Bearer {KEY}"}
    assert requests.delete(f"{server.api}/requests/{whole.id}", headers=headers, timeout=PATIENCE).json()["deleted"]
    assert stats(server)["engines"][0]["leases"]["num_active"] == 0


def test_beam_search_in_a_chat(client: openai.OpenAI) -> None:
    search = {"use_beam_search": True, "beam_width": 8}
    fields = {"model": MODEL, "messages": HELLO, "n": 3, "max_completion_tokens": 6, "extra_body": search}
    whole = client.chat.completions.create(**fields)
    told = [choice for chunk in client.chat.completions.create(**fields, stream=True) for choice in chunk.choices]
    for choice in whole.choices:
        text = "".join(one.delta.content or "" for one in told if one.index == choice.index)
        assert text == choice.message.content
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**fields, temperature=0.7)
    assert refused.value.param == "temperature"


def test_continuations(server: Server, client: openai.OpenAI) -> None:
    """Only what is new is sent and computed, and what comes is what the whole conversation gives."""
    forget_all(server)
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    extensions = {"return_token_ids": True, "retain_kv": 60}
    parent = client.chat.completions.create(**fields, messages=HELLO, extra_body=extensions)
    new = [{"role": "user", "content": "And now?"}]
    extensions = {"continuation_of": parent.id, "return_token_ids": True}
    child = client.chat.completions.create(**fields, messages=new, extra_body=extensions)
    assert child.model_extra["continuation"]["source"] == "lease"
    assert child.model_extra["continuation"]["parent"] == parent.id
    first, *_ = client.chat.completions.create(**fields, messages=new, extra_body=extensions, stream=True)
    assert first.model_extra["continuation"] == child.model_extra["continuation"]
    tokens = child.model_extra["prompt_token_ids"]
    fresh = client.completions.create(
        **fields, prompt=tokens, extra_body={"return_token_ids": True, "cache_salt": "another"}
    )
    assert fresh.choices[0].model_extra["token_ids"] == child.choices[0].model_extra["token_ids"]
    further = client.completions.create(**fields, prompt=None, extra_body={"continuation_of": child.id})
    assert further.usage is not None and further.usage.prompt_tokens == len(tokens) + child.usage.completion_tokens

    with openai.OpenAI(base_url=server.api, api_key="another", max_retries=0) as stranger:
        for asker, request_id in ((stranger, parent.id), (client, "chatcmpl-never")):
            with pytest.raises(openai.NotFoundError) as refused:
                asker.chat.completions.create(**fields, messages=new, extra_body={"continuation_of": request_id})
            assert refused.value.code == "request_not_found"
    headers = {"Authorization": f"Bearer {KEY}"}
    listed = requests.get(f"{server.api}/requests", headers=headers, timeout=PATIENCE).json()["data"]
    assert parent.id in [entry["id"] for entry in listed]
    assert requests.delete(f"{server.api}/requests/{parent.id}", headers=headers, timeout=PATIENCE).json()["deleted"]
    assert stats(server)["engines"][0]["leases"]["num_active"] == 0


def test_two_stages_as_a_client_that_names_its_requests_sends_them(client: openai.OpenAI) -> None:
    """The parent is named by its X-Request-Id, the prompt is empty; with a prompt, a forgotten parent is no error."""
    fields = {"model": MODEL, "max_tokens": 6}
    asked = {"retain_kv": 60, "return_token_ids": True, "ignore_eos": True}
    first = client.completions.create(
        **fields, prompt="think about it", temperature=0, extra_body=asked, extra_headers={"X-Request-Id": "stage-1"}
    )
    search = {"n": 3, "temperature": 0.0}
    beams = {"use_beam_search": True, "continuation_suffix": "!", "return_token_ids": True}
    second = client.completions.create(
        **fields, **search, prompt="", extra_body={**beams, "continuation_of": "stage-1"}
    )
    about = second.model_extra["continuation"]
    assert (about["parent"], about["source"], about["fallback"]) == (first.id, "lease", False)
    tokens = first.choices[0].model_extra["prompt_token_ids"] + first.choices[0].model_extra["token_ids"]
    whole = [*tokens, *b"!"]
    assert second.choices[0].model_extra["prompt_token_ids"] == whole
    fallen_back = client.completions.create(
        **fields, **search, prompt=whole, extra_body={**beams, "continuation_of": "forgotten"}
    )
    about = fallen_back.model_extra["continuation"]
    assert (about["source"], about["fallback"]) == ("prefix_cache", True) and about["inherited_tokens"] > 0
    assert [one.text for one in fallen_back.choices] == [one.text for one in second.choices]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**fields, prompt="", extra_body={"continuation_of": "forgotten"})


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 by itself, and turns it into numbers."""
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    width = len(answer.data[0].embedding)
    assert [len(entry.embedding) for entry in answer.data] == [width, width]
    with pytest.raises(openai.BadRequestError, match="does not say that its vectors can be cut"):
        client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=8)
    plain = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-5)


def test_the_async_client(server: Server) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="another", max_retries=0) as client:

            async def one(number: int) -> tuple[str, str]:
                fields = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "seed": number}
                whole = await client.chat.completions.create(**fields)
                text = ""
                async for chunk in await client.chat.completions.create(**fields, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return whole.choices[0].message.content or "", text

            for whole, streamed in await asyncio.gather(*(one(number) for number in range(16))):
                assert whole == streamed
            assert (await client.embeddings.create(model=MODEL, input="x")).data
            assert (await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=1)).choices
            assert [model.id async for model in client.models.list()] == [MODEL]

    asyncio.run(ask())


def test_errors_are_those_that_the_client_knows(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="x" * 9999)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=server.api, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_client_that_hangs_up_costs_nothing(server: Server, client: openai.OpenAI) -> None:
    with client.completions.create(model=MODEL, prompt="x", max_tokens=400, n=64, stream=True) as stream:
        next(iter(stream))
    wait_until("the stream's request is gone", lambda: is_idle(server))
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 400, "n": 64}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        ask_engine(server, "pause")
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until("it is under way", lambda: not is_idle(server))
        ask_engine(server, "resume")
    wait_until("the other request is gone, too", lambda: is_idle(server))


def test_hostile_http_does_no_harm(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"\x00" * 1000,
    ):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(5)
            with contextlib.suppress(OSError):  # it may have hung up already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    assert requests.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200


def test_metrics_count_what_was_asked(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    page = requests.get(f"{server.url}/metrics", timeout=PATIENCE).text
    assert 'ratoon_http_requests_total{route="/v1/completions",status="200"}' in page
    assert "ratoon_time_to_first_token_seconds_count" in page


def test_the_servers_process_has_no_torch(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    client.embeddings.create(model=MODEL, input="x")
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_stream_under_way_finishes_before_the_server_does(folder: Path) -> None:
    with serving(folder, "--drain-seconds", "600") as server:
        client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=300, n=32, stream=True, seed=1)
        chunks = iter(stream)
        next(chunks)
        server.stop()
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert len(reasons) == 32
        assert set(reasons) <= {"stop", "length"}
        assert server.wait() == 0


def test_a_stream_that_takes_too_long_is_told_so(folder: Path) -> None:
    with serving(folder, "--admin", "--drain-seconds", "0.5", RATOON_ADMIN_KEY=ADMIN_KEY) as server:
        client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
        stream = iter(client.completions.create(model=MODEL, prompt="x", max_tokens=500, stream=True, n=64))
        next(stream)
        ask_engine(server, "pause")
        server.stop()
        *_, last = stream
        assert last.choices[0].finish_reason == "abort"
        assert server.wait() == 0


def test_ctrl_c_ends_it_and_its_engine(folder: Path) -> None:
    with serving(folder) as server:
        health = requests.get(f"{server.url}/health", timeout=PATIENCE).json()
        engine = health["engines"][0]["pid"]
        server.stop(signal.SIGINT)
        assert server.wait() == 0
    wait_until("the engine's process is gone", lambda: not Path(f"/proc/{engine}").exists())


def serve(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Starts a server that ends with an error."""
    return run_forked(*serve_command(folder, *options)[3:], env=dict(os.environ))


def test_a_port_in_use_is_said_in_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = serve(folder, "--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "is in use" in result.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--max-body", "lots"], "--max-body: "),
        (["--port", "99999"], "port"),
        (["--api-key-file", "/nowhere/at/all"], "--api-key-file: "),
        (["--chat-template", "/nowhere/at/all"], "--chat-template: "),
        (["--log-level", "loud"], "--log-level: "),
        (["--log-file", "/nowhere/at/all"], "--log-file: "),
        (["--replicas", "0"], "--num-replicas: "),
        (["--max-queue", "0"], "--max-queue: "),
        (["--drain-seconds", "nan"], "--drain-seconds: "),
    ],
)
@pytest.mark.one_in(7)
def test_settings_that_make_no_sense_are_said_in_one_line(folder: Path, options: list[str], word: str) -> None:
    result = serve(folder, *options)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert word in result.stderr


def test_a_template_that_is_no_jinja_is_said_before_anybody_asks(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    result = serve(folder, "--chat-template", str(template))
    assert result.returncode == 2
    assert "--chat-template: " in result.stderr


def test_a_unix_socket_keys_from_a_file_a_log_on_a_full_disk_and_other_names(folder: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "http.socket", tmp_path / "keys"
    keys.write_text("# mine\n\nfirst-key\nsecond-key\n")
    options = [
        "--uds", str(path), "--api-key-file", str(keys), "--served-model-name", "alpha", "--served-model-name", "beta",
        "--log-file", "/dev/full", "--log-level", "debug", "--access-log", "--startup-times",
    ]  # fmt: skip
    with serving(folder, *options) as server:
        assert server.url == f"unix:{path}"
        for _ in range(3):
            answer = get_from_unix_socket(path, "/v1/models", "second-key")
        assert b"200 OK" in answer
        assert b'"alpha"' in answer and b'"beta"' in answer
        assert b"401" in get_from_unix_socket(path, "/v1/models", "third-key").split(b"\r\n")[0]
        server.stop()
        assert server.wait() == 0
    assert not path.exists()


def get_from_unix_socket(path: Path, target: str, key: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        request = (
            f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(request.encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_other_machines_are_warned_about(folder: Path) -> None:
    with serving(folder, "--host", "0.0.0.0") as server:
        server.stop()
        server.wait()
        _, errors = server.process.communicate()
    assert "no API key" in errors.splitlines()[0]


@pytest.mark.full
def test_two_servers_at_once(folder: Path) -> None:
    with serving(folder) as first, serving(folder) as second:
        assert first.url != second.url
        for server in (first, second):
            client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices


def test_two_engines_behind_one_server(folder: Path) -> None:
    with serving(folder, "--replicas", "2") as server:
        client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)
        for rank in (0, 1):
            fields = {"model": MODEL, "prompt": "x", "max_tokens": 4, "temperature": 0}
            assert client.completions.create(**fields, extra_body={"data_parallel_rank": rank}).choices
        health = requests.get(f"{server.url}/health", timeout=PATIENCE).json()
        assert [engine["state"] for engine in health["engines"]] == ["ok", "ok"]


class Pet(pydantic.BaseModel):
    """Bounded, so that a model of random weights comes to its end."""

    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    friends: list[bool] = pydantic.Field(max_length=2)
    owner: Literal["me", "you"] | None


def test_answers_are_parsed_into_pydantic_models(client: openai.OpenAI) -> None:
    # A random model likes whitespace as much as anything else: it is made unlikely.
    fields: dict[str, Any] = {"max_tokens": 200, "logit_bias": {str(byte): -100 for byte in b" \t\r\n"}}
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Pet, seed=seed, temperature=1.5, **fields
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Pet)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Pet, seed=1, **fields) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Pet, max_tokens=3)


def test_vllms_fields_go_in_the_extra_body(client: openai.OpenAI) -> None:
    for extra in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]}):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
        assert answer.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"guided_json": {"not": {}}})
    assert refused.value.param == "guided_json"
    assert "'not' at # is not supported" in refused.value.message
