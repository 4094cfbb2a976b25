"""/v1/messages: Anthropic's Messages API. Contents of messages are checked in message_blocks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import (
    ACCEPTED_DRAFT_TOKENS,
    DRAFT_TOKENS,
    AnswerModel,
    CustomType,
    Entries,
    Int,
    ModelName,
    RequestModel,
)
from ratoon.api.server.protocol.structured import Schema
from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput


def _blocks(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise ValueError("is neither text nor a list of blocks")
    return value


_BLOCK = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "image", "tool_use", "tool_result", "thinking"]},
        "text": {"type": "string"},
        "source": {"type": "object", "description": 'Of an image: {"type": "base64", …} or {"type": "url", …}'},
    },
    "required": ["type"],
}
# A union with its own check: an error names the field, not pydantic's path through the union.
Blocks = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}),
]


class InputMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class CustomTool(BaseModel):
    """Further fields are ignored."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: CustomType | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]

    def as_chat_tool(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        named = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


class MessageToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With the type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")

    def as_chat_choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="For the chat template: reason, or do not")
    budget_tokens: Int | None = Field(None, description="Accepted, without effect")
    display: str | None = Field(None, description="Accepted, without effect: reasoning is returned as it is")


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(None, alias="schema", description="The JSON schema of the text")


class OutputConfig(RequestModel):
    effort: str | None = Field(None, description="Passed to the chat template as reasoning_effort")
    format: OutputFormat | None = None


class CountedMessages(RequestModel):
    """What makes up a prompt."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "the client calls tools itself: leave it out",
        "container": "nothing is run here: leave it out",
        "context_management": "the conversation is used as it is sent: leave it out",
    }
    HARMLESS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}

    model: ModelName
    messages: Entries[InputMessage] = Field(min_length=1, description="The last one may be the answer's beginning")
    system: Blocks | None = Field(None, description="A system message")
    tools: Entries[CustomTool] | None = Field(None, description="Functions; built-in tools are refused")
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = Field(None, description="effort, and format: a JSON schema for the text")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted, without effect: all prompts are cached")
    speed: str | None = Field(None, description="Accepted, without effect")

    # Extensions
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Options for the preprocessing of images, such as max_pixels"
    )

    def structured_output(self) -> StructuredOutput | None:
        asked = None if self.output_config is None else self.output_config.format
        if asked is None:
            return None
        if asked.schema_ is None:
            raise RequestError("output_config.format.schema", "is missing", "a JSON schema")
        return StructuredOutput(json_schema=asked.schema_)


class MessagesRequest(CountedMessages):
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(description="Longest answer, in tokens")
    stop_sequences: Entries[str] | None = Field(None, description="End the answer before one of these texts")
    stream: bool | None = Field(None, description="Send events while the answer is generated")
    temperature: float | None = Field(None, description="0: the likeliest token")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens that sum up to this")
    top_k: Int | None = Field(None, description="Sample from this many of the likeliest tokens")

    # Extensions
    seed: Int | None = Field(None, description="The same seed gives the same answer")
    retain_kv: float | None = Field(None, description="Keep the answer's memory for continuations, in seconds")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    speculate: bool | None = Field(None, description="false: no drafts of its tokens, if the server makes some")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")

    # Accepted, without effect
    metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect")
    service_tier: str | None = Field(None, description="Accepted, without effect")
    inference_geo: str | None = Field(None, description="Accepted, without effect")


# ---- answers ----


class TextBlock(AnswerModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Always empty: reasoning that is sent back is not verified")


class ToolUseBlock(AnswerModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(AnswerModel):
    input_tokens: int = Field(description="Tokens of the prompt that were computed")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were found in the prefix cache")
    cache_creation_input_tokens: int
    output_tokens: int
    draft_tokens: int | None = Field(None, description=DRAFT_TOKENS)
    accepted_draft_tokens: int | None = Field(None, description=ACCEPTED_DRAFT_TOKENS)


class MessageAnswer(AnswerModel):
    id: str = Field(description="Also valid for continuation_of of other endpoints")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """Its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokensCount(AnswerModel):
    input_tokens: int


class MessagesErrorDetail(AnswerModel):
    type: str
    message: str


class MessagesErrorAnswer(AnswerModel):
    """Anthropic's form of errors."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
