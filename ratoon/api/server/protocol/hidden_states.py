"""/v1/hidden_states, and `return_hidden_states` of completions and chat: which states to read, and their form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import (
    AnswerModel,
    ErrorDetail,
    ModelName,
    Prompt,
    RequestId,
    RequestModel,
    Size,
)
from ratoon.core.params import MAX_LENS, HiddenStatesParams

NAMES = ("positions", "scope", "layers", "dtype", "deadline", "side")  # here and in HiddenStatesParams
LARGEST = 2**63
LAYER_NAMES = ("norm", "pre_norm")
MAX_LAYERS = 4096  # entries of a list


def _positions(value: Any) -> Any:
    if value == "all" or _is_number(value) or (isinstance(value, list) and _are_numbers_or(_is_pair, value)):
        return value
    raise ValueError('is neither a number, "all", nor a list of numbers and of pairs [start, stop or null]')


def _layers(value: Any) -> Any:
    if value in ("all", *LAYER_NAMES) if isinstance(value, str) else _is_number(value):
        return value
    if isinstance(value, list) and len(value) > MAX_LAYERS:
        raise ValueError(f"has {len(value)} entries; {MAX_LAYERS} at most")
    if isinstance(value, list) and _are_numbers_or(lambda layer: layer in LAYER_NAMES, value):
        return value
    raise ValueError('is neither a number, "norm", "pre_norm", "all", nor a list of numbers and of the first two names')


def _are_numbers_or(is_other: Callable[[Any], bool], values: list[Any]) -> bool:
    """Checked all at once, because there may be very many numbers."""
    numbers = [value for value in values if type(value) is int]
    if numbers and not (_is_number(min(numbers)) and _is_number(max(numbers))):
        return False
    return len(numbers) == len(values) or all(is_other(value) for value in values if type(value) is not int)


def _is_pair(value: Any) -> bool:
    match value:
        case [start, stop]:
            return _is_number(start) and (stop is None or _is_number(stop))
    return False


def _is_number(value: Any) -> bool:
    return type(value) is int and -LARGEST <= value < LARGEST  # by type: true is an int, and no number


def _true_or_fields(value: Any) -> Any:
    """true means the defaults, false means none."""
    return ({} if value else None) if isinstance(value, bool) else value


_NUMBER = {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST - 1}
_PAIR = {
    "type": "array",
    "prefixItems": [_NUMBER, {"anyOf": [_NUMBER, {"type": "null"}]}],
    "minItems": 2,
    "maxItems": 2,
}

Positions = Annotated[
    Any,
    PlainValidator(_positions),
    WithJsonSchema({"anyOf": [_NUMBER, {"const": "all"}, {"type": "array", "items": {"anyOf": [_NUMBER, _PAIR]}}]}),
]
Layers = Annotated[
    Any,
    PlainValidator(_layers),
    WithJsonSchema(
        {
            "anyOf": [
                _NUMBER,
                {"enum": ["all", *LAYER_NAMES]},
                {"type": "array", "items": {"anyOf": [_NUMBER, {"enum": [*LAYER_NAMES]}]}},
            ]
        }
    ),
]


class HiddenStatesFields(RequestModel):
    """Which states to read out."""

    positions: Positions | None = Field(
        None,
        description='A number, a list of numbers and of pairs [start, stop) (null: to the end), or "all"; '
        "negative ones count from the end; default: the last",
    )
    scope: Literal["all", "prompt", "output"] | None = Field(None, description="What positions refer to")
    layers: Layers | None = Field(
        None,
        description='As in transformers: 0: the embeddings; N: after N layers; the last, -1 or "norm" (default): after '
        'the final norm; a list of these; "all". "pre_norm": the output of the last layer, before that norm',
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="Default: float32")
    deadline: float | None = Field(None, description="Fail after this many seconds")
    side: Literal["decoder", "encoder"] | None = Field(
        None, description="encoder: positions of its input, and its layers; default: decoder"
    )

    def hidden_states_params(self) -> HiddenStatesParams:
        """Repeated entries are returned once: a short body must not request many copies of the same numbers."""
        given = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return HiddenStatesParams(**given, each_once=True)


ReturnHiddenStates = Annotated[
    HiddenStatesFields | None,
    BeforeValidator(_true_or_fields, json_schema_input_type=bool | HiddenStatesFields | None),
]


class HiddenStatesRequest(HiddenStatesFields):
    """A request for the hidden states of a prompt, or of a finished request."""

    model: ModelName
    prompt: Prompt | None = Field(None, description="Text or token ids; needed unless there is original_request_id")
    decoder_prompt: Prompt | None = Field(
        None,
        description="Of an encoder-decoder model, whose encoder reads prompt: the beginning of its decoder's input",
    )
    original_request_id: RequestId | None = Field(None, description="The id of an answer, whose states are read")
    choice: Size | None = Field(None, description="Which of its choices; default: the first")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    request_id: RequestId | None = Field(None, description="Becomes part of the answer's id")
    user: str | None = Field(None, description="Accepted, without effect")
    lens: Annotated[int, Field(ge=1, le=MAX_LENS)] | None = Field(
        None,
        description="For each layer and position, so many of the most probable tokens if its state were the last one: "
        "the final norm and the model's head over it. The states themselves are not returned",
    )

    def hidden_states_params(self) -> HiddenStatesParams:
        params = super().hidden_states_params()
        params.lens = self.lens
        return params


class LensToken(AnswerModel):
    token_id: int
    token: str
    logprob: float


class HiddenStatesContent(AnswerModel):
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int] = Field(description="Layers, positions, the model's width")
    layers: list[int | Literal["norm", "pre_norm"]]
    positions: list[int] = Field(
        description="In the whole sequence, prompt and output; each once, in the order in which they were first named"
    )
    token_ids: list[int] = Field(description="At these positions; none where the encoder read audio")
    computed_tokens: int = Field(description="Tokens that were computed")
    cached_tokens: int = Field(description="Tokens whose keys and values were in memory")
    source: Literal["lease", "prefix_cache", "recomputed", "host", "files"] | None = Field(
        description="For an answer: what was reused, as in a continuation"
    )
    data: str = Field(description="base64: the numbers row by row, little-endian")


class HiddenStatesAnswer(HiddenStatesContent):
    data: str | None = Field(description="base64: the numbers row by row, little-endian; null with lens")  # type: ignore[assignment]
    norms: list[list[float]] | None = Field(
        None, description="With lens: the length of each state, by layer and position"
    )
    lens: list[list[list[LensToken]]] | None = Field(
        None, description="With lens: by layer and position, the most probable tokens"
    )
    id: str
    object: Literal["hidden_states"]
    model: str


class HiddenStatesFailure(AnswerModel):
    """Stands in place of states that could not be read. The text beside it is complete."""

    error: ErrorDetail


ChoiceHiddenStates = HiddenStatesContent | HiddenStatesFailure
