"""Audio of a prompt to what an encoder reads: the features of 30 seconds, made here of a waveform or brought ready.

Files, other sampling rates, several channels and longer recordings are for transcription, not for a plain prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratoon.core.config import EncoderConfig
from ratoon.core.errors import RequestError
from ratoon.core.wire import WireTensor

if TYPE_CHECKING:
    import numpy

FRAMES_PER_STATE = 2  # the encoder's convolutions make one state of two frames


def read_audio(name: str, audio: Mapping[str, Any], encoder: EncoderConfig) -> WireTensor:
    """Features of what an AudioPrompt or a FeaturesPrompt holds. `name` is what errors call that."""
    assert encoder.num_mel_bins is not None
    if "features" in audio:
        features = _numbers(f"{name}.features", audio["features"])
    else:
        from ratoon.models.log_mel import log_mel  # here: it needs numpy, and most front ends do without

        features = log_mel(_waveform(name, audio["audio"], audio["sampling_rate"]), encoder.num_mel_bins)
    expected = (encoder.num_mel_bins, FRAMES_PER_STATE * encoder.max_position)
    if features.shape != expected:
        problem = f"has the shape {list(features.shape)}"
        raise RequestError(f"{name}.features", problem, f"{list(expected)}: mel bins, then frames")
    return WireTensor("float32", features.shape, features.data)


def _waveform(name: str, audio: Any, sampling_rate: Any) -> numpy.ndarray:
    from ratoon.models.log_mel import SAMPLE_RATE, WINDOW_SAMPLES, WINDOW_SECONDS

    if isinstance(sampling_rate, bool) or sampling_rate != SAMPLE_RATE:
        problem = f"is {sampling_rate!r}"
        raise RequestError(f"{name}.sampling_rate", problem, f"{SAMPLE_RATE}; transcribe takes other rates")
    field = f"{name}.audio"
    waveform = _numbers(field, audio)
    if waveform.ndim != 1:
        problem = f"has the shape {list(waveform.shape)}"
        raise RequestError(field, problem, "one channel: a list of samples; transcribe mixes channels down")
    if waveform.size == 0:
        raise RequestError(field, "is empty", "at least one sample")
    if waveform.size > WINDOW_SAMPLES:
        raise RequestError(
            field,
            f"is {waveform.size / SAMPLE_RATE:.1f} s long ({waveform.size} samples)",
            f"at most {WINDOW_SECONDS} s in a prompt; transcribe takes longer ones",
        )
    return waveform


def _numbers(field: str, values: Any) -> numpy.ndarray:
    """float32, a copy: the caller may modify the original while the engine reads."""
    import numpy

    try:
        array = numpy.asarray(values)
    except Exception as error:  # ragged lists, tensors of another device, whatever has an __array__ of its own
        raise RequestError(field, f"is not an array ({error})", "floats") from None
    if array.dtype.kind != "f":
        raise RequestError(field, f"holds {array.dtype}", "floats, of audio from -1 to 1")
    with numpy.errstate(over="ignore"):  # infinity is found below
        array = numpy.array(array, numpy.float32, order="C")
    is_finite = numpy.isfinite(array)
    if not is_finite.all():
        place = numpy.unravel_index(int(is_finite.argmin()), array.shape)
        where = ", ".join(str(int(index)) for index in place)
        raise RequestError(f"{field}[{where}]", f"is {array[place]}", "finite numbers")
    return array
