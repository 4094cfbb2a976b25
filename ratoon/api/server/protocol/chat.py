"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import (
    CONSTRAINTS,
    AnswerModel,
    ContinuationAnswer,
    Entries,
    FoundChoice,
    FoundChunkChoice,
    PromptLogprobs,
    Size,
    Usage,
)
from ratoon.api.server.protocol.hidden_states import ChoiceHiddenStates
from ratoon.api.server.protocol.sampling import SamplingFields

LATER = "is not supported; leave it out"


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


# Unions with their own check: an error names the field, not pydantic's path through the union.
Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
ToolChoice = Annotated[
    str | dict[str, Any] | None, PlainValidator(_tool_choice), WithJsonSchema({"enum": ["none", "auto", None]})
]


class Message(BaseModel):
    """Further fields of a message are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(description="system, developer, user, assistant, tool, or one that the chat template names")
    content: Content = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class ChatCompletionRequest(SamplingFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **CONSTRAINTS,
        "audio": f"sound {LATER}",
        "prediction": f"predicted output {LATER}",
        "web_search_options": f"searching {LATER}",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "reasoning_effort": "use chat_template_kwargs, if the model's chat template supports it",
        "verbosity": f"this {LATER}",
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
    tool_choice: ToolChoice = Field(None, description="none or auto")
    modalities: Entries[str] | None = Field(None, description='["text"]')

    # Extensions: the chat template
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt where the answer begins; default: true, unless continue_final_message is true"
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, the assistant's: the prompt ends right after its content"
    )
    chat_template: str | None = Field(None, description="Another template; needs --allow-request-template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template")

    # Accepted, without effect
    parallel_tool_calls: bool | None = Field(None, description="Accepted, without effect")

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


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[TokenLogprob]


class AssistantMessage(AnswerModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(FoundChoice):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
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


class Delta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(FoundChunkChoice):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
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
