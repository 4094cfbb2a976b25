"""Errors as OpenAI's clients expect them: an object with message, type, param and code, and a fitting status.

ApiError is what the server itself raises. Errors of the engine are turned into one here, in one place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ratoon.core.errors import (
    AbortedError,
    DeadlineError,
    EngineAwayError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    TooLargeError,
)

MAX_SHOWN_MODELS = 20
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# The engine's names of fields that have another name in a body.
BODY_FIELDS = {
    "prompt_token_ids": "prompt",
    "encoder_prompt_token_ids": "encoder_prompt",
    "decoder_prompt_token_ids": "decoder_prompt",
    "sampling_params": "body",
    "pooling_params": "body",
    "adapter": "model",  # it has a name as models have
    "task": "model",  # the path selects the task; a model that does not support it is the wrong one
}


# Names in errors of the engine that are not fields of a request: states of the engine.
STATES = ("sleep", "profile", "utility", "tokenizer")


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.as_dict())


def refused(param: str, problem: str, expected: str = "", code: str | None = None) -> ApiError:
    """Returns a 400 that names the field, the problem and the expected value."""
    message = f"{param}: {problem}" + (f"; {expected}" if expected else "")
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(param: str, num_tokens: int | str, max_model_len: int, num_places: int = 1) -> ApiError:
    """Returns the error of a prompt that is too long. `num_tokens` may be text ("at least 5000"). `num_places`: tokens
    reserved for the answer, if there is one."""
    message = (
        f"{param}: has {num_tokens} tokens, and the model's context is {max_model_len} tokens"
        f"{', answer included' if num_places else ''}; shorten it to {max_model_len - num_places} tokens at most"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(model: str, served_names: tuple[str, ...]) -> ApiError:
    shown = model if len(model) <= 100 else model[:100] + "…"
    known = ", ".join(map(repr, served_names[:MAX_SHOWN_MODELS])) + (
        "" if len(served_names) <= MAX_SHOWN_MODELS else ", …"
    )
    message = f"The model {shown!r} does not exist; this server has {known}"
    return ApiError(404, message, param="model", code="model_not_found")


def conversation_not_found(conversation_id: str) -> ApiError:
    """Returns the same error for an unknown id, an evicted one, and one of another key."""
    shown = conversation_id if len(conversation_id) <= 200 else conversation_id[:200] + "…"
    message = (
        f"conversation: there is no conversation {shown!r}: it was never made or was deleted, the server was restarted "
        "or has evicted it, or it belongs to another key or model; make one with POST /v1/conversations"
    )
    return ApiError(404, message, param="conversation", code="conversation_not_found")


def request_not_found(request_id: str, param: str) -> ApiError:
    """Returns the error for an unknown id, an evicted one, and one of another key, which are not told apart."""
    shown = request_id if len(request_id) <= 200 else request_id[:200] + "…"
    message = f"{param}: there is no request {shown!r}; expected the id of one that has ended"
    return ApiError(404, message, param=param, code="request_not_found")


def queue_full(message: str) -> ApiError:
    headers = {"Retry-After": "1"}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down",
        kind=SERVER_ERROR,
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def aborted() -> ApiError:
    """Returns the error of a request that was ended by its id while its client waited."""
    return ApiError(409, "The request was aborted by its id (DELETE /v1/engine/requests/…)", code="request_aborted")


def generation_failed(message: str | None) -> ApiError:
    """Returns the error of a request that was accepted and failed while running."""
    return ApiError(500, message or "The generation failed", kind=SERVER_ERROR, code="generation_failed")


def as_api_error(error: Exception) -> ApiError:
    """Returns any error as a response. An unexpected one becomes a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return _refusal(error)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"The engine is dead: {error}", kind=SERVER_ERROR, code="engine_dead")
    if isinstance(error, EngineAwayError):
        return ApiError(503, str(error), kind=SERVER_ERROR, code="engine_restarting", headers={"Retry-After": "5"})
    if isinstance(error, AbortedError):
        return aborted()
    if isinstance(error, EngineError):
        return generation_failed(str(error))
    return ApiError(500, "Internal error; the server's log has details", kind=SERVER_ERROR, code="internal_error")


def _refusal(error: RequestError) -> ApiError:
    field, _, rest = error.field.partition("[")
    field = BODY_FIELDS.get(field, field) + (f"[{rest}" if rest else "")
    answer = refused(field, error.problem, error.expected)
    if field in STATES:
        answer.param = None
    if isinstance(error, QueueFullError):
        return queue_full(answer.message)
    if isinstance(error, TooLargeError):
        return ApiError(413, answer.message, param=field, code="answer_too_large")
    if isinstance(error, DeadlineError):
        return ApiError(504, answer.message, kind=SERVER_ERROR, param=field, code="deadline_exceeded")
    return answer
