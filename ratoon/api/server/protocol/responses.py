"""/v1/responses: OpenAI's Responses API. Items of the input are checked in response_items.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import (
    ACCEPTED_DRAFT_TOKENS,
    CONSTRAINTS,
    DRAFT_TOKENS,
    AnswerModel,
    ContinuationAnswer,
    Entries,
    FunctionType,
    Int,
    LogitBias,
    Metadata,
    ModelName,
    RequestModel,
    Size,
    Texts,
)
from ratoon.api.server.protocol.chat import TokenLogprob
from ratoon.api.server.protocol.sampling import CacheRetention, ServiceTier, SessionName
from ratoon.api.server.protocol.structured import Schema
from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput

WHOLE_CONVERSATIONS = "use previous_response_id or conversation, or send all items in input"
SIZE = "use max_output_tokens"
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (  # what OpenAI's API knows
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def _input(value: Any) -> str | list[Any] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("is neither text nor a list of items")
    return value


def _conversation(value: Any) -> str | None:
    """The id of a conversation, of either form."""
    named = value.get("id") if isinstance(value, dict) and set(value) == {"id"} else value
    if (named is not None and not (isinstance(named, str) and named)) or (named is None and value is not None):
        raise ValueError('is neither the id of a conversation nor {"id": "conv_…"}')
    return named


def _tool_choice(value: Any) -> str | dict[str, Any] | None:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("is neither text nor an object")
    return value


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "input_image"},
        "image_url": {"type": "string", "description": "A data URL, or an address of an allowed host"},
        "detail": {"enum": ["auto", "low", "high"], "description": "Accepted, without effect"},
    },
    "required": ["type", "image_url"],
}
ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning", "item_reference"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}]},
    },
}
# Unions with their own check: an error names the field, not pydantic's path through the union.
Input = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM}, {"type": "null"}]}),
]
ConversationName = Annotated[
    str | None,
    PlainValidator(_conversation),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "properties": {"id": {"type": "string", "minLength": 1}},
                    "required": ["id"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
FunctionChoice = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
ResponseToolChoice = Annotated[
    str | dict[str, Any] | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, FunctionChoice]}),
]


class FunctionTool(BaseModel):
    """Further fields are ignored."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: FunctionType
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        named = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}

    def as_answer(self) -> dict[str, Any]:
        names = ("type", "name", "description", "parameters", "strict")
        return {name: getattr(self, name) for name in names}


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Of the schema; without effect")
    description: str | None = Field(None, description="Of the schema; without effect")
    schema_: Schema = Field(None, alias="schema", description="The JSON schema of the text")
    strict: bool | None = Field(None, description="Without effect: a schema is always enforced")

    def as_answer(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True)


