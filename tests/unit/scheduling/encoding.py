"""Helpers to drive the scheduler of an encoder-decoder model: encoder inputs, requests, and answers to whole plans."""

from __future__ import annotations

from array import array
from typing import Any

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.encoder import EncoderInput, tokens_for_encoder
from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SwapCosts
from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.params import BeamSearchParams
from ratoon.core.plan import BeamStep, NewRequestData, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction
from ratoon.core.wire import WireTensor
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.reading import states_for
from tests.unit.scheduling.steps import BLOCK_SIZE, answer_of, request_of

CROSS = KVCacheGroup(CrossAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,))
VECTOR = WireTensor("float32", (2,), array("f", [1.0, 2.0]).tobytes())


def encoder_scheduler(
    num_blocks: int = 100,
    num_host_blocks: int = 0,
    *,
    cross: KVCacheGroup | None = CROSS,
    num_groups: int = 1,
    caching: bool = True,
    lease_fraction: float = 0.5,
    swap_costs: SwapCosts | None = None,
    num_adapter_slots: int = 0,
    **config: Any,
) -> Scheduler:
    groups = tuple(
        KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (layer,)) for layer in range(num_groups)
    )
    return Scheduler(
        SchedulerConfig(**config),
        CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching, lease_fraction=lease_fraction),
        KVCacheConfig(num_blocks, BLOCK_SIZE, groups, cross, num_host_blocks),
        200,
        swap_costs,
        num_adapter_slots=num_adapter_slots,
    )


def document(length: int, number: int = 0) -> EncoderInput:
    return tokens_for_encoder(list(range(1000 * number, 1000 * number + length)))


def encoded(
    request_id: str,
    prompt: int | list[int],
    encoder_input: EncoderInput | int,  # a number: a document of that length that no other request has
    retain_kv: float | None = None,
    width: int | None = None,  # set: a beam search
    **rest: Any,
) -> EngineCoreRequest:
    request = request_of(request_id, prompt, **rest)
    own = encoder_input if isinstance(encoder_input, EncoderInput) else document(encoder_input, ord(request_id[0]))
    request.encoder_input = own
    request.retain_kv = retain_kv
    if width is not None:
        request.params = BeamSearchParams(beam_width=width, n=1, max_tokens=request.params.max_tokens)
    return request


def add_encoded(scheduler: Scheduler, *args: Any, **rest: Any) -> None:
    scheduler.add_request(encoded(*args, **rest))


def continuation(
    request_id: str, parent: EngineCoreRequest, output: list[int], suffix: list[int], **rest: Any
) -> EngineCoreRequest:
    assert parent.encoder_input is not None
    request = encoded(request_id, parent.prompt_token_ids + output + suffix, parent.encoder_input, **rest)
    request.continuation_of, request.continuation_token_ids = parent.request_id, suffix
    return request


def states_request(
    request_id: str, encoder_input: EncoderInput, positions: list[int], deadline: float | None = None
) -> EngineCoreRequest:
    """For states of the encoder."""
    request = encoded(request_id, 2, encoder_input)
    request.params = Extraction(positions, [0, 3], "bfloat16", deadline, of_encoder=True)
    return request


def answer_to(plan: SchedulerOutput) -> ModelRunnerOutput:
    """The output for every branch in the plan. All tokens are 7."""
    result = answer_of(plan)
    for read in [*plan.captures, *plan.encoder_steps]:
        if read.captured:
            result.hidden_states[read.req_id] = states_for(read)
    for beam_step in plan.beam_steps:
        if beam_step.num_candidates:
            result.candidates[beam_step.req_id] = candidates_of(beam_step)
    result.pooled = dict.fromkeys(plan.pooled_req_ids, VECTOR)
    return result


def candidates_of(step: BeamStep) -> BeamCandidates:
    """For every beam the tokens 10, 11, … in turn, each a little worse than the one before."""
    places = range(step.num_candidates)
    scores = [-0.1 * (place + 1) for place in places]
    beams = [place % step.num_beams for place in places]
    return BeamCandidates(scores, beams, [10 + place // step.num_beams for place in places])


def step(scheduler: Scheduler) -> tuple[SchedulerOutput, dict[str, EngineCoreOutput]]:
    """Plan, answer, update, check. Outputs by request, of the last choice that has one."""
    plan = scheduler.schedule()
    scheduler.check()
    outputs = scheduler.update_from_output(plan, answer_to(plan))
    scheduler.check()
    return plan, {output.request_id: output for output in outputs}


def finish(scheduler: Scheduler) -> list[SchedulerOutput]:
    """Run to the end. All plans."""
    plans = []
    for _ in range(500):
        if not scheduler.has_requests():
            return plans
        plans.append(step(scheduler)[0])
    raise AssertionError("it does not end")


def encoder_blocks(plan: SchedulerOutput) -> dict[str, list[int]]:
    """Where what the encoder runs in this step is written, by on whose account."""
    return {encoder_step.req_id: encoder_step.block_ids for encoder_step in plan.encoder_steps}


def new_of(plan: SchedulerOutput, branch_id: str) -> NewRequestData:
    (new,) = [new for new in plan.scheduled_new_reqs if new.req_id == branch_id]
    return new
