"""Moonshine computes what transformers computes, of sound of any length, alone and in a batch, and transcribes
recordings."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, RequestError, SamplingParams
from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from ratoon.models.waveform import FEWEST_SAMPLES, WINDOW_SAMPLES, num_states
from tests.golden.engines import check_nothing_left, write_word_tokenizer
from tests.golden.tiny_models import VOCAB_SIZE

RATE = 16_000
START, END = 1, 2
COUNT = 24  # tokens of a text
LONG_COUNT, LONG_POSITIONS = 80, 194  # tokens of a long text, and the most that the published models have
TOLERANCE = 2e-4  # of states: sums over up to 600 numbers of about 1, in another order
LENGTHS = (FEWEST_SAMPLES, 5000, 16_000, 40_123)


@functools.cache
def saved() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ratoon-golden-")  # removed when the process ends


@functools.cache
def oracle(hidden_size: int = 72, bias: bool = False, max_position: int = 64) -> Any:
    """Heads of 36, of which 32 numbers are rotated, as in the published models; or of 32, which CPU kernels take."""
    torch.manual_seed(5)
    config = transformers.MoonshineConfig(
        vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=96, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=3, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        max_position_embeddings=max_position, pad_head_dim_to_multiple_of=8, attention_bias=bias, eos_token_id=END,
    )  # fmt: skip
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    with torch.no_grad():  # a fresh model says one token over and over
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(4)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(2)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def folder(hidden_size: int = 72, bias: bool = False, max_position: int = 64) -> Path:
    path = Path(saved().name) / f"moonshine-{hidden_size}-{bias}-{max_position}"
    oracle(hidden_size, bias, max_position).save_pretrained(path)
    write_word_tokenizer(path)
    return path


def sound(num_samples: int) -> np.ndarray:
    return (np.random.default_rng(num_samples).standard_normal(num_samples) * 0.3).astype(np.float32)


def prompt_of(samples: np.ndarray) -> dict[str, Any]:
    return {"encoder_prompt": {"audio": samples, "sampling_rate": RATE}}


@pytest.fixture(scope="module", params=[72, 64])
def hidden_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def llm(hidden_size: int) -> Iterator[LLM]:
    settings = {"device": "cpu", "num_blocks": 400, "num_threads": 1, "max_num_seqs": 8, "dtype": "float32"}
    with LLM(str(folder(hidden_size)), **settings) as built:
        yield built
        check_nothing_left(built)


@torch.inference_mode()
def text_by_transformers(hidden_size: int, samples: np.ndarray, num_beams: int = 1) -> list[int]:
    found = oracle(hidden_size).generate(
        input_values=torch.from_numpy(samples)[None], max_new_tokens=COUNT, do_sample=False, num_beams=num_beams
    )
    return found[0].tolist()[1:]


def test_texts_of_sounds_of_several_lengths_in_one_batch_are_those_of_transformers(llm: LLM, hidden_size: int) -> None:
    sounds = [sound(length) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    outputs = llm.generate([prompt_of(samples) for samples in sounds], params, progress=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    assert texts == [text_by_transformers(hidden_size, samples) for samples in sounds]
    assert len({tuple(text) for text in texts}) == len(texts), "the encoder is heard"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [72, 64])
def test_greedy_tokens_over_64_are_those_of_transformers(size: int) -> None:
    """Long texts of sounds of two lengths in one batch, over several blocks of the decoder's cache. So small a model
    soon repeats itself: where no pair of tokens may come twice, a text goes on."""
    sounds, model = [sound(length) for length in (5000, 16_000)], oracle(size, max_position=LONG_POSITIONS)
    settings = {"device": "cpu", "num_blocks": 100, "num_threads": 1, "dtype": "float32"}
    with LLM(str(folder(size, max_position=LONG_POSITIONS)), **settings) as llm:
        for pairs in (0, 2):
            params = SamplingParams(
                temperature=0.0, max_tokens=LONG_COUNT, ignore_eos=True, no_repeat_ngram_size=pairs or None
            )
            outputs = llm.generate([prompt_of(samples) for samples in sounds], params, progress=False)
            for samples, output in zip(sounds, outputs, strict=True):
                with torch.inference_mode():
                    expected = model.generate(
                        input_values=torch.from_numpy(samples)[None], max_new_tokens=LONG_COUNT, do_sample=False,
                        no_repeat_ngram_size=pairs,
                    )  # fmt: skip
                text = expected[0].tolist()[1:]
                assert len(text) == LONG_COUNT and list(output.outputs[0].token_ids) == text
                assert pairs == 0 or len(set(text)) > 8
        check_nothing_left(llm)


def test_beams_are_those_of_transformers(llm: LLM, hidden_size: int) -> None:
    samples = sound(9000)
    params = BeamSearchParams(beam_width=3, max_tokens=COUNT, ignore_eos=True)
    (output,) = llm.generate([prompt_of(samples)], params, progress=False)
    assert list(output.outputs[0].token_ids) == text_by_transformers(hidden_size, samples, num_beams=3)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_states_of_all_layers_are_those_of_transformers(llm: LLM, hidden_size: int, side: str) -> None:
    samples, tokens = sound(7000), [START, 5, 9, 30]
    prompt = {**prompt_of(samples), "decoder_prompt": {"prompt_token_ids": tokens}}
    states = llm.extract_hidden_states(prompt, HiddenStatesParams(positions="all", layers="all", side=side))
    with torch.inference_mode():
        found = oracle(hidden_size)(
            input_values=torch.from_numpy(samples)[None], decoder_input_ids=torch.tensor([tokens]),
            output_hidden_states=True,
        )  # fmt: skip
    expected = torch.cat(found.encoder_hidden_states if side == "encoder" else found.decoder_hidden_states)
    if side == "encoder":
        assert states.tensor.shape[1] == num_states(7000)
    torch.testing.assert_close(states.tensor, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_biases_of_attention_are_read() -> None:
    with LLM(str(folder(bias=True)), device="cpu", num_blocks=100, num_threads=1, dtype="float32") as llm:
        samples = sound(6000)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt_of(samples)], params, progress=False)
    with torch.inference_mode():
        found = oracle(bias=True).generate(
            input_values=torch.from_numpy(samples)[None], max_new_tokens=8, do_sample=False
        )
    assert list(output.outputs[0].token_ids) == found[0].tolist()[1:]


def test_the_number_of_states_is_that_of_the_convolutions() -> None:
    for length in (FEWEST_SAMPLES, FEWEST_SAMPLES + 1, 12_345, WINDOW_SAMPLES):
        assert num_states(length) == oracle()._get_feat_extract_output_lengths(length)
    assert num_states(FEWEST_SAMPLES) == 1 and num_states(FEWEST_SAMPLES - 1) == 0
    assert num_states(WINDOW_SAMPLES) == 1248


@pytest.mark.parametrize("hidden_size", [64], indirect=True)
def test_a_recording_is_transcribed_in_windows_that_are_cut_where_it_is_quiet(llm: LLM) -> None:
    samples = sound(40 * RATE)
    samples[27 * RATE : 28 * RATE] *= 1e-3  # where the first window should end
    found = llm.transcribe((samples, RATE), temperature=0.0)
    assert found.segments[0].seek == 0
    cut = found.segments[0].end
    assert 27 <= cut <= 28 and found.segments[-1].end == 40
    params = SamplingParams(temperature=0.0, max_tokens=63)
    prompts = [prompt_of(samples[: round(cut * RATE)]), prompt_of(samples[round(cut * RATE) :])]
    outputs = llm.generate(prompts, params, progress=False)
    said = [output.outputs[0].text.strip() for output in outputs]
    assert found.text == " ".join(said)
    assert (found.language, found.duration) == (None, 40.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"word_timestamps": True}, "word_timestamps"),
        ({"task": "translate"}, "task"),
        ({"prompt": "x"}, "prompt"),
        ({"condition_on_previous_text": True}, "condition_on_previous_text"),
    ],
)
def test_what_the_model_can_not_do_is_refused_by_name(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as raised:
        llm.transcribe((sound(RATE), RATE), **options)
    assert raised.value.field == field


def test_sound_of_another_shape_or_length_is_refused(llm: LLM) -> None:
    for features in (np.zeros((2, 2000), np.float32), np.zeros((1, 100), np.float32), np.zeros(2000, np.float32)):
        with pytest.raises(RequestError, match=r"features: has the shape .* samples\], from 895 to 480000"):
            llm.generate({"encoder_prompt": {"features": features}}, SamplingParams(max_tokens=2), progress=False)
    (output,) = llm.generate([prompt_of(sound(10))], SamplingParams(max_tokens=2, temperature=0.0), progress=False)
    assert output.error is None  # silence follows what is too short


def test_files_that_ask_for_other_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "moonshine"
    shutil.copytree(folder(), path)
    (path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": True, "sampling_rate": RATE}))
    with pytest.raises(ModelError, match="asks for normalised samples"):
        resolve_model(str(path))
    (path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False, "sampling_rate": RATE}))
    assert resolve_model(str(path)).config.encoder is not None


def test_fields_that_transformers_does_not_run_are_refused() -> None:
    raw = {"architectures": ["MoonshineForConditionalGeneration"], "decoder_num_attention_heads": 8}
    assert parse_hf_config(raw, "file").rotary_dim == 32
    for changes, field in (
        ({"encoder_num_attention_heads": 4}, "encoder_num_attention_heads"),
        ({"decoder_num_key_value_heads": 2}, "decoder_num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"partial_rotary_factor": 0.03}, "partial_rotary_factor"),
    ):
        with pytest.raises(ModelError, match=f"config field .*{field} is"):
            parse_hf_config({**raw, **changes}, "file")
