"""The asynchronous engine: the front end, driven by a task on an event loop, for many callers at once.

The OutputProcessor builds outputs, the OutputCollector passes them to callers; this connects them, and
removes all state of a request when it ends or its caller leaves.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from ratoon.core.adapters import Adapter, BaseModel
from ratoon.core.errors import AbortedError, DeadlineError, EngineDeadError, EngineError, RequestError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import RequestOutputKind
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.front_end import FrontEnd, Key, Prepared
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.media_threads import MediaThreads
from ratoon.engine.input.prompts import has_media, takes_long
from ratoon.engine.output.answers import ABORTED, arrange_beside
from ratoon.engine.output.output_collector import OutputCollector, Take
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.request_state import Output
from ratoon.engine.processes.client_interface import AsyncEngineClient
from ratoon.engine.processes.hub_client import HubClient
from ratoon.observe.logging import get_logger
from ratoon.observe.throughput import INTERVAL, ThroughputLog

DRAIN_POLL = 0.02  # seconds
DEADLINE_GRACE = 0.5  # seconds for the engine to report that a deadline has passed
SLICE = 128  # outputs that are handled before others on the event loop have their turn,
SLICE_TOKENS = 512  # or so many tokens: the texts that a beam search found come all at once
BYTES_LIKE_A_TOKEN = 2**13  # of hidden states, that take as long as a token
FEW_TOKENS = 16  # of a request in a step

logger = get_logger(__name__)


class AsyncLLMEngine(FrontEnd):
    def __init__(
        self,
        client: AsyncEngineClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        **parts: Any,
    ) -> None:
        super().__init__(client, input_processor, output_processor, **parts)
        self.dead: EngineDeadError | None = None  # why requests are no longer answered
        self.collectors: dict[Key, OutputCollector] = {}  # as long as a request is unfinished
        self.stopped = False  # all of it has ended
        self.client = client
        self._waiting_for_ends: dict[Key, list[asyncio.Future[None]]] = {}
        self._in_checks: dict[Key, list[asyncio.Future[Any]]] = {}  # requests that wait for the check of a grammar
        self._media_threads = MediaThreads()
        self._tasks = [asyncio.create_task(self._run(), name="output handler")]
        if self._throughput is not None:
            self._tasks.append(asyncio.create_task(self._write_throughput(self._throughput), name="throughput log"))

    async def shutdown(self, drain_until: Callable[[], float]) -> None:
        """Wait for requests under way until that time, which may change meanwhile; abort the rest, and end."""
        self.ended = True
        while self.collectors and time.monotonic() < drain_until():
            await asyncio.sleep(DRAIN_POLL)
        for owner, external_id in [*self.collectors, *self._in_checks]:
            self.abort([external_id], owner)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._media_threads.close()
        await asyncio.to_thread(self.input_processor.close)
        await self.client.shutdown()
        self.output_processor.roots.close()
        self.stopped = True

    def verify_running(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(*self.dead.args)
        super().verify_running()

    # ---- callers ----

    def answer(
        self, prepare: Callable[..., Prepared], request_id: str | None, options: Any, take: Take | None, **read: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Begin a request, and yield what comes for it, but for what `take` has taken, until it has ended or its caller
        leaves."""
        return self._follow(partial(self.begin, prepare, request_id, options, take, **read))

    async def _follow(
        self, begin: Callable[[], Awaitable[tuple[Prepared, OutputCollector]]]
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared, collector = await begin()
        try:
            finished = False
            while not finished:
                output = await collector.get()
                assert isinstance(output, RequestOutput)
                if output.refusal is not None:
                    raise output.refusal
                finished = output.finished
                if output.hidden_states is not None:
                    await arrange_beside(output)
                yield output
        finally:
            self.release(prepared, collector)

    async def answer_once(
        self,
        prepare: Callable[..., Prepared],
        request_id: str | None,
        options: Any,
        deadline: float | None = None,
        **read: Any,
    ) -> Any:
        """Runs a request that has one output, if all goes well, and returns it. The engine keeps the deadline; it is
        kept here as well, for an engine that is being started again."""
        prepared, collector = await self.begin(prepare, request_id, options, None, **read)
        try:
            async with asyncio.timeout(None if deadline is None else deadline + DEADLINE_GRACE):
                output = await collector.get()
        except TimeoutError:
            raise DeadlineError("deadline", f"its {deadline:g} s are over", "more time") from None
        finally:
            self.release(prepared, collector)
        if output.refusal is not None:
            raise output.refusal
        if output.error is not None:
            raise AbortedError(output.error) if output.error == ABORTED else EngineError(output.error)
        await arrange_beside(output)
        return output

    async def begin(
        self, prepare: Callable[..., Prepared], request_id: str | None, options: Any, take: Take | None, **read: Any
    ) -> tuple[Prepared, OutputCollector]:
        """Check a request and hand it over. `read`: what takes long to check if it is long. On any error all state of
        the request is removed."""
        # An id that can't be guessed, where none was given: an id is all that it takes to abort a request.
        request_id = secrets.token_hex(16) if request_id is None else request_id
        arrived = options.get("arrival_time")
        options = {**options, "arrival_time": time.monotonic() if arrived is None else arrived}
        named = options.pop("adapter", None), options.pop("lora_request", None)
        ready = partial(prepare, self, request_id, **options)
        try:
            if named != (None, None):
                options["adapter"] = await self._find_adapter(*named)
                ready = partial(prepare, self, request_id, **options)
            was_aborted = not await self._check_grammar(request_id, read.get("params"), options.get("owner"))
            if was_aborted:  # its grammar may be anything, and is not needed any more
                ready = partial(ready, params=msgspec.structs.replace(read["params"], structured_output=None))
            prepared = await self._prepare_beside(ready, options.get("owner"), **read)
            if was_aborted:
                return prepared, self._submit_aborted(prepared, take)
            self.verify_running()  # much may have happened in a thread
            return prepared, self.submit(prepared, take)
        except RequestError:
            self.count_refused()
            raise

    async def _prepare_beside(self, ready: Callable[[], Prepared], owner: str | None, **read: Any) -> Prepared:
        """Run what takes long in a thread: prompts with images or videos when it is the owner's turn."""
        if not takes_long(**read):
            return ready()
        if has_media(**read):
            return await self._media_threads.run(ready, owner)
        return await asyncio.to_thread(ready)

    async def _find_adapter(self, adapter: Any, lora_request: Any) -> Adapter | BaseModel | None:
        """Files are read in a thread."""
        if self.adapters.must_read(adapter, lora_request):
            return await asyncio.to_thread(self.adapters.find, adapter, lora_request)
        return self.adapters.find(adapter, lora_request)

    async def _check_grammar(self, request_id: str, params: Any, owner: str | None) -> bool:
        """Wait for the check of a new grammar, so that `prepare` has its result. False: the request was aborted
        meanwhile. The check ends with a caller that leaves, unless others wait for it."""
        check = self.input_processor.check_grammar(params, owner)
        if check is None or check.done():
            return True
        key, checked = (owner, request_id), asyncio.wrap_future(check)
        self._in_checks.setdefault(key, []).append(checked)
        try:
            await asyncio.wait([checked])
            if not checked.cancelled():
                checked.result()
            return not checked.cancelled()
        finally:
            checked.cancel()
            self._in_checks[key].remove(checked)
            if not self._in_checks[key]:
                del self._in_checks[key]

    def go_on(self, request: EngineCoreRequest, num_tokens: int) -> AsyncGenerator[RequestOutput, None]:
        """Yields what comes for a request that another front end began, from its first token on: so many tokens at
        first, and further ones when `take_rest` is called."""
        return self._follow(partial(self._take_over, request, num_tokens))

    async def _take_over(self, request: EngineCoreRequest, num_tokens: int) -> tuple[Prepared, OutputCollector]:
        self.verify_running()
        prepared = Prepared(request)
        collector = _collector_of(prepared, None)
        self.output_processor.add_request(*prepared)
        self.collectors[prepared.key] = collector
        assert isinstance(self.client, HubClient), "front ends share their requests through a hub"
        self.client.take_over(request.request_id, num_tokens)
        if num_tokens == 0:
            self.client.take_over(request.request_id, None)
        return prepared, collector

    def take_rest(self, external_id: str, owner: str | None) -> None:
        """The tokens that `go_on` asked for have been taken: further ones may come."""
        request_id = self.output_processor.internal_id(external_id, owner)
        if request_id is not None and isinstance(self.client, HubClient):
            self.client.take_over(request_id, None)

    def submit(self, prepared: Prepared, take: Take | None = None) -> OutputCollector:
        """Hand a request over. Whatever is raised, nothing of it is left behind."""
        collector = _collector_of(prepared, take)
        self.hand_over(prepared)
        self.collectors[prepared.key] = collector
        return collector

    def _submit_aborted(self, prepared: Prepared, take: Take | None) -> OutputCollector:
        """A request that was aborted before there was anything to hand over: its caller gets a last output."""
        owner, external_id = key = prepared.key
        collector = _collector_of(prepared, take)
        self.output_processor.add_request(*prepared)
        self.collectors[key] = collector
        self.abort([external_id], owner)
        return collector

    def release(self, prepared: Prepared, collector: OutputCollector) -> None:
        """The caller is gone. A request that has not ended is aborted; another one may have its id by now."""
        owner, external_id = key = prepared.key
        if self.collectors.get(key) is collector:
            del self.collectors[key]
            self.abort([external_id], owner)
            self._tell_of_end(key)

    def unfinished_keys(self) -> set[Key]:
        return {*self.collectors, *self._in_checks}

    async def wait_for_end(self, external_id: str, owner: str | None = None) -> None:
        """Returns at once for a request that is not under way."""
        key = owner, external_id
        if key in self.collectors:
            ended = asyncio.get_running_loop().create_future()
            self._waiting_for_ends.setdefault(key, []).append(ended)
            await ended

    def _tell_of_end(self, key: Key) -> None:
        for ended in self._waiting_for_ends.pop(key, ()):
            if not ended.done():
                ended.set_result(None)

    def abort(self, external_ids: Iterable[str], owner: str | None = None) -> None:
        """End requests. Their callers get a last output."""
        external_ids = list(external_ids)
        for external_id in external_ids:
            for checked in self._in_checks.get((owner, external_id), ()):
                checked.cancel()
        self._deliver(self.end_requests(external_ids, owner))

    # ---- what comes back ----

    async def _run(self) -> None:
        try:
            while True:
                steps = await self.client.get_outputs()
                for step in steps:
                    self.record_stats(step)
                for part in _slices(steps):
                    self._handle(part)
                    await asyncio.sleep(0)  # callers take what they got, new requests come in
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {type(error).__name__}: {error}"))

    @staticmethod
    async def _write_throughput(throughput: ThroughputLog) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            throughput.write()

    def _handle(self, steps: list[EngineCoreOutputs]) -> None:
        self._deliver(self.process_outputs(steps))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.owner, output.request_id
            collector = self.collectors.get(key)
            if collector is None:
                continue
            if output.finished:
                del self.collectors[key]
                self._tell_of_end(key)
            try:
                collector.put(output)
            except Exception as error:  # a bug in the front end, which fails this request only
                logger.exception("request %s failed in the front end", output.request_id)
                collector.fail(EngineError(f"{type(error).__name__}: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        """The engine can't be restarted: all waiting callers get the error."""
        self.dead = error
        collectors, self.collectors = self.collectors, {}
        for (owner, external_id), collector in collectors.items():
            self._tell_of_end((owner, external_id))
            output = self.output_processor.fail_request(external_id, error, owner)
            if output is not None and output.error is None:
                collector.put(output)  # its text is complete, and only its hidden states are missing
            else:
                collector.fail(EngineDeadError(*error.args))  # one for each: they get a traceback of their own


def _collector_of(prepared: Prepared, take: Take | None) -> OutputCollector:
    params = prepared.request.generation_params
    return OutputCollector(RequestOutputKind.FINAL_ONLY if params is None else params.output_kind, take)


def _slices(steps: list[EngineCoreOutputs]) -> Iterator[list[EngineCoreOutputs]]:
    """What steps brought, in parts. If there are several, callers are behind, and a request's outputs of all steps are
    in one part: its caller gets them together."""
    if len(steps) > 1 and all(map(_is_light, steps)):
        yield from _slices_by_request(steps)
        return
    for step in steps:
        for outputs in _slices_of_step(step.outputs):
            yield [_part(step, outputs)]


def _is_light(step: EngineCoreOutputs) -> bool:
    """Whether it brought no more than a few tokens for a request, and no hidden states."""
    for output in step.outputs:
        if len(output.new_token_ids) > FEW_TOKENS or output.choice >= FEW_TOKENS or output.hidden_states is not None:
            return False
    return True


def _slices_by_request(steps: list[EngineCoreOutputs]) -> Iterator[list[EngineCoreOutputs]]:
    numbers: dict[str, int] = {}  # of the part that a request belongs to
    parts: list[list[EngineCoreOutputs]] = []
    for step in steps:
        shares: dict[int, list[EngineCoreOutput]] = {}
        for output in step.outputs:
            number = numbers.setdefault(output.request_id, len(numbers) // SLICE)
            shares.setdefault(number, []).append(output)
        parts += ([] for _ in range(len(parts), max(shares, default=-1) + 1))
        for number, outputs in shares.items():
            parts[number].append(_part(step, outputs))
    yield from parts


def _slices_of_step(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    part: list[EngineCoreOutput] = []
    num_tokens = 0
    for output in outputs:
        part.append(output)
        num_tokens += len(output.new_token_ids)
        if output.hidden_states is not None:
            num_tokens += output.hidden_states.data.nbytes // BYTES_LIKE_A_TOKEN
        if len(part) == SLICE or num_tokens >= SLICE_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


def _part(step: EngineCoreOutputs, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs, timestamp=step.timestamp, engine_index=step.engine_index)
