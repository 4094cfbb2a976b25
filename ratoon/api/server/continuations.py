"""The parent of a continuation: the answer that the body names, and the tokens that follow it.

For chat the template writes these for the new messages after an answer. The answers themselves, and their memory,
are the engine's.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.api.answer_parts.tool_use import ToolUse
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import context_length_exceeded, refused
from ratoon.api.server.media import Media, chat_media, listed_media, load_media
from ratoon.api.server.prompts import EncodedPrompt, encode_within_context, render_chat, template_options
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.api.server.protocol.sampling import SamplingFields
from ratoon.core.errors import UnknownParentError

if TYPE_CHECKING:
    from ratoon.engine.output.roots import Root

COMPANIONS = (
    "continuation_suffix",
    "continuation_choice",
    "continuation_at",
    "continuation_wait",
    "fallback_messages",
)


@dataclass(frozen=True, slots=True)
class Origin:
    parent: str  # the id of its answer
    suffix: list[int]
    param: str  # the field of the body with the suffix
    choice: int = 0
    at: int | None = None
    wait: bool = True
    cache_salt: str | None = None
    new_turn: bool = False  # the suffix begins with the end of the parent's turn
    text: str | None = None  # of the suffix, if it was made from text
    notes: tuple[str, ...] = ()  # features of the new messages that the chat template does not support
    media: Media | None = None  # images and videos of the suffix, each of which has one placeholder in it
    processor_options: dict[str, Any] | None = None  # for the preprocessing of media


class Place(NamedTuple):
    """A continuation whose parent was found."""

    parent_id: str
    at: int | None  # number of the parent's tokens to keep; None: all
    suffix: dict[str, Any]  # after them, as the engine takes it


async def completion_origin(context: ServerContext, asked: CompletionRequest) -> Origin | None:
    """Finds where a completion begins. None: it is an ordinary prompt."""
    has_prompt = asked.prompt is not None or asked.encoder_prompt is not None
    if asked.continuation_of is None:
        if not has_prompt and asked.prompt_embeds is None:
            raise refused("prompt", "one of prompt and continuation_of is needed", "either of them")
        _refuse_companions(asked)
        return None
    if asked.prompt_embeds is not None:
        raise refused("prompt_embeds", "can't be used in a continuation, which is tokens", "leave it out")
    if asked.echo:
        raise refused("echo", "can't be used in a continuation, which begins after its parent", "leave it out")
    for name in ("add_special_tokens", "decoder_prompt"):
        if getattr(asked, name) and not has_prompt:
            raise refused(name, "has no meaning in a continuation without a prompt of its own", "leave it out")
    suffix = asked.continuation_suffix or []
    if isinstance(suffix, str):
        # One that is too long for any parent is refused before the parent is looked up.
        suffix = await encode_within_context(context, "continuation_suffix", suffix)
    if asked.multi_modal_data and any(asked.prompt or ()):
        problem = "is of continuation_suffix; a prompt for the case that the answer is unknown would have more media"
        raise refused("multi_modal_data", problem, "leave the prompt out")
    media = await load_media(context, listed_media(context, asked.multi_modal_data))
    return Origin(
        parent=asked.continuation_of,
        suffix=suffix,
        param="continuation_suffix",
        choice=asked.continuation_choice or 0,
        at=asked.continuation_at,
        wait=asked.continuation_wait is not False,
        cache_salt=asked.cache_salt,
        media=media,
        processor_options=asked.mm_processor_kwargs,
    )


async def chat_origin(
    context: ServerContext, asked: ChatCompletionRequest, tools: ToolUse, body_size: int
) -> Origin | None:
    """Finds where a chat goes on. None: the whole conversation is in the request."""
    if asked.continuation_of is None:
        _refuse_companions(asked)
        return None
    if asked.add_special_tokens and asked.fallback_messages is None:
        raise refused("add_special_tokens", "has no meaning in a continuation", "leave it out")
    parts = chat_media(context, [{"content": message.content} for message in asked.messages], "messages")
    # The template renders a conversation with a marker as the answer; the text after the marker is the suffix.
    marker = f"answer-{secrets.token_hex(16)}"
    rendered = await render_chat(
        context,
        asked.messages,
        earlier=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": marker}],
        size=body_size,
        **template_options(asked, tools),
    )
    _, found, suffix = rendered.text.rpartition(marker)
    if not found:
        problem = "the chat template drops earlier answers, so none can be continued"
        raise refused("continuation_of", problem, "send the whole conversation")
    return Origin(
        parent=asked.continuation_of,
        suffix=await encode_within_context(context, "messages", suffix),
        media=await load_media(context, parts),
        processor_options=asked.mm_processor_kwargs,
        param="messages",
        choice=asked.continuation_choice or 0,
        wait=asked.continuation_wait is not False,
        cache_salt=asked.cache_salt,
        new_turn=True,
        text=suffix,
        notes=rendered.notes,
    )


async def find_place(context: ServerContext, origin: Origin, owner: str | None) -> Place | None:
    """Waits for a parent that runs, if requested. None: there is no such parent for this owner;
    ApiError: it leaves no room."""
    parent_id = await context.shared.resolve(origin.parent, owner)
    try:
        root = await context.llm.find_parent(parent_id, wait=False, owner=owner)
        if root.cache_salt != origin.cache_salt:  # another salt is another tenant, so do not wait
            return None
        if origin.wait:
            root = await context.llm.find_parent(parent_id, owner=owner)
    except UnknownParentError:
        return None
    at, suffix = _join(context, origin, root)
    num_tokens = len(root.tokens(origin.choice, at)) + len(suffix)
    if num_tokens + 1 > context.max_model_len:
        raise context_length_exceeded(origin.param, num_tokens, context.max_model_len)
    whole = EncodedPrompt(None, suffix, media=origin.media, processor_options=origin.processor_options)
    return Place(parent_id, at, whole.as_prompt())


def _join(context: ServerContext, origin: Origin, root: Root) -> tuple[int | None, list[int]]:
    """An answer that ended by itself has the end-of-turn token, and most templates write it, too: it must appear
    once. If the template ends turns in another way, it must not appear."""
    suffix, tokens = origin.suffix, root.tokens(origin.choice, origin.at)
    if not origin.new_turn or not root.choices[origin.choice]:
        return origin.at, suffix
    tokenizer = context.llm.get_tokenizer()
    if tokens[-1] not in tokenizer.special_token_ids.union(context.llm.eos_token_ids):
        return origin.at, suffix
    if tokens[-1] in suffix:
        place = suffix.index(tokens[-1])
        if not tokenizer.decode(suffix[:place], False).strip():  # else it ends one of the new messages
            return origin.at, suffix[place + 1 :]
    return len(tokens) - 1, suffix


def _refuse_companions(asked: SamplingFields) -> None:
    for name in COMPANIONS:
        if getattr(asked, name, None) is not None:
            raise refused(name, "has no meaning without continuation_of", "leave it out")
