"""What a step brought: tokens, candidates and vectors for branches, forks, and what is new for every choice.

A request that is ended by it leaves the scheduler's state here. What runs next is decided in planner.py.
"""

from __future__ import annotations

from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.plan import CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, FinishReason
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.beams import Hypothesis
from ratoon.scheduling.branch import Branch, BranchStatus
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.stopping import check_stop


class StepResults:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the results of a plan: append tokens, end what is done, and say what is new for every choice.

        Results for branches that ended while the step ran are dropped.
        """
        children = self._fork_children(plan) if plan.fanout else []
        inherited = self._state.inherited.copy()  # a request may end, and be forgotten, with its first token
        outputs: list[EngineCoreOutput] = []
        for branch_id, message in output.errors.items():
            outputs += self._state.fail_requests([branch_id], message)
        for branch_id, chunk in output.prompt_logprobs.items():
            self._keep_prompt_logprobs(branch_id, chunk)
        self._take_tokens(output, outputs)
        if plan.pooled_req_ids:
            outputs += self._take_vectors(plan, output)
        if plan.beam_steps:
            outputs += self._take_candidates(plan, output)
        if plan.captures or plan.encoder_steps:
            outputs += self._take_hidden_states(plan, output)
        if children:
            self._place_children(children)
        outputs += self._fail_unanswered(plan, output)
        if self._state.quarantined or inherited:
            for answer in outputs:
                if answer.new_token_ids or answer.hidden_states is not None:
                    self._state.quarantined.pop(answer.request_id, None)
                    answer.inherited_from = inherited.pop(answer.request_id, None)
                    self._state.inherited.pop(answer.request_id, None)
        if self._state.events:
            self._state.events.tell(outputs)
        return outputs

    def _take_tokens(self, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        # The other loop that runs for every branch in every step.
        find_branch = self._state.branches.get
        give = outputs.append
        all_logprobs, with_prompt_logprobs = output.logprobs, self._state.with_prompt_logprobs
        finished: list[Branch] = []
        for branch_id, token_ids in zip(output.req_ids, output.sampled_token_ids):
            branch = find_branch(branch_id)
            if branch is None:
                continue
            num_tokens = branch.num_tokens
            if branch.num_computed_tokens != num_tokens:
                continue  # a result from before it was aborted and its id used again
            finish_reason = stop_reason = None
            logprobs = all_logprobs.get(branch_id) if all_logprobs else None
            if (
                len(token_ids) == 1
                and token_ids[0] not in branch.stop_token_ids
                and num_tokens + 1 < branch.max_total_tokens
            ):
                branch.token_ids.append(token_ids[0])
                branch.num_tokens = num_tokens + 1
            elif token_ids:
                count, finish_reason, stop_reason = check_stop(branch, token_ids)
                token_ids = token_ids[:count]
                logprobs = _first_rows(logprobs, count)
                branch.append_tokens(token_ids)
                if finish_reason is not None:
                    finished.append(branch)
            else:
                continue
            prompt_logprobs = self._take_prompt_logprobs(branch) if with_prompt_logprobs else None
            give(
                EngineCoreOutput(
                    branch.request_id,
                    token_ids,
                    branch.choice,
                    finish_reason,
                    stop_reason,
                    logprobs,
                    prompt_logprobs,
                    branch.num_cached_tokens,
                )
            )
        if finished:
            self._state.release(finished, keep=True)

    def _take_vectors(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """A pooling branch ends with its vector. One that should have got it and did not would wait for it forever."""
        outputs: list[EngineCoreOutput] = []
        finished: list[Branch] = []
        missing: list[str] = []
        for branch_id in plan.pooled_req_ids:
            branch = self._state.branches.get(branch_id)
            if branch is None or branch.num_computed_tokens != branch.num_tokens:
                continue  # it failed or was aborted; its id may be in use again
            vector = output.pooled.get(branch_id)
            if vector is None:
                missing.append(branch_id)
                continue
            finished.append(branch)
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    finish_reason=FinishReason.STOP,
                    num_cached_tokens=branch.num_cached_tokens,
                    pooled=vector,
                )
            )
        self._state.release(finished)
        return outputs + self._state.fail_requests(missing, "the runner returned no vector")

    def _take_candidates(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Let searches go on. One that should have got candidates and did not would wait for them forever."""
        outputs: list[EngineCoreOutput] = []
        for beam_step in plan.beam_steps:
            group = self._state.searching.get(beam_step.req_id)
            if group is None or not beam_step.num_candidates or not group.awaits(beam_step):
                continue
            candidates = output.candidates.get(beam_step.req_id)
            if candidates is None:
                outputs += self._state.fail_requests([beam_step.req_id], "the runner returned no candidates")
                continue
            self._state.quarantined.pop(beam_step.req_id, None)
            group.advance(self._state.kv_cache, candidates)
            if group.search.done:
                outputs += self._end_search(group)
            elif group.wants_snapshots:
                outputs += self._snapshot(group)
        return outputs

    def _take_hidden_states(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """What was read out goes out at once, part by part. Rows that were only run on the way bring nothing."""
        outputs: list[EngineCoreOutput] = []
        captures: list[CaptureStep | EncoderStep] = [*plan.captures]
        captures += [step for step in plan.encoder_steps if step.captured]
        for capture in captures:
            branch = self._state.branches.get(capture.req_id)
            state = None if branch is None else branch.request.extraction
            if branch is None or state is None or branch.status != BranchStatus.RUNNING:
                continue
            states = output.hidden_states.get(capture.req_id)
            if states is None and capture.captured:
                outputs += self._state.fail_requests([capture.req_id], "the runner returned no hidden states")
                continue
            first_row = state.num_captured
            state.confirm(capture)
            self._state.quarantined.pop(branch.request_id, None)
            if states is None:
                continue
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    finish_reason=FinishReason.STOP if state.done else None,
                    num_cached_tokens=branch.num_cached_tokens,
                    hidden_states=states,
                    first_row=first_row,
                    num_rows_run=state.num_rows_run,
                )
            )
            if state.done:
                self._state.release([branch])
        return outputs

    def _snapshot(self, group: BeamGroup) -> list[EngineCoreOutput]:
        """The best text so far."""
        best = group.search.best_so_far()
        return [] if best is None else [_text_output(group, 0, best._replace(finish_reason=None))]

    def _end_search(self, group: BeamGroup) -> list[EngineCoreOutput]:
        request = group.trunk.request
        texts = group.search.hypotheses()
        if len(texts) < request.num_choices:
            problem = f"there are only {len(texts)} texts to find, and {request.num_choices} are wanted"
            return self._state.fail_requests([request.request_id], problem)
        if request.retain_kv is not None:
            for sequence in group.kept_sequences(request.branch_ids):
                if not self._state.leases.grant(sequence, self._state.now + request.retain_kv, request.owner):
                    self._state.kv_cache.free(sequence)
        request.finished_choices.update(range(request.num_choices))
        self._state.release([group.trunk])
        return [_text_output(group, choice, text) for choice, text in enumerate(texts)]

    def _fork_children(self, plan: SchedulerOutput) -> list[Branch]:
        """The other choices of prompts that this step has completed, each on the memory of the first."""
        children = []
        for root_id in plan.fanout:
            root = self._state.branches.get(root_id)
            if root is None or root.num_computed_tokens != root.num_tokens:
                continue
            request = root.request
            for choice in range(1, request.num_choices):
                child = request.fork_branch(choice)
                self._state.kv_cache.fork(root, child, request.num_prompt_tokens)
                self._state.branches[child.branch_id] = child
                children.append(child)
        return children

    def _place_children(self, children: list[Branch]) -> None:
        """New choices run at once while there are rows for them. The rest give their memory back and queue in front:
        waiting branches hold no blocks, so they can't keep anyone from ending. The prefix cache has their prompt."""
        queued = []
        for child in children:
            if child.status == BranchStatus.FINISHED:
                continue
            if self._state.has_rows_for(child):
                child.status = BranchStatus.RUNNING
                self._state.running.append(child)
            else:
                self._state.set_back(child)
                queued.append(child)
        for child in reversed(queued):
            self._state.waiting.prepend(child)

    def _fail_unanswered(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """A branch that should have got a token and did not would wait for it forever: say so instead."""
        num_expected = len(plan.sampled_req_ids) + sum(map(len, plan.fanout.values()))
        if len(output.req_ids) >= num_expected and all(output.sampled_token_ids):
            return []
        answered = {req_id for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids) if token_ids}
        expected = plan.sampled_req_ids + [child_id for children in plan.fanout.values() for child_id, _ in children]
        missing = [req_id for req_id in expected if req_id not in answered]
        return self._state.fail_requests(missing, "the runner returned no token")

    def _keep_prompt_logprobs(self, branch_id: str, chunk: PromptLogprobsChunk) -> None:
        """Keep the rows that are new. A prompt that was preempted computes (and sends) its first rows once more."""
        branch = self._state.branches.get(branch_id)
        if branch is None or branch.choice != 0:
            return
        request = branch.request
        end = chunk.start + len(chunk.rows.token_ids)
        num_had = max(0, request.next_prompt_logprob - chunk.start)
        if chunk.start + num_had >= end:
            return
        rows = chunk.rows
        if num_had:
            rows = LogprobsLists(rows.token_ids[num_had:], rows.logprobs[num_had:], rows.sampled_ranks[num_had:])
        request.prompt_logprobs.append(PromptLogprobsChunk(chunk.start + num_had, rows))
        request.next_prompt_logprob = end
        self._state.with_prompt_logprobs.add(request.request_id)

    def _take_prompt_logprobs(self, branch: Branch) -> list[PromptLogprobsChunk] | None:
        if branch.choice != 0 or branch.request_id not in self._state.with_prompt_logprobs:
            return None
        self._state.with_prompt_logprobs.remove(branch.request_id)
        chunks, branch.request.prompt_logprobs = branch.request.prompt_logprobs, []
        return chunks


def _text_output(group: BeamGroup, choice: int, text: Hypothesis) -> EngineCoreOutput:
    last_token = text.token_ids[-1]
    named = text.finish_reason == FinishReason.STOP and last_token in (group.trunk.request.params.stop_token_ids or ())
    return EngineCoreOutput(
        group.trunk.request_id,
        text.token_ids,
        choice,
        text.finish_reason,
        last_token if named else None,  # the model's own end needs no reason
        num_cached_tokens=group.trunk.num_cached_tokens,
        score=text.score,
        cumulative_logprob=text.cumulative_logprob,
        replaces=True,
    )


def _first_rows(rows: LogprobsLists | None, count: int) -> LogprobsLists | None:
    if rows is None:
        return None
    return LogprobsLists(rows.token_ids[:count], rows.logprobs[:count], rows.sampled_ranks[:count])
