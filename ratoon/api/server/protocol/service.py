"""Answers about the server itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ratoon.api.server.protocol.base import AnswerModel


class Model(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class Models(AnswerModel):
    object: Literal["list"]
    data: list[Model]


class EngineHealthAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    index: int
    state: str


class HealthAnswer(AnswerModel):
    status: str
    engines: list[EngineHealthAnswer]


class Version(AnswerModel):
    version: str


class AdminAnswer(BaseModel):
    """What a call did, where there is something to say."""

    model_config = ConfigDict(extra="allow")

    ok: bool


class Stats(AnswerModel):
    health: HealthAnswer
    engines: list[dict[str, Any]]
    settings: dict[str, Any]
    num_unfinished_requests: int
