"""The output of a response, item by item, from the parts of the model's answer; and the typed events that report it.

Order of events: created, in_progress, for each item its own (added, its parts' deltas, done), and one of completed,
incomplete and failed. Each has the next sequence number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import msgspec

from ratoon.api.answer_parts.parts import ContentDelta, Part, ReasoningDelta, ToolCallArguments, ToolCallBegin
from ratoon.api.server import response_items
from ratoon.api.server.response_items import Item, derived_call_id, derived_id

# What Python's objects take beside what they hold.
PIECE_BYTES = 56
ENTRY_BYTES = 96

_encode = msgspec.json.Encoder().encode


def typed_event(kind: str, content: dict[str, Any]) -> bytes:
    """Returns a server-sent event that has its type twice, as the APIs of OpenAI and Anthropic have it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **content}))


class EventWriter:
    """Numbers events and collects them until they are taken. `is_on`: False where only the whole answer is wanted."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._is_silent = False
        self._number = 0
        self._events: list[bytes] = []

    def go_on(self, number: int, is_silent: bool) -> None:
        """The next event has this number. `is_silent`: nothing is written until `speak`, because it was before."""
        self._number, self._is_silent = number, is_silent

    def speak(self) -> None:
        self._is_silent = False

    def write(self, kind: str, **content: Any) -> None:
        if self._is_on and not self._is_silent:
            self._events.append(typed_event(kind, {**content, "sequence_number": self._number}))
            self._number += 1

    def take(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


class _OpenItem:
    """An item whose text is being generated. Its kinds differ in the names of events and fields."""

    kind: str
    prefix: str
    delta_event: str
    done_event: str
    done_field: str

    def __init__(self, writer: EventWriter, output: list[Item], response_id: str) -> None:
        # The same for the same response, so that another front end can go on with it.
        self.id = derived_id(self.prefix, response_id, len(output))
        self._writer = writer
        self._pieces: list[str] = []
        self._logprobs: list[msgspec.Raw] = []  # of all its tokens, if they were asked for
        self._place = {"output_index": len(output)}
        self._output = output
        output.append(self.item(None, "in_progress"))
        writer.write("response.output_item.added", item=output[-1], **self._place)
        self.begin()

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self.id, **self._place}

    def add(self, text: str, logprobs: Sequence[msgspec.Raw] = ()) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs
        self._writer.write(self.delta_event, delta=text, **self._where, **self.extra(logprobs))

    def close(self, status: str) -> None:
        text = self._text
        self._writer.write(self.done_event, **{self.done_field: text}, **self._where, **self.extra(self._logprobs))
        self.end(text)
        item = self._output[self._place["output_index"]] = self.item(text, status)
        self._writer.write("response.output_item.done", item=item, **self._place)

    def snapshot(self) -> None:
        """Puts what there is so far into the output."""
        self._output[self._place["output_index"]] = self.item(self._text, "in_progress")

    # By kind

    def item(self, text: str | None, status: str) -> Item:
        raise NotImplementedError

    def begin(self) -> None: ...

    def end(self, text: str) -> None: ...

    def extra(self, logprobs: Sequence[msgspec.Raw]) -> dict[str, Any]:
        return {}


class _OpenText(_OpenItem):
    """An item with one part of content."""

    content_index: ClassVar[dict[str, int]] = {"content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> None:
        self._writer.write("response.content_part.added", part=self.part(""), **self._where, **self.content_index)

    def end(self, text: str) -> None:
        self._writer.write("response.content_part.done", part=self.part(text), **self._where, **self.content_index)

    def extra(self, logprobs: Sequence[msgspec.Raw]) -> dict[str, Any]:
        return self.content_index


class _OpenMessage(_OpenText):
    kind, prefix = "message", "msg"
    delta_event, done_event, done_field = "response.output_text.delta", "response.output_text.done", "text"

    def item(self, text: str | None, status: str) -> Item:
        return response_items.message(text, status, item_id=self.id, logprobs=self._logprobs)

    def part(self, text: str) -> dict[str, Any]:
        return response_items.output_text(text, self._logprobs)

    def extra(self, logprobs: Sequence[msgspec.Raw]) -> dict[str, Any]:
        return {**self.content_index, "logprobs": list(logprobs)}


class _OpenReasoning(_OpenText):
    kind, prefix = "reasoning", "rs"
    delta_event, done_event, done_field = "response.reasoning_text.delta", "response.reasoning_text.done", "text"

    def item(self, text: str | None, status: str) -> Item:
        return response_items.reasoning(text, status, item_id=self.id)

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class _OpenCall(_OpenItem):
    kind, prefix = "function_call", "fc"
    delta_event = "response.function_call_arguments.delta"
    done_event, done_field = "response.function_call_arguments.done", "arguments"

    def __init__(self, writer: EventWriter, output: list[Item], response_id: str, call: ToolCallBegin) -> None:
        self._name = call.name
        self._call_id = derived_call_id(call.call_id, response_id, len(output))
        super().__init__(writer, output, response_id)

    def item(self, text: str | None, status: str) -> Item:
        return response_items.function_call(self._call_id, self._name, text or "", status, item_id=self.id)


class OutputBuilder:
    """`push` the parts of an answer in order, then `finish`. The output and the events grow meanwhile."""

    def __init__(self, output: list[Item], writer: EventWriter, response_id: str) -> None:
        self._output = output
        self._response_id = response_id
        self._writer = writer
        self._open: _OpenItem | None = None
        self.num_bytes = 0  # roughly what the output holds: its texts, and their log-probabilities

    @property
    def is_reasoning(self) -> bool:
        return self._open is not None and self._open.kind == "reasoning"

    def push(self, parts: Sequence[Part], logprobs: Sequence[Sequence[msgspec.Raw]] = ()) -> None:
        """Takes parts. `logprobs`: of the tokens of each part, if they were asked for."""
        for part, entries in zip_longest(parts, logprobs, fillvalue=()):
            match part:
                case ReasoningDelta(text):
                    self._add(self._text_item(_OpenReasoning), text)
                case ContentDelta(text):
                    self._add(self._text_item(_OpenMessage), text, entries)
                case ToolCallBegin():
                    self._close("completed")
                    self._open = _OpenCall(self._writer, self._output, self._response_id, part)
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, _OpenCall), "arguments come after their call's begin"
                    self._add(self._open, text)

    def _add(self, item: _OpenItem, text: str, entries: Sequence[msgspec.Raw] = ()) -> None:
        item.add(text, entries)
        self.num_bytes += PIECE_BYTES + len(text) + sum(len(entry) + ENTRY_BYTES for entry in entries)

    def finish(self, status: str) -> None:
        """Ends the output. An answer without any text is an empty message. `status` is that of the last item."""
        if not self._output and status == "completed":
            self._text_item(_OpenMessage)
        self._close(status)

    def snapshot(self) -> None:
        if self._open is not None:
            self._open.snapshot()

    def _text_item(self, kind: type[_OpenText]) -> _OpenItem:
        if type(self._open) is not kind:
            self._close("completed")
            self._open = kind(self._writer, self._output, self._response_id)
        assert self._open is not None
        return self._open

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None
