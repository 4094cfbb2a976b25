"""What executors and workers tell each other, as data: the results of a worker's phases, and the table of its calls.

A worker comes up in phases: choose, load, measure, allocate, warm up. Between measuring and allocating, the workers of
one engine agree on the size of the pool. Every call has a name in WORKER_METHODS, with the types of its arguments and
of its result, so that it can cross a process: nothing but data travels, and a name that is not in the table does not
exist, whatever methods a worker may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ratoon.core.errors import ConfigError, EngineError
from ratoon.core.kv import KVCacheConfig, KVFingerprint, SwapCosts, kv_config_of
from ratoon.core.media import MediaInput
from ratoon.core.prepared import prepared
from ratoon.core.stats import GraphStats
from ratoon.core.structured import StructuredOutput
from ratoon.core.wire import Buffer, Decoder, WireError, encode

LOOKED_UP = "none, as rows are looked up"


class WorkerChoices(msgspec.Struct, frozen=True):
    """What a worker chose from settings and model, before anything is loaded."""

    max_model_len: int
    device: str
    dtype: str
    ops: str
    attention: list[dict[str, Any]]  # for each KV group, and for an encoder: BackendChoice.facts
    num_threads: int
    model: str = ""  # a digest of its config and tensors, where workers read files of their own host


class WeightFacts(msgspec.Struct, frozen=True):
    """What the weights of a worker are in its memory."""

    num_bytes: int


class PoolSize(msgspec.Struct, frozen=True):
    """The blocks of a KV cache, on the device and on the host."""

    num_blocks: int
    num_host_blocks: int = 0


class Measurements(msgspec.Struct, frozen=True):
    """What a worker with its weights has room for. The largest step and the prompt are measured on a GPU alone."""

    pool: PoolSize
    step_bytes: int = 0  # what the largest step needs beside weights and KV cache; 0: not measured
    token_seconds: float | None = None  # that a token of a prompt takes; None: not measured


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker that has come up is, for the scheduler and for displays."""

    kv_config: KVCacheConfig
    max_model_len: int
    device: str
    dtype: str
    ops: str
    attention: list[dict[str, Any]]
    num_threads: int
    weight_bytes: int
    kv_bytes: int
    weight_formats: list[dict[str, Any]] = []  # a table that no product reads has LOOKED_UP as its product
    # How products with quantised weights are made on a CPU: KernelChoices.facts
    kernel_choices: list[dict[str, Any]] = []
    step_bytes: int = 0
    swap_costs: SwapCosts | None = None  # measured on a GPU, where preempted sequences may be swapped out
    # Of the blocks of each rank, where an executor has several: `kv_config` is that of the first
    rank_fingerprints: list[KVFingerprint] = []
    draft_cost: float = 0.0  # of a token that a model or head on the device drafts, in steps of the model
    encoder_address: str = ""  # where engines on other hosts fetch what the encoder of media makes; empty: nowhere


class WorkerStats(msgspec.Struct, frozen=True):
    """Figures of a worker that change while it runs."""

    num_computed_tokens: int = 0  # rows run through the model since the start
    graphs: GraphStats | None = None  # what CUDA graphs cost; None: steps are not captured
    experts: dict[int, list[int]] = {}  # SchedulerStats.experts
    num_media_runs: int = 0  # SchedulerStats.num_media_runs


_Function = tuple[str, int, str]  # file, line, name
_Times = tuple[int, int, float, float]  # primitive calls, calls, seconds in it, seconds in it and below


class FunctionTimings(msgspec.Struct):
    """A profile of Python functions, in the form of the module `pstats`."""

    functions: dict[_Function, tuple[int, int, float, float, dict[_Function, _Times]]] = {}


# ---- agreement ----


def agree_on_choices(chosen: Sequence[WorkerChoices]) -> None:
    """Raises ConfigError if the workers would not compute the same."""
    for field in ("max_model_len", "dtype"):
        values = list(dict.fromkeys(getattr(one, field) for one in chosen))
        if len(values) > 1:
            problem = f"the workers have chosen {' and '.join(map(repr, values))}"
            raise ConfigError(field, problem, "set it, so that all have the same")
    if len({one.model for one in chosen}) > 1:
        ranks = [rank for rank, one in enumerate(chosen) if one.model != chosen[0].model]
        problem = f"the files that rank {' and '.join(map(str, ranks))} reads are not those of rank 0"
        raise ConfigError("model", problem, "the same files on all hosts")


def agree_on_pool(measured: Sequence[Measurements]) -> PoolSize:
    """The largest pool that every worker has room for: block ids are the same on all of them."""
    return PoolSize(min(one.pool.num_blocks for one in measured), min(one.pool.num_host_blocks for one in measured))


