"""The beams of one request as the scheduler sees them: the search, its memory, and the steps that it needs.

A beam request has one branch, the trunk, which computes the prompt like any other. Its beams are created when the
prompt is computed, run in the same steps, all or none, and are preempted together. The scheduler decides which requests
run and which are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator

from ratoon.core.outputs import BeamCandidates
from ratoon.core.params import BeamSearchParams, RequestOutputKind
from ratoon.core.plan import BeamStep, BlockIds, SchedulerOutput
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.swap import Tables
from ratoon.memory.tails import BeamTails, KeptTail, tail_blocks
from ratoon.scheduling.beams import BeamSearch
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.task import Task


class BeamGroup(Task):
    __slots__ = (
        "_changed",
        "_kept",
        "_max_new_tokens",
        "_moves",
        "_num_restored_tokens",
        "_num_unwritten_tokens",
        "_retained",
        "_tails",
        "params",
        "search",
        "trunk",
        "wants_snapshots",
        "width",
    )

    branches_are_texts = False

    def __init__(self, trunk: Branch, params: BeamSearchParams, max_new_tokens: int) -> None:
        self.params = params
        self.trunk = trunk
        self.search = BeamSearch(params, max_new_tokens)
        self.width = params.beam_width
        self._max_new_tokens = max_new_tokens
        self.wants_snapshots = params.output_kind == RequestOutputKind.CUMULATIVE
        # Keep the best texts' memory, to lease or read it at the end
        self._retained = trunk.request.retain_kv is not None or trunk.request.original is not None
        self._tails: BeamTails | None = None  # None: the prompt is not computed
        # Not sent to the runner yet: the parent of each beam, and the tokens after its computed ones.
        self._moves: tuple[list[int], list[int]] | None = None
        self._num_restored_tokens = 0  # of the tokens in `_moves`: those swapped in as computed
        self._changed: tuple[list[int], BlockIds] = ([], ())
        self._num_unwritten_tokens = 0  # of each beam: allocated, but not in a step yet
        self._kept: dict[int, KeptTail] = {}  # by the number of the finished text

    # ---- steps ----

    @property
    def reads_encoder_tokens(self) -> bool:
        return bool(self.params.encoder_no_repeat_ngram_size)

    def params_for(self, choice: int) -> BeamSearchParams:
        return self.params

    @property
    def num_beams(self) -> int:
        return self.search.num_beams

    @property
    def gap(self) -> int:
        """Tokens per beam that are not computed."""
        assert self._tails is not None
        return self.trunk.num_tokens + self.search.num_tokens - self._tails.num_computed_tokens

    def is_ready(self, kv_cache: KVCacheManager) -> bool:
        """Whether there are beams that can run. Preempted beams resume after their trunk is computed again."""
        if self._tails is None and self.search.num_tokens and self.trunk.num_computed_tokens == self.trunk.num_tokens:
            self._tails = BeamTails(kv_cache, self.trunk)
            self._tails.fork([0] * self.num_beams)
            self._move_all_from_trunk()
        return self._tails is not None

    def _move_all_from_trunk(self) -> None:
        """The runner has no rows for the beams: send them with all their tokens."""
        tokens = [token for beam in range(self.num_beams) for token in self.search.running_token_ids(beam)]
        self._moves = ([0] * self.num_beams, tokens)

    def num_blocks_to_come(self, kv_cache: KVCacheManager) -> int:
        """The blocks that the beams need as soon as the prompt is computed, for all their tokens so far."""
        num_new_tokens = min(max(self.search.num_tokens, 1) + 1, self._max_new_tokens)
        return self.width * tail_blocks(kv_cache, self.trunk.num_tokens, num_new_tokens)

    def allocate(self, num_tokens: int) -> bool:
        """Allocate `num_tokens` for every beam. False: not enough memory, and nothing changed."""
        assert self._tails is not None
        changed = self._tails.allocate(num_tokens)
        if changed is None:
            return False
        self._changed = changed
        self._num_unwritten_tokens = num_tokens
        return True

    def take_step(self, num_tokens: int) -> BeamStep:
        """The step that `allocate` was called for."""
        assert self._tails is not None
        parents, token_ids = self._moves if self._moves is not None else (None, [])
        self._moves = None
        num_restored_tokens, self._num_restored_tokens = self._num_restored_tokens, 0
        self._num_unwritten_tokens = 0
        first_columns, block_ids = self._changed
        step = BeamStep(
            req_id=self.trunk.branch_id,
            num_tokens=num_tokens,
            num_computed_tokens=self._tails.num_computed_tokens - num_tokens,
            parents=parents,
            token_ids=token_ids,
            num_restored_tokens=num_restored_tokens,
            first_columns=first_columns,
            block_ids=block_ids,
            scores=self.search.scores,
        )
        return step if self.gap else self._with_candidates(step)

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        """The trunk's last step yields the first candidates, unless the search already has them."""
        if not self.search.num_tokens:
            plan.beam_steps.append(self._with_candidates(BeamStep(req_id=branch_id, scores=self.search.scores)))

    def _with_candidates(self, step: BeamStep) -> BeamStep:
        step.num_candidates = self.search.num_candidates
        return step

    # ---- results ----

    def advance(self, kv_cache: KVCacheManager, found: BeamCandidates) -> None:
        """Apply candidates: beams finish, fork and free memory."""
        if self._tails is None:
            self._tails = BeamTails(kv_cache, self.trunk)
        moves = self.search.advance(found.scores, found.beams, found.token_ids)
        if self._retained:
            self._keep_leading(self._tails)
        self._tails.fork(moves.parents)
        self._moves = (moves.parents, moves.tokens)

    def _keep_leading(self, tails: BeamTails) -> None:
        """Keep the memory of the best texts only."""
        leading = {finished.number: finished for finished in self.search.leading()}
        for number in self._kept.keys() - leading.keys():
            tails.drop(self._kept.pop(number))
        for number, finished in leading.items():
            if number not in self._kept and finished.num_tokens == self.search.num_tokens:
                self._kept[number] = tails.keep(finished.beam)

    def final_sequences(self, branch_ids: list[str]) -> Iterator[tuple[int, TokenSequence]]:
        """The best texts, the best last, each with its choice, and with its memory if that was kept. The caller takes
        ownership."""
        texts = self.search.hypotheses()
        for choice, finished in reversed(list(enumerate(self.search.leading()))):
            kept, tokens = self._kept.pop(finished.number, None), self.trunk.token_ids + texts[choice].token_ids
            if kept is None:
                yield choice, TokenSequence(branch_ids[choice], tokens, self.trunk.extra_keys)
            else:
                assert self._tails is not None
                yield choice, self._tails.as_sequence(kept, branch_ids[choice], tokens)

    # ---- memory ----

    def forget_kept(self) -> bool:
        """Free kept memory before running branches are preempted. False: there was none."""
        if not self._kept:
            return False
        assert self._tails is not None
        for kept in self._kept.values():
            self._tails.drop(kept)
        self._kept.clear()
        return True

    def is_saved(self, kv_cache: KVCacheManager) -> bool:
        """Whether the beams are in the block store with their trunk. Do not cache the answer: they may be lost."""
        return kv_cache.num_tail_tokens(self.trunk) > 0

    def tails(self) -> list[Tables]:
        return [] if self._tails is None else self._tails.tables()

    @property
    def num_tail_tokens(self) -> int:
        if self._tails is None:
            return 0
        num_of_each = self._tails.num_computed_tokens - self._num_unwritten_tokens - self.trunk.num_tokens
        return len(self._tails) * num_of_each

    def swap_out(self) -> bool:
        """Move the trunk and the beams to the block store. Kept memory of finished texts is freed. False: not enough
        room there, or no beam has computed anything, and nothing changed."""
        if self._tails is None or not self._tails.swap_out(self._num_unwritten_tokens):
            return False
        self.reclaim()
        return True

    def resume(self, kv_cache: KVCacheManager, most: int) -> int:
        """Go on with the loaded beams, by up to `most` tokens of each. Returns how many; 0: not enough memory, and
        nothing changed."""
        tails = BeamTails.loaded(kv_cache, self.trunk)
        num_tokens = min(most, self.trunk.num_tokens + self.search.num_tokens - tails.num_computed_tokens)
        self._num_restored_tokens = tails.num_computed_tokens - self.trunk.num_tokens
        changed = tails.allocate(num_tokens)
        if changed is None:
            self._num_restored_tokens = 0
            return 0
        kv_cache.resumed(self.trunk)
        self._tails, self._changed, self._num_unwritten_tokens = tails, changed, num_tokens
        self._move_all_from_trunk()
        return num_tokens

    def reclaim(self) -> None:
        """Free the memory of the beams. The state of the search is kept."""
        if self._tails is None:
            return
        self.forget_kept()
        self._tails.release()
        self._tails = None
        self._moves = None
        self._num_restored_tokens = self._num_unwritten_tokens = 0

    def held(self) -> list[TokenSequence]:
        """The tables that hold references, as sequences, for checks."""
        tables = [kept.tail for kept in self._kept.values()]
        sequences = []
        for tail in [*tables, *(self._tails.tables() if self._tails is not None else ())]:
            sequence = TokenSequence(self.trunk.branch_id, [])
            sequence.block_tables = tail
            sequences.append(sequence)
        return sequences
