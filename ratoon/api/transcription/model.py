"""What there is to know about a speech model before anything is asked of it. Nothing here knows an engine."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.transcription.sources import AudioLimits
from ratoon.api.transcription.transcriber import Transcriber
from ratoon.api.transcription.vocabulary import find_vocabulary
from ratoon.api.transcription.windows import Generate
from ratoon.core.errors import RequestError
from ratoon.models.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from ratoon.models.source import ModelSource


def make_transcriber(
    source: ModelSource,
    tokenizer: Tokenizer,
    generate: Generate,
    max_model_len: int | None = None,  # of the engine; None: the model's
    limits: AudioLimits | None = None,
) -> Transcriber:
    """RequestError: the model does not read audio."""
    encoder = source.config.encoder
    if encoder is None or encoder.num_mel_bins is None:
        raise RequestError("model", "does not read audio", "a speech model, such as one of the Whisper family")
    vocabulary = find_vocabulary(tokenizer, source.config, _generation_config(Path(source.path)), max_model_len)
    return Transcriber(generate, vocabulary, encoder.num_mel_bins, limits or AudioLimits())


@lru_cache(maxsize=8)
def _generation_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "generation_config.json")
