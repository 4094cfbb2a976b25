"""One turn of a conversation from Python: its prompt, params that enforce calls, and its answer in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.api.answer_parts.parser import AUTO, AnswerParser, choose_answer_format, parse_whole
from ratoon.api.answer_parts.parts import WholeAnswer
from ratoon.api.answer_parts.plan import answer_plan
from ratoon.api.answer_parts.tool_use import tool_use
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import GenerationParams
from ratoon.engine.base_llm import BaseLLM, Message


class ChatTurn:
    """One turn of a chat with an LLM or an AsyncLLM: pass `prompt` and `params(…)` to generate or stream, and the
    output to `read`.

    `tools`, `tool_choice` and `parallel_tool_calls` are those of OpenAI's protocol, `tool_parser` and
    `reasoning_parser` those of `ratoon serve`; further keywords are variables of the chat template. RequestError and
    ConfigError name what is wrong.
    """

    def __init__(
        self,
        llm: BaseLLM,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        **template_variables: Any,
    ) -> None:
        use, tokenizer = tool_use(tools, tool_choice, parallel_tool_calls), llm.get_tokenizer()
        template = tokenizer.template_text(template_variables.get("chat_template"), bool(use.tools))
        chosen = choose_answer_format(template, tool_parser, reasoning_parser)
        continued = messages[-1]["content"] if template_variables.get("continue_final_message") else None
        self._plan = answer_plan(chosen, tokenizer, use, continued)
        self._default_params = llm.get_default_params
        self.prompt = llm.chat_prompt(messages, tools=list(use.tools) or None, **template_variables)

    def params(self, params: GenerationParams | None = None) -> GenerationParams:
        """The params of the request: a call that must be made is enforced, and what the text must match applies behind
        the reasoning only. None: the model's defaults."""
        return self._plan.params(self._default_params() if params is None else params, self.prompt["prompt"])

    def parser(self) -> AnswerParser:
        """Returns a parser for a stream: `push` new text, then `finish`; both return parts."""
        return self._plan.parser(self.prompt["prompt"])

    def read(self, output: RequestOutput, choice: int = 0) -> WholeAnswer:
        """Reasoning, content and tool calls of a choice."""
        return parse_whole(self.parser(), output.outputs[choice].text)
