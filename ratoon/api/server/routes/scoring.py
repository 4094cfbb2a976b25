"""POST /v1/rerank, /v1/score and /v1/classify, with their other names: documents by their use for a query, scores of
pairs of texts, and labels of texts. /v1/rerank has Jina's form, /v2/rerank Cohere's, the others vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generation import PROMPT_FIELDS, all_or_none, make_id
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import check_count, encode_prompts
from ratoon.api.server.protocol.base import (
    AnswerModel,
    Entries,
    Int,
    ModelName,
    Prompts,
    RequestId,
    RequestModel,
    Texts,
)
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.responses import large_response
from ratoon.api.server.threads import off_loop
from ratoon.core.errors import RequestError
from ratoon.core.outputs import EmbeddingOutput
from ratoon.core.params import PoolingParams
from ratoon.engine.output.vectors import verify_classifier
from ratoon.engine.scoring import ScoreOptions, plan_scores, rank, verify_scores

Activation = Literal["softmax", "sigmoid", "none"]
Tokens = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
COHERE_TOKENS_PER_DOCUMENT = 4096  # where the body names no number


# ---- bodies ----


class ScoringFields(RequestModel):
    """The fields that the bodies of all routes for scores have."""

    model: ModelName
    truncate_prompt_tokens: Tokens | None = Field(
        None, description="Cut what is longer to so many tokens; -1: to the model's length; default: refuse it"
    )
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    request_id: RequestId | None = Field(None)
    user: str | None = Field(None, description="Accepted, without effect")


def _documents(value: Any) -> list[str]:
    """Texts, or objects with a text, as texts."""
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of at least one text")
    texts: list[str] = []
    for index, one in enumerate(value):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise ValueError(f"entry {index} is neither text nor an object with a text")
        texts.append(text)
    return texts


_TEXT = {"type": "string"}
_WITH_TEXT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
Documents = Annotated[
    list[str],
    PlainValidator(_documents),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _WITH_TEXT]}, "minItems": 1}),
]


class RerankRequest(ScoringFields):
    query: str
    documents: Documents = Field(description="Texts, or objects with a text")
    top_n: Count | None = Field(None, description="Return the best so many; default: all")
    return_documents: bool | None = Field(None, description="Return the texts too; default: true")
    max_tokens_per_doc: Count | None = Field(None, description="Cut documents to so many tokens")
    instruction: str | None = Field(None, description="What makes a document useful, for models with a template")


class CohereRerankRequest(RequestModel):
    model: ModelName
    query: str
    documents: Entries[str] = Field(min_length=1)
    top_n: Count | None = Field(None, description="Return the best so many; default: all")
    max_tokens_per_doc: Count | None = Field(None, description="Cut documents to so many tokens; default: 4096")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")


class ScoreRequest(ScoringFields):
    text_1: Texts = Field(description="A text, or one for each of text_2")
    text_2: Texts = Field(description="A text, or several")
    activation: Activation | None = Field(None, description="Of the head's logit; default: the model's own")
    instruction: str | None = Field(None, description="What makes a document useful, for models with a template")


class ClassifyRequest(ScoringFields):
    input: Prompts = Field(description="Text, token ids, or a list of either")
    activation: Activation | None = Field(None, description="Of the head's logits; default: the model's own")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens")


# ---- answers ----


class ScoringUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int


class DocumentText(AnswerModel):
    text: str


class RankedDocument(AnswerModel):
    index: int
    relevance_score: float
    document: DocumentText | None = None


class Reranked(AnswerModel):
    id: str
    model: str
    usage: ScoringUsage
    results: list[RankedDocument]


class CohereRanked(AnswerModel):
    index: int
    relevance_score: float


class CohereReranked(AnswerModel):
    id: str
    results: list[CohereRanked]
    meta: dict[str, Any]


class Score(AnswerModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(AnswerModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage


class Labelled(AnswerModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(AnswerModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Labelled]
    usage: ScoringUsage


# ---- routes ----

router = APIRouter(tags=["Reranking"])
RERANK_EXAMPLE = {
    "model": MODEL,
    "query": "What is a ratoon?",
    "documents": ["A new shoot from the root of a harvested plant.", "A city in France."],
}
SCORE_EXAMPLE = {"model": MODEL, "text_1": "What is a ratoon?", "text_2": ["A shoot of a plant.", "A city in France."]}
CLASSIFY_EXAMPLE = {"model": MODEL, "input": ["A fine film.", "It was too long."]}
ERRORS = (*WITH_BODY, 404, 409, 429)


@router.post(
    "/v1/rerank", summary="Sort documents by their use for a query (Jina's form)",
    responses=answers(Reranked, *ERRORS), openapi_extra=body(RerankRequest, RERANK_EXAMPLE),
)  # fmt: skip
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, RerankRequest)
    documents = asked.documents
    options = ScoreOptions(asked.instruction, asked.truncate_prompt_tokens, asked.max_tokens_per_doc)
    scored = await score_documents(context, asked, asked.query, documents, options, exchange_of(request.scope))
    with_texts = asked.return_documents is not False

    def build() -> dict[str, Any]:
        results = [
            {"index": one.index, "relevance_score": one.score}
            | ({"document": {"text": documents[one.index]}} if with_texts else {})
            for one in rank(scored.scores, asked.top_n)
        ]
        return {"id": scored.id, "model": asked.model, "usage": scored.usage, "results": results}

    size = sum(map(len, documents)) if with_texts else len(documents)
    return await large_response(request, size, build)


@router.post(
    "/v2/rerank", summary="Sort documents by their use for a query (Cohere's form)",
    responses=answers(CohereReranked, *ERRORS), openapi_extra=body(CohereRerankRequest, RERANK_EXAMPLE),
)  # fmt: skip
async def rerank_like_cohere(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, CohereRerankRequest)
    most = asked.max_tokens_per_doc or COHERE_TOKENS_PER_DOCUMENT
    options = ScoreOptions(truncate=-1, max_document_tokens=most)
    exchange = exchange_of(request.scope)
    scored = await score_documents(context, asked, asked.query, asked.documents, options, exchange)

    def build() -> dict[str, Any]:
        ranked = rank(scored.scores, asked.top_n)
        meta = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": scored.usage["prompt_tokens"]},
        }
        results = [{"index": one.index, "relevance_score": one.score} for one in ranked]
        return {"id": scored.id, "results": results, "meta": meta}

    return await large_response(request, len(asked.documents), build)


@router.post(
    "/v1/score", summary="Score pairs of texts", responses=answers(Scores, *ERRORS),
    openapi_extra=body(ScoreRequest, SCORE_EXAMPLE),
)  # fmt: skip
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, ScoreRequest)
    firsts, seconds = asked.text_1, asked.text_2
    if not seconds:
        raise refused("text_2", "is empty", "at least one text")
    if len(firsts) not in (1, len(seconds)):
        raise refused("text_1", f"has {len(firsts)} texts for {len(seconds)}", "one, or one for each of text_2")
    check_count(context, "text_2", len(seconds), "texts")
    pairs = list(zip(firsts if len(firsts) > 1 else firsts * len(seconds), seconds))
    fields = ["text_2"] if len(pairs) == 1 else [f"text_2[{index}]" for index in range(len(pairs))]
    options = ScoreOptions(asked.instruction, asked.truncate_prompt_tokens, None, asked.activation)
    scored = await score_pairs(context, asked, pairs, fields, options, exchange_of(request.scope), "score")
    head = {"id": scored.id, "object": "list", "created": int(time.time()), "model": asked.model}

    def build() -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scored.scores)]
        return {**head, "data": data, "usage": scored.usage}

    return await large_response(request, len(pairs), build)


@router.post(
    "/v1/classify", summary="Label texts", responses=answers(Labels, *ERRORS),
    openapi_extra=body(ClassifyRequest, CLASSIFY_EXAMPLE),
)  # fmt: skip
@router.post("/classify", include_in_schema=False)
async def classify(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, ClassifyRequest)
    context.check_model(asked.model)
    labels = verify_classifier(context.llm.source.config).labels
    params = PoolingParams(classify=True, activation=asked.activation)
    prompts = await classified_prompts(context, asked)
    fields = ["input"] if len(prompts) == 1 else [f"input[{index}]" for index in range(len(prompts))]
    answer_id = make_id("classify", asked.request_id)
    outputs = await pool_all(context, asked, prompts, params, fields, answer_id, exchange_of(request.scope))
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": asked.model}

    def build() -> dict[str, Any]:
        data = []
        for index, output in enumerate(outputs):
            probs = output.embedding.tolist()
            label = labels[probs.index(max(probs))]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return {**head, "data": data, "usage": usage_of(outputs)}

    return await large_response(request, len(outputs) * len(labels), build)


# ---- work ----


class Scored:
    """The scores of a request's pairs."""

    __slots__ = ("id", "scores", "usage")

    def __init__(self, id: str, scores: list[float], usage: dict[str, int]) -> None:
        self.id, self.scores, self.usage = id, scores, usage


