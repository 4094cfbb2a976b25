"""An engine core for speech that plays a script, under an LLM or under a server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, Extraction
from tests.unit.engine.fakes import FakeClient
from tests.unit.engine.fakes_async import FakeSource
from tests.unit.transcription.speech import (
    ALIGNMENT_HEADS,
    END,
    ENGLISH,
    NO_SPEECH,
    speech_config,
    speech_tokenizer,
    tokens_of,
)

Texts = Sequence[str] | Callable[[EngineCoreRequest], str]


def speech_source(**changes: object) -> FakeSource:
    fields = {
        "name": "tiny",
        "path": Path("/nowhere"),
        "format": "fake",
        "config": speech_config(),
        "generation_defaults": {},
        "chat_template": None,
        "pooling": None,
        "tokenizer": speech_tokenizer(),
    }
    return FakeSource(**(fields | changes))


def aligned_source(folder: Path) -> FakeSource:
    """A model whose files, which are written to the folder, say which heads follow the sound."""
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": ALIGNMENT_HEADS}))
    (folder / "config.json").write_text("{}")
    return speech_source(path=folder)


def allowed_of(request: EngineCoreRequest) -> list[int] | None:
    return request.params.allowed_token_ids if isinstance(request.params, SamplingParams) else None


class SpeechClient(FakeClient):
    """Says one text after the other, or what a function makes of the request; questions have their usual answers."""

    def __init__(self, texts: Texts = ("<0.00> Hello.<1.00>",), no_speech_prob: float = 0.01) -> None:
        super().__init__(self.answer)
        self.texts = texts
        self.logprob = math.log(0.75)
        self.no_speech_prob = no_speech_prob
        self._num_told = 0

    @property
    def windows(self) -> list[EngineCoreRequest]:
        return [
            request for request in self.added if not allowed_of(request) and not isinstance(request.params, Extraction)
        ]

    def answer(self, request: EngineCoreRequest, choice: int) -> list[int]:
        allowed = allowed_of(request)
        if allowed:
            return [NO_SPEECH] if allowed == [NO_SPEECH] else [ENGLISH]
        self._num_told += 1
        text = self.texts(request) if callable(self.texts) else self.texts[self._num_told - 1]
        return [*tokens_of(text), END]

    def get_output(self) -> EngineCoreOutputs:
        outputs = super().get_output()
        for output in outputs.outputs:
            request = self._requests.get(output.request_id)
            if request is None or not isinstance(request.params, SamplingParams) or request.params.logprobs is None:
                continue
            tokens = output.new_token_ids
            logprobs = [math.log(self.no_speech_prob) if token == NO_SPEECH else self.logprob for token in tokens]
            output.new_logprobs = LogprobsLists(
                [[token] for token in tokens], [[logprob] for logprob in logprobs], [1 for _ in tokens]
            )
        return outputs
