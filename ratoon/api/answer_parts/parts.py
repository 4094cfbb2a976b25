"""The parts of an answer, as a stream has them, and the whole answer that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    index: int  # of the call in its answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A further part of a call's arguments: JSON text, as the model writes it. It comes after the call's begin."""

    index: int
    text: str


Part = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallArguments


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str = ""  # JSON text; incomplete if the answer ended by max_tokens

    def as_openai(self) -> dict[str, object]:
        """Returns the call as an entry of `tool_calls` in a message of OpenAI's protocol."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(slots=True)
class WholeAnswer:
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        reasoning, content = [self.reasoning], [self.content]  # joined once: an answer can have many parts
        for part in parts:
            match part:
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ContentDelta(text):
                    content.append(text)
                case ToolCallBegin(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case ToolCallArguments(index, text):
                    self.tool_calls[index].arguments += text
        self.reasoning, self.content = "".join(reasoning), "".join(content)

    def as_openai_message(self) -> dict[str, object]:
        """An assistant's message, as OpenAI's protocol has it; `reasoning_content` is vLLM's and DeepSeek's name."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_openai() for call in self.tool_calls]
        return message


class BlankHolder:
    """Passes text on, and holds blanks at its end back until more comes."""

    def __init__(self, emit: Callable[[str], None], skips: bool = False) -> None:
        self._emit = emit
        self._held: list[str] = []
        self._skips = skips  # blanks at the start

    def add(self, text: str) -> None:
        solid = text.rstrip()
        if solid:
            self._emit(solid.lstrip() if self._skips else "".join([*self._held, solid]))
            self._held, self._skips = [text[len(solid) :]], False
        elif not self._skips:
            self._held.append(text)

    def begin_again(self) -> None:
        """Drop what is held, and blanks that follow."""
        self._held, self._skips = [], True

    def release(self) -> None:
        self._emit("".join(self._held))
        self._held = []


class PartSink:
    """Collects the parts of an answer from its parser. Neighbouring pieces of one kind become one part.

    Blanks around calls and reasoning belong to neither side, so blanks at the end are held back.
    """

    def __init__(self, new_call_id: Callable[[], str], max_calls: int | None = None) -> None:
        self._new_call_id = new_call_id
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._kind = ""  # of the pieces
        self._pieces: list[str] = []
        self._content = BlankHolder(lambda text: self._add("content", text))
        self._num_calls = 0
        self.content = self._content.add
        self.reasoning = BlankHolder(lambda text: self._add("reasoning", text), skips=True).add

    def begin_content(self) -> None:
        """Content that comes behind something else: without blanks at its start."""
        self._content.begin_again()

    def begin_call(self, name: str) -> None:
        self.begin_content()
        self._flush()
        if not self._is_over_limit(self._num_calls):
            self._parts.append(ToolCallBegin(self._num_calls, self._new_call_id(), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        if not self._is_over_limit(self._num_calls - 1):
            self._add("arguments", text)

    def end(self) -> None:
        """The answer has ended."""
        self._content.release()

    def take(self) -> list[Part]:
        """The parts since the last call."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _is_over_limit(self, index: int) -> bool:
        return self._max_calls is not None and index >= self._max_calls

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces = []
        if not text:
            return
        if self._kind == "reasoning":
            self._parts.append(ReasoningDelta(text))
        elif self._kind == "content":
            self._parts.append(ContentDelta(text))
        else:
            self._parts.append(ToolCallArguments(self._num_calls - 1, text))
