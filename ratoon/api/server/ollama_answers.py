"""An answer in Ollama's API while it is generated: from outputs of the engine to lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec

from ratoon.api.answer_parts.parser import AnswerParser
from ratoon.api.answer_parts.parts import ContentDelta, Part, ReasoningDelta, ToolCallArguments, ToolCallBegin
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import ApiError, shutting_down
from ratoon.api.server.generated_answers import UsageCounter
from ratoon.api.server.generation import Batch, stream
from ratoon.api.server.responses import EventStream
from ratoon.core.outputs import CompletionOutput, RequestMetrics, RequestOutput

NANOSECONDS = 1e9


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def error_line(error: ApiError) -> bytes:
    return line({"error": error.message})


class LineStream(EventStream):
    media_type = "application/x-ndjson"


class OllamaRun:
    """One request, of /api/chat or of /api/generate."""

    def __init__(
        self,
        context: ServerContext,
        batch: Batch,
        model: str,
        parser: AnswerParser,
        *,
        is_chat: bool,
        shows_thinking: bool,
        returns_context: bool,
        load_seconds: float,
    ) -> None:
        self.batch = batch
        self.has_begun = False
        self._context = context
        self._model = model
        self._parser = parser
        self._is_chat = is_chat
        self._shows_thinking = shows_thinking
        self._returns_context = returns_context
        self._load_seconds = load_seconds
        self._begin = time.monotonic()
        self._counter = UsageCounter(batch.prompts)
        self._token_ids: list[int] = []  # of prompt and answer, if they are returned
        self._calls: list[dict[str, Any]] = []  # whole ones
        self._open_call: tuple[str, list[str]] | None = None  # name and arguments so far
        self._texts = {"content": "", "thinking": ""}  # of the whole answer
        self._final: dict[str, Any] = {}

    async def generate(self) -> AsyncGenerator[list[bytes], None]:
        async with aclosing(stream(self._context, self.batch)) as outputs:
            async for _, output in outputs:
                if lines := self.take(output):
                    yield lines

    def takes_long(self, output: RequestOutput) -> bool:
        return False  # text alone

    def take(self, output: RequestOutput) -> list[bytes]:
        self.has_begun = True
        self._counter.add(0, output)
        (choice,) = output.outputs
        if self._returns_context:
            if not self._token_ids:
                self._token_ids = list(output.prompt_token_ids or ())
            self._token_ids += choice.token_ids
        parts = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            parts += self._parser.finish()
        lines = self._lines_of(parts)
        if choice.finish_reason is not None:
            lines += self._close_call()
            self._final = self._end(choice, output.metrics)
            lines.append(line({**self._words("", ""), **self._final}))
        return lines

    def _lines_of(self, parts: list[Part]) -> list[bytes]:
        lines: list[bytes] = []
        for part in parts:
            match part:
                case ReasoningDelta(text):
                    if self._shows_thinking:
                        lines.append(self._text_line("thinking", text))
                case ContentDelta(text):
                    lines.append(self._text_line("content", text))
                case ToolCallBegin(_, _, name):
                    lines += self._close_call()
                    self._open_call = (name, [])
                case ToolCallArguments(_, text):
                    assert self._open_call is not None, "arguments follow the beginning of their call"
                    self._open_call[1].append(text)
        return lines

    def _text_line(self, kind: str, text: str) -> bytes:
        self._texts[kind] += text
        content, thinking = (text, "") if kind == "content" else ("", text)
        return line({**self._head(), **self._words(content, thinking), "done": False})

    def _close_call(self) -> list[bytes]:
        """A call is sent as a whole: its arguments are an object. One that the answer's end cut off is sent as text."""
        if self._open_call is None:
            return []
        (name, pieces), self._open_call = self._open_call, None
        try:
            arguments = json.loads("".join(pieces) or "{}")
        except ValueError:
            return [self._text_line("content", "".join(pieces))]
        call = {"function": {"name": name, "arguments": arguments}}
        self._calls.append(call)
        return [line({**self._head(), **self._words("", "", [call]), "done": False})]

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _words(self, content: str, thinking: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        about: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": content, **about}
        if calls:
            about["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": content, **about}}

    def _end(self, choice: CompletionOutput, metrics: RequestMetrics | None) -> dict[str, Any]:
        if choice.finish_reason == "abort":
            raise shutting_down()  # nothing else aborts a request whose client still waits
        usage = self._counter.usage()
        end = time.monotonic()
        first = self._begin if metrics is None or metrics.first_token_time is None else metrics.first_token_time
        context = {"context": self._token_ids} if self._returns_context else {}
        return {
            **self._head(),
            "done": True,
            "done_reason": choice.finish_reason,
            **context,
            "total_duration": _nanoseconds(end - self._begin + self._load_seconds),
            "load_duration": _nanoseconds(self._load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._begin),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(end - first),
        }

    @property
    def answer_size(self) -> int:
        return sum(map(len, self._texts.values()))

    def answer(self) -> dict[str, Any]:
        """The whole answer, when it has ended."""
        words = self._words(self._texts["content"], self._texts["thinking"], self._calls)
        return {**words, **self._final}


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * NANOSECONDS), 0)
