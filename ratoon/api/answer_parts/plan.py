"""How the answers of one request are generated and read: the model's format, and what the request says about tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ratoon.api.answer_parts.parser import AnswerFormat, AnswerParser
from ratoon.api.answer_parts.reasoning_formats import (
    HARMONY_FINAL,
    HARMONY_NAME,
    HARMONY_NEXT,
    ReasoningFormat,
    ReasoningState,
)
from ratoon.api.answer_parts.tool_formats import CallForm, ToolFormat
from ratoon.api.answer_parts.tool_use import NO_TOOLS, ToolUse
from ratoon.core.closed_objects import close_objects
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
        if self.format.reasoning is not None and self.format.reasoning.has_channels:
            return self._in_channels(asked, state)
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

    def _in_channels(self, asked: StructuredOutput | None, state: ReasoningState) -> StructuredOutput | None:
        """Returns the form of an answer that is written as messages in channels: the message to a function or the
        final one, behind any number of messages of reasoning."""
        functions, special = list(callable_functions(self.tools)), self.special_tokens
        reasoning = self.format.reasoning
        assert reasoning is not None
        if self.tools.must_call:
            return self._messages("call", self._message_rules(functions), state)
        if asked is None:
            if not any(is_strict(function) for _, function in functions):
                return None
            free = [f"final: {literal(HARMONY_FINAL, special)} rest", f"rest: {ANY_TEXT}"]
            spoken = f"preamble: {literal(HARMONY_PREAMBLE, special)} {_up_to_end(reasoning, special)} "
            rules = [*self._message_rules(functions, only_strict=True), *free, spoken + literal(HARMONY_NEXT, special)]
            return self._messages("preamble* (call | final)", rules, state)
        if state is ReasoningState.OVER or asked.begins_after or asked.continue_grammar:
            return asked
        text = text_rule(asked, beside_calls=bool(functions))
        if text is None:  # can't be part of another grammar
            return msgspec.structs.replace(asked, begins_after=HARMONY_FINAL)
        validate(asked)
        rules = [f"final: {literal(HARMONY_FINAL, special)} text", text]
        if not functions:
            return self._messages("final", rules, state)
        return self._messages("(call | final)", [*self._message_rules(functions), *rules], state)

    def _message_rules(
        self, functions: Sequence[tuple[int, Mapping[str, Any]]], only_strict: bool = False
    ) -> list[str]:
        """The rule `call`, a message to one of these functions, and those that it needs. `only_strict`: the arguments
        of other functions are any object."""
        for index, function in functions:
            if not HARMONY_NAME.fullmatch(function["name"]):
                problem = f"{function['name'][:64]!r} can't be called in the format harmony"
                raise RequestError(f"tools[{index}].function.name", problem, "letters, digits, and any of _-.")
        self._check_parameters(one for one in functions if is_strict(one[1]) or not only_strict)
        names = " | ".join(f"call_{index}" for index in range(len(functions)))
        rules = [f"call: {names}"]  # <|call|>, behind it, is one of the tokens that end the model's texts
        for index, (_, function) in enumerate(functions):
            is_free = only_strict and not is_strict(function)
            schema = {"type": "object", "x-guidance": JSON_FORM} if is_free else arguments_schema(function)
            rules += _call(index, function["name"], schema, HARMONY_CALL, self.special_tokens, HARMONY_CALL.head)
        return rules

    def _messages(self, last: str, rules: list[str], state: ReasoningState) -> StructuredOutput:
        """Messages of reasoning, then the rule `last`. The first message of an answer begins with its channel: what is
        before that is in the prompt."""
        special, reasoning = self.special_tokens, self.format.reasoning
        assert reasoning is not None
        following = literal(HARMONY_NEXT, special)
        begin = {
            ReasoningState.POSSIBLE: "",
            ReasoningState.OPEN: f"{_up_to_end(reasoning, special)} {following} ",
            ReasoningState.OVER: f"{literal(reasoning.end, special)} {following} ",
        }[state]
        rules = [*rules, f"analysis: reasoning {following}", *reasoning_rules(reasoning, special, is_open=False)]
        return StructuredOutput(grammar="\n".join([f"start: {begin}analysis* {last}", *rules]) + "\n")

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


# ---- grammars of tool calls ----

MAX_PARALLEL_CALLS = 16  # in a forced answer, which could otherwise go on without an end
ANY_TEXT = r"/(.|\n)*/"
BLANKS = r"/[ \t\n]{0,4}/"  # between reasoning and what follows
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# One way to write a value, the one of Python's json.dumps, which the models have seen most.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
JSON_PIECES = r'[{}]|: |, |"(?:[^"\\]|\\.)*"'

HARMONY_CALL = CallForm(
    head="<|channel|>commentary to=functions.", middle=" <|constrain|>json<|message|>", tail="", quotes_name=False
)
HARMONY_PREAMBLE = "<|channel|>commentary<|message|>"  # what the model says before it calls a function

SpecialTokens = Mapping[str, int]  # marks that are no text for the tokenizer, and their ids


def call_rules(format: ToolFormat, use: ToolUse, special: SpecialTokens) -> list[str]:
    """The rule `calls`, and those that it needs."""
    form = format.form
    again = f" ({literal(form.between, special)} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if use.parallel else ""
    rules = []
    for index, (_, function) in enumerate(callable_functions(use)):
        rules += _call(index, function["name"], arguments_schema(function), form, special, form.head)
    names = " | ".join(f"call_{index}" for index in range(len(use.callable_names)))
    opening, closing = literal(form.opening, special), literal(form.closing, special)
    return [f"calls: {opening} call{again} {closing}", f"call: {names}", *rules]


def _call(
    index: int, name: str, schema: Mapping[str, Any], form: CallForm, special: SpecialTokens, head: str
) -> list[str]:
    begin = head + (json.dumps(name, ensure_ascii=False) if form.quotes_name else name) + form.middle
    return [
        f"call_{index}: {literal(begin, special)} arguments_{index} {literal(form.tail, special)}",
        f"arguments_{index}: %json {json.dumps(schema, ensure_ascii=False)}",
    ]


def strict_rules(format: ToolFormat, use: ToolUse, special: SpecialTokens) -> list[str] | None:
    """The rule `free`, and those that it needs: any text, in which calls match their schemas. None: calls of this
    format do not begin with a mark, so that they can't be told from other text."""
    form = format.form
    mark = next((mark for mark in format.marks if form.head.startswith(mark)), None)
    if mark is None:
        return None
    functions = [function for _, function in callable_functions(use)]
    calls = [f"call_{index}" for index in range(len(functions))]
    rules = ["free: free_call* rest", f"rest: {ANY_TEXT}", f"free_call: to_mark ({' | '.join(calls)})"]
    if mark in special:
        rules.append(f"to_mark: {ANY_TEXT} {literal(mark, special)}")
    else:
        rules.append(f"to_mark[lazy]: /(.|\\n)*{_in_expression(mark)}/")
    for index, function in enumerate(functions):
        schema = arguments_schema(function) if is_strict(function) else {"type": "object", "x-guidance": JSON_FORM}
        rules += _call(index, function["name"], schema, form, special, form.head.removeprefix(mark))
    return rules


