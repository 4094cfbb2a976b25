"""Grammars over whole answers: what they accept is what the parser reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from ratoon.api.answer_parts.parser import choose_answer_format, parse_whole
from ratoon.api.answer_parts.plan import AnswerPlan, answer_plan
from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS
from ratoon.api.answer_parts.tool_use import tool_use
from ratoon.core.errors import RequestError
from ratoon.core.params import SamplingParams
from ratoon.core.structured import StructuredOutput
from tests.unit.api.server.harness import byte_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Number"}},
            "required": ["a"],
            "$defs": {"Number": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ONE, NONE_OF_IT = '{"a": 1}', "{}"


def make_plan(
    tools: list[Any] | None = None, choice: Any = "required", parser: str = "hermes", special: tuple[str, ...] = (),
    template: str = "", continued: str | None = None, **options: Any,
) -> AnswerPlan:  # fmt: skip
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(list(special))
    use = tool_use(tools, choice if tools else None, **options)
    return answer_plan(choose_answer_format(template, parser), tokenizer, use, continued)


def accepts(plan: AnswerPlan, asked: StructuredOutput | None, text: str, ids: dict[str, int] | None = None) -> bool:
    """Whether the grammar takes all of a text, and it may end there."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(list(plan.special_tokens))
    wanted = plan.structured_output(asked, None)
    assert wanted is not None and wanted.grammar is not None
    library = LLTokenizer(tokenizer.backend.to_str())
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(wanted.grammar))
    assert not matcher.get_error()
    tokens = tokenizer.encode(text, False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(name: str, arguments: str, parser: str) -> str:
    form = TOOL_FORMATS[parser].form
    written = json.dumps(name) if form.quotes_name else name
    return f"{form.head}{written}{form.middle}{arguments}{form.tail}"


def several(parser: str, *calls: str) -> str:
    form = TOOL_FORMATS[parser].form
    return form.opening + form.between.join(calls) + form.closing


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.one_in(3)
def test_forced_calls_have_the_form_that_the_parser_reads(parser, are_special):
    special = TOOL_FORMATS[parser].marks if are_special else ()
    plan = make_plan([ADD, NOW], parser=parser, special=special)
    add, now = call("add", ONE, parser), call("now", NONE_OF_IT, parser)
    for calls in ([add], [now], [add, now]):
        text = several(parser, *calls)
        assert accepts(plan, None, text)
        assert len(parse_whole(plan.parser(None), text).tool_calls) == len(calls)
    for wrong in ("", "Hello", several(parser, call("add", NONE_OF_IT, parser)), several(parser, add) + "x"):
        assert not accepts(plan, None, wrong)
    assert not accepts(plan, None, several(parser, call("now", ONE, parser)))
    single = make_plan([ADD, NOW], parser=parser, special=special, parallel_tool_calls=False)
    assert accepts(single, None, several(parser, add)) and not accepts(single, None, several(parser, add, now))


def test_a_named_tool_is_the_only_one_and_comes_once():
    plan = make_plan([ADD, NOW], {"type": "function", "function": {"name": "add"}})
    add = call("add", ONE, "hermes")
    assert accepts(plan, None, add)
    assert not accepts(plan, None, call("now", NONE_OF_IT, "hermes")) and not accepts(plan, None, f"{add}\n{add}")


def test_forced_calls_come_behind_the_reasoning():
    add = call("add", ONE, "hermes")
    possible = make_plan([ADD], template="</think>")
    assert accepts(possible, None, add) and accepts(possible, None, f"<think>\nHm.</think>\n\n{add}")
    assert not accepts(possible, None, f"Hm.</think>{add}") and not accepts(possible, None, f"<think>{add}")
    inside = make_plan([ADD], template="</think>", continued="<think>")
    assert accepts(inside, None, f"Hm.</think>{add}") and not accepts(inside, None, add)
    over = make_plan([ADD], template="</think>", continued="<think></think>")
    assert accepts(over, None, add) and not accepts(over, None, f"<think></think>{add}")
    special = make_plan([ADD], template="[/THINK]", special=("[THINK]", "[/THINK]"))
    assert accepts(special, None, f"[THINK]Hm.[/THINK]{add}") and accepts(special, None, add)


def test_a_text_that_must_match_does_so_behind_the_reasoning():
    asked = StructuredOutput(json_schema={"type": "integer"})
    plain = make_plan()
    assert plain.structured_output(asked, None) is asked
    possible = make_plan(template="</think>")
    assert accepts(possible, asked, "12") and accepts(possible, asked, "<think>a</think>\n12")
    assert not accepts(possible, asked, "<think>12")
    inside = possible.structured_output(asked, "…<think>\n")
    assert inside == StructuredOutput(json_schema={"type": "integer"}, begins_after="</think>")
    assert possible.structured_output(asked, "…<think></think>") is asked
    choice = StructuredOutput(choice=["yes", "no"])
    assert accepts(possible, choice, "<think>a</think>no") and not accepts(possible, choice, "<think>a</think>maybe")
    own = StructuredOutput(regex="a", begins_after="</x>")
    assert possible.structured_output(own, "<think>") is own


def test_a_text_that_must_match_leaves_room_for_calls():
    properties = {"name": {"type": "string"}, "b": {"type": "integer"}}
    asked = StructuredOutput(json_schema={"type": "object", "properties": properties, "additionalProperties": False})
    for parser in TOOL_FORMATS:
        plan = make_plan([ADD], "auto", parser)
        assert accepts(plan, asked, several(parser, call("add", ONE, parser)))
        for text in ('{"b": 1}', '{"name": "add"}', '{"name": "add", "b": 1}'):
            assert accepts(plan, asked, text)
        assert not accepts(plan, asked, "Hello") and not accepts(plan, asked, '{"name": "add", "c": 1}')
    assert make_plan([ADD], "auto").structured_output(None, None) is None


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("parser", ["hermes", "mistral_v11"])
def test_strict_functions_match_their_schemas_wherever_they_are_called(parser, are_special):
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    special = TOOL_FORMATS[parser].marks if are_special else ()
    plan = make_plan([strict, NOW], "auto", parser, special=special)
    add, any_now = call("add", ONE, parser), call("now", '{"x": 1}', parser)
    for text in ("Hello", add, f"Well {add}", f"{add}\n{any_now} yes", ""):
        assert accepts(plan, None, text)
    for text in (call("add", NONE_OF_IT, parser), call("none", ONE, parser), f"Hm {add}{call('add', 'x', parser)}"):
        assert not accepts(plan, None, text)
    thinking = make_plan([strict], "auto", parser, special=special, template="</think>")
    assert accepts(thinking, None, f"<think>a</think>{add}") and accepts(thinking, None, "Hello")


def test_objects_in_arguments_have_no_properties_that_are_not_named():
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": inner}}}}
    assert accepts(make_plan([tool]), None, call("f", '{"a": {"x": 1}}', "hermes"))
    assert not accepts(make_plan([tool]), None, call("f", '{"a": {"x": 1, "y": 2}}', "hermes"))


def test_strict_functions_without_a_mark_are_not_enforced():
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    assert make_plan([strict], "auto", "json").structured_output(None, None) is None
    assert make_plan([ADD], "auto").structured_output(None, None) is None


def test_parameters_that_cannot_be_enforced_are_named():
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"x": {"type": "nothing"}}}}}
    plan = make_plan([ADD, bad])
    with pytest.raises(RequestError) as caught:
        plan.params(SamplingParams(), None)
    assert caught.value.field == "tools[1].function.parameters" and "#/properties/x" in caught.value.problem
    assert make_plan([ADD, bad], "auto").params(SamplingParams(), None) == SamplingParams()


def test_names_with_quotes_stay_names():
    odd = {"type": "function", "function": {"name": 'a"b\\'}}
    assert accepts(make_plan([odd]), None, call('a"b\\', "{}", "hermes"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "requird"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": 1}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_wrong_about_tools_is_named(fields, field):
    with pytest.raises(RequestError) as caught:
        tool_use(**{"tools": [ADD], **fields})
    assert caught.value.field == field


def test_allowed_tools_restrict_what_may_be_called():
    listed = [{"type": "function", "function": {"name": "now"}}]
    use = tool_use([ADD, NOW], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}})
    assert (use.names, use.callable_names, use.must_call) == (("add", "now"), ("now",), True)
    flat = tool_use(
        [ADD, NOW], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    )
    assert (flat.callable_names, flat.must_call) == (("add",), False)
    assert tool_use([ADD, NOW], {"type": "function", "name": "now"}).callable_names == ("now",)
