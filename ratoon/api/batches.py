"""Lists of prompts to lists of requests, for an LLM: params, priorities and ids are one for all, or one for each.

Every entry is checked before the first is started, and an error names the entry by its index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeAlias

from ratoon.core.errors import QueueFullError, RequestError
from ratoon.core.machine import usable_cores
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.engine.front_end import Prepared, with_output_kind
from ratoon.engine.input.prompts import Prompt, Suffix
from ratoon.engine.input.request_options import ChatOptions, ExtractionOptions, GenerationOptions, PoolingOptions
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output.roots import Root

UseTqdm: TypeAlias = bool | Callable[..., Any] | None
Ids: TypeAlias = str | Sequence[str] | None  # None: numbers, counted from 0
NUM_CHECKS_AHEAD = 64  # of grammars that are new


class BatchOptions(GenerationOptions, total=False):
    progress: bool  # a progress bar, on a terminal only
    use_tqdm: UseTqdm  # vLLM's name for it


class BatchChatOptions(ChatOptions, total=False):
    progress: bool
    use_tqdm: UseTqdm


class BatchPoolingOptions(PoolingOptions, total=False):
    progress: bool
    use_tqdm: UseTqdm


class BatchExtractionOptions(ExtractionOptions, total=False):
    progress: bool


def split_progress(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a bar is wanted, and the other options. vLLM's name takes precedence; its value may be a class."""
    left = dict(options)
    progress, use_tqdm = left.pop("progress", True), left.pop("use_tqdm", None)
    return progress if use_tqdm is None else bool(use_tqdm), left


def chat_prompts(render: Callable[..., Any], messages: Any, variables: Mapping[str, Any]) -> Any:
    """One conversation as a prompt, or of several each."""
    if not is_sequence(messages):
        raise RequestError("messages", f"{type(messages).__name__} is not a list", "a list of messages")
    if not messages or not is_sequence(messages[0]):
        return render(messages, **variables)
    prompts = []
    for index, conversation in enumerate(messages):
        try:
            prompts.append(render(conversation, **variables))
        except RequestError as error:
            raise in_conversation(error, index) from None
    return prompts


class ChecksAhead:
    """Begins the checks of a batch's grammars before they are waited for, so that several run at once. Closed early,
    where an entry is refused, it cancels those that are left."""

    def __init__(self, check: Callable[[Any], Future[Any] | None], params: Sequence[Any]) -> None:
        self._check = check
        self._params = params
        self._begun: list[Future[Any] | None] = []
        self._num_taken = 0
        self._lock = threading.Lock()  # entries with images are read in several threads

    def advance(self) -> None:
        """The batch goes on to its next entry, and waits for that."""
        with self._lock:
            with suppress(QueueFullError):  # other threads have begun as many: it is tried again with the next entry
                for params in self._params[len(self._begun) : self._num_taken + NUM_CHECKS_AHEAD]:
                    self._begun.append(self._check(params))
            self._num_taken += 1

    def close(self) -> None:
        for check in self._begun:
            if check is not None:
                check.cancel()


