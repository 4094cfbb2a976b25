"""The server over a real engine with a tiny model of random weights: numbers that only a model can give."""

from __future__ import annotations

import base64
import struct
from contextlib import asynccontextmanager

import pytest

from ratoon.api.server.context import ServerContext
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from ratoon.api.server.protocol.completions import Completion
from ratoon.api.server.routes.embeddings import Embeddings
from ratoon.api.server.settings import ServerSettings
from tests.engines_async import thread_engine
from tests.unit.api.server.harness import MODEL, TINY_SETTINGS, Client, write_tiny_model
from tests.unit.engine.fakes_async import on_event_loop

PROMPT = "a🙂b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@asynccontextmanager
async def serving(folder):
    async with thread_engine(str(folder), **TINY_SETTINGS) as llm:
        yield Client(ServerContext(llm, ServerSettings()))


@on_event_loop
async def test_echo_and_logprobs_score_a_prompt(folder):
    """As evaluation programs do it: all tokens of the prompt, their logprobs, and nothing generated."""
    async with serving(folder) as client:
        answer = await client.complete(prompt=PROMPT, echo=True, max_tokens=0, logprobs=2, temperature=0)
        body = answer.json()
        Completion.model_validate(body)
        scored = body["choices"][0]["logprobs"]
        assert scored["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "b"]
        assert scored["text_offset"] == [0, 1, 1, 1, 1, 2]
        assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
        assert all(-9 < value < 0 for value in scored["token_logprobs"][1:])
        for token, value, top in list(zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"]))[1:]:
            assert top[token] == value
            assert len(top) in (2, 3)
        # The same numbers, asked for in the other way.
        other = await client.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=2, temperature=0)
        by_id = other.json()["choices"][0]["prompt_logprobs"]
        assert by_id[0] is None
        for token_id, position, value in list(zip(PROMPT.encode(), by_id, scored["token_logprobs"]))[1:]:
            assert position[str(token_id)]["logprob"] == pytest.approx(value, abs=1e-5)


@on_event_loop
async def test_logprobs_are_the_same_whole_and_in_pieces(folder):
    async with serving(folder) as client:
        fields = {"prompt": PROMPT, "logprobs": 1, "max_tokens": 24, "seed": 3, "echo": True, "ignore_eos": True}
        whole = (await client.complete(**fields)).json()["choices"][0]
        events = (await client.complete(**fields, stream=True)).events()
        joined = {name: [] for name in whole["logprobs"]}
        for event in events:
            for name, values in event["choices"][0]["logprobs"].items():
                joined[name] += values
        assert joined["tokens"] == whole["logprobs"]["tokens"]
        assert joined["text_offset"] == whole["logprobs"]["text_offset"]
        assert joined["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        assert joined["text_offset"] == sorted(joined["text_offset"])


@on_event_loop
async def test_chat_logprobs_have_bytes_that_join_to_the_text(folder):
    async with serving(folder) as client:
        fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 16, "seed": 1, "ignore_eos": True}
        body = (await client.chat(PROMPT, **fields)).json()
        ChatCompletion.model_validate(body)
        choice = body["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 16
        shown = b"".join(bytes(entry["bytes"]) for entry in content if "<|" not in entry["token"])
        assert shown.decode("utf-8", "replace") == choice["message"]["content"]
        for entry in content:
            assert len(entry["top_logprobs"]) == 3
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert entry["logprob"] <= values[0]
        events = (await client.chat(PROMPT, **fields, stream=True)).events()
        for event in events:
            ChatCompletionChunk.model_validate(event)
        streamed = [
            entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
        plain = (await client.chat(PROMPT, logprobs=True, max_tokens=2)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in plain] == [[], []]


@on_event_loop
async def test_random_text_streams_to_the_whole(folder):
    """Random bytes: broken characters of every kind, with stop strings and several choices and prompts."""
    async with serving(folder) as client:
        for seed in range(4):
            fields = {
                "prompt": ["x", "yz"],
                "n": 2,
                "max_tokens": 60,
                "seed": seed,
                "temperature": 2.0,
                "stop": ["e", "\ufffd\ufffd\ufffd"],
            }
            whole = (await client.complete(**fields)).json()["choices"]
            texts = {choice["index"]: "" for choice in whole}
            for event in (await client.complete(**fields, stream=True)).events():
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == {choice["index"]: choice["text"] for choice in whole}


@on_event_loop
async def test_a_prompt_that_was_seen_is_counted_as_cached(folder):
    async with serving(folder) as client:
        prompt = "the same beginning of every prompt, long enough for blocks " * 2
        first = (await client.complete(prompt=prompt, max_tokens=1)).json()["usage"]
        again = (await client.complete(prompt=prompt, max_tokens=1)).json()["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["prompt_tokens_details"]["cached_tokens"] >= 96
        salted = (await client.complete(prompt=prompt, max_tokens=1, cache_salt="mine")).json()["usage"]
        assert salted["prompt_tokens_details"]["cached_tokens"] == 0


@on_event_loop
async def test_embeddings_as_numbers_and_as_text(folder):
    async with serving(folder) as client:
        ask = {"model": MODEL, "input": ["one", list(b"two")]}
        numbers = (await client.post("/v1/embeddings", ask)).json()
        Embeddings.model_validate(numbers)
        assert [entry["index"] for entry in numbers["data"]] == [0, 1]
        assert numbers["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        vector = numbers["data"][0]["embedding"]
        assert len(vector) == 32
        assert sum(number * number for number in vector) == pytest.approx(1.0, abs=1e-5)
        text = (await client.post("/v1/embeddings", {**ask, "encoding_format": "base64"})).json()
        decoded = struct.unpack("<32f", base64.b64decode(text["data"][0]["embedding"]))
        assert decoded == pytest.approx(vector)
        mean = (await client.post("/v1/embeddings", {**ask, "dimensions": 32, "pooling": "mean"})).json()
        assert len(mean["data"][1]["embedding"]) == 32
        assert mean["data"][1]["embedding"] != numbers["data"][1]["embedding"]


@on_event_loop
async def test_a_request_that_memory_can_never_hold_is_refused(folder):
    async with thread_engine(str(folder), **{**TINY_SETTINGS, "num_blocks": 4}) as llm:
        client = Client(ServerContext(llm, ServerSettings()))
        for stream in (False, True):
            answer = await client.complete(prompt="x" * 200, max_tokens=4, stream=stream)
            assert answer.status == 400, answer.body


@on_event_loop
async def test_embeddings_that_were_read_are_a_prompt(folder):
    """The states below the first layer are the embeddings of tokens; as a prompt, they get the answer to the text."""
    async with serving(folder) as client:
        asked = {"model": MODEL, "prompt": PROMPT, "positions": "all", "layers": [0]}
        answering = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        expected = (await client.complete(prompt=PROMPT, **answering)).json()
        for dtype in ("float32", "float16", "bfloat16"):
            read = (await client.post("/v1/hidden_states", {**asked, "dtype": dtype})).json()
            embeds = {name: read[name] for name in ("dtype", "shape", "data")}
            answer = await client.complete(prompt_embeds=embeds, **answering)
            assert answer.status == 200, answer.body
            body = answer.json()
            Completion.model_validate(body)
            assert body["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] == embeds["shape"][1]
            if dtype == "float32":
                assert body["choices"][0]["text"] == expected["choices"][0]["text"]
                events = (await client.complete(prompt_embeds=embeds, stream=True, **answering)).events()
                assert "".join(event["choices"][0]["text"] for event in events) == expected["choices"][0]["text"]
                flat = {**embeds, "shape": embeds["shape"][1:]}
                again = (await client.complete(prompt_embeds=flat, **answering)).json()
                assert again["choices"] == body["choices"], "the same numbers"
                later = {"continuation_of": body["id"], "continuation_suffix": "b", **answering}
                of_text = {**later, "continuation_of": expected["id"]}
                continued = (await client.complete(**later)).json()["choices"][0]["text"]
                assert continued == (await client.complete(**of_text)).json()["choices"][0]["text"]


def embeds_of(width: int, num_tokens: int = 2, **changes):
    data = base64.b64encode(bytes(4 * width * num_tokens)).decode()
    return {"dtype": "float32", "shape": [num_tokens, width], "data": data, **changes}


@on_event_loop
async def test_embeddings_that_are_no_prompt_are_named(folder):
    async with serving(folder) as client:
        width = client.context.llm.source.config.hidden_size
        too_long = client.context.max_model_len + 1
        nan = base64.b64encode(struct.pack("<f", float("nan")) * 2 * width).decode()
        cases = [
            (embeds_of(width, shape=[2, width + 1]), "prompt_embeds.data", "bytes"),
            (embeds_of(width + 1), "prompt_embeds", str(width)),
            (embeds_of(width, shape=[2, 1, width]), "prompt_embeds.shape", str(width)),
            (embeds_of(width, shape=[0, width], data=""), "prompt_embeds.shape", "tokens"),
            (embeds_of(width, shape=[width]), "prompt_embeds.shape", ""),
            (embeds_of(width, shape=[-2, -width]), "prompt_embeds.shape[0]", ""),
            (embeds_of(width, data="%%%"), "prompt_embeds.data", "base64"),
            (embeds_of(width, data="ä"), "prompt_embeds.data", "base64"),
            (embeds_of(width, dtype="int8"), "prompt_embeds.dtype", ""),
            (embeds_of(width, data=nan), "prompt_embeds", "finite"),
            (embeds_of(width, num_tokens=too_long), "prompt_embeds", "tokens"),
            ("UEsDBA==", "prompt_embeds", "pickles"),
        ]
        for embeds, param, problem in cases:
            answer = await client.complete(prompt_embeds=embeds)
            assert (answer.status, answer.error["param"]) == (400, param), (embeds, answer.body)
            assert problem in answer.error["message"]
        right = embeds_of(width)
        for fields, param in [
            ({"prompt": "a"}, "prompt_embeds"),
            ({"multi_modal_data": {"image": []}}, "prompt_embeds"),
            ({"echo": True}, "echo"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"continuation_of": "cmpl-x"}, "prompt_embeds"),
        ]:
            answer = await client.complete(prompt_embeds=right, **fields)
            assert (answer.status, answer.error["param"]) == (400, param), answer.body
        chat = await client.chat("a", prompt_embeds=right)
        assert chat.status == 400 and "/v1/completions takes them" in chat.error["message"]
        assert (await client.complete(prompt_embeds=right, max_tokens=1)).status == 200
