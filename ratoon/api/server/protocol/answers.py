"""Parts of answers that several endpoints share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ratoon.api.server.protocol.base import AnswerModel


class ErrorDetail(AnswerModel):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong")
    code: str | None = Field(description="What is wrong, for programs")


class ErrorAnswer(AnswerModel):
    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    cached_tokens: int = Field(description="Tokens of the prompts that were found in the prefix cache")


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ContinuationAnswer(AnswerModel):
    """How a continuation began."""

    parent: str
    inherited_tokens: int = Field(description="Tokens of its prompt that were not computed again")
    computed_tokens: int = Field(description="Tokens of its prompt that were")
    source: Literal["lease", "prefix_cache", "recomputed"] = Field(
        description="What it began with: memory kept for it (or of a parent that runs), cached blocks, or nothing"
    )
    fallback: bool = Field(description="The parent is forgotten: the request's own prompt was used in its place")


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # a token each; by token id; the first token has none


class FoundChoice(AnswerModel):
    """What a choice has in addition if a beam search found it."""

    score: float | None = Field(None, description="The sum of log-probabilities after the length penalty")
    cumulative_logprob: float | None = Field(None, description="The sum itself")


class FoundChunkChoice(FoundChoice):
    """The same in a stream, where the figures are those of the best text so far until the choice has ended."""

    best_so_far: str | None = Field(None, description="While it searches: the best text, all of it. Not to be added up")