# ---- calls ----


SECONDS_OF_A_CALL = 600.0  # loading weights takes longest


class WorkerMethod(NamedTuple):
    arguments: tuple[Any, ...] = ()  # their types
    result: Any = None  # its type
    # Whether it is executed at once, beside the steps in flight; otherwise after them and before later ones
    beside_steps: bool = False
    # In which workers that are processes must answer: after the call, and after the steps that it waits for
    seconds: float = SECONDS_OF_A_CALL


WORKER_METHODS = {
    # Before the phases, where ranks are on several hosts: where each is reached by a rank of the stage before it and by
    # others of its own stage, or nothing, if those are on the same host; then the answers of all ranks
    "listen": WorkerMethod((), list[str], seconds=120.0),
    "connect": WorkerMethod((list[list[str]],), seconds=120.0),
    # The phases, each called once and in this order
    "choose": WorkerMethod((), WorkerChoices),
    "load": WorkerMethod((), WeightFacts),
    "measure": WorkerMethod((), Measurements),
    "allocate": WorkerMethod((PoolSize,), WorkerFacts),
    "warm_up": WorkerMethod(),
    # Compile the grammar, which was checked, of a request that will be in later plans, for its owner. RequestError if
    # it can't be compiled.
    "prepare_grammar": WorkerMethod((StructuredOutput, str | None), beside_steps=True),
    # Run the encoder over these inputs, by their keys, and keep what comes out where other engines find it. Returns
    # when it is there.
    "encode_media": WorkerMethod((dict[str, MediaInput],)),
    # Fetch outputs of the encoder, by their keys, from engines on other hosts, by their addresses. Returns when they
    # have come, or will not come.
    "fetch_media": WorkerMethod((dict[str, str],), beside_steps=True),
    # The caller has handled a failed step and the skipped ones: plans submitted from now on are executed.
    "recover": WorkerMethod(beside_steps=True, seconds=120.0),
    # Do nothing. A process that works answers at once, whatever its steps wait for.
    "answer": WorkerMethod(beside_steps=True, seconds=120.0),
    # Free the KV cache, and from level 2 on the weights. Nothing is executed until `wake_up`.
    "sleep": WorkerMethod((int,)),
    "wake_up": WorkerMethod(),
    # From now on, prepare later steps in moments without work. Only where no other code uses the device: a capture
    # fails, and so does what other threads wait for, if they synchronise with the device meanwhile.
    "allow_idle_work": WorkerMethod(),
    # Prepare briefly for steps like those before; for a caller that has its results and waits. Does nothing where idle
    # work is allowed.
    "work_between_calls": WorkerMethod(beside_steps=True, seconds=120.0),
    # With True, trace what the GPU does, which `stop_profile` writes to the file; otherwise time functions.
    "start_profile": WorkerMethod((bool,)),
    "stop_profile": WorkerMethod((str,), FunctionTimings),
}


def find_method(name: str, num_arguments: int) -> WorkerMethod:
    """The entry of a call that can be made. Raises EngineError."""
    method = WORKER_METHODS.get(name)
    if method is None:
        raise EngineError(f"workers have no method {name!r}; known: {', '.join(WORKER_METHODS)}")
    if num_arguments != len(method.arguments):
        raise EngineError(f"{name} was called with {num_arguments} arguments; it has {len(method.arguments)}")
    return method


def encode_call(name: str, arguments: Sequence[Any]) -> list[Buffer]:
    """The frames of a call. Raises EngineError for one that is not in the table."""
    find_method(name, len(arguments))
    return encode((name, list(arguments)))


def decode_call(frames: Sequence[Buffer]) -> tuple[str, list[Any]]:
    """The name and the arguments of a call. Raises EngineError, or WireError for arguments of other types."""
    name, arguments = Decoder(tuple[str, list[Any]]).decode(frames)
    method = find_method(name, len(arguments))
    if not method.arguments:
        return name, []
    _, typed = Decoder(tuple[str, tuple[method.arguments]]).decode(frames)  # type: ignore[name-defined]
    return name, list(typed)


def encode_result(result: Any) -> list[Buffer]:
    return encode(result)


def decode_result(name: str, frames: Sequence[Buffer]) -> Any:
    """The result of a call of this name. Raises WireError for one of another type."""
    result = WORKER_METHODS[name].result
    if result is not WorkerFacts:
        return Decoder(result).decode(frames)
    data = Decoder(dict[str, Any]).decode(frames)
    try:
        return msgspec.convert({**data, "kv_config": kv_config_of(data["kv_config"])}, prepared(WorkerFacts))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise WireError(f"no facts of a worker: {error}") from None
