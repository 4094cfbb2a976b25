"""Answers of gpt-oss in its own format: channels, and messages to functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from ratoon.api.answer_parts.parser import AnswerFormat, choose_answer_format, parse_whole
from ratoon.api.answer_parts.parts import WholeAnswer
from ratoon.api.answer_parts.plan import AnswerPlan, answer_plan
from ratoon.api.answer_parts.tool_use import tool_use
from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from tests.harmony import harmony_tokenizer
from tests.unit.api.server.harness import byte_tokenizer

TEMPLATE = "{{ '<|start|>assistant<|channel|>final<|message|>' }} tools"
PROMPT = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
THOUGHTS = "<|channel|>analysis<|message|>Let me think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
WEATHER = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
CALL = WEATHER + '{"city": "Oslo"}<|call|>'
CALL_BY_ROLE = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'


def harmony() -> AnswerFormat:
    return choose_answer_format(TEMPLATE)


def read(text: str, prompt: str | None = PROMPT, size: int = 0, **how: object) -> WholeAnswer:
    parser = harmony().parser(prompt=prompt, tool_names=("get_weather", "add"), **how)  # type: ignore[arg-type]
    if not size:
        return parse_whole(parser, text)
    answer = WholeAnswer()
    for start in range(0, len(text), size):
        answer.add(parser.push(text[start : start + size]))
    answer.add(parser.finish())
    return answer


@pytest.mark.parametrize("size", [0, 1, 7])
def test_channels_become_reasoning_and_content(size: int) -> None:
    answer = read(THOUGHTS + FINAL, size=size)
    assert (answer.reasoning, answer.content, answer.tool_calls) == ("Let me think.", "It rains.", [])


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_message_to_a_function_is_a_call(size: int) -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    answer = read(THOUGHTS + preamble + CALL + CALL_BY_ROLE, size=size)
    assert (answer.reasoning, answer.content) == ("Let me think.", "I look it up.")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("add", '{"a": 1}'),
    ]


def test_calls_beyond_the_first_are_dropped_where_one_is_asked_for() -> None:
    answer = read(CALL.removeprefix("<|start|>assistant") + CALL_BY_ROLE, parallel_tool_calls=False)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]


def test_an_answer_that_is_cut_off_has_what_there_is() -> None:
    assert read("<|channel|>analysis<|message|>Let me").reasoning == "Let me"
    assert read(THOUGHTS + "<|start|>assistant<|chan").content == ""
    assert read("Plain text.").content == "Plain text."


def test_a_prompt_may_begin_the_reasoning() -> None:
    answer = read("I think.<|end|>" + FINAL, prompt=PROMPT + "<|channel|>analysis<|message|>")
    assert (answer.reasoning, answer.content) == ("I think.", "It rains.")


def test_a_prompt_may_begin_the_final_message() -> None:
    prompt = PROMPT + "<|channel|>final<|message|>"
    assert read("It rains.", prompt=prompt).content == "It rains."
    answer = read("It rains.<|end|>" + CALL, prompt=prompt)
    assert (answer.content, [call.name for call in answer.tool_calls]) == ("It rains.", ["get_weather"])


# ---- grammars ----

INTEGER = StructuredOutput(json_schema={"type": "integer"})
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD_TOOL = {"type": "function", "function": {"name": "add"}}
NEXT = "<|start|>assistant"
NOW = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"


def harmony_plan(*tools: Any, are_special: bool = True, choice: Any = None, **options: Any) -> AnswerPlan:
    tokenizer = harmony_tokenizer() if are_special else byte_tokenizer()
    plan = answer_plan(harmony(), tokenizer, tool_use(tools or None, choice), **options)
    return plan if are_special else dataclasses.replace(plan, special_tokens={})


def accepts(plan: AnswerPlan, asked: StructuredOutput | None, text: str, prompt: str = PROMPT) -> bool:
    """Whether an answer may be this one, and end there."""
    wanted = plan.structured_output(asked, prompt)
    assert wanted is not None and wanted.grammar is not None
    if plan.special_tokens:
        tokenizer = harmony_tokenizer()
        tokens = tokenizer.encode(text, False)
    else:
        tokenizer = byte_tokenizer()
        tokens = list(text.encode())
    matcher = LLMatcher(LLTokenizer(tokenizer.backend.to_str()), LLMatcher.grammar_from_lark(wanted.grammar))
    assert not matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("are_special", [True, False])
def test_a_form_applies_to_the_final_message_alone(are_special: bool) -> None:
    plan = harmony_plan(are_special=are_special)
    final = "<|channel|>final<|message|>12"
    for text in (final, THOUGHTS + NEXT + final, THOUGHTS + NEXT + THOUGHTS + NEXT + final):
        assert accepts(plan, INTEGER, text), text
        assert read(text).content == "12"
    for text in ("12", THOUGHTS, THOUGHTS + NEXT + final.replace("12", "x"), NOW, final + "<|end|>"):
        assert not accepts(plan, INTEGER, text), text
    inside = PROMPT + "<|channel|>analysis<|message|>"
    assert accepts(plan, INTEGER, "Hm.<|end|>" + NEXT + final, inside)
    assert not accepts(plan, INTEGER, final, inside)
    assert plan.structured_output(INTEGER, PROMPT + "<|channel|>final<|message|>") is INTEGER
    choice = StructuredOutput(choice=["yes", "no"])
    assert accepts(plan, choice, THOUGHTS + NEXT + "<|channel|>final<|message|>no")


def test_what_is_no_part_of_another_grammar_begins_with_the_final_message() -> None:
    for asked in (StructuredOutput(regex="[a-z]+"), StructuredOutput(grammar='start: "a"')):
        wanted = harmony_plan().structured_output(asked, PROMPT)
        assert wanted == msgspec.structs.replace(asked, begins_after="<|channel|>final<|message|>")


@pytest.mark.parametrize("are_special", [True, False])
def test_a_forced_call_is_a_message_to_the_function(are_special: bool) -> None:
    plan = harmony_plan(WEATHER_TOOL, ADD_TOOL, are_special=are_special, choice="required")
    call = CALL.removeprefix(NEXT)
    for text in (call, THOUGHTS + CALL, NOW):
        assert accepts(plan, None, text.removesuffix("<|call|>")), text
        assert len(read(text).tool_calls) == 1
    final = "<|channel|>final<|message|>"
    for text in (final + "no", THOUGHTS, call.replace("city", "town"), NOW + CALL, NOW.replace("{}", '{"a": 1}')):
        assert not accepts(plan, None, text), text
    named = harmony_plan(
        WEATHER_TOOL, ADD_TOOL, are_special=are_special, choice={"type": "function", "function": {"name": "add"}}
    )
    call = call.removesuffix("<|call|>")
    assert accepts(named, None, THOUGHTS + NEXT + NOW) and not accepts(named, None, call)
    # A form beside tools: a call, or a final message that matches.
    both = harmony_plan(WEATHER_TOOL, are_special=are_special)
    assert accepts(both, INTEGER, call) and accepts(both, INTEGER, THOUGHTS + NEXT + final + "12")
    assert not accepts(both, INTEGER, final + "text")
    assert both.structured_output(None, PROMPT) is None, "auto: the model decides"


@pytest.mark.parametrize("are_special", [True, False])
def test_strict_functions_match_their_schemas(are_special: bool) -> None:
    strict = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}
    plan = harmony_plan(strict, ADD_TOOL, are_special=are_special)
    preamble = "<|channel|>commentary<|message|>I look it up.<|end|>"
    call = CALL.removeprefix(NEXT).removesuffix("<|call|>")
    any_call = NOW.replace("{}", '{"a": 1}')
    after_words = preamble + NEXT + call
    for text in (call, after_words, THOUGHTS + NEXT + after_words, any_call, THOUGHTS + FINAL[:-10]):
        assert accepts(plan, None, text), text
    assert not accepts(plan, None, call.replace("city", "town"))
    assert not accepts(plan, None, call.replace("get_weather", "unknown"))


def test_what_can_not_be_called_is_named() -> None:
    spaced = {"type": "function", "function": {"name": "two words"}}
    with pytest.raises(RequestError, match=r"tools\[1\].function.name: 'two words' can't be called"):
        harmony_plan(ADD_TOOL, spaced, choice="required").structured_output(None, PROMPT)
    wrong = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"x": {"type": "nothing"}}}}}
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters"):
        harmony_plan(wrong, choice="required").structured_output(None, PROMPT)
    assert set(harmony().marks(with_tools=True)) >= {"<|channel|>", "<|message|>", "<|end|>", "<|call|>"}