class TextConfig(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted, without effect")


class ReasoningConfig(RequestModel):
    effort: str | None = Field(None, description="Passed to the chat template as reasoning_effort")
    summary: str | None = Field(None, description="Accepted, without effect: reasoning is returned as it is")
    generate_summary: str | None = Field(None, description="Accepted, without effect")


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect")


class ResponsesRequest(RequestModel):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **CONSTRAINTS,
        "context_management": WHOLE_CONVERSATIONS,
        "prompt": "send the text in input and instructions",
        "messages": "use input",
        "max_tokens": SIZE,
        "max_completion_tokens": SIZE,
        "n": "a response has one answer; /v1/chat/completions can return several",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "continuation_of": "use previous_response_id",
        "use_beam_search": "/v1/chat/completions can do it",
        "moderation": "leave it out",
    }
    HARMLESS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"n": (1,), "context_management": ([],)}

    model: ModelName
    input: Input = Field(None, description="Text of the user, or items; with previous_response_id: only the new ones")
    instructions: str | None = Field(None, description="A system message; not inherited from the previous response")
    previous_response_id: str | None = Field(None, description="Continue the conversation after this response")
    conversation: ConversationName = Field(
        None, description="Continue this conversation, and add input and output to it; an id, or an object with it"
    )
    store: bool | None = Field(None, description="false: keep nothing of the response; default: true")
    background: bool | None = Field(None, description="Answer at once, and generate without a connection")
    stream: bool | None = Field(None, description="Send typed events while the response is generated")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Longest answer in tokens, reasoning included"
    )
    temperature: float | None = Field(None, description="0: the likeliest token")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens that sum up to this")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest items of a conversation that is too long"
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Entries[FunctionTool] | None = Field(None, description="Functions; not inherited from the previous response")
    tool_choice: ResponseToolChoice = Field(None, description="none, auto, required, or the name of a function")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    metadata: Metadata | None = Field(None, description="Returned with the response")
    include: Entries[str] | None = Field(
        None, description=f"{LOGPROBS}: log-probabilities of the message's tokens; OpenAI's other names have no effect"
    )
    top_logprobs: Size | None = Field(None, description=f"Alternatives for each token; needs {LOGPROBS}")

    # Sessions
    prompt_cache_key: SessionName | None = Field(
        None, description="The name of a session; default: that of the previous response, or its own"
    )
    prompt_cache_retention: CacheRetention | None = Field(
        None,
        description="in_memory: nothing of it is written to --kv-files; 24h: kept there for a day, if there is room",
    )

    # Extensions: sampling
    top_k: Int | None = Field(None, description="Sample from this many of the likeliest tokens; 0 or -1: all")
    min_p: float | None = Field(None, description="Drop tokens below this times the likeliest one")
    typical_p: float | None = Field(None, description="Sample from the most typical tokens that sum up to this")
    seed: Int | None = Field(None, description="The same seed gives the same answer")
    stop: Texts | None = Field(None, description="End the answer before one of these texts")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Token ids (as text) to numbers added to their logits")
    min_tokens: Size | None = Field(None, description="Minimum number of tokens")
    ignore_eos: bool | None = Field(None, description="Continue after the model's end token")

    # Extensions: how the request is run
    retain_kv: float | None = Field(
        None, description="Seconds that the response's memory is kept for the next turn; default: --response-lease"
    )
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    speculate: bool | None = Field(None, description="false: no drafts of its tokens, if the server makes some")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Options for the preprocessing of images, such as max_pixels"
    )

    # Accepted, without effect
    max_tool_calls: Int | None = Field(None, description="Accepted, without effect: there are no built-in tools")
    user: str | None = Field(None, description="Accepted, without effect")
    safety_identifier: str | None = Field(None, description="Accepted, without effect")
    service_tier: ServiceTier | None = Field(None, description="Accepted, without effect")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def structured_output(self) -> StructuredOutput | None:
        """What the text must match. RequestError for a format without its schema."""
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return StructuredOutput(json_object=True)
        if asked.schema_ is None:
            raise RequestError(
                "text.format.schema", "is missing", "a JSON schema; json_object is the type for any object"
            )
        return StructuredOutput(json_schema=asked.schema_)

    @property
    def is_in_background(self) -> bool:
        return bool(self.background)


# ---- answers ----

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(AnswerModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(AnswerModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallOutput(AnswerModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(AnswerModel):
    cached_tokens: int = Field(description="Tokens that were not computed: inherited, or from the prefix cache")
    cache_write_tokens: int = Field(description="Always 0: nothing is charged for the cache")


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int
    draft_tokens: int | None = Field(None, description=DRAFT_TOKENS)
    accepted_draft_tokens: int | None = Field(None, description=ACCEPTED_DRAFT_TOKENS)


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(AnswerModel):
    code: str
    message: str


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


class ConversationReference(AnswerModel):
    id: str


class ResponseAnswer(AnswerModel):
    id: str = Field(description="Also valid for continuation_of of the other endpoints")
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    conversation: ConversationReference | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    continuation: ContinuationAnswer | None = Field(None, description="How it continued the previous response")


class ResponseEvent(BaseModel):
    """Its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class InputItems(AnswerModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
