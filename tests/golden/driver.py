"""An engine that is driven step by step, so that a test can do something between two steps.

After every step the accounting is checked, and all memory that is neither referenced nor cached is overwritten, so that
reading it shows.
"""

from __future__ import annotations

from typing import Any

from ratoon import LLM, RequestOutput, SamplingParams
from ratoon.core.params import RequestOutputKind
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.core import EngineCore
from ratoon.engine.front_end import Prepared
from ratoon.engine.output.roots import Root
from tests.golden.engines import scheduler_of

GARBAGE = 1000.0  # finite: beside real keys, even a masked NaN would spoil everything


def sampled(count: int, **changes: Any) -> SamplingParams:
    values = {"temperature": 0.9, "seed": 11, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(max_tokens=count, ignore_eos=True, **(values | changes))


def greedy(count: int, **changes: Any) -> SamplingParams:
    return sampled(count, temperature=0, **changes)


def overwrite(core: EngineCore, blocks: list[int]) -> None:
    """Behind the steps in flight, which may still read or write them."""

    def write() -> None:
        for tensor in core.executor._worker.runner.kv._tensors:  # type: ignore[attr-defined]
            tensor[blocks] = GARBAGE

    core.executor.run_on_thread(write)


class Driver:
    """All requests of one engine, without a thread or a loop of its own."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.scheduler = scheduler_of(llm)
        self._finished: dict[str, RequestOutput] = {}
        self._num_requests = 0
        self._afresh: dict[tuple[tuple[int, ...], str], list[int]] = {}

    def new_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    def add(self, prompt: list[int], params: SamplingParams, **options: Any) -> str:
        request_id = self.new_id()
        self.llm.engine.add_request(request_id, prompt, params, **options)
        return request_id

    def find(self, parent_id: str) -> Root:
        return self.llm.engine.output_processor.find_root(parent_id)

    def continuation(self, root: Root, suffix: list[int], params: SamplingParams, **options: Any) -> EngineCoreRequest:
        processor = self.llm.engine.input_processor
        return processor.process_continuation(self.new_id(), root, suffix, params, **options)

    def submit(self, request: EngineCoreRequest) -> str:
        self.llm.engine.submit(Prepared(request))
        assert request.external_id is not None
        return request.external_id

    def generate_continuation(self, parent_id: str, suffix: list[int], params: SamplingParams, **options: Any) -> str:
        return self.submit(self.continuation(self.find(parent_id), suffix, params, **options))

    def step(self) -> None:
        for output in self.llm.engine.step():
            if output.finished:
                assert output.error is None
                self._finished[output.request_id] = output
        self.scheduler.check()
        self._overwrite_unheld_memory()

    def result(self, request_id: str) -> RequestOutput:
        while request_id not in self._finished:
            self.step()
        return self._finished[request_id]

    def is_finished(self, request_id: str) -> bool:
        return request_id in self._finished

    def abort(self, request_id: str) -> None:
        self.llm.engine.abort_request([request_id])

    def forget_unheld_memory(self) -> None:
        """End leases, and drop unreferenced blocks from the prefix cache."""
        self.scheduler.leases.end_all()
        pool = self.scheduler.kv_cache.pool
        for block in pool.blocks[1:]:
            if block.ref_cnt == 0:
                pool.uncache(block)
        self._overwrite_unheld_memory()

    def afresh(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """What the whole text gives when it is sent alone, and nothing is found of it."""
        key = (tuple(prompt), repr(params))
        if key not in self._afresh:
            assert not self.llm.engine.has_unfinished_requests()
            output = self.result(self.add(prompt, params, cache_salt=self.new_id()))
            assert output.num_cached_tokens == 0
            self._afresh[key] = list(output.outputs[0].token_ids)
        return self._afresh[key]

    def _overwrite_unheld_memory(self) -> None:
        blocks = self.scheduler.kv_cache.pool.blocks[1:]
        unheld = [block.block_id for block in blocks if block.ref_cnt == 0 and block.block_hash is None]
        overwrite(self.llm._client.core, unheld)
