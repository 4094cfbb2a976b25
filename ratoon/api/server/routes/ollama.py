"""/api/…: Ollama's API: chat, generate, embed, and the lists of models."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.answer_parts.plan import AnswerPlan
from ratoon.api.answer_parts.reasoning_formats import SWITCHES, effort_variables
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse, tool_use
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generation import Batch, asked_lengths, check_token_limit, names_of
from ratoon.api.server.model_directory import directory_of
from ratoon.api.server.ollama_answers import LineStream, OllamaRun, error_line, now
from ratoon.api.server.ollama_models import describe_files, describe_loaded, list_files
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import EncodedPrompt, check_count, encode_chat, encode_prompts
from ratoon.api.server.protocol.chat import Message, Tool
from ratoon.api.server.protocol.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModels,
    OllamaOptions,
    OllamaRequest,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
)
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.response_items import new_id
from ratoon.api.server.responses import json_response, large_response
from ratoon.api.server.routes.embeddings import EmbeddingRequest, embed_all
from ratoon.api.server.threads import off_loop
from ratoon.api.server.typed_answers import answer_typed_stream, run_to_end
from ratoon.core.errors import RequestError
from ratoon.core.outputs import EmbeddingOutput
from ratoon.core.params import RequestOutputKind, SamplingParams
from ratoon.engine.input.default_params import with_given

# The version of Ollama whose API this is: clients ask for it to know what they may send.
API_VERSION = "0.9.0"
LATEST = ":latest"
FIELDS = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}  # as a body names them
OPTION_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))

router = APIRouter(tags=["Ollama"])
CHAT_EXAMPLE = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
GENERATE_EXAMPLE = {"model": MODEL, "prompt": "What is the capital of Japan?", "stream": False}


# ---- chat and generate ----


@router.post(
    "/api/chat",
    summary="Answer a conversation, by Ollama's protocol",
    responses=answers(OllamaChatAnswer, *WITH_BODY, 404, 429, files=[LineStream.media_type], error=OllamaError),
    openapi_extra=body(OllamaChatRequest, CHAT_EXAMPLE),
)
async def chat(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    try:
        async with context.preparation.place(exchange.tenant, exchange.body_size):
            asked = await read_body(request, OllamaChatRequest)
            if not asked.messages:
                return only_loaded(request, asked, {"message": {"role": "assistant", "content": ""}})
            run = await make_chat(context, asked, exchange)
        return await answer(request, asked, run)
    except RequestError as error:
        raise _named_as_in_body(error) from None


@router.post(
    "/api/generate",
    summary="Answer a prompt, by Ollama's protocol",
    responses=answers(OllamaGenerateAnswer, *WITH_BODY, 404, 429, files=[LineStream.media_type], error=OllamaError),
    openapi_extra=body(OllamaGenerateRequest, GENERATE_EXAMPLE),
)
async def generate(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    try:
        async with context.preparation.place(exchange.tenant, exchange.body_size):
            asked = await read_body(request, OllamaGenerateRequest)
            if not asked.prompt:
                return only_loaded(request, asked, {"response": ""})
            run = await make_generation(context, asked, exchange)
        return await answer(request, asked, run)
    except RequestError as error:
        raise _named_as_in_body(error) from None


def only_loaded(request: Request, asked: OllamaRequest, words: dict[str, Any]) -> Response:
    """The request asks for nothing but that the model be there, as it is."""
    context = context_of(request)
    context.check_model(plain_name(context, asked.model))
    if asked.keep_alive == 0 and not context.settings.puts_models_away:
        problem = "this server has one model, and keeps it loaded"
        raise refused("keep_alive", problem, "ratoon serve with --keep-alive, or with several models, unloads them")
    about = {"created_at": now(), "done": True, "done_reason": "load"}
    return json_response(request, {"model": asked.model, **words, **about})


async def answer(request: Request, asked: OllamaRequest, run: OllamaRun) -> Response:
    if asked.stream is not False:
        return await answer_typed_stream(request, run, error_line, LineStream)
    await run_to_end(run)
    return await large_response(request, run.answer_size, run.answer)


def plain_name(context: ServerContext, name: str) -> str:
    """A model's name without a tag that it does not have."""
    return name if name in context.model_names else name.removesuffix(LATEST)


