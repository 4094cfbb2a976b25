"""What a body costs that is refused: a few times its size in memory, and one error however much is wrong with it."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from ratoon.api.server.errors import ApiError
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.api.server.protocol.hidden_states import HiddenStatesFields, HiddenStatesRequest
from ratoon.api.server.protocol.sampling import StreamOptions
from ratoon.api.server.request_bodies import decode_json, parse_body
from ratoon.api.server.routes.audio import TranscriptionRequest, TranslationRequest
from ratoon.api.server.routes.embeddings import EmbeddingRequest
from ratoon.api.server.routes.tokens import DetokenizeRequest, TokenizeRequest
from ratoon.api.server.settings import UnknownFields
from ratoon.api.server.unknown_fields import FieldFilter
from ratoon.core.json_extent import MAX_PARTS, SLICE, SMALL_BODY, ExtentLimit, extent_limit, find_excess
from ratoon.core.params import MAX_LOGIT_BIAS
from tests.unit.api.server.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

MEBIBYTE = 2**20
LIMIT = extent_limit(256, MAX_MODEL_LEN, VOCAB_SIZE)
JSON_MODELS = (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    HiddenStatesRequest,
    HiddenStatesFields,
    StreamOptions,
    TokenizeRequest,
    DetokenizeRequest,
)
MODELS = (*JSON_MODELS, TranscriptionRequest, TranslationRequest)
MANY = 20_000
HOSTILE: dict[str, Any] = {
    "numbers": [0] * MANY,
    "negative numbers": [-(2**70)] * MANY,
    "nothing": [None] * MANY,
    "texts": ["x"] * MANY,
    "lists": [[]] * MANY,
    "lists of lists": [[[]]] * MANY,
    "objects": [{}] * MANY,
    "wrong objects": [{"role": 1, "content": 1, "type": 1, "function": 1}] * MANY,
    "entries": {str(number): [] for number in range(MANY)},
    "entries of text": {f"key {number}": "x" for number in range(MANY)},
}


def fields() -> Iterator[tuple[type[RequestModel], str]]:
    for model in MODELS:
        for name in model.model_fields:
            yield model, name


@pytest.mark.parametrize("shape", HOSTILE)
def test_no_field_of_any_request_reports_more_than_the_first_of_many_errors(shape: str) -> None:
    for model, name in fields():
        num_errors = 0
        try:
            model.model_validate(FieldFilter(UnknownFields.REPORT).fields_of({name: HOSTILE[shape]}, model))
        except ApiError:
            pass  # a field of a field that does not exist
        except ValidationError as error:
            num_errors = error.error_count()
        # At most those of the field's first entry, and one for each required field that is not there.
        assert num_errors < 10, f"{model.__name__}.{name}"


def test_objects_are_checked_no_further_than_they_may_have_entries() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "x", "logit_bias": {str(key): "x" for key in range(MAX_LOGIT_BIAS)}})
    assert caught.value.error_count() == MAX_LOGIT_BIAS
    body = json.dumps({"model": "x", "logit_bias": {str(key): 1 for key in range(MAX_LOGIT_BIAS + 1)}}).encode()
    with pytest.raises(ApiError, match="logit_bias: has 4097 entries; 4096 at most"):
        parse_body(body, CompletionRequest, FieldFilter(UnknownFields.REPORT), LIMIT)


ENTRIES = {
    "zeros": b"0,",
    "token ids": b"999,",
    "floats": b"1.5,",
    "texts": b'"aa",',
    "other texts": '"Ā",'.encode(),
    "empty texts": b'"",',
    "lists": b"[],",
    "objects": b"{},",
    "objects with a key": b'{"a":1},',
    "messages": b'{"role":1},',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize(
    ("model", "field"),
    [(ChatCompletionRequest, "messages"), (CompletionRequest, "stop_token_ids"), (TokenizeRequest, "tools")],
)
@pytest.mark.one_in(4)
def test_a_refusal_costs_a_few_times_the_body(kind: str, model: type[RequestModel], field: str) -> None:
    entry = ENTRIES[kind]
    body = b'{"model": 1, "%s": [' % field.encode() + (entry * (MEBIBYTE // len(entry)))[:-1] + b"]}"
    start = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse_body(body, model, FieldFilter(UnknownFields.REPORT), LIMIT)  # for one thing, the model is no text
    assert time.thread_time() - start < 1.0, "about 50 ms"
    assert caught.value.status == 400
    assert len(caught.value.message) < 300
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            parse_body(body, model, FieldFilter(UnknownFields.REPORT), LIMIT)
        # Mostly below 5. Numbers of three digits are the worst: 4 bytes each in the body, 40 as an entry of a list.
        assert tracemalloc.get_traced_memory()[1] < 12 * len(body)
    finally:
        tracemalloc.stop()


def test_what_is_inside_texts_does_not_count() -> None:
    text = '[{,"\\' * MEBIBYTE
    body = json.dumps({"model": "x", "prompt": [text, "}", '"', "\\", "\\\\" * SLICE]}).encode()
    assert find_excess(body, ExtentLimit(12, 6)) is None
    assert decode_json(body)["prompt"][0] == text


@pytest.mark.parametrize("shift", range(8))
def test_texts_may_end_anywhere_in_a_slice(shift: int) -> None:
    """Quotation marks and escapes on the border of two slices."""
    text = "x" * (SLICE - 10 - shift) + '\\"\\\\",,,,[[[[' * 3 + "y" * SLICE
    body = b'["' + json.dumps(text).encode()[1:] + b"," + b"1," * 10 + b"1]"
    assert len(body) > SMALL_BODY
    assert find_excess(body, ExtentLimit(2, 11)) is None
    assert find_excess(body, ExtentLimit(2, 10)) == "10 values"
    assert find_excess(body, ExtentLimit(1, 11)) == "1 texts, lists and objects"


def test_every_prompt_of_the_largest_batch_can_be_token_ids() -> None:
    prompts = [[100] * MAX_MODEL_LEN] * 256
    asked = parse_body(
        json.dumps({"model": "x", "prompt": prompts}).encode(),
        CompletionRequest,
        FieldFilter(UnknownFields.REPORT),
        LIMIT,
    )
    assert asked.prompt == prompts


def test_a_long_conversation_is_no_attack() -> None:
    conversation = [{"role": "user", "content": "Hello"}] * (MAX_PARTS // 6)
    body = json.dumps({"model": "x", "messages": conversation}).encode()
    asked = parse_body(body, ChatCompletionRequest, FieldFilter(UnknownFields.REPORT), LIMIT)
    assert len(asked.messages) == len(conversation)


@pytest.mark.parametrize(
    "escaped", ["\\ud83d\\ude00", "\\uD83D\\uDE00", "\\\\ud800", "\\\\\\\\udc00", "\\ud7ff\\ue000"]
)
def test_escapes_of_whole_characters_are_taken(escaped: str) -> None:
    body = f'{{"a": "{escaped}"}}'
    assert decode_json(body.encode()) == json.loads(body)


@pytest.mark.parametrize(
    "escaped",
    ["\\ud83d", "\\ude00", "\\ud83d\\ud83d\\ude00", "\\ud83d\\ude00\\ude00", "\\ud83d\\\\\\ude00", "\\ud83dx\\ude00"],
)
def test_half_characters_are_refused(escaped: str) -> None:
    with pytest.raises(ApiError, match="not part of a surrogate pair"):
        decode_json(f'{{"a": "{escaped}"}}'.encode())


@on_event_loop
async def test_large_bodies_are_read_and_answered() -> None:
    async with scripted(say("x")) as client:
        long = {"role": "user", "content": "x", "extra": ["y" * 100_000, *range(20_000)]}
        answer = await client.post("/v1/chat/completions", {"model": MODEL, "messages": [long]})
        assert answer.status == 200
        refused = await client.post("/v1/chat/completions", {"model": MODEL, "messages": [long, 0, 0]})
        assert (refused.status, refused.error["param"]) == (400, "messages[1]")


@on_event_loop
async def test_json_inside_of_a_text_is_bounded_as_well() -> None:
    """The arguments of a tool call are text in the body, and an object for the chat template."""
    arguments = '{"a": [' + "[]," * 200_000 + "0]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with scripted(say("x")) as client:
        answer = await client.post("/v1/chat/completions", {"model": MODEL, "messages": [message]})
        assert answer.status == 400
        assert answer.error["param"] == "messages[0].tool_calls[0].function.arguments"
        assert "holds more than 131072 texts, lists and objects" in answer.error["message"]


def test_a_list_of_layers_is_no_longer_than_any_model_is_deep() -> None:
    with pytest.raises(ValidationError, match="has 5000 entries; 4096 at most"):
        HiddenStatesRequest.model_validate({"model": "x", "layers": [0] * 5000})
