"""Passes one request's outputs from the output handler to the waiting caller: a slot, not a queue.

Outputs that the caller has not taken are merged with the next ones, so that a slow caller needs no more memory than
its answer. A caller that is woken for each token pays more for the waking than for the token: it may give a function
that takes outputs in its place while it waits. For one event loop: it is not safe across threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from ratoon.core.outputs import CompletionOutput, RequestOutput
from ratoon.core.params import RequestOutputKind
from ratoon.engine.output.request_state import Output

# Gets an output while its caller waits for one. False: not now, and the caller gets it.
Take: TypeAlias = Callable[[RequestOutput], bool]


class OutputCollector:
    """The handler puts outputs in, or `fail`s once; one caller gets them out. Ownership of an output passes with
    `put`. `take` is offered every output but the last one while the caller waits, which has then handled all earlier
    ones: order is kept."""

    __slots__ = ("_delta", "_error", "_pending", "_reader", "_take")

    def __init__(self, kind: RequestOutputKind, take: Take | None = None) -> None:
        self._delta = kind == RequestOutputKind.DELTA
        self._take = take
        self._pending: Output | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # set while a caller waits

    def put(self, output: Output) -> None:
        pending = self._pending
        if pending is None and self._take is not None and self._is_waiting and not output.finished:
            assert isinstance(output, RequestOutput)
            if self._take(output):
                return
        if not isinstance(pending, RequestOutput) or not isinstance(output, RequestOutput):
            self._pending = output
        elif self._delta:
            _append(pending, output)
        else:
            self._pending = _replace(pending, output)
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """Ends the outputs with an error: when the pending one was taken, `get` raises it."""
        self._error = error
        self._wake_reader()

    def get_nowait(self) -> Output | None:
        """The pending output, or None."""
        output, self._pending = self._pending, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def get(self) -> Output:
        """The pending output, or the next one."""
        while (output := self.get_nowait()) is None:
            assert self._reader is None, "two callers wait for the outputs of one request"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return output

    @property
    def _is_waiting(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _append(pending: RequestOutput, new: RequestOutput) -> None:
    """Join two outputs that hold what is new, choice by choice."""
    by_index = {choice.index: choice for choice in pending.outputs}
    for choice in new.outputs:
        earlier = by_index.get(choice.index)
        if earlier is None:
            pending.outputs.append(choice)
        else:
            _append_choice(earlier, choice)
    if len(pending.outputs) > len(by_index):
        pending.outputs.sort(key=lambda choice: choice.index)
    pending.finished = new.finished
    pending.metrics = new.metrics
    pending.num_cached_tokens = new.num_cached_tokens
    pending.error = new.error
    pending.refusal = new.refusal
    pending.continuation = new.continuation
    pending.hidden_states = new.hidden_states
    if new.prompt_logprobs is not None:
        pending.prompt_logprobs = new.prompt_logprobs


def _append_choice(earlier: CompletionOutput, choice: CompletionOutput) -> None:
    earlier.text += choice.text
    assert isinstance(earlier.token_ids, list)
    earlier.token_ids += choice.token_ids  # in place: a reader that is far behind must not make every step slower
    if earlier.logprobs is not None and choice.logprobs is not None:
        earlier.logprobs += choice.logprobs
    earlier.cumulative_logprob = choice.cumulative_logprob
    earlier.finish_reason = choice.finish_reason
    earlier.stop_reason = choice.stop_reason


def _replace(pending: RequestOutput, new: RequestOutput) -> RequestOutput:
    """The newer of two outputs that hold everything, and what only the older one has."""
    missing = {choice.index for choice in pending.outputs} - {choice.index for choice in new.outputs}
    if missing:
        kept = [choice for choice in pending.outputs if choice.index in missing]
        new.outputs = sorted([*kept, *new.outputs], key=lambda choice: choice.index)
    if new.prompt_logprobs is None:
        new.prompt_logprobs = pending.prompt_logprobs
    return new
