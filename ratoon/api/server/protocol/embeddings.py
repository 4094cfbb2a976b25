"""/v1/embeddings: a text as a vector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ratoon.api.server.protocol.base import AnswerModel, Int, Prompts, RequestId, RequestModel


class EmbeddingRequest(RequestModel):
    model: str = Field(min_length=1, description="The served model's name")
    input: Prompts = Field(description="Text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: 32-bit floats, the lowest byte first"
    )
    dimensions: Int | None = Field(None, description="Keep so many of the first numbers")

    # Extensions
    pooling: Literal["last", "mean", "first"] | None = Field(
        None,
        description="The last token's state, the mean of all, or the first's; left out: what the model was made for",
    )
    normalize: bool | None = Field(None, description="To length 1; true where it is left out")
    add_special_tokens: bool | None = Field(None, description="Add what the model expects around a text")
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    request_id: RequestId | None = Field(None)

    # Accepted, without effect
    user: str | None = Field(None, description="Accepted, without effect")


class Embedding(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(AnswerModel):
    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