async def make_chat(context: ServerContext, asked: OllamaChatRequest, exchange: Exchange) -> OllamaRun:
    context.check_model(plain_name(context, asked.model))
    assert asked.messages
    last, size = asked.messages[-1], exchange.body_size
    continues = last.role == "assistant" and not last.tool_calls and bool(last.content)
    tools = await off_loop(size, partial(as_tool_use, asked.tools or ()))
    plan = context.answer_plan(tools, continued=last.content if continues else None)
    prompt = await encode_chat(
        context,
        await off_loop(size, partial(as_messages, asked.messages)),
        size=size,
        tools=plan.tools.tools,
        continue_final_message=continues,
        variables=thinking_variables(context, asked),
    )
    return await make_run(context, asked, exchange, plan, prompt, is_chat=True)


async def make_generation(context: ServerContext, asked: OllamaGenerateRequest, exchange: Exchange) -> OllamaRun:
    context.check_model(plain_name(context, asked.model))
    assert asked.prompt
    if asked.raw or not context.llm.has_chat_template:
        if asked.images:
            raise refused("images", "need a chat template", "no raw, and a model that has one")
        text = asked.prompt if asked.raw or not asked.system else f"{asked.system}\n\n{asked.prompt}"
        (prompt,) = await encode_prompts(context, "prompt", [text], True, 1)
        plan = context.answer_plan(NO_TOOLS)
    else:
        plan = context.answer_plan(NO_TOOLS)
        messages, size = await off_loop(exchange.body_size, partial(prompt_as_messages, asked)), exchange.body_size
        variables = thinking_variables(context, asked)
        prompt = await encode_chat(context, messages, param="prompt", size=size, variables=variables)
    if asked.context:
        token_ids = [*asked.context, *prompt.token_ids]
        (checked,) = await encode_prompts(context, "context", [token_ids], False, 1)
        # The text ends as the prompt does, which says how the answer begins; the tokens are what counts.
        prompt = replace(prompt, token_ids=checked.token_ids)
    return await make_run(context, asked, exchange, plan, prompt, is_chat=False)


async def make_run(
    context: ServerContext,
    asked: OllamaRequest,
    exchange: Exchange,
    plan: AnswerPlan,
    prompt: EncodedPrompt,
    *,
    is_chat: bool,
) -> OllamaRun:
    context.llm.verify_generates()
    params = make_params(context, asked)
    check_token_limit(context, 1, params, len(prompt.token_ids), "options.num_predict")
    params = await off_loop(exchange.body_size, partial(plan.params, params, prompt.text))
    exchange.notes = (*prompt.notes, *notes_about(context, asked))
    batch = Batch(
        id=new_id("ollama"),
        prompts=[prompt],
        params=params,
        options={
            "adapter": context.check_model(plain_name(context, asked.model)),
            "priority": 0,
            "owner": exchange.tenant,
            "trace_headers": exchange.trace_headers,
        },
        param="messages" if is_chat else "prompt",
        owner=exchange.tenant,
        names=names_of(None, exchange),
    )
    return OllamaRun(
        context,
        batch,
        asked.model,
        plan.parser(prompt.text),
        is_chat=is_chat,
        shows_thinking=asked.think is not False,
        returns_context=not is_chat and not getattr(asked, "raw", None),
        load_seconds=exchange.load_seconds,
    )


def make_params(context: ServerContext, asked: OllamaRequest) -> SamplingParams:
    options = asked.options or OllamaOptions.model_validate({})
    given = {
        **options.sampling(),
        **asked_lengths(context, options.max_tokens, None),
        "structured_output": asked.format,
        "output_kind": RequestOutputKind.DELTA,
    }
    params = with_given(context.llm.get_default_sampling_params(), given)
    params.verify()
    return params


