"""What a program may end with: each reader of a step declares an end for its rows, and gets what the end computes.

An end is a value: equal ends of equally many rows are captured once as a graph, and recorded once. A new kind of result
is a new end here, or a reader of an old one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from ratoon.layers.beams import SearchShape, best_keys_of_shape
from ratoon.layers.sampling import Masks, Mode
from ratoon.models.base import FinalStates, StreamObserver

Tensor = torch.Tensor
CrossHead: TypeAlias = tuple[int, int]  # layer and head, both counted from 0


class RowColumns(Protocol):
    """The columns of the rows of one end, on the device."""

    def __getitem__(self, name: str) -> Tensor: ...

    def choose_tokens(self, logits: Tensor, mode: Mode, masks: Masks | None = None) -> Any:
        """Choose a token for each row, and append it to its branch where branches lie on the device. Returns the tokens
        as SampledTokens takes them."""
        ...


@dataclass(slots=True)
class ProgramRows:
    """What a program has computed for the rows of one end."""

    states: FinalStates  # [N, H]
    logits: Tensor | None  # [N, V], if the end needs them. They may be changed in place.
    layers: Mapping[int, Tensor]  # by layer [N, H], for the layers that the end reads
    columns: RowColumns
    cross_weights: Mapping[CrossHead, Tensor] = field(default_factory=dict)  # [N, encoder positions] of each head


class End(ABC):
    """Hashable. Rows of ends with a lower rank come first: those whose logits are computed, then those that have final
    states, then those that have none."""

    rank: ClassVar[int]
    needs_logits: ClassVar[bool] = False
    # Whether what it reads is there only while the layers are called, so that no graph or recorded pass has it
    only_by_calls: ClassVar[bool] = False

    @property
    def inner_layers(self) -> Sequence[int]:
        """The layers before the last whose rows it reads."""
        return ()

    @property
    def in_pass(self) -> End:
        """The end that the program itself runs to. It differs where the rest comes after the program."""
        return self

    @abstractmethod
    def run(self, rows: ProgramRows) -> Any: ...

    @abstractmethod
    def cut(self, result: Any, count: int) -> Any:
        """Returns the part of a result for padded rows that is of the first `count` rows."""


FIRST_WITHOUT_STATES = 5  # rank


@dataclass(frozen=True, slots=True)
class Tokens(End):
    """The next token of each row, chosen and appended to its branch."""

    mode: Mode
    rank: ClassVar[int] = 0
    needs_logits: ClassVar[bool] = True

    def run(self, rows: ProgramRows) -> Any:
        assert rows.logits is not None
        return rows.columns.choose_tokens(rows.logits, self.mode)

    def cut(self, result: Any, count: int) -> Any:
        return result if len(result) == count else result[:count]


@dataclass(frozen=True, slots=True)
class MaskedTokens(End):
    """Tokens under masks that are filled while the program runs. It ends with the logits; `choose` comes later."""

    mode: Mode
    rank: ClassVar[int] = 0
    needs_logits: ClassVar[bool] = True

    @property
    def in_pass(self) -> End:
        return Logits()

    def run(self, rows: ProgramRows) -> Tensor:
        assert rows.logits is not None
        return rows.logits

    def cut(self, result: Tensor, count: int) -> Tensor:
        return result

    def choose(self, logits: Tensor, columns: RowColumns, words: Tensor) -> Any:
        return columns.choose_tokens(logits, self.mode, Masks(columns["mask_of"], words))


@dataclass(frozen=True, slots=True)
class BeamKeys(End):
    """Keys of the best candidates of beam searches, [S, W], which layers/beams.py reads."""

    shape: SearchShape
    rank: ClassVar[int] = 1
    needs_logits: ClassVar[bool] = True

    def run(self, rows: ProgramRows) -> Tensor:
        assert rows.logits is not None
        count = self.shape.num_searches
        bounds = rows.columns["search_starts"][:count], rows.columns["search_stops"][:count]
        return best_keys_of_shape(rows.logits, rows.columns["beam_scores"], bounds, self.shape)

    def cut(self, result: Tensor, count: int) -> Tensor:
        return result


@dataclass(frozen=True, slots=True)
class Logits(End):
    """The logits [N, V]."""

    rank: ClassVar[int] = 2
    needs_logits: ClassVar[bool] = True

    def run(self, rows: ProgramRows) -> Tensor:
        assert rows.logits is not None
        return rows.logits

    def cut(self, result: Tensor, count: int) -> Tensor:
        return result[:count]


@dataclass(frozen=True, slots=True)
class States(End):
    """The final states."""

    rank: ClassVar[int] = 3

    def run(self, rows: ProgramRows) -> FinalStates:
        return rows.states

    def cut(self, result: FinalStates, count: int) -> FinalStates:
        return result.select(slice(0, count))


@dataclass(frozen=True, slots=True)
class Layers(End):
    """Rows of the residual stream, [layers, N, H]. Layer l is the stream after l layers: 0 is the embeddings,
    `num_layers` the end of the stream, and `num_layers` + 1 the output of the final norm."""

    layers: tuple[int, ...]
    num_layers: int  # of the model
    rank: ClassVar[int] = 4

    @property
    def num_planes(self) -> int:
        """The first size of what comes out."""
        return len(self.layers)

    @property
    def inner_layers(self) -> Sequence[int]:
        return [layer for layer in self.layers if layer < self.num_layers]

    def run(self, rows: ProgramRows) -> Tensor:
        final = {self.num_layers: rows.states.stream, self.num_layers + 1: rows.states.normed}
        return torch.stack([final[layer] if layer in final else rows.layers[layer] for layer in self.layers])

    def cut(self, result: Tensor, count: int) -> Tensor:
        return result[:, :count]


class InnerLayers(Layers):
    """Layers of which none is the last."""

    __slots__ = ()
    rank: ClassVar[int] = FIRST_WITHOUT_STATES

    @classmethod
    def of(cls, layers: tuple[int, ...], num_layers: int) -> Layers:
        """The end that reads these layers."""
        return (Layers if max(layers) >= num_layers else cls)(layers, num_layers)


@dataclass(frozen=True, slots=True)
class CrossWeights(End):
    """Weights of cross-attention, [heads, N, encoder positions]: with which a row reads each of them. Where inputs of
    encoders differ in length, the weights of a shorter one are followed by zeros."""

    heads: tuple[CrossHead, ...]
    rank: ClassVar[int] = 4
    only_by_calls: ClassVar[bool] = True

    @property
    def num_planes(self) -> int:
        return len(self.heads)

    def run(self, rows: ProgramRows) -> Tensor:
        return torch.stack([rows.cross_weights[head] for head in self.heads])

    def cut(self, result: Tensor, count: int) -> Tensor:
        return result[:, :count]


class EndRows(NamedTuple):
    """An end, and the rows of a step that a reader wants it for."""

    end: End
    rows: np.ndarray  # [N] of the step's batch, in the order of the result
    columns: Mapping[str, np.ndarray] = {}  # those that the end reads, by name; declared in inputs/columns.py


class LayerRows(StreamObserver):
    """Copies rows of the stream between the layers of a pass, for ends that read them there."""

    def __init__(self, wanted: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """`wanted`: for each end the layers, and the rows [N] on the device."""
        self.num_layers_read = max((max(layers) for layers, _ in wanted if layers), default=0)
        self._wanted = wanted
        self.found: list[dict[int, Tensor]] = [{} for _ in wanted]  # of each end, by layer [N, H]

    def seen_before(self, layer: int) -> list[tuple[dict[int, Tensor], int, int]]:
        """What is copied before this layer, in the same order on every stage: where it is kept, under which layer, and
        how many rows it has."""
        return [
            (found, each, len(rows))
            for (layers, rows), found in zip(self._wanted, self.found)
            for each in sorted(set(layers))
            if each < layer
        ]

    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        for (layers, rows), found in zip(self._wanted, self.found):
            if layer in layers:
                states = stream[rows]
                found[layer] = states if update is None else states.add_(update[rows])
