"""Answers become parts: each format, text that only looks like a call, and any cut of the text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratoon.api.answer_parts.parser import AnswerParser, choose_answer_format, parse_whole
from ratoon.api.answer_parts.parts import ContentDelta, ToolCallArguments, ToolCallBegin, WholeAnswer
from ratoon.api.answer_parts.reasoning_formats import REASONING_FORMATS, ReasoningState
from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS
from ratoon.core.errors import ConfigError

NAMES = ("add", "weather")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
WEATHER = '{"parameters": {"city": "Paris \\"<tool_call>\\""}, "name": "weather", "type": "function"}'


def make(tools: str | None = "hermes", reasoning: str | None = None, **options) -> AnswerParser:
    tool_format = None if tools is None else TOOL_FORMATS[tools]
    return AnswerParser(None if reasoning is None else REASONING_FORMATS[reasoning], tool_format, NAMES, **options)


def summary(answer: WholeAnswer) -> tuple:
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


def read(text: str, *formats, **options) -> tuple:
    return summary(parse_whole(make(*formats, **options), text))


def read_pieces(parser: AnswerParser, pieces: list[str]) -> tuple:
    answer = WholeAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return summary(answer)


CALLS = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", ["add"]),
    ("hermes", f"Let me see.\n<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.",
     ["add", "weather"]),
    ("hermes", f"<tool_call>{ADD}</tool_call>done", "done", ["add"]),
    ("hermes", f"<tool_call>{ADD}", "", ["add"]),
    ("hermes", f"<tool_call>{ADD}}}\n</tool_call>", "", ["add"]),
    ("hermes", f"<tool_call>{ADD[:-1]}</tool_call> ok", "ok", ["add"]),
    ("llama3_json", ADD.replace("arguments", "parameters"), "", ["add"]),
    ("llama3_json", f"<|python_tag|>{ADD}; {WEATHER}", "", ["add", "weather"]),
    ("llama3_json", f"Sure. <|python_tag|>{ADD}", "Sure.", ["add"]),
    ("mistral", f"[TOOL_CALLS][{ADD}, {WEATHER}]", "", ["add", "weather"]),
    ("mistral", f"Well [TOOL_CALLS] [{ADD}]", "Well", ["add"]),
    ("mistral", f'[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]weather{{"city": "x"}}', "", ["add", "weather"]),
    ("json", ADD, "", ["add"]),
    ("json", f" [{ADD},\n{WEATHER}]", "", ["add", "weather"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "names"), CALLS)
def test_calls_of_every_format(name, text, content, names):
    reasoning, found, calls = read(text, name)
    assert (reasoning, found) == ("", content)
    assert [called for called, _ in calls] == names
    assert calls[0][1] == ARGUMENTS
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


NO_CALLS = [
    ("hermes", "<tool_call> is a tag"),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add'),
    ("hermes", "a <tool_cal"),
    ("hermes", ADD),
    ("hermes", " indented\n\ttext \n"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] are calls"),
    ("mistral", "[TOOL_CALLS]add[ARGS"),
    ("json", "[1, 2, 3]"),
    ("json", '{"answer": 42}'),
    ("json", f"See {ADD}"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_only_looks_like_a_call_is_content_to_the_letter(name, text):
    assert read(text, name) == ("", text, [])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": null}', "{}"),
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": 7, "name": "add", "more": [{}], "arguments": {"a": "\\\\"}}', '{"a": "\\\\"}'),
    ],
)
def test_forms_of_arguments(call, arguments):
    assert read(f"<tool_call>{call}</tool_call>", "hermes") == ("", "", [("add", arguments)])


def test_a_call_that_breaks_off_keeps_what_there_is():
    assert read('<tool_call>{"name": "add", "arguments": {"a": 1', "hermes") == ("", "", [("add", '{"a": 1')])
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>then'
    assert read(broken, "hermes") == ("", "then", [("add", '{"a": 1')])


def test_a_stream_names_the_call_before_its_arguments():
    parser = make("hermes")
    assert parser.push("Hm <tool_call>") == [ContentDelta("Hm")]
    (begin,) = parser.push('{"name": "add", ')
    assert isinstance(begin, ToolCallBegin) and (begin.index, begin.name) == (0, "add")
    assert begin.call_id.startswith("call_")
    assert parser.push('"arguments": {"a"') == [ToolCallArguments(0, '{"a"')]
    assert parser.push(": 1}") == [ToolCallArguments(0, ": 1}")]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


def test_ids_of_mistral_are_what_its_template_accepts():
    (call,) = parse_whole(make("mistral"), f"[TOOL_CALLS][{ADD}]").tool_calls
    assert len(call.call_id) == 9 and call.call_id.isalnum()


def test_without_parallel_calls_only_the_first_one_counts():
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>end"
    assert read(text, "hermes", max_calls=1) == ("", "end", [("add", ARGUMENTS)])


def test_reasoning_is_split_from_content():
    assert read("<think>\nHm.\n</think>\n\nYes.", None, "qwen3") == ("Hm.", "Yes.", [])
    assert read("Hm. \n </think>Yes.\n", None, "qwen3", reasoning_state=ReasoningState.OPEN) == ("Hm.", "Yes.\n", [])
    assert read("  Yes <think>", None, "qwen3") == ("", "  Yes <think>", [])
    assert read("<think>cut </thin", None, "qwen3") == ("cut </thin", "", [])
    assert read("[THINK]a[/THINK]b", None, "mistral") == ("a", "b", [])
    text = f"<think>use add</think><tool_call>{ADD}</tool_call>"
    assert read(text, "hermes", "qwen3") == ("use add", "", [("add", ARGUMENTS)])
    assert read(f"<think>{ADD}</think>{ADD}", "json", "qwen3") == (ADD, "", [("add", ARGUMENTS)])


@pytest.mark.parametrize(
    ("name", "prompt", "state"),
    [
        ("qwen3", "<assistant><think>\n", "open"),
        ("deepseek_r1", "<assistant>", "open"),
        ("qwen3", "<assistant>", "possible"),
        ("qwen3", None, "possible"),
        ("qwen3", "<think> is a tag<assistant>", "possible"),
        ("qwen3", "<think>\n\n</think>\n\n", "over"),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "over"),
    ],
)
def test_the_prompts_end_says_whether_reasoning_comes(name, prompt, state):
    assert REASONING_FORMATS[name].state(prompt).value == state


def test_an_answer_is_continued_where_it_stopped():
    answers = choose_answer_format("</think>")
    inside, behind = answers.parser(continued="<think>a"), answers.parser(continued="<think>a</think>b")
    assert summary(parse_whole(inside, "b</think>c")) == ("b", "c", [])
    assert summary(parse_whole(behind, "<think>c")) == ("", "<think>c", [])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, "hermes", None),
        ("{% for tool in tools %}… <tool_call> …</think>", "hermes", "qwen3"),
        ("{{ '[TOOL_CALLS]' }}[THINK][/THINK]", "mistral", "mistral"),
        ("<|python_tag|> {{ tools }}", "llama3_json", None),
        ("{{ tools }}<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder", None),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("{{ tools }}", "json", None),
        ("{{ messages }}", "hermes", None),
    ],
)
def test_formats_are_chosen_from_the_template(template, tools, reasoning):
    chosen = choose_answer_format(template)
    assert chosen.tools.name == tools
    assert (None if chosen.reasoning is None else chosen.reasoning.name) == reasoning


def test_formats_are_chosen_by_name():
    chosen = choose_answer_format("<tool_call></think>", "mistral", "none")
    assert (chosen.tools.name, chosen.reasoning) == ("mistral", None)
    marks = choose_answer_format(None, "auto", "<a>...</a>").reasoning
    assert marks is not None and (marks.start, marks.end) == ("<a>", "</a>")
    with pytest.raises(ConfigError, match="did you mean hermes"):
        choose_answer_format(None, "hermess")
    with pytest.raises(ConfigError, match=r"one of auto, none, qwen3.*START\.\.\.END"):
        choose_answer_format(None, "auto", "xyz")


PIECES = [
    "<function=", "add>", "<parameter=", "a>", "</parameter>", "</function>", "[add(", "a=1", "add()", ")",
    "<|python_start|>",
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ADD, WEATHER,
    '{"name": "', "add", '", "arguments": ', "{", "}", "[", "]", '"', "\\", ",", ":", ";", "<", " ", "\n", "text", "é",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(
    ANSWERS,
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, "qwen3"]),
    st.sampled_from(ReasoningState),
    st.lists(st.integers(0, 200)),
)
@example(f"<tool_call>\n<tool_call>{ADD}", "hermes", "qwen3", ReasoningState.OPEN, [3, 11, 14])
def test_any_cut_gives_the_same_parts(text, tools, reasoning, state, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = read(text, tools, reasoning, reasoning_state=state)
    assert read_pieces(make(tools, reasoning, reasoning_state=state), pieces) == whole
    assert read_pieces(make(tools, reasoning, reasoning_state=state), list(text)) == whole
    if tools is None and reasoning is None:
        assert whole == ("", text, [])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)))
def test_any_arguments_come_back_as_they_are(arguments):
    call = json.dumps({"name": "add", "arguments": arguments})
    for name, text in (
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("json", call),
        ("llama3_json", f"<|python_tag|>{call}"),
        ("mistral", f"[TOOL_CALLS][{call}]"),
    ):
        reasoning, content, [(_, found)] = read(text, name)
        assert (reasoning, content) == ("", "") and json.loads(found) == arguments


def test_a_long_answer_is_read_in_linear_time():
    """Brackets nested deeply, and marks that never become calls."""
    nested = '<tool_call>{"name": "add", "arguments": ' + "[" * 20_000
    assert read(nested, "hermes")[2] == [("add", "[" * 20_000)]
    text = '<tool_call>{"a": "' * 2_000
    assert read(text, "hermes") == ("", text, [])


# ---- calls that are not JSON ----

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "text": {"type": "string"}},
    },
    "weather": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "when": {"anyOf": [{"type": "null"}]}}},
    "now": None,
}
XML = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
[2, "}"]
</parameter>
<parameter=text>
two "lines"
<b>é</b>

</parameter>
</function>
</tool_call>"""


