"""Recordings longer than a window, transcribed by the real Whisper-tiny as transformers' long-form generation does."""

from __future__ import annotations

import wave

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from ratoon import LLM
from tests.real_models import DATA, whisper_tiny

pytestmark = pytest.mark.slow

RATE = 16_000
WINDOW = 3000  # frames
# Transformers has none of these unless it is asked, and then measures repetition in another way.
NO_SECOND_TRIES = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    """Eight sentences, with pauses of up to four seconds between them."""
    pieces = []
    for number, path in enumerate(sorted((DATA / "speech").glob("*.wav"))[:8]):
        with wave.open(str(path)) as file:
            pieces.append(np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768)
        pieces.append(np.zeros(RATE * (number % 5), dtype=np.float32))
    return np.concatenate(pieces)


@pytest.fixture(scope="module")
def oracle():
    folder = whisper_tiny()
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, WhisperProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(whisper_tiny()), device="cpu", dtype="float32", num_threads=1) as llm:
        yield llm


def whole_features(processor, recording: np.ndarray) -> torch.Tensor:
    extract = processor.feature_extractor
    inputs = extract(recording, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest")
    return inputs.input_features


def segments_of_transformers(oracle, recording: np.ndarray, **options) -> list[tuple[float, float, str]]:
    model, processor = oracle
    with torch.no_grad():
        found = model.generate(
            whole_features(processor, recording),
            return_timestamps=True,
            return_segments=True,
            task="transcribe",
            **options,
        )
    segments = []
    for segment in found["segments"][0]:
        text = processor.tokenizer.decode(segment["tokens"], skip_special_tokens=True)
        if text.strip():
            end = min(float(segment["end"]), len(recording) / RATE)  # theirs may be behind the end of the recording
            segments.append((round(float(segment["start"]), 2), round(end, 2), text))
    return segments


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param({"language": "en"}, {"language": "en"}, id="greedy", marks=pytest.mark.full),
        pytest.param(
            {"language": "en", "num_beams": 3}, {"language": "en", "beam_size": 3}, id="beams", marks=pytest.mark.full
        ),
        pytest.param(
            {"language": "en", "condition_on_prev_tokens": True},
            {"language": "en", "condition_on_previous_text": True},
            id="with what was said before",
        ),
    ],
)
def test_segments_and_their_times_are_those_of_transformers(oracle, llm, recording, theirs, ours):
    assert len(recording) > 35 * RATE
    found = llm.transcribe((recording, RATE), **NO_SECOND_TRIES, **ours)
    segments = [(round(segment.start, 2), round(segment.end, 2), segment.text) for segment in found.segments]
    assert segments == segments_of_transformers(oracle, recording, **theirs)
    assert segments[-1][1] > 30


@pytest.mark.full
def test_windows_side_by_side_are_what_transformers_makes_of_each(oracle, llm, recording):
    model, processor = oracle
    found = llm.transcribe((recording, RATE), language="en", timestamps=False, **NO_SECOND_TRIES)
    features = whole_features(processor, recording)
    windows = [features[:, :, start : start + WINDOW] for start in range(0, features.shape[-1], WINDOW)]
    assert len(windows) == 2
    texts = []
    for window in windows:
        window = torch.nn.functional.pad(window, (0, WINDOW - window.shape[-1]))
        with torch.no_grad():
            (tokens,) = model.generate(window, language="en", task="transcribe")
        texts.append(processor.tokenizer.decode(tokens, skip_special_tokens=True))
    assert [segment.text for segment in found.segments] == texts
