"""Generation: n choices are sampled after a prompt, token by token.

Stop strings are found by the front end, which has the text.
"""

from __future__ import annotations

from ratoon.core.errors import RequestError
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason, ResumedChoice
from ratoon.scheduling.branch import Branch, BranchStatus, Request, branch_seed
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.shared_prefills import SharedPrefills
from ratoon.scheduling.speculation import num_equal
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.task import Task


class GenerationTask(Task):
    """A request that generates. Its branches fork when the prompt is computed. Prompt log-probabilities are kept here
    until they are sent."""

    __slots__ = (
        "forked",
        "next_prompt_logprob",
        "params",
        "params_without_prompt",
        "prompt_logprobs",
        "request",
        "with_prompt_logprobs",
    )

    def __init__(self, request: Request, params: SamplingParams, with_prompt_logprobs: set[str]) -> None:
        """`with_prompt_logprobs`: the ids of all requests that have some, so that others are not checked."""
        if params.prediction_token_ids is not None:  # no part of what is sent to workers
            params = params.clone()
            params.prediction_token_ids = None
        self.params = params
        self.request = request
        self.with_prompt_logprobs = with_prompt_logprobs
        self.forked = params.n == 1  # nothing to fork
        # A preempted prompt computes its first rows again, so the next missing position is stored; the first prompt
        # token has none.
        self.prompt_logprobs: list[PromptLogprobsChunk] = []
        self.next_prompt_logprob = 1
        self.params_without_prompt = params
        if params.prompt_logprobs is not None:
            self.params_without_prompt = params.clone()
            self.params_without_prompt.prompt_logprobs = None

    @property
    def needs_every_prompt_row(self) -> bool:
        """Whether requested prompt log-probabilities are not all computed yet."""
        return self.params.prompt_logprobs is not None and self.next_prompt_logprob < self.request.num_prompt_tokens

    @property
    def reads_prompt(self) -> bool:
        return self.needs_every_prompt_row

    @property
    def reads_encoder_tokens(self) -> bool:
        return bool(self.params.encoder_no_repeat_ngram_size)

    def params_for(self, choice: int) -> SamplingParams:
        """Returns a choice's params, with prompt log-probabilities only where they are still needed."""
        return self.params if choice == 0 and self.needs_every_prompt_row else self.params_without_prompt

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        plan.sampled_req_ids.append(branch_id)
        if not self.forked:
            self.forked = True
            request = self.request
            plan.fanout[branch_id] = [
                (request.branch_ids[choice], branch_seed(request.seed, request.request_id, choice))
                for choice in range(1, request.num_choices)
            ]

    def resume(self, resumed: list[ResumedChoice]) -> None:
        """Resumes choices, which are all past their prompt: each resumes after the tokens that it output in another
        engine, like a preempted branch. The caller already has the prompt's outputs."""
        request = self.request
        self.forked = True
        self.next_prompt_logprob = request.num_prompt_tokens
        (root,) = request.branches
        request.branches = []
        for choice, begun in enumerate(resumed):
            branch = Branch(request, choice, root.token_ids + begun.token_ids, root.extra_keys)
            branch.status = BranchStatus.FINISHED if begun.finished else BranchStatus.PREEMPTED
            if begun.finished:
                request.finished_choices.add(choice)
            request.branches.append(branch)

    def keep_prompt_logprobs(self, chunk: PromptLogprobsChunk) -> None:
        """Keep the new rows. A preempted prompt computes (and sends) its first rows again."""
        end = chunk.start + len(chunk.rows.token_ids)
        num_had = max(0, self.next_prompt_logprob - chunk.start)
        if chunk.start + num_had >= end:
            return
        rows = chunk.rows
        if num_had:
            rows = LogprobsLists(rows.token_ids[num_had:], rows.logprobs[num_had:], rows.sampled_ranks[num_had:])
        self.prompt_logprobs.append(PromptLogprobsChunk(chunk.start + num_had, rows))
        self.next_prompt_logprob = end
        self.with_prompt_logprobs.add(self.request.request_id)

    def take_prompt_logprobs(self) -> list[PromptLogprobsChunk] | None:
        if not self.prompt_logprobs:
            return None
        self.with_prompt_logprobs.remove(self.request.request_id)
        chunks, self.prompt_logprobs = self.prompt_logprobs, []
        return chunks

    def release(self) -> None:
        self.take_prompt_logprobs()  # if the request ends without a token