async def score_documents(
    context: ServerContext,
    asked: RerankRequest | CohereRerankRequest,
    query: str,
    documents: Sequence[str],
    options: ScoreOptions,
    exchange: Exchange,
) -> Scored:
    check_count(context, "documents", len(documents), "texts")
    fields = [f"documents[{index}]" for index in range(len(documents))]
    return await score_pairs(context, asked, [(query, one) for one in documents], fields, options, exchange, "rerank")


async def score_pairs(
    context: ServerContext,
    asked: ScoringFields | CohereRerankRequest,
    pairs: Sequence[tuple[str, str]],
    fields: Sequence[str],
    options: ScoreOptions,
    exchange: Exchange,
    prefix: str,
) -> Scored:
    context.check_model(asked.model)
    llm = context.llm
    verify_scores(llm.source.config)
    plan = await off_loop(
        sum(len(document) for _, document in pairs) + len(pairs[0][0]),
        partial(
            plan_scores,
            llm.source.config,
            llm.get_tokenizer(),
            context.max_model_len,
            llm.source.prompts,
            pairs,
            fields,
            options,
        ),
    )
    answer_id = make_id(prefix, getattr(asked, "request_id", None))
    outputs = await pool_all(context, asked, plan.prompts, plan.params, plan.fields, answer_id, exchange)
    scores = plan.read([output.embedding for output in outputs])
    return Scored(answer_id, scores, usage_of(outputs))


