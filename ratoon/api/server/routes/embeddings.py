"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import base64
import time
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generation import PROMPT_FIELDS, all_or_none, make_id
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import EncodedPrompt, encode_prompts
from ratoon.api.server.protocol.base import AnswerModel, Int, ModelName, Prompts, RequestId, RequestModel
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.responses import encoded, large_response
from ratoon.core.errors import RequestError
from ratoon.core.outputs import EmbeddingOutput
from ratoon.core.params import PoolingParams
from ratoon.engine.output.vectors import verify_dimensions
from ratoon.engine.scoring import with_prompt


class EmbeddingRequest(RequestModel):
    model: ModelName
    input: Prompts = Field(description="Text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: 32-bit floats, little-endian")
    dimensions: Int | None = Field(None, description="Cut vectors to so many numbers, if the model says that it can")

    # Extensions
    pooling: Literal["last", "mean", "first"] | None = Field(
        None,
        description="The last token's state, the mean of all, or the first's; default: the model's own",
    )
    normalize: bool | None = Field(None, description="To length 1; default: true")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    request_id: RequestId | None = Field(None)

    # Accepted, without effect
    user: str | None = Field(None, description="Accepted, without effect")


class Embedding(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(AnswerModel):
    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


router = APIRouter(tags=["OpenAI"])
EXAMPLE = {"model": MODEL, "input": ["A cat.", "A kitten."]}


@router.post(
    "/v1/embeddings",
    summary="Turn texts into vectors",
    responses=answers(Embeddings, *WITH_BODY, 404, 409, 429),
    openapi_extra=body(EmbeddingRequest, EXAMPLE),
)
async def create_embeddings(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, EmbeddingRequest)
    context.check_model(asked.model)
    answer_id = make_id("embd", asked.request_id)
    if asked.dimensions != context.llm.source.config.hidden_size:
        verify_dimensions(asked.dimensions, context.llm.source.config)
    outputs = await embed_all(context, asked, answer_id, exchange_of(request.scope))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    as_text = asked.encoding_format == "base64"
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"object": "list", "id": answer_id, "created": int(time.time()), "model": asked.model}

    def build() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": encode_vector(output.embedding, as_text)}
            for index, output in enumerate(outputs)
        ]
        return {**head, "data": data, "usage": usage}

    return await large_response(request, sum(len(output.embedding) for output in outputs), build)


async def embed_all(
    context: ServerContext, asked: EmbeddingRequest, answer_id: str, exchange: Exchange
) -> list[EmbeddingOutput]:
    """Returns a vector for each input, in order."""
    params = PoolingParams(pooling=asked.pooling, normalize=asked.normalize is not False, dimensions=asked.dimensions)
    params.verify()
    source = context.llm.source
    texts = with_prompt(source.prompts, source.default_prompt, asked.input, None)
    prompts = await encode_prompts(context, "input", texts, asked.add_special_tokens is not False, num_places=0)
    async with context.admit(len(prompts), exchange.tenant):
        return await all_or_none(
            [
                embed(context, asked, params, prompt, answer_id, exchange)
                if len(prompts) == 1
                else embed(context, asked, params, prompt, f"{answer_id}-{index}", exchange, f"input[{index}]")
                for index, prompt in enumerate(prompts)
            ]
        )


async def embed(
    context: ServerContext,
    asked: EmbeddingRequest,
    params: PoolingParams,
    prompt: EncodedPrompt,
    request_id: str,
    exchange: Exchange,
    param: str = "input",
) -> EmbeddingOutput:
    """Returns the vector of a prompt. `param` is the field of the body with the prompt, for errors."""
    try:
        return await context.llm.embed(
            prompt.as_prompt(),
            params,
            request_id,
            adapter=context.check_model(asked.model),
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt,
            owner=exchange.tenant,
            trace_headers=exchange.trace_headers,
        )
    except RequestError as error:
        if error.field.partition("[")[0] not in PROMPT_FIELDS:
            raise
        raise type(error)(param, error.problem, error.expected) from None


def encode_vector(vector: Any, as_text: bool) -> msgspec.Raw | str:
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return encoded(vector.tolist())
