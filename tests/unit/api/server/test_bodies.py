"""Bodies: whatever a client sends is answered with a 400 that says what is wrong, never with a 500."""

from __future__ import annotations

import json

import pytest

from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

GOOD = {"model": MODEL, "prompt": "x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\\udc00\\ud800"}',
        b'{"model": "tiny", "\\ud800": 1}',
        b'{"model": "tiny", "prompt": "x", "seed": 1%s}' % (b"0" * 30),
        b'{"model": "tiny", "prompt": "x", "seed": 1%s}' % (b"0" * 5000),
        b'{"model": "tiny", "prompt": "x", "temperature": 1%s}' % (b"0" * 4000),
        b'{"model": "tiny", "prompt": [1%s]}' % (b"0" * 30),
        b'{"model": "tiny", "prompt": "x", "prompt": "y"}',
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b'{"model": "tiny", "prompt": "x"} trailing',
        b"{'model': 'tiny'}",
        b"[" * 100_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
@on_event_loop
async def test_what_is_no_proper_json_is_refused(body):
    async with scripted() as client:
        answer = await client.post("/v1/completions", body)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert len(answer.body) < 500


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
@on_event_loop
async def test_values_may_be_nested_to_any_depth_that_json_allows(path):
    """Deep enough to be parsed, too deep for what would walk it with recursion."""
    deep = json.loads("[" * 900 + "]" * 900)
    conversation = [{"role": "user", "content": "x", "extra": deep}]
    bodies = [
        {"model": MODEL, "prompt": deep, "input": deep, "tokens": deep},
        {"model": MODEL, "messages": conversation, "chat_template_kwargs": {"deep": deep}},
        {"model": MODEL, "messages": deep},
        {"model": MODEL, "messages": conversation, "tools": [{"type": "function", "function": {"deep": deep}}]},
    ]
    async with scripted(say("x"), lenient=True, template="{{ tools | tojson }}{{ messages | tojson }}x") as client:
        for body in bodies:
            answer = await client.post(path, body)
            assert answer.status in (200, 400), answer.body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("n", "1"),
        ("stream", "true"),
        ("stream", 1),
        ("echo", 0),
        ("seed", 1.5),
        ("logit_bias", []),
        ("logit_bias", {"1": "2"}),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("bad_words", "x"),
        ("cache_salt", 5),
        ("request_id", 5),
        ("model", 5),
        ("model", ""),
        ("user", {}),
    ],
)
@on_event_loop
async def test_types_are_strict(field, value):
    async with scripted() as client:
        answer = await client.post("/v1/completions", {**GOOD, field: value})
        assert answer.status == 400
        assert answer.error["param"].startswith(field)


@on_event_loop
async def test_missing_fields_are_named():
    async with scripted() as client:
        assert (await client.post("/v1/completions", {"model": MODEL})).error["param"] == "prompt"
        assert (await client.post("/v1/chat/completions", {"model": MODEL})).error["param"] == "messages"


@on_event_loop
async def test_values_that_ask_for_nothing_are_accepted():
    async with scripted(say("x")) as client:
        answer = await client.complete(
            prompt="x", echo=False, best_of=1, n=1, suffix="", whatever=None, response_format={"type": "text"},
            store=False, metadata={"a": "b"}, service_tier="auto", user="me", stream_options={"include_usage": False},
            use_beam_search=False, length_penalty=1.0, early_stopping=False, beam_width=1,
        )  # fmt: skip
        assert answer.status == 200, answer.body
        assert (await client.complete(prompt="x", best_of=True)).status == 400
        assert (await client.complete(prompt="x", store=True)).error["param"] == "store"
        assert (await client.post("/v1/embeddings", {"model": MODEL, "input": "x", "whatever": None})).status != 400


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/completions", {"n": 0}, "n", "n: 0 is out of range; expected a whole number of at least 1"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens", "max_tokens: is out of range; at least 0"),
        ("/v1/completions", {"seed": 2**70}, "seed", "seed: is out of range; at most 18446744073709551615"),
        ("/v1/completions", {"request_id": "a b"}, "request_id", "request_id: is not an id; 1 to 128 characters"),
        ("/v1/completions", {"model": ""}, "model", "model: is too short; at least 1 characters"),
        ("/v1/completions", {"service_tier": "x"}, "service_tier", "service_tier: is unknown; 'auto', 'default'"),
        ("/v1/completions", {"use_beam_search": True, "best_of": 9999}, "best_of", "best_of: 9999 is out of range"),
        (
            "/v1/completions",
            {"stream_options": {"include_usages": 1}},
            "stream_options.include_usages",
            "stream_options.include_usages: is not a field of this request; did you mean include_usage?",
        ),
        ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: the key 'x' is not a token id"),
        ("/v1/completions", {"return_hidden_states": {"dtype": "x"}}, "return_hidden_states.dtype", "is unknown; 'fl"),
        ("/v1/chat/completions", {"messages": []}, "messages", "messages: has too few entries; at least 1"),
        ("/v1/embeddings", {"encoding_format": "x"}, "encoding_format", "is unknown; 'float' or 'base64'"),
        ("/v1/requests?limit=0", None, "limit", "limit: is out of range; at least 1"),
        ("/v1/requests?limit=x", None, "limit", "limit: is not a whole number"),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]", "is out of range; less than 2147483648"),
    ],
)
@on_event_loop
async def test_problems_are_told_in_words_of_our_own_at_the_right_place(path, fields, param, message):
    async with scripted() as client:
        required = {"model": MODEL, "prompt": "x"}
        if "chat" in path:
            required = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        elif "embeddings" in path:
            required = {"model": MODEL, "input": "x"}
        elif "tokenize" in path:
            required = {}
        answer = await (client.get(path) if fields is None else client.post(path, {**required, **fields}))
        assert (answer.status, answer.error["param"]) == (400, param)
        assert message in answer.error["message"]
        assert not any(word in answer.error["message"].lower() for word in ("input should", "pydantic", "valid "))


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/xml"])
@on_event_loop
async def test_a_body_must_say_that_it_is_json(content_type):
    """A web page can send the other types to a server on the same machine without being asked for permission."""
    async with scripted() as client:
        headers = {} if content_type is None else {"content-type": content_type}
        assert (await client.post("/v1/completions", GOOD, headers=headers)).status == 415


@on_event_loop
async def test_json_has_more_than_one_name():
    async with scripted(say("x")) as client:
        for name in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
            assert (await client.post("/v1/completions", GOOD, headers={"content-type": name})).status == 200
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        assert (await client.post("/v1/completions", GOOD, headers=packed)).status == 415


@on_event_loop
async def test_escaped_characters_beyond_the_first_plane_are_fine():
    async with scripted(say("x")) as client:
        answer = await client.post("/v1/completions", b'{"model": "tiny", "prompt": "\\ud83d\\ude42"}')
        assert answer.json()["usage"]["prompt_tokens"] == 4
