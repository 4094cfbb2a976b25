"""Contents of Anthropic's Messages API: those of a request as messages for chat templates, with its images apart, and
those of an answer, from its parts, with the events that report them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ratoon.api.answer_parts.parts import ContentDelta, Part, ReasoningDelta, ToolCallArguments, ToolCallBegin
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.protocol.messages import InputMessage
from ratoon.api.server.response_events import typed_event
from ratoon.core.media import IMAGE
from ratoon.models.media_parts import MediaPart, check_reads

Block = dict[str, Any]
SOURCE_FORM = '{"type": "base64", "media_type": "image/png", "data": "…"}'


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]  # as chat templates expect them
    images: list[MediaPart]  # in the order of the messages, which have a part without data for each


class ImageReader:
    """Finds the images of a conversation, in order."""

    def __init__(self, media: Collection[str]) -> None:
        self._media = media  # the kinds that the model reads
        self.found: list[MediaPart] = []

    def read(self, where: str, block: Block) -> None:
        """ApiError or RequestError: the model reads none, or the block is wrong."""
        check_reads(where, IMAGE, self._media)
        self.found.append(_read_image(where, block))


def read_conversation(
    system: str | list[Block] | None, messages: Sequence[InputMessage], media: Collection[str] = ()
) -> Conversation:
    """Returns the messages of a request. `media` are the kinds that the model reads. ApiError or RequestError names the
    first block that is wrong."""
    made: list[dict[str, Any]] = []
    images = ImageReader(media)
    if system is not None:
        made.append({"role": "system", "content": _join("system", system)})
    names: dict[str, str] = {}  # of tools, by the ids of calls
    for index, message in enumerate(messages):
        name = f"messages[{index}].content"
        if isinstance(message.content, str):
            made.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            made.append(_assistant(name, message.content, names))
        else:
            made += _others(name, message.role, message.content, names, images)
    return Conversation(made, images.found)


def _assistant(name: str, blocks: Sequence[Block], names: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    for index, block in enumerate(blocks):
        where = f"{name}[{index}]"
        match block.get("type"):
            case "text":
                texts["content"].append(_text(where, block, "text"))
            case "thinking":
                texts["reasoning_content"].append(_text(where, block, "thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                call_id, tool, given = _text(where, block, "id"), _text(where, block, "name"), block.get("input")
                if not isinstance(given, dict):
                    raise refused(f"{where}.input", "is missing, or no object", "the arguments of the call")
                names[call_id] = tool
                call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": given}}
                message.setdefault("tool_calls", []).append(call)
            case other:
                raise _unsupported(where, other)
    return {**message, **{field: "".join(pieces) for field, pieces in texts.items() if pieces}}


def _others(
    name: str, role: str, blocks: Sequence[Block], names: dict[str, str], images: ImageReader
) -> list[dict[str, Any]]:
    """Returns a message for each result of a tool, and one for the texts and images. `images` gets the latter, in the
    same order."""
    made: list[dict[str, Any]] = []
    own: list[tuple[str, Block]] = []
    for index, block in enumerate(blocks):
        where = f"{name}[{index}]"
        match block.get("type"):
            case "text" | "image":
                own.append((where, block))
            case "tool_result":
                call_id, content = _text(where, block, "tool_use_id"), block.get("content") or ""
                if isinstance(content, list) and any(_is_image(one) for one in content):
                    inner = [(f"{where}.content[{place}]", one) for place, one in enumerate(content)]
                    content = _parts(inner, images)
                else:
                    content = _join(f"{where}.content", content)
                tool = {"name": names[call_id]} if call_id in names else {}
                made.append({"role": "tool", "tool_call_id": call_id, "content": content, **tool})
            case other:
                raise _unsupported(where, other)
    if own or not made:
        made.append({"role": role, "content": _parts(own, images)})
    return made


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == IMAGE


def _parts(blocks: Sequence[tuple[str, Any]], images: ImageReader) -> str | list[Block]:
    """Returns texts as one text, and with images among them as parts."""
    parts: list[Block] = []
    for where, block in blocks:
        if _is_image(block):
            images.read(where, block)
            parts.append({"type": IMAGE})
        elif isinstance(block, dict) and block.get("type") == "text":
            parts.append({"type": "text", "text": _text(where, block, "text")})
        else:
            raise _unsupported(where, block.get("type") if isinstance(block, dict) else type(block).__name__)
    if any(part["type"] == IMAGE for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _read_image(where: str, block: Block) -> MediaPart:
    """Returns the address of an image: its data are one, too."""
    source, field = block.get("source"), f"{where}.source"
    if not isinstance(source, dict):
        raise refused(field, "is missing, or no object", SOURCE_FORM)
    match source.get("type"):
        case "base64":
            kind = _text(field, source, "media_type")
            return MediaPart(IMAGE, f"data:{kind};base64,{_text(field, source, 'data')}", f"{field}.data")
        case "url":
            return MediaPart(IMAGE, _text(field, source, "url"), f"{field}.url")
        case other:
            raise refused(f"{field}.type", f"{repr(other)[:64]} is not supported", "base64 or url")


def _join(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise refused(name, "is neither text nor a list of blocks", '[{"type": "text", "text": "…"}]')
    for index, block in enumerate(content):
        if block.get("type") != "text":
            raise _unsupported(f"{name}[{index}]", block.get("type"))
    return "\n".join(_text(f"{name}[{index}]", block, "text") for index, block in enumerate(content))


def _text(name: str, block: Block, field: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise refused(f"{name}.{field}", "is missing, or not text", "text")
    return value


def _unsupported(name: str, kind: Any) -> ApiError:
    shown = repr(kind)[:64]
    return refused(name, f"is a block of type {shown}", "text, image, tool_use, tool_result and thinking are supported")


# ---- answers ----


class BlockBuilder:
    """`push` the parts of an answer in order, then `finish`: the content, and its events."""

    def __init__(self) -> None:
        self.content: list[Block] = []
        self._events: list[bytes] = []
        self._pieces: list[str] | None = None  # of the last block; None: it is complete

    def push(self, parts: Iterable[Part]) -> list[bytes]:
        for part in parts:
            match part:
                case ReasoningDelta(text):
                    self._add("thinking", text, {"type": "thinking", "thinking": "", "signature": ""})
                case ContentDelta(text):
                    self._add("text", text, {"type": "text", "text": ""})
                case ToolCallBegin(_, call_id, name):
                    self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    self._add("tool_use", text)
        return self._take()

    def finish(self) -> list[bytes]:
        self._close()
        return self._take()

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.content)

    def _add(self, kind: str, text: str, empty: Block | None = None) -> None:
        if empty is not None and (self._pieces is None or self.content[-1]["type"] != kind):
            self._begin(empty)
        assert self._pieces is not None
        self._pieces.append(text)
        field, name = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        self._write("content_block_delta", delta={"type": field, name: text})

    def _begin(self, block: Block) -> None:
        self._close()
        self.content.append(block)
        self._pieces = []
        self._write("content_block_start", content_block=block)

    def _close(self) -> None:
        if self._pieces is None:
            return
        text, block = "".join(self._pieces), self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._pieces = None
        self._write("content_block_stop")

    def _write(self, kind: str, **content: Any) -> None:
        self._events.append(typed_event(kind, {"index": len(self.content) - 1, **content}))

    def _take(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _arguments(text: str) -> dict[str, Any]:
    """Returns a call's arguments; empty for a call that was cut off."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
