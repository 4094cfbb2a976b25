"""Beams on the runner, driven by plans that are written by hand: rows move as it says, candidates are the best."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, BeamStep, BlockCopy, SchedulerOutput
from tests.golden.tiny_models import TinyModel
from tests.unit.execution.test_model_runner import (
    BACKENDS,
    BLOCK_SIZE,
    LLAMA,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    Driver,
    oracle_greedy,
    token_of,
)

TAIL = len(PROMPT) // BLOCK_SIZE  # the column that the prompt ends in


def oracle_candidates(
    tiny: TinyModel, texts: list[list[int]], scores: list[float], count: int
) -> list[tuple[float, int, int]]:
    rows = [torch.log_softmax(tiny.oracle_logits(text)[-1].double(), -1) for text in texts]
    total = torch.stack([row + score for row, score in zip(rows, scores)])
    values, places = total.flatten().topk(count)
    return [(v, p // total.shape[1], p % total.shape[1]) for v, p in zip(values.tolist(), places.tolist())]


def assert_candidates(found: BeamCandidates, expected: list[tuple[float, int, int]]) -> None:
    assert list(zip(found.beams, found.token_ids)) == [(beam, token) for _, beam, token in expected]
    assert found.scores == pytest.approx([score for score, _, _ in expected], abs=1e-4)


def begin(driver: Driver, num_candidates: int = 6) -> ModelRunnerOutput:
    """The prompt of search s, in blocks from 1 on, and its first candidates."""
    first = BeamStep("s", num_candidates=num_candidates, scores=[0.0])
    return driver.step(new=[driver.new("s", PROMPT, 1)], sampled=[], beam_steps=[first])


def first_beams(driver: Driver, tokens: list[int], scores: list[float], *blocks: int) -> ModelRunnerOutput:
    """Beams behind the prompt, each in a copy of the block that it ends in."""
    groups = range(len(driver.groups))
    copies = [BlockCopy("s", group, TAIL, 1 + TAIL + 10 * group, b + 10 * group) for group in groups for b in blocks]
    step = BeamStep(
        "s",
        num_tokens=1,
        num_computed_tokens=len(PROMPT),
        parents=[0] * len(tokens),
        token_ids=tokens,
        first_columns=[TAIL] * len(groups),
        block_ids=tuple([block + 10 * group for block in blocks] for group in groups),
        num_candidates=6,
        scores=scores,
    )
    return driver.step(beam_steps=[step], block_copies=copies, total_num_scheduled_tokens=len(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_beams_go_on_from_the_parents_that_the_plan_names(tiny: TinyModel, backend: str) -> None:
    driver = Driver(tiny, backend)
    output = begin(driver)
    assert output.req_ids == []
    assert_candidates(output.candidates["s"], oracle_candidates(tiny, [PROMPT], [0.0], 6))
    output = first_beams(driver, [3, 4, 5], [-1.0, -1.5, -0.5], 5, 6, 7)
    texts = [[*PROMPT, token] for token in (3, 4, 5)]
    assert_candidates(output.candidates["s"], oracle_candidates(tiny, texts, [-1.0, -1.5, -0.5], 6))
    # Beam 1 has two children, beam 2 one, beam 0 none; its block goes to the second child.
    groups = range(len(driver.groups))
    step = BeamStep(
        "s",
        num_tokens=1,
        num_computed_tokens=len(PROMPT) + 1,
        parents=[2, 1, 1],
        token_ids=[8, 9, 10],
        first_columns=[TAIL] * len(groups),
        block_ids=tuple([7 + 10 * group, 6 + 10 * group, 5 + 10 * group] for group in groups),
        num_candidates=6,
        scores=[-2.0, -2.5, -3.0],
    )
    copies = [BlockCopy("s", group, TAIL, 6 + 10 * group, 5 + 10 * group) for group in groups]
    output = driver.step(beam_steps=[step], block_copies=copies, total_num_scheduled_tokens=3)
    texts = [[*PROMPT, 5, 8], [*PROMPT, 4, 9], [*PROMPT, 4, 10]]
    assert_candidates(output.candidates["s"], oracle_candidates(tiny, texts, [-2.0, -2.5, -3.0], 6))
    # And on in place: the tables stay as they are, two beams swap.
    step = BeamStep(
        "s",
        num_tokens=1,
        num_computed_tokens=len(PROMPT) + 2,
        parents=[1, 0],
        token_ids=[11, 12],
        num_candidates=4,
        scores=[-4.0, -4.1],
    )
    output = driver.step(beam_steps=[step], total_num_scheduled_tokens=2)
    texts = [[*PROMPT, 4, 9, 11], [*PROMPT, 5, 8, 12]]
    assert_candidates(output.candidates["s"], oracle_candidates(tiny, texts, [-4.0, -4.1], 4))
    assert driver.runner.num_computed_tokens == len(PROMPT) + 3 + 3 + 2


def test_beams_that_lost_their_memory_catch_up_in_parts() -> None:
    driver = Driver()
    begin(driver)
    catch_up = BeamStep(
        "s",
        num_tokens=2,
        num_computed_tokens=len(PROMPT),
        parents=[0, 0],
        token_ids=[3, 4, 5, 6, 7, 8],
        first_columns=[TAIL],
        block_ids=([5, 6],),
        scores=[-1.0, -2.0],
    )
    copies = [BlockCopy("s", 0, TAIL, 1 + TAIL, block) for block in (5, 6)]
    output = driver.step(beam_steps=[catch_up], block_copies=copies, total_num_scheduled_tokens=4)
    assert output == ModelRunnerOutput()
    rest = BeamStep("s", 1, len(PROMPT) + 2, num_candidates=4, scores=[-1.0, -2.0])
    output = driver.step(beam_steps=[rest], total_num_scheduled_tokens=2)
    texts = [[*PROMPT, 3, 4, 5], [*PROMPT, 6, 7, 8]]
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, texts, [-1.0, -2.0], 4))


def test_beams_that_come_back_from_the_host_go_on_without_a_token_computed_again() -> None:
    driver = Driver()
    begin(driver)
    first_beams(driver, [3, 4], [-1.0, -2.0], 5, 6)
    num_computed = driver.runner.num_computed_tokens
    back = BeamStep(
        "s",
        num_tokens=1,
        num_computed_tokens=len(PROMPT) + 1,
        parents=[0, 0],
        token_ids=[3, 8, 4, 9],
        num_restored_tokens=1,
        first_columns=[TAIL],
        block_ids=([5, 6],),
        num_candidates=4,
        scores=[-1.0, -2.0],
    )
    trunk = driver.new("s", PROMPT, 1)
    trunk.num_computed_tokens = len(PROMPT)
    plan = SchedulerOutput(
        scheduled_new_reqs=[trunk], beam_steps=[back], preempted_req_ids=["s"], total_num_scheduled_tokens=2
    )
    driver.runner.execute_model(plan)
    output = driver.runner.sample_tokens()
    texts = [[*PROMPT, 3, 8], [*PROMPT, 4, 9]]
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, texts, [-1.0, -2.0], 4))
    assert driver.runner.num_computed_tokens == num_computed + 2


def test_a_search_beside_sampled_branches_and_another_search_changes_nothing_for_them() -> None:
    driver = Driver()
    searches = [BeamStep("s", num_candidates=4, scores=[0.0]), BeamStep("t", num_candidates=3, scores=[0.0])]
    new = [driver.new("s", PROMPT, 1), driver.new("a", OTHER, 21), driver.new("t", OTHER, 25)]
    output = driver.step(new=new, sampled=["a"], beam_steps=searches)
    assert token_of(output, "a") == oracle_greedy(LLAMA, OTHER, 1)[0]
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, [PROMPT], [0.0], 4))
    assert_candidates(output.candidates["t"], oracle_candidates(LLAMA, [OTHER], [0.0], 3))


def test_tokens_that_rules_forbid_are_no_candidates() -> None:
    driver = Driver()
    best = begin(driver, 3).candidates["s"].token_ids
    again = Driver()
    new = again.new("s", PROMPT, 1)
    new.params = SamplingParams(temperature=0.0, min_tokens=1, all_stop_token_ids=[best[0], best[2]])
    output = again.step(new=[new], sampled=[], beam_steps=[BeamStep("s", num_candidates=3, scores=[0.0])])
    tokens = output.candidates["s"].token_ids
    assert tokens[0] == best[1] and not {best[0], best[2]} & set(tokens)


@pytest.mark.parametrize("how", ["finished_req_ids", "preempted_req_ids"])
def test_all_rows_of_a_search_are_free_when_it_ends(how: str) -> None:
    driver = Driver(max_num_reqs=4)
    begin(driver)
    first_beams(driver, [3, 4, 5, 6], [-1.0] * 4, 5, 6, 7, 8)
    rows = driver.runner.input_batch
    assert len(rows.take(0)) == 0 and len(driver.runner.beam_rows.rows_of("s")) == 4
    driver.step(**{how: ["s"]})
    assert len(driver.runner.beam_rows) == 0 and not any(table.any() for table in rows.block_tables)
    others = [driver.new(name, OTHER, 1 + 3 * place) for place, name in enumerate("abcd")]
    output = driver.step(new=others)
    assert {token_of(output, name) for name in "abcd"} == {oracle_greedy(LLAMA, OTHER, 1)[0]}


def test_rows_that_a_narrower_step_gives_up_can_be_taken_by_others() -> None:
    driver = Driver(max_num_reqs=3)
    begin(driver)
    first_beams(driver, [3, 4, 5], [-1.0] * 3, 5, 6, 7)
    narrow = BeamStep(
        "s", 1, len(PROMPT) + 1, parents=[2], token_ids=[9], num_candidates=2, scores=[-1.0]
    )  # fmt: skip
    output = driver.step(beam_steps=[narrow], total_num_scheduled_tokens=1)
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, [[*PROMPT, 5, 9]], [-1.0], 2))
    output = driver.step(new=[driver.new("a", OTHER, 21), driver.new("b", OTHER, 25)])
    assert token_of(output, "a") == token_of(output, "b") == oracle_greedy(LLAMA, OTHER, 1)[0]
    with pytest.raises(ValueError, match="rows"):
        driver.runner.input_batch.take(MAX_CAPTURE_SPANS + 1)  # those that are kept for hidden states


def test_a_search_that_becomes_narrower_and_wider_goes_on_from_any_of_its_beams() -> None:
    """As within a grammar, which may leave fewer texts than there were, and then more again."""
    driver = Driver()
    begin(driver)
    first_beams(driver, [3, 4, 5, 6], [-1.0] * 4, 5, 6, 7, 8)
    narrow = BeamStep(
        "s", 1, len(PROMPT) + 1, parents=[3, 2], token_ids=[9, 10], num_candidates=4, scores=[-2.0, -2.1]
    )  # fmt: skip
    output = driver.step(beam_steps=[narrow], total_num_scheduled_tokens=2)
    texts = [[*PROMPT, 6, 9], [*PROMPT, 5, 10]]
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, texts, [-2.0, -2.1], 4))
    wide = BeamStep(
        "s", 1, len(PROMPT) + 2, parents=[1, 1, 0], token_ids=[11, 12, 13], first_columns=[TAIL],
        block_ids=([7, 6, 8],), num_candidates=4, scores=[-3.0, -3.1, -3.2],
    )  # fmt: skip
    copies = [BlockCopy("s", 0, TAIL, 7, 6)]
    output = driver.step(beam_steps=[wide], block_copies=copies, total_num_scheduled_tokens=3)
    texts = [[*PROMPT, 5, 10, 11], [*PROMPT, 5, 10, 12], [*PROMPT, 6, 9, 13]]
    assert_candidates(output.candidates["s"], oracle_candidates(LLAMA, texts, [-3.0, -3.1, -3.2], 4))


def test_a_search_with_nan_logits_fails_alone() -> None:
    driver = Driver()
    begin(driver)
    model = driver.runner.model
    compute = model.compute_logits

    def poisoned(hidden: torch.Tensor, adapters: object = None) -> torch.Tensor:
        logits = compute(hidden)
        logits[1] = torch.nan  # the second row: a beam of s
        return logits

    model.compute_logits = poisoned  # type: ignore[method-assign]
    try:
        step = BeamStep(
            "s", 1, len(PROMPT), parents=[0], token_ids=[3], first_columns=[TAIL], block_ids=([5],),
            num_candidates=2, scores=[-1.0],
        )  # fmt: skip
        copies = [BlockCopy("s", 0, TAIL, 1 + TAIL, 5)]
        total = len(OTHER) + 1
        output = driver.step(
            new=[driver.new("a", OTHER, 21)], beam_steps=[step], block_copies=copies, total_num_scheduled_tokens=total
        )
    finally:
        model.compute_logits = compute  # type: ignore[method-assign]
    assert "NaN" in output.errors["s"] and "s" not in output.candidates
    assert token_of(output, "a") == oracle_greedy(LLAMA, OTHER, 1)[0]