def notes_about(context: ServerContext, asked: OllamaRequest) -> tuple[str, ...]:
    notes = []
    num_ctx = None if asked.options is None else asked.options.num_ctx
    if num_ctx is not None and num_ctx != context.max_model_len:
        notes.append(f"options.num_ctx has no effect: the context is {context.max_model_len} tokens")
    if asked.keep_alive is not None and not context.settings.puts_models_away:
        notes.append("keep_alive has no effect: this server has one model, and keeps it loaded")
    return tuple(notes)


def thinking_variables(context: ServerContext, asked: OllamaRequest) -> dict[str, Any]:
    """The template's variables for reasoning. ApiError: it is asked for, and the model has none."""
    if asked.think is None:
        return {}
    if asked.think and context.answer_plan().format.reasoning is None:
        raise refused("think", f"{asked.model!r} does not support thinking", "false, or leave it out")
    if isinstance(asked.think, str):
        return effort_variables(asked.think)
    return dict.fromkeys(SWITCHES, asked.think)


def as_tool_use(tools: Sequence[Tool]) -> ToolUse:
    """Returns the use of a request's tools, which may be many: to be called off the event loop."""
    return tool_use([tool.model_dump(exclude_unset=True) for tool in tools], None, True)


def as_messages(messages: Sequence[OllamaMessage]) -> list[Message]:
    """Returns messages as chat templates have them. There may be many: to be called off the event loop."""
    return [as_message(index, message) for index, message in enumerate(messages)]


def prompt_as_messages(asked: OllamaGenerateRequest) -> list[Message]:
    """Returns the conversation that a prompt stands for: its system text, and itself with its images."""
    user = OllamaMessage.model_validate({"role": "user", "content": asked.prompt, "images": asked.images})
    system = [Message(role="system", content=asked.system)] if asked.system else []
    return [*system, as_message(0, user, "images")]


