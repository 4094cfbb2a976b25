"""How the answers of one request are generated and read: the model's format, and what the request says about tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ratoon.api.answer_parts.parser import AnswerFormat, AnswerParser
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse
from ratoon.core.params import GenerationParams

if TYPE_CHECKING:
    from ratoon.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    format: AnswerFormat
    tools: ToolUse
    special_tokens: Mapping[str, int]  # marks of the format that the tokenizer keeps out of texts
    continued: str | None = None  # the text of an answer that is continued

    @property
    def has_parts(self) -> bool:
        """Whether answers may have parts other than content."""
        return bool(self.tools.tools) or self.format.reasoning is not None

    def parser(self, prompt: str | None) -> AnswerParser:
        """For one choice. `prompt`: its text, at least the end of it."""
        return self.format.parser(
            prompt=prompt,
            tool_names=self.tools.names,
            parallel_tool_calls=self.tools.parallel,
            continued=self.continued,
        )

    def params(self, params: GenerationParams) -> GenerationParams:
        """Marks reach the text."""
        if self.special_tokens and params.skip_special_tokens:
            return msgspec.structs.replace(params, skip_special_tokens=False)
        return params


def answer_plan(
    format: AnswerFormat, tokenizer: Tokenizer, tools: ToolUse = NO_TOOLS, continued: str | None = None
) -> AnswerPlan:
    marks = format.marks(with_tools=bool(tools.tools))
    found = {mark: token_id for mark in marks if (token_id := tokenizer.special_token_id(mark)) is not None}
    return AnswerPlan(format, tools, found, continued)
