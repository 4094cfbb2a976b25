"""The parts of an answer in the form of OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

from ratoon.api.answer_parts.parser import AnswerParser
from ratoon.api.answer_parts.parts import ContentDelta, Part, ReasoningDelta, ToolCallArguments, ToolCallBegin
from ratoon.core.outputs import CompletionOutput

TOOL_CALLS = "tool_calls"


class ChoiceReader:
    """Reads one choice, as a whole or piece by piece."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_calls = False

    def read(self, choice: CompletionOutput) -> list[Part]:
        """Returns the parts of a choice's new text."""
        parts = self._parser.push(choice.text)
        if choice.finished:
            parts += self._parser.finish()
        self._has_calls = self._has_calls or any(isinstance(part, ToolCallBegin) for part in parts)
        return parts

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """The finish reason as the client is told. An answer that max_tokens ended may have an incomplete call, and
        says so."""
        return TOOL_CALLS if self._has_calls and choice.finish_reason == "stop" else choice.finish_reason


def delta_of(part: Part) -> dict[str, Any]:
    match part:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {TOOL_CALLS: [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {TOOL_CALLS: [{"index": index, "function": {"arguments": text}}]}
