"""Items of the Responses API: those of a request, checked and with ids, and the messages that chat templates get.

An item is a dict as the API returns it. One answer of the model can be several items (reasoning, text, calls), which
are one message of the assistant to a template. An image stays in its item, and is stored with it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ratoon.api.server.errors import ApiError, refused
from ratoon.core.media import IMAGE
from ratoon.core.prepared import prepared
from ratoon.models.media_parts import MediaPart, check_reads

Item = dict[str, Any]


class FoundItem(NamedTuple):
    """An item of an earlier response."""

    item: Item
    num_bytes: int  # of its JSON


ROLES = ("user", "assistant", "system", "developer")
INPUT_IMAGE = "input_image"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ITEM_FORM = 'an item such as {"role": "user", "content": "Hello"}'
REFERENCE = "item_reference"
KINDS = ("message", "function_call", "function_call_output", "reasoning", REFERENCE)
MAX_SHOWN = 64
PREVIOUS = "previous_response_id"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def derived_id(prefix: str, response_id: str, index: int) -> str:
    """Returns the id of an item of a response's output: as long as another one, and always the same."""
    digest = hashlib.blake2b(f"{response_id}/{index}".encode(), digest_size=24).hexdigest()
    return f"{prefix}_{digest}"


def derived_call_id(like: str, response_id: str, index: int) -> str:
    """Returns the id of a call in a response's output: of the form of a random one, and always the same."""
    digest = hashlib.blake2b(f"{response_id}/call/{index}".encode(), digest_size=32).hexdigest()
    prefix, _, _ = like.rpartition("_")
    start = f"{prefix}_" if prefix else ""
    return start + digest[: len(like) - len(start)]


def referred_items(given: str | Sequence[Item] | None) -> list[str]:
    """Returns the ids of items of earlier responses that a request refers to."""
    if given is None or isinstance(given, str):
        return []
    return [item_id for item in given if _kind_of(item) == REFERENCE and isinstance(item_id := item.get("id"), str)]


def read_input(
    given: str | Sequence[Item] | None,
    known: Mapping[str, FoundItem],
    max_referred: int,
    media: Collection[str] = (),
    field: str = "input",
) -> list[Item]:
    """Returns the items of a request, which are in this field. `known` are those of earlier responses that it refers
    to, `max_referred` bytes of them, `media` the kinds of media that the model reads. ApiError or RequestError names
    the first that is wrong."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message("user", given, "input", media)]
    referred = referred_items(given)
    num_bytes = sum(known[item_id].num_bytes for item_id in referred if item_id in known)
    if num_bytes > max_referred:
        raise refused(field, f"refers to items of {num_bytes} bytes", f"at most {max_referred} (--max-body)")
    return [_read_item(f"{field}[{index}]", item, known, media) for index, item in enumerate(given)]


def _kind_of(item: Item) -> Any:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else REFERENCE if set(item) == {"id"} else None
    return kind


def _read_item(name: str, item: Item, known: Mapping[str, FoundItem], media: Collection[str]) -> Item:
    kind = _kind_of(item)
    match kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise _wrong(f"{name}.role", role, ", ".join(ROLES))
            return _message(role, item.get("content"), name, media, item.get("id"))
        case "function_call":
            return function_call(
                _text_of(item, name, "call_id"),
                _text_of(item, name, "name"),
                _arguments_of(item, name),
                item_id=_id_of(item, "fc"),
            )
        case "function_call_output":
            return {
                "id": _id_of(item, "fco"),
                "type": "function_call_output",
                "status": "completed",
                "call_id": _text_of(item, name, "call_id"),
                "output": _text_or_parts(f"{name}.output", item.get("output"), media),
            }
        case "reasoning":
            texts = [_join_parts(f"{name}.{field}", item.get(field) or "") for field in ("content", "summary")]
            return reasoning(texts[0] or texts[1], item_id=_id_of(item, "rs"))
        case "item_reference":
            found = known.get(_text_of(item, name, "id"))
            if found is None:
                problem = f"there is no item {_shown(item['id'])} in a stored response"
                raise ApiError(404, f"{name}.id: {problem}", param=f"{name}.id", code="item_not_found")
            return found.item
    raise _wrong(f"{name}.type", kind, ", ".join(KINDS))


def _message(role: str, content: Any, name: str, media: Collection[str], given_id: Any = None) -> Item:
    field = name if name == "input" else f"{name}.content"
    item_id = given_id if isinstance(given_id, str) and given_id else new_id("msg")
    if role == "assistant":
        return message(_join_parts(field, content), item_id=item_id)
    parts = _text_or_parts(field, content, media)
    if isinstance(parts, str):
        parts = [{"type": "input_text", "text": parts}]
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": parts}


def _text_or_parts(name: str, content: Any, media: Collection[str]) -> str | list[Item]:
    """Returns texts as one text. With images among them they stay parts, in their places."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _join_parts(name, content)
    return [_read_part(f"{name}[{index}]", part, media) for index, part in enumerate(content)]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == INPUT_IMAGE


