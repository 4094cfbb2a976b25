"""POST /v1/completions: the route, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.continuations import completion_origin
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generated_answers import Renderer, answer_stream, answer_whole, figures
from ratoon.api.server.generation import Batch, asked_lengths, check_token_limit, engine_options, make_id, names_of
from ratoon.api.server.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from ratoon.api.server.media import listed_media, load_media
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import UNKNOWN_PROMPT, EncodedPrompt, decode_embeds, encode_prompts
from ratoon.api.server.protocol.completions import DEFAULT_MAX_TOKENS, Completion, CompletionRequest
from ratoon.api.server.request_bodies import read_body
from ratoon.core.errors import RequestError
from ratoon.core.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["OpenAI"])
EXAMPLE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


@router.post(
    "/v1/completions",
    summary="Complete a prompt, or several",
    responses=answers(Completion, *WITH_BODY, 404, 409, 429, stream_of=Completion),
    openapi_extra=body(CompletionRequest, EXAMPLE),
)
async def create_completion(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    async with context.preparation.place(exchange.tenant, exchange.body_size) as place:
        asked = await read_body(request, CompletionRequest)
        try:
            renderer = CompletionRenderer(context, asked, await make_batch(context, asked, exchange))
            place.give_back()
            return await (answer_stream if asked.stream else answer_whole)(request, renderer)
        except RequestError as error:
            raise type(error)(asked.body_name(error.field), error.problem, error.expected) from None


async def make_batch(context: ServerContext, asked: CompletionRequest, exchange: Exchange) -> Batch:
    """Returns the engine's part of the request. ApiError or RequestError if it is invalid."""
    context.check_model(asked.model)
    context.llm.verify_generates()
    asked.check_companions()
    if asked.best_of not in (None, asked.num_choices()) and not asked.use_beam_search:
        raise refused("best_of", f"{asked.best_of} is not n ({asked.num_choices()})", "leave it out, and use n")
    max_tokens = asked.max_tokens
    if max_tokens == 0 and not asked.echo:
        raise refused("max_tokens", "0 generates nothing", "at least 1, or 0 with echo to score the prompt")
    if max_tokens == 0 and asked.use_beam_search:
        raise refused("max_tokens", "0 is not possible with a beam search", "at least 1")
    if max_tokens == 0 and asked.retain_kv is not None:
        raise refused("retain_kv", "a prompt that is only scored can't be continued", "max_tokens of at least 1")
    if max_tokens == 0 and asked.return_hidden_states is not None:
        problem = "a prompt that is only scored has no answer to read"
        raise refused("return_hidden_states", problem, "/v1/hidden_states reads prompts")
    if asked.prompt_logprobs is not None and asked.echo and asked.logprobs is not None:
        raise refused("prompt_logprobs", "duplicates echo with logprobs", "use one of the two")
    params = asked.generation_params(
        context.llm.get_default_sampling_params(),
        context.llm.get_default_beam_search_params(),
        asked_lengths(context, 1 if max_tokens == 0 else max_tokens, DEFAULT_MAX_TOKENS),
        asked.logprobs,
        asked.logprobs if asked.echo and asked.logprobs is not None else asked.prompt_logprobs,
    )
    origin = await completion_origin(context, asked)
    prompts, fallback = [UNKNOWN_PROMPT], None
    if origin is not None:
        check_token_limit(context, 1, params)
        fallback = partial(encode_fallback, context, asked) if has_text(asked) else None
    elif asked.prompt_embeds is not None:
        check_embeds(asked)
        check_token_limit(context, 1, params)
        prompts = [await decode_embeds(context, asked.prompt_embeds)]
    else:
        param, given = find_prompts(context, asked)
        check_token_limit(context, len(given), params)
        prompts = await encode_given(context, asked, param, given)
    return Batch(
        id=make_id("cmpl", asked.request_id),
        prompts=prompts,
        params=params,
        options=engine_options(context, asked, exchange),
        cache_salt=asked.cache_salt,
        param="prompt" if asked.encoder_prompt is None else "encoder_prompt",
        owner=exchange.tenant,
        origin=origin,
        fallback=fallback,
        names=names_of(asked.request_id, exchange),
        has_media_field=True,
        only_prompt=max_tokens == 0,
    )


def check_embeds(asked: CompletionRequest) -> None:
    """Refuses fields that have no meaning beside prompt_embeds."""
    for name in ("prompt", "encoder_prompt", "decoder_prompt", "multi_modal_data"):
        if getattr(asked, name) is not None:
            raise refused("prompt_embeds", f"can't be used together with {name}", "one of the two")
    if asked.echo:
        raise refused("echo", "a prompt of embeddings has no text", "leave it out")


