"""Nothing but data passes between the engine and its workers: with plans, results and calls that go through frames as
between processes, every kind of request has the answers that it has without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.core.params import HiddenStatesParams
from tests.framed_executor import NAME, FramedExecutor
from tests.golden.engines import engine
from tests.golden.grammar_engines import grammar_engine
from tests.golden.test_encoder_decoder_api import INPUTS, greedy
from tests.golden.test_encoder_decoder_api import engine as encoder_engine

PROMPTS = [[5, 9, 2, 40, 7], [3] * 11]
FAMILY = "qwen2 with windows in its later layers"


def executor_of(llm: LLM) -> FramedExecutor:
    return llm._client.core.executor  # type: ignore[no-any-return]


def answers(llm: LLM) -> list[Any]:
    """Of requests of every kind, some of them together."""
    some = SamplingParams(n=2, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    each = [some, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)]
    found: list[Any] = []
    for output in llm.generate(PROMPTS, each, progress=False):
        found.append([(one.token_ids, one.logprobs) for one in output.outputs])
        found.append(output.prompt_logprobs)
    (parent,) = llm.generate(PROMPTS[:1], each[1:], progress=False)
    child = llm.generate_continuation(parent.request_id, [8, 8], each[1])
    found.append(child.outputs[0].token_ids)
    (beams,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    found.append([(one.token_ids, one.score) for one in beams.outputs])
    states = llm.extract_hidden_states(PROMPTS[1], HiddenStatesParams(positions="all", layers=[0, 1, -1]))
    found.append(np.asarray(states.tensor).tolist())
    return found


def test_every_kind_of_request_is_answered_across_frames_as_without() -> None:
    with engine(FAMILY) as llm:
        expected = answers(llm)
    with engine(FAMILY, executor=NAME) as llm:
        assert answers(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == expected
        assert {"sleep", "wake_up"} <= set(executor_of(llm).calls)


def test_grammars_are_prepared_across_frames() -> None:
    asked = [SamplingParams(structured_output={"regex": regex}, seed=1, max_tokens=20) for regex in ("[ab]{4}", "c+d")]

    def texts(**settings: Any) -> list[str]:
        with grammar_engine(**settings) as llm:
            found = [output.outputs[0].text for output in llm.generate(["hello"] * 2, asked, progress=False)]
            assert not settings or executor_of(llm).calls.count("prepare_grammar") == 2
            return found

    assert texts(executor=NAME) == texts()


def test_a_profile_is_made_across_frames(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATOON_PROFILE_DIR", str(tmp_path))
    with engine(FAMILY, executor=NAME) as llm:
        llm.start_profile()
        llm.generate(PROMPTS, SamplingParams(max_tokens=2), progress=False)
        text = Path(llm.stop_profile()).read_bytes()
    assert b"execute_model" in text and b"schedule" in text  # of both threads


def test_encoder_inputs_travel_across_frames() -> None:
    def tokens(**settings: Any) -> list[list[int]]:
        with encoder_engine("bart", **settings) as llm:
            outputs = llm.generate(INPUTS[:2], greedy(), progress=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens(executor=NAME) == tokens()
