"""Settings of speculative decoding: sources by priority, and vLLM's object for the same."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core import speculation
from ratoon.core.config import fit_to_device
from ratoon.core.errors import ConfigError
from ratoon.core.settings import engine_config
from ratoon.core.speculation import DraftSource, SpeculationConfig


@pytest.fixture
def all_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "SUPPORTED", tuple(speculation.NAMES_A_FILE))


def test_nothing_is_drafted_unless_it_is_asked_for() -> None:
    assert engine_config("m").speculation.sources == ()
    assert engine_config("m", speculate="off").speculation.sources == ()


def test_a_draft_is_as_long_as_kernels_of_the_device_like_it_unless_it_is_set() -> None:
    on_cpu, on_gpu = (fit_to_device(engine_config("m"), gpu_bytes).speculation for gpu_bytes in (0, 8 << 30))
    assert (on_cpu.most_tokens, on_gpu.most_tokens) == (15, 7)
    for gpu_bytes in (0, 8 << 30):
        assert fit_to_device(engine_config("m", speculate_tokens=4), gpu_bytes).speculation.most_tokens == 4


def test_sources_keep_their_order_and_their_files() -> None:
    config = SpeculationConfig(speculate="head:/models/a:b, ngram,draft:org/small,roots")
    expected = (DraftSource("head", "/models/a:b"), DraftSource("ngram"), DraftSource("draft", "org/small"))
    assert config.sources == (*expected, DraftSource("roots"))
    assert [str(one) for one in config.sources] == ["head:/models/a:b", "ngram", "draft:org/small", "roots"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculate": "ngrams"}, "speculate: 'ngrams' is unknown; ngram, roots, draft:MODEL or head:PATH"),
        ({"speculate": "ngram,off"}, "speculate: 'off' is unknown"),
        ({"speculate": "ngram,"}, "speculate: '' is unknown"),
        ({"speculate": "ngram:3"}, "speculate: 'ngram' has no path"),
        ({"speculate": "draft"}, "speculate: 'draft' names no model or file"),
        ({"speculate": "ngram,ngram"}, "speculate: 'ngram' is there twice; each source once"),
        ({"speculate": True}, "speculate: True is not text"),
        ({"speculate_tokens": 0}, "speculate_tokens: 0 is out of range; 1 to 64"),
        (
            {"speculate_ngram_min": 5, "speculate_ngram_max": 4},
            "speculate_ngram_min: 5 is more than speculate_ngram_max (4)",
        ),
        ({"speculate_min_acceptance": 1.5}, "speculate_min_acceptance: 1.5 is out of range; 0 (always used) to 1"),
        ({"draft_acceptance": "typical"}, "draft_acceptance: 'typical' is unknown; exact or rejection"),
        ({"speculative_config": "[]"}, "speculative_config: [] is not an object"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config.method: 'medusa' is not supported"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "speculative_config.method: None is not supported"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative_config.model: None names no model"),
        ({"speculative_config": {"method": "ngram", "depth": 3}}, "speculative_config.depth: is not supported"),
        (
            {"speculative_config": {"method": "ngram"}, "speculate": "ngram"},
            "speculative_config: and speculate are the same setting; one of the two",
        ),
    ],
)
def test_a_wrong_value_names_its_setting(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine_config("m", **settings)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5}, {"speculate": "ngram", "num_tokens": 5}),
        ('{"model": "[ngram]", "prompt_lookup_max": 4}', {"speculate": "ngram", "ngram_min": 4, "ngram_max": 4}),
        (
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "disable_by_batch_size": 8},
            {"speculate": "ngram", "ngram_min": 2, "ngram_max": 5, "max_seqs": 8},
        ),
        ({"method": "suffix"}, {"speculate": "roots,ngram"}),
        ({"model": "org/small", "draft_tensor_parallel_size": 1}, {"speculate": "draft:org/small"}),
        ({"method": "eagle3", "model": "org/head"}, {"speculate": "head:org/head"}),
        ({}, {}),
        (None, {}),
    ],
)
def test_the_object_of_vllm_says_the_same(given: Any, expected: dict[str, Any], all_sources: None) -> None:
    assert engine_config("m", speculative_config=given).speculation == SpeculationConfig(**expected)