async def encode_given(
    context: ServerContext, asked: CompletionRequest, param: str, given: list[str | list[int]]
) -> list[EncodedPrompt]:
    parts = listed_media(context, asked.multi_modal_data)
    if parts and len(given) != 1:
        raise refused(parts[0].field, f"belongs to one prompt, and there are {len(given)}", "one prompt in a request")
    add_special_tokens = asked.add_special_tokens is not False
    prompts = await encode_prompts(context, param, given, add_special_tokens, 1, asked.decoder_prompt)
    media = await load_media(context, parts)
    if media is None:
        return prompts
    return [replace(prompts[0], media=media, processor_options=asked.mm_processor_kwargs)]


def has_text(asked: CompletionRequest) -> bool:
    """Whether there is a prompt that is not empty; beside continuation_of an empty one is usual."""
    return bool(asked.encoder_prompt) or any(asked.prompt or ())


async def encode_fallback(context: ServerContext, asked: CompletionRequest) -> EncodedPrompt:
    """Returns the prompt of a continuation whose parent is unknown."""
    param, given = find_prompts(context, asked)
    if len(given) != 1:
        raise refused(param, f"has {len(given)} prompts, and a continuation has one", "one prompt")
    (prompt,) = await encode_given(context, asked, param, given)
    return prompt


def find_prompts(context: ServerContext, asked: CompletionRequest) -> tuple[str, list[str | list[int]]]:
    """Returns the field of the body, and its prompts."""
    if asked.encoder_prompt is None:
        return "prompt", asked.prompt or []
    if asked.prompt is not None:
        raise refused("encoder_prompt", "can't be used together with prompt", "one of the two")
    if context.llm.source.config.encoder is None:
        raise refused("encoder_prompt", "the model has no encoder", "prompt")
    return "encoder_prompt", [asked.encoder_prompt]


class CompletionRenderer(Renderer):
    WHOLE = CHUNK = "text_completion"

    def __init__(self, context: ServerContext, asked: CompletionRequest, batch: Batch) -> None:
        super().__init__(context, asked, batch)
        self._echo = bool(asked.echo)
        self._logprobs = asked.logprobs is not None
        self._prompt_logprobs = asked.prompt_logprobs is not None
        self._skip_special_tokens = batch.params.skip_special_tokens
        self._builders: dict[int, CompletionLogprobsBuilder] = {}  # by the choice's index in the answer
        self._begun: set[int] = set()

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(index, output, choice) for index, output in enumerate(outputs) for choice in output.outputs
        ]
        return {"choices": choices}

    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for choice in output.outputs:
            if self.is_worth_sending(choice) or (self._echo and self._place(index, choice) not in self._begun):
                yield {"choices": [self._choice(index, output, choice)]}

    def plain_choice(self, place: int, text: str = "") -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def has_begun(self, place: int) -> bool:
        return place in self._begun

    def _place(self, index: int, choice: CompletionOutput) -> int:
        """OpenAI numbers all choices of the first prompt, then those of the second, and so on."""
        return index * self.num_choices + choice.index

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        place = self._place(index, choice)
        first = place not in self._begun
        self._begun.add(place)
        echoed = self._prompt_text(output) if first and self._echo else ""
        body: dict[str, Any] = {
            "index": place,
            "text": echoed + choice.text,
            "logprobs": self._choice_logprobs(place, output, choice, first) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **figures(choice),
        }
        if self._prompt_logprobs and first and output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
            if first:
                body["prompt_token_ids"] = output.prompt_token_ids
                if output.encoder_prompt_token_ids is not None:
                    body["encoder_prompt_token_ids"] = output.encoder_prompt_token_ids
        return body

    def _choice_logprobs(
        self, place: int, output: RequestOutput, choice: CompletionOutput, first: bool
    ) -> dict[str, list[Any]]:
        builder = self._builders.get(place)
        if builder is None:
            builder = CompletionLogprobsBuilder(
                self.context.token_texts, self._skip_special_tokens, self.return_token_ids
            )
            self._builders[place] = builder
        answer = (choice.token_ids, choice.logprobs or [])
        if not (first and self._echo):
            return builder.build(*answer)
        prompt = builder.build(output.prompt_token_ids or [], output.prompt_logprobs or [])
        builder.end_prompt(self._prompt_text(output))
        generated = builder.build(*answer)
        return {name: prompt[name] + generated[name] for name in prompt}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.context.llm.get_tokenizer().decode(output.prompt_token_ids or [], self._skip_special_tokens)
