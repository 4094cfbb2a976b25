"""The prompt of a response: its conversation as the chat template writes it, continued from the previous response's
root as far as the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.api.answer_parts.tool_use import ToolUse
from ratoon.api.server.context import ServerContext
from ratoon.api.server.continuations import Origin
from ratoon.api.server.errors import ApiError, context_length_exceeded, refused
from ratoon.api.server.media import check_media, kinds_of, load_media
from ratoon.api.server.prompts import UNKNOWN_PROMPT, EncodedPrompt, encode_text, render_messages
from ratoon.api.server.protocol.chat import template_variables
from ratoon.api.server.protocol.responses import ResponsesRequest
from ratoon.api.server.response_items import Item, images_of, messages_of
from ratoon.api.server.response_store import StoredResponse
from ratoon.api.server.stored_turns import Turn, items_of
from ratoon.api.server.threads import off_loop
from ratoon.api.server.transcripts import Segment, Transcript, answer_segments, num_equal, shared_segments
from ratoon.core.adapters import Adapter
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.engine.output.roots import Root
from ratoon.models.chat_template import RenderedChat
from ratoon.models.conversation import Content, with_text_before
from ratoon.models.media_parts import MediaPart

PARAM = "input"  # the field of the body with the conversation
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt, and where it begins: afresh, or in the previous response."""

    text: str
    num_tokens: int
    encoded: EncodedPrompt  # unknown for a continuation
    origin: Origin | None
    inherited: Transcript  # segments of the previous response that it repeats
    notes: tuple[str, ...]
    images: Sequence[MediaPart] = ()  # of the whole conversation
    processor_options: dict[str, Any] | None = None  # for the preprocessing of images

    def transcript(self, is_continuation: bool, num_prompt_tokens: int) -> Transcript:
        """Returns the transcript of the prompt as it was computed."""
        inherited = self.inherited if is_continuation else ()
        num_chars = sum(segment.num_chars for segment in inherited)
        num_tokens = sum(segment.num_tokens for segment in inherited)
        return (*inherited, Segment.of(self.text[num_chars:], num_prompt_tokens - num_tokens))

    async def whole(self, context: ServerContext) -> EncodedPrompt:
        """Returns the prompt without its parent."""
        token_ids = await _encode(context, self.text)
        media = await load_media(context, self.images)
        return EncodedPrompt(self.text, token_ids, media=media, processor_options=self.processor_options)


async def place_prompt(
    context: ServerContext,
    asked: ResponsesRequest,
    tools: ToolUse,
    items: Sequence[Item],
    before: Turn | None,
    parent: StoredResponse | None,
    size: int,
) -> PlacedPrompt:
    """Finds where a prompt begins. `items` are the new ones, behind those up to `before`, with which the conversation
    of `parent` is compared; `size` is roughly that of the request in characters. ApiError if the conversation is too
    long, and may not be truncated or is too long nevertheless."""
    whole = items
    names = {item["id"]: f"{PARAM}[{index}]" for index, item in enumerate(items)}
    check_media(context, images_of(items, names))
    if before is not None:
        size += before.num_bytes
        if size > context.settings.max_body:
            problem = f"the conversation has {size} bytes, this turn included"
            field = "previous_response_id" if asked.conversation is None else "conversation"
            raise refused(field, problem, f"at most {context.settings.max_body} (--max-body)")
        whole = [*await off_loop(size, lambda: items_of(before)), *items]

    async def place(kept: Sequence[Item]) -> PlacedPrompt:
        rendered = await _render(context, asked, tools, kept, size)
        images = images_of(kept, names)
        # Of a shortened conversation with images the text alone does not tell whether the previous one began alike.
        beginning = None if images and len(kept) < len(whole) else parent
        adapter, options = context.check_model(asked.model), asked.mm_processor_kwargs
        return await _place(context, rendered, images, beginning, adapter, options)

    try:
        placed = await place(whole)
        if asked.truncation != "auto" or placed.num_tokens <= _room(context, asked):
            return placed
    except ApiError as error:
        if asked.truncation != "auto" or error.code != "context_length_exceeded":
            raise
    return await _truncate(context, asked, whole, place)


