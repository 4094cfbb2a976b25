"""/v1/completions: what it says, whole and in pieces."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.api.server.protocol.completions import Completion
from tests.unit.api.server.harness import MAX_MODEL_LEN, MODEL, byte_tokenizer, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

MANY_BYTES = "naïve 你好, 世界 🙂👨‍👩‍👧 end"


def joined(events: list[dict], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


@on_event_loop
async def test_an_answer_has_openais_shape():
    async with scripted(say("Hi")) as client:
        answer = await client.complete(prompt="abc")
    assert answer.status == 200
    body = answer.json()
    Completion.model_validate(body)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hi", "stop", 256)
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.headers["x-request-id"]


@on_event_loop
async def test_the_answers_id_is_the_engine_requests_id():
    async with scripted(say("Hi")) as client:
        answer = await client.complete(prompt="abc", request_id="mine")
        assert answer.json()["id"] == "cmpl-mine"
        assert client.engine.core.added[0].external_id == "cmpl-mine"


@on_event_loop
async def test_a_request_id_goes_back_in_the_header():
    async with scripted(say("Hi")) as client:
        headers = {"content-type": "application/json", "x-request-id": "trace-1"}
        answer = await client.post("/v1/completions", {"model": MODEL, "prompt": "x"}, headers=headers)
        assert answer.headers["x-request-id"] == "trace-1"
        hostile = await client.get("/version", headers={"x-request-id": "a b\tc"})
        assert hostile.headers["x-request-id"] != "a b\tc"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        (["ab", [99]], [[97, 98], [99]]),
    ],
)
@on_event_loop
async def test_prompts_may_be_texts_or_token_ids_one_or_many(prompt, expected):
    async with scripted(say("x")) as client:
        answer = await client.complete(prompt=prompt)
        assert answer.status == 200
        assert [request.prompt_token_ids for request in client.engine.core.added] == expected


@pytest.mark.parametrize("prompt", [[], [[]], [True], [1.5], [-1], ["a", 1], [["a"]], 5, None, {}, [[1], [None]], ""])
@on_event_loop
async def test_what_is_no_prompt_is_refused_by_name(prompt):
    async with scripted() as client:
        answer = await client.complete(prompt=prompt)
        assert answer.status == 400
        assert answer.error["param"] == "prompt"


@on_event_loop
async def test_choices_are_numbered_prompt_by_prompt():
    async with scripted(lambda request, choice: [request.prompt_token_ids[0], 48 + choice, 256]) as client:
        whole = await client.complete(prompt=["a", "b"], n=3)
        texts = [(choice["index"], choice["text"]) for choice in whole.json()["choices"]]
        assert texts == [(0, "a0"), (1, "a1"), (2, "a2"), (3, "b0"), (4, "b1"), (5, "b2")]
        streamed = await client.complete(prompt=["a", "b"], n=3, stream=True)
        assert [(index, joined(streamed.events(), index)) for index in range(6)] == texts
        assert whole.json()["usage"]["completion_tokens"] == 18


@on_event_loop
async def test_pieces_join_to_the_whole_whatever_the_characters():
    async with scripted(say(MANY_BYTES, MANY_BYTES[::-1])) as client:
        whole = await client.complete(prompt="x", max_tokens=100, n=2)
        streamed = await client.complete(prompt="x", max_tokens=100, n=2, stream=True)
    texts = [choice["text"] for choice in whole.json()["choices"]]
    assert texts == [MANY_BYTES, MANY_BYTES[::-1]]
    events = streamed.events()
    assert [joined(events, 0), joined(events, 1)] == texts
    assert not any("\ufffd" in choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("max_tokens", range(1, 14))
@on_event_loop
async def test_pieces_join_to_the_whole_where_the_end_cuts_a_character(max_tokens):
    async with scripted(say("a🙂b你c")) as client:
        whole = await client.complete(prompt="x", max_tokens=max_tokens)
        streamed = await client.complete(prompt="x", max_tokens=max_tokens, stream=True)
    assert joined(streamed.events()) == whole.json()["choices"][0]["text"]


@pytest.mark.parametrize("include", [False, True])
@on_event_loop
async def test_a_stop_string_is_found_across_pieces_and_never_shown_by_half(include):
    async with scripted(say("one sto stop! two")) as client:
        fields = {"prompt": "x", "max_tokens": 50, "stop": ["stop!", "never"], "include_stop_str_in_output": include}
        whole = await client.complete(**fields)
        streamed = await client.complete(**fields, stream=True)
    (choice,) = whole.json()["choices"]
    assert choice["text"] == ("one sto stop!" if include else "one sto ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "stop!")
    events = streamed.events()
    assert joined(events) == choice["text"]
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "stop!")


@on_event_loop
async def test_usage_comes_at_the_end_of_a_stream_that_asks_for_it():
    async with scripted(say("abc")) as client:
        options = {"include_usage": True}
        events = (await client.complete(prompt="xy", stream=True, stream_options=options)).events()
        plain = (await client.complete(prompt="xy", stream=True)).events()
        options = {"continuous_usage_stats": True, "include_usage": True}
        continuous = (await client.complete(prompt="xy", stream=True, stream_options=options)).events()
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in events[:-1])
    assert not any("usage" in event for event in plain)
    assert [event["usage"]["completion_tokens"] for event in continuous] == [1, 2, 3, 4, 4]


@on_event_loop
async def test_an_echo_begins_with_the_prompt_whole_and_streamed():
    async with scripted(say("cd", "ef")) as client:
        whole = await client.complete(prompt="a🙂", echo=True, n=2)
        streamed = await client.complete(prompt="a🙂", echo=True, n=2, stream=True)
        ids = await client.complete(prompt=list("a🙂".encode()), echo=True)
        nothing = await client.complete(prompt="ab", echo=True, max_tokens=0)
    assert [choice["text"] for choice in whole.json()["choices"]] == ["a🙂cd", "a🙂ef"]
    assert [joined(streamed.events(), index) for index in (0, 1)] == ["a🙂cd", "a🙂ef"]
    assert ids.json()["choices"][0]["text"] == "a🙂cd"
    assert nothing.json()["choices"][0]["text"] == "ab"
    assert nothing.json()["choices"][0]["finish_reason"] == "length"
    assert nothing.json()["usage"]["completion_tokens"] == 0


@on_event_loop
async def test_token_ids_come_where_they_are_asked_for():
    async with scripted(say("hi")) as client:
        (choice,) = (await client.complete(prompt="ab", return_token_ids=True)).json()["choices"]
        assert choice["prompt_token_ids"] == [97, 98]
        assert choice["token_ids"] == [104, 105, 256]
        events = (await client.complete(prompt="ab", return_token_ids=True, stream=True)).events()
        choices = [event["choices"][0] for event in events]
        assert choices[0]["prompt_token_ids"] == [97, 98]
        assert [token for choice in choices for token in choice["token_ids"]] == [104, 105, 256]


@on_event_loop
async def test_every_sampling_field_reaches_the_engine():
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "seed": 5, "min_tokens": 1, "stop": ["q"],
        "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "allowed_token_ids": [1, 2, 3], "bad_words": ["zz"],
        "prompt_logprobs": 2, "logprobs": 3, "max_tokens": 4,
    }  # fmt: skip
    async with scripted(say("a" * 9, "b" * 9), policy="priority") as client:
        answer = await client.complete(prompt="x", **fields, logit_bias={"7": 1}, priority=4, cache_salt="s")
        assert answer.status == 200, answer.body
        (request,) = client.engine.core.added
    given = {name: getattr(request.params, name) for name in fields}
    assert given == fields
    assert request.params.logit_bias == {7: 1.0}
    assert (request.priority, request.cache_salt) == (4, "s")


@on_event_loop
async def test_what_is_left_out_or_null_has_the_models_default():
    async with scripted(say("a"), defaults={"temperature": 0.25, "top_k": 3, "max_new_tokens": 100}) as client:
        await client.complete(prompt="x", temperature=None, stop=None, stream=None)
        params = client.engine.core.added[0].params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 3, 100)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [None]}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"priority": 1}, "priority"),
        ({"data_parallel_rank": 7}, "data_parallel_rank"),
        ({"stream": True, "stream_options": {"includeusage": True}}, "stream_options.includeusage"),
        ({"seed": 2**64}, "seed"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words[0]"),
    ],
)
@on_event_loop
async def test_values_without_meaning_are_refused_by_name(fields, param):
    async with scripted() as client:
        answer = await client.complete(prompt="x", **fields)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert answer.error["type"] == "invalid_request_error"
        assert len(answer.body) < 1000
        assert not client.engine.core.added


@on_event_loop
async def test_a_prompt_that_is_too_long_has_openais_code():
    async with scripted(say("x")) as client:
        answer = await client.complete(prompt="x" * MAX_MODEL_LEN)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        of_many = await client.complete(prompt=["x", "y" * 5000])
        assert (of_many.error["param"], of_many.error["code"]) == ("prompt[1]", "context_length_exceeded")
        longest = await client.complete(prompt="x" * (MAX_MODEL_LEN - 1))
        assert longest.json()["choices"][0]["finish_reason"] == "length"


@on_event_loop
async def test_another_model_does_not_exist():
    async with scripted(served_names=("one", "two")) as client:
        answer = await client.complete(prompt="x", model="gpt-9")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        for name in ("one", "two"):
            assert (await client.complete(prompt="x", model=name)).json()["model"] == name
        assert (await client.complete(prompt="x", model=MODEL)).status == 404


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"]])
@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_a_request_id_in_use_is_refused(prompt, stream):
    async with scripted(by_hand=True) as client:
        body = {"model": MODEL, "prompt": prompt, "request_id": "twice"}
        first = client.open("POST", "/v1/completions", body)
        while not client.engine.core.added:
            await asyncio.sleep(0.001)
        second = await client.post("/v1/completions", {**body, "stream": stream})
        assert (second.status, second.error["param"]) == (400, "request_id")
        client.engine.step(10)
        assert (await first.answer()).status == 200


def test_the_test_tokenizer_has_a_token_for_each_byte():
    assert byte_tokenizer().encode("a🙂", add_special_tokens=False) == list("a🙂".encode())
