"""Answers of gpt-oss in its own format: channels, and messages to functions."""

from __future__ import annotations

import pytest

from ratoon.api.answer_parts.parser import AnswerFormat, choose_answer_format, parse_whole
from ratoon.api.answer_parts.parts import WholeAnswer
from ratoon.api.answer_parts.plan import AnswerPlan
from ratoon.api.answer_parts.tool_use import NO_TOOLS
from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput

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


def test_a_grammar_is_refused_by_name() -> None:
    plan = AnswerPlan(harmony(), NO_TOOLS, {})
    with pytest.raises(RequestError, match="response_format: answers in the format harmony"):
        plan.structured_output(StructuredOutput(json_object=True), PROMPT)
    assert plan.structured_output(None, PROMPT) is None
    assert set(harmony().marks(with_tools=True)) >= {"<|channel|>", "<|message|>", "<|end|>", "<|call|>"}
