"""Candidates for the runner: which rows of a step belong to the beams of which search, and their best continuations.

The arithmetic is in layers/beams.py; what becomes of candidates is not known here.
"""

from __future__ import annotations

import numpy as np
import torch

from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.plan import BeamStep
from ratoon.execution.beam_rows import BeamRows
from ratoon.execution.readers import StepLayout
from ratoon.execution.rules.base import RowRules, forbid, force
from ratoon.execution.sampling_rows import RowEdits, SamplingRows
from ratoon.execution.timestamps import keep_to_timestamp_rules
from ratoon.layers.beams import SearchRows, best_candidates_of_searches

NO_CANDIDATES = "the model's logits hold no usable number (NaN or all tokens forbidden)"


class CandidatesReader:
    """Reads the rows of all beam searches of a step that want candidates, search after search."""

    def __init__(
        self, beam_steps: list[BeamStep], layout: StepLayout, beam_rows: BeamRows, sampling_rows: SamplingRows
    ) -> None:
        self._steps = [step for step in beam_steps if step.num_candidates]
        self._beam_rows = beam_rows
        self._sampling_rows = sampling_rows
        self.rows: list[int] = []
        start = 0
        for step in beam_steps:
            num_beams = step.num_beams if step.num_tokens else 0  # none yet: the trunk's last row stands for them
            if step.num_candidates:
                last_rows = layout.beam_last_rows[start : start + num_beams]
                self.rows += last_rows or [layout.last_row[step.req_id]]
            start += num_beams

    def read_logits(self, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        if self._steps:
            choose_candidates(self._steps, logits, output, self._beam_rows, self._sampling_rows)


def choose_candidates(
    steps: list[BeamStep],
    logits: torch.Tensor,
    output: ModelRunnerOutput,
    beam_rows: BeamRows,
    sampling_rows: SamplingRows,
) -> None:
    """From the logits [B, V] of all beams of these searches. They are changed. Which tokens a search may not choose is
    known from its trunk's params."""
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
