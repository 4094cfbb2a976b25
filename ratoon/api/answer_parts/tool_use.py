"""What a request says about tools: which there are, and whether the answer may or must call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.core.errors import RequestError
from ratoon.core.suggestions import did_you_mean
from ratoon.models.conversation import TOOL_FORM, check_tools

CHOICES = ("none", "auto", "required")
CHOICE_FORM = f'{", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": "…"}}}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's form, for the chat template; empty: calls are not parsed
    callable_names: tuple[str, ...] = ()  # that a forced call may have
    must_call: bool = False
    parallel: bool = True  # several calls in an answer

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)

    @property
    def parameters(self) -> dict[str, Any]:
        """The schemas of the tools' parameters, by the tools' names."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> ToolUse:
    """Reads the use of tools from the fields of a request, in OpenAI's form. RequestError names the field that is
    wrong.

    `tool_choice` is none, auto (the default), required, a function, or `allowed_tools`.
    """
    checked = [] if tools is None else check_tools(tools)
    names = [_name_of(f"tools[{index}]", tool) for index, tool in enumerate(checked)]
    parallel = parallel_tool_calls is not False
    if tool_choice is None or isinstance(tool_choice, str):
        mode, allowed = _mode(tool_choice), names
    elif isinstance(tool_choice, Mapping):
        mode, allowed = _chosen(tool_choice, names)
        parallel = parallel and tool_choice.get("type") != "function"
    else:
        raise RequestError("tool_choice", "is neither text nor an object", CHOICE_FORM)
    if mode == "required" and not checked:
        raise RequestError("tool_choice", "needs tools to choose from", "tools, or leave it out")
    if mode == "none" or not checked:
        return NO_TOOLS
    return ToolUse(tuple(checked), tuple(allowed), mode == "required", parallel)


def _mode(choice: str | None) -> str:
    if choice is None:
        return "auto"
    if choice not in CHOICES:
        raise RequestError("tool_choice", f"{choice[:64]!r} is unknown", did_you_mean(choice, CHOICES, CHOICE_FORM))
    return choice


def _chosen(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, list[str]]:
    """The mode, and the names that may be called, of a choice that is an object."""
    kind = choice.get("type")
    if kind == "function":
        inner, field = (choice, "tool_choice") if "name" in choice else (choice.get("function"), "tool_choice.function")
        return "required", [_known(f"{field}.name", inner, names)]
    if kind == "allowed_tools":
        # The Chat API has mode and tools in an object of their own, the Responses API beside the type.
        inner, field = choice.get("allowed_tools", choice), "tool_choice.allowed_tools"
        listed = inner.get("tools") if isinstance(inner, Mapping) else None
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise RequestError(f"{field}.tools", "is no list of tools", 'a list of {"type": "function", …}')
        mode = inner.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise RequestError(f"{field}.mode", f"{mode!r} is unknown", "auto or required")
        allowed = [
            _known(f"{field}.tools[{index}]", tool.get("function", tool) if isinstance(tool, Mapping) else None, names)
            for index, tool in enumerate(listed)
        ]
        return mode, allowed
    raise RequestError("tool_choice.type", f"{kind!r} is unknown", CHOICE_FORM)


def _known(field: str, function: Any, names: Sequence[str]) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(field, "is missing, or not text", "the name of a function")
    if name not in names:
        known = ", ".join(names[:8]) or "none: tools is empty"
        raise RequestError(field, f"{name[:64]!r} is none of the tools", did_you_mean(name, names, f"one of {known}"))
    return name


def _name_of(field: str, tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{field}.function", "is missing, or no object", TOOL_FORM)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field}.function.name", "is missing, or not text", TOOL_FORM)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{field}.function.parameters", "is no object", "a JSON schema")
    return name
