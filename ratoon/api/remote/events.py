"""A streamed answer on its way in: bytes to server-sent events, events to typed chunks.

A load generator runs this for every token of every stream: bytes are cut by hand and only the fields that are needed
are decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None: the server does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, gc=False):
    text: str | None = None  # of a completion
    delta: Delta | None = None  # of a chat
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or ""

    @property
    def has_text(self) -> bool:
        return bool(self.new_text) or (self.delta is not None and bool(self.delta.reasoning_content))


class Chunk(msgspec.Struct, gc=False):
    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Cuts what arrives into events and returns their data, in whatever pieces it arrives."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # JSON writes its own line breaks as escapes: a raw one is always the protocol's
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (payload := _data_of(event)) is not None:
                payloads.append(payload)
        return payloads


def _data_of(event: bytes) -> bytes | None:
    """The general form: several lines, comments, other fields. None: no data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
