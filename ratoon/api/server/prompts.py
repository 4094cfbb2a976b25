"""Prompts and conversations to token ids. Long ones are processed in a thread, so that streams are not delayed."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

from ratoon.api.answer_parts.tool_use import ToolUse
from ratoon.api.server import threads
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import ApiError, context_length_exceeded, refused
from ratoon.api.server.media import Media, chat_media, load_media
from ratoon.api.server.protocol.chat import ChatCompletionRequest, Message
from ratoon.api.server.protocol.completions import PromptEmbeds
from ratoon.api.server.threads import Lane, WorkLanes, off_loop
from ratoon.core.errors import RequestError
from ratoon.models.chat_template import RenderedChat, TrustedTemplate
from ratoon.models.template_process import MAX_PROCESSES

MAX_COUNTED = 4 * 2**20  # characters: limit for a text that is only counted, and is too long for a prompt
# Template variables that have their own field in the request, or must not be set.
RESERVED_VARIABLES = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "self", "template",
    "variables",
)  # fmt: skip
BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}
MESSAGES_FIELD = re.compile(r"messages(?:\[(\d+)\])?")

# Requests' own templates wait for a child process (models/template_process.py) in threads that only they use.
_template_lane = WorkLanes("template", 0, (Lane(math.inf, MAX_PROCESSES),))


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """For an encoder-decoder model, the encoder's input; the engine builds the decoder's prompt."""

    text: str | None  # None: given as token ids
    token_ids: list[int]
    decoder_prompt: str | list[int] | None = None
    notes: tuple[str, ...] = ()  # of a conversation: features that the chat template does not support
    media: Media | None = None  # images and videos, each of which has one placeholder in the tokens
    processor_options: dict[str, Any] | None = None  # for the preprocessing of media
    embeds: Any = None  # an array [tokens, hidden size] in the place of the tokens, whose ids are 0

    def as_prompt(self) -> dict[str, Any]:
        if self.embeds is not None:
            return {"prompt_embeds": self.embeds}
        prompt: dict[str, Any] = {"prompt": self.text, "prompt_token_ids": self.token_ids}
        if self.media is not None:
            prompt["multi_modal_data"] = self.media
            if self.processor_options:
                prompt["mm_processor_kwargs"] = self.processor_options
        if self.decoder_prompt is None:
            return prompt
        return {"encoder_prompt": prompt, "decoder_prompt": self.decoder_prompt}


UNKNOWN_PROMPT = EncodedPrompt(None, [])  # of a continuation: known when its parent is found


def check_count(context: ServerContext, param: str, count: int, what: str = "prompts") -> None:
    """ApiError: the field has more prompts than a request may have. To be called before there is work for each."""
    if count > context.settings.batch_limit:
        raise refused(param, f"has {count} {what}", f"{context.settings.batch_limit} at most in a request")


async def encode_prompts(
    context: ServerContext,
    param: str,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    num_places: int,
    decoder_prompt: str | list[int] | None = None,
) -> list[EncodedPrompt]:
    """Encodes all prompts of a request, each short enough to leave `num_places` tokens of the model's length. An
    encoder has its own length; `decoder_prompt` is then the beginning of all answers."""
    if decoder_prompt is not None and context.llm.source.config.encoder is None:
        raise refused("decoder_prompt", "the model has no encoder", "prompt")
    check_count(context, param, len(prompts))
    encoder = context.llm.source.config.encoder
    if encoder is not None and encoder.num_mel_bins is not None:
        raise refused(param, "is text, and the model's encoder reads audio", "/v1/audio/transcriptions takes audio")
    limit = context.max_model_len - num_places if encoder is None else encoder.max_position

    def too_long(name: str, num_tokens: str) -> ApiError:
        if encoder is None:
            return context_length_exceeded(name, num_tokens, context.max_model_len, num_places)
        problem = f"has {num_tokens} tokens, and the model's encoder has {limit} positions"
        return refused(name, problem, f"at most {limit} tokens", code="context_length_exceeded")

    def encode_all() -> list[EncodedPrompt]:
        encoded = []
        for index, prompt in enumerate(prompts):
            name = param if len(prompts) == 1 else f"{param}[{index}]"
            text, token_ids = _encode(context, name, prompt, add_special_tokens, limit, partial(too_long, name))
            encoded.append(EncodedPrompt(text, token_ids, decoder_prompt))
        return encoded

    return await off_loop(sum(map(len, prompts)), encode_all)


async def decode_embeds(context: ServerContext, given: PromptEmbeds) -> EncodedPrompt:
    """Returns embeddings that take the place of all tokens of a prompt. Whether they fit the model is checked by the
    engine's front end."""
    param, (*before, num_tokens, width) = "prompt_embeds", given.shape
    expected = f"[tokens, {context.llm.source.config.hidden_size}]"
    if any(size != 1 for size in before) or not num_tokens or not width:
        raise refused(f"{param}.shape", f"is {given.shape}", expected)
    if num_tokens > context.max_model_len - 1:
        raise context_length_exceeded(param, str(num_tokens), context.max_model_len, 1)
    num_bytes = num_tokens * width * BYTES_PER_NUMBER[given.dtype]

    def decode() -> Any:
        try:
            data = base64.b64decode(given.data, validate=True)
        except (binascii.Error, ValueError):  # the latter: characters that are not ASCII
            raise refused(f"{param}.data", "is no valid base64", "the numbers in base64") from None
        if len(data) != num_bytes:
            problem = f"has {len(data)} bytes, and {given.dtype} of the shape {given.shape} takes {num_bytes}"
            raise refused(f"{param}.data", problem, "all numbers of the shape")
        return _array_of(data, given.dtype).reshape(num_tokens, width)

    return EncodedPrompt(None, [0] * num_tokens, embeds=await off_loop(len(given.data), decode))


