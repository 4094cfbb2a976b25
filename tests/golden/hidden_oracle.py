"""Hidden states by transformers, and a way to ask an engine's core for them without anything of the API on top.

Layer l is the residual stream behind l layers, as the engine counts: 0 is the embeddings, L the end of the stream, and
L + 1 what the final norm makes of it. Of the last two, transformers' own list has only the second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ratoon.api.llm import LLM
from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction, FinishReason, InheritedFrom
from tests.golden.driver import overwrite
from tests.golden.engines import tiny_model

TOLERANCE = 1e-4


@torch.inference_mode()
def states_by_transformers(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """[L + 2, T, H] in float32, of every layer and position."""
    base = getattr(model.base_model, "language_model", model.base_model)  # of one that reads pictures: its text model
    names = ("ln_f", "norm", "norm_f", "final_layer_norm")
    final_norm = next(getattr(base, name) for name in names if hasattr(base, name))
    before_norm: list[torch.Tensor] = []
    hook = final_norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    try:
        *earlier, normed = base(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)[
            "hidden_states"
        ]
    finally:
        hook.remove()
    (end_of_stream,) = before_norm
    if torch.equal(earlier[-1], end_of_stream):  # Mamba-2 lists what layers give, and not what the first one gets
        earlier = [base.get_input_embeddings()(torch.tensor([list(token_ids)])), *earlier[:-1]]
    return torch.cat([*earlier, end_of_stream, normed]).float().numpy()


@functools.cache
def _tiny_states(family: str, token_ids: tuple[int, ...]) -> np.ndarray:
    return states_by_transformers(tiny_model(family).oracle, token_ids)


def oracle_states(family: str, token_ids: Sequence[int]) -> np.ndarray:
    """[L + 2, T, H] of a tiny model. Not to be written to: it is kept."""
    return _tiny_states(family, tuple(token_ids))


def num_layers(family: str) -> int:
    return tiny_model(family).config.num_layers


def all_layers(family: str) -> list[int]:
    """Every number that a layer has, the final norm's included."""
    return list(range(num_layers(family) + 2))


@dataclass
class Answer:
    """What came for one choice of a request, put together, and for an extraction checked as it came."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    num_rows_run: int = 0
    num_cached_tokens: int = 0
    inherited_from: InheritedFrom | None = None
    pooled: bytes | None = None
    score: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def states(self) -> np.ndarray:
        """[layers, positions, H]"""
        assert self.finish_reason == FinishReason.STOP and self.error is None, self.error
        return np.concatenate(self.parts, axis=1)

    def take(self, output: EngineCoreOutput, asked: Extraction | None) -> None:
        assert self.finish_reason is None, "an output after the end"
        self.token_ids = output.new_token_ids if output.replaces else self.token_ids + output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.hidden_states is not None:
            assert asked is not None, "states for a request that asked for none"
            self._take_states(output, asked)
        self.inherited_from = output.inherited_from if self.inherited_from is None else self.inherited_from
        self.num_cached_tokens = output.num_cached_tokens
        self.pooled = None if output.pooled is None else bytes(output.pooled.data)
        self.score, self.finish_reason, self.error = output.score, output.finish_reason, output.error
        if asked is not None and self.finish_reason == FinishReason.STOP:
            assert sum(part.shape[1] for part in self.parts) == len(asked.positions), "the end came too early"

    def _take_states(self, output: EngineCoreOutput, asked: Extraction) -> None:
        tensor = output.hidden_states
        assert tensor is not None and tensor.dtype == asked.dtype
        assert tensor.shape[0] == len(asked.layers) and tensor.shape[1] > 0
        assert output.first_row == sum(part.shape[1] for part in self.parts), "rows are missing, or came twice"
        kind = np.uint16 if tensor.dtype == "bfloat16" else tensor.dtype  # numpy has no bfloat16
        self.parts.append(np.frombuffer(tensor.data, kind).reshape(tensor.shape))
        self.num_rows_run = output.num_rows_run


class CoreDriver:
    """Adds requests to the core of an engine and collects what comes. After every step the accounting is checked, and
    all memory that is neither referenced nor cached is overwritten, so that reading it shows."""

    def __init__(self, llm: LLM) -> None:
        self.core: Any = llm._client.core
        self.answers: dict[tuple[str, int], Answer] = {}
        self._asked: dict[str, Extraction | None] = {}

    def __getitem__(self, request_id: str) -> Answer:
        return self.answers[request_id, 0]

    @property
    def num_computed_tokens(self) -> int:
        """The runner's own count."""
        return self.core.executor.stats.num_computed_tokens

    def add(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)
        self._asked[request.request_id] = request.params if isinstance(request.params, Extraction) else None
        for choice in range(request.num_choices):
            self.answers[request.request_id, choice] = Answer()

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.answers[output.request_id, output.choice].take(output, self._asked[output.request_id])
        self.core.scheduler.check()
        self._overwrite_unheld_memory()

    def _overwrite_unheld_memory(self) -> None:
        blocks = self.core.scheduler.kv_cache.pool.blocks[1:]
        unheld = [block.block_id for block in blocks if block.ref_cnt == 0 and block.block_hash is None]
        overwrite(self.core, unheld)

    def run(self) -> None:
        while self.core.has_work():
            self.step()

    def generate(self, request_id: str, prompt: Sequence[int], count: int, **rest: Any) -> list[int]:
        """Greedy, to the end. The whole sequence."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        self.add(EngineCoreRequest(request_id, list(prompt), params, **rest))
        self.run()
        assert self[request_id].error is None
        return [*prompt, *self[request_id].token_ids]

    def extract(
        self,
        request_id: str,
        token_ids: Sequence[int],
        positions: Sequence[int],
        layers: Sequence[int],
        parent: str | None = None,
        **rest: Any,
    ) -> Answer:
        """One extraction, run to its end with whatever else there is."""
        self.add(extraction_of(request_id, token_ids, positions, layers, parent, **rest))
        self.run()
        return self[request_id]


def extraction_of(
    request_id: str,
    token_ids: Sequence[int],
    positions: Sequence[int],
    layers: Sequence[int],
    parent: str | None = None,
    *,
    dtype: str = "float32",
    deadline: float | None = None,
    **rest: Any,
) -> EngineCoreRequest:
    """A request as the front end would send it: the sequence ends with the last position that is asked for."""
    return EngineCoreRequest(
        request_id,
        list(token_ids[: positions[-1] + 1]),
        Extraction(list(positions), list(layers), dtype, deadline),
        continuation_of=parent,
        continuation_token_ids=None if parent is None else [],
        **rest,
    )
