"""An executor across whose border nothing passes but frames: plans, results, calls and facts are encoded and decoded
again, as between processes. Named in the `executor` setting of engines under test."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.wire import Decoder, encode
from ratoon.core.worker import WorkerStats, decode_call, decode_result, encode_call, encode_result
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer

NAME = f"{__name__}:FramedExecutor"


def as_bytes(frames: Sequence[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


class FramedHandle:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def launch(self) -> None:
        self._handle.launch()

    def result(self) -> ModelRunnerOutput:
        return Decoder(ModelRunnerOutput).decode(as_bytes(encode(self._handle.result())))


class FramedExecutor(UniProcExecutor):
    calls: list[str]  # names of the calls so far

    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        super().__init__(config, model, tensors, timer)
        self.calls = []
        self.facts = decode_result("allocate", as_bytes(encode_result(self.facts)))

    @property
    def stats(self) -> WorkerStats:
        return Decoder(WorkerStats).decode(as_bytes(encode(super().stats)))

    def submit(self, plan: SchedulerOutput) -> FramedHandle:
        return FramedHandle(super().submit(Decoder(SchedulerOutput).decode(as_bytes(encode(plan)))))

    def collective_rpc(self, method: str, *arguments: Any) -> Future[list[Any]]:
        self.calls.append(method)
        name, decoded = decode_call(as_bytes(encode_call(method, arguments)))
        inner = super().collective_rpc(name, *decoded)
        outer: Future[list[Any]] = Future()

        def tell(done: Future[list[Any]]) -> None:
            if not outer.set_running_or_notify_cancel():
                return
            try:
                results = [decode_result(name, as_bytes(encode_result(result))) for result in done.result()]
                outer.set_result(results)
            except BaseException as error:
                outer.set_exception(error)

        inner.add_done_callback(tell)
        outer.add_done_callback(lambda outer: inner.cancel() if outer.cancelled() else None)
        return outer
