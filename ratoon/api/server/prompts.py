"""Prompts and conversations to token ids. Long ones are worked on in a thread, so that streams go on meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import context_length_exceeded, refused
from ratoon.api.server.protocol.chat import Message, Tool
from ratoon.core.errors import RequestError
from ratoon.models.chat_template import RenderedChat

T = TypeVar("T")

LONG_TEXT = 2048  # characters: what is shorter is tokenised before a thread would have begun
NUM_THREADS = 4
# Variables of a template that have a field of their own in the request, or are nobody's to set.
RESERVED_VARIABLES = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "self", "template",
    "variables",
)  # fmt: skip
MESSAGES_FIELD = re.compile(r"messages(?:\[(\d+)\])?")

_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Of an encoder-decoder model, what its encoder reads. Its decoder's prompt is the engine's to complete."""

    text: str | None  # None: it came as token ids
    token_ids: list[int]
    decoder_prompt: str | list[int] | None = None
    notes: tuple[str, ...] = ()  # of a conversation: what the chat template does not know of it

    def as_prompt(self) -> dict[str, Any]:
        prompt = {"prompt": self.text, "prompt_token_ids": self.token_ids}
        if self.decoder_prompt is None:
            return prompt
        return {"encoder_prompt": prompt, "decoder_prompt": self.decoder_prompt}


UNKNOWN_PROMPT = EncodedPrompt(None, [])  # a continuation's: known when its parent is found


async def encode_prompts(
    context: ServerContext,
    param: str,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    num_places: int,
    decoder_prompt: str | list[int] | None = None,
) -> list[EncodedPrompt]:
    """All prompts of a request, each short enough to leave `num_places` tokens of the model's length. An encoder has a
    length of its own; `decoder_prompt` is then what all answers begin with."""
    if decoder_prompt is not None and context.llm.source.config.encoder is None:
        raise refused("decoder_prompt", "the model has no encoder, and all of a prompt is its decoder's", "prompt")
    if len(prompts) > context.settings.batch_limit:
        raise refused(param, f"has {len(prompts)} prompts", f"{context.settings.batch_limit} at most in a request")
    encoded = []
    for index, prompt in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}[{index}]"
        text, token_ids = await _encode(context, name, prompt, add_special_tokens)
        _verify_length(context, name, len(token_ids), num_places)
        encoded.append(EncodedPrompt(text, token_ids, decoder_prompt))
    return encoded


async def _encode(
    context: ServerContext, name: str, prompt: str | list[int], add_special_tokens: bool
) -> tuple[str | None, list[int]]:
    if isinstance(prompt, list):
        text, token_ids = None, prompt
        vocab_size = context.llm.source.config.vocab_size
        if max(token_ids) >= vocab_size:
            raise refused(
                name, f"token id {max(token_ids)} is not in the vocabulary", f"ids from 0 to {vocab_size - 1}"
            )
    else:
        text = prompt
        tokenizer = context.llm.get_tokenizer()
        token_ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens))
    if not token_ids:
        raise refused(name, "is empty", "at least one token")
    return text, token_ids


def _verify_length(context: ServerContext, name: str, num_tokens: int, num_places: int) -> None:
    encoder = context.llm.source.config.encoder
    if encoder is None:
        if num_tokens + num_places > context.max_model_len:
            raise context_length_exceeded(name, num_tokens, context.max_model_len, num_places)
    elif encoder.num_mel_bins is not None:
        raise refused(name, "is text, and the model's encoder reads audio", "/v1/audio/transcriptions takes audio")
    elif num_tokens > encoder.max_position:
        problem = f"has {num_tokens} tokens, and the model's encoder has {encoder.max_position} positions"
        raise refused(name, problem, f"at most {encoder.max_position} tokens", code="context_length_exceeded")


async def encode_chat(
    context: ServerContext,
    messages: Sequence[Message],
    *,
    param: str = "messages",  # where in the body they stand
    size: int,  # of all that goes into the template, in characters or so
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
    template: str | None = None,
    num_places: int | None = 1,  # of the model's length, to be left for the answer; None: any prompt will do
) -> EncodedPrompt:
    """A conversation as the chat template writes it, in token ids."""
    rendered = await render_chat(
        context,
        messages,
        param=param,
        size=size,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        template=template,
    )
    text = rendered.text
    tokenizer = context.llm.get_tokenizer()
    # The template writes the special tokens itself.
    token_ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens))
    if not token_ids:
        raise refused(param, "the chat template makes an empty prompt of them")
    if num_places is not None and len(token_ids) + num_places > context.max_model_len:
        raise context_length_exceeded(param, len(token_ids), context.max_model_len)
    return EncodedPrompt(text, token_ids, notes=rendered.notes)


async def render_chat(
    context: ServerContext,
    messages: Sequence[Message],
    *,
    size: int,
    param: str = "messages",
    earlier: Sequence[dict[str, Any]] = (),  # messages that stand before those of the request
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
    template: str | None = None,
) -> RenderedChat:
    """What the chat template writes: the request's, the server's or the model's own, in this order."""
    for name in variables or {}:
        if name in RESERVED_VARIABLES:
            problem = "is not to be set here"
            raise refused(f"chat_template_kwargs.{name}", problem, "use the request's own fields")
    if template is not None:
        size = max(size, LONG_TEXT)  # a stranger's program: however short, it may take its time
    template = template or context.settings.chat_template
    if template is None and not context.llm.has_chat_template:
        raise refused(param, "the model has no chat template", "use /v1/completions with a prompt")
    plain = [*earlier, *(message.model_dump(exclude_unset=True) for message in messages)]
    tokenizer = context.llm.get_tokenizer()

    def render() -> RenderedChat:
        return tokenizer.render_chat(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
            chat_template=template,
            **(variables or {}),
        )

    try:
        return await off_loop(size, render)
    except RecursionError:
        raise refused(param, "are nested too deeply for the chat template") from None
    except RequestError as error:
        raise _of_the_request(error, param, len(earlier)) from None


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work here if it is short, else in a thread."""
    if size < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def _of_the_request(error: RequestError, param: str, num_earlier: int) -> RequestError:
    """The same error with the name and the index that the message has in the request."""
    found = MESSAGES_FIELD.match(error.field)
    if found is None:
        return error
    field = param if found[1] is None else f"{param}[{int(found[1]) - num_earlier}]"
    return type(error)(field + error.field[found.end() :], error.problem, error.expected)
