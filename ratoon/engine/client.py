"""The way to the engine core. Here: in the same process, by direct calls."""

from __future__ import annotations

import os
from typing import Any

from ratoon.core.config import EngineConfig, ModelConfig, verify_engine_config
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.core.stats import SchedulerStats
from ratoon.models.source import ModelSource
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)


class InprocClient:
    """Runs the engine core in the caller's thread: `get_output` is one step."""

    def __init__(self, config: EngineConfig, model: ModelConfig, source: ModelSource, timer: StartupTimer) -> None:
        # Threads of torch that spin while they wait would take the cores from ours. Only heeded if torch is not loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        with timer.phase("import torch"):
            from ratoon.distributed.executor import UniProcExecutor
            from ratoon.engine.core import EngineCore
            from ratoon.models.build import collect_shapes
            from ratoon.models.dummy_source import DummySource
        # Random weights need no files: a config alone is enough to size an engine.
        tensors = DummySource(collect_shapes(model)) if config.load_format == "dummy" else source.tensors
        executor = UniProcExecutor(config, model, tensors, timer)
        self.facts = executor.facts
        logger.info("%s is ready: %s", source.name, self.describe())
        self.core = EngineCore(config, executor)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def has_work(self) -> bool:
        return self.core.has_work()

    def get_output(self) -> EngineCoreOutputs:
        return self.core.step()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self.core.stats()

    def describe(self) -> dict[str, Any]:
        """Resolved settings and memory figures, for people."""
        facts, kv = self.facts, self.facts.kv_config
        return {
            "device": facts.device,
            "dtype": facts.dtype,
            "kernels": facts.ops,
            "attention_backend": facts.attention_backend,
            "num_threads": facts.num_threads,
            "max_model_len": facts.max_model_len,
            "weight_bytes": facts.weight_bytes,
            "kv_bytes": facts.kv_bytes,
            "kv_bytes_per_token": kv.bytes_per_block // kv.block_size,
            "num_blocks": kv.num_blocks,
            "block_size": kv.block_size,
            "kv_groups": len(kv.groups),
        }

    def shutdown(self) -> None:
        self.core.shutdown()


def make_client(config: EngineConfig, source: ModelSource, timer: StartupTimer) -> InprocClient:
    """Check the settings, then start an engine for them."""
    verify_engine_config(config)
    return InprocClient(config, source.config, source, timer)