def _array_of(data: bytes, dtype: str) -> Any:
    """The numbers, little-endian; bfloat16, which numpy does not have, as float32."""
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _encode(
    context: ServerContext,
    name: str,
    prompt: str | list[int],
    add_special_tokens: bool,
    limit: int,
    too_long: Callable[[str], ApiError],
) -> tuple[str | None, list[int]]:
    if isinstance(prompt, list):
        text, token_ids = None, prompt
        if len(token_ids) > limit:
            raise too_long(str(len(token_ids)))
        vocab_size = context.llm.source.config.vocab_size
        if max(token_ids) >= vocab_size:
            raise refused(
                name, f"token id {max(token_ids)} is not in the vocabulary", f"ids from 0 to {vocab_size - 1}"
            )
    else:
        text = prompt
        token_ids = _encode_text(context, text, add_special_tokens, limit, too_long)
    if not token_ids:
        raise refused(name, "is empty", "at least one token")
    return text, token_ids


async def encode_text(
    context: ServerContext, text: str, add_special_tokens: bool, limit: int, too_long: Callable[[str], ApiError]
) -> list[int]:
    """Returns at most `limit` tokens, or the error that `too_long` builds from their number. Most longer texts are
    refused before they are tokenised, which would take time and memory."""
    return await off_loop(len(text), partial(_encode_text, context, text, add_special_tokens, limit, too_long))


def _encode_text(
    context: ServerContext, text: str, add_special_tokens: bool, limit: int, too_long: Callable[[str], ApiError]
) -> list[int]:
    """Encodes a text in the calling thread."""
    tokenizer = context.llm.get_tokenizer()
    num_tokens = tokenizer.refuse_early(text, limit)
    if num_tokens is not None:
        raise too_long(f"at least {num_tokens}")
    token_ids = tokenizer.encode(text, add_special_tokens)
    if len(token_ids) > limit:
        raise too_long(str(len(token_ids)))
    return token_ids


