"""Log-probabilities as callers read them."""

from __future__ import annotations

import pytest

from ratoon.core.outputs import LogprobsLists, PromptLogprobsChunk
from ratoon.engine.output.logprobs import PromptLogprobsCollector, SampleLogprobsCollector
from tests.unit.engine.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()


def rows(*entries: tuple[list[int], list[float], int]) -> LogprobsLists:
    return LogprobsLists(
        [ids for ids, _, _ in entries], [values for _, values, _ in entries], [rank for *_, rank in entries]
    )


def test_a_sampled_token_among_the_top_ones_appears_once_with_its_rank():
    collector = SampleLogprobsCollector(TOKENIZER)
    collector.add(rows(([98, 97, 98], [-1.5, -0.5, -1.5], 2)), 1)
    (position,) = collector.logprobs
    assert {token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in position.items()} == {
        98: (-1.5, 2, "b"),
        97: (-0.5, 1, "a"),
    }


def test_a_sampled_token_outside_the_top_keeps_its_own_rank():
    collector = SampleLogprobsCollector(TOKENIZER)
    collector.add(rows(([99, 97, 98], [-9.0, -0.5, -1.5], 40)), 1)
    assert {token: entry.rank for token, entry in collector.logprobs[0].items()} == {99: 40, 97: 1, 98: 2}


def test_the_sum_counts_sampled_tokens_that_were_kept():
    collector = SampleLogprobsCollector(None)
    collector.add(rows(([1], [-1.0], 1), ([2], [-2.0], 1), ([3], [-4.0], 1)), 2)
    assert collector.cumulative_logprob == pytest.approx(-3.0)
    assert [list(position) for position in collector.logprobs] == [[1], [2]]
    assert collector.logprobs[0][1].decoded_token is None


def test_prompt_logprobs_begin_with_none_and_join_over_chunks():
    collector = PromptLogprobsCollector(TOKENIZER)
    collector.add([PromptLogprobsChunk(1, rows(([97], [-1.0], 3), ([98], [-2.0], 1)))])
    collector.add([PromptLogprobsChunk(3, rows(([99], [-3.0], 1)))])
    assert collector.logprobs[0] is None
    assert [next(iter(position)) for position in collector.logprobs[1:]] == [97, 98, 99]
    assert collector.logprobs[1][97].rank == 3


def test_prompt_rows_that_come_again_after_a_preemption_are_not_doubled():
    collector = PromptLogprobsCollector(None)
    collector.add([PromptLogprobsChunk(1, rows(([1], [-1.0], 1), ([2], [-1.0], 1)))])
    collector.add([PromptLogprobsChunk(1, rows(([1], [-1.0], 1), ([2], [-1.0], 1), ([3], [-1.0], 1)))])
    assert [next(iter(position)) for position in collector.logprobs[1:]] == [1, 2, 3]
