"""Extractions in random loads: what is requested and when, and the expected states.

A state is a number made of the whole prefix, the layer and the dtype: a row that belongs to another position, another
request or another layer shows.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass

from hypothesis import strategies as st

from ratoon.core.encoder import EncoderInput
from ratoon.core.params import HiddenStatesParams
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.core.wire import WireTensor
from tests.property.choices import among, number

DTYPES = ["float32", "bfloat16", "float16"]
TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=12)
LAYERS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
PIECE = st.one_of(
    st.integers(-6, 20),
    st.tuples(st.integers(-6, 20), st.one_of(st.none(), st.integers(-6, 20))).map(list),
)
PIECES = st.one_of(st.just([-1]), st.just([[0, None]]), st.lists(PIECE, min_size=1, max_size=3))
POSITIONS = st.one_of(st.none(), st.just([-1]), st.lists(st.integers(0, 40), min_size=1, max_size=8))


@dataclass
class Reading:
    """An extraction of an earlier request, as far as that one has come by then, or of a prompt of its own."""

    step: int
    parent: int | None  # its number
    choice: int
    prompt: list[int]
    positions: list[int] | None  # counted around the sequence, which may be shorter; None: all
    layers: list[int]
    dtype: str
    deadline: float | None
    salt: str | None
    encoder_input: EncoderInput | None  # of a prompt of its own
    of_encoder: bool  # are its states read, where there is one?

    def request(
        self, name: str, token_ids: list[int], salt: str | None, encoder_input: EncoderInput | None, parent: str | None
    ) -> EngineCoreRequest:
        """`token_ids`: the sequence that is read, up to the last position that is asked for."""
        of_encoder = self.of_encoder and encoder_input is not None
        length = encoder_input.num_positions if of_encoder else len(token_ids)
        positions = sorted(
            {number % length for number in (range(length) if self.positions is None else self.positions)}
        )
        return EngineCoreRequest(
            name,
            token_ids if of_encoder else token_ids[: positions[-1] + 1],
            Extraction(positions, self.layers, self.dtype, self.deadline, of_encoder),
            arrival_time=100.0 + self.step,
            cache_salt=salt,
            encoder_input=encoder_input,
            continuation_of=None if of_encoder else parent,
            continuation_token_ids=None if of_encoder or parent is None else [],
        )


@st.composite
def readings(
    draw: st.DrawFn,
    parent: st.SearchStrategy[int | None],
    family: st.SearchStrategy[list[int]],
    encoder_input: st.SearchStrategy[EncoderInput | None],
) -> Reading:
    own = draw(TOKENS)
    return Reading(
        step=draw(number(0, 40)),
        parent=draw(parent),
        choice=draw(among(0, 0, 1, 2)),
        prompt=draw(family)[: draw(number(0, 16))] + own,
        positions=draw(POSITIONS),
        layers=draw(LAYERS),
        dtype=draw(among(*DTYPES)),
        deadline=draw(among(None, None, None, 3.0, 10.0)),
        salt=draw(among(None, None, "a")),
        encoder_input=draw(encoder_input),
        of_encoder=draw(among(False, False, True)),
    )


@functools.cache
@st.composite
def states_of_texts(draw: st.DrawFn) -> HiddenStatesParams:
    """What `return_hidden_states` may ask for. A text may turn out not to have such positions."""
    layers = draw(LAYERS)
    return HiddenStatesParams(
        positions=draw(PIECES),
        scope=draw(among("all", "all", "output", "prompt")),
        layers=layers,
        dtype=draw(among(*DTYPES)),
        deadline=draw(among(None, None, None, 3.0, 10.0)),
        layers_passed=sorted(set(layers)),
    )


def states_of(prefixes: list[int], layers: list[int], dtype: str) -> WireTensor:
    """[layers, rows, 1] for rows with these prefixes."""
    numbers = [hash((prefix, layer, DTYPES.index(dtype))) for layer in layers for prefix in prefixes]
    return WireTensor("int64", (len(layers), len(prefixes), 1), array("q", numbers).tobytes())


def rows_of(states: WireTensor) -> list[list[int]]:
    """The numbers of each row, by layer."""
    num_layers, num_rows, _ = states.shape
    numbers = states.view().tolist()
    return [[numbers[layer * num_rows + row] for layer in range(num_layers)] for row in range(num_rows)]
