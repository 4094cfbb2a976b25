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
from ratoon.core.plan import BeamStep, SchedulerOutput
from ratoon.execution.grammar.interface import SLOW_SECONDS
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.inputs.cells import to_device
from ratoon.execution.passes.ends import BeamKeys, EndRows, Logits
from ratoon.execution.readers.interface import Finish, RowReader, StepLayout
from ratoon.execution.rules.base import LogitsRule, apply_rules
from ratoon.execution.rules.grammar import Grammar, fill_and_wait
from ratoon.execution.sampling.beam_rows import BeamRows
from ratoon.layers.beams import (
    Candidates,
    SearchRows,
    SearchShape,
    best_candidates_of_searches,
    best_keys_of_searches,
    candidates_of_keys,
    chosen_by_keys,
)

NO_CANDIDATES = "the model's logits hold no usable number (NaN or all tokens forbidden)"


class BeamReaders:
    """Reads the rows of all beam searches of a step that need candidates, search by search."""

    def __init__(self, beam_rows: BeamRows, device: torch.device, vocab_size: int) -> None:
        self._beam_rows = beam_rows
        self._device = device
        self._vocab_size = vocab_size

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[RowReader]:
        steps = [step for step in plan.beam_steps if step.num_candidates]
        if not steps:
            return ()
        listed: list[int] = []
        for step in steps:  # one without beams yet reads the trunk's last row
            listed += layout.beam_last_rows.get(step.req_id) or [layout.last_row(step.req_id)]
        rows = np.array(listed, np.int64)
        scores, searches = _lay_out(steps)
        if not chosen_by_keys(self._device, searches) or any(_active_rules(steps, self._beam_rows)):
            return (CandidatesReader(steps, EndRows(Logits(), rows), self._beam_rows),)
        shape = SearchShape.of(searches)
        bounds = np.zeros((2, shape.num_searches), np.int64)  # a search of padding has no rows
        bounds[:, : len(searches)] = [search.start for search in searches], [search.stop for search in searches]
        columns = {"beam_scores": np.array(scores, np.float32), "search_starts": bounds[0], "search_stops": bounds[1]}
        return (BeamKeysReader(steps, EndRows(BeamKeys(shape), rows, columns), searches, self._vocab_size),)


class CandidatesReader:
    """Chooses the candidates from logits, under the rules of the searches."""

    def __init__(self, steps: list[BeamStep], wanted: EndRows, beam_rows: BeamRows) -> None:
        self.wanted = wanted
        self._steps = steps
        self._beam_rows = beam_rows

    def read(self, logits: torch.Tensor, output: ModelRunnerOutput) -> Finish | None:
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


@dataclass(slots=True)
class BeamKeysReader:
    """Reads candidates that the program has chosen."""

    steps: list[BeamStep]
    wanted: EndRows
    searches: list[SearchRows]
    vocab_size: int

    def read(self, keys: torch.Tensor, output: ModelRunnerOutput) -> Finish:
        return _finish_keys(keys[: len(self.searches)], self.searches, self.vocab_size, self.steps)


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
    scores, searches = _lay_out(steps)
    rules = _active_rules(steps, beam_rows)
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


def _lay_out(steps: list[BeamStep]) -> tuple[list[float], list[SearchRows]]:
    """The scores of all beams, and the searches that they belong to."""
    searches: list[SearchRows] = []
    scores: list[float] = []
    for step in steps:
        start = len(scores)
        scores += step.scores
        searches.append(SearchRows(start, len(scores), step.num_candidates))
    return scores, searches


def _active_rules(steps: list[BeamStep], beam_rows: BeamRows) -> list[Sequence[LogitsRule]]:
    """Returns the active rules of every beam, in the order of the steps."""
    rules: list[Sequence[LogitsRule]] = []
    for step in steps:
        of_beams = beam_rows.rules_of(step.req_id)
        rules += [row_rules.active() for row_rules in of_beams] if of_beams else [()] * len(step.scores)
    return rules


def _finish_keys(on_device: torch.Tensor, searches: list[SearchRows], vocab_size: int, steps: list[BeamStep]) -> Finish:
    keys = HostCopy(on_device)

    def finish(output: ModelRunnerOutput) -> None:
        put_candidates(candidates_of_keys(keys.to_numpy(), searches, vocab_size), steps, output)

    return finish


def put_candidates(found: list[Candidates | None], steps: list[BeamStep], output: ModelRunnerOutput) -> None:
    for step, candidates in zip(steps, found, strict=True):
        if candidates is None:
            output.errors[step.req_id] = NO_CANDIDATES
        else:
            output.candidates[step.req_id] = BeamCandidates(
                candidates.scores.tolist(), candidates.beams.tolist(), candidates.tokens.tolist()
            )
