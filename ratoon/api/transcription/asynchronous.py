"""Transcription with an AsyncLLM: the engine of a server, which has others to serve meanwhile."""

from __future__ import annotations

import itertools
import secrets
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ratoon.api.transcription.model import make_transcriber
from ratoon.api.transcription.sources import AudioLimits
from ratoon.api.transcription.transcriber import Transcriber
from ratoon.api.transcription.windows import checked_output, window_prompt
from ratoon.core.errors import UnknownParentError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import GenerationParams

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


def async_transcriber(
    llm: AsyncLLM,
    *,
    limits: AudioLimits | None = None,
    request_id: str | None = None,  # what the ids of its requests begin with
    **placement: Any,  # priority, cache_salt and owner, as AsyncLLM.generate takes them
) -> Transcriber:
    """Transcribes any number of recordings, at the same time or one after the other.

        async with AsyncLLM(model) as llm:
            transcription = await async_transcriber(llm).transcribe("talk.mp3", TranscriptionOptions())

    RequestError: the model does not read audio.
    """
    generate = AsyncGenerate(llm, request_id or f"transcribe-{secrets.token_hex(16)}", placement)
    return make_transcriber(llm.source, llm.get_tokenizer(), generate, llm.config.max_model_len, limits)


class AsyncGenerate:
    def __init__(self, llm: AsyncLLM, request_id: str, placement: dict[str, Any]) -> None:
        self._llm = llm
        self._request_id = request_id
        self._placement = placement
        self._numbers = itertools.count()

    async def __call__(
        self, features: np.ndarray, prompt_token_ids: list[int], params: GenerationParams
    ) -> RequestOutput:
        request_id = f"{self._request_id}-{next(self._numbers)}"
        prompt = window_prompt(features, prompt_token_ids)
        final: RequestOutput | None = None
        async with aclosing(self._llm.generate(prompt, params, request_id, **self._placement)) as outputs:
            async for output in outputs:
                final = output
        with suppress(UnknownParentError):  # nobody goes on from a window, and it would hold its features
            await self._llm.forget(request_id, self._placement.get("owner"))
        return checked_output(final)
