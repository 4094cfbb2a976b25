"""Reads the parts of an answer from its text, as it comes or as a whole. For any cut of the text the parts are the
same, apart from where deltas of one kind are cut."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from ratoon.api.answer_parts.parts import Part, PartSink, WholeAnswer
from ratoon.api.answer_parts.reading import END, Reading, Source, until
from ratoon.api.answer_parts.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningState,
    custom_reasoning_format,
    reasoning_format_of_template,
)
from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS, ToolFormat, openai_call_id, tool_format_of_template
from ratoon.core.errors import ConfigError
from ratoon.core.suggestions import did_you_mean

AUTO = "auto"  # from the chat template
NONE = "none"


class AnswerParser:
    """The parser of one answer (one choice). `push` pieces of its text, then `finish`."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tool_format: ToolFormat | None,  # None: no calls are looked for
        tool_names: Collection[str] = (),
        *,
        reasoning_state: ReasoningState = ReasoningState.POSSIBLE,
        max_calls: int | None = None,  # further ones are dropped
    ) -> None:
        new_call_id = openai_call_id if tool_format is None else tool_format.new_call_id
        self._sink = PartSink(new_call_id, max_calls)
        self._source = Source()
        self._reading = self._read(reasoning, tool_format, tool_names, reasoning_state)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        passing = self._source.passing
        if passing is not None and passing[0].isdisjoint(text):
            passing[1](text)
        else:
            for char in text:
                self._reading.send(char)
        return self._sink.take()

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        try:
            self._reading.send(END)
        except StopIteration:
            self._sink.end()
        return self._sink.take()

    def _read(
        self,
        reasoning: ReasoningFormat | None,
        tool_format: ToolFormat | None,
        tool_names: Collection[str],
        reasoning_state: ReasoningState,
    ) -> Reading[None]:
        source = self._source
        if reasoning is not None:
            yield from reasoning.read(source, self._sink, reasoning_state)
        if tool_format is None:
            yield from until(source, (), self._sink.content)
        else:
            yield from tool_format.read(source, self._sink, tool_names)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers: chosen once, from its chat template or by name."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat

    def parser(
        self,
        *,
        prompt: str | None = None,  # the end of it says whether the answer begins with reasoning
        tool_names: Collection[str] = (),  # empty: no calls are looked for
        parallel_tool_calls: bool = True,
        continued: str | None = None,  # the beginning of the answer, where it is a continuation of that
    ) -> AnswerParser:
        return AnswerParser(
            self.reasoning,
            self.tools if tool_names else None,
            tool_names,
            reasoning_state=self.reasoning_state(prompt, continued),
            max_calls=None if parallel_tool_calls else 1,
        )

    def reasoning_state(self, prompt: str | None, continued: str | None = None) -> ReasoningState:
        if self.reasoning is None:
            return ReasoningState.OVER
        return self.reasoning.state(prompt) if continued is None else self.reasoning.state_within(continued)

    def marks(self, with_tools: bool) -> tuple[str, ...]:
        """Returns the markers that must reach the text, even if they are special tokens."""
        reasoning = () if self.reasoning is None else self.reasoning.marks
        return (*reasoning, *(self.tools.marks if with_tools else ()))


def parse_whole(parser: AnswerParser, text: str) -> WholeAnswer:
    answer = WholeAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer


@lru_cache(maxsize=64)
def choose_answer_format(template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormat:
    """Chooses the format by the names of parsers, or by what the template contains. ConfigError for an unknown name."""
    return AnswerFormat(
        _reasoning_format(template, reasoning_parser),
        tool_format_of_template(template) if tool_parser == AUTO else _tool_format(tool_parser),
    )


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """ConfigError for an unknown name."""
    choose_answer_format(None, tool_parser, reasoning_parser)


def _tool_format(name: str) -> ToolFormat:
    if name not in TOOL_FORMATS:
        raise _unknown("tool_parser", name, [AUTO, *TOOL_FORMATS])
    return TOOL_FORMATS[name]


def _reasoning_format(template: str | None, name: str) -> ReasoningFormat | None:
    if name == AUTO:
        return reasoning_format_of_template(template)
    if name == NONE:
        return None
    found = REASONING_FORMATS.get(name) or custom_reasoning_format(name)
    if found is None:
        raise _unknown("reasoning_parser", name, [AUTO, NONE, *REASONING_FORMATS], ", or marks as START...END")
    return found


def _unknown(field: str, name: str, known: list[str], also: str = "") -> ConfigError:
    expected = f"one of {', '.join(known)}{also}"
    return ConfigError(field, f"{name!r} is unknown", did_you_mean(name, known, expected))
