"""Encoder-decoder models over HTTP: where their two prompts stand in a body, and what comes back of them."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.api.server.protocol.completions import Completion
from ratoon.core.encoder import tokens_for_encoder
from tests.unit.api.server.harness import MODEL, byte_tokenizer, say, scripted
from tests.unit.engine.fakes import (
    DECODER_START,
    ENCODER_LAYERS,
    ENCODER_POSITIONS,
    END,
    NUM_MEL_BINS,
    encoder_decoder_config,
    model_config,
)
from tests.unit.engine.fakes_async import on_event_loop


def serving(config: Any = None, **options: Any) -> Any:
    options.setdefault("template", None)
    return scripted(say("yz"), config=config or encoder_decoder_config(max_position=512), **options)


@pytest.mark.parametrize(
    ("fields", "encoder", "decoder"),
    [
        ({"prompt": "ab"}, [97, 98], DECODER_START),
        ({"prompt": [1, 2]}, [1, 2], DECODER_START),
        ({"encoder_prompt": "ab"}, [97, 98], DECODER_START),
        ({"encoder_prompt": [1, 2], "decoder_prompt": "x"}, [1, 2], [*DECODER_START, 120]),
        ({"prompt": "ab", "decoder_prompt": [END, 5]}, [97, 98], [END, 5]),
    ],
)
@on_event_loop
async def test_both_prompts_reach_the_engine(fields, encoder, decoder):
    async with serving() as client:
        answer = await client.complete(**fields)
        assert answer.status == 200
        (request,) = client.engine.core.added
    assert request.encoder_input == tokens_for_encoder(encoder)
    assert request.prompt_token_ids == decoder
    body = answer.json()
    assert body["choices"][0]["text"] == "yz"
    assert body["usage"]["prompt_tokens"] == len(encoder) + len(decoder)


@on_event_loop
async def test_a_decoder_prompt_is_for_all_prompts():
    async with serving() as client:
        answer = await client.complete(prompt=["ab", [1, 2, 3]], decoder_prompt="x", return_token_ids=True)
    Completion.model_validate(answer.json())
    choices = answer.json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[*DECODER_START, 120]] * 2
    assert [choice["encoder_prompt_token_ids"] for choice in choices] == [[97, 98], [1, 2, 3]]


@pytest.mark.parametrize("stream", [False, True])
@on_event_loop
async def test_echo_repeats_what_the_decoder_began_with(stream):
    async with serving() as client:
        told = {}
        for name, decoder in {"text": "x: ", "ids": [END, 120], "default": None}.items():
            answer = await client.complete(prompt="ab", decoder_prompt=decoder, echo=True, stream=stream)
            events = answer.events() if stream else [answer.json()]
            told[name] = "".join(choice["text"] for event in events for choice in event["choices"])
    assert told == {"text": "x: yz", "ids": "xyz", "default": "yz"}


@on_event_loop
async def test_usage_of_a_stream_counts_both_prompts():
    async with serving() as client:
        options = {"include_usage": True}
        answer = await client.complete(encoder_prompt="ab", decoder_prompt="x", stream=True, stream_options=options)
    assert answer.events()[-1]["usage"]["prompt_tokens"] == 2 + 3


@on_event_loop
async def test_a_continuation_goes_on_with_the_same_encoder_input():
    async with serving() as client:
        await client.complete(encoder_prompt="ab", request_id="one")
        answer = await client.complete(continuation_of="cmpl-one", continuation_suffix="w")
        assert answer.status == 200
        first, second = client.engine.core.added
    assert second.encoder_input == first.encoder_input
    assert second.prompt_token_ids == [*DECODER_START, *b"yz", END, *b"w"]


TOO_LONG = "a" * (ENCODER_POSITIONS + 1)


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"prompt": "ab", "encoder_prompt": "ab"}, "encoder_prompt", "can't be used together with prompt"),
        ({"decoder_prompt": "x"}, "prompt", "needed"),
        ({}, "prompt", "needed"),
        ({"continuation_of": "cmpl-x", "decoder_prompt": "x"}, "decoder_prompt", "continuation"),
        ({"prompt": TOO_LONG}, "prompt", f"{ENCODER_POSITIONS} positions"),
        ({"encoder_prompt": TOO_LONG}, "encoder_prompt", f"{ENCODER_POSITIONS + 1} tokens"),
        ({"prompt": ["ab", TOO_LONG]}, "prompt[1]", f"{ENCODER_POSITIONS} positions"),
        ({"encoder_prompt": [999]}, "encoder_prompt", "999"),
        ({"encoder_prompt": ""}, "encoder_prompt", "empty"),
        ({"encoder_prompt": ["ab"]}, "encoder_prompt", "neither text nor a list of token ids"),
        ({"encoder_prompt": {"prompt": "ab"}}, "encoder_prompt", "neither text nor a list of token ids"),
        ({"prompt": "ab", "decoder_prompt": [5, 999]}, "decoder_prompt[1]", "999"),
        ({"prompt": "ab", "decoder_prompt": "x" * 510}, "decoder_prompt", "512 tokens"),
    ],
)
@on_event_loop
async def test_bad_prompts_are_a_400_that_names_the_field(fields, param, part):
    async with serving() as client:
        answer = await client.complete(**fields)
        assert client.engine.core.added == []
    assert (answer.status, answer.error["param"]) == (400, param)
    assert part in answer.error["message"]


@pytest.mark.parametrize("field", ["encoder_prompt", "decoder_prompt"])
@on_event_loop
async def test_a_model_without_an_encoder_says_so(field):
    others = {} if field == "encoder_prompt" else {"prompt": "ab"}
    async with serving(model_config(max_position=512)) as client:
        answer = await client.complete(**{field: "ab"}, **others)
        states = await client.post("/v1/hidden_states", {"model": MODEL, "prompt": "ab", "side": "encoder"})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "no encoder" in answer.error["message"]
    assert (states.status, states.error["param"]) == (400, "side")


@on_event_loop
async def test_text_for_an_encoder_that_hears_is_refused_with_the_right_address():
    async with serving(encoder_decoder_config(NUM_MEL_BINS)) as client:
        for fields in ({"prompt": "ab"}, {"encoder_prompt": [1, 2]}):
            answer = await client.complete(**fields)
            assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
            assert "/v1/audio/transcriptions" in answer.error["message"]


@on_event_loop
async def test_chat_without_a_template_is_a_400():
    async with serving() as client:
        answer = await client.chat("hello")
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "chat template" in answer.error["message"]


@on_event_loop
async def test_vectors_of_an_encoder_decoder_model_are_a_400():
    async with serving() as client:
        answer = await client.post("/v1/embeddings", {"model": MODEL, "input": "ab"})
    assert answer.status == 400 and "serves no embeddings" in answer.error["message"]


@on_event_loop
async def test_an_encoder_alone_generates_nothing():
    async with serving(model_config(max_position=512, causal=False)) as client:
        answer = await client.complete(prompt="ab")
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "has no decoder" in answer.error["message"]


@on_event_loop
async def test_hidden_states_of_both_sides():
    async with serving(tokenizer=byte_tokenizer(None)) as client:
        body = {"model": MODEL, "prompt": "ab", "decoder_prompt": "x"}
        encoder = await client.post("/v1/hidden_states", {**body, "side": "encoder", "positions": "all", "layers": -1})
        decoder = await client.post("/v1/hidden_states", {**body, "positions": "all"})
    assert encoder.json()["token_ids"] == [97, 98] and encoder.json()["layers"] == [ENCODER_LAYERS]
    assert decoder.json()["token_ids"] == [*DECODER_START, 120]


@on_event_loop
async def test_encoder_states_of_an_answer():
    async with serving() as client:
        await client.complete(prompt="ab", request_id="one")
        body = {"model": MODEL, "original_request_id": "cmpl-one", "side": "encoder", "positions": "all"}
        answer = await client.post("/v1/hidden_states", body)
        refused = await client.post("/v1/hidden_states", {**body, "decoder_prompt": "x"})
        with_answer = await client.complete(prompt="ab", return_hidden_states={"side": "encoder"})
    assert answer.json()["token_ids"] == [97, 98]
    assert (refused.status, refused.error["param"]) == (400, "decoder_prompt")
    assert (with_answer.status, with_answer.error["param"]) == (400, "return_hidden_states.side")