class GenerationKind(RequestKind):
    params_type = SamplingParams
    task_type = GenerationTask
    resumes = True

    def __init__(self, state: SchedulerState, beginnings: SharedPrefills, preemption: Preemption) -> None:
        super().__init__(state, beginnings, preemption)
        self._with_prompt_logprobs: set[str] = set()  # requests with prompt log-probabilities to send

    # ---- admission ----

    def verify_own(self, request: EngineCoreRequest) -> None:
        if request.resumed is None:
            return
        num_choices = request.num_choices
        if len(request.resumed) != num_choices:
            problem = f"has {len(request.resumed)} entries for {num_choices} choices"
            raise RequestError("resumed", problem, "one for each")
        if all(choice.finished for choice in request.resumed):
            raise RequestError("resumed", "all choices are finished", "at least one that is not")
        room = self.max_total_tokens(request) - len(request.prompt_token_ids)
        for index, choice in enumerate(request.resumed):
            field, count = f"resumed[{index}]", len(choice.token_ids)
            if not choice.token_ids and not choice.finished:
                raise RequestError(field, "has no token", "choices that have begun, or no `resumed` at all")
            if not choice.finished and count >= room:
                raise RequestError(field, f"has {count} tokens and is not finished", f"fewer than {room}")

    def max_new_tokens(self, request: EngineCoreRequest) -> int | None:
        return _params_of(request).max_tokens

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        params = _params_of(request)
        opened = Request(
            request,
            sequence_number,
            self.max_total_tokens(request),
            num_choices=params.n,
            stop_token_ids=stop_tokens_of(params, request.eos_token_id),
            seed=params.seed,
            speculates=params.speculate,
            prediction=params.prediction_token_ids,
            whole_images=self._state.config.whole_images,
        )
        opened.task = task = GenerationTask(opened, params, self._with_prompt_logprobs)
        if request.resumed is not None:
            task.resume(request.resumed)
        for branch in opened.branches:
            branch.plans_ahead = self._state.config.plans_ahead
            if branch.status != BranchStatus.FINISHED:
                self._state.speculation.open(branch)
        return opened

    # ---- results ----

    def fork(self, plan: SchedulerOutput) -> list[Branch]:
        """The other choices of prompts that this step completed, sharing the memory of the first."""
        children = []
        for root_id in plan.fanout:
            root = self._state.branches.get(root_id)
            if root is None or root.first_step > plan.step:
                continue
            request = root.request
            for choice in range(1, request.num_choices):
                child = request.fork_branch(choice)
                child.first_step, child.plans_ahead = plan.step, root.plans_ahead
                self._state.speculation.open(child)
                self._state.kv_cache.fork(root, child, request.num_prompt_tokens)
                self._state.branches[child.branch_id] = child
                children.append(child)
        return children

    def unfork(self, plan: SchedulerOutput) -> None:
        for branch_id in plan.fanout:
            root = self._state.branches.get(branch_id)
            if root is not None and root.first_step <= plan.step:
                _task_of(root).forked = False

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for branch_id, chunk in output.prompt_logprobs.items():
            branch = self._state.branches.get(branch_id)
            if branch is not None and branch.choice == 0 and branch.first_step <= plan.step:
                _task_of(branch).keep_prompt_logprobs(chunk)
        self._take_tokens(plan, output, outputs)
        if output.completed:
            self._end_completed(plan.step, output, outputs)
        if output.late:
            self._compute_again(plan.step, output.late)
        if self._with_prompt_logprobs:
            outputs += self._send_prompt_logprobs()
        num_expected = len(plan.sampled_req_ids) + sum(map(len, plan.fanout.values()))
        num_answered = len(output.req_ids) + len(output.completed) + len(output.known) + len(output.late)
        if num_answered < num_expected or not all(output.sampled_token_ids):
            outputs += self._fail_unanswered(plan, output)
        return outputs

    def _take_tokens(self, plan: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        # The other loop that runs for every branch in every step.
        step, find_branch = plan.step, self._state.branches.get
        give = outputs.append
        all_logprobs, with_prompt_logprobs = output.logprobs, self._with_prompt_logprobs
        drafts = plan.scheduled_spec_decode_tokens
        finished: list[Branch] = []
        drafting: list[Branch] = []
        for branch_id, token_ids in zip(output.req_ids, output.sampled_token_ids):
            branch = find_branch(branch_id)
            if branch is None or branch.first_step > step:
                continue  # aborted; its id may have been reused
            num_tokens = branch.num_tokens
            if branch.num_pending:
                branch.num_pending -= 1
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
                if branch.num_pending and count > 1:
                    _expect_fewer(branch)
                if finish_reason is not None:
                    finished.append(branch)
            else:
                continue
            checked = prompt_logprobs = None
            if branch.speculates:
                if branch_id in drafts:
                    checked = self._state.speculation.checked(branch, drafts[branch_id], token_ids)
                if finish_reason is None:
                    drafting.append(branch)
            if with_prompt_logprobs and branch.choice == 0:
                prompt_logprobs = _task_of(branch).take_prompt_logprobs()
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
                    checked=checked,
                )
            )
        if drafts:
            self._take_back_drafts(plan, output)
        if finished:
            self._state.release(finished, ended_well=True)
        if output.draft_token_ids:
            self._state.speculation.receive(output.draft_token_ids, drafting)
        if self._state.speculation.has_branches:
            num_rows = len(plan.sampled_req_ids) + sum(map(len, drafts.values()))
            self._state.speculation.take_step(plan.total_num_scheduled_tokens, num_rows, self._state.now)
        if drafting:
            self._state.speculation.advance(drafting, self._state.num_running_rows, self._state.now)

    def _take_back_drafts(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Drafts that were not kept count as not computed, and neither does the last token of a branch that got one.
        Tokens that a grammar forces may be in the place of drafts."""
        answers = dict(zip(output.req_ids, output.sampled_token_ids))
        for branch_id, drafts in plan.scheduled_spec_decode_tokens.items():
            branch = self._state.branches.get(branch_id)
            if branch is None or branch.first_step > plan.step:
                continue
            branch.num_drafts = 0
            token_ids = answers.get(branch_id, ())
            num_rejected = len(drafts) - num_equal(drafts, token_ids)
            if token_ids:
                num_rejected = max(num_rejected, branch.num_computed_tokens - branch.num_tokens + 1)
            if num_rejected:
                self._state.kv_cache.take_back(branch, num_rejected)

    def _compute_again(self, step: int, late: list[str]) -> None:
        """Branches that got no token, because what their grammar allows is not known yet. Each of the steps in flight
        that computes a token after it says the same, and then the branch rests."""
        for branch_id in late:
            branch = self._state.branches.get(branch_id)
            if branch is None or branch.first_step > step:
                continue
            if branch.num_computed_tokens > branch.num_tokens:
                self._state.kv_cache.take_back(branch)
            else:
                self._state.rest(branch)
            branch.num_pending = branch.num_computed_tokens - branch.num_tokens  # steps in flight bring no more

    def _send_prompt_logprobs(self) -> list[EngineCoreOutput]:
        """Sends the log-probabilities of prompts that are not fully computed yet, as steps bring them: all of a long
        prompt at once would keep the front end from other requests."""
        outputs = []
        for request_id in sorted(self._with_prompt_logprobs):
            branch = self._state.requests[request_id].branches[0]
            chunks = _task_of(branch).take_prompt_logprobs()
            outputs.append(
                EngineCoreOutput(request_id, [], prompt_logprobs=chunks, num_cached_tokens=branch.num_cached_tokens)
            )
        return outputs

    def _end_completed(self, step: int, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        """Branches whose text can't go on: they end like those with a stop token, without one."""
        finished: list[Branch] = []
        for branch_id in output.completed:
            branch = self._state.branches.get(branch_id)
            if branch is None or branch.first_step > step:
                continue
            prompt_logprobs = _task_of(branch).take_prompt_logprobs() if branch.choice == 0 else None
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    branch.choice,
                    FinishReason.STOP,
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=branch.num_cached_tokens,
                )
            )
            finished.append(branch)
        self._state.release(finished, ended_well=True)

    def _fail_unanswered(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        answered = {req_id for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids) if token_ids}
        expected = plan.sampled_req_ids + [child_id for children in plan.fanout.values() for child_id, _ in children]
        answered.update(output.completed, output.known, output.late)
        missing = [req_id for req_id in expected if req_id not in answered]
        return self._state.fail_requests(missing, "the runner returned no token")


