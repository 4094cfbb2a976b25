"""The marks between which models write their reasoning, by name; which ones a chat template asks for."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ratoon.api.answer_parts.parts import PartSink
from ratoon.api.answer_parts.reading import Reading, Source, opens_with, until

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Variables by which templates switch reasoning on and off: Qwen's and SmolLM's, Granite's and DeepSeek's.
SWITCHES = ("enable_thinking", "thinking")
CUSTOM_SEPARATOR = "..."  # START...END: marks of one's own


def effort_variables(effort: str | None) -> dict[str, Any]:
    """What `reasoning_effort` is for a chat template."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}


class ReasoningState(enum.Enum):
    """The state of an answer where it begins."""

    OPEN = "open"  # it is inside of the reasoning
    POSSIBLE = "possible"  # it may begin with the start mark
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str
    end: str
    opens_by_itself: bool = False  # the answer begins with reasoning even where neither prompt nor answer has the start

    def state(self, prompt: str | None) -> ReasoningState:
        """How an answer to this prompt begins: templates write the start, or, to switch reasoning off, both marks."""
        text = prompt or ""
        start, end = text.rfind(self.start), text.rfind(self.end)
        if start > end and not text[start + len(self.start) :].strip():
            return ReasoningState.OPEN
        if end >= 0 and not text[end + len(self.end) :].strip():
            return ReasoningState.OVER
        return ReasoningState.OPEN if self.opens_by_itself else ReasoningState.POSSIBLE

    def state_within(self, text: str) -> ReasoningState:
        """The state of an answer that continues this text of its own."""
        return ReasoningState.OPEN if text.rfind(self.start) > text.rfind(self.end) else ReasoningState.OVER

    def read(self, source: Source, sink: PartSink, state: ReasoningState) -> Reading[None]:
        """The reasoning, if the answer begins with any. Blanks around it belong to neither side."""
        if state is ReasoningState.OVER:
            return
        has_start = yield from opens_with(source, (self.start,))  # some models repeat the prompt's
        if not has_start and state is ReasoningState.POSSIBLE:
            return
        yield from until(source, (self.end,), sink.reasoning)
        sink.begin_content()


THINK = ("<think>", "</think>")
REASONING_FORMATS = {
    made.name: made
    for made in (
        ReasoningFormat("qwen3", *THINK),
        ReasoningFormat("deepseek_r1", *THINK, opens_by_itself=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}


def custom_reasoning_format(text: str) -> ReasoningFormat | None:
    """Marks given as START...END; None if the text is not of that form."""
    start, separator, end = text.partition(CUSTOM_SEPARATOR)
    if not separator or not start.strip() or not end.strip() or start == end:
        return None
    return ReasoningFormat(text, start, end)


def reasoning_format_of_template(template: str | None) -> ReasoningFormat | None:
    """None: the template knows no reasoning. A template that only removes reasoning from earlier answers knows it."""
    text = template or ""
    for name in ("qwen3", "mistral", "seed_oss"):
        if REASONING_FORMATS[name].end in text:
            return REASONING_FORMATS[name]
    return None
