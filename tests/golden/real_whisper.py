"""The real Whisper-tiny, ours and transformers', on the same recordings with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.core.params import GenerationParams
from tests.golden.speech import RATE
from tests.real_models import whisper_tiny

DECODER_PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
MAX_TOKENS = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def prompt_of(samples: np.ndarray) -> dict[str, Any]:
    return {"encoder_prompt": {"audio": samples, "sampling_rate": RATE}, "decoder_prompt": DECODER_PROMPT}


def beams(width: int) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS)


def hear(llm: LLM, recordings: Sequence[np.ndarray], params: GenerationParams = GREEDY) -> list[list[int]]:
    """The tokens of each recording, up to and without the end token."""
    outputs = llm.generate([prompt_of(samples) for samples in recordings], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    heard = [output.outputs[0].token_ids for output in outputs]
    assert all(tokens[-1] == llm.source.config.eos_token_ids[0] for tokens in heard)
    return [tokens[:-1] for tokens in heard]


def text_of(llm: LLM, token_ids: list[int]) -> str:
    return llm.get_tokenizer().decode(token_ids)


class Oracle:
    def __init__(self) -> None:
        folder = whisper_tiny()
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)

    @torch.inference_mode()
    def hear(self, samples: np.ndarray, num_beams: int = 1) -> list[int]:
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        found = self.model.generate(
            features, language="en", task="transcribe", return_timestamps=False, do_sample=False, num_beams=num_beams,
            max_new_tokens=MAX_TOKENS,
        )  # fmt: skip
        tokens: list[int] = found[0].tolist()
        return [token for token in tokens if token != self.model.config.eos_token_id]
