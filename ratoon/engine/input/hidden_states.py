"""Which hidden states a caller asks for, in a sequence and a model that are known: every position and layer by number.

Pure: what comes out is a Selection, or an error that names the field and the numbers. Making requests of it and putting
together what the engine sends are done elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ratoon.core.config import ModelConfig
from ratoon.core.errors import RequestError, TooLargeError
from ratoon.core.media import IMAGE, MediaFeature
from ratoon.core.params import ENCODER, MAX_HIDDEN_STATES_BYTES, MAX_LENS_ENTRIES, HiddenStatesParams
from ratoon.core.readings import Piece, place_in_scope
from ratoon.core.request import Extraction, lens_width
from ratoon.core.sizes import format_size
from ratoon.engine.output.hidden_states_budget import Reservation

ALL = "all"
NORM = "norm"  # another name of the last entry: the output of the final norm
PRE_NORM = "pre_norm"  # the input of the final norm
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POSITIONS_EXPECTED = 'a whole number, a list of them and of pairs [start, stop], or "all"'
LAYERS_EXPECTED = 'a whole number, "norm", "pre_norm", a list of these, or "all"'
ENCODER_INPUT = "encoder's input"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a caller gets: positions in the whole sequence and layers as they were asked for, some perhaps twice."""

    positions: list[int]
    layers: list[int | str]
    extraction: Extraction  # what the engine has to do for it: each of them at least, once, in rising order
    row_order: list[int]  # for each position, which of the extraction's it is
    layer_order: list[int]
    num_bytes: int = 0  # of the answer
    hold: Reservation | None = None  # what is reserved for it, where that is bounded


