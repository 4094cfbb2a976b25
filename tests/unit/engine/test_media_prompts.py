"""Prompts with images, videos, audio and embeddings: what the engine gets of them, and what is refused before anything
is decoded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ratoon.core.config import MediaSettings, RopeScaling
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.media import EMBEDS, IMAGE, VIDEO, MediaConfig, RopePositions, VisionConfig
from ratoon.core.params import HiddenStatesParams, PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.settings import engine_config
from ratoon.core.wire import Decoder, encode
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.prompt_media import verify_rope
from ratoon.engine.input.prompts import takes_long
from ratoon.media.items import NamedMedia
from ratoon.models.log_mel import WINDOW_FRAMES
from tests.golden.media_oracle import drawn, saved
from tests.unit.engine.fakes import (
    HIDDEN_SIZE,
    NUM_MEL_BINS,
    OTHER,
    byte_tokenizer,
    encoder_decoder_config,
    model_config,
)
from tests.unit.engine.fakes_async import FakeAsyncClient, fake_source, on_event_loop

VIDEO_TOKEN = ord("~")
VISION = VisionConfig(8, 8, 1, 1, patch_size=14, temporal_patch_size=2, merge_size=2, tokens_per_second=2.0)
QWEN = MediaConfig(
    "qwen2_5_vl", VISION, image_token_id=OTHER, video_token_id=VIDEO_TOKEN, processor={"min_pixels": 784}
)
SEES = model_config(media=QWEN, rope_scaling=RopeScaling(sections=(1, 1, 0)))
PICTURE = drawn(56, 28)  # two rows of embeddings
SOUND = np.sin(np.arange(16_000) / 40)


def processor(config=SEES, **settings: Any) -> InputProcessor:
    return InputProcessor(config, byte_tokenizer(), max_model_len=40, media=MediaSettings(**settings))


def process(prompt: Any, made: InputProcessor | None = None) -> EngineCoreRequest:
    return (made or processor()).process("r", prompt, SamplingParams())


def refusal_of(prompt: Any, made: InputProcessor | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        process(prompt, made)
    return caught.value


def with_image(*images: Any, prompt: Any = None, **options: Any) -> dict[str, Any]:
    text = {"prompt": "a" + "<|other|>" * len(images) + "b"} if prompt is None else prompt
    return {**text, "multi_modal_data": {"image": list(images)}, **options}


# ---- what the engine gets ----


@pytest.mark.parametrize("form", ["array", "pillow", "bytes", "path", "path as text", "tensor"])
def test_every_form_of_an_image_becomes_the_same_rows(form: str, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "picture.png"
    path.write_bytes(saved(Image.fromarray(PICTURE), "PNG"))
    image = {
        "array": PICTURE, "pillow": Image.fromarray(PICTURE), "bytes": path.read_bytes(), "path": path,
        "path as text": str(path), "tensor": torch.from_numpy(PICTURE),
    }[form]  # fmt: skip
    request = process(with_image(image))
    assert request.prompt_token_ids == [97, OTHER, OTHER, 98]
    (feature,) = request.mm_features
    assert (feature.offset, feature.length, feature.data.num_rows, feature.data.grid) == (1, 2, 2, (1, 2, 4))
    assert feature.content_hash == process(with_image(PICTURE)).mm_features[0].content_hash


def test_one_image_needs_no_list_and_ids_need_no_text() -> None:
    for prompt in ({"prompt": "<|other|>"}, {"prompt_token_ids": [OTHER]}):
        request = process({**prompt, "multi_modal_data": {"image": PICTURE, "video": None}})
        assert request.prompt_token_ids == [OTHER] * 2


def test_rope_positions_are_those_of_three_axes() -> None:
    request = process(with_image(PICTURE))
    assert request.rope is not None
    positions = np.frombuffer(request.rope.packed, np.int32).reshape(3, -1)
    assert positions.tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    assert request.rope.delta == 0
    assert process("ab").rope is None
    assert process(with_image(PICTURE), processor(replace(SEES, rope_scaling=RopeScaling()))).rope is None


def test_a_video_has_the_time_between_its_frames_in_its_positions() -> None:
    frames = np.stack([PICTURE] * 4)
    small = {"min_pixels": 784, "max_pixels": 2 * 784}
    prompt = {"prompt": "~b", "multi_modal_data": {"video": (frames, {"fps": 1.0})}, "mm_processor_kwargs": small}
    request = process(prompt)
    assert request.prompt_token_ids == [VIDEO_TOKEN] * 4 + [98]
    positions = np.frombuffer(request.rope.packed, np.int32).reshape(3, -1)
    assert positions[0].tolist() == [0, 0, 4, 4, 2]  # two seconds, of two tokens each
    assert request.rope.delta == -2  # the next position is 3, behind five tokens
    (feature,) = request.mm_features
    assert feature.data.modality == VIDEO and feature.data.grid == (2, 2, 4)
    slower = process({**prompt, "multi_modal_data": {"video": (frames, {"fps": 0.5})}})
    assert slower.mm_features[0].data == feature.data
    assert slower.mm_features[0].content_hash != feature.content_hash  # its keys are rotated by other positions


def test_time_that_runs_ahead_of_tokens_must_fit() -> None:
    def video(fps: float) -> dict[str, Any]:
        small = {"min_pixels": 784, "max_pixels": 2 * 784}
        frames = (np.stack([PICTURE] * 4), {"fps": fps})
        return {"prompt": "~b", "multi_modal_data": {"video": frames}, "mm_processor_kwargs": small}

    request = processor().process("r", video(0.25), SamplingParams(max_tokens=100))
    assert request.rope is not None and request.rope.delta == -2  # positions up to 16; the text behind goes on from 3
    assert request.params.max_tokens == 40 - 5
    error = refusal_of(video(0.1))
    assert error.field == "multi_modal_data" and "position 40, and those below 39 fit" in error.problem
    with pytest.raises(RequestError, match="position -3"):
        verify_rope("multi_modal_data", RopePositions(np.array([0, -3, 5], np.int32).tobytes(), 0), 39)


def test_requests_with_media_travel() -> None:
    request = process(with_image(PICTURE, drawn(28, 28)))
    assert Decoder(EngineCoreRequest).decode(encode(request)) == request
    assert [one.offset for one in request.mm_features] == [1, 3]


def test_options_of_a_request_go_over_those_of_the_settings() -> None:
    large = processor(mm_processor_kwargs={"min_pixels": 8 * 784})
    assert len(process(with_image(PICTURE), large).prompt_token_ids) > 8
    small = with_image(PICTURE, mm_processor_kwargs={"min_pixels": 784})
    assert len(process(small, large).prompt_token_ids) == 4


def test_vectors_and_hidden_states_of_prompts_with_images() -> None:
    made = processor()
    pooled = made.process_pooling("r", with_image(PICTURE), PoolingParams(), cache_salt=None)
    assert [one.length for one in pooled.mm_features] == [2] and pooled.rope is not None
    params = HiddenStatesParams(positions=[1])
    request, _ = made.process_extraction("r", with_image(PICTURE, PICTURE), params)
    assert request.prompt_token_ids == [97, OTHER]
    assert [(one.offset, one.length, one.data.num_rows) for one in request.mm_features] == [(1, 1, 2)]
    assert request.rope is not None


def test_hidden_states_within_an_image_that_attends_both_ways_need_all_of_it() -> None:
    config = replace(SEES, media=replace(QWEN, attends_both_ways=True))
    request, selection = processor(config).process_extraction(
        "r", with_image(PICTURE, PICTURE), HiddenStatesParams(positions=[0, 1])
    )
    assert request.prompt_token_ids == [97, OTHER, OTHER] and [one.length for one in request.mm_features] == [2]
    assert selection.positions == [0, 1] and selection.extraction.positions == [0, 1, 2]


# ---- embeddings ----


def test_embeddings_take_the_place_of_all_tokens() -> None:
    import torch

    rows = np.arange(3 * HIDDEN_SIZE, dtype=np.float32).reshape(3, HIDDEN_SIZE)
    requests = [process({"prompt_embeds": form}, processor(model_config())) for form in (rows, torch.from_numpy(rows))]
    requests.append(process({"prompt_embeds": rows.astype(np.float64)}))
    for request in requests:
        assert request.prompt_token_ids == [0, 0, 0] and request.rope is None
        (feature,) = request.mm_features
        assert (feature.offset, feature.length, feature.data.modality, feature.data.num_rows) == (0, 3, EMBEDS, 3)
        assert feature.data.features.dtype == "float32"
        assert np.asarray(feature.data.features.view()).tolist() == rows.flatten().tolist()
    assert len({request.mm_features[0].content_hash for request in requests}) == 1
    assert process({"prompt_embeds": rows + 1}).mm_features[0].content_hash != feature.content_hash
    half = process({"prompt_embeds": torch.from_numpy(rows).to(torch.bfloat16)})
    assert half.mm_features[0].data.features.dtype == "float32"


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (np.zeros((2, HIDDEN_SIZE + 1), np.float32), f"[2, {HIDDEN_SIZE + 1}]"),
        (np.zeros((0, HIDDEN_SIZE), np.float32), "[0, "),
        (np.zeros(HIDDEN_SIZE, np.float32), "shape"),
        (np.zeros((40, HIDDEN_SIZE), np.float32), "40 rows, and at most 39"),
        (np.full((2, HIDDEN_SIZE), np.nan, np.float32), "not finite"),
        (np.full((2, HIDDEN_SIZE), 1e300), "not finite"),
        (np.zeros((2, HIDDEN_SIZE), int), "int64"),
        ([[1.0], [2.0, 3.0]], "not an array"),
        (None, "missing"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(rows: Any, part: str) -> None:
    error = refusal_of({"prompt_embeds": rows})
    assert error.field == "prompt_embeds" and part in error.problem


def test_embeddings_are_for_decoders_and_stand_alone() -> None:
    rows = np.zeros((2, HIDDEN_SIZE), np.float32)
    for config in (encoder_decoder_config(), encoder_decoder_config(NUM_MEL_BINS)):
        assert refusal_of({"prompt_embeds": rows}, processor(config)).field == "prompt_embeds"
    assert "beside prompt_embeds" in refusal_of({"prompt_embeds": rows, "prompt": "a"}).problem
    with pytest.raises(RequestError, match="has no tokens"):
        processor().process("r", {"prompt_embeds": rows}, SamplingParams(prompt_logprobs=1))


# ---- audio ----


@pytest.mark.parametrize(
    "prompt",
    [
        {"multi_modal_data": {"audio": (SOUND, 16_000)}},
        {"prompt": "", "multi_modal_data": {"audio": [(SOUND, 16_000)]}},
        {"encoder_prompt": {"multi_modal_data": {"audio": (SOUND, 16_000)}}},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (SOUND, 16_000)}}, "decoder_prompt": None},
    ],
)
def test_audio_among_media_is_the_encoders_prompt(prompt: Any) -> None:
    hears = processor(encoder_decoder_config(NUM_MEL_BINS))
    expected = process({"audio": SOUND, "sampling_rate": 16_000}, hears)
    found = process(prompt, hears)
    assert found.encoder_input == expected.encoder_input and found.prompt_token_ids == expected.prompt_token_ids
    assert found.encoder_input.features.shape == (NUM_MEL_BINS, WINDOW_FRAMES)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100.0, 48_000])
def test_audio_at_another_rate_is_the_same_sound(rate: float) -> None:
    """A tone of 400 Hz has the same features, but for the beginning and the end, where filters reach beyond it."""

    def features(rate: float) -> np.ndarray:
        tone = np.sin(2 * np.pi * 400 * np.arange(int(2 * rate)) / rate)
        prompt = {"multi_modal_data": {"audio": (tone, rate)}}
        found = process(prompt, processor(encoder_decoder_config(NUM_MEL_BINS))).encoder_input.features
        return np.asarray(found.view()).reshape(found.shape)

    found, expected = features(rate)[:, 10:190], features(16_000)[:, 10:190]
    loud = expected > expected.max() - 0.5  # of bins without sound, rounding errors are left
    assert loud.any() and np.abs(found - expected)[loud].max() < 0.02


def test_audio_at_another_rate_needs_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ratoon.models.resample", None)
    hears = processor(encoder_decoder_config(NUM_MEL_BINS))
    error = refusal_of({"multi_modal_data": {"audio": (SOUND, 8_000)}}, hears)
    assert error.field == "multi_modal_data.sampling_rate" and "PyAV" in error.problem


def test_text_beside_audio_is_the_decoders() -> None:
    hears = processor(encoder_decoder_config(NUM_MEL_BINS))
    pair = {"encoder_prompt": {"audio": SOUND, "sampling_rate": 16_000}, "decoder_prompt": "<|end|>x"}
    beside = {"prompt": "<|end|>x", "multi_modal_data": {"audio": (SOUND, 16_000)}}
    assert process(beside, hears).prompt_token_ids == process(pair, hears).prompt_token_ids


@pytest.mark.parametrize(
    ("media", "field"),
    [
        ({"audio": SOUND}, "multi_modal_data.audio"),
        ({"audio": (SOUND, 800)}, "multi_modal_data.sampling_rate"),
        ({"audio": (SOUND, 16_000), "image": PICTURE}, "multi_modal_data"),
        ({"image": PICTURE}, "multi_modal_data"),
    ],
)
def test_media_that_an_encoder_of_audio_does_not_read(media: Any, field: str) -> None:
    prompt = {"prompt": "x", "multi_modal_data": media}
    assert refusal_of(prompt, processor(encoder_decoder_config(NUM_MEL_BINS))).field == field


def test_no_audio_where_none_is_allowed() -> None:
    deaf = processor(encoder_decoder_config(NUM_MEL_BINS), limit_mm_per_prompt={"audio": 0})
    assert "none is allowed" in refusal_of({"multi_modal_data": {"audio": (SOUND, 16_000)}}, deaf).problem


# ---- what is refused, before anything is decoded ----

BROKEN = b"nothing that could be decoded"


@pytest.mark.parametrize(
    ("config", "prompt", "field", "part"),
    [
        (model_config(), with_image(BROKEN), "multi_modal_data.image[0]", "reads text alone"),
        (model_config(), {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs", "text"),
        (model_config(), {"prompt": "a", "multi_modal_data": {"audio": (SOUND, 16_000)}}, "multi_modal_data", "audio"),
        (SEES, {"prompt": "a", "multi_modal_data": {"smell": BROKEN}}, "multi_modal_data.smell", "not a known kind"),
        (SEES, {"prompt": "a", "multi_modal_data": [BROKEN]}, "multi_modal_data", "list is not a mapping"),
        (SEES, {"prompt": "a", "mm_processor_kwargs": [1]}, "mm_processor_kwargs", "list is not a mapping"),
        (SEES, with_image(BROKEN, mm_processor_kwargs={"colour": 1}), "mm_processor_kwargs.colour", "not an option"),
        (SEES, with_image(BROKEN, mm_processor_kwargs={"max_pixels": "x"}), "mm_processor_kwargs", "max_pixels"),
        (SEES, with_image(*[BROKEN] * 9), "multi_modal_data.image[8]", "9 of the kind image, and at most 8"),
        (SEES, with_image(BROKEN, BROKEN, prompt={"prompt": "a<|other|>"}), "prompt", "has 1 placeholders"),
        (SEES, with_image(BROKEN, prompt={"prompt_token_ids": [97]}), "prompt_token_ids", "has 0 placeholders"),
        (SEES, {"prompt": "a<|other|>"}, "prompt", "has 1 placeholders of the kind image, and 0 are given"),
        (SEES, {"prompt": "~" * 50, "multi_modal_data": {"video": BROKEN}}, "prompt", "at most 39"),
        (
            replace(SEES, media=replace(QWEN, video_token_id=None)),
            {"prompt": "~", "multi_modal_data": {"video": BROKEN}},
            "multi_modal_data.video",
            "does not read",
        ),
    ],
)  # fmt: skip
def test_what_can_be_refused_early_is(config, prompt: Any, field: str, part: str, monkeypatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was decoded")

    monkeypatch.setattr("ratoon.media.processor.preprocess_in_child", never)
    monkeypatch.setattr("ratoon.media.processor.read_decoded", never)
    error = refusal_of(prompt, processor(config))
    assert error.field == field and part in error.problem


def test_other_limits() -> None:
    none = processor(limit_mm_per_prompt={"image": 0})
    assert "at most 0" in refusal_of(with_image(PICTURE), none).problem
    two = processor(limit_mm_per_prompt={"video": 2})
    video = [PICTURE, PICTURE]
    request = process({"prompt": "~~", "multi_modal_data": {"video": [video, video]}}, two)
    assert len(request.mm_features) == 2
    assert "56 × 28 pixels" in refusal_of(with_image(PICTURE), processor(max_image_pixels=1000)).problem
    assert (
        "2 frames"
        in refusal_of({"prompt": "~", "multi_modal_data": {"video": video}}, processor(max_video_frames=1)).problem
    )
    assert "more than 10 B" in refusal_of(with_image(b"x" * 11), processor(max_media_bytes=10)).problem


def test_an_expanded_prompt_must_fit() -> None:
    error = refusal_of(with_image(drawn(28 * 40, 28)))
    assert error.field == "prompt" and "42 tokens" in error.problem


@pytest.mark.parametrize("data", [BROKEN, "/no/such/file", 7, object(), [1, 2]])
def test_what_is_no_image_is_named(data: Any) -> None:
    assert refusal_of(with_image(PICTURE, data)).field == "multi_modal_data.image[1]"
    named = NamedMedia(data, "messages[0].content[1].image_url")
    assert refusal_of(with_image(PICTURE, named)).field == named.field


# ---- where it runs ----


def test_prompts_with_media_take_long() -> None:
    assert takes_long(with_image(BROKEN)) and takes_long({"prompt_embeds": [[0.0]]})
    assert takes_long({"prompt": "a", "multi_modal_data": {"audio": (SOUND, 16_000)}})
    assert not takes_long({"prompt": "a", "multi_modal_data": {}})


@on_event_loop
async def test_media_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_source()
    source.config = SEES
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: source)
    threads = []
    from ratoon.media import processor as module

    def note_thread(*arguments: Any) -> Any:
        threads.append(current_thread())
        return decode(*arguments)

    decode = module.read_decoded
    monkeypatch.setattr(module, "read_decoded", note_thread)
    client = FakeAsyncClient()
    async with AsyncLLM("fake", client=client, limit_mm_per_prompt={"image": 1}) as llm:
        outputs = [output async for output in llm.generate(with_image(PICTURE), SamplingParams(max_tokens=2))]
        assert outputs[-1].prompt == "a<|other|>b" and outputs[-1].prompt_token_ids == [97, OTHER, OTHER, 98]
        assert [len(one.mm_features) for one in client.core.added] == [1]
        assert len(threads) == 1 and threads[0] is not main_thread()
        with pytest.raises(RequestError, match="at most 1 are allowed"):
            [output async for output in llm.generate(with_image(PICTURE, PICTURE), SamplingParams(max_tokens=2))]


# ---- settings ----


def test_settings_of_media() -> None:
    config = engine_config("m", limit_mm_per_prompt='{"image": 3}', mm_processor_kwargs={"max_pixels": 5}).media
    assert (config.limit_of(IMAGE), config.limit_of(VIDEO)) == (3, 1) and config.mm_processor_kwargs["max_pixels"] == 5
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs\.colour"):
        processor(mm_processor_kwargs={"colour": 1})
    for wrong in ({"image": -1}, {"smell": 1}, {"image": True}, {"image": "2"}, 5):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
            engine_config("m", limit_mm_per_prompt=wrong)
