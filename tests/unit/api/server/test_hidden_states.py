"""/v1/hidden_states and return_hidden_states over an engine that is played: forms of the answer, large ones, errors."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load

from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.protocol.hidden_states import HiddenStatesAnswer
from ratoon.core.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnknownParentError,
)
from ratoon.core.outputs import HiddenStatesOutput
from ratoon.core.params import HiddenStatesParams
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

PATH = "/v1/hidden_states"
JSON_TYPE = {"content-type": "application/json"}
FILE_TYPE = "application/octet-stream"
NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def states(dtype="float32", shape=(2, 3, 8), **fields):
    numbers = np.arange(np.prod(shape)).reshape(shape).astype(NUMPY[dtype])
    told = {
        "layers": [0, "norm"],
        "positions": [4, 0, 4],
        "token_ids": [104, 100, 104],
        "computed_tokens": 5,
        "num_cached_tokens": 16,
        "source": "lease",
    }
    return HiddenStatesOutput(**{"request_id": "x", "tensor": numbers, "dtype": dtype, **told, **fields})


@asynccontextmanager
async def extracting(result, **settings):
    """A server whose engine answers extractions with `result`, or raises it. Yields the client and the calls."""
    calls = []

    async def extract_hidden_states(prompt=None, params=None, request_id=None, **options):
        calls.append((prompt, params, request_id, options))
        if isinstance(result, Exception):
            raise result
        return result

    async with scripted(**settings) as client:
        client.context.llm.extract_hidden_states = extract_hidden_states
        yield client, calls


async def ask(client, headers=None, **fields):
    return await client.post(PATH, {"model": MODEL, **fields}, headers={**JSON_TYPE, **(headers or {})})


async def watch_turns(opened):
    """The answer to a request. No slice of it is large, and between two of them everybody else has a turn."""
    num_sent = []
    while not opened.task.done():
        num_sent.append(len(opened.sent))
        await asyncio.sleep(0)
    bodies = [message["body"] for message in opened.sent[1:]]
    assert all(isinstance(body, bytes) and len(body) <= 2**20 for body in bodies) and len(bodies) > 30
    assert max(np.diff(num_sent)) <= 3  # the head and the first slice go together, and the last two
    return await opened.answer()


# ---- what is asked ----


@on_event_loop
async def test_what_is_asked_reaches_the_engine():
    async with extracting(states()) as (client, calls):
        await ask(client, prompt="abc")
        asked = {"positions": [0, [1, 3], [2, None]], "scope": "prompt", "layers": [0, "norm", -1], "dtype": "float16"}
        await ask(client, prompt=[1, 2], cache_salt="mine", request_id="mine", deadline=2, **asked)
        (prompt, params, request_id, options), second = calls
        assert prompt == {"prompt": "abc", "prompt_token_ids": [97, 98, 99]}
        assert params == HiddenStatesParams(each_once=True) and request_id.startswith("hs-")
        assert options == {"adapter": None, "cache_salt": None, "owner": None, "trace_headers": None}
        assert second[0]["prompt_token_ids"] == [1, 2] and second[2] == "hs-mine"
        assert second[1] == HiddenStatesParams(deadline=2, each_once=True, **asked)
        assert second[3]["cache_salt"] == "mine"


@on_event_loop
async def test_an_ended_request_is_named_by_its_id():
    async with extracting(states()) as (client, calls):
        answer = (await client.complete(prompt="abc", request_id="x", n=2, temperature=1)).json()
        assert (
            await ask(client, original_request_id=answer["id"], choice=1, layers="all", positions="all")
        ).status == 200
        ((prompt, params, _, options),) = calls
        assert prompt is None and params == HiddenStatesParams(layers="all", positions="all", each_once=True)
        assert options.items() >= {"original_request_id": "cmpl-x", "choice": 1, "owner": None}.items()


# ---- what is answered ----


@pytest.mark.parametrize("dtype", NUMPY)
@on_event_loop
async def test_json_has_the_numbers_as_base64(dtype):
    output = states(dtype)
    async with extracting(output) as (client, _):
        answer = await ask(client, prompt="abcde", request_id="x")
        body = answer.json()
        HiddenStatesAnswer.model_validate(body)
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
        data = np.frombuffer(base64.b64decode(body.pop("data")), NUMPY[dtype]).reshape(body["shape"])
        np.testing.assert_array_equal(data, output.tensor)
        assert body == {
            "id": "hs-x",
            "object": "hidden_states",
            "model": MODEL,
            "dtype": dtype,
            "shape": [2, 3, 8],
            "layers": [0, "norm"],
            "positions": [4, 0, 4],
            "token_ids": [104, 100, 104],
            "computed_tokens": 5,
            "cached_tokens": 16,
            "source": "lease",
        }


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("media_type", [FILE_TYPE, "application/x-safetensors"])
@on_event_loop
async def test_a_client_that_accepts_files_gets_safetensors(dtype, media_type, tmp_path):
    output = states(dtype, source=None)
    async with extracting(output) as (client, _):
        answer = await ask(client, {"accept": media_type}, prompt="abcde", request_id="x")
    assert answer.headers["content-type"] == media_type
    assert int(answer.headers["content-length"]) == len(answer.body)
    from safetensors import safe_open

    file = tmp_path / "states.safetensors"
    file.write_bytes(answer.body)
    with safe_open(file, "pt") as opened:
        assert opened.keys() == ["hidden_states"]
        tensor, notes = opened.get_tensor("hidden_states"), opened.metadata()
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.shape == (2, 3, 8)
    import torch

    same_bytes = tensor.view(torch.int16 if dtype != "float32" else torch.int32).numpy()
    np.testing.assert_array_equal(same_bytes, output.tensor.view(same_bytes.dtype))
    assert {name: json.loads(notes[name]) for name in ("layers", "positions", "token_ids", "computed_tokens")} == {
        "layers": [0, "norm"],
        "positions": [4, 0, 4],
        "token_ids": [104, 100, 104],
        "computed_tokens": 5,
    }
    assert notes["id"] == "hs-x" and notes["model"] == MODEL and "source" not in notes


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", "application/json"),
        ("text/html", "application/json"),
        ("", "application/json"),
        ("application/json, application/octet-stream", "application/json"),
        ("application/octet-stream, application/json", FILE_TYPE),
        ("application/json;q=0.5, Application/Octet-Stream; q=0.9", FILE_TYPE),
        ("application/octet-stream;q=0, */*", "application/json"),
        ("application/octet-stream;q=nonsense", "application/json"),
    ],
)
@on_event_loop
async def test_the_form_is_the_one_that_the_client_likes_best(accept, expected):
    async with extracting(states()) as (client, _):
        assert (await ask(client, {"accept": accept}, prompt="x")).headers["content-type"] == expected


@on_event_loop
async def test_an_array_in_another_order_and_an_empty_one_come_as_they_are():
    turned = np.arange(24, dtype=np.float32).reshape(8, 3, 1).T
    empty = np.zeros((1, 0, 8), np.float32)
    for numbers in (turned, empty):
        async with extracting(replace(states(), tensor=numbers)) as (client, _):
            file = (await ask(client, {"accept": FILE_TYPE}, prompt="x")).body
            np.testing.assert_array_equal(load(file)["hidden_states"], numbers)
            data = base64.b64decode((await ask(client, prompt="x")).json()["data"])
            np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(numbers.shape), numbers)


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["application/json", FILE_TYPE])
@on_event_loop
async def test_others_have_their_turn_while_a_large_answer_goes_out(accept):
    output = states(shape=(4, 1000, 2048))  # 32 MB
    async with extracting(output) as (client, _):
        opened = client.open("POST", PATH, {"model": MODEL, "prompt": "x"}, headers={**JSON_TYPE, "accept": accept})
        answer = await watch_turns(opened)
        if accept == FILE_TYPE:
            np.testing.assert_array_equal(load(answer.body)["hidden_states"], output.tensor)
        else:
            assert base64.b64decode(answer.json()["data"]) == output.tensor.tobytes()


@on_event_loop
async def test_a_client_that_goes_away_amid_a_large_answer_stops_it():
    async with extracting(states(shape=(4, 1000, 2048))) as (client, _):
        opened = client.open("POST", PATH, {"model": MODEL, "prompt": "x"})
        await opened.sent_something()
        opened.disconnect()
        await opened.task
        assert len(opened.sent) < 30


# ---- errors ----


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (RequestError("positions", "9 is out of range", "-5 to 4"), 400, "positions", None),
        (RequestError("layers", "9 is out of range", "0 to 2"), 400, "layers", None),
        (RequestError("choice", "there is no choice 3"), 400, "choice", None),
        (RequestError("prompt_token_ids[3]", "is not in the vocabulary"), 400, "prompt[3]", None),
        (TooLargeError("positions", "1000 bytes", "512 at most"), 413, "positions", "answer_too_large"),
        (QueueFullError("hidden_states", "1024 wait already"), 429, None, "queue_full"),
        (DeadlineError("deadline", "0.1 seconds are over"), 504, "deadline", "deadline_exceeded"),
        (EngineError("it broke"), 500, None, "generation_failed"),
        (EngineDeadError("gone"), 503, None, "engine_dead"),
    ],
)
@on_event_loop
async def test_every_refusal_has_its_status_and_its_code(error, status, param, code):
    async with extracting(error) as (client, _):
        answer = await ask(client, prompt="abc")
        assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)
        assert getattr(error, "problem", "") in answer.error["message"]
        assert ("retry-after" in answer.headers) == (status == 429)
        assert (await ask(client, {"accept": FILE_TYPE}, prompt="abc")).error == answer.error  # errors are JSON
        assert client.context.num_unfinished == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "original_request_id": "cmpl-x"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["several", "texts"]}, "prompt"),
        ({"prompt": [1, 9999]}, "prompt"),
        ({"prompt": "x" * 513}, "prompt"),
        ({"prompt": "x", "choice": 0}, "choice"),
        ({"original_request_id": "cmpl-x", "add_special_tokens": True}, "add_special_tokens"),
        ({"original_request_id": "cmpl-x", "choice": -1}, "choice"),
        ({"original_request_id": 5}, "original_request_id"),
        ({"prompt": "x", "dtype": "float8"}, "dtype"),
        ({"prompt": "x", "scope": "answer"}, "scope"),
        ({"prompt": "x", "deadline": 0}, "deadline"),
        ({"prompt": "x", "deadline": "soon"}, "deadline"),
        ({"prompt": "x", "positions": "last"}, "positions"),
        ({"prompt": "x", "positions": True}, "positions"),
        ({"prompt": "x", "positions": 1.5}, "positions"),
        ({"prompt": "x", "positions": [[1, 2, 3]]}, "positions"),
        ({"prompt": "x", "positions": [[None, 2]]}, "positions"),
        ({"prompt": "x", "positions": [10**40]}, "positions"),
        ({"prompt": "x", "layers": "last"}, "layers"),
        ({"prompt": "x", "layers": ["all"]}, "layers"),
        ({"prompt": "x", "layers": [[0, 2]]}, "layers"),
        ({"prompt": "x", "layers": [True]}, "layers"),
        ({"prompt": "x", "layer": 3}, "layer"),
        ({"prompt": "x", "request_id": "no spaces"}, "request_id"),
    ],
)
@on_event_loop
@pytest.mark.one_in(3)
async def test_what_is_wrong_is_named_and_never_reaches_the_engine(fields, param):
    async with extracting(states()) as (client, calls):
        answer = await ask(client, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert not calls and len(answer.body) < 1000


@on_event_loop
async def test_bodies_and_models_are_checked_as_everywhere():
    async with extracting(states(), max_body=1000) as (client, _):
        assert (await client.post(PATH, b"{")).error["code"] == "invalid_json"
        assert (await client.post(PATH, b"{}", headers={})).status == 415
        assert (await ask(client, prompt="x" * 2000)).error["code"] == "body_too_large"
        assert (await client.post(PATH, {"model": "other", "prompt": "x"})).error["code"] == "model_not_found"


@on_event_loop
async def test_extractions_count_as_unfinished_prompts():
    async with extracting(states(), max_queue=1) as (client, _):
        assert client.context.shared.queue.limit.take(None, 1)
        assert (await ask(client, prompt="x")).error["code"] == "queue_full"
        client.context.shared.queue.limit.give_back(None, 1)
        assert (await ask(client, prompt="x")).status == 200


# ---- whose they are ----


def with_key(key):
    return {"authorization": f"Bearer {key}"}


@on_event_loop
async def test_another_key_gets_what_an_unknown_id_gets():
    async with extracting(states(), api_keys=("mine", "yours")) as (client, calls):
        body = {"model": MODEL, "prompt": "x", "request_id": "x"}
        await client.post("/v1/completions", body, headers={**JSON_TYPE, **with_key("mine")})
        assert (await ask(client, with_key("mine"), original_request_id="cmpl-x")).status == 200
        assert calls[-1][3]["owner"] is not None
        other = await ask(client, with_key("yours"), original_request_id="cmpl-x")
        unknown = await ask(client, with_key("yours"), original_request_id="cmpl-y")
        assert (other.status, other.error["code"]) == (404, "request_not_found")
        assert other.error["param"] == "original_request_id"
        assert other.body.replace(b"cmpl-x", b"cmpl-y") == unknown.body
        assert len(calls) == 1


@on_event_loop
async def test_another_salt_is_another_tenant_and_one_that_goes_meanwhile_is_gone():
    async with extracting(UnknownParentError("original_request_id", "there is none")) as (client, calls):
        await client.complete(prompt="x", request_id="x", cache_salt="mine")
        for salt in ("yours", None):
            assert (await ask(client, original_request_id="cmpl-x", cache_salt=salt)).status == 404
        assert not calls
        answer = await ask(client, original_request_id="cmpl-x", cache_salt="mine")
        assert (answer.status, answer.error["code"], len(calls)) == (404, "request_not_found", 1)


# ---- return_hidden_states ----


TWO_CHOICES = say("one", "another")


@asynccontextmanager
async def returning(*results, script=TWO_CHOICES, **settings):
    """A server whose engine adds these to the last output of a request, one for each choice."""
    async with scripted(script, **settings) as client:
        generate, asked = client.context.llm.generate, []

        async def with_states(prompt, params, *arguments, **options):
            asked.append(params.return_hidden_states)
            params = params.clone()
            params.return_hidden_states = None
            async for output in generate(prompt, params, *arguments, **options):
                if output.finished and asked[-1] is not None:
                    output.hidden_states = list(results)
                yield output

        client.context.llm.generate = with_states
        yield client, asked


@on_event_loop
async def test_an_answer_has_the_states_of_each_choice():
    first, second = states(), states(positions=[1, 2, 3])
    async with returning(first, second) as (client, asked):
        fields = {"n": 2, "temperature": 1, "return_hidden_states": {"layers": [0, "norm"], "scope": "output"}}
        body = (await client.complete(prompt="x", **fields)).json()
        Completion.model_validate(body)
        assert [choice["hidden_states"]["positions"] for choice in body["choices"]] == [[4, 0, 4], [1, 2, 3]]
        data = base64.b64decode(body["choices"][0]["hidden_states"]["data"])
        assert data == first.tensor.tobytes()
        body = (await client.chat("x", **fields)).json()
        ChatCompletion.model_validate(body)
        assert [choice["hidden_states"]["positions"] for choice in body["choices"]] == [[4, 0, 4], [1, 2, 3]]
        assert asked == [HiddenStatesParams(layers=[0, "norm"], scope="output", each_once=True)] * 2


@on_event_loop
async def test_true_asks_for_the_last_token_and_false_for_nothing():
    async with returning(states()) as (client, asked):
        for wish in (True, {}, False, None):
            answer = await client.complete(prompt="x", return_hidden_states=wish)
            assert ("hidden_states" in answer.json()["choices"][0]) == (asked[-1] is not None)
        assert asked == [HiddenStatesParams(each_once=True)] * 2 + [None, None]


@pytest.mark.parametrize("chat", [False, True])
@on_event_loop
async def test_a_streams_last_chunk_of_a_choice_has_its_states(chat):
    """The first choice ends early, when nobody has read its states yet: they come behind."""
    async with returning(states(), states(positions=[7, 8, 9]), script=say("a", "much longer")) as (client, _):
        fields = {"n": 2, "temperature": 1, "stream": True, "return_hidden_states": True, "max_tokens": 20}
        answer = await (client.chat("x", **fields) if chat else client.complete(prompt="x", **fields))
        events = answer.events()
        for event in events:
            (ChatCompletionChunk if chat else Completion).model_validate(event)
        last = {choice["index"]: choice for event in events for choice in event["choices"]}
        assert {index: choice["hidden_states"]["positions"] for index, choice in last.items()} == {
            0: [4, 0, 4],
            1: [7, 8, 9],
        }
        assert sum("hidden_states" in choice for event in events for choice in event["choices"]) == 2
        assert last[1]["finish_reason"] == "stop"


@on_event_loop
async def test_a_chat_of_one_token_has_them_behind_the_chunk_that_says_whose_words_follow():
    async with returning(states()) as (client, _):
        role, last = (await client.chat("x", stream=True, max_tokens=1, return_hidden_states=True)).events()
        assert "hidden_states" not in role["choices"][0]
        assert last["choices"][0]["finish_reason"] == "length" and "data" in last["choices"][0]["hidden_states"]


@on_event_loop
async def test_states_of_a_batch_stand_with_their_prompts():
    async with returning(states()) as (client, _):
        body = (await client.complete(prompt=["a", "b"], return_hidden_states=True)).json()
        assert all(choice["hidden_states"]["shape"] == [2, 3, 8] for choice in body["choices"])
        events = (await client.complete(prompt=["a", "b"], return_hidden_states=True, stream=True)).events()
        places = [choice["index"] for event in events for choice in event["choices"] if "hidden_states" in choice]
        assert sorted(places) == [0, 1]


@on_event_loop
async def test_others_have_their_turn_while_a_large_stream_ends():
    output = states(shape=(4, 1000, 2048))
    async with returning(output) as (client, _):
        body = {"model": MODEL, "prompt": "x", "stream": True, "return_hidden_states": True}
        answer = await watch_turns(client.open("POST", "/v1/completions", body))
        found = [event["choices"][0].get("hidden_states") for event in answer.events()]
        assert base64.b64decode(found[-1]["data"]) == output.tensor.tobytes() and not any(found[:-1])


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ({"error": "late", "refusal": DeadlineError("deadline", "1 second is over")}, "deadline_exceeded"),
        ({"error": "full", "refusal": QueueFullError("hidden_states", "1024 wait")}, "queue_full"),
        ({"error": "NaN"}, "generation_failed"),
    ],
)
@on_event_loop
async def test_the_text_comes_even_if_its_states_can_not_be_read(failed, code):
    async with returning(states(), states(tensor=None, **failed)) as (client, _):
        fields = {"n": 2, "temperature": 1, "return_hidden_states": True}
        answer = await client.complete(prompt="x", **fields)
        Completion.model_validate(answer.json())
        first, second = answer.json()["choices"]
        assert (answer.status, first["text"], second["text"]) == (200, "one", "another")
        assert "data" in first["hidden_states"] and second["hidden_states"]["error"]["code"] == code
        events = (await client.complete(prompt="x", stream=True, **fields)).events()
        assert any(
            choice.get("hidden_states", {}).get("error", {}).get("code") == code
            for event in events
            for choice in event["choices"]
        )


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ("yes", "return_hidden_states"),
        (1, "return_hidden_states"),
        ([], "return_hidden_states"),
        ({"layer": 3}, "return_hidden_states.layer"),
        ({"position": 1}, "return_hidden_states.position"),
        ({"positions": "last"}, "return_hidden_states.positions"),
        ({"dtype": "int8"}, "return_hidden_states.dtype"),
        ({"deadline": -1}, "return_hidden_states.deadline"),
    ],
)
@on_event_loop
async def test_a_wrong_wish_is_named_by_its_place(wish, param):
    async with returning(states()) as (client, asked):
        for fields in ({}, {"stream": True}, {"use_beam_search": True, "beam_width": 2}):
            for answer in (
                await client.complete(prompt="x", return_hidden_states=wish, **fields),
                await client.chat("x", return_hidden_states=wish, **fields),
            ):
                assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert not asked


@on_event_loop
async def test_a_prompt_that_is_only_scored_returns_none():
    async with returning(states()) as (client, _):
        answer = await client.complete(prompt="x", echo=True, max_tokens=0, return_hidden_states=True)
        assert (answer.status, answer.error["param"]) == (400, "return_hidden_states")
