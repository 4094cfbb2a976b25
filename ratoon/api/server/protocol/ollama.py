"""Requests and answers of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.model_slots import parse_keep_alive
from ratoon.api.server.protocol.base import AnswerModel, Entries, Int, ModelName, RequestModel, Size, Texts
from ratoon.api.server.protocol.chat import Tool
from ratoon.core.errors import ConfigError
from ratoon.core.structured import StructuredOutput

THINKING = (True, False, "low", "medium", "high")


def _format(value: Any) -> StructuredOutput | None:
    if value is None or value == "":
        return None
    if value == "json":
        return StructuredOutput(json_object=True)
    if isinstance(value, dict):
        return StructuredOutput(json_schema=value)  # type: ignore[arg-type]  # which it turns into text
    raise ValueError('is neither "json" nor a JSON schema')


def _think(value: Any) -> bool | str | None:
    if value is None or any(type(value) is type(one) and value == one for one in THINKING):
        return value
    raise ValueError('is neither true, false, "low", "medium" nor "high"')


def _keep_alive(value: Any) -> float | None:
    """In seconds. A server with one model has no use for it, and refuses what is wrong all the same."""
    try:
        return None if value is None else parse_keep_alive(value)
    except ConfigError as error:
        raise ValueError(f"{error.problem}; expected {error.expected}") from None


Format = Annotated[
    Any,
    PlainValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]}),
]
Think = Annotated[Any, PlainValidator(_think), WithJsonSchema({"enum": [*THINKING, None]})]
KeepAlive = Annotated[
    Any,
    PlainValidator(_keep_alive),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]}),
]


# Clients send it to paths whose answer is always one piece.
Stream = Annotated[bool | None, Field(description="Accepted, without effect")]


class OllamaOptions(RequestModel):
    # Options of Ollama without a counterpart: how it loads a model, and ways to sample that are not here.
    ELSEWHERE: ClassVar[frozenset[str]] = frozenset({
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread", "num_keep", "tfs_z", "typical_p", "repeat_last_n", "mirostat",
        "mirostat_tau", "mirostat_eta", "penalize_newline", "draft_num_predict",
    })  # fmt: skip

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    num_predict: Int | None = Field(None, description="Longest answer, in tokens; -1 or -2: as long as it gets")
    stop: Texts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    speculate: bool | None = Field(None, description="false: no drafts of its tokens; an extension")
    num_ctx: Int | None = Field(None, description="Accepted, without effect: the context is the server's setting")

    def sampling(self) -> dict[str, Any]:
        """Returns the options as fields of SamplingParams."""
        given = self.model_dump(exclude_none=True, exclude={"num_predict", "num_ctx", "repeat_penalty"})
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        return given

    @property
    def max_tokens(self) -> int | None:
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict


class OllamaRequest(RequestModel):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "suffix": "text is generated at the end only: put all of it into prompt",
        "template": "the model's own chat template is used; raw: true sends the prompt as it is",
        "logprobs": "/v1/chat/completions has log-probabilities",
        "top_logprobs": "/v1/chat/completions has log-probabilities",
    }
    HARMLESS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"top_logprobs": (0,)}

    model: ModelName
    stream: bool | None = Field(None, description="false: the answer in one piece; default: true")
    options: OllamaOptions | None = None
    format: Format = Field(None, description='"json", or a JSON schema that the answer matches')
    keep_alive: KeepAlive = Field(None, description="How long the model stays loaded: 5m, seconds, 0: not, -1: forever")
    think: Think = Field(None, description="Whether the model reasons before it answers")


class OllamaFunctionCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    function: OllamaFunctionCall


class OllamaMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Entries[str] | None = Field(None, description="In base64")
    tool_calls: Entries[OllamaToolCall] | None = None
    tool_name: str | None = Field(None, description="Of the result of a tool")


class OllamaChatRequest(OllamaRequest):
    messages: Entries[OllamaMessage] | None = Field(None, description="Empty: only load the model")
    tools: Entries[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    prompt: str | None = Field(None, description="Empty: only load the model")
    system: str | None = None
    context: Entries[Size] | None = Field(None, description="Token ids that an earlier answer returned")
    raw: bool | None = Field(None, description="Send the prompt as it is, without the chat template")
    images: Entries[str] | None = Field(None, description="In base64")


class OllamaEmbedRequest(RequestModel):
    model: ModelName
    input: Texts = Field(description="A text, or several")
    truncate: bool | None = Field(None, description="false: refuse texts that are too long; default: cut them")
    dimensions: Int | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    stream: Stream = None


class OllamaEmbeddingsRequest(RequestModel):
    """The older form, for one text."""

    model: ModelName
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    stream: Stream = None


class OllamaShowRequest(RequestModel):
    model: str | None = None
    name: str | None = Field(None, description="The older name of model")
    verbose: bool | None = Field(None, description="Accepted, without effect")
    stream: Stream = None


# ---- answers ----


class OllamaError(AnswerModel):
    error: str


class OllamaAnswer(BaseModel):
    """One line of a stream, or the whole answer. Durations are in nanoseconds, in the last line."""

    model_config = ConfigDict(extra="allow")

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: dict[str, Any]


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaEmbedAnswer(AnswerModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(AnswerModel):
    embedding: list[float]


class OllamaModels(AnswerModel):
    models: list[dict[str, Any]]


class OllamaShowAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(AnswerModel):
    version: str
