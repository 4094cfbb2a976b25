"""Candidates for the runner: which rows of a step belong to the beams of which search, and their best continuations.

The arithmetic is in layers/beams.py; the scheduler chooses among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.plan import BeamStep
from ratoon.execution.grammar.interface import SLOW_SECONDS
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.inputs.cells import to_device
from ratoon.execution.readers.interface import Finish, StepLayout
from ratoon.execution.rules.base import LogitsRule, apply_rules
from ratoon.execution.rules.grammar import Grammar, fill_and_wait
from ratoon.execution.sampling.beam_rows import BeamRows
from ratoon.layers.beams import (
    Candidates,
    SearchRows,
    best_candidates_of_searches,
    best_keys_of_searches,
    candidates_of_keys,
    chosen_by_keys,
)

NO_CANDIDATES = "the model's logits hold no usable number (NaN or all tokens forbidden)"


class CandidatesReader:
    """Reads the rows of all beam searches of a step that need candidates, search by search."""

    def __init__(self, beam_steps: list[BeamStep], layout: StepLayout, beam_rows: BeamRows) -> None:
        self._steps = [step for step in beam_steps if step.num_candidates]
        self._beam_rows = beam_rows
        self.rows: list[int] = []
        for step in self._steps:  # one without beams yet reads the trunk's last row
            self.rows += layout.beam_last_rows.get(step.req_id) or [layout.last_row[step.req_id]]

    def read_logits(self, logits: torch.Tensor, output: ModelRunnerOutput) -> Finish | None:
        if not self._steps:
            return None
        refused = refuse_slow(self._steps, self._beam_rows, output)
        if refused:
            kept = [
                row for row, step in enumerate(step for step in self._steps for _ in step.scores) if step not in refused
            ]
            self._steps = [step for step in self._steps if step not in refused]
            if not self._steps:
                return None
            logits = logits[to_device(np.array(kept), logits.device)]
        return choose_candidates(self._steps, logits, output, self._beam_rows)

    def plain_searches(self, device: torch.device) -> tuple[list[float], list[SearchRows]] | None:
        """The scores of the rows, and the searches, for best_keys_of_shape. None: a rule is active, or keys can't hold
        the candidates."""
        scores, searches, rules = _lay_out(self._steps, self._beam_rows)
        return (scores, searches) if searches and not any(rules) and chosen_by_keys(device, searches) else None

    def read_keys(self, keys: torch.Tensor, searches: list[SearchRows], vocab_size: int) -> Finish:
        """Of keys [S, W] that were chosen for these searches."""
        return _finish_keys(keys, searches, vocab_size, self._steps)


def refuse_slow(steps: list[BeamStep], beam_rows: BeamRows, output: ModelRunnerOutput) -> list[BeamStep]:
    """The searches whose grammar takes long, or has failed for all beams: all of them would be waited for in every
    step. Fills the masks of the others."""
    grammars = {
        step.req_id: [rule for rules in beam_rows.rules_of(step.req_id) for rule in rules if isinstance(rule, Grammar)]
        for step in steps
    }
    fill_and_wait([rule for of_search in grammars.values() for rule in of_search])
    refused = []
    for step in steps:
        of_search = grammars[step.req_id]
        problem = None
        if any(rule.cost.is_slow for rule in of_search):
            problem = f"takes too long to match for a beam search: more than {1000 * SLOW_SECONDS:g} ms for a token"
        elif of_search and all(rule.problem is not None for rule in of_search):
            problem = of_search[0].problem
        if problem is not None:
            output.refused[step.req_id] = problem
            refused.append(step)
    return refused


def choose_candidates(
    steps: list[BeamStep], logits: torch.Tensor, output: ModelRunnerOutput, beam_rows: BeamRows
) -> Finish | None:
    """From the logits [B, V] of all beams of these searches, which may be changed in place. As in transformers, rules
    apply to log-probabilities, which are not renormalised afterwards; masks have the same effect on logits."""
    scores, searches, rules = _lay_out(steps, beam_rows)
    edit, weighed = None, []
    if any(rules):
        edit = partial(apply_rules, rules_of_rows=rules)
        weighed = [row for row, of_row in enumerate(rules) if any(rule.stage.changes_values for rule in of_row)]
    if edit is not None:
        logits = logits.float()
    on_device = to_device(np.array(scores, np.float32), logits.device)
    if not chosen_by_keys(logits.device, searches):
        put_candidates(best_candidates_of_searches(logits, on_device, searches, edit, weighed), steps, output)
        return None
    keys = best_keys_of_searches(logits, on_device, searches, edit, weighed)
    return _finish_keys(keys, searches, logits.shape[1], steps)


def _lay_out(
    steps: list[BeamStep], beam_rows: BeamRows
) -> tuple[list[float], list[SearchRows], list[Sequence[LogitsRule]]]:
    """The scores of all beams, the searches that they belong to, and of every beam the rules that are active."""
    searches: list[SearchRows] = []
    scores: list[float] = []
    rules: list[Sequence[LogitsRule]] = []
    for step in steps:
        start = len(scores)
        scores += step.scores
        searches.append(SearchRows(start, len(scores), step.num_candidates))
        of_beams = beam_rows.rules_of(step.req_id)
        rules += [row_rules.active() for row_rules in of_beams] if of_beams else [()] * len(step.scores)
    return scores, searches, rules


def _finish_keys(on_device: torch.Tensor, searches: list[SearchRows], vocab_size: int, steps: list[BeamStep]) -> Finish:
    keys = HostCopy(on_device)

    def finish(output: ModelRunnerOutput) -> None:
        put_candidates(candidates_of_keys(keys.to_numpy(), searches, vocab_size), steps, output)

    return finish


@dataclass(slots=True)
class BeamKeysPass:
    """A forward pass that ended with the keys [S, W] of the best candidates of its searches. As ExecutedPass."""

    keys: torch.Tensor
    searches: list[SearchRows]
    vocab_size: int
    reader: CandidatesReader

    def read(self, output: ModelRunnerOutput) -> Finish | None:
        return self.reader.read_keys(self.keys, self.searches, self.vocab_size)


def put_candidates(found: list[Candidates | None], steps: list[BeamStep], output: ModelRunnerOutput) -> None:
    for step, candidates in zip(steps, found, strict=True):
        if candidates is None:
            output.errors[step.req_id] = NO_CANDIDATES
        else:
            output.candidates[step.req_id] = BeamCandidates(
                candidates.scores.tolist(), candidates.beams.tolist(), candidates.tokens.tolist()
            )
