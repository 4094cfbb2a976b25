"""The fields that ask for a beam search in the place of sampling, shared by completions and chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from ratoon.api.beams import find_companion, find_contradiction
from ratoon.api.server.protocol.base import Int, RequestModel
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, RequestOutputKind
from ratoon.engine.default_params import with_given

# Rules over tokens: the same for sampling and for a search.
RULES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "forced_eos_token_id", "bad_words_ids")
# Same name and same meaning in BeamSearchParams.
SAME_NAMES = (
    "n", "min_tokens", "length_penalty", "early_stopping", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", *RULES,
)  # fmt: skip


def _early_stopping(value: Any) -> bool | Literal["never"] | None:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise ValueError('is neither true, false nor "never"')


EarlyStopping = Annotated[
    bool | Literal["never"] | None,
    PlainValidator(_early_stopping),
    WithJsonSchema({"enum": [True, False, "never", None]}),
]


class BeamFields(RequestModel):
    use_beam_search: bool | None = Field(None, description="Search for the most probable texts, and sample nothing")
    beam_width: Int | None = Field(
        None, description="Texts that are followed at once; if left out, best_of, the model's own, or n"
    )
    length_penalty: float | None = Field(None, description="Above 0 favours long texts, below 0 short ones")
    early_stopping: EarlyStopping = Field(None, description="When to stop; true: with the first beam_width texts")

    def refuse_companions(self) -> None:
        """Where nothing is searched for."""
        name = find_companion(self._value)
        if name is not None:
            raise RequestError(name, "has no meaning without use_beam_search", "set that to true, or leave it out")

    def leaves_search_open(self) -> bool:
        """Does it neither ask for a search, nor say that or how to sample, nor for what a search can't do? Then a model
        that searches by default does so. A temperature of 0 is a way to sample, too."""
        if self.use_beam_search is not None or self._value("temperature") is not None:
            return False
        return find_contradiction(self._value) is None and self._value("max_tokens") != 0

    def beam_search_params(
        self,
        defaults: BeamSearchParams | None,
        lengths: Mapping[str, int | None],
        stream: bool,
        return_hidden_states: HiddenStatesParams | None,
    ) -> BeamSearchParams:
        """RequestError for values that have no meaning, and for fields that contradict a search."""
        name = find_contradiction(self._value)
        if name is not None:
            raise RequestError(name, "contradicts use_beam_search, which samples nothing", "leave one of them out")
        given: dict[str, Any] = {name: value for name in SAME_NAMES if (value := self._value(name)) is not None}
        width = self._width(1 if defaults is None else defaults.beam_width)
        given |= {"beam_width": width, "return_hidden_states": return_hidden_states, **lengths}
        given["output_kind"] = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
        params = with_given(BeamSearchParams(beam_width=width) if defaults is None else defaults, given)
        try:
            params.verify()
        except RequestError as error:
            if error.field != "beam_width" or self.beam_width is not None:
                raise
            field = "n" if self._value("best_of") is None else "best_of"  # the width comes from there
            raise type(error)(field, error.problem, error.expected) from None
        return params

    def _width(self, default: int) -> int:
        width, best_of = self.beam_width, self._value("best_of")
        if width is not None and best_of not in (None, width):
            raise RequestError("best_of", f"{best_of} is not beam_width ({width})", "leave one of them out")
        asked = width if width is not None else best_of
        return max(default, self._value("n") or 1) if asked is None else asked

    def _value(self, name: str) -> Any:
        return getattr(self, name, None)
