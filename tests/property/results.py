"""The expected outcome of a load: every request gets what it would get alone, and all memory is freed."""

from __future__ import annotations

from hypothesis import event

from ratoon.core.params import BeamSearchParams, PoolingParams
from ratoon.core.request import EngineCoreRequest, Extraction, FinishReason
from ratoon.scheduling.branch import branch_seed
from tests.property.drive import Drive, Received
from tests.property.extractions import rows_of
from tests.property.loads import VOCABULARY
from tests.property.references import reference_states, reference_texts, reference_tokens, reference_vector


def check_results(drive: Drive) -> None:
    for request in drive.accepted.values():
        if isinstance(request.params, Extraction):
            check_states(request, request.params, drive.received[request.request_id, 0])
            continue
        if isinstance(request.params, PoolingParams):
            check_vector(request, drive.received[request.request_id, 0])
            continue
        if isinstance(request.params, BeamSearchParams):
            check_texts(request, request.params, drive)
            continue
        for choice in range(request.params.n):
            check_choice(request, choice, drive.received[request.request_id, choice], drive.load.max_model_len)
    drive.encoder.check_end()
    drive.scheduler.leases.end_all()
    drive.scheduler.check()
    assert drive.scheduler.kv_cache.usage == 0.0
    assert not drive.runner.rows, "rows that the runner was not told to drop"
    assert drive.scheduler.reset_prefix_cache()


def check_choice(request: EngineCoreRequest, choice: int, received: Received, max_model_len: int) -> None:
    params = request.params
    prompt = request.prompt_token_ids
    max_total = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    seed = branch_seed(params.seed, request.request_id, choice)
    expected = reference_tokens(request, seed, max_total, VOCABULARY)
    assert received.pooled is None
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.tokens == expected[: len(received.tokens)]
        return
    assert received.tokens == expected
    assert received.num_logprobs == (0 if params.logprobs is None else len(expected))
    stopped = expected[-1] in params.all_stop_token_ids
    assert received.finish == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    wanted = range(1, len(prompt)) if params.prompt_logprobs is not None and choice == 0 else []
    assert received.prompt_positions == list(wanted)


def check_texts(request: EngineCoreRequest, params: BeamSearchParams, drive: Drive) -> None:
    received = [drive.received[request.request_id, choice] for choice in range(drive.num_choices(request))]
    if received[0].finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert len({choice.finish for choice in received}) == 1
        return
    event(f"beams: early stopping {params.early_stopping}")
    event("beams within a grammar" if params.structured_output else "beams of any text")
    prompt = request.prompt_token_ids
    max_total = min(len(prompt) + params.max_tokens, drive.load.max_model_len)
    expected = reference_texts(request, params, max_total, VOCABULARY)
    assert [(choice.tokens, choice.score, choice.finish) for choice in received] == [
        (text.token_ids, text.score, text.finish_reason) for text in expected
    ]


def check_vector(request: EngineCoreRequest, received: Received) -> None:
    assert received.tokens == []
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.pooled is None
        return
    event(f"pooled: {request.params.pooling}")
    assert received.finish == FinishReason.STOP
    assert received.pooled == reference_vector(request, request.params)


def check_states(request: EngineCoreRequest, extraction: Extraction, received: Received) -> None:
    assert received.tokens == []
    expected = rows_of(reference_states(request, extraction))
    if received.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert received.rows == expected[: len(received.rows)] and len(received.rows) < len(expected)
        return
    event("read out of the encoder" if extraction.of_encoder else "read out")
    assert received.finish == FinishReason.STOP
    assert received.rows == expected
