"""transformers hearing: its feature extractor, and Whisper's own `generate` on a batch.

It makes the decoder's prompt itself, of the language and the task.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers.protocol import Calls, TokenIds, serve
from peers.speech import LANGUAGE, SAMPLE_RATE, TASK, SpeechEngine


def load(args: argparse.Namespace) -> Calls:
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.set_num_threads(args.threads)
    whisper: Any = WhisperForConditionalGeneration
    model = whisper.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    return TransformersSpeech(model, WhisperFeatureExtractor.from_pretrained(args.model)).calls()


class TransformersSpeech(SpeechEngine):
    def __init__(self, model: Any, extractor: Any) -> None:
        super().__init__()
        self._model = model
        self._extractor = extractor

    def extract(self) -> Any:
        features = self._extractor(self.clips, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        return {"input_features": features.input_features}  # [clips, mel bins, frames]

    def generate(self, heard: Any, prompt: list[int], num_tokens: int) -> TokenIds:
        import torch

        with torch.inference_mode():
            output = self._model.generate(
                do_sample=False, max_new_tokens=num_tokens, language=LANGUAGE, task=TASK, **heard
            )
        return output.tolist()


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