def as_message(index: int, message: OllamaMessage, images: str | None = None) -> Message:
    """Returns a message as chat templates have it, in OpenAI's form."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images:
        name = images or f"messages[{index}].images"
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": as_data_url(image, f"{name}[{place}]")}}
            for place, image in enumerate(message.images)
        ]
        fields["content"] = [*parts, {"type": "text", "text": message.content or ""}]
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": f"call_{index}_{place}", "type": "function", "function": call.function.model_dump()}
            for place, call in enumerate(message.tool_calls)
        ]
    if message.tool_name:
        fields["name"] = message.tool_name
    return Message(**fields)


def as_data_url(image: str, field: str) -> str:
    try:
        beginning = base64.b64decode(image[:64], validate=True)
    except (binascii.Error, ValueError):
        raise refused(field, "is not base64", "the bytes of a PNG, JPEG, GIF or WebP file in base64") from None
    kind = next((name for mark, name in IMAGE_TYPES if beginning.startswith(mark)), None)
    if kind is None:
        raise refused(field, "is no image of a known kind", "the bytes of a PNG, JPEG, GIF or WebP file in base64")
    return f"data:image/{kind};base64,{image}"


def _named_as_in_body(error: RequestError) -> RequestError:
    field = FIELDS.get(error.field, error.field)
    if error.field in OPTION_NAMES:
        field = f"options.{error.field}"
    elif field.partition(".")[0] == "structured_output":
        field = "format"
    return type(error)(field, error.problem, error.expected)


# ---- embeddings ----


@router.post(
    "/api/embed",
    summary="Turn texts into vectors, by Ollama's protocol",
    responses=answers(OllamaEmbedAnswer, *WITH_BODY, 404, 429, error=OllamaError),
    openapi_extra=body(OllamaEmbedRequest, {"model": MODEL, "input": ["A cat.", "A kitten."]}),
)
async def embed(request: Request) -> Response:
    begin = time.monotonic()
    asked = await read_body(request, OllamaEmbedRequest)
    outputs = await embed_texts(request, asked.model, asked.input, asked.truncate is not False, asked.dimensions)
    load_seconds = exchange_of(request.scope).load_seconds

    def build() -> dict[str, Any]:
        return {
            "model": asked.model,
            "embeddings": [output.embedding.tolist() for output in outputs],
            "total_duration": int((time.monotonic() - begin + load_seconds) * 1e9),
            "load_duration": int(load_seconds * 1e9),
            "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
        }

    return await large_response(request, sum(len(output.embedding) for output in outputs), build)


@router.post(
    "/api/embeddings",
    summary="Turn a text into a vector, by the older form of Ollama's protocol",
    responses=answers(OllamaEmbeddingsAnswer, *WITH_BODY, 404, 429, error=OllamaError),
    openapi_extra=body(OllamaEmbeddingsRequest, {"model": MODEL, "prompt": "A cat."}),
)
async def embeddings(request: Request) -> Response:
    asked = await read_body(request, OllamaEmbeddingsRequest)
    (output,) = await embed_texts(request, asked.model, [asked.prompt], True, None)
    return json_response(request, {"embedding": output.embedding.tolist()})


async def embed_texts(
    request: Request, model: str, texts: list[str], truncate: bool, dimensions: int | None
) -> list[EmbeddingOutput]:
    context, exchange = context_of(request), exchange_of(request.scope)
    name = plain_name(context, model)
    context.check_model(name)
    if not texts:
        raise refused("input", "is empty", "at least one text")
    check_count(context, "input", len(texts))

    limit, tokenizer = context.max_model_len, context.llm.get_tokenizer()

    def cut(text: str) -> str | list[int]:
        token_ids = tokenizer.encode(text, True)
        return token_ids[:limit] if len(token_ids) > limit else text

    def make_request() -> EmbeddingRequest:
        prompts = [cut(text) for text in texts] if truncate else texts
        return EmbeddingRequest.model_validate({"model": name, "input": prompts, "dimensions": dimensions})

    asked = await off_loop(sum(map(len, texts)), make_request)
    return await embed_all(context, asked, new_id("embd"), exchange)


# ---- models ----


@router.get(
    "/api/tags", summary="List the models, by Ollama's protocol", responses=answers(OllamaModels, error=OllamaError)
)
async def tags(request: Request) -> Response:
    entries = directory_of(request).entries()
    return json_response(request, {"models": await asyncio.to_thread(lambda: [list_files(one) for one in entries])})


@router.get(
    "/api/ps",
    summary="List the loaded models, by Ollama's protocol",
    responses=answers(OllamaModels, error=OllamaError),
)
async def ps(request: Request) -> Response:
    entries = [entry for entry in directory_of(request).entries() if entry.is_in_memory]
    return json_response(
        request, {"models": await asyncio.to_thread(lambda: [describe_loaded(one) for one in entries])}
    )


@router.post(
    "/api/show",
    summary="Describe a model, by Ollama's protocol",
    responses=answers(OllamaShowAnswer, *WITH_BODY, 404, error=OllamaError),
    openapi_extra=body(OllamaShowRequest, {"model": MODEL}),
)
async def show(request: Request) -> Response:
    asked = await read_body(request, OllamaShowRequest)
    name = asked.name if asked.leaves_model_out else asked.model
    if not name:
        raise refused("model", "is missing", "the name of a model")
    directory = directory_of(request)
    known = {one for entry in directory.entries() for one in entry.names}
    entry = directory.find_entry(name if name in known else name.removesuffix(LATEST))
    return json_response(request, await asyncio.to_thread(describe_files, entry))


@router.get("/api/version", summary="The version of Ollama's API", responses=answers(OllamaVersion, error=OllamaError))
async def version(request: Request) -> Response:
    return json_response(request, {"version": API_VERSION})


@router.head("/", include_in_schema=False)
async def is_there(request: Request) -> Response:
    """Ollama's clients ask whether a server is there."""
    return Response(headers=exchange_of(request.scope).headers())