def is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def callable_functions(use: ToolUse) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yields the functions that may be called, each with the tool's index in the request."""
    for name in use.callable_names:
        index = use.names.index(name)
        yield index, use.tools[index]["function"]


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, and have no properties that the function does not name."""
    parameters = function.get("parameters")
    if parameters is None:
        schema: dict[str, Any] = dict(NO_PARAMETERS)
    else:
        schema = close_objects({"type": "object", **parameters})
    return {**schema, "x-guidance": JSON_FORM}


def text_rule(asked: StructuredOutput, beside_calls: bool = False) -> str | None:
    """The rule `text` for what a text must match. None: it can't be part of another grammar. Beside calls that are JSON
    too, its JSON has the same form, since the library's lexer can't tell two forms apart."""
    if asked.continue_grammar or asked.begins_after is not None:
        return None
    if asked.json_schema is not None or asked.json_object:
        schema = {"type": "object"} if asked.json_schema is None else json.loads(asked.json_schema)
        if not isinstance(schema, dict):
            return None
        options: dict[str, Any] = JSON_FORM if beside_calls else {}
        if asked.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        if asked.whitespace_pattern is not None:
            options = {"whitespace_pattern": asked.whitespace_pattern}
        return f"text: %json {json.dumps({**asked.enforced(schema), 'x-guidance': options}, ensure_ascii=False)}"
    if asked.choice is not None:
        return "text: " + " | ".join(literal(text, {}) for text in dict.fromkeys(asked.choice))
    return None


def reasoning_rules(format: ReasoningFormat, special: SpecialTokens, is_open: bool) -> list[str]:
    """The rule `reasoning`, up to its end mark. If it is not open yet, it begins with its start mark."""
    start = "" if is_open else literal(format.start, special)
    rules = [f"reasoning: {start} {_up_to_end(format, special)}"]
    if format.end not in special:
        rules.append(rf"thoughts[lazy]: /(.|\n)*{_in_expression(format.end)}/")
    return rules


def _up_to_end(format: ReasoningFormat, special: SpecialTokens) -> str:
    """Any text, and the end mark of reasoning. A mark that is text needs the rule `thoughts`."""
    return f"{ANY_TEXT} {literal(format.end, special)}" if format.end in special else "thoughts"


def _in_expression(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def literal(text: str, special: SpecialTokens) -> str:
    """Special tokens in the text are tokens. JSON in it is cut into the pieces that the library makes of a schema."""
    marks = [re.escape(mark) for mark in sorted(special, key=len, reverse=True)]
    pieces = re.split(f"({'|'.join([*marks, JSON_PIECES])})", text)
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )
