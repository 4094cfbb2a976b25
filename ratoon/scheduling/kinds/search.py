"""Beam search: the choices of a request are the best texts that a search finds.

A search has one branch, the trunk, which is planned like any other while it computes the prompt. Its beams are separate
rows. Their memory and the search itself are in beam_group.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.readings import asks_for_states
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.tails import tail_blocks
from ratoon.scheduling.admission import verify_cross_memory, verify_memory
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.beams import Hypothesis
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.shared_prefills import Admission
from ratoon.scheduling.step_draft import StepDraft


@dataclass(slots=True)
class PlannedBeams:
    """The beams of one search in a step."""

    group: BeamGroup
    tokens_each: int
    kv_cache: KVCacheManager

    @property
    def branch(self) -> Branch:
        return self.group.trunk

    @property
    def num_tokens(self) -> int:
        return self.tokens_each * self.group.num_beams

    def write(self, plan: SchedulerOutput) -> None:
        trunk = self.group.trunk
        if not trunk.known_to_runner:  # loaded and already computed: only its beams run
            plan.scheduled_new_reqs.append(trunk.as_new_request(self.kv_cache.block_ids(trunk)))
            trunk.known_to_runner = True
        plan.beam_steps.append(self.group.take_step(self.tokens_each))


class SearchKind(RequestKind):
    params_type = BeamSearchParams
    task_type = BeamGroup
    plans_rows = True

    # ---- admission ----

    def verify_own(self, request: EngineCoreRequest) -> None:
        params = _params_of(request)
        params.verify()
        config = self._state.config
        for name, limit in (("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", config.token_budget)):
            if params.beam_width > limit:
                raise RequestError(
                    "beam_width",
                    f"is {params.beam_width}, and all beams run in one step, which holds {limit} ({name})",
                    f"at most {limit}, or an engine with a greater {name}",
                )

    def verify_memory(self, request: EngineCoreRequest) -> None:
        """The prompt once, and all beams at their full length. A text whose states are read is computed to its end."""
        params, kv_cache = _params_of(request), self._state.kv_cache
        if asks_for_states(request):
            verify_memory(request, kv_cache, self._state.max_step_tokens, params.max_tokens)
        num_usable = kv_cache.num_usable_blocks - verify_cross_memory(request, kv_cache)
        num_prompt_tokens = len(request.prompt_token_ids)
        prompt = kv_cache.required_blocks(num_prompt_tokens, self._state.max_step_tokens)
        num_new_tokens = self.max_total_tokens(request) - num_prompt_tokens
        tail = tail_blocks(kv_cache, num_prompt_tokens, num_new_tokens)
        if prompt + params.beam_width * tail <= num_usable:
            return
        widest = (num_usable - prompt) // max(tail, 1)
        numbers = (
            f"needs {prompt + params.beam_width * tail} blocks of {kv_cache.sizes_of_blocks} tokens ({prompt} for the "
            f"prompt, {tail} for each of {params.beam_width} beams of {num_new_tokens} tokens), the pool has "
            f"{num_usable}"
        )
        if widest >= 1:
            expected = f"beam_width of at most {widest} here, a smaller max_tokens, or a larger KV cache"
        else:
            expected = "a shorter prompt, a smaller max_tokens, or a larger KV cache"
        raise RequestError("beam_width", numbers, expected)

    def max_new_tokens(self, request: EngineCoreRequest) -> int | None:
        return _params_of(request).max_tokens

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        params, max_total_tokens = _params_of(request), self.max_total_tokens(request)
        opened = Request(
            request,
            sequence_number,
            max_total_tokens,
            num_choices=params.n,
            whole_images=self._state.config.whole_images,
        )
        (trunk,) = opened.branches
        trunk.num_rows = params.beam_width
        max_new = max_total_tokens - opened.num_prompt_tokens
        opened.task = BeamGroup(trunk, params, max_new)
        return opened

    def enqueue(self, request: Request) -> None:
        super().enqueue(request)
        (trunk,) = request.branches
        self._state.all_or_none[trunk.branch_id] = trunk

    # ---- a step is planned ----

    def plan_running(self, step: StepDraft) -> None:
        """The budget has room for a token of every beam: rows for beams are reserved at admission, and limited to the
        budget while any search runs. Beams that catch up take what the others leave."""
        if not self._state.all_or_none:
            return
        running = [group for group in self._groups() if group.trunk.status == BranchStatus.RUNNING]
        ready = [group for group in running if group.is_ready(self._state.kv_cache) and group.gap]
        ready = [group for group in ready if step.may_run(group.trunk)]
        held_back = sum(group.num_beams for group in ready)
        for group in ready:
            held_back -= group.num_beams
            self._plan_beams(step, group, min(step.budget - held_back, step.room(group.trunk.request.owner)))

    def _plan_beams(self, step: StepDraft, group: BeamGroup, budget: int) -> None:
        """Plans the beams of a search as other branches are planned, but all of them or none."""
        if group.trunk.status != BranchStatus.RUNNING:
            return
        num_new_tokens = min(group.gap, self._most_at_once(group, budget))  # more than one after preemption
        while not group.allocate(num_new_tokens):
            if not group.forget_kept() and self._preemption.make_room(step, group.trunk) is group.trunk:
                return
        step.add_rows(PlannedBeams(group, num_new_tokens, self._state.kv_cache))

    def _most_at_once(self, group: BeamGroup, budget: int) -> int:
        return max(1, min(budget, self._state.max_step_tokens) // group.num_beams)

    def plan_alone(self, step: StepDraft, request: Request) -> bool:
        """Plans the beams of a request that runs alone, once the trunk is computed."""
        (trunk,) = request.branches
        if trunk.status != BranchStatus.RUNNING or trunk.num_computed_tokens < trunk.num_tokens:
            return False
        group = _group_of(trunk)
        if group.is_ready(self._state.kv_cache) and group.gap:
            self._plan_beams(step, group, step.budget)
        return True

    def resume(self, step: StepDraft, branch: Branch) -> Admission | None:
        """A search that was saved and loaded with its beams. They run at once, since the prompt is computed."""
        group = _group_of(branch)
        if not group.is_saved(self._state.kv_cache):
            return None
        if step.budget < group.num_beams:
            return Admission.NOT_NOW
        num_new_tokens = group.resume(self._state.kv_cache, self._most_at_once(group, step.budget))
        if not num_new_tokens:
            return Admission.NO_MEMORY
        self._state.loads.forget(branch)
        self._state.running.append(branch)
        branch.status = BranchStatus.RUNNING
        branch.first_step = self._state.next_step
        self._state.events.scheduled(branch, self._state.now)
        step.add_rows(PlannedBeams(group, num_new_tokens, self._state.kv_cache))
        return Admission.ADMITTED

    # ---- results ----

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Advance searches by their candidates."""
        if not plan.beam_steps:
            return []
        outputs: list[EngineCoreOutput] = []
        for beam_step in plan.beam_steps:
            trunk = self._state.all_or_none.get(beam_step.req_id)
            group = None if trunk is None else _group_of(trunk)
            if group is None or not beam_step.num_candidates or group.trunk.first_step > plan.step:
                continue
            candidates = output.candidates.get(beam_step.req_id)
            if candidates is None:
                outputs += self._state.fail_requests([beam_step.req_id], "the runner returned no candidates")
                continue
            self._state.quarantined.pop(beam_step.req_id, None)
            group.advance(self._state.kv_cache, candidates)
            if group.search.done:
                outputs += self._end(group)
            elif group.wants_snapshots:
                outputs += self._snapshot(group)
        return outputs

    def _snapshot(self, group: BeamGroup) -> list[EngineCoreOutput]:
        """The best text so far."""
        best = group.search.best_so_far()
        return [] if best is None else [_text_output(group, 0, best._replace(finish_reason=None))]

    def _end(self, group: BeamGroup) -> list[EngineCoreOutput]:
        request = group.trunk.request
        texts = group.search.hypotheses()
        if not texts:
            return self._state.fail_requests([request.request_id], "there is no text to find")
        if request.retain_kv is not None or request.original is not None or request.session is not None:
            for choice, sequence in group.final_sequences(request.branch_ids):
                sequence.stays_in_memory = group.trunk.stays_in_memory
                self._state.readings.text_ended(sequence, request, choice)
                self._state.kv_cache.offer_text(sequence, request.retention)
                self._state.end_in_session(sequence, request)
                if not sequence.block_tables or not self._state.lease(sequence, request):
                    self._state.kv_cache.free(sequence)
        request.finished_choices.update(range(request.num_choices))
        self._state.release([group.trunk])
        outputs = [_text_output(group, choice, text) for choice, text in enumerate(texts)]
        if len(texts) < request.num_choices:  # a grammar may have fewer
            outputs[0].num_texts = len(texts)
        return outputs

    # ---- checks ----

    def held(self) -> Sequence[TokenSequence]:
        assert not any(group.held() for group in self._groups() if group.is_saved(self._state.kv_cache)), (
            "beams are saved but have device blocks of their own"
        )
        return [held for group in self._groups() for held in group.held()]

    def _groups(self) -> list[BeamGroup]:
        tasks = (trunk.request.task for trunk in self._state.all_or_none.values())
        return [task for task in tasks if isinstance(task, BeamGroup)]


def _params_of(request: EngineCoreRequest) -> BeamSearchParams:
    assert isinstance(request.params, BeamSearchParams)
    return request.params


def _group_of(trunk: Branch) -> BeamGroup:
    task = trunk.request.task
    assert isinstance(task, BeamGroup)
    return task


def _text_output(group: BeamGroup, choice: int, text: Hypothesis) -> EngineCoreOutput:
    last_token = text.token_ids[-1]
    named = text.finish_reason == FinishReason.STOP and last_token in (group.params.stop_token_ids or ())
    return EngineCoreOutput(
        group.trunk.request_id,
        text.token_ids,
        choice,
        text.finish_reason,
        last_token if named else None,  # the model's own end token is not reported
        num_cached_tokens=group.trunk.num_cached_tokens,
        score=text.score,
        cumulative_logprob=text.cumulative_logprob,
        replaces=True,
    )