async def count_text(context: ServerContext, name: str, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the tokens of a text that is only counted: it may exceed the model's length, up to a limit of
    characters."""
    tokenizer = context.llm.get_tokenizer()

    def encode() -> list[int] | None:
        if len(text) > MAX_COUNTED and tokenizer.min_tokens(text, context.max_model_len) > context.max_model_len:
            return None
        return tokenizer.encode(text, add_special_tokens)

    found = await off_loop(len(text), encode)
    if found is None:
        raise refused(name, f"has {len(text)} characters", f"at most {MAX_COUNTED}, or what the model can take")
    return found


async def encode_within_context(
    context: ServerContext, param: str, text: str, add_special_tokens: bool = False
) -> list[int]:
    """Encodes a text. ApiError if the model's length leaves no room for an answer."""
    length = context.max_model_len
    too_long = partial(context_length_exceeded, param, max_model_len=length)
    return await encode_text(context, text, add_special_tokens, length - 1, too_long)


class TemplateOptions(TypedDict, total=False):
    """What a chat template gets beside the messages: parameters of `render_messages`."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    variables: dict[str, Any] | None
    template: str | None


def template_options(asked: ChatCompletionRequest, tools: ToolUse) -> TemplateOptions:
    return {
        "tools": tools.tools,
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": bool(asked.continue_final_message),
        "variables": asked.template_variables(),
        "template": asked.chat_template,
    }


async def encode_chat(
    context: ServerContext,
    messages: Sequence[Message],
    *,
    param: str = "messages",  # the field of the body with the messages
    size: int,  # of all input to the template, in characters, roughly
    add_special_tokens: bool = False,
    is_counted: bool = False,  # only: no limit on the prompt, and media are not loaded
    processor_options: dict[str, Any] | None = None,
    **options: Unpack[TemplateOptions],
) -> EncodedPrompt:
    """Returns a conversation as the chat template writes it, in token ids, with its images and videos."""
    parts = chat_media(context, [{"content": message.content} for message in messages], param)
    rendered = await render_chat(context, messages, param=param, size=size, **options)
    encode = count_text if is_counted else encode_within_context
    token_ids = await encode(context, param, rendered.text, add_special_tokens)
    if not token_ids:
        raise refused(param, "the chat template renders an empty prompt")
    media = None if is_counted else await load_media(context, parts)
    return EncodedPrompt(
        rendered.text, token_ids, notes=rendered.notes, media=media, processor_options=processor_options
    )


async def render_chat(
    context: ServerContext,
    messages: Sequence[Message],
    *,
    size: int,
    param: str = "messages",
    earlier: Sequence[dict[str, Any]] = (),  # messages before those of the request
    **options: Unpack[TemplateOptions],
) -> RenderedChat:
    """Returns the text of a conversation by a chat template: the request's, the server's or the model's own, in this
    order."""
    try:
        return await render_messages(
            context,
            lambda: [*earlier, *(message.model_dump(exclude_unset=True) for message in messages)],
            size=size,
            param=param,
            **options,
        )
    except RequestError as error:
        raise _of_the_request(error, param, len(earlier)) from None


async def render_messages(
    context: ServerContext,
    messages: Callable[[], list[dict[str, Any]]],  # called where the template is rendered, off the event loop
    *,
    size: int,
    param: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
    template: str | None = None,
) -> RenderedChat:
    """Returns the text for messages and tools as a template gets them. A RequestError names messages by their index."""
    for name in variables or {}:
        if name in RESERVED_VARIABLES:
            problem = "can't be set here"
            raise refused(f"chat_template_kwargs.{name}", problem, "use the request's own fields")
    lanes = _template_lane if template else threads.lanes
    if not template and context.settings.chat_template is not None:
        template = TrustedTemplate(context.settings.chat_template)
    if not template and not context.llm.has_chat_template:
        raise refused(param, "the model has no chat template", "use /v1/completions with a prompt")
    tokenizer = context.llm.get_tokenizer()

    def render() -> RenderedChat:
        return tokenizer.render_chat(
            messages(),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools or None,
            chat_template=template or None,
            **(variables or {}),
        )

    try:
        return await lanes.run(size, render)
    except RecursionError:
        raise refused(param, "are nested too deeply for the chat template") from None


def _of_the_request(error: RequestError, param: str, num_earlier: int) -> RequestError:
    """Returns the same error with the message's name and index in the request."""
    found = MESSAGES_FIELD.match(error.field)
    if found is None:
        return error
    field = param if found[1] is None else f"{param}[{int(found[1]) - num_earlier}]"
    return type(error)(field + error.field[found.end() :], error.problem, error.expected)
