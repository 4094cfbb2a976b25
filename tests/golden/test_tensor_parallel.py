"""Two and four tensor-parallel ranks, each a process, answer requests of every kind as one worker does."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from gguf import GGMLQuantizationType as Type

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, SamplingParams
from ratoon.distributed.multiproc import MultiprocExecutor
from ratoon.layers.native import library
from tests.golden.encoder_engines import source_of
from tests.golden.engines import scheduler_of
from tests.golden.grammar_engines import FAMILY, NAMES_AND_VALUES, grammar_folder
from tests.golden.test_encoder_decoder_api import INPUTS, folder_of
from tests.golden.test_ranks import answers
from tests.unit.models.test_quantised_ranks import quantised_file

PROMPTS = [[5, 9, 2, 40, 7], [3] * 11, list(range(30))]
TOLERANCE = 1e-5  # of logits in float32: the order of sums is what differs


def open_engine(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "num_blocks": 96}
    return LLM(str(folder), **(common | settings))


class Answers(NamedTuple):
    tokens: dict[str, list[Any]]  # which are the same on any number of ranks
    numbers: dict[str, np.ndarray]  # which are as exact as sums in another order allow


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **changes)


def ask_everything(llm: LLM) -> Answers:
    tokens: dict[str, list[Any]] = {}
    numbers: dict[str, np.ndarray] = {}

    def note(name: str, outputs: Any) -> None:
        assert [output.error for output in outputs] == [None] * len(outputs)
        tokens[name] = [list(one.token_ids) for output in outputs for one in output.outputs]

    # Steps of one shape again and again: from the second on they are recorded.
    note("greedy", llm.generate(PROMPTS, greedy(24), progress=False))
    note("drawn", llm.generate(PROMPTS, SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True), progress=False))
    note("beams", llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)))
    scored = llm.generate(PROMPTS, greedy(4, logprobs=5, prompt_logprobs=0), progress=False)
    note("with scores", scored)
    numbers["logprobs"] = np.array(
        [[entry.logprob for entry in place.values()] for out in scored for place in out.outputs[0].logprobs]
    )
    numbers["of the prompt"] = np.array(
        [entry.logprob for out in scored for place in out.prompt_logprobs[1:] for entry in place.values()]
    )
    (root,) = llm.generate(PROMPTS[:1], greedy(6), retain_kv=60, progress=False)
    child = llm.generate_continuation(root, [7, 8], greedy(6))
    assert child.num_cached_tokens == len(PROMPTS[0]) + 5, "the lease kept all but the last token"
    note("continued", [root, child])
    note("continued inside", [llm.generate_continuation(root, [1], greedy(3), at=7)])
    states = HiddenStatesParams(positions="all", layers=[0, 1, -1])
    numbers["hidden states"] = np.asarray(llm.extract_hidden_states(PROMPTS[2], states).tensor)
    numbers["states of a request"] = np.asarray(llm.extract_hidden_states(child, states).tensor)
    llm.forget(root.request_id)
    schema = {"json_schema": NAMES_AND_VALUES}
    asked = [SamplingParams(seed=seed, max_tokens=60, structured_output=schema) for seed in range(3)]
    note("structured", llm.generate(["one", "two", "three"], asked, progress=False))
    return Answers(tokens, numbers)


@functools.cache
def expected() -> Answers:
    with open_engine(grammar_folder(FAMILY)) as llm:
        return ask_everything(llm)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {}),
        # More ranks than key-value heads, and a vocabulary of 97: both are on some ranks alone
        (4, {"max_steps_in_flight": 3}),
        pytest.param(2, {"max_steps_in_flight": 1}, marks=pytest.mark.full),
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
    whole = expected()
    assert found.tokens == whole.tokens
    for name, numbers in whole.numbers.items():
        np.testing.assert_allclose(found.numbers[name], numbers, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
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
    prompts: list[Any] = INPUTS[:3]
    if family == "whisper":
        features = [source_of(family, 0, seed).for_oracle()[0].numpy() for seed in range(2)]
        prompts = [{"encoder_prompt": {"features": each}} for each in features]
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