def _room(context: ServerContext, asked: ResponsesRequest) -> int:
    """Returns the tokens of a truncated conversation: the rest is left for the answer."""
    length = context.max_model_len
    return length - min(asked.max_output_tokens or length // 4, length // 2)


async def _truncate(context: ServerContext, asked: ResponsesRequest, items: Sequence[Item], place: Any) -> PlacedPrompt:
    """Returns the longest conversation that fits, from one of the user's messages on, with all system messages."""
    starts = [index for index, item in enumerate(items) if item.get("role") == "user"][1:]
    room = _room(context, asked)

    async def attempt(start: int) -> PlacedPrompt | ApiError:
        kept = [item for item in items[:start] if item.get("role") in SYSTEM_ROLES]
        try:
            return await place([*kept, *items[start:]])
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return error

    low, high, best = 0, len(starts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = await attempt(starts[middle])
        if isinstance(found, PlacedPrompt) and (found.num_tokens <= room or middle == len(starts) - 1):
            best, high = found, middle - 1
        else:
            low = middle + 1
    if best is None:
        raise context_length_exceeded(PARAM, "too many", context.max_model_len)
    return best


async def _render(
    context: ServerContext, asked: ResponsesRequest, tools: ToolUse, items: Sequence[Item], size: int
) -> RenderedChat:
    effort = None if asked.reasoning is None else asked.reasoning.effort
    try:
        return await render_messages(
            context,
            lambda: _with_instructions(messages_of(items), asked.instructions),
            size=size,
            param=PARAM,
            tools=tools.tools,
            variables=template_variables(effort, asked.chat_template_kwargs),
        )
    except RequestError as error:
        field = PARAM if error.field.startswith("messages") else error.field
        raise type(error)(field, error.problem, error.expected) from None


def _with_instructions(messages: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Puts the instructions into one system message: many templates take no second one."""
    if instructions is None:
        return messages
    content: Content = instructions
    rest = messages
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        content, rest = with_text_before(f"{instructions}\n\n", messages[0]["content"]), messages[1:]
    return [{"role": "system", "content": content}, *rest]


async def _place(
    context: ServerContext,
    rendered: RenderedChat,
    images: Sequence[MediaPart],
    parent: StoredResponse | None,
    adapter: Adapter | None,
    options: dict[str, Any] | None,
) -> PlacedPrompt:
    """`options`: for the preprocessing of images."""
    text, notes = rendered.text, rendered.notes
    if parent is None:
        return await _afresh(context, rendered, images, options)
    try:
        root = await context.llm.find_parent(parent.id, wait=False, owner=parent.owner)
    except UnknownParentError:
        token_ids = await _encode(context, text)  # now, so that one that is too long is refused
        origin = Origin(parent.id, [], PARAM)
        return PlacedPrompt(text, len(token_ids), UNKNOWN_PROMPT, origin, (), notes, images, options)
    if root.adapter != adapter and (root.adapter is None or adapter is None or root.adapter.digest != adapter.digest):
        return await _afresh(
            context, rendered, images, options
        )  # what another adapter computed is not valid for this one
    shared = shared_segments(await _transcript(context, parent, root), text)
    tail = await _encode(context, text[shared.num_chars :], shared.num_tokens)
    new_images = _last_images(context, images, text[shared.num_chars :])
    known = root.tokens(0)
    # A placeholder of the tail is not expanded yet, so its tokens are equal to none of the earlier ones.
    num_comparable = _first_placeholder(context, tail) if new_images else len(tail)
    num_inherited = shared.num_tokens + num_equal(known[shared.num_tokens :], tail[:num_comparable])
    if num_inherited == 0:
        return await _afresh(context, rendered, images, options)
    suffix = tail[num_inherited - shared.num_tokens :]
    at = None if num_inherited == len(known) else num_inherited
    media = await load_media(context, new_images)
    origin = Origin(parent.id, suffix, PARAM, at=at, cache_salt=root.cache_salt, media=media, processor_options=options)
    num_tokens = num_inherited + len(suffix)
    return PlacedPrompt(text, num_tokens, UNKNOWN_PROMPT, origin, shared.segments, notes, images, options)


def _last_images(context: ServerContext, images: Sequence[MediaPart], text: str) -> list[MediaPart]:
    """Returns the images of a text that a conversation ends with: as many as there are placeholders."""
    found: list[MediaPart] = []
    for kind, placeholder in kinds_of(context).items():
        of_kind = [image for image in images if image.kind == kind]
        found += of_kind[max(0, len(of_kind) - text.count(placeholder)) :]
    return found


def _first_placeholder(context: ServerContext, token_ids: Sequence[int]) -> int:
    """Returns the number of tokens before the first that is part of a placeholder."""
    tokenizer = context.llm.get_tokenizer()
    marks = {token_id for text in kinds_of(context).values() for token_id in tokenizer.encode(text, False)}
    return next((index for index, token_id in enumerate(token_ids) if token_id in marks), len(token_ids))


async def _transcript(context: ServerContext, parent: StoredResponse, root: Root) -> Transcript:
    """Returns the transcript; empty if it does not fit the root: then tokens alone are compared."""
    if not parent.transcript:
        tokenizer, token_ids = context.llm.get_tokenizer(), root.choices[0]
        answer = await off_loop(len(token_ids), lambda: answer_segments(tokenizer, token_ids))
        parent.transcript = (*parent.prompt, *answer)
    num_tokens = sum(segment.num_tokens for segment in parent.transcript)
    return parent.transcript if num_tokens == len(root.prompt_token_ids) + len(root.choices[0]) else ()


async def _afresh(
    context: ServerContext, rendered: RenderedChat, images: Sequence[MediaPart], options: dict[str, Any] | None
) -> PlacedPrompt:
    token_ids = await _encode(context, rendered.text)
    media = await load_media(context, images)
    encoded = EncodedPrompt(rendered.text, token_ids, media=media, processor_options=options)
    return PlacedPrompt(rendered.text, len(token_ids), encoded, None, (), rendered.notes, images, options)


async def _encode(context: ServerContext, text: str, num_before: int = 0) -> list[int]:
    """Encodes tokens after `num_before` others."""
    length = context.max_model_len

    def too_long(num_tokens: str) -> ApiError:
        number = num_tokens.removeprefix("at least ")
        shown = num_tokens.replace(number, str(int(number) + num_before))
        return context_length_exceeded(PARAM, shown, length)

    return await encode_text(context, text, False, max(0, length - 1 - num_before), too_long)
