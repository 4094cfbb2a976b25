"""A runner with slots for adapters, driven by plans written by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.adapter_slots import AdapterSlots, open_slots
from ratoon.execution.model_runner import ModelRunner
from tests.golden.tiny_models import TinyModel
from tests.unit.execution.test_model_runner import BLOCK_SIZE, CPU, Driver, token_of

WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=5)
LONGEST_WAIT = 30.0  # seconds


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[LogprobsLists]


def load_into(runner: ModelRunner, adapters: Mapping[int, Adapter]) -> AdapterReport:
    """Loads adapters into slots, by plans without tokens, until each is reported."""
    found, deadline = AdapterReport([], {}), time.monotonic() + LONGEST_WAIT
    loads = [AdapterLoad(slot, adapter) for slot, adapter in adapters.items()]
    while len(found.loaded) + len(found.failed) < len(adapters):
        assert time.monotonic() < deadline
        runner.execute_model(SchedulerOutput(adapter_loads=loads, awaits_adapters=True))
        output = runner.sample_tokens()
        assert isinstance(output, ModelRunnerOutput)
        loads = []
        if output.adapters is not None:
            found.loaded.extend(output.adapters.loaded)
            found.failed.update(output.adapters.failed)
    return found


class AdapterDriver(Driver):
    def __init__(
        self, tiny: TinyModel, backend: str = "native", num_slots: int = 8, max_rank: int = 64, **settings: Any
    ) -> None:
        super().__init__(tiny, backend, max_num_reqs=16, has_adapters=True, **settings)
        open_slots(self.runner.model, num_slots, max_rank)
        self.slots = AdapterSlots(self.runner.model, tiny.source.shapes(), num_slots, max_rank, CPU)
        self.runner.adapters = self.slots

    def load(self, adapters: Mapping[int, Adapter]) -> AdapterReport:
        return load_into(self.runner, adapters)

    def generate(
        self, prompts: Sequence[tuple[list[int], int]], count: int, params: SamplingParams = WITH_LOGPROBS
    ) -> list[Answer]:
        """Greedy answers to prompts, each with its slot, all in one batch: one step for the prompts, then one for each
        token. Their rows are dropped at the end."""
        ids = [f"r{index}" for index in range(len(prompts))]
        blocks_of_each = max(len(prompt) + count for prompt, _ in prompts) // BLOCK_SIZE + 1
        new = []
        for index, (req_id, (prompt, slot)) in enumerate(zip(ids, prompts)):
            branch = self.new(req_id, prompt, 1, params=params)
            first = 1 + index * blocks_of_each
            blocks = list(range(first, first + blocks_of_each))
            new.append(replace(branch, adapter_slot=slot, block_ids=tuple(blocks for _ in self.groups)))
        answers = [Answer([], []) for _ in ids]
        output = self.step(new=new)
        for step in range(count):
            assert not output.errors
            for req_id, answer in zip(ids, answers):
                answer.tokens.append(token_of(output, req_id))
                if req_id in output.logprobs:
                    answer.logprobs.append(output.logprobs[req_id])
            if step < count - 1:
                output = self.step(known={req_id: len(prompt) + step for req_id, (prompt, _) in zip(ids, prompts)})
        self.step(finished_req_ids=ids)
        return answers
