"""Candidates for the runner: which rows of a step belong to the beams of which search, and their best continuations.

The arithmetic is in layers/beams.py; what becomes of candidates is not known here.
"""

from __future__ import annotations

import torch

from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
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


def choose_candidates(plan: SchedulerOutput, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
    """From the logits [B, V] of the rows that `beam_rows_of` named. They are changed."""
    steps = [step for step in plan.beam_steps if step.num_candidates]
    searches: list[SearchRows] = []
    scores: list[float] = []
    for step in steps:
        start = len(scores)
        scores += step.scores
        searches.append(SearchRows(start, len(scores), step.num_candidates, step.held_back))
    found = best_candidates_of_searches(logits, torch.tensor(scores, device=logits.device), searches)
    for step, candidates in zip(steps, found, strict=True):
        if candidates is None:
            output.errors[step.req_id] = NO_CANDIDATES
        else:
            output.candidates[step.req_id] = BeamCandidates(
                candidates.scores.tolist(), candidates.beams.tolist(), candidates.tokens.tolist()
            )