async def classified_prompts(context: ServerContext, asked: ClassifyRequest) -> list[Any]:
    special = asked.add_special_tokens is not False
    if asked.truncate_prompt_tokens is None:
        return [one.as_prompt() for one in await encode_prompts(context, "input", asked.input, special, num_places=0)]
    longest = context.max_model_len
    most = longest if asked.truncate_prompt_tokens == -1 else asked.truncate_prompt_tokens
    if not 0 < most <= longest:
        raise refused("truncate_prompt_tokens", f"{most} is out of range", f"1 to {longest}, or -1")
    tokenizer = context.llm.get_tokenizer()

    def cut() -> list[Any]:
        return [
            one[:most] if isinstance(one, list) else tokenizer.encode_beginning(one, most, special)
            for one in asked.input
        ]

    ids = await off_loop(sum(map(len, asked.input)), cut)
    return [one.as_prompt() for one in await encode_prompts(context, "input", ids, special, num_places=0)]


async def pool_all(
    context: ServerContext,
    asked: ScoringFields | CohereRerankRequest,
    prompts: Sequence[Any],
    params: PoolingParams,
    fields: Sequence[str],
    answer_id: str,
    exchange: Exchange,
) -> list[EmbeddingOutput]:
    """Runs all prompts, within the places that a request may have. `fields`: what errors call them."""
    async with context.admit(len(prompts), exchange.tenant):
        return await all_or_none(
            [
                pool(context, asked, prompt, params, field, one_id, exchange)
                for prompt, field, one_id in zip(
                    prompts,
                    fields,
                    [answer_id] if len(prompts) == 1 else [f"{answer_id}-{index}" for index in range(len(prompts))],
                    strict=True,
                )
            ]
        )


async def pool(
    context: ServerContext,
    asked: ScoringFields | CohereRerankRequest,
    prompt: Any,
    params: PoolingParams,
    field: str,
    request_id: str,
    exchange: Exchange,
) -> EmbeddingOutput:
    try:
        return await context.llm.embed(
            prompt,
            params,
            request_id,
            adapter=context.check_model(asked.model),
            priority=asked.priority or 0,
            cache_salt=getattr(asked, "cache_salt", None),
            owner=exchange.tenant,
            trace_headers=exchange.trace_headers,
        )
    except RequestError as error:
        if error.field.partition("[")[0] not in PROMPT_FIELDS:
            raise
        raise type(error)(field, error.problem, error.expected) from None


def usage_of(outputs: Sequence[EmbeddingOutput]) -> dict[str, int]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