def _params_of(request: EngineCoreRequest) -> SamplingParams:
    assert isinstance(request.params, SamplingParams)
    return request.params


def _task_of(branch: Branch) -> GenerationTask:
    task = branch.request.task
    assert isinstance(task, GenerationTask)
    return task


def stop_tokens_of(params: SamplingParams, eos_token_id: int | None) -> frozenset[int]:
    """The tokens that end a branch. Normally computed by the InputProcessor."""
    if params.all_stop_token_ids is not None:
        return frozenset(params.all_stop_token_ids)
    stops = set(params.stop_token_ids or ())
    if eos_token_id is not None and not params.ignore_eos:
        stops.add(eos_token_id)
    return frozenset(stops)


def check_stop(branch: Branch, token_ids: list[int]) -> tuple[int, FinishReason | None, int | None]:
    """How many of the sampled tokens count, why the branch ends there (None: it goes on), and the stop token to report.

    Called before the tokens are appended. The end-of-sequence tokens are stop tokens too, but only one that the caller
    named is reported. A stop token before `min_tokens` is an ordinary token; the sampler should not have chosen it. A
    forced end token at the length limit counts as LENGTH.
    """
    params = _task_of(branch).params
    num_output_tokens = branch.num_output_tokens
    room = branch.max_total_tokens - branch.num_tokens
    for count, token in enumerate(token_ids, start=1):
        if count >= room and token in (params.forced_eos_token_id or ()):
            return count, FinishReason.LENGTH, None
        if token in branch.stop_token_ids and num_output_tokens + count > params.min_tokens:
            return count, FinishReason.STOP, token if token in (params.stop_token_ids or ()) else None
        if count >= room:
            return count, FinishReason.LENGTH, None
    return len(token_ids), None, None


def _expect_fewer(branch: Branch) -> None:
    """A step brought tokens without a choice beside the one that was sampled. A step in flight that computes one of
    these samples nothing after it, unless it is the last."""
    num_ahead = branch.num_computed_tokens - branch.num_tokens  # of known tokens
    branch.num_pending = min(branch.num_pending, max(0, num_ahead + 1))


def _first_rows(rows: LogprobsLists | None, count: int) -> LogprobsLists | None:
    if rows is None:
        return None
    return LogprobsLists(rows.token_ids[:count], rows.logprobs[:count], rows.sampled_ranks[:count])
