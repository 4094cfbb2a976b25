"""Two and four tensor-parallel ranks, each a process, answer requests of every kind as one worker does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from gguf import GGMLQuantizationType as Type

from ratoon.distributed.multiproc import MultiprocExecutor
from ratoon.layers.native import library
from tests.golden.engines import scheduler_of
from tests.golden.every_kind import answers, ask_everything, encoder_prompts, greedy, open_engine, right_answers
from tests.golden.grammar_engines import FAMILY, grammar_folder
from tests.golden.test_encoder_decoder_api import folder_of
from tests.unit.models.test_quantised_ranks import quantised_file


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {}),
        # More ranks than key-value heads, and a vocabulary of 97: both are on some ranks alone
        (4, {"max_steps_in_flight": 3}),
        pytest.param(2, {"max_steps_in_flight": 1}, marks=pytest.mark.full),
        pytest.param(2, {"pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.slow
def test_ranks_answer_as_one_worker(world_size: int, settings: dict[str, Any]) -> None:
    with open_engine(grammar_folder(FAMILY), tensor_parallel_size=world_size, **settings) as llm:
        assert isinstance(llm._client.core.executor, MultiprocExecutor)
        found = ask_everything(llm)
        llm.sleep(2)
        llm.wake_up()
        awake = ask_everything(llm)
        blocks = scheduler_of(llm).kv_cache
        assert blocks.num_free_blocks == blocks.num_usable_blocks
    found.check(right_answers())
    assert awake.tokens == found.tokens
    for name, numbers in found.numbers.items():
        assert np.array_equal(awake.numbers[name], numbers), f"{name}: the same bits, in whatever steps"


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        ("bart", 2),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [("t5", 4), ("marian", 2), ("whisper", 2)]),
    ],
)
@pytest.mark.slow
def test_ranks_of_a_model_with_an_encoder_answer_as_one_worker(family: str, world_size: int) -> None:
    prompts = encoder_prompts(family)
    with open_engine(folder_of(family), skip_tokenizer=True) as llm:
        whole = answers(llm, prompts)
    with open_engine(folder_of(family), skip_tokenizer=True, tensor_parallel_size=world_size) as llm:
        assert answers(llm, prompts) == whole


@pytest.mark.skipif(library() is None, reason="without kernels, weights become floats")
@pytest.mark.parametrize(
    "kind", [Type.Q4_0, pytest.param(Type.Q8_0, marks=pytest.mark.full)], ids=lambda kind: kind.name
)
@pytest.mark.slow
def test_ranks_with_quantised_weights_answer_as_one_worker(kind: Type, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits: a number that lies between two of them may go the other way with another order
    of sums, which is far more than the sums themselves differ by."""
    path = quantised_file(tmp_path / "model.gguf", kind)
    found = []
    for settings in ({}, {"tensor_parallel_size": 2}):
        with open_engine(path, skip_tokenizer=True, **settings) as llm:
            params = greedy(1, prompt_logprobs=0)
            outputs = llm.generate([list(range(1, 40)), [7] * 20], params, progress=False)
            found.append(
                [entry.logprob for out in outputs for place in out.prompt_logprobs[1:] for entry in place.values()]
            )
            assert kind.name in [one["format"] for one in llm._client.core.executor.facts.weight_formats]
    np.testing.assert_allclose(found[1], found[0], atol=2e-2 * max(map(abs, found[0])), rtol=0)
