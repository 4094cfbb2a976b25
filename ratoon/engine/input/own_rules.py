"""The rules over tokens that a model's files name. They apply to requests that do not set them (None).

Other defaults of the files (temperature, lengths, beams) apply to requests without params: see default_params.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.params import GenerationParams

# Fields of params. What the model says of the first is in its config, of the others among its generation defaults.
SUPPRESSED = ("suppressed_token_ids", "suppressed_first_token_ids")
FROM_DEFAULTS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_eos_token_id")


@dataclass(frozen=True, slots=True)
class OwnRules:
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
