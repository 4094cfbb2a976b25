"""Requests of every kind to one engine, and what its answers are compared by: the same requests for ranks, stages,
replicas, front ends and actors of a cluster, which all answer as one worker does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, SamplingParams
from tests.golden.encoder_engines import source_of
from tests.golden.grammar_engines import FAMILY, NAMES_AND_VALUES, grammar_folder
from tests.golden.test_encoder_decoder_api import INPUTS

PROMPTS = [[5, 9, 2, 40, 7], [3] * 11, list(range(30))]
SUFFIX = [7, 8]  # of a continuation
INSIDE = 7  # tokens of its parent that another one begins with
LAYERS = [0, 1, -1]
TEXTS = ["one", "two", "three"]  # before structured output
SCHEMA = NAMES_AND_VALUES
TOLERANCE = 1e-5  # of logits in float32: the order of sums is what differs


def open_engine(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "num_blocks": 96}
    return LLM(str(folder), **(common | settings))


class Answers(NamedTuple):
    tokens: dict[str, list[Any]]  # which are the same however the work is divided
    numbers: dict[str, np.ndarray]  # which are as exact as sums in another order allow

    def check(self, right: Answers, tolerance: float = TOLERANCE) -> None:
        """With a tolerance of 0, numbers are compared to the bit."""
        for name, tokens in right.tokens.items():
            assert self.tokens[name] == tokens, name
        for name, numbers in right.numbers.items():
            np.testing.assert_allclose(self.numbers[name], numbers, atol=tolerance, rtol=0, err_msg=name)


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
    child = llm.generate_continuation(root, SUFFIX, greedy(6))
    assert child.num_cached_tokens == len(PROMPTS[0]) + 5, "the lease kept all but the last token"
    note("continued", [root, child])
    note("continued inside", [llm.generate_continuation(root, [1], greedy(3), at=INSIDE)])
    states = HiddenStatesParams(positions="all", layers=LAYERS)
    numbers["hidden states"] = np.asarray(llm.extract_hidden_states(PROMPTS[2], states).tensor)
    numbers["states of a request"] = np.asarray(llm.extract_hidden_states(child, states).tensor)
    llm.forget(root.request_id)
    asked = [SamplingParams(seed=seed, max_tokens=60, structured_output={"json_schema": SCHEMA}) for seed in range(3)]
    note("structured", llm.generate(TEXTS, asked, progress=False))
    return Answers(tokens, numbers)


@functools.cache
def right_answers(**settings: Any) -> Answers:
    """Of one worker in this process."""
    with open_engine(grammar_folder(FAMILY), **settings) as llm:
        return ask_everything(llm)


def answers(llm: LLM, prompts: list[Any]) -> list[Any]:
    """The tokens of greedy, drawn and searched texts."""
    drawn = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True)
    found: list[Any] = []
    for params in (greedy(8), drawn):
        for output in llm.generate(prompts, params, progress=False):
            assert output.error is None
            found += [list(one.token_ids) for one in output.outputs]
    for output in llm.beam_search(prompts[:1], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)):
        found += [list(one.token_ids) for one in output.outputs]
    return found


def encoder_prompts(family: str) -> list[Any]:
    """Inputs of a small encoder-decoder model: token ids, or features of audio."""
    if family != "whisper":
        return INPUTS[:3]
    features = [source_of(family, 0, seed).for_oracle()[0].numpy() for seed in range(2)]
    return [{"encoder_prompt": {"features": each}} for each in features]
