"""Prompts of models with an encoder: every form of them, what both halves read of it, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from ratoon.core.encoder import features_for_encoder, tokens_for_encoder
from ratoon.core.errors import RequestError
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.wire import Decoder, encode
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.prompts import AudioPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
from ratoon.models.log_mel import WINDOW_FRAMES, WINDOW_SAMPLES, log_mel
from tests.unit.engine.fakes import (
    AUDIO_POSITIONS,
    DECODER_START,
    ENCODER_POSITIONS,
    END,
    NUM_MEL_BINS,
    OTHER,
    VOCAB_SIZE,
    encoder_decoder_config,
    framing_tokenizer,
    model_config,
)

TOKENIZER = framing_tokenizer()
MAX_MODEL_LEN = 20
FRAMED = [OTHER, 97, 98, END]
SOUND = np.sin(np.arange(16_000) / 40)
FEATURES = np.zeros((NUM_MEL_BINS, WINDOW_FRAMES), np.float32)


def processor(config=None, tokenizer: Any = TOKENIZER) -> InputProcessor:
    config = encoder_decoder_config() if config is None else config
    return InputProcessor(config, tokenizer, max_model_len=MAX_MODEL_LEN)


def hearing() -> InputProcessor:
    return processor(encoder_decoder_config(NUM_MEL_BINS))


def process(prompt: Any, made: InputProcessor | None = None) -> EngineCoreRequest:
    return (made or processor()).process("r", prompt, SamplingParams())


def refusal_of(prompt: Any, made: InputProcessor | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        process(prompt, made)
    assert caught.value.expected
    return caught.value


# ---- what the two halves read ----

ENCODER_FORMS = [
    ("ab", FRAMED),
    (TextPrompt(prompt="ab"), FRAMED),
    ([1, 2, 3], [1, 2, 3]),
    (TokensPrompt(prompt_token_ids=[1, 2, 3]), [1, 2, 3]),
    ({"prompt": "only for reading", "prompt_token_ids": [1, 2, 3]}, [1, 2, 3]),
]
DECODER_FORMS = [
    (None, DECODER_START),
    ("", DECODER_START),
    ("xy", [*DECODER_START, 120, 121]),
    (TextPrompt(prompt="xy"), [*DECODER_START, 120, 121]),
    ("<|other|>xy", [END, OTHER, 120, 121]),  # it says itself what comes behind the start
    ("<|end|>xy", [END, 120, 121]),
    ([], [END]),
    ([120, 121], [END, 120, 121]),
    (TokensPrompt(prompt_token_ids=[120, 121]), [END, 120, 121]),
    ([END, OTHER, 51, 178, END], [END, OTHER, 51, 178, END]),
]


@pytest.mark.parametrize(("prompt", "expected"), ENCODER_FORMS)
def test_a_single_prompt_is_the_encoders_and_the_decoder_gets_its_default(prompt, expected):
    request = process(prompt)
    assert request.encoder_input == tokens_for_encoder(expected)
    assert request.encoder_input.num_positions == len(expected)
    assert request.prompt_token_ids == DECODER_START


@pytest.mark.parametrize(("encoder", "decoder"), [*product(ENCODER_FORMS, DECODER_FORMS)])
def test_a_pair_may_mix_all_forms(encoder, decoder):
    request = process(ExplicitEncoderDecoderPrompt(encoder_prompt=encoder[0], decoder_prompt=decoder[0]))
    assert request.encoder_input.token_ids == encoder[1]
    assert request.prompt_token_ids == decoder[1]


def test_a_pair_may_leave_the_decoder_out():
    assert process({"encoder_prompt": "ab"}).prompt_token_ids == DECODER_START


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"forced_bos_token_id": None}, [END]),
        ({"decoder_start_token_id": None, "bos_token_id": 7, "forced_bos_token_id": None}, [7]),
    ],
)
def test_the_default_follows_the_models_config(changes, expected):
    assert process("ab", processor(encoder_decoder_config(**changes))).prompt_token_ids == expected


def test_max_tokens_is_what_fits_behind_the_decoders_prompt():
    open_end = SamplingParams(max_tokens=None)
    request = processor().process("r", {"encoder_prompt": [1] * 30, "decoder_prompt": [2] * 5}, open_end)
    assert request.params.max_tokens == MAX_MODEL_LEN - 6


def test_what_the_encoder_reads_survives_the_way_to_another_process():
    decode = Decoder(EngineCoreRequest).decode
    for request in (process("ab"), process({"features": FEATURES}, hearing())):
        assert decode([bytes(frame) for frame in encode(request)]) == request


# ---- audio ----


def test_a_waveform_becomes_features():
    request = process(AudioPrompt(audio=SOUND, sampling_rate=16_000), hearing())
    features = np.asarray(request.encoder_input.features.view()).reshape(request.encoder_input.features.shape)
    assert np.array_equal(features, log_mel(SOUND.astype(np.float32), NUM_MEL_BINS))
    assert request.encoder_input.num_positions == AUDIO_POSITIONS and request.encoder_input.token_ids is None
    assert request.encoder_input == features_for_encoder(request.encoder_input.features, AUDIO_POSITIONS)
    assert request.prompt_token_ids == DECODER_START


@pytest.mark.parametrize("make", [list, tuple, np.float16, np.float32])
def test_any_array_of_floats_is_audio(make):
    prompt = {"encoder_prompt": {"audio": make(SOUND[:400]), "sampling_rate": 16_000}, "decoder_prompt": [END, 5]}
    request = process(prompt, hearing())
    assert request.encoder_input.features.shape == (NUM_MEL_BINS, WINDOW_FRAMES)
    assert request.prompt_token_ids == [END, 5]


def test_features_are_taken_as_they_are_and_are_the_engines_own():
    given = np.random.default_rng(0).random((WINDOW_FRAMES, NUM_MEL_BINS)).T  # float64, and in another order
    request = process({"features": given}, hearing())
    before = given.astype(np.float32).tobytes()
    given[:] = 0
    assert bytes(request.encoder_input.features.data) == before


def test_text_that_came_earlier_may_stand_before_the_start_of_what_is_heard():
    pair = {"encoder_prompt": {"features": FEATURES}, "decoder_prompt": [9, 5, 5, END, 7]}
    assert process(pair, hearing()).prompt_token_ids == [9, 5, 5, END, 7]


@pytest.mark.parametrize(
    ("prompt", "field", "part"),
    [
        ({"audio": [], "sampling_rate": 16_000}, "prompt.audio", "empty"),
        ({"audio": SOUND, "sampling_rate": 80}, "prompt.sampling_rate", "80"),
        ({"audio": SOUND, "sampling_rate": True}, "prompt.sampling_rate", "True"),
        ({"audio": SOUND, "sampling_rate": 10**9}, "prompt.sampling_rate", "1000000000"),
        ({"audio": np.zeros(31 * 8_000), "sampling_rate": 8_000}, "prompt.audio", "31.0 s"),
        ({"audio": SOUND, "sampling_rate": "16000"}, "prompt.sampling_rate", "'16000'"),
        ({"audio": SOUND}, "prompt.sampling_rate", "missing"),
        ({"sampling_rate": 16_000}, "prompt.audio", "missing"),
        ({"audio": np.stack([SOUND, SOUND]), "sampling_rate": 16_000}, "prompt.audio", "[2, 16000]"),
        ({"audio": [0.0, float("nan")], "sampling_rate": 16_000}, "prompt.audio[1]", "nan"),
        ({"audio": [1e300], "sampling_rate": 16_000}, "prompt.audio[0]", "inf"),
        ({"audio": [1, 2], "sampling_rate": 16_000}, "prompt.audio", "int"),
        ({"audio": "jfk.wav", "sampling_rate": 16_000}, "prompt.audio", "<U7"),
        ({"audio": [[0.1], [0.1, 0.2]], "sampling_rate": 16_000}, "prompt.audio", "array"),
        ({"audio": np.zeros(WINDOW_SAMPLES + 8_000), "sampling_rate": 16_000}, "prompt.audio", "30.5 s"),
        ({"audio": SOUND, "sampling_rate": 16_000, "prompt": "x"}, "prompt", "'prompt'"),
        ({"features": FEATURES[:, 1:]}, "prompt.features", f"[{NUM_MEL_BINS}, {WINDOW_FRAMES - 1}]"),
        ({"features": FEATURES + np.inf}, "prompt.features[0, 0]", "inf"),
        ({"features": None}, "prompt.features", "missing"),
        ({"features": FEATURES, "audio": SOUND}, "prompt", "'audio'"),
        ("ab", "prompt", "reads audio"),
        ([1, 2], "prompt_token_ids", "reads audio"),
        ({"encoder_prompt": "ab"}, "encoder_prompt", "reads audio"),
        ({"encoder_prompt": {"features": 1.0}}, "encoder_prompt.features", "[]"),
        ({"encoder_prompt": {"features": FEATURES}, "decoder_prompt": {"features": FEATURES}}, "decoder_prompt", "aud"),
    ],
)
def test_audio_that_can_not_be_read_is_refused(prompt, field, part):
    error = refusal_of(prompt, hearing())
    assert error.field == field
    assert part in error.problem


def test_long_audio_is_sent_to_transcribe():
    audio = {"audio": np.zeros(WINDOW_SAMPLES + 1), "sampling_rate": 16_000}
    assert "transcribe" in refusal_of(audio, hearing()).expected


# ---- what is refused ----


@pytest.mark.parametrize(
    ("prompt", "field", "part"),
    [
        ("", "prompt", "empty"),
        ([], "prompt_token_ids", "empty"),
        ("a" * 31, "prompt", "33 tokens"),
        ([1] * 33, "prompt_token_ids", f"{ENCODER_POSITIONS} positions"),
        ({"encoder_prompt": ""}, "encoder_prompt", "empty"),
        ({"encoder_prompt": []}, "encoder_prompt_token_ids", "empty"),
        ({"encoder_prompt": [1] * 33}, "encoder_prompt_token_ids", "33 tokens"),
        ({"encoder_prompt": [1, VOCAB_SIZE]}, "encoder_prompt_token_ids[1]", str(VOCAB_SIZE)),
        ({"encoder_prompt": {"prompt_token_ids": [-1]}}, "encoder_prompt_token_ids[0]", "-1"),
        ({"encoder_prompt": {"prompt_token_ids": "ab"}}, "encoder_prompt_token_ids", "str"),
        ({"encoder_prompt": 5}, "encoder_prompt", "int"),
        ({"encoder_prompt": None}, "encoder_prompt", "missing"),
        ({"decoder_prompt": "ab"}, "encoder_prompt", "missing"),
        ({"encoder_prompt": {"text": "ab"}}, "encoder_prompt", "'text'"),
        ({"encoder_prompt": {"encoder_prompt": "ab"}}, "encoder_prompt", "itself a pair"),
        ({"encoder_prompt": "ab", "decoder_prompt": {"decoder_prompt": "x"}}, "decoder_prompt", "itself a pair"),
        ({"encoder_prompt": "ab", "decoder_prompt": 5}, "decoder_prompt", "int"),
        ({"encoder_prompt": "ab", "decoder_prompt": {}}, "decoder_prompt", "missing"),
        ({"encoder_prompt": "ab", "decoder_prompt": [1, 999]}, "decoder_prompt_token_ids[1]", "999"),
        ({"encoder_prompt": "ab", "decoder_prompt": [1] * 19}, "decoder_prompt_token_ids", "20 tokens"),
        ({"encoder_prompt": "ab", "decoder_prompt": "x" * 18}, "decoder_prompt", "20 tokens"),
        ({"encoder_prompt": "ab", "decoder_prompt": "x\ud800"}, "decoder_prompt", "character 1"),
        ({"encoder_prompt": "ab", "prompt": "ab"}, "prompt", "'prompt'"),
        ({"audio": SOUND, "sampling_rate": 16_000}, "prompt", "reads text"),
        ({"encoder_prompt": {"features": FEATURES}}, "encoder_prompt", "reads text"),
    ],
)
def test_bad_prompts_are_refused_with_field_and_value(prompt, field, part):
    error = refusal_of(prompt)
    assert error.field == field
    assert part in error.problem


def test_text_without_a_tokenizer_is_refused_where_it_stands():
    bare = processor(tokenizer=None)
    assert refusal_of({"encoder_prompt": [1], "decoder_prompt": "x"}, bare).field == "decoder_prompt"
    assert process({"encoder_prompt": [1], "decoder_prompt": [2]}, bare).prompt_token_ids == [END, 2]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"encoder_prompt": "ab", "decoder_prompt": "x"}, "encoder_prompt"),
        ({"encoder_prompt": "ab"}, "encoder_prompt"),
        ({"audio": SOUND, "sampling_rate": 16_000}, "prompt"),
        ({"features": FEATURES}, "prompt"),
    ],
)
def test_a_model_without_an_encoder_says_so(prompt, field):
    error = refusal_of(prompt, processor(model_config()))
    assert error.field == field
    assert "has no encoder" in error.problem


# ---- an encoder alone ----


def test_an_encoder_alone_serves_vectors_and_generates_nothing():
    encoder = processor(model_config(causal=False))
    error = refusal_of("ab", encoder)
    assert error.field == "model" and "no decoder" in error.problem and "embeddings" in error.problem
    request = encoder.process_pooling("r", "ab", PoolingParams())
    assert (request.prompt_token_ids, request.encoder_input) == (FRAMED, None)
    with pytest.raises(RequestError, match="21 tokens, and at most 20 fit"):
        encoder.process_pooling("r", [1] * 21, PoolingParams())
    with pytest.raises(RequestError, match="decoder_prompt: the model has no decoder"):
        encoder.process_pooling("r", {"encoder_prompt": "ab", "decoder_prompt": "x"}, PoolingParams())


def test_an_encoder_decoder_model_has_no_vectors():
    with pytest.raises(RequestError, match="serves no embeddings"):
        processor().process_pooling("r", "ab", PoolingParams())
