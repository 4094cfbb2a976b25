"""The params of a request without any: a model's generation defaults over ours, as read in
models/generation_config.py.

Python and HTTP start from the same defaults; what a caller gives goes over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ratoon.core.config import ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, GenerationParams, SamplingParams
from ratoon.observe.logging import get_logger

# Generation default → field of params.
LENGTHS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "min_length": "min_length"}
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
BEAM_DEFAULTS = ("length_penalty", "early_stopping", "repetition_penalty")

logger = get_logger(__name__)

Params = TypeVar("Params", SamplingParams, BeamSearchParams)


def default_params(generation_defaults: Mapping[str, Any] | None) -> GenerationParams:
    """A beam search where the model's files ask for one, else sampling."""
    beams = default_beam_search_params(generation_defaults)
    return default_sampling_params(generation_defaults) if beams is None else beams


def default_sampling_params(generation_defaults: Mapping[str, Any] | None) -> SamplingParams:
    defaults = dict(generation_defaults or {})
    given = {name: defaults.get(name) for name in SAMPLING_DEFAULTS}
    return _over(SamplingParams(), {**_lengths(defaults), **given})


def default_beam_search_params(generation_defaults: Mapping[str, Any] | None) -> BeamSearchParams | None:
    """None: the files ask for no search."""
    defaults = dict(generation_defaults or {})
    width = defaults.get("num_beams") or 1
    if width == 1:
        return None
    params = BeamSearchParams(beam_width=width)
    problem = _problem_of(params)
    if problem is not None:
        logger.warning("generation default num_beams ignored: %s", problem)
        return None
    given = {name: defaults.get(name) for name in BEAM_DEFAULTS}
    return _over(params, {**_lengths(defaults), **given})


def sets_length(generation_defaults: Mapping[str, Any]) -> bool:
    """Whether the model's files set a maximum length."""
    return any(generation_defaults.get(name) is not None for name in ("max_new_tokens", "max_length"))


def with_given(defaults: Params, given: Mapping[str, Any]) -> Params:
    """Defaults, over them what a caller gave. A minimum length of the defaults is reduced to the maximum."""
    params = msgspec.structs.replace(defaults, **given)
    if params.max_tokens is not None and "min_tokens" not in given:
        params.min_tokens = min(params.min_tokens, params.max_tokens)
    if "min_tokens" in given:
        params.min_length = 0
    return params


def _lengths(defaults: Mapping[str, Any]) -> dict[str, Any]:
    lengths = {ours: defaults.get(theirs) for theirs, ours in LENGTHS.items()}
    if defaults.get("max_length") is not None and lengths["max_tokens"] is None:
        return {"max_length": defaults["max_length"], **lengths}  # before the least length, which is compared with it
    return lengths


def _over(params: Params, values: Mapping[str, Any]) -> Params:
    for name, value in values.items():
        if value is None:
            continue
        changes = {name: value, "max_tokens": None} if name == "max_length" else {name: value}
        candidate = with_given(params, changes) if name == "max_tokens" else msgspec.structs.replace(params, **changes)
        problem = _problem_of(candidate)
        if problem is None:
            params = candidate
        else:  # a model's file must not make every request fail
            logger.warning("generation default ignored: %s", problem)
    return params


def _problem_of(params: GenerationParams) -> RequestError | None:
    try:
        params.verify()
    except RequestError as error:
        return error
    return None


# Fields of params. What the model says of the first is in its config, of the others among its generation defaults.
SUPPRESSED = ("suppressed_token_ids", "suppressed_first_token_ids")
FROM_DEFAULTS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_eos_token_id")


@dataclass(frozen=True, slots=True)
class OwnRules:
    """The rules over tokens that a model's files name. They apply to requests that do not set them (None)."""

    suppressed_token_ids: list[int] | None = None
    suppressed_first_token_ids: list[int] | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    forced_eos_token_id: list[int] | None = None

    @classmethod
    def of(cls, config: ModelConfig, generation_defaults: Mapping[str, Any]) -> OwnRules:
        from_config = {name: list(getattr(config, name)) or None for name in SUPPRESSED}
        from_defaults = {name: generation_defaults.get(name) or None for name in FROM_DEFAULTS}
        return cls(**from_config, **from_defaults)  # type: ignore[arg-type]

    def complete(self, params: GenerationParams) -> None:
        """Fill what is open, in place. A request that goes on after the model's end token has none to be forced."""
        for name in (*SUPPRESSED, *FROM_DEFAULTS):
            if not (name == "forced_eos_token_id" and params.ignore_eos):
                setattr(params, name, self.value(params, name))

    def value(self, params: GenerationParams, name: str) -> Any:
        """The request's, or else the model's."""
        asked = getattr(params, name)
        return getattr(self, name) if asked is None else asked