def _read_part(name: str, part: Any, media: Collection[str]) -> Item:
    if not _is_image(part):
        return {"type": "input_text", "text": _part_text(name, part)}
    check_reads(name, IMAGE, media)
    if part.get("file_id") is not None:
        raise refused(f"{name}.file_id", "no files are kept here", "image_url, with a data URL")
    return {"type": INPUT_IMAGE, "image_url": _text_of(part, name, "image_url"), "detail": part.get("detail") or "auto"}


def _join_parts(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(name, "is missing" if content is None else "is neither text nor a list of parts", ITEM_FORM)
    return "\n".join(_part_text(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part_text(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind in TEXT_PARTS:
        raise refused(f"{name}.text", "is missing, or not text", '{"type": "input_text", "text": "…"}')
    raise refused(name, f"is a part of type {_shown(kind)}", "this model takes text parts only")


def _arguments_of(item: Item, name: str) -> str:
    arguments = item.get("arguments")
    if not isinstance(arguments, str) or not isinstance(_parse(arguments or "{}"), dict):
        raise refused(f"{name}.arguments", "is not an object as JSON text", '"{…}"')
    return arguments


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text_of(item: Item, name: str, field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise refused(f"{name}.{field}", "is missing, or not text", "text")
    return value


def _id_of(item: Item, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else new_id(prefix)


def _wrong(name: str, value: Any, expected: str) -> ApiError:
    problem = "is missing" if value is None else f"{_shown(value)} is unknown"
    return refused(name, problem, f"one of {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# ---- items of answers ----


def output_text(text: str, logprobs: Sequence[msgspec.Raw] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message(text: str | None, status: str = "completed", *, item_id: str, logprobs: Sequence[msgspec.Raw] = ()) -> Item:
    """Returns the assistant's message. None: its text has not begun."""
    content = [] if text is None else [output_text(text, logprobs)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning(text: str | None, status: str = "completed", *, item_id: str) -> Item:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def function_call(call_id: str, name: str, arguments: str, status: str = "completed", *, item_id: str) -> Item:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


# ---- messages ----


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns items as messages that chat templates expect. A call that was cut off within its arguments is left out:
    chat refuses it."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions, by call id
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _assistant(messages, "content")["content"] = _content_of(item)
            case "message":
                messages.append({"role": item["role"], "content": _chat_content(item["content"])})
            case "reasoning":
                _assistant(messages, "reasoning_content")["reasoning_content"] = _content_of(item)
            case "function_call" if item["status"] != "incomplete" or _has_arguments(item):
                names[item["call_id"]] = item["name"]
                _assistant(messages).setdefault("tool_calls", []).append(_chat_call(item))
            case "function_call_output":
                content = _chat_content(item["output"])
                result = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                name = names.get(item["call_id"])
                messages.append(result if name is None else {**result, "name": name})
    return messages


def _assistant(messages: list[dict[str, Any]], field: str | None = None) -> dict[str, Any]:
    """Returns the assistant's message that the next item belongs to: the last one, unless it has come further already.
    The order within a message is reasoning, content, calls."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is not None and field is not None:
        is_later = "tool_calls" in last or bool(last["content"]) or (field in last and field != "content")
        last = None if is_later else last
    if last is None:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _has_arguments(item: Item) -> bool:
    return isinstance(_parse(item["arguments"] or "{}"), dict)


def _content_of(item: Item) -> str:
    return "".join(part["text"] for part in item["content"])


def _chat_content(content: str | list[Item]) -> str | list[dict[str, str]]:
    """Returns the content of a message, in which images are parts without data."""
    if isinstance(content, str):
        return content
    if not any(map(_is_image, content)):
        return "".join(part["text"] for part in content)
    return [{"type": IMAGE} if _is_image(part) else {"type": "text", "text": part["text"]} for part in content]


def images_of(items: Iterable[Item], names: Mapping[str, str]) -> list[MediaPart]:
    """Returns the images of items, in the order in which `messages_of` has them. `names` are the names of the items in
    the request, by id; others are the previous response's."""
    found = []
    for item in items:
        field = "output" if item["type"] == "function_call_output" else "content"
        parts = item.get(field)
        if item["type"] not in ("message", "function_call_output") or not isinstance(parts, list):
            continue
        name = names.get(item["id"])
        for place, part in enumerate(parts):
            if _is_image(part):
                where = PREVIOUS if name is None else f"{name}.{field}[{place}].image_url"
                found.append(MediaPart(IMAGE, part["image_url"], where))
    return found


def _chat_call(item: Item) -> dict[str, Any]:
    parsed = _parse(item["arguments"] or "{}")
    arguments = parsed if isinstance(parsed, dict) else {"arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}


# ---- items as a stored response keeps them ----
# Encoded, so that what they take is what is counted, and in pieces, so that one of them is decoded without the others.
# Python's objects take several times as much as their JSON.

PIECE_BYTES = 64 * 1024  # a piece has this much, or one item that is larger
ENTRY_BYTES = 200  # what an item takes beside its JSON and the characters of its id: an entry of the index

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(prepared(list[dict])).decode


@dataclass(frozen=True, slots=True)
class StoredItems:
    pieces: tuple[bytes, ...]  # each is the inside of a JSON list
    places: dict[str, int]  # the piece that has the item with this id
    num_bytes: int

    def __iter__(self) -> Iterator[Item]:
        for number in range(len(self.pieces)):
            yield from self.piece(number)

    def piece(self, number: int) -> list[Item]:
        return _decode(b"[%b]" % self.pieces[number])

    def as_json(self) -> list[bytes]:
        """The inside of a JSON list of all items, in parts: nothing is copied."""
        return [part for piece in self.pieces for part in (b",", piece)][1:]


def store_items(items: Iterable[Item]) -> StoredItems:
    pieces: list[bytes] = []
    places: dict[str, int] = {}
    gathered: list[bytes] = []
    size = num_bytes = 0
    for item in items:
        encoded = _encode(item)
        places[item["id"]] = len(pieces)
        num_bytes += len(encoded) + len(item["id"]) + ENTRY_BYTES
        gathered.append(encoded)
        size += len(encoded)
        if size >= PIECE_BYTES:
            pieces.append(b",".join(gathered))
            gathered, size = [], 0
    if gathered:
        pieces.append(b",".join(gathered))
    return StoredItems(tuple(pieces), places, num_bytes)


NO_ITEMS = store_items(())


def find_items(ids: Iterable[str], stored: Sequence[StoredItems]) -> dict[str, FoundItem]:
    """Finds the items with these ids that are stored. The first that has an id counts. Each piece is decoded at most
    once, and only if one of the items is in it."""
    missing, found = set(ids), {}
    for items in stored:
        here = missing & items.places.keys()
        if not here:
            continue
        for number in {items.places[item_id] for item_id in here}:
            for item in items.piece(number):
                if item["id"] in here:
                    found[item["id"]] = FoundItem(item, len(_encode(item)))
        missing -= here
        if not missing:
            break
    return found
