"""What all models of the protocol share: types of fields, parts of answers, and the fields of other servers that
constrain an answer.

The latter are refused by name, whatever becomes of unknown fields: an unconstrained answer could be mistaken for a
constrained one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from ratoon.core.params import MAX_LOGIT_BIAS

T = TypeVar("T")


class RequestModel(BaseModel):
    """Strict: neither text nor true is a number, and infinity is refused. Fields that it does not have were taken out
    before (unknown_fields.py)."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    # Fields of OpenAI's protocol, and of others, that this server does not support, each with a hint.
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}
    # Values of such fields that have no effect, beside null, false and "".
    HARMLESS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Fields of other servers without a counterpart here whose names are close to ones that are here, and not misspelt.
    ELSEWHERE: ClassVar[frozenset[str]] = frozenset({"models", "top_a"})  # OpenRouter's

    _leaves_model_out: bool = PrivateAttr(default=False)

    @property
    def leaves_model_out(self) -> bool:
        """Whether the body named no model, and the server's own was filled in."""
        return self._leaves_model_out

    def note_model_of(self, body: Mapping[str, Any]) -> None:
        self._leaves_model_out = body.get("model") is None

    @classmethod
    @cache
    def body_fields(cls) -> Mapping[str, FieldInfo]:
        """The fields by their names in a body."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    @cache
    def inner_models(cls) -> Mapping[str, type[RequestModel]]:
        """Fields that are models themselves, or lists of them, by the names in a body."""
        found = {name: _request_model(field.annotation) for name, field in cls.body_fields().items()}
        return {name: model for name, model in found.items() if model is not None}

    @classmethod
    def is_harmless(cls, name: str, value: Any) -> bool:
        """Whether a value is one of the harmless ones, by type as well: true equals 1."""
        harmless = (None, False, "", *cls.HARMLESS.get(name, ()))
        return any(type(value) is type(one) and value == one for one in harmless)


def _request_model(annotation: Any) -> type[RequestModel] | None:
    """The model in a type such as `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _request_model(part)) is not None), None)


class AnswerModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


Int = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]  # the range of the engine's messages
Size = Annotated[int, Field(ge=0, le=2**31 - 1)]
# A list of a request: its check ends at the first wrong entry. Else a short body could cause a report on each of
# a million entries, of which one is shown.
Entries = Annotated[list[T], Field(fail_fast=True)]
MAX_METADATA = 256


def at_most(limit: int) -> BeforeValidator:
    """A limit on the entries of objects, which are all checked even if one is wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries; {limit} at most")
        return value

    return BeforeValidator(check)


def _one_or_many_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("is neither text nor a list of texts")
    return texts


def _prompts(value: Any) -> list[str | list[int]]:
    """The four ways to write prompts, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return [value]
        if all(isinstance(prompt, str) or (isinstance(prompt, list) and _are_token_ids(prompt)) for prompt in value):
            return value
    raise ValueError("expected text, a list of token ids, or a list of either")


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and _are_token_ids(value)):
        return value
    raise ValueError("is neither text nor a list of token ids")


def _are_token_ids(value: list[Any]) -> bool:
    # By type and not by isinstance: true is an int, and no token id.
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31


def _suffix(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and (not value or _are_token_ids(value))):
        return value
    raise ValueError("is neither text nor a list of token ids")


def _tool_of_type(kind: str) -> BeforeValidator:
    """Tools that other servers run themselves have other types, which are refused by name."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value != kind:
            raise ValueError(
                f"{value[:64]!r} is not supported: this server runs no tools itself; expected {kind!r}, "
                "a function that the client calls"
            )
        return value

    return BeforeValidator(check)


def _request_id(value: str) -> str:
    if re.fullmatch(REQUEST_ID, value) is None:
        raise ValueError("is not an id; 1 to 128 characters: letters, digits, and . _ : -")
    return value


def _token_keys(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"the key {key[:32]!r} is not a token id")
    return value


def _one_or_many_token_ids(value: Any) -> list[int]:
    token_ids = [value] if type(value) is int else value
    if not isinstance(token_ids, list) or (token_ids and not _are_token_ids(token_ids)):
        raise ValueError("is neither a token id nor a list of token ids")
    return token_ids


REQUEST_ID = r"[A-Za-z0-9._:-]{1,128}"
RequestId = Annotated[
    str, AfterValidator(_request_id), WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID}$"})
]
_TEXT = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

TokenIds = Annotated[
    list[int],
    PlainValidator(_one_or_many_token_ids),
    WithJsonSchema({"anyOf": [_TOKEN_IDS["items"], {**_TOKEN_IDS, "minItems": 0}]}),
]
Texts = Annotated[
    list[str],
    PlainValidator(_one_or_many_texts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [_TEXT, _TOKEN_IDS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKEN_IDS]}, "minItems": 1}]}
    ),
]
Prompt = Annotated[
    str | list[int],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _TOKEN_IDS]}),
]
Suffix = Annotated[
    str | list[int],
    PlainValidator(_suffix),
    WithJsonSchema({"anyOf": [_TEXT, {**_TOKEN_IDS, "minItems": 0}]}),
]
MediaUrls = dict[str, Texts]  # data URLs or addresses by kind
LogitBias = Annotated[dict[str, float], AfterValidator(_token_keys), at_most(MAX_LOGIT_BIAS)]
Metadata = Annotated[dict[str, str], at_most(MAX_METADATA)]
FunctionType = Annotated[Literal["function"], _tool_of_type("function")]
CustomType = Annotated[Literal["custom"], _tool_of_type("custom")]
# The server fills in its own where a request names none.
ModelName = Annotated[
    str, Field(default_factory=str, min_length=1, description="The served model's name; may be left out")
]


# ---- parts of answers ----


class ErrorDetail(AnswerModel):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong")
    code: str | None = Field(description="What is wrong, for programs")


class ErrorAnswer(AnswerModel):
    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    cached_tokens: int = Field(description="Tokens of the prompts that were found in the prefix cache")


DRAFT_TOKENS = "If something was drafted: guesses at tokens that were checked, from all sources of drafts"
ACCEPTED_DRAFT_TOKENS = "Of these, those that became tokens of the answer"


class CompletionTokensDetails(AnswerModel):
    accepted_prediction_tokens: int = Field(description="Tokens of the prediction that became tokens of the answer")
    rejected_prediction_tokens: int = Field(description="Tokens of the prediction that were checked and did not")
    draft_tokens: int = Field(description=DRAFT_TOKENS)
    accepted_draft_tokens: int = Field(description=ACCEPTED_DRAFT_TOKENS)


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="If something was drafted")


class ContinuationAnswer(AnswerModel):
    """How a continuation started."""

    parent: str
    inherited_tokens: int = Field(description="Tokens of its prompt that were not computed again")
    computed_tokens: int = Field(description="Tokens of its prompt that were computed")
    source: Literal["lease", "prefix_cache", "recomputed", "host", "files"] = Field(
        description="What was reused: memory kept for it (or of a running parent), cached blocks, or nothing; host or "
        "files: its lease had to leave the device, and was found there"
    )
    fallback: bool = Field(description="The parent is unknown: the request's own prompt was used instead")


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # a token each; by token id; the first token has none


class FoundChoice(AnswerModel):
    """Additional fields of a choice that a beam search found."""

    score: float | None = Field(None, description="The sum of log-probabilities after the length penalty")
    cumulative_logprob: float | None = Field(None, description="The sum of log-probabilities")


class FoundChunkChoice(FoundChoice):
    """A choice of a beam search in a stream, whose figures are those of the best text so far until the choice has
    ended."""

    best_so_far: str | None = Field(None, description="During the search: the whole best text so far")


# ---- fields of other servers ----

STRUCTURED = "use response_format, or structured_outputs"
LENGTH = "use max_tokens"
LOGITS = "use logit_bias, allowed_token_ids or bad_words"

# A * at the end stands for any further characters.
CONSTRAINTS: Mapping[str, str] = {
    "guided_*": STRUCTURED,  # vLLM
    "grammar": "use structured_outputs.grammar",  # llama.cpp
    "json_schema": "use response_format, or structured_outputs.json",
    "regex": "use structured_outputs.regex",  # SGLang
    "ebnf": "use structured_outputs.grammar",
    "format": STRUCTURED,  # Ollama
    "logits_processors": LOGITS,
    "custom_logit_processor": LOGITS,
    "stop_regex": "use stop",
    "max_new_tokens": LENGTH,
    "max_output_tokens": LENGTH,
    "n_predict": LENGTH,
    "num_predict": LENGTH,
    "truncate_prompt_tokens": "prompts are never truncated: shorten it",
    "prompt_embeds": "/v1/completions takes them",
    "documents": "use chat_template_kwargs, if the model's chat template supports it",
}


def find_hint(table: Mapping[str, str], name: str) -> str | None:
    """A table's hint about a field; None: it is not in the table."""
    if name in table:
        return table[name]
    return next((hint for key, hint in table.items() if key[-1] == "*" and name.startswith(key[:-1])), None)
