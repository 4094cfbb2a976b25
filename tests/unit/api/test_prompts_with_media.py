"""LLM takes prompts with images and embeddings, alone and in a batch with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.errors import RequestError
from ratoon.core.media import MediaConfig, VisionConfig
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
