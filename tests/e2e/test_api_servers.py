"""Several front ends of one service: what one began, any other continues; limits and metrics are the service's."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.front_ends import KEYS, MODEL, FrontEnd, each_front_end
from tests.e2e.servers import Server, serving
from tests.faults.processes import is_running
from tests.unit.api.server.harness import write_tiny_model
from tests.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    keys = [word for key in KEYS for word in ("--api-key", key)]
    options = ("--data-parallel-size", "2", "--max-queue", "8", "--admin", "--admin-key", "root")
    with serving(folder, "--api-servers", "2", *options, *keys) as started:
        yield started


GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def sums(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_continuation_goes_on_through_another_front_end(server):
    with each_front_end(server) as (first, second):
        whole = first.post("/v1/completions", prompt="Once upon", **{**GREEDY, "max_tokens": 16})
        begun = first.post("/v1/completions", prompt="Once upon", request_id="begun", retain_kv=60, **GREEDY)
        for name in (begun["id"], "begun"):
            rest = second.post("/v1/completions", continuation_of=name, **GREEDY)
            assert text_of(begun) + text_of(rest) == text_of(whole)
            assert rest["continuation"]["source"] == "lease" and rest["continuation"]["parent"] == begun["id"]
        assert begun["id"] in [one["id"] for one in second.get("/v1/requests")["data"]]
        status, _ = second.ask("POST", "/v1/completions", {"model": MODEL, "continuation_of": "begun"}, KEYS[1])
        assert status == 404, "another key's"
        states = second.post("/v1/hidden_states", original_request_id="begun", positions=[-1])
        assert states["data"]
        assert second.ask("DELETE", "/v1/requests/begun")[0] == 200
        status, _ = first.ask("POST", "/v1/completions", {"model": MODEL, "continuation_of": "begun"})
        assert status == 404


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
KINDS = {
    "choices": ("/v1/completions", {"prompt": "Hello", "n": 3, "seed": 5, "temperature": 1, "max_tokens": 12}),
    "logprobs": ("/v1/completions", {"prompt": [1, 2, 3], "logprobs": 2, "echo": True, **GREEDY}),
    "several": ("/v1/completions", {"prompt": ["a", "bc", "def"], **GREEDY}),
    "beams": ("/v1/completions", {"prompt": "Hello", "use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 6}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **GREEDY}),
    "schema": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "response_format": SCHEMA, "max_tokens": 30, "seed": 1},
    ),
    "vectors": ("/v1/embeddings", {"input": ["Hello", "World"]}),
    "states": ("/v1/hidden_states", {"prompt": "Hello", "positions": [0, -1]}),
    "with states": ("/v1/completions", {"prompt": "Hello", "return_hidden_states": {"positions": [-1]}, **GREEDY}),
}


def without_names(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def test_every_kind_of_request_has_the_answer_of_a_single_front_end(server, folder):
    with serving(folder) as single, each_front_end(single, 1, None) as (alone,):
        expected = {name: without_names(alone.post(path, **body)) for name, (path, body) in KINDS.items()}
    with each_front_end(server) as front_ends:
        for one in front_ends:
            for name, (path, body) in KINDS.items():
                found = without_names(one.post(path, **body))
                found.get("usage", {}).pop("prompt_tokens_details", None)
                expected[name].get("usage", {}).pop("prompt_tokens_details", None)
                assert found == expected[name], name


def test_a_request_that_runs_is_waited_for_or_forked_through_another_front_end(server):
    long = {**GREEDY, "max_tokens": 150}
    with each_front_end(server) as (first, second):
        whole = text_of(first.post("/v1/completions", prompt="There was", **{**long, "max_tokens": 158}))
        stream = first.begin("/v1/completions", prompt="There was", request_id="long", stream=True, **long)
        stream.read(1)
        status, answer = second.ask(
            "POST", "/v1/completions", {"model": MODEL, "prompt": "x", "request_id": "long", **GREEDY}
        )
        assert status == 400 and "in use" in answer["error"]["message"], "an id is the service's"
        now = second.post("/v1/completions", continuation_of="long", continuation_wait=False, **GREEDY)
        assert text_of(now) in whole
        waited = second.post("/v1/completions", continuation_of="long", **GREEDY)
        assert whole.endswith(text_of(waited))
        stream.read()


def test_conversations_are_those_of_the_service(server):
    hello = {"role": "user", "content": "Hello"}
    with each_front_end(server) as (first, second):
        made = first.post("/v1/conversations", items=[hello])["id"]
        answered = second.post("/v1/responses", input="Who?", conversation=made, max_output_tokens=6)
        following = first.post("/v1/responses", input="And?", conversation=made, max_output_tokens=6)
        assert following["continuation"]["parent"] == answered["id"]
        added = second.post(f"/v1/conversations/{made}/items", items=[{**hello, "content": "x"}])["first_id"]
        path = f"/v1/conversations/{made}/items?order=asc"
        assert first.get(path) == second.get(path)
        roles = [item["role"] for item in first.get(path)["data"]]
        assert roles == ["user", "user", "assistant", "user", "assistant", "user"]
        items = second.get(f"/v1/responses/{following['id']}/input_items?order=asc")["data"]
        assert [item["role"] for item in items] == ["user", "user", "assistant", "user"], "as it was then"
        assert first.ask("DELETE", f"/v1/conversations/{made}/items/{added}")[0] == 200
        assert first.ask("DELETE", f"/v1/conversations/{made}/items/{added}")[0] == 404
        assert len(second.get(path)["data"]) == 5
        begun = second.post("/v1/responses", input="Later", conversation=made, max_output_tokens=6, background=True)
        wait_until("it ends", lambda: first.get(f"/v1/responses/{begun['id']}")["status"] == "incomplete")
        assert len(first.get(path)["data"]) == 7
        assert first.post(f"/v1/conversations/{made}", metadata={"a": "b"}) == second.get(f"/v1/conversations/{made}")
        assert first.ask("GET", path, key=KEYS[1])[0] == 404
        assert second.ask("DELETE", f"/v1/conversations/{made}")[0] == 200
        assert first.ask("GET", f"/v1/conversations/{made}")[0] == 404


def test_responses_are_those_of_the_service(server):
    with each_front_end(server) as (first, second):
        made = first.post("/v1/responses", input="Hello", max_output_tokens=6)
        assert second.get(f"/v1/responses/{made['id']}") == made
        following = second.post("/v1/responses", input="And?", previous_response_id=made["id"], max_output_tokens=6)
        assert following["continuation"]["parent"] == made["id"]
        items = first.get(f"/v1/responses/{following['id']}/input_items?order=asc")["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        item = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert first.post("/v1/responses", input=[item, {"role": "user", "content": "x"}], max_output_tokens=2)
        assert first.ask("GET", f"/v1/responses/{made['id']}", key=KEYS[1])[0] == 404
        assert second.ask("DELETE", f"/v1/responses/{made['id']}")[0] == 200
        assert first.ask("GET", f"/v1/responses/{made['id']}")[0] == 404


def read_events(data: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]


def test_a_response_in_the_background_is_followed_and_cancelled_through_another_front_end(server):
    with each_front_end(server) as (first, second):
        made = first.post("/v1/responses", input="Hello", max_output_tokens=300, background=True)
        found = second.get(f"/v1/responses/{made['id']}")
        assert found["status"] in ("queued", "in_progress", "completed", "incomplete")
        status, ended = second.ask("POST", f"/v1/responses/{made['id']}/cancel")
        assert status == 200 and ended["status"] in ("cancelled", "completed", "incomplete")
        whole = first.begin("/v1/responses", input="Hello", max_output_tokens=40, background=True, stream=True)
        events = read_events(whole.read().decode())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response_id = events[0]["response"]["id"]
        again = second.get(f"/v1/responses/{response_id}?stream=true&starting_after=4")
        assert read_events(again) == events[5:]


def test_keys_share_one_queue(server):
    """With 8 places, one key that holds all of them through one front end leaves none for itself in the other."""
    held = {"prompt": ["a"] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with each_front_end(server) as (first, second):
        stream = first.begin("/v1/completions", **held)
        stream.read(1)
        status, answer = second.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "b", **GREEDY})
        assert status == 429 and "8 prompts are unfinished" in answer["error"]["message"]
        body = {"model": MODEL, "prompt": "b", **GREEDY}
        assert second.ask("POST", "/v1/completions", body, KEYS[1])[0] == 200, "another key has its share"
        first.close()
        wait_until("the places are free", lambda: second.ask("POST", "/v1/completions", body)[0] == 200)


def test_a_request_is_seen_and_aborted_through_another_front_end(server):
    with each_front_end(server) as (first, second):

        def snapshot(key: str) -> dict[str, Any]:
            status, events = second.ask("GET", "/v1/engine/events?count=1", key=key)
            assert status == 200
            return read_events(events)[0]

        answers = []
        body = {"model": MODEL, "prompt": "There was", **GREEDY}
        assert second.ask("POST", "/admin/pause", key="root")[0] == 200
        asking = threading.Thread(target=lambda: answers.append(first.ask("POST", "/v1/completions", body)))
        asking.start()
        try:
            wait_until("the request is shown", lambda: snapshot(KEYS[0])["requests"])
            everything = snapshot("root")
            (shown,) = everything["requests"]
            assert (shown["owner"], shown["state"], everything["scope"]) == ("key 1", "waiting", "all")
            assert len(everything["engines"]) >= 2 and all(engine["blocks"] for engine in everything["engines"])
            assert snapshot(KEYS[1])["requests"] == []
            path = f"/v1/engine/requests/{shown['id']}"
            assert second.ask("DELETE", path, key=KEYS[1])[0] == 404, "another key's"
            assert second.ask("DELETE", path, key="root")[0] == 200
            asking.join(PATIENCE)
            ((status, answer),) = answers
            assert (status, answer["error"]["code"]) == (409, "request_aborted")
        finally:
            assert second.ask("POST", "/admin/resume", key="root")[0] == 200
        wait_until("it is gone", lambda: not snapshot("root")["requests"])


def test_metrics_are_one_sum(server):
    with each_front_end(server) as (first, second):
        before = sums(first.get("/metrics"))
        first.post("/v1/completions", prompt="x", **GREEDY)
        second.post("/v1/completions", prompt="y", **GREEDY)
        pages = [sums(one.get("/metrics")) for one in (first, second)]
        for name in ("ratoon_generation_tokens_total", 'ratoon_requests_finished_total{reason="length"}'):
            step = 16 if "tokens" in name else 2
            assert [page[name] - before[name] for page in pages] == [step, step]
        assert pages[0]['ratoon_engine_up{engine="1"}'] == 1


def test_an_engine_that_one_front_end_adds_is_known_to_all(server):
    with each_front_end(server) as (first, second):
        status, refused = second.ask("POST", "/v1/completions", {"prompt": "x", "data_parallel_rank": 64, **GREEDY})
        assert status == 400 and refused["error"]["param"] == "data_parallel_rank"
        status, added = first.ask("POST", "/admin/replicas", key="root")
        assert status == 200, added
        expected = first.post("/v1/completions", prompt="x", data_parallel_rank=0, **GREEDY)
        answer = second.post("/v1/completions", prompt="x", data_parallel_rank=added["index"], **GREEDY)
        assert text_of(answer) == text_of(expected)


# ---- processes that die ----


def test_requests_of_an_engine_that_dies_are_replayed(server):
    long = {**GREEDY, "max_tokens": 300}
    with each_front_end(server) as (first, second):
        expected = text_of(first.post("/v1/completions", prompt="There was", **long))
        stream = first.begin("/v1/completions", prompt="There was", stream=True, data_parallel_rank=1, **long)
        begun = stream.readline()
        os.kill(second.get("/health")["engines"][1]["pid"], signal.SIGKILL)
        chunks = read_events((begun + stream.read()).decode())
        assert "".join(text_of(chunk) for chunk in chunks if chunk["choices"]) == expected
        restarted = 'ratoon_engine_restarts{engine="1"}'
        assert sums(second.get("/metrics"))[restarted] == 1


def beside(other: FrontEnd, server: Server) -> FrontEnd:
    """Another connection to the same front end."""
    while True:
        found = FrontEnd(server, None)
        if found.pid == other.pid:
            return found
        found.close()


def test_a_front_end_that_dies_loses_its_connections_only(folder):
    with serving(folder, "--api-servers", "2", "--admin", "--admin-key", "root") as server:
        with each_front_end(server, key=None) as (victim, other):
            made = victim.post("/v1/responses", input="Hello", max_output_tokens=6)
            root = victim.post("/v1/completions", prompt="Once", request_id="once", **GREEDY)
            body = {"input": "Tell me more", "max_output_tokens": 400, "ignore_eos": True, "temperature": 0}
            slow = victim.begin("/v1/responses", background=True, stream=True, **body)
            streamed = beside(victim, server)
            quiet = streamed.post("/v1/responses", background=True, **body)["id"]
            logprobs = {"include": ["message.output_text.logprobs"]}
            with_logprobs = streamed.post("/v1/responses", background=True, **body, **logprobs)["id"]
            lost = streamed.begin("/v1/completions", prompt="x", stream=True, **{**GREEDY, "max_tokens": 480})
            lost.read(1)
            seen = b""
            while seen.count(b"\n\n") < 12:
                seen += slow.readline()
            begun = read_events(seen.decode())
            response_id = begun[0]["response"]["id"]
            assert other.ask("POST", "/admin/pause", key="root")[0] == 200
            os.kill(victim.pid, signal.SIGKILL)
            assert other.get(f"/v1/responses/{response_id}")["status"] == "in_progress"
            assert other.ask("POST", "/admin/resume", key="root")[0] == 200
            rest = read_events(
                other.get(f"/v1/responses/{response_id}?stream=true&starting_after={begun[-1]['sequence_number']}")
            )
            assert rest[0]["sequence_number"] == begun[-1]["sequence_number"] + 1
            events = begun + rest
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            ended = other.get(f"/v1/responses/{response_id}")
            assert ended["status"] == "incomplete" and ended["usage"]["output_tokens"] == 400
            wait_until("the other ends", lambda: other.get(f"/v1/responses/{quiet}")["status"] == "incomplete")
            assert other.get(f"/v1/responses/{quiet}")["output"][0]["content"] == ended["output"][0]["content"]
            wait_until(
                "and so does this", lambda: other.get(f"/v1/responses/{with_logprobs}")["status"] == "incomplete"
            )
            (scored,) = other.get(f"/v1/responses/{with_logprobs}")["output"][0]["content"]
            assert scored["text"] == ended["output"][0]["content"][0]["text"]
            assert [scored] == other.post("/v1/responses", **body, **logprobs)["output"][0]["content"]
            text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            assert text == ended["output"][0]["content"][0]["text"]
            assert text == other.post("/v1/responses", **body)["output"][0]["content"][0]["text"], "as without a death"
            assert {event["item_id"] for event in events if "item_id" in event} == {ended["output"][0]["id"]}
            assert other.get(f"/v1/responses/{made['id']}") == made
            rest_of_root = other.post("/v1/completions", continuation_of="once", **GREEDY)
            assert rest_of_root["continuation"]["parent"] == root["id"]

            def is_idle() -> bool:
                stats = other.ask("GET", "/admin/stats", key="root")[1]
                return stats["num_unfinished_requests"] == 0 and stats["engines"][0]["num_running"] == 0

            wait_until("what the lost connection asked for is aborted", is_idle)
        with each_front_end(server, key=None) as front_ends:
            assert victim.pid not in [one.pid for one in front_ends], "another has taken its place"
        server.stop()
        assert server.wait() == 0


def test_the_service_takes_everything_with_it(folder):
    with serving(folder, "--api-servers", "2") as server:
        with each_front_end(server, key=None) as front_ends:
            pids = [one.pid for one in front_ends]
            pids += [engine["pid"] for engine in front_ends[0].get("/health")["engines"]]
        server.stop(signal.SIGKILL)
        server.wait()
        wait_until("all processes end", lambda: not any(map(is_running, pids)))


def test_running_requests_have_time_at_shutdown(folder):
    with serving(folder, "--api-servers", "2") as server:
        with each_front_end(server, key=None) as (first, second):
            answers: list[Any] = []
            body = {"prompt": "x", "ignore_eos": True, "max_tokens": 300}
            asking = threading.Thread(target=lambda: answers.append(first.post("/v1/completions", **body)))
            asking.start()

            def runs() -> bool:
                return any(engine["num_running"] for engine in second.get("/health")["engines"])

            wait_until("it runs", runs)
            server.stop()
            asking.join()
            assert answers[0]["usage"]["completion_tokens"] == 300
        assert server.wait() == 0


def test_a_second_signal_ends_everything_at_once(folder):
    with serving(folder, "--api-servers", "2") as server, each_front_end(server, key=None) as (first, second):
        stream = first.begin("/v1/completions", prompt="x", stream=True, **{**GREEDY, "max_tokens": 490})
        stream.read(1)
        assert second.ask("GET", "/health")[0] == 200
        os.kill(second.get("/health")["engines"][0]["pid"], signal.SIGSTOP)  # so that the stream does not end
        server.stop()
        wait_until("it drains", lambda: second.ask("GET", "/health")[1]["status"] == "shutting down")
        server.stop(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        wait_until("the front ends end", lambda: not is_running(first.pid) and not is_running(second.pid))


def test_a_model_that_can_not_be_read_is_one_error(tmp_path):
    with pytest.raises(AssertionError, match="error: "), serving(tmp_path / "none", "--api-servers", "2"):
        pass


def test_bodies_need_room_in_each_front_end(folder):
    with (
        pytest.raises(AssertionError, match="front ends"),
        serving(folder, "--api-servers", "2", "--max-total-body", "100MiB"),
    ):
        pass
