"""Makes the recordings in this folder from sentences.json: `python -m tests.data.speech.make`.

Each sentence is spoken by espeak-ng, brought to 16 kHz, and mixed with noise of a seed, so much quieter than the speech
as its `snr` says (dB). It needs espeak-ng and PyAV. Tests read the files and do not run this.
"""

from __future__ import annotations

import json
import subprocess
import wave
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.models.log_mel import SAMPLE_RATE
from ratoon.transcription.audio import AudioLimits, read_samples

FOLDER = Path(__file__).parent
LOUDNESS = 0.08  # root of the mean square of the speech


def speak(text: str, voice: str, speed: int) -> np.ndarray:
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", text]
    recording = subprocess.run(command, capture_output=True, check=True).stdout
    samples = np.concatenate(list(read_samples(recording, AudioLimits())))
    return samples * (LOUDNESS / power(samples) ** 0.5)


def noise(kind: str, count: int, seed: int) -> np.ndarray:
    """Of power 1. White: every frequency alike; pink: the lower the louder, as in most rooms."""
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(count))
    if kind == "pink":
        spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1))
    samples = np.fft.irfft(spectrum, count)
    return samples / power(samples) ** 0.5


def power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))


def make(sentence: dict[str, Any], seed: int) -> np.ndarray:
    samples = speak(sentence["text"], sentence["voice"], sentence["speed"])
    if sentence["noise"] is not None:
        loudness = LOUDNESS / 10 ** (sentence["snr"] / 20)
        samples = samples + noise(sentence["noise"], len(samples), seed) * loudness
    return np.clip(samples, -1, 1)


def main() -> None:
    for seed, sentence in enumerate(json.loads((FOLDER / "sentences.json").read_text())):
        samples = make(sentence, seed)
        with wave.open(str(FOLDER / sentence["file"]), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
