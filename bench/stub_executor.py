"""An executor without a device: every branch that is to be sampled gets a token at once, and nothing is computed.

It stands in for the model where only the rest of the engine is measured. Used by name, with the repository's root on
PYTHONPATH: executor="bench.stub_executor:StubExecutor". RATOON_STUB_STEP_SECONDS makes every step take so long.
"""

from __future__ import annotations

import os
import time
import zlib

from ratoon.core.config import EngineConfig, ModelConfig, resolve_max_model_len
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, group_layers
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.worker import WorkerFacts
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer

STEP_SECONDS_VARIABLE = "RATOON_STUB_STEP_SECONDS"
DEFAULT_NUM_BLOCKS = 100_000  # cost nothing: no memory is allocated for them
FIRST_TOKEN, NUM_TOKENS = 1000, 500  # ordinary words in the vocabularies that are in use here


def stub_token(start: int, position: int) -> int:
    """The token at a position (of prompt and answer together) of a branch that started so."""
    return FIRST_TOKEN + (start * 31 + position) % NUM_TOKENS


def stub_start(seed: int | None, request_id: str) -> int:
    """A client that sends a seed knows what it has to get; others get something of their request's own."""
    return zlib.crc32(request_id.encode()) if seed is None else seed


class StubExecutor(ThreadedExecutor):
    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        super().__init__()
        block_size = config.cache.block_size
        spec = FullAttentionSpec(block_size, model.num_kv_heads, model.head_dim, "float32")
        groups = group_layers([spec] * model.num_layers)
        self._step_seconds = float(os.environ.get(STEP_SECONDS_VARIABLE, "0"))
        self._starts: dict[str, int] = {}
        self._lengths: dict[str, int] = {}  # tokens of each branch
        self._plan = SchedulerOutput()
        self.facts = WorkerFacts(
            kv_config=KVCacheConfig(config.cache.num_blocks or DEFAULT_NUM_BLOCKS, block_size, groups),
            max_model_len=resolve_max_model_len(config.max_model_len, model),
            device="none",
            dtype="float32",
            ops="stub",
            attention=[],
            num_threads=1,
            weight_bytes=0,
            kv_bytes=0,
        )

    def execute_model(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self._starts.pop(request_id, None)
            self._lengths.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self._starts.setdefault(new.req_id, stub_start(new.params.seed, new.req_id))  # unless it was forked
            self._lengths[new.req_id] = len(new.token_ids)
        self._plan = plan

    def sample_tokens(self) -> ModelRunnerOutput:
        if self._step_seconds and not self._plan.is_empty:
            time.sleep(self._step_seconds)
        result = ModelRunnerOutput()
        for request_id in self._plan.sampled_req_ids:
            for child, seed in self._plan.fanout.get(request_id, ()):
                self._starts[child] = seed
                self._lengths[child] = self._lengths[request_id]
                self._sample(child, result)
            self._sample(request_id, result)
        result.errors.update(dict.fromkeys(self._plan.pooled_req_ids, "a stub has no vectors"))
        return result

    def _sample(self, request_id: str, result: ModelRunnerOutput) -> None:
        position = self._lengths[request_id]
        self._lengths[request_id] = position + 1
        result.req_ids.append(request_id)
        result.sampled_token_ids.append([stub_token(self._starts[request_id], position)])

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...
