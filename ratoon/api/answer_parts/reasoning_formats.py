"""The marks between which models write their reasoning, by name; which ones a chat template asks for."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
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

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns the markers that must reach the text, even if they are special tokens."""
        return self.start, self.end

    @property
    def has_channels(self) -> bool:
        """Whether an answer is a sequence of messages, of which reasoning is one kind, and calls and content others."""
        return False

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


class HarmonyFormat(ReasoningFormat):
    """The format of gpt-oss: an answer is a sequence of messages in channels, of which "analysis" is the reasoning. A
    message to a function is a call; all others are content.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{…}<|call|>, or <|channel|>final<|message|>…<|return|>
    """

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*HARMONY_ENDS, "<|channel|>", "<|message|>", "<|constrain|>")

    @property
    def has_channels(self) -> bool:
        return True

    def state(self, prompt: str | None) -> ReasoningState:
        """A prompt ends before the channel of the answer, unless it begins a message for it."""
        text = (prompt or "").rstrip()
        if text.endswith(HARMONY_FINAL):
            return ReasoningState.OVER
        return ReasoningState.OPEN if text.endswith(self.start) else ReasoningState.POSSIBLE

    def read(self, source: Source, sink: PartSink, state: ReasoningState) -> Reading[None]:
        """All messages of the answer. One without any is content. Where the reasoning is over, the answer is inside of
        its final message."""
        header = {ReasoningState.POSSIBLE: [], ReasoningState.OPEN: [self.start], ReasoningState.OVER: [HARMONY_FINAL]}[
            state
        ]
        if not header and not (yield from opens_with(source, HARMONY_BEGINS)):
            return
        while header or (yield from until(source, ("<|message|>",), header.append)) is not None:
            emit = _begin_message(sink, "".join(header))
            header = []
            if (yield from until(source, HARMONY_ENDS, emit)) is None:
                return


def _begin_message(sink: PartSink, header: str) -> Callable[[str], None]:
    """Where the text of a message goes, by what stands before it."""
    recipient = HARMONY_RECIPIENT.search(header)
    if recipient is not None:
        sink.begin_call(recipient[1])
        return sink.arguments
    if "analysis" in header:
        return sink.reasoning
    sink.begin_content()
    return sink.content


HARMONY_FINAL = "<|channel|>final<|message|>"
HARMONY_NEXT = "<|start|>assistant"  # before the channel of a message; that of the first one is in the prompt
HARMONY_NAME = re.compile(r"[\w.-]+")  # of a function
HARMONY_BEGINS = ("<|channel|>", HARMONY_NEXT)
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
THINK = ("<think>", "</think>")
REASONING_FORMATS = {
    made.name: made
    for made in (
        ReasoningFormat("qwen3", *THINK),
        ReasoningFormat("deepseek_r1", *THINK, opens_by_itself=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        HarmonyFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
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
    if "<|channel|>" in text and "<|message|>" in text:
        return REASONING_FORMATS["harmony"]
    for name in ("qwen3", "mistral", "seed_oss"):
        if REASONING_FORMATS[name].end in text:
            return REASONING_FORMATS[name]
    return None
