"""Helpers to drive a scheduler by hand: small schedulers, requests, and answers to plans."""

from __future__ import annotations

from typing import Any

from ratoon.core.adapters import Adapter, AdapterReport
from ratoon.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput, TransferReport
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.scheduler import Scheduler

BLOCK_SIZE = 4
FCFS, PRIORITY = SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY


def scheduler_of(
    num_blocks: int = 100,
    caching: bool = True,
    max_model_len: int = 200,
    speculation: SpeculationConfig | None = None,
    num_adapter_slots: int = 0,
    **config: Any,
) -> Scheduler:
    groups = (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,)),)
    return Scheduler(
        SchedulerConfig(**config),
        CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        KVCacheConfig(num_blocks, BLOCK_SIZE, groups),
        max_model_len,
        speculation=speculation,
        num_adapter_slots=num_adapter_slots,
    )


def request_of(
    request_id: str,
    prompt: int | list[int],
    priority: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    owner: str | None = None,
    adapter: Adapter | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """A number for a prompt means that many tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 + 100 * (sum(map(ord, request_id)) % 1000) + index for index in range(prompt)]
    params.setdefault("max_tokens", 50)
    return EngineCoreRequest(
        request_id,
        prompt,
        SamplingParams(**params),
        priority=priority,
        arrival_time=arrival,
        cache_salt=salt,
        owner=owner,
        adapter=adapter,
    )


def add(scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    scheduler.add_request(request_of(*args, **kwargs))


def answer_of(plan: SchedulerOutput, tokens: dict[str, int] | None = None) -> ModelRunnerOutput:
    """One token for every sampled branch: 7, unless `tokens` says otherwise. Blocks arrive where they should,
    and so do adapters."""
    ids = plan.sampled_req_ids + [child_id for children in plan.fanout.values() for child_id, _ in children]
    result = ModelRunnerOutput(ids, [[(tokens or {}).get(branch_id, 7)] for branch_id in ids])
    if plan.adapter_loads:
        result.adapters = AdapterReport([load.slot for load in plan.adapter_loads])
    if plan.loads or plan.stores:
        result.transfers = TransferReport(
            [load.block for load in plan.loads], stored=[store.slot for store in plan.stores]
        )
    return result


def step(
    scheduler: Scheduler, tokens: dict[str, int] | None = None
) -> tuple[SchedulerOutput, dict[tuple[str, int], EngineCoreOutput]]:
    """Plan, answer, update, check. Outputs by request and choice."""
    plan = scheduler.schedule()
    scheduler.check()
    outputs = scheduler.update_from_output(plan, answer_of(plan, tokens))
    scheduler.check()
    return plan, {(output.request_id, output.choice): output for output in outputs}


def new_ids(plan: SchedulerOutput) -> list[str]:
    return [new.req_id for new in plan.scheduled_new_reqs]
