"""LLM takes prompts with images and embeddings, alone and in a batch with others."""

from __future__ import annotations

from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.errors import RequestError
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.media import processor
from tests.golden.media_oracle import drawn
from tests.unit.engine.fakes import HIDDEN_SIZE, OTHER

VISION = VisionConfig(8, 8, 1, 1, patch_size=14, temporal_patch_size=2, merge_size=2)


def test_prompts_of_a_batch_have_their_own_media(client, source) -> None:
    source.config = replace(source.config, media=MediaConfig("qwen2_vl", VISION, image_token_id=OTHER))
    image = {"prompt": "<|other|>", "multi_modal_data": {"image": drawn(28, 28)}}
    embeds = {"prompt_embeds": np.zeros((2, HIDDEN_SIZE), np.float32)}
    with LLM("fake", mm_processor_kwargs={"min_pixels": 784}) as llm:
        outputs = llm.generate([image, "ab", embeds], SamplingParams(max_tokens=1))
        assert [output.prompt_token_ids for output in outputs] == [[OTHER], [97, 98], [0, 0]]
        assert [output.prompt for output in outputs] == ["<|other|>", "ab", None]
        assert [len(request.mm_features) for request in client.added] == [1, 0, 1]
        assert llm.generate(image, SamplingParams(max_tokens=1))[0].prompt_token_ids == [OTHER]
        with pytest.raises(RequestError, match=r"multi_modal_data\.image"):
            llm.generate({**image, "multi_modal_data": {"image": b"x"}}, SamplingParams(max_tokens=1))


def test_prompts_with_images_are_read_in_threads_and_stay_in_order(client, source, monkeypatch) -> None:
    """The first that can't be read is the one that is named, and none is started."""
    source.config = replace(source.config, media=MediaConfig("qwen2_vl", VISION, image_token_id=OTHER))
    monkeypatch.setattr("ratoon.api.batches.usable_cores", lambda: 4)
    threads = set()
    read = processor.read_decoded

    def note_thread(*arguments: Any) -> Any:
        threads.add(current_thread())
        return read(*arguments)

    monkeypatch.setattr(processor, "read_decoded", note_thread)
    sizes = [28 * (index % 5 + 1) for index in range(12)]
    images = [{"prompt": "<|other|>", "multi_modal_data": {"image": drawn(28, size)}} for size in sizes]
    broken = {"prompt": "<|other|>", "multi_modal_data": {"image": np.zeros((2, 2, 2, 2, 2))}}
    with LLM("fake", mm_processor_kwargs={"min_pixels": 784}) as llm:
        outputs = llm.generate([*images, "ab"], SamplingParams(max_tokens=1))
        assert [len(output.prompt_token_ids) for output in outputs] == [*[size // 28 for size in sizes], 2]
        assert [output.request_id for output in outputs] == [*map(str, range(13))]
        assert main_thread() not in threads
        with pytest.raises(RequestError) as caught:
            llm.generate([*images[:3], broken, images[0], broken], SamplingParams(max_tokens=1))
        assert caught.value.field.startswith("prompts[3].")
        assert len(client.added) == 13
