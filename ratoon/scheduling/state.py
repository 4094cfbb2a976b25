"""The scheduler's state: requests and their branches, the queues they stand in, the memory they hold, how they leave.

What runs in a step is decided in planner.py, what a step brought is taken in in results.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ratoon.core.config import SchedulerConfig, SchedulingPolicy
from ratoon.core.errors import DeadlineError, RequestError
from ratoon.core.messages import Fault
from ratoon.core.request import EngineCoreOutput, FinishReason, InheritedFrom
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.events import EventLog
from ratoon.scheduling.extraction import ExtractionQueue
from ratoon.scheduling.queues import FairQueue, sort_key_for
from ratoon.scheduling.shares import Owner, OwnerShares, held_by_owners, last_of_largest, rows_of, tokens_of


class SchedulerState:
    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, leases: LeaseTable) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.leases = leases
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.branches: dict[str, Branch] = {}  # unfinished ones
        self.running: list[Branch] = []
        self.shares = OwnerShares()
        self.waiting = FairQueue(config.policy, self.shares)
        self.order = sort_key_for(config.policy)
        self.searching: dict[str, BeamGroup] = {}  # unfinished beam searches by request id
        self.extractions = ExtractionQueue()
        self.quarantined: dict[str, Request] = {}  # of a step that failed; each runs alone until it has got something
        self.inherited: dict[str, InheritedFrom] = {}  # of continuations that have no token yet: said with their first
        self.with_prompt_logprobs: set[str] = set()  # requests whose prompt rows wait for the first token
        self.finished_rows: list[str] = []  # for the next plan
        self.events = EventLog()
        self._reserved_ids: set[str] = set()  # branch ids of unfinished requests, those not forked yet included

    def add(self, state: Request) -> None:
        """Queue a request. Raises RequestError for an id that is in use."""
        taken = [branch_id for branch_id in state.branch_ids if branch_id in self._reserved_ids]
        if taken:
            raise RequestError("request_id", f"{taken[0]!r} is in use", "an id that no unfinished request has")
        if state.extraction is not None:
            self.extractions.add(state.extraction, self.now)  # may be refused
        self._reserved_ids.update(state.branch_ids)
        state.queued_time = self.now
        self.requests[state.request_id] = state
        self.shares.join(state.owner)
        if state.beams is not None:
            self.searching[state.request_id] = state.beams
        for branch in state.branches:  # one, unless the request began elsewhere and is resumed
            if branch.status != BranchStatus.FINISHED:
                self.branches[branch.branch_id] = branch
                if state.extraction is None:
                    self.waiting.add(branch)
        if state.continuation_of is not None:
            self.leases.await_continuation(state.continuation_of, state.request_id)

    def has_rows_for(self, branch: Branch) -> bool:
        """Is there a row for it, or for each of its beams? While a search runs, there are no more rows than tokens in a
        step, so that all its beams always find room in one."""
        num_rows, limit = len(self.running) + branch.num_rows, self.config.max_num_seqs
        if self.searching:
            num_rows += sum(
                group.width - 1 for group in self.searching.values() if group.trunk.status == BranchStatus.RUNNING
            )
            limit = min(limit, self.config.max_num_batched_tokens)
        return num_rows <= limit

    def spared_owners(self, branch: Branch) -> Collection[Owner]:
        """Whose leases are not taken for this branch: with it, its owner runs more than its share of the pool, and they
        hold no more than theirs of the leases. One branch of each owner gets on in any case."""
        owner = branch.request.owner
        if not self.leases.owners() - {owner} or self.quarantined:
            return ()
        own = {branch, *(other for other in self.running if other.request.owner == owner)}
        num_owners = len(self.leases.owners() | {request.owner for request in self.requests.values()})
        if len(own) <= 1 or sum(map(tokens_of, own)) <= self.kv_cache.num_usable_tokens // num_owners:
            return ()
        return self.leases.owners_within_share() - {owner}

    def last_of_largest_owner(self, branches: list[Branch]) -> Branch | None:
        """Of the least important, the last of the owner that holds most memory; None: each owner has one alone."""
        worst = max(map(self._importance, branches))
        return last_of_largest(branches, tokens_of, self.order, lambda branch: self._importance(branch) == worst)

    def find_one_beyond_its_share(self, waiting: Branch, among: list[Branch]) -> Branch | None:
        """Which of these running branches gives its row or its memory to one that waits, and whose owner runs less than
        its share. None: there is none of an owner that runs more than its own."""
        if not self.shares.contended:
            return None
        if self.has_rows_for(waiting):
            size, capacity = tokens_of, self.kv_cache.num_usable_tokens
        else:
            size, capacity = rows_of, self.config.max_num_seqs
        share = max(1, capacity // self.shares.num_owners)
        if held_by_owners(self.running, size)[waiting.request.owner] + size(waiting) > share:
            return None
        importance = self._importance(waiting)
        return last_of_largest(
            among, size, self.order, lambda branch: self._importance(branch) >= importance, above=share
        )

    def _importance(self, branch: Branch) -> int:
        """Lower is more important. First come, first served, all are equal."""
        return branch.request.priority if self.config.policy == SchedulingPolicy.PRIORITY else 0

    def find_requests(self, ids: Iterable[str]) -> list[Request]:
        """Unfinished requests by their ids or their branches' ids, each once."""
        found: dict[str, Request] = {}
        for some_id in ids:
            branch = self.branches.get(some_id)
            request = branch.request if branch is not None else self.requests.get(some_id)
            if request is not None:
                found[request.request_id] = request
        return list(found.values())

    def fail_requests(self, ids: Iterable[str], message: str) -> list[EngineCoreOutput]:
        """End requests, named by their ids or by those of their branches, with an error. None of their blocks will be
        found in the prefix cache again."""
        return self.end_requests(self.find_requests(ids), FinishReason.ERROR, message)

    def end_overdue(self) -> list[EngineCoreOutput]:
        """End the extractions whose time is over."""
        outputs = []
        for state in self.extractions.overdue(self.now):
            request = state.branch.request
            problem = (
                f"its {state.extraction.deadline:g} s are over, with {state.num_captured} of "
                f"{len(state.extraction.positions)} positions done"
            )
            refusal = Fault(DeadlineError.__name__, "deadline", problem, "more time, or fewer positions")
            error = f"deadline: {problem}"
            outputs += self.end_requests([request], FinishReason.ERROR, error, trusted=True, refusal=refusal)
        return outputs

    def end_requests(
        self,
        requests: list[Request],
        reason: FinishReason,
        error: str | None = None,
        *,
        keep: bool = False,
        trusted: bool | None = None,  # unless said, where nothing went wrong
        refusal: Fault | None = None,
    ) -> list[EngineCoreOutput]:
        """End all choices that are not finished, those included that were never forked."""
        outputs = []
        branches = []
        for request in requests:
            branches += [branch for branch in request.branches if branch.status != BranchStatus.FINISHED]
            for choice in range(request.num_choices):
                if choice not in request.finished_choices:
                    request.finished_choices.add(choice)
                    num_cached_tokens = request.branches[0].num_cached_tokens
                    outputs.append(
                        EngineCoreOutput(
                            request.request_id,
                            [],
                            choice,
                            reason,
                            num_cached_tokens=num_cached_tokens,
                            error=error,
                            refusal=refusal,
                        )
                    )
        if self.events:
            self.events.tell(outputs)
        self.release(branches, trusted=reason != FinishReason.ERROR if trusted is None else trusted, keep=keep)
        for request in requests:
            self._forget(request)
        return outputs

    def set_back(self, branch: Branch, trusted: bool = True, may_swap: bool = False) -> None:
        """A branch loses its memory: it is computed again, or, where it may be and there is room, kept on the host."""
        if branch.request.extraction is not None and branch.status == BranchStatus.RUNNING:
            self.extractions.set_back(branch.request.extraction)
        if not (may_swap and self._swap_out(branch)):
            if branch.request.beams is not None:
                branch.request.beams.set_back()
            self.kv_cache.free(branch, trusted)
        branch.known_to_runner = False
        branch.status = BranchStatus.PREEMPTED

    def _swap_out(self, branch: Branch) -> bool:
        if not branch.request.can_be_swapped:
            return False
        beams = branch.request.beams
        if beams is not None:
            if beams.swap_out():
                return True
            beams.set_back()
        num_computed_tokens = branch.num_computed_tokens
        # Who is let in again runs. Of a trunk that is kept alone, that is the prompt's last token once more; what beams
        # had behind it is computed again.
        branch.num_computed_tokens = min(num_computed_tokens, branch.num_tokens - 1)
        if self.kv_cache.swap_out(branch):
            return True
        branch.num_computed_tokens = num_computed_tokens
        return False

    def release(self, branches: list[Branch], trusted: bool = True, keep: bool = False) -> None:
        """Take ended branches out of everything, and give their memory back, or lease it where that was asked for."""
        waiting = {branch for branch in branches if branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED)}
        for branch in branches:
            if branch.request.extraction is not None:
                self.extractions.remove(branch.request.extraction)
            if branch.request.beams is not None:
                branch.request.beams.set_back()
            retain_kv = branch.request.retain_kv if keep and branch.request.beams is None else None
            if retain_kv is None or not self.leases.grant(branch, self.now + retain_kv, branch.request.owner):
                self.kv_cache.free(branch, trusted)
            branch.status = BranchStatus.FINISHED
            if branch.known_to_runner:
                self.finished_rows.append(branch.branch_id)
            del self.branches[branch.branch_id]
            request = branch.request
            request.finished_choices.add(branch.choice)
            if len(request.finished_choices) == request.num_choices:
                self._forget(request)
        if len(waiting) < len(branches):
            self.running = [branch for branch in self.running if branch.status != BranchStatus.FINISHED]
        if waiting:
            self.waiting.remove(waiting)

    def _forget(self, request: Request) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            self.shares.leave(request.owner)
            self._reserved_ids.difference_update(request.branch_ids)
            self.with_prompt_logprobs.discard(request.request_id)
            self.quarantined.pop(request.request_id, None)
            self.searching.pop(request.request_id, None)
            self.inherited.pop(request.request_id, None)
            if request.continuation_of is not None:
                self.leases.continuation_left(request.continuation_of, request.request_id)
                if request.extraction is not None and request.extraction.extraction.ends_lease:
                    self.leases.end(request.continuation_of)

    def check(self) -> None:
        """Raise AssertionError unless queues, branches and memory agree with each other. Slow: for tests."""
        beams = [held for group in self.searching.values() for held in group.held()]
        self.kv_cache.check([*self.branches.values(), *self.leases.sequences(), *beams])
        assert not any(group.held() for group in self.searching.values() if group.is_on_host(self.kv_cache)), (
            "beams are here and swapped out"
        )
        self.leases.check()
        self.shares.check(request.owner for request in self.requests.values())
        running, waiting = set(self.running), set(self.waiting)
        extracting = {state.branch for state in self.extractions}
        assert len(extracting) == len(self.extractions), "an extraction is queued twice"
        assert len(running) == len(self.running) and len(waiting) == len(self.waiting), "a branch is queued twice"
        assert self.events.request_ids() <= self.requests.keys(), "events of a request that is gone"
        assert self.quarantined.keys() <= self.requests.keys(), "a request is quarantined that is gone"
        assert running | waiting | extracting == set(self.branches.values()), (
            "the queues do not hold exactly the unfinished branches"
        )
        num_rows = sum(branch.num_rows for branch in running)
        assert num_rows <= self.config.max_num_seqs, f"{num_rows} branches run, {self.config.max_num_seqs} may"
        for branch in [*running, *(state.branch for state in self.extractions.running)]:
            assert branch.status == BranchStatus.RUNNING, f"{branch.branch_id} runs with status {branch.status!r}"
        for branch in [*waiting, *(state.branch for state in self.extractions.waiting)]:
            assert branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED), (
                f"{branch.branch_id}: {branch.status!r}"
            )
            assert not any(branch.block_tables), f"{branch.branch_id} waits and holds blocks"
            assert branch.num_computed_tokens == 0, f"{branch.branch_id} waits with computed tokens"
        for branch in self.branches.values():
            assert branch.num_tokens == len(branch.token_ids), f"{branch.branch_id}: miscounted tokens"
            assert branch.num_computed_tokens <= branch.num_tokens, f"{branch.branch_id}: more computed than there is"
            assert branch.num_tokens <= branch.max_total_tokens, f"{branch.branch_id} is longer than it may be"
            assert self.requests.get(branch.request_id) is branch.request, f"{branch.branch_id} has no request"
