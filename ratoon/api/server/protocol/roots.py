"""/v1/requests: ended requests that can be continued."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ratoon.api.server.protocol.base import AnswerModel


class EndedChoice(AnswerModel):
    index: int
    completion_tokens: int


class EndedRequest(AnswerModel):
    id: str = Field(description="What continuation_of takes")
    object: Literal["request"]
    ended_at: int = Field(description="Seconds since 1970")
    prompt_tokens: int
    choices: list[EndedChoice]


class EndedRequests(AnswerModel):
    object: Literal["list"]
    data: list[EndedRequest] = Field(description="The newest first")
    has_more: bool


class ForgottenRequest(AnswerModel):
    id: str
    object: Literal["request.deleted"]
    deleted: Literal[True]