def typed(text: str, tools: str, cuts: int = 0) -> tuple:
    parser = AnswerParser(None, TOOL_FORMATS[tools], SCHEMAS)
    size = cuts or len(text) or 1
    return read_pieces(parser, [text[at : at + size] for at in range(0, len(text), size)])


@pytest.mark.parametrize("cuts", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        ("qwen3_coder", XML, "", [("add", {"a": 1, "b": [2, "}"], "text": 'two "lines"\n<b>é</b>\n'})]),
        ("qwen3_coder", f"Let me see.\n{XML}\n{XML.replace('add', 'now')}", "Let me see.", None),
        ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call> ok", "ok", [("now", {})]),
        ("qwen3_coder",
         "<function=weather><parameter=unit>C</parameter><parameter=when>None</parameter></function>", "",
         [("weather", {"unit": "C", "when": None})]),
        ("qwen3_coder", "<function=add><parameter=a>one</parameter></function>", "", [("add", {"a": "one"})]),
        ("qwen3_coder", "<function=f><parameter=x>1</parameter></function>", "", [("f", {"x": "1"})]),
        ("qwen3_coder", f"<tool_call>{ADD}</tool_call>", "", [("add", json.loads(ARGUMENTS))]),
        ("qwen3_coder", "<tool_call>\n <function= x> is no call", "<tool_call>\n <function= x> is no call", []),
        ("pythonic", "[add(a=1, b=[2, '}'], text='it\\'s, (so)')]", "",
         [("add", {"a": 1, "b": [2, "}"], "text": "it's, (so)"})]),
        ("pythonic", ' [now(), weather(unit="C", when=None, x={"a": -1.5, "b": (true, False)},)]', "",
         [("now", {}), ("weather", {"unit": "C", "when": None, "x": {"a": -1.5, "b": [True, False]}})]),
        ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
        ("pythonic", f"[{ADD}]", "", [("add", json.loads(ARGUMENTS))]),
        ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
        ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
        ("pythonic", "<|python_start|>text", "<|python_start|>text", []),
        ("pythonic", "Now: [now()]", "Now: [now()]", []),
    ],
)  # fmt: skip
def test_calls_in_xml_and_python_become_json(cuts, tools, text, content, calls):
    reasoning, found_content, found = typed(text, tools, cuts)
    assert (reasoning, found_content) == ("", content)
    if calls is None:
        assert [name for name, _ in found] == ["add", "now"]
    else:
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        ("qwen3_coder", "<function=add><parameter=text>\nab", '{"text": "ab'),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter>", '{"a": 1'),
        ("pythonic", "[add(a=1, text='a", '{"a": 1'),
        ("pythonic", "[add(a=1, b=open('x'))]", '{"a": 1'),
    ],
)
def test_calls_that_break_off_have_the_arguments_so_far(tools, text, arguments):
    ((_, found),) = typed(text, tools)[2]
    assert found == arguments


