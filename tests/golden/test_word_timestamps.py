"""Times of tokens are those of transformers: with small random models, and with the real Whisper-tiny."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from ratoon import LLM
from ratoon.transcription.alignment import SECONDS_OF_POSITION, token_times
from tests.golden.encoder_engines import core_of, decoder_prompt, generate, source_of
from tests.golden.real_whisper import SETTINGS
from tests.golden.speech import JFK, RATE, read_sentences, read_wav
from tests.golden.test_cross_weights import ask_weights, eager
from tests.real_models import whisper_tiny

HEADS = [(1, 0), (1, 3), (2, 2)]


def times_by_transformers(found: Any, num_prompt_tokens: int, num_frames: int, oracle: Any) -> np.ndarray:
    """Returns the times of the generated tokens but the last, of which transformers has no weights."""
    times = oracle._extract_token_timestamps(
        found, HEADS, num_frames=num_frames, num_input_ids=num_prompt_tokens, time_precision=SECONDS_OF_POSITION
    )
    return times[0, num_prompt_tokens:-1].numpy()


@pytest.mark.parametrize("num_frames", [60, 41])
def test_times_of_random_models_are_those_of_transformers_within_a_position(num_frames: int) -> None:
    seen = set()
    for seed in range(6):
        source, prompt = source_of("whisper", 3, seed), decoder_prompt(4, seed)
        with eager("whisper") as oracle:
            found = generate(
                "whisper", source, prompt, max_new_tokens=12, num_beams=1, output_attentions=True, eos_token_id=None
            )
            expected = times_by_transformers(found, len(prompt), num_frames, oracle)
        tokens = found.sequences[0].tolist()[:-1]
        with core_of("whisper") as driver:
            ask_weights(driver, "weights", source, tokens, [*range(len(prompt), len(tokens))], HEADS)
            driver.run()
            weights = driver["weights"].states
        times = token_times(weights[..., : num_frames // 2])
        np.testing.assert_allclose(times, expected, atol=SECONDS_OF_POSITION + 1e-6)
        seen |= {*expected.tolist()}
    assert len(seen) > 6, "the random model has something to align"


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    folder = whisper_tiny()
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), WhisperProcessor.from_pretrained(folder)


def spoken(which: str) -> np.ndarray:
    return read_wav(JFK) if which == "jfk" else read_sentences()[int(which)].samples


@pytest.mark.slow
@pytest.mark.parametrize("which", ["jfk", pytest.param("0", marks=pytest.mark.full)])
def test_words_of_the_real_model_end_where_transformers_says(oracle: tuple[Any, Any], which: str) -> None:
    samples = spoken(which)
    model, processor = oracle
    features = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        found = model.generate(
            features, return_timestamps=True, return_token_timestamps=True, language="en", task="transcribe",
            num_frames=len(samples) // 160,
        )  # fmt: skip
    with LLM(str(whisper_tiny()), num_blocks=2000, **SETTINGS) as llm:
        plain = llm.transcribe((samples, RATE), language="en", temperature=0.0)
        before = llm.stats().num_encoder_runs
        ours = llm.transcribe((samples, RATE), language="en", temperature=0.0, word_timestamps=True)
        assert llm.stats().num_encoder_runs == before, "the encoder does not run again"
    assert ours.text == plain.text
    assert "".join(word.word for word in ours.words) == "".join(segment.text for segment in ours.segments)
    # A word ends with its last token; marks are tokens too.
    ends, tokens = {}, found["sequences"][0].tolist()
    text = ""
    for token, seconds in zip(tokens, found["token_timestamps"][0].tolist(), strict=True):
        if token < processor.tokenizer.eos_token_id:
            text += processor.tokenizer.decode([token])
            ends[text] = seconds
    assert text == "".join(word.word for word in ours.words)
    heard = ""
    for word in ours.words[:-1]:  # the last one ends with its segment
        heard += word.word
        assert abs(word.end - ends[heard]) <= SECONDS_OF_POSITION + 1e-6, word
        assert word.start <= word.end
    assert ours.words[-1].end <= ours.segments[-1].end
