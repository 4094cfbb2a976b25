"""Candidates for the runner: which rows of a step belong to the beams of which search, and their best continuations.

The arithmetic is in layers/beams.py; what becomes of candidates is not known here.
"""

from __future__ import annotations

import numpy as np
import torch

from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.plan import BeamStep, SchedulerOutput
from ratoon.execution.beam_rows import BeamRows
from ratoon.execution.rules.base import RowRules, forbid, force
from ratoon.execution.sampling_rows import RowEdits, SamplingRows
from ratoon.execution.timestamps import keep_to_timestamp_rules
from ratoon.layers.beams import SearchRows, best_candidates_of_searches

NO_CANDIDATES = "the model's logits hold no usable number (NaN or all tokens forbidden)"


def beam_rows_of(plan: SchedulerOutput, last_token: dict[str, int], beam_last_tokens: list[int]) -> list[int]:
    """The rows to choose candidates from, search after search. `last_token`: the last row of every branch of the step;
    `beam_last_tokens`: the same for its beams."""
    wanted: list[int] = []
    start = 0
    for step in plan.beam_steps:
        num_beams = step.num_beams if step.num_tokens else 0
        if step.num_candidates:
            wanted += beam_last_tokens[start : start + num_beams] if num_beams else [last_token[step.req_id]]
        start += num_beams
    return wanted


def choose_candidates(
    plan: SchedulerOutput,
    logits: torch.Tensor,
    output: ModelRunnerOutput,
    beam_rows: BeamRows,
    sampling_rows: SamplingRows,
) -> None:
    """From the logits [B, V] of the rows that `beam_rows_of` named. They are changed. Which tokens a search may not
    choose is known from its trunk's params."""
    steps = [step for step in plan.beam_steps if step.num_candidates]
    searches: list[SearchRows] = []
    scores: list[float] = []
    ruled: list[int] = []  # rows with rules over tokens
    rules: list[RowRules] = []
    for step in steps:
        edits = sampling_rows.edits[beam_rows.trunk_row(step.req_id)]
        start = len(scores)
        scores += step.scores
        searches.append(SearchRows(start, len(scores), step.num_candidates, _held_back(step, edits)))
        if edits.rules is not None:
            ruled += range(start, len(scores))
            rules += beam_rows.rules_of(step.req_id)

    def keep(logits: torch.Tensor) -> torch.Tensor | None:
        return keep_to_rules(logits, np.array(ruled), rules)

    found = best_candidates_of_searches(
        logits, torch.tensor(scores, device=logits.device), searches, keep if ruled else None
    )
    for step, candidates in zip(steps, found, strict=True):
        if candidates is None:
            output.errors[step.req_id] = NO_CANDIDATES
        else:
            output.candidates[step.req_id] = BeamCandidates(
                candidates.scores.tolist(), candidates.beams.tolist(), candidates.tokens.tolist()
            )


def keep_to_rules(logits: torch.Tensor, rows: np.ndarray, rules: list[RowRules]) -> torch.Tensor | None:
    """Forbid in these rows of logits, which are in rising order, what the rules of each do not leave possible. A token
    that is forced costs a beam nothing. Returns the rows with such tokens, whose log-probability is the 0 they have."""
    verdicts = [row_rules.verdict() for row_rules in rules]
    forbid(logits, rows, verdicts)
    timed = [place for place, row_rules in enumerate(rules) if row_rules.text is not None]
    if timed:
        keep_to_timestamp_rules(logits, rows[timed], [rules[place].text for place in timed])  # type: ignore[misc]
    return force(logits, rows, verdicts)


def _held_back(step: BeamStep, edits: RowEdits) -> list[int]:
    """The tokens that are impossible now for all beams of a search."""
    held_back = list(step.held_back)
    if edits.suppressed is not None:
        held_back += edits.suppressed.tolist()
    if edits.suppressed_first is not None and step.num_tokens == 0:  # there are no beams yet, so there is no token
        held_back += edits.suppressed_first.tolist()
    return held_back