def test_a_string_of_xml_is_streamed_while_it_is_written():
    parser = AnswerParser(None, TOOL_FORMATS["qwen3_coder"], SCHEMAS)
    parser.push("<tool_call>\n<function=add>\n<parameter=text>\n")
    assert parser.push("half a sen") == [ToolCallArguments(0, "half a sen")]
    assert parser.push('tence "') == [ToolCallArguments(0, 'tence \\"')]
    assert parser.push("\n</parameter>\n") == [ToolCallArguments(0, '"')]
    assert parser.push("</function>") == [ToolCallArguments(0, "}")]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True).filter(lambda name: name.isidentifier()),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(),
                     lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
    ),
    st.integers(1, 9),
)  # fmt: skip
def test_any_arguments_survive_xml_and_python(arguments, cuts):
    python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    ((_, found),) = typed(f"[now({python})]", "pythonic", cuts)[2]
    assert json.loads(found) == arguments
    schema = {
        "now": {"properties": {k: {"type": "string"} if isinstance(v, str) else {} for k, v in arguments.items()}}
    }
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if any("<" in value for value in written.values()):
        return
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    parser = AnswerParser(None, TOOL_FORMATS["qwen3_coder"], schema)
    text = f"<tool_call>\n<function=now>\n{xml}</function>\n</tool_call>"
    ((_, found),) = read_pieces(parser, [text[at : at + cuts] for at in range(0, len(text), cuts)])[2]
    assert json.loads(found) == arguments