class HiddenStatesSelector:
    def __init__(
        self, model_config: ModelConfig, max_bytes: int = MAX_HIDDEN_STATES_BYTES, num_stages: int = 1
    ) -> None:
        self._model_config = model_config
        self._hidden_size = model_config.hidden_size
        self._max_bytes = max_bytes
        self._num_stages = num_stages  # of a pipeline

    def verify(self, params: HiddenStatesParams) -> None:
        """RequestError for what is wrong with them whatever the sequence is."""
        if not isinstance(params, HiddenStatesParams):
            raise RequestError("params", f"{type(params).__name__} is not HiddenStatesParams", "a HiddenStatesParams")
        params.verify()
        parse_positions(params.positions)
        self._layers(params)
        if params.lens is not None and not self._model_config.generates:
            raise RequestError("lens", "the model is an encoder, which has no head over tokens", "leave it out")
        if params.cross_heads is not None:
            self._verify_cross_heads(params.cross_heads)

    def _verify_cross_heads(self, heads: list[Any]) -> None:
        config = self._model_config
        if config.encoder is None:
            raise RequestError("cross_heads", "the model has no encoder beside a decoder", "leave it out")
        if self._num_stages > 1:
            problem = f"are not read from a pipeline, and the model is in {self._num_stages} stages"
            raise RequestError("cross_heads", problem, "an engine with a pipeline_parallel_size of 1")
        for index, (layer, head) in enumerate(heads):
            if not (0 <= layer < config.num_layers and 0 <= head < config.num_heads):
                problem = f"{[layer, head]} is out of range"
                expected = f"a layer from 0 to {config.num_layers - 1}, and a head from 0 to {config.num_heads - 1}"
                raise RequestError(f"cross_heads[{index}]", problem, expected)

    def in_plain_lists(self, params: HiddenStatesParams) -> HiddenStatesParams:
        """Returns params whose positions and layers are written so that they can travel and the engine can follow
        them."""
        positions = [piece if isinstance(piece, int) else list(piece) for piece in parse_positions(params.positions)]
        layers, passed = self._layer_names(params), sorted(set(self._layers(params)))
        return msgspec.structs.replace(params, positions=positions, layers=layers, layers_passed=passed)

    def select(
        self,
        params: HiddenStatesParams,
        num_prompt_tokens: int,
        num_output_tokens: int,
        media: Sequence[MediaFeature] = (),
        num_encoder_positions: int = 0,
    ) -> Selection:
        """Params that were verified, for a sequence of so many tokens; of the encoder, for so many positions.
        `num_encoder_positions`: those that cross-attention reads."""
        if params.cross_heads is not None:
            return self._select_heads(params, num_prompt_tokens, num_output_tokens, num_encoder_positions)
        layers = self._layers(params)
        runs = self._runs(params, num_prompt_tokens, num_output_tokens)
        if params.each_once:
            runs = first_mentions(runs)
        num_bytes = self._verify_size(runs, len(layers), params.dtype, params.lens)
        positions = [position for run in runs for position in run]
        rows, row_order = _each_once(positions)
        planes, layer_order = _each_once(layers)
        last = num_prompt_tokens + num_output_tokens - 1
        if not self._model_config.causal and rows[-1] != last:
            rows.append(last)  # the rows depend on all tokens, so all are run; this one is not returned
        elif self._model_config.media is not None and self._model_config.media.attends_both_ways:
            rows += _last_row_of_image(media, rows[-1])  # likewise, of the other rows of an image
        return Selection(
            positions,
            self._layer_names(params),
            Extraction(rows, planes, params.dtype, params.deadline, params.side == ENCODER, params.lens or 0),
            row_order,
            layer_order,
            num_bytes,
        )

    def _select_heads(
        self, params: HiddenStatesParams, num_prompt_tokens: int, num_output_tokens: int, num_encoder_positions: int
    ) -> Selection:
        heads = params.cross_heads or []
        runs = self._runs(params, num_prompt_tokens, num_output_tokens)
        if params.each_once:
            runs = first_mentions(runs)
        num_bytes = self._verify_size(runs, len(heads), params.dtype, width=num_encoder_positions)
        positions = [position for run in runs for position in run]
        rows, row_order = _each_once(positions)
        layers = [layer for layer, _ in heads]
        extraction = Extraction(rows, layers, params.dtype, params.deadline, cross_heads=[head for _, head in heads])
        return Selection(positions, [*layers], extraction, row_order, [*range(len(heads))], num_bytes)

    def verify_longest(
        self, params: HiddenStatesParams, num_prompt_tokens: int, max_output_tokens: int, num_choices: int
    ) -> None:
        """Checks the states that come with an answer. RequestError: even the longest answer would not have them;
        TooLargeError: it would be too much."""
        if params.side == ENCODER:
            raise RequestError("side", "an answer has no encoder states", "a request of its own for hidden states")
        if params.lens is not None:
            raise RequestError("lens", "does not come with an answer", "a request of its own for hidden states")
        if params.cross_heads is not None:
            raise RequestError("cross_heads", "do not come with an answer", "a request of its own for hidden states")
        runs = self._runs(params, num_prompt_tokens, max_output_tokens)
        if params.each_once:
            runs = first_mentions(runs)
        self._verify_size(runs * num_choices, len(self._layers(params)), params.dtype)

    def _num_layers(self, side: str) -> int:
        if side != ENCODER:
            return self._model_config.num_layers
        if self._model_config.encoder is None:
            raise RequestError("side", "the model has no encoder beside a decoder", "leave it out")
        return self._model_config.encoder.num_layers

    def _layers(self, params: HiddenStatesParams) -> list[int]:
        num_layers = self._num_layers(params.side)
        return [layers_passed(layer, num_layers) for layer in self._layer_names(params)]

    def _layer_names(self, params: HiddenStatesParams) -> list[int | str]:
        num_layers = self._num_layers(params.side)
        names = resolve_layers(params.layers, num_layers)
        if not params.each_once:
            return names
        first_names: dict[int, int | str] = {}  # one layer may have been asked for by two names
        for name in names:
            first_names.setdefault(layers_passed(name, num_layers), name)
        return list(first_names.values())

    def _runs(self, params: HiddenStatesParams, num_prompt_tokens: int, num_output_tokens: int) -> list[range]:
        name = ENCODER_INPUT if params.side == ENCODER else None
        pieces = parse_positions(params.positions)
        return place_in_scope(pieces, params.scope, num_prompt_tokens, num_output_tokens, name)

    def _verify_size(
        self, runs: list[range], num_layers: int, dtype: str, lens: int | None = None, width: int | None = None
    ) -> int:
        """The bytes of the answer. Before positions are written out one by one: a short list can name very many.
        `width`: the numbers of a position in a layer, where these are no states."""
        width = self._hidden_size if width is None else width
        num_positions = sum(map(len, runs))
        if lens is not None:
            num_entries = num_positions * num_layers * lens
            if num_entries > MAX_LENS_ENTRIES:
                problem = f"{lens} tokens at {num_positions} positions of {num_layers} layers are {num_entries}"
                raise TooLargeError("lens", problem, f"{MAX_LENS_ENTRIES} at most: fewer tokens, positions or layers")
            return num_positions * num_layers * lens_width(lens) * ITEM_BYTES[dtype]
        num_bytes = num_positions * num_layers * width * ITEM_BYTES[dtype]
        if num_bytes > self._max_bytes:
            raise TooLargeError(
                "positions",
                f"{num_positions} positions of {num_layers} layers, {width} numbers in {dtype} each, are "
                f"{format_size(num_bytes)} ({num_bytes} bytes), and at most {self._max_bytes} bytes may be asked for",
                "fewer positions or layers, or an engine with a greater max_hidden_states_bytes",
            )
        return num_bytes


