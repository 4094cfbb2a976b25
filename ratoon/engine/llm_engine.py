"""The synchronous engine: the front end, driven one step at a time by the caller that waits.

It serves one thread; only `abort_request` may be called from others. Ctrl-C is held back until the end of a step, so
that the engine's state stays consistent. Lists of prompts and progress are the API's.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks for the names of numbers at each call, for 10 µs
import threading
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias

from ratoon.core.errors import EngineError, RequestError, UnknownParentError
from ratoon.core.params import GenerationParams
from ratoon.engine.front_end import FrontEnd, Key, Prepared
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.prompts import Prompt
from ratoon.engine.output.answers import with_torch_tensors
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.request_state import Output
from ratoon.engine.processes.client_interface import EngineClient

MAX_EXTRACTIONS = 256  # of a list, in the engine at a time: it refuses more than it can queue
Inbox: TypeAlias = deque[Any]


class LLMEngine(FrontEnd):
    def __init__(
        self, client: EngineClient, input_processor: InputProcessor, output_processor: OutputProcessor, **parts: Any
    ) -> None:
        super().__init__(client, input_processor, output_processor, **parts)
        self.client = client
        self._has_answered = False
        self._inboxes: dict[Key, Inbox] = {}  # of requests whose caller waits for them in `run` or `begin`
        self._lock = threading.Lock()  # the output processor belongs to the thread that holds it

    def add_request(self, request_id: str, prompt: Prompt, params: GenerationParams, **options: Any) -> None:
        """Check a request and hand it to the engine; `step` brings its outputs. RequestError: nothing of it is left."""
        self.submit(self.prepare(request_id, prompt, params, **options))

    def submit(self, prepared: Prepared, inbox: Inbox | None = None) -> None:
        """Hand a request over. With an inbox, its outputs go there as well."""
        with self._lock:
            if self._throughput is not None and not self.has_unfinished_requests():
                self._throughput.begin_work()
            self.hand_over(prepared)
            if inbox is not None:
                self._inboxes[prepared.key] = inbox

    def step(self) -> list[Output]:
        """Run one step and return what it brought for callers: nothing while the engine is paused. Ctrl-C is held back
        until its end."""
        if not self.client.has_work():
            if self.has_unfinished_requests():
                raise EngineError("the engine has no work left, but requests are unfinished")
            return []
        with interrupts_held_back():
            engine_outputs = self.client.get_output()
            with self._lock:
                outputs = self.process_outputs([engine_outputs])
            self.record_stats(engine_outputs)
            if self._throughput is not None:
                self._throughput.write_when_due(idle=not self.has_unfinished_requests())
            self._hand_out(outputs)
        return outputs

    def abort_request(self, request_ids: Iterable[str], owner: str | None = None) -> list[Output]:
        """Abort requests, by the caller's ids. From any thread: what the step under way brings for them is
        dropped."""
        with interrupts_held_back():
            with self._lock:
                outputs = self.end_requests(request_ids, owner)
            self._hand_out(outputs)
        return outputs

    def _hand_out(self, outputs: list[Output]) -> None:
        """Hands outputs to the callers that wait: a stream may be open while another call runs."""
        for output in outputs:
            inbox = self._inboxes.get((output.owner, output.request_id))
            if inbox is not None:
                inbox.append(output)

    # ---- callers that wait ----

    def wait_for_end(self, request_id: str, owner: str | None = None) -> None:
        """Returns at once for a request that is not under way."""
        while isinstance(request_id, str) and self.output_processor.is_running(request_id, owner):
            self.step()

    def run(self, requests: list[Prepared]) -> Generator[Any, None, None]:
        """Hand requests over and yield their outputs (RequestOutput, EmbeddingOutput, HiddenStatesOutput) until all
        have ended. Closing it early aborts the rest. A single one that the engine refuses raises."""
        inbox: Inbox = deque()
        waiting = deque(requests)
        unfinished: set[Key] = set()  # in the engine
        try:
            while waiting or unfinished:
                if waiting:
                    with self.client.together():
                        while waiting and (waiting[0].selection is None or len(unfinished) < MAX_EXTRACTIONS):
                            unfinished.add(self._begin_one(waiting.popleft(), inbox))
                if not inbox:
                    self.step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        unfinished.discard((output.owner, output.request_id))
                    if output.refusal is not None and len(requests) == 1:
                        raise output.refusal
                    with_torch_tensors(output)
                    yield output
            if self._has_answered:  # the first answer waits for nothing that it does not need
                self.client.work_between_calls()
            self._has_answered = True
        finally:
            if unfinished:
                with interrupts_held_back():
                    for owner, request_id in unfinished:
                        self.abort_request([request_id], owner)
            for one in requests:
                if self._inboxes.get(one.key) is inbox:
                    del self._inboxes[one.key]

    def _begin_one(self, prepared: Prepared, inbox: Inbox) -> Key:
        try:
            self.submit(prepared, inbox)
        except RequestError as error:
            inbox.append(self._refuse(prepared, error))
        return prepared.key

    def _refuse(self, prepared: Prepared, error: RequestError) -> Output:
        """The output of a request that the engine did not take, as if a step had brought it."""
        if self.output_processor.is_running(prepared.external_id, prepared.request.owner):
            raise error  # the id belongs to another request
        self.output_processor.add_request(*prepared)
        output = self.output_processor.fail_request(prepared.external_id, error, prepared.request.owner)
        assert output is not None
        return output

    def begin(self, prepared: Prepared, inbox: Inbox) -> str:
        """Start a request on its own, whose one output goes to the inbox; its id. It ends with `end`."""
        self._begin_one(prepared, inbox)
        return prepared.external_id

    def end(self, request_id: str) -> None:
        """Abort a request, or forget it if it has ended."""
        self.abort_request([request_id])
        self._inboxes.pop((None, request_id), None)
        with suppress(UnknownParentError):
            self.output_processor.roots.remove(request_id)
        self.tell_dropped_roots()


SIGINT: int = _signal.SIGINT


class interrupts_held_back:
    """Ctrl-C inside the block is raised at its end. A second one is raised at once: the block may hang.

    Does nothing on other threads than the main one, or if the program has its own handler. A class, not a generator:
    it is entered once a step.
    """

    __slots__ = ("_count", "_holds")

    def __enter__(self) -> None:
        self._count = 0
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(SIGINT) is _signal.default_int_handler
        )
        if self._holds:
            _signal.signal(SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._holds:
            _signal.signal(SIGINT, _signal.default_int_handler)
            if self._count and error[0] is None:
                raise KeyboardInterrupt

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