class Batches:
    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_requests = 0  # that got a number as their id

    def generations(
        self, prompts: Any, params: Any, request_id: Ids, kind: RequestOutputKind, options: dict[str, Any]
    ) -> list[Prepared]:
        engine = self._engine
        # Deltas only append, and the best text of a search may change from step to step.
        default = engine.default_params if kind == RequestOutputKind.DELTA else engine.get_default_params()
        if params is None or isinstance(params, (SamplingParams, BeamSearchParams)):
            # Shared by all: no prompt's index belongs to the error.
            engine.input_processor.verify_params(with_output_kind(params or default, kind))

        def prepare(one_id: str, prompt: Prompt, one_params: Any, priority: int, adapter: Any) -> Prepared:
            ahead.advance()
            params = with_output_kind(one_params, kind)
            return engine.prepare(one_id, prompt, params, priority=priority, adapter=adapter, **options)

        check = partial(engine.input_processor.check_grammar, owner=options.get("owner"))
        with closing(ChecksAhead(check, params if is_sequence(params) else ())) as ahead:
            return self._of_prompts(prompts, "sampling_params", params, default, request_id, options, prepare)

    def poolings(self, prompts: Any, params: Any, request_id: Ids, options: dict[str, Any]) -> list[Prepared]:
        engine = self._engine
        if params is None or isinstance(params, PoolingParams):
            engine.input_processor.verify_pooling_params(params or PoolingParams())

        def prepare(one_id: str, prompt: Prompt, one_params: Any, priority: int, adapter: Any) -> Prepared:
            return engine.prepare_pooling(one_id, prompt, one_params, priority=priority, adapter=adapter, **options)

        return self._of_prompts(prompts, "pooling_params", params, PoolingParams(), request_id, options, prepare)

    def extractions(
        self, prompts: Any, params: Any, request_id: Ids, options: dict[str, Any]
    ) -> tuple[list[Prepared], bool]:
        """Prepares extractions, and returns them and whether it is one alone."""
        engine, owner = self._engine, options.get("owner")
        originals, choices = options.pop("original_request_id", None), options.pop("choice", 0)
        if originals is None or prompts is not None:
            field, asked, single = "prompts", prompts, not is_many(prompts)
        else:
            field, asked, single = "original_request_id", originals, not is_sequence(originals)

        def prepare(one_id: str, one: Any, one_params: Any, choice: Any, adapter: Any) -> Prepared:
            prompt, original = (one, originals) if field == "prompts" else (None, one)
            source = engine.find_source(prompt, original, owner)
            return engine.prepare_extraction(one_id, source, one_params, choice=choice, adapter=adapter, **options)

        sources = [asked] if single else list(asked)
        params_of_each = one_for_each("params", params, len(sources), HiddenStatesParams())
        choice_of_each = one_for_each("choice", choices, len(sources), 0)
        of_each = params_of_each, choice_of_each, self._adapters(options, len(sources))
        return self._each(field, sources, single, request_id, of_each, prepare), single

    def continuation(
        self, parent: Root | str, suffix: Suffix, params: Any, request_id: str | None, options: dict[str, Any]
    ) -> list[Prepared]:
        params = self._engine.get_default_params() if params is None else params
        params = with_output_kind(params, RequestOutputKind.FINAL_ONLY)

        def prepare(one_id: str, one: Root | str) -> Prepared:
            return self._engine.prepare_continuation(one_id, one, suffix, params, **options)

        return self._each("parent_request_id", [parent], True, request_id, (), prepare)

    def _of_prompts(
        self,
        prompts: Any,
        params_field: str,
        params: Any,
        default: Any,
        request_id: Ids,
        options: dict[str, Any],
        prepare: Callable[..., Prepared],
    ) -> list[Prepared]:
        single = not is_many(prompts)
        items = [prompts] if single else list(prompts)
        params_of_each = one_for_each(params_field, params, len(items), default)
        priority_of_each = one_for_each("priority", options.pop("priority", None), len(items), 0)
        adapter_of_each = self._adapters(options, len(items))
        # About the engine's settings, not about one prompt.
        self._engine.verify_placement(any(priority_of_each), options.get("data_parallel_rank"))
        return self._each(
            "prompts", items, single, request_id, (params_of_each, priority_of_each, adapter_of_each), prepare
        )

    def _adapters(self, options: dict[str, Any], count: int) -> list[Any]:
        """The adapter of each. One for all is read once, and no prompt's index belongs to its error."""
        find = self._engine.adapters.find
        adapter, theirs = options.pop("adapter", None), options.pop("lora_request", None)
        if not is_sequence(adapter) and not is_sequence(theirs):
            return [find(adapter, theirs)] * count
        named = one_for_each("adapter", adapter, count, None)
        return [*map(find, named, one_for_each("lora_request", theirs, count, None))]

    def _each(
        self,
        field: str,
        items: list[Any],
        single: bool,
        request_id: Ids,
        further: tuple[list[Any], ...],  # arguments of each
        prepare: Callable[..., Prepared],
    ) -> list[Prepared]:
        self._engine.verify_running()
        ids = ids_for_each(request_id, len(items), self._num_requests)
        prepared = []
        with closing(_results(prepare, [*zip(ids, items, *further)], _num_threads(items))) as results:
            for index in range(len(items)):
                try:
                    prepared.append(next(results))
                except RequestError as error:
                    self._engine.count_refused()
                    raise error if single else with_index(error, index, field) from None
        self._num_requests += len(prepared)
        return prepared


def _num_threads(items: list[Any]) -> int:
    """In how many threads entries are read. Texts are read one after the other: that holds the interpreter."""
    num_media = sum(isinstance(one, Mapping) and "multi_modal_data" in one for one in items)
    return min(num_media, usable_cores())


def _results(
    prepare: Callable[..., Prepared], arguments: list[tuple[Any, ...]], num_threads: int
) -> Generator[Prepared, None, None]:
    """In the order of the arguments. Closed early, where an entry is refused, it drops those that have not begun."""
    if num_threads < 2:
        yield from (prepare(*one) for one in arguments)
        return
    pool = ThreadPoolExecutor(num_threads, "prompts")
    try:
        for future in [pool.submit(copy_context().run, prepare, *one) for one in arguments]:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def is_many(prompts: Any) -> bool:
    """A list of prompts, or of outputs, and not one prompt that is a list of token ids. An empty list is no prompts."""
    if not is_sequence(prompts):
        return False
    return not prompts or isinstance(prompts[0], (str, Mapping, RequestOutput)) or is_sequence(prompts[0])


def one_for_each(field: str, value: Any, count: int, default: Any) -> list[Any]:
    if value is None:
        return [default] * count
    if not is_sequence(value):
        return [value] * count
    if len(value) != count:
        raise RequestError(field, f"has {len(value)} entries for {count} prompts", "one for all, or one for each")
    return [default if entry is None else entry for entry in value]


def ids_for_each(request_id: Any, count: int, first: int) -> list[str]:
    """The given ids, or consecutive numbers from the first."""
    if isinstance(request_id, str) and count > 1:
        raise RequestError("request_id", f"{request_id!r} is one for {count} prompts", "a list, with one for each")
    given = one_for_each("request_id", request_id, count, None)
    ids = [str(first + index) if one is None else one for index, one in enumerate(given)]
    if len({*map(str, ids)}) < count:
        raise RequestError("request_id", "names two prompts", "a different id for each")
    return ids


def with_index(error: RequestError, index: int, field: str = "prompts") -> RequestError:
    """Returns the error with the index of its prompt."""
    if error.field == field:
        return type(error)(f"{field}[{index}]", error.problem, error.expected)
    return error.inside(f"{field}[{index}]")


def in_conversation(error: RequestError, index: int) -> RequestError:
    """Returns the error with the index of its conversation: `messages[2][0].role`."""
    if not error.field.startswith("messages"):
        return error
    field = f"messages[{index}]" + error.field.removeprefix("messages")
    return type(error)(field, error.problem, error.expected)