# ---- positions ----


def parse_positions(asked: Any) -> list[Piece]:
    """One form for all that `positions` may be. Whether the sequence has them is not looked at."""
    if isinstance(asked, str):
        if asked != ALL:
            raise RequestError("positions", f"{asked!r} is unknown", POSITIONS_EXPECTED)
        return [(0, None)]
    if not _is_list(asked):
        return [_whole("positions", asked, POSITIONS_EXPECTED)]
    if not asked:
        raise RequestError("positions", "is empty", POSITIONS_EXPECTED)
    return [_parse_piece(index, piece) for index, piece in enumerate(asked)]


def _parse_piece(index: int, piece: Any) -> Piece:
    field = f"positions[{index}]"
    if not _is_list(piece):
        return _whole(field, piece, POSITIONS_EXPECTED)
    if len(piece) != 2:
        raise RequestError(field, f"has {len(piece)} entries", "a pair [start, stop]")
    start, stop = piece
    return _whole(field, start, "a pair of whole numbers"), None if stop is None else _whole(
        field, stop, "a pair of whole numbers, the second perhaps None"
    )


def first_mentions(runs: Iterable[range]) -> list[range]:
    """Returns these positions, each where it stands first. The time depends on the runs that differ, not on how many
    positions they name together."""
    different = dict.fromkeys(runs)
    seen = bytearray(max(run.stop for run in different))
    first = []
    for run in different:
        start = run.start
        while (start := seen.find(0, start, run.stop)) >= 0:
            stop = seen.find(1, start, run.stop)
            stop = run.stop if stop < 0 else stop
            seen[start:stop] = b"\x01" * (stop - start)
            first.append(range(start, stop))
            start = stop
    return first


# ---- layers ----


def layers_passed(layer: int | str, num_layers: int) -> int:
    """What the engine counts: the layers that rows have passed; one more than there are stands for the final norm."""
    if layer == PRE_NORM:
        return num_layers
    return num_layers + 1 if layer in (NORM, num_layers) else int(layer)


def resolve_layers(asked: Any, num_layers: int) -> list[int | str]:
    """Each by the number that it has in transformers' `hidden_states`, or by its name. The last entry there is after
    the final norm: heads are trained on it, and so it is the default."""
    if asked is None:
        return [num_layers]
    if isinstance(asked, str) and asked == ALL:
        return [*range(num_layers + 1)]
    if not _is_list(asked):
        return [_resolve_layer("layers", asked, num_layers)]
    if not asked:
        raise RequestError("layers", "is empty", LAYERS_EXPECTED)
    return [_resolve_layer(f"layers[{index}]", layer, num_layers) for index, layer in enumerate(asked)]


def _resolve_layer(field: str, layer: Any, num_layers: int) -> int | str:
    if isinstance(layer, str):
        if layer not in (NORM, PRE_NORM):
            raise RequestError(field, f"{layer!r} is unknown", LAYERS_EXPECTED)
        return layer
    number = _whole(field, layer, LAYERS_EXPECTED)
    lowest = -num_layers - 1
    if not lowest <= number <= num_layers:
        raise RequestError(
            "layers",
            f"{number} is out of range: the model has {num_layers} layers",
            f'from {lowest} to {num_layers} (0 is the embeddings), "norm" or "pre_norm"',
        )
    return number if number >= 0 else number - lowest


def _each_once(numbers: list[int]) -> tuple[list[int], list[int]]:
    """Each of them once, rising, and for each of the given ones its place among these."""
    rising = sorted(set(numbers))
    if rising == numbers:
        return rising, [*range(len(rising))]
    places = {number: place for place, number in enumerate(rising)}
    return rising, [places[number] for number in numbers]


def _last_row_of_image(media: Iterable[MediaFeature], position: int) -> list[int]:
    """The last row of an image that has this position, if it is another one."""
    ends = [(one.offset, one.offset + one.length - 1) for one in media if one.data.modality == IMAGE]
    return [last for first, last in ends if first <= position < last]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _whole(field: str, value: Any, expected: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise RequestError(field, f"{value!r} is not a whole number", expected)
