"""Settings that change how a real engine is built, on a small random model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM, SamplingParams
from ratoon.layers.native import library
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


@pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")
def test_kernels_are_measured_at_the_first_start_and_answers_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATOON_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("ratoon.layers.native_measurement.LIMIT", 60)
    monkeypatch.setattr("ratoon.layers.native_measurement.STEADY", 1e9)  # on a busy machine, too
    folder = str(model_folder("qwen3 untied with heads that the native kernels take"))

    def start(**settings: Any) -> tuple[set[str], list[list[int]]]:
        """Where the choices of kernels came from, and answers."""
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with LLM(folder, skip_tokenizer=True, num_blocks=64, quantization="int8", **settings) as llm:
            outputs = llm.generate([[5 + i, 9, 2 + i] for i in range(11)], params)
            choices = {one["choice"] for one in llm.describe()["kernel_choices"]}
        return choices, [list(output.outputs[0].token_ids) for output in outputs]

    def lines(words: object) -> list[str]:
        return [message for message in caplog.messages if str(words) in message]

    with caplog.at_level(logging.WARNING, "ratoon"):
        fixed, answers = start(measure_kernels=False)
        assert fixed == {"default"} and not list(tmp_path.iterdir())
        (line,) = lines("32 does not divide the inputs")  # of a layer, which stays in floats
        assert "model.layers.0.mlp.down_proj.weight" in line
        assert start() == ({"measured"}, answers)
        (file,) = tmp_path.iterdir()
        assert start() == ({"cached"}, answers) and not lines(file)
        file.write_bytes(file.read_bytes()[:99])
        assert start() == ({"measured"}, answers) and len(lines(file)) == 1
        assert start() == ({"cached"}, answers) and len(lines(file)) == 1
