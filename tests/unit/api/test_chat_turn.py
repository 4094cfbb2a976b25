"""A turn from Python: prompt, params and parts; and how `ratoon chat` prints reasoning."""

from __future__ import annotations

import pytest

from ratoon import LLM, ChatTurn, RequestError, SamplingParams
from ratoon.api.commands.chat_answerers import DIM, ONLY_REASONING, PLAIN, LocalAnswerer, PrintedAnswer
from ratoon.core.errors import ConfigError
from tests.unit.api.server.harness import byte_tokenizer, say
from tests.unit.engine.fakes import model_config

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MESSAGES = [{"role": "user", "content": "1+1?"}]
TEMPLATE = "{{ messages[-1].content }}{% if tools %}[tools]{% endif %}{# <tool_call></think> #}"


@pytest.fixture
def llm(client, source):
    source.config = model_config(max_position=512)
    source.load_tokenizer = lambda: byte_tokenizer(TEMPLATE)
    with LLM("fake") as made:
        yield made


def test_a_turn_has_prompt_params_and_parts(llm, client):
    client.script = say(f"<think>use add</think>{CALL}")
    turn = ChatTurn(llm, MESSAGES, tools=[TOOL])
    params = SamplingParams(max_tokens=200)
    assert turn.prompt["prompt"] == "1+1?[tools]" and turn.params(params) == params
    (output,) = llm.generate(turn.prompt, turn.params(params))
    answer = turn.read(output)
    assert (answer.reasoning, answer.content) == ("use add", "")
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    message = answer.as_openai_message()
    assert message["tool_calls"] == [call.as_openai()] and message["reasoning_content"] == "use add"
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "2"}
    assert ChatTurn(llm, [*MESSAGES, message, result]).prompt["prompt"].startswith("2")


def test_a_turn_can_be_streamed(llm, client):
    client.script = say(f"Hm {CALL}")
    turn = ChatTurn(llm, MESSAGES, tools=[TOOL])
    parser, parts = turn.parser(), []
    for output in llm.stream(turn.prompt, turn.params(SamplingParams(max_tokens=200))):
        parts += parser.push(output.outputs[0].text)
    parts += parser.finish()
    assert [type(part).__name__ for part in parts if type(part).__name__ != "ToolCallArguments"] == [
        *(["ContentDelta"] * 2),
        "ToolCallBegin",
    ]


def test_a_call_can_be_forced(llm):
    params = ChatTurn(llm, MESSAGES, tools=[TOOL], tool_choice="required").params()
    assert params.structured_output is not None and '"add"' in params.structured_output.grammar.replace("\\", "")


def test_what_is_wrong_is_named(llm):
    with pytest.raises(RequestError, match="tool_choice"):
        ChatTurn(llm, MESSAGES, tool_choice="required")
    with pytest.raises(ConfigError, match="did you mean hermes"):
        ChatTurn(llm, MESSAGES, tool_parser="hermees")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reasoning_is_dimmed_on_a_terminal_and_left_out_elsewhere(llm, client, monkeypatch, capsys, is_terminal):
    client.script = say("<think>Hm.</think>Yes.")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    answer = PrintedAnswer()
    LocalAnswerer(llm, SamplingParams(max_tokens=100)).answer(MESSAGES, answer)
    answer.finish()
    printed = capsys.readouterr().out
    assert printed.endswith("Yes.") and answer.text == "Yes." and not answer.note
    assert (f"{DIM}H{PLAIN}" in printed) == is_terminal
    if not is_terminal:
        assert printed == "Yes."


def test_an_answer_without_content_says_why(llm, client, capsys):
    client.script = say("<think>Hm")
    answer = PrintedAnswer()
    LocalAnswerer(llm, SamplingParams(max_tokens=100)).answer(MESSAGES, answer)
    answer.finish()
    assert (answer.text, answer.note) == ("", ONLY_REASONING)
