"""POST /v1/hidden_states"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.hidden_states import as_safetensors, cut, facts, lens_entries
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused, request_not_found
from ratoon.api.server.exchange import Exchange, exchange_of, preferred_type
from ratoon.api.server.generated_answers import content
from ratoon.api.server.generation import make_id
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import encode_prompts
from ratoon.api.server.protocol.hidden_states import HiddenStatesAnswer, HiddenStatesRequest
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.responses import JSON, SLICE, SlicedResponse, large_binary_response, large_response
from ratoon.core.errors import UnknownParentError
from ratoon.core.outputs import HiddenStatesOutput

LENS_ENTRY_SIZE = 60  # characters, roughly
SAFETENSORS = ("application/octet-stream", "application/x-safetensors")

router = APIRouter(tags=["Hidden states"])
EXAMPLE = {"model": MODEL, "prompt": "The capital of France is", "positions": -1}


@router.post(
    "/v1/hidden_states",
    summary="Read the hidden states of a prompt, or of a request that has ended",
    responses=answers(HiddenStatesAnswer, *WITH_BODY, 404, 409, 429, 504, files=SAFETENSORS),
    openapi_extra=body(HiddenStatesRequest, EXAMPLE),
)
async def read_hidden_states(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, HiddenStatesRequest)
    context.check_model(asked.model)
    check_source(asked)
    media_type = preferred_type(request.scope, (JSON, *SAFETENSORS))
    if asked.lens is not None and media_type != JSON:
        raise refused("lens", f"has no form in {media_type}", f"the header Accept: {JSON}, or leave it out")
    answer_id = make_id("hs", asked.request_id)
    output = await extract(context, asked, answer_id, exchange_of(request.scope))
    if media_type == JSON:
        head = {"id": answer_id, "object": "hidden_states", "model": asked.model}
        if output.lens is not None:
            return await large_response(request, lens_size(output), lambda: {**head, **lens_content(context, output)})
        return await large_binary_response(request, 0, lambda: {**head, **content(output)})
    file_head, data = as_safetensors(output, id=answer_id, model=asked.model)
    slices = (bytes(piece) for part in (memoryview(file_head), data) for piece in cut(part, SLICE))
    return SlicedResponse(request, slices, len(file_head) + data.nbytes, media_type)


def lens_size(output: HiddenStatesOutput) -> int:
    """Returns the size of a text which would take as long to encode as what the lens shows."""
    return LENS_ENTRY_SIZE * sum(map(len, (tokens for rows in output.lens or () for tokens in rows)))


def lens_content(context: ServerContext, output: HiddenStatesOutput) -> dict[str, Any]:
    texts = context.token_texts
    entries = lens_entries(output, lambda token_id: texts.lookup(token_id)[0])
    return {**facts(output), "data": None, "norms": output.norms, "lens": entries}


def check_source(asked: HiddenStatesRequest) -> None:
    if (asked.prompt is None) == (asked.original_request_id is None):
        raise refused("prompt", "one of prompt and original_request_id is needed", "either of them, not both")
    if asked.original_request_id is None and asked.choice is not None:
        raise refused("choice", "has no meaning without original_request_id", "leave it out")
    for name in ("add_special_tokens", "decoder_prompt"):
        if asked.original_request_id is not None and getattr(asked, name) is not None:
            raise refused(name, "has no meaning without a prompt", "leave it out")


async def extract(
    context: ServerContext, asked: HiddenStatesRequest, answer_id: str, exchange: Exchange
) -> HiddenStatesOutput:
    owner, headers = exchange.tenant, exchange.trace_headers
    params = asked.hidden_states_params()
    params.verify()
    if asked.prompt is not None:
        add_special_tokens = asked.add_special_tokens is not False
        (prompt,) = await encode_prompts(context, "prompt", [asked.prompt], add_special_tokens, 0, asked.decoder_prompt)
        async with context.admit(1, owner):
            return await context.llm.extract_hidden_states(
                prompt.as_prompt(),
                params,
                answer_id,
                adapter=context.check_model(asked.model),
                cache_salt=asked.cache_salt,
                owner=owner,
                trace_headers=headers,
            )
    original = asked.original_request_id
    assert original is not None, "one of the two is there"
    original_id = await context.shared.resolve(original, owner)
    try:
        root = await context.llm.find_parent(original_id, wait=False, owner=owner)
        if root.cache_salt != asked.cache_salt:  # another salt is another tenant
            raise request_not_found(original, "original_request_id")
        async with context.admit(1, owner):
            return await context.llm.extract_hidden_states(
                None,
                params,
                answer_id,
                adapter=context.adapter_for(asked.model, asked),
                original_request_id=original_id,
                choice=asked.choice or 0,
                owner=owner,
                trace_headers=headers,
            )
    except UnknownParentError:
        raise request_not_found(original, "original_request_id") from None
