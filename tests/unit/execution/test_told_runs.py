"""Tokens without a choice that results tell before a step has computed them: what is told and appended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ratoon.core.params import SamplingParams
from ratoon.core.structured import StructuredOutput
from ratoon.execution.sampling.mask_column import MaskColumn
from ratoon.execution.sampling.sampling_rows import MasksOfStep, SamplingRows
from ratoon.execution.sampling.tokens import SampledTokens
from ratoon.execution.sampling.told_runs import RunsOfStep, ToldRun
from tests.unit.execution.test_grammar_rule import end_token, grammars, rules_for


def step_of(branch: ToldRun, place: int, queue: deque[ToldRun], tail: list[int] | None = None) -> RunsOfStep:
    """A step whose fourth row samples the token at this place of a branch's output."""
    runs = RunsOfStep([3], [branch], [place], queue)
    runs.tails = {} if tail is None else {3: tail}
    return runs


def test_the_tokens_behind_a_sampled_one_are_told_with_it() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(5, 2)
    assert step_of(branch, 2, queue).tell(()) == {} and not queue
    assert step_of(branch, 3, queue, [7, 8, 9]).tell(()) == {3: [7, 8, 9]}
    assert list(queue) == [branch] and branch.slot == 5
    assert branch.behind(4) == [7, 8, 9]
    assert branch.behind(5) == [8, 9]  # a step under way has sampled one of them
    assert branch.behind(7) == branch.behind(9) == []


def test_what_was_told_is_not_told_again() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(0, 0)
    step_of(branch, 0, queue, [7, 8]).tell(())
    assert step_of(branch, 1, queue, [8]).tell(()) == {3: None}
    assert step_of(branch, 2, queue).tell(()) == {3: None}
    assert step_of(branch, 3, queue).tell(()) == {}
    assert len(queue) == 1


def test_a_row_without_a_token_tells_nothing() -> None:
    queue: deque[ToldRun] = deque()
    branch = ToldRun(0, 0)
    assert step_of(branch, 0, queue, [7, 8]).tell({3}) == {} and not queue
    assert branch.behind(1) == []


# ---- rows of a device whose masks are filled while it computes ----

TEXT = "abcdefgh"


class Steps:
    """Rows with a grammar that forces a text behind one of two letters, sampled as a device would."""

    def __init__(self, num_rows: int) -> None:
        self.rows = SamplingRows(num_rows, grammars=grammars())
        self.rows.mask_column = MaskColumn(num_rows, torch.device("cpu"))
        self.rows.tells_runs = True
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]  # what rows have been given
        asked = StructuredOutput(regex=f"({TEXT}[xy])*")
        params = SamplingParams(structured_output=asked, all_stop_token_ids=[end_token()], max_tokens=100)
        for slot in range(num_rows):
            self.rows.add(slot, params, 0, [5], [])

    def sample(self, *slots: int) -> MasksOfStep:
        """A step with these rows: each gets the first token that its mask allows, and no end."""
        masks = self.rows.begin_masks(np.array(slots))
        assert masks.filling is not None
        masks.filling.result()
        assert self.rows.mask_column is not None
        tokens = {}
        for slot, words in zip(slots, self.rows.mask_column.words.numpy()):
            expected = rules_for(regex=f"({TEXT}[xy])*").after_all(self.texts[slot])[0].mask()  # type: ignore[attr-defined]
            np.testing.assert_array_equal(words[: len(expected)], expected)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            tokens[slot] = next(token for token in allowed if token != end_token())
            self.texts[slot].append(tokens[slot])
        self.rows.append_masked(np.array(slots), SampledTokens(torch.tensor(list(tokens.values()))), masks)
        return masks

    def append(self) -> dict[int, Sequence[int]]:
        appended = dict(self.rows.append_told())
        for slot, tokens in appended.items():
            self.texts[slot] += tokens
        return appended


def told(masks: MasksOfStep) -> dict[int, Sequence[int] | None]:
    assert masks.runs is not None
    return masks.runs.tell(())


def test_a_row_goes_on_behind_what_was_told_whether_or_not_a_step_is_under_way() -> None:
    for num_ahead in (0, 1, 2):
        steps = Steps(3)
        first = steps.sample(0, 1, 2)  # the text may end here, so that nothing is forced
        assert told(first) == {}
        masks = steps.sample(0, 1, 2)
        ahead = [steps.sample(0, 1, 2) for _ in range(num_ahead)]
        found = told(masks)
        assert found.keys() == {0, 1, 2}
        assert [told(each) for each in ahead] == [dict.fromkeys(range(3))] * num_ahead
        appended = steps.append()
        assert all(len(tokens) == len(found[slot] or ()) - num_ahead for slot, tokens in appended.items())
        for _ in range(4):
            steps.sample(0, 1, 2)
        assert b"".join(map(grammars().library.token_bytes, steps.texts[0])).startswith(TEXT.encode())


def test_what_is_told_of_a_row_outside_the_step_is_read_by_its_own_grammar() -> None:
    steps = Steps(3)
    steps.sample(0, 1, 2)
    masks = steps.sample(0, 1, 2)
    steps.sample(0, 1)  # which has read the tokens of the third row
    steps.sample(0, 1)
    assert masks.runs is not None and set(masks.runs.tails) == {0, 1, 2}
    masks.runs.tails = {2: masks.runs.tails[2]}
    assert told(masks).keys() == {2}
    assert steps.append().keys() == {2}
    steps.sample(0, 1)
    for _ in range(3):
        steps.sample(0, 1, 2)
