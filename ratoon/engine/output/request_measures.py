"""Updates the metrics and the throughput log as requests receive tokens and end, and builds a tracer's record of one
that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratoon.core.errors import DeadlineError
from ratoon.core.params import SamplingParams
from ratoon.engine.output.answers import HiddenStatesAnswer, VectorAnswer
from ratoon.engine.output.request_state import RequestState
from ratoon.observe.tracing import RequestTrace

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.observe.throughput import ThroughputLog


def measure_tokens(metrics: EngineMetrics, state: RequestState, now: float) -> None:
    """A step brought tokens."""
    if state.last_token_time is None:
        metrics.record_first_token(now - state.metrics.arrival_time, len(state.prompt_token_ids))
        if state.continuation is not None:
            metrics.record_continuation(state.continuation.source)
    else:
        metrics.record_next_token(now - state.last_token_time)
    state.last_token_time = now
    metrics.record_generated(state.num_new_tokens)


def count_tokens(throughput: ThroughputLog, state: RequestState) -> None:
    """A step brought something. A prompt is done with the first token, or with the vector that it was made into."""
    num_prompt_tokens = 0
    if not state.prompt_counted and (state.got_tokens or (state.finished and state.ended_well)):
        state.prompt_counted = True
        num_prompt_tokens = len(state.prompt_token_ids)
    throughput.record_tokens(state.engine or 0, num_prompt_tokens, state.num_new_tokens)


def measure_end(metrics: EngineMetrics, state: RequestState) -> None:
    if isinstance(state.answer, HiddenStatesAnswer):
        _measure_extraction(metrics, state, state.answer)
        return
    if state.refusal is not None:
        metrics.record_refused()
        return
    if isinstance(state.answer, VectorAnswer) and state.answer.pooled is not None:
        metrics.record_vector(len(state.prompt_token_ids))
    longest = max(len(choice.detokenizer.token_ids) for choice in state.choices)
    if state.metrics.first_token_time == state.metrics.finished_time:
        longest = 1  # all came at once, as from a beam search: there is no time between tokens
    metrics.record_end(str(state.finish_reason), state.metrics, len(state.prompt_token_ids), longest)


def _measure_extraction(metrics: EngineMetrics, state: RequestState, answer: HiddenStatesAnswer) -> None:
    if state.error is None and answer.assembly.complete and state.metrics.finished_time is not None:
        seconds = state.metrics.finished_time - state.metrics.arrival_time
        metrics.record_extraction(answer.source, answer.num_rows_run, seconds)
    if state.reads is not None:
        return  # a part of another request
    if state.refusal is not None and not isinstance(state.refusal, DeadlineError):
        metrics.record_refused()
    else:
        metrics.record_reason(str(state.finish_reason))


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
