"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.answer_parts.reasoning_formats import effort_variables
from ratoon.api.server.protocol.base import (
    CONSTRAINTS,
    AnswerModel,
    ContinuationAnswer,
    Entries,
    FoundChoice,
    FoundChunkChoice,
    FunctionType,
    PromptLogprobs,
    Size,
    Usage,
    at_most,
)
from ratoon.api.server.protocol.hidden_states import ChoiceHiddenStates
from ratoon.api.server.protocol.sampling import SamplingFields


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("is neither text nor a list of parts")
    return value


def _tool_choice(value: Any) -> str | dict[str, Any] | None:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("is neither text nor an object")
    return value


TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def _url_part(name: str) -> dict[str, Any]:
    url = {"type": "string", "description": "a data URL, or an address of a host that --allow-media-host names"}
    detail = {"enum": ["auto", "low", "high"], "description": "Accepted, without effect"}
    value = {"type": "object", "properties": {"url": url, "detail": detail}, "required": ["url"]}
    return {"type": "object", "properties": {"type": {"const": name}, name: value}, "required": ["type", name]}


TEXT_OR_PARTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
PARTS: dict[str, Any] = {"anyOf": [TEXT_PART, _url_part("image_url"), _url_part("video_url")]}

# Unions with their own check: an error names the field, not pydantic's path through the union.
Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_content),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": PARTS}, {"type": "null"}]},
    ),
]
ToolChoice = Annotated[
    str | dict[str, Any] | None,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Message(BaseModel):
    """Further fields of a message are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(description="system, developer, user, assistant, tool, or one that the chat template names")
    content: Content = None


def _predicted(value: Any) -> str:
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValueError("is neither text nor a list of parts")
    if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ValueError('has a part that is not text, such as {"type": "text", "text": "…"}')
    return "".join(part["text"] for part in parts)


PredictedText = Annotated[str, PlainValidator(_predicted), WithJsonSchema(TEXT_OR_PARTS)]


class Prediction(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"]
    content: PredictedText = Field(description="What the answer is expected to be, for the most part")


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: FunctionType
    function: dict[str, Any]


def template_variables(reasoning_effort: str | None, further: dict[str, Any] | None) -> dict[str, Any]:
    """The variables of a chat template: the effort, and the switches that templates have for reasoning."""
    return {**effort_variables(reasoning_effort), **(further or {})}


class ChatCompletionRequest(SamplingFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **CONSTRAINTS,
        "audio": "answers are text: leave it out",
        "web_search_options": "define a function in tools that searches, or leave it out",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prompt": "a conversation is in messages; /v1/completions takes prompts",
        "best_of": "use n, or beam_width",
        "echo": "/v1/completions can do it",
        "continuation_suffix": "the new messages are the suffix; /v1/completions takes a suffix",
        "continuation_at": "/v1/completions can do it",
    }
    HARMLESS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "functions": ([],),
        "function_call": ("none",),
        "continuation_suffix": ([],),
    }

    messages: Entries[Message] = Field(min_length=1, description="With continuation_of: only the new ones")
    fallback_messages: Entries[Message] | None = Field(
        None,
        min_length=1,
        description="With continuation_of: the whole conversation, used if the earlier answer is unknown",
    )
    max_completion_tokens: Size | None = Field(None, description="The same as max_tokens; takes precedence over it")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens")
    top_logprobs: Size | None = Field(None, description="Alternatives for each token; needs logprobs")
    tools: Entries[Tool] | None = Field(
        None, description="For the chat template; without support for tools they are added to the system message"
    )
    tool_choice: ToolChoice = Field(
        None, description="none, auto (the default), required, or a function that must be called"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Passed to the chat template; none switches reasoning off, if the template can"
    )
    modalities: Entries[str] | None = Field(None, description='["text"]')
    prediction: Annotated[Prediction | None, at_most(8)] = Field(
        None, description="Drafts come from this text first: an answer that is mostly the same comes faster"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted, without effect")

    # Extensions: the chat template
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt where the answer begins; default: true, unless continue_final_message is true"
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, the assistant's: the prompt ends right after its content"
    )
    chat_template: str | None = Field(None, description="Another template; needs --allow-request-template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Options for the preprocessing of images and videos, such as max_pixels"
    )
    include_reasoning: bool | None = Field(None, description="false: leave reasoning_content out of the answer")

    def template_variables(self) -> dict[str, Any]:
        return template_variables(self.reasoning_effort, self.chat_template_kwargs)

    def continued_text(self) -> str | None:
        """The text of the last message, if that is continued."""
        if not self.continue_final_message:
            return None
        content = self.messages[-1].content
        if isinstance(content, list):
            return "\n".join(str(part.get("text", "")) for part in content)
        return content or ""

    def body_name(self, field: str) -> str:
        """This request's name for a field that has another name here."""
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        is_number = field == "logprobs" and self.top_logprobs and not self.use_beam_search
        return "top_logprobs" if is_number else super().body_name(field)


class TopLogprob(AnswerModel):
    token: str = Field(description="The token's text; part of a character is written as bytes:\\x…")
    logprob: float
    bytes: list[int] | None
    token_id: int | None = Field(None, description="With return_token_ids")


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[TokenLogprob]


class CalledFunction(AnswerModel):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(AnswerModel):
    role: Literal["assistant"]
    content: str | None = Field(description="null beside calls, if there is none")
    reasoning_content: str | None = Field(None, description="What the model wrote before its answer")
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(FoundChoice):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(None, description="The stop token or text that ended it")
    token_ids: list[int] | None = None
    hidden_states: ChoiceHiddenStates | None = None


class ChatCompletion(AnswerModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    continuation: ContinuationAnswer | None = None
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Of a request with do_remote_decode: what the engine that goes on with it is given"
    )


class FunctionDelta(AnswerModel):
    name: str | None = Field(None, description="In the first delta of a call")
    arguments: str


class ToolCallDelta(AnswerModel):
    index: int
    id: str | None = Field(None, description="In the first delta of a call, as type and name are")
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(FoundChunkChoice):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    hidden_states: ChoiceHiddenStates | None = Field(None, description="In the choice's last chunk")


class ChatCompletionChunk(AnswerModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    continuation: ContinuationAnswer | None = Field(None, description="In the first chunk only")
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Of a request with do_remote_decode: what the engine that goes on with it is given"
    )
