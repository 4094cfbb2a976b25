"""Builds a tracer's record of a request that has ended."""

from __future__ import annotations

from typing import Any

from ratoon.core.params import SamplingParams
from ratoon.engine.output.request_state import RequestState
from ratoon.observe.tracing import RequestTrace


def trace_of(state: RequestState) -> RequestTrace:
    """Returns the trace of a request that is traced."""
    assert state.trace_headers is not None
    return RequestTrace(
        request_id=state.external_id,
        headers=state.trace_headers,
        metrics=state.metrics,
        events=state.events,
        num_prompt_tokens=len(state.prompt_token_ids),
        finish_reasons=[str(choice.finish_reason) for choice in state.choices if choice.finish_reason is not None],
        num_cached_tokens=state.num_cached_tokens,
        error=state.error,
        params=_params_of(state) if state.answer is None else {},
    )


def _params_of(state: RequestState) -> dict[str, Any]:
    params = state.params
    assert params is not None
    attributes: dict[str, Any] = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.usage.num_sequences": len(state.choices),
    }
    if isinstance(params, SamplingParams):  # a search draws nothing
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
    if state.continuation is not None:
        attributes["ratoon.continuation.parent"] = state.continuation.parent
        attributes["ratoon.continuation.source"] = state.continuation.source
        attributes["ratoon.continuation.inherited_tokens"] = state.continuation.inherited_tokens
    return attributes
