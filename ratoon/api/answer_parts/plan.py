"""How the answers of one request are generated and read: the model's format, and what the request says about tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ratoon.api.answer_parts.grammars import (
    BLANKS,
    arguments_schema,
    call_rules,
    callable_functions,
    is_strict,
    reasoning_rules,
    strict_rules,
    text_rule,
)
from ratoon.api.answer_parts.parser import AnswerFormat, AnswerParser
from ratoon.api.answer_parts.reasoning_formats import ReasoningState
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse
from ratoon.core.errors import RequestError
from ratoon.core.params import GenerationParams
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars.validator import validate

if TYPE_CHECKING:
    from ratoon.models.tokenizer import Tokenizer

Params = TypeVar("Params", bound=GenerationParams)


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
        """Returns the parser of one choice. `prompt`: its text, at least the end of it."""
        return self.format.parser(
            prompt=prompt,
            tool_names=self.tools.parameters,
            parallel_tool_calls=self.tools.parallel,
            continued=self.continued,
        )

    def params(self, params: Params, prompt: str | None) -> Params:
        """Marks reach the text, calls that must be made are enforced, and what the text must match applies behind the
        reasoning only. RequestError names the tool whose parameters can't be enforced."""
        changes: dict[str, Any] = {}
        if self.special_tokens and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
        wanted = self.structured_output(params.structured_output, prompt)
        if wanted is not params.structured_output:
            changes["structured_output"] = wanted
        return msgspec.structs.replace(params, **changes) if changes else params

    def structured_output(self, asked: StructuredOutput | None, prompt: str | None) -> StructuredOutput | None:
        """What the whole answer must match, if its text is asked to match `asked`."""
        state = self.format.reasoning_state(prompt, self.continued)
        if self.tools.must_call:
            return self._grammar("calls", self._call_rules(), state)
        if asked is None:
            return self._strict_calls(state)
        text = text_rule(asked, beside_calls=bool(self.tools.tools))
        if self.tools.tools and text is not None:
            validate(asked)
            return self._grammar("(calls | text)", [*self._call_rules(), text], state)
        return self._text_alone(asked, text, state)

    def _strict_calls(self, state: ReasoningState) -> StructuredOutput | None:
        """Calls of functions that are strict match their schemas, wherever the model writes them."""
        strict = [(index, function) for index, function in callable_functions(self.tools) if is_strict(function)]
        rules = strict_rules(self.format.tools, self.tools, self.special_tokens) if strict else None
        if rules is None:
            return None
        self._check_parameters(strict)
        return self._grammar("free", rules, state)

    def _text_alone(self, asked: StructuredOutput, text: str | None, state: ReasoningState) -> StructuredOutput:
        reasoning = self.format.reasoning
        if reasoning is None or state is ReasoningState.OVER or asked.begins_after or asked.continue_grammar:
            return asked
        if state is ReasoningState.OPEN and reasoning.end not in self.special_tokens:
            return msgspec.structs.replace(asked, begins_after=reasoning.end)
        if text is None:  # can't be part of another grammar: it applies to all of the answer
            return asked
        validate(asked)
        return self._grammar("text", [text], state)

    def _grammar(self, last: str, rules: list[str], state: ReasoningState) -> StructuredOutput:
        """Reasoning, if there may be any, and the rule `last`."""
        reasoning = self.format.reasoning
        if reasoning is not None and state is not ReasoningState.OVER:
            is_open = state is ReasoningState.OPEN
            rules = [*rules, *reasoning_rules(reasoning, self.special_tokens, is_open)]
            last = f"{'reasoning' if is_open else 'reasoning?'} {BLANKS} {last}"
        return StructuredOutput(grammar="\n".join([f"start: {last}", *rules]) + "\n")

    def _call_rules(self) -> list[str]:
        self._check_parameters(callable_functions(self.tools))
        return call_rules(self.format.tools, self.tools, self.special_tokens)

    @staticmethod
    def _check_parameters(functions: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        for index, function in functions:
            try:
                validate(StructuredOutput(json_schema=json.dumps(arguments_schema(function))))
            except RequestError as error:
                field = f"tools[{index}].function.parameters"
                raise type(error)(field, error.problem, error.expected) from None


def answer_plan(
    format: AnswerFormat, tokenizer: Tokenizer, tools: ToolUse = NO_TOOLS, continued: str | None = None
) -> AnswerPlan:
    marks = format.marks(with_tools=bool(tools.tools))
    found = {mark: token_id for mark in marks if (token_id := tokenizer.special_token_id(mark)) is not None}
    return AnswerPlan(format, tools, found, continued)
