"""Settings that change how a real engine is built, on a small random model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ratoon import LLM, SamplingParams
from tests.golden.engines import model_folder
from tests.unit.models.model_files import LLAMA_CONFIG


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return tmp_path


def test_random_weights_need_a_config_and_nothing_else(config_only: Path) -> None:
    with LLM(str(config_only), load_format="dummy", skip_tokenizer=True, num_blocks=16) as llm:
        outputs = [llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)) for _ in "ab"]
    assert [len(output.outputs[0].token_ids) for (output,) in outputs] == [4, 4]


def test_the_slow_attention_is_never_taken_silently(caplog: pytest.LogCaptureFixture) -> None:
    folder = str(model_folder("qwen3 untied with heads that the native kernels take"))
    with caplog.at_level(logging.WARNING, "ratoon"):
        LLM(folder, skip_tokenizer=True, num_blocks=16).close()
        assert not caplog.records
        LLM(folder, skip_tokenizer=True, num_blocks=16, block_size=8).close()
    assert "block_size must be a multiple of 16, not 8" in caplog.text


def test_chunked_prefill_can_be_turned_off() -> None:
    folder = str(model_folder("qwen3 untied with heads that the native kernels take"))
    with LLM(
        folder, skip_tokenizer=True, enable_chunked_prefill=False, max_num_batched_tokens=16, num_blocks=16
    ) as llm:
        (output,) = llm.generate([5] * 16, SamplingParams(temperature=0, max_tokens=2))
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match="17") as caught:
            llm.generate([5] * 17, SamplingParams(temperature=0, max_tokens=2))
    assert "16" in str(caught.value)
