"""Drafts on tensor-parallel ranks and on stages of a pipeline: answers are those of one worker without drafts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import LLM
from tests.golden.grammar_engines import forced_texts
from tests.golden.marks import exact_on_cpu
from tests.golden.test_speculation import LLAMA, PARAMS, SETTINGS, ask, engine, num_checked

RANKS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
pytestmark = [exact_on_cpu, pytest.mark.slow]


def tokens_of(llm: LLM) -> dict[str, Any]:
    return {
        name: [(tokens, why) for tokens, why, *_ in ask(llm, PARAMS[name])]
        for name in ("greedy", "drawn", "choices", "penalised", "stopped")
    }


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.one_in(2)
def test_ranks_answer_as_one_worker_without_drafts(ranks: dict[str, Any]) -> None:
    with engine(LLAMA) as llm:
        expected = tokens_of(llm)
    with engine(LLAMA, **ranks, **SETTINGS) as llm:
        assert tokens_of(llm) == expected
        num_drafted, num_accepted = num_checked(llm)
        assert 0 < num_accepted < num_drafted


def test_structured_texts_of_stages_are_the_same() -> None:
    right = forced_texts(others=True, **RANKS["two stages"])
    assert forced_texts(others=True, **RANKS["two stages"], **SETTINGS).answers == right.answers
