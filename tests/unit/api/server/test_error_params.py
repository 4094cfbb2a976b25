"""Whatever value a field has that it can't have, the error names that field, in words of our own."""

from __future__ import annotations

import re

import pytest

from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.api.server.protocol.hidden_states import HiddenStatesRequest
from ratoon.api.server.routes.embeddings import EmbeddingRequest
from ratoon.api.server.routes.tokens import DetokenizeRequest, TokenizeRequest
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import on_event_loop

ENDPOINTS: dict[str, tuple[type[RequestModel], dict]] = {
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "x"}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
    ),
    "/v1/embeddings": (EmbeddingRequest, {"model": MODEL, "input": "x"}),
    "/v1/hidden_states": (HiddenStatesRequest, {"model": MODEL, "prompt": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
VALUES = (5.5, -5, 10**12, "x", "", [[]], [{}], {"x": []})
INNER_WORDS = re.compile(
    r"input should|pydantic|msgspec|jinja|\bstruct\b|validation|\bstr\b|\bint\b|\bdict\b|traceback"
)
OTHERS = {"original_request_id": "prompt"}  # of the two, one is too many


@pytest.mark.parametrize("path", ENDPOINTS)
@on_event_loop
async def test_errors_name_the_field_that_is_wrong(path):
    model, required = ENDPOINTS[path]
    async with scripted(say("x")) as client:
        for name in model.model_fields:
            for value in VALUES:
                answer = await client.post(path, {**required, name: value})
                if answer.status == 200:
                    continue
                error = answer.error
                assert answer.status in (400, 404, 413, 500), (name, value, answer.body)
                if answer.status == 500:  # what the script of this engine can't play
                    assert error["code"] in ("generation_failed", "internal_error"), (name, value, answer.body)
                    continue
                found = re.split(r"[.\[]", error["param"] or "")[0]
                assert found in (name, OTHERS.get(name)), (name, value, answer.body)
                assert not INNER_WORDS.search(error["message"].lower()), (name, value, answer.body)
