"""Applies the results of a step: each kind of request takes its own, and outputs are made for every choice.

Finished requests leave the scheduler's state here. planner.py decides what runs next.
"""

from __future__ import annotations

from ratoon.core.messages import Fault
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput
from ratoon.scheduling.branch import Branch, BranchStatus
from ratoon.scheduling.kinds.registry import Kinds
from ratoon.scheduling.state import SchedulerState

EXPECTED_OF_GRAMMAR = "a schema or grammar that can be matched, within the limits of docs/structured-output.md"


class StepResults:
    def __init__(self, state: SchedulerState, kinds: Kinds) -> None:
        self._state = state
        self._kinds = kinds.all

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Apply the results of a plan: append tokens, end finished branches, and return the new outputs of every
        choice.

        Results for branches that ended while the step ran are dropped.
        """
        if output.transfers is not None:
            self._state.take_transfers(output.transfers)
        outputs: list[EngineCoreOutput] = []
        if output.adapters is not None:
            outputs += self._state.take_adapters(output.adapters)
        children = [child for kind in self._kinds for child in kind.fork(plan)] if plan.fanout else []
        inherited = self._state.inherited.copy()  # a request may end with its first token
        for branch_id, message in output.errors.items():
            outputs += self._state.fail_requests([branch_id], message)
        for branch_id, problem in output.refused.items():
            branch = self._state.branches.get(branch_id)
            if branch is not None and branch.first_step <= plan.step:
                refusal = Fault("RequestError", "structured_output", problem, EXPECTED_OF_GRAMMAR)
                outputs += self._state.refuse_requests([branch_id], refusal)
        for kind in self._kinds:
            outputs += kind.take(plan, output)
        if children:
            self._place_children(children)
        if self._state.quarantined or inherited:
            for answer in outputs:
                if answer.error is None and not answer.is_part_of_prompt:
                    self._state.quarantined.pop(answer.request_id, None)
                    answer.inherited_from = inherited.pop(answer.request_id, None)
                    self._state.inherited.pop(answer.request_id, None)
        if self._state.events:
            self._state.events.tell(outputs)
        return outputs

    def _place_children(self, children: list[Branch]) -> None:
        """New choices run at once while there are rows for them. The rest free their memory and queue in front: waiting
        branches hold no blocks, so they cannot block running ones. The prefix cache has their prompt."""
        queued = []
        for child in children:
            if child.status == BranchStatus.FINISHED:
                continue
            if self._state.has_rows_for(child):
                child.status = BranchStatus.RUNNING
                self._state.running.append(child)
            else:
                self._state.reclaim(child)
                queued.append(child)
        for child in reversed(queued):
            self._state.waiting.prepend(child)
