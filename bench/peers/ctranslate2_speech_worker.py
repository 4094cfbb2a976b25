"""CTranslate2 with speech. It computes no features: transformers' extractor does, as in its documentation.

Its models have a format of their own (ctranslate2_convert.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.ctranslate2_options import model_options
from peers.protocol import Calls, TokenIds, serve
from peers.speech import SAMPLE_RATE, SpeechEngine

SYMBOLS = -1  # stands for the tokens that the model's own config holds back


def load(args: argparse.Namespace) -> Calls:
    import ctranslate2
    import torch
    from transformers import WhisperFeatureExtractor

    torch.set_num_threads(args.threads)
    model = ctranslate2.models.Whisper(args.model, **model_options(args))
    return CTranslate2Speech(model, WhisperFeatureExtractor(feature_size=model.n_mels)).calls()


class CTranslate2Speech(SpeechEngine):
    def __init__(self, model: Any, extractor: Any) -> None:
        super().__init__()
        self._model = model
        self._extractor = extractor

    def extract(self) -> Any:
        import ctranslate2

        features = self._extractor(self.clips, sampling_rate=SAMPLE_RATE, return_tensors="np")
        return ctranslate2.StorageView.from_array(features.input_features)  # [clips, mel bins, frames]

    def generate(self, heard: Any, prompt: list[int], num_tokens: int) -> TokenIds:
        results = self._model.generate(
            heard,
            [prompt] * len(self.clips),
            beam_size=1,
            # Prompt and answer together; and an answer gets no more than the half of it.
            max_length=max(2 * num_tokens, len(prompt) + num_tokens),
            suppress_tokens=[SYMBOLS],
        )
        return [result.sequences_ids[0] for result in results]


if __name__ == "__main__":
    serve(load, ("ctranslate2", "transformers"))
