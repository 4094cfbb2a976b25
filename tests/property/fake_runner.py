"""A runner without a model: it executes plans exactly, on a KV store that records what was written where.

The content of a slot is a hash of every token up to it (and of the tenant's salt), so a wrong block, a missing copy or
a block shared by mistake all show as wrong content where a branch reads. What the encoder has written is known by its
input, its position and the salt. The next token is a function of the whole prefix and the branch's seed, so that
batching, preemption and forks must not change a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ratoon.core.encoder import EncoderInput
from ratoon.core.kv import KVCacheConfig, SlidingWindowSpec, StateSpec
from ratoon.core.outputs import ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.plan import BeamStep, CaptureStep, InputOverrides, NewRequestData, SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from tests.property.adapters import FakeAdapters
from tests.property.block_store import GARBAGE, BlockStore
from tests.property.extractions import states_of
from tests.property.media import FakeMedia, value_at
from tests.property.references import (
    best_candidates,
    encoder_states,
    extend_prefix,
    logprobs_of,
    next_token,
    start_of,
    vector_of,
)


@dataclass
class Row:
    token_ids: list[int]
    tables: list[list[int]]
    salt: int
    slot: int  # of its adapter
    cross: list[int]  # blocks that only the encoder writes to
    encoder_input: EncoderInput | None
    request: EngineCoreRequest
    overrides: InputOverrides | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    pooling: PoolingParams | None = None
    is_written: bool = True  # False: it only reads what others have written
    pooled: list[int] = field(default_factory=list)  # the prefixes of computed rows, for a mean
    prefixes: list[int] = field(default_factory=list)  # of tokens, for sampling
    contents: list[int] = field(default_factory=list)  # of tokens and salt, for the store

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            before = self.prefixes[-1] if self.prefixes else start_of(self.encoder_input)
            value = value_at(token, len(self.token_ids), self.request.mm_features)
            self.token_ids.append(token)
            self.prefixes.append(extend_prefix(before, value))
            self.contents.append(hash((self.salt, self.prefixes[-1])))

    def fork(self, num_tokens: int) -> Row:
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            tables=[table.copy() for table in self.tables],
            pooled=[],
            prefixes=self.prefixes[:num_tokens],
            contents=self.contents[:num_tokens],
        )


def cross_content(salt: int, encoder_input: EncoderInput | None, position: int) -> object:
    return "cross", salt, start_of(encoder_input), position


class FakeRunner:
    def __init__(
        self,
        kv_config: KVCacheConfig,
        requests: dict[str, EngineCoreRequest],
        vocabulary: int,
        burst: int = 1,
        lateness: int = 0,
        lost_slots: frozenset[int] = frozenset(),
        adapters: FakeAdapters | None = None,
        media: FakeMedia | None = None,
    ) -> None:
        self.sizes = [group.spec.block_size for group in kv_config.groups]
        self.cross_size = 1 if kv_config.cross is None else kv_config.cross.spec.block_size
        self.num_host_blocks = kv_config.num_host_blocks
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindowSpec) else None for g in kv_config.groups]
        # Of a state, the slot of a block's first token holds what is behind the last token that was written
        self.states = [group for group, one in enumerate(kv_config.groups) if isinstance(one.spec, StateSpec)]
        for group in self.states:
            self.windows[group] = 2
        self.requests = requests  # by their ids: plans say neither salts nor whole sequences that are read out
        self.vocabulary = vocabulary
        self.burst = burst  # tokens that a branch may get in one step
        # How often a branch may get none, because what its grammar allows is not known. The blocks before a window may
        # be gone, so that the last token can't be computed again.
        self.lateness = 0 if any(window is not None for window in self.windows) else lateness
        self.num_late: dict[tuple[str, int], int] = {}  # how often it was so, by its id and number of tokens
        self.rows: dict[str, Row] = {}
        self.beams: dict[str, list[Row]] = {}  # by the trunk's id
        self.store = BlockStore(max(*self.sizes, self.cross_size))
        self.lost_slots = lost_slots  # transfers from and to these fail
        self.adapters = adapters or FakeAdapters()
        self.media = media or FakeMedia(0, 0, cuts_images=True)
        self.spans: list[tuple[str, Row, int]] = []  # of the last plan's captures: id, row, tokens
        self.ran: dict[str, tuple[Row, int]] = {}  # of the last plan: rows before it, and their tokens
        self.named_before: set[str] = set()  # by steps that raised: they may be named again, known or not

    # ---- a step, in the order of core/plan.py ----

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.adapters.load(plan.adapter_loads)
        self._drop_rows(plan)
        self._check_transfers(plan)
        report = self.store.move(plan, lambda transfer: transfer.slot in self.lost_slots)
        for new in plan.scheduled_new_reqs:
            self._add_row(new)
        for step in plan.beam_steps:
            if step.num_tokens:
                self._move_beams(step)
        self._enter_copies(plan)
        self._append_blocks(plan)
        self.spans = [span for capture in plan.captures for span in self._spans_of(capture)]
        held = self._readers(plan, self.spans)
        assert held.keys().isdisjoint(load.block for load in plan.loads), "a branch does not wait for its blocks"
        self._run_encoder(plan, held)
        self.media.run(plan)
        for row_id, tokens in plan.scheduled_spec_decode_tokens.items():
            row, count = self.rows[row_id], plan.num_scheduled_tokens[row_id]
            assert row.num_computed_tokens + count == len(row.token_ids) + len(tokens), "drafts of unknown tokens"
            row.extend(tokens)
        scheduled = self._scheduled(plan)
        assert plan.total_num_scheduled_tokens == sum(count for _, _, count in scheduled)
        self.ran = {row_id: (replace(row), count) for row_id, row, count in scheduled}
        self._write(plan)
        for row_id, row, count in scheduled:
            self._read(row_id, row, count)
            self._read_across(row_id, row)
            self.media.read(row.overrides, row.request, range(row.num_computed_tokens, row.num_computed_tokens + count))
            self.adapters.read(row.slot, self._request_of(row_id.rpartition(" of ")[2]))
        for step in plan.encoder_steps:
            self.adapters.read(step.adapter_slot, self._request_of(step.req_id))
        result = self._results(plan)
        result.transfers = report
        result.adapters = self.adapters.report()
        return result

    def fail(self, plan: SchedulerOutput, held_elsewhere: set[int], begun: bool) -> None:
        """What a step that raised may leave behind: garbage in every block that only its own branches read or write,
        and where it copied blocks to on the host. One that has not begun leaves all as it was."""
        if begun:
            self.execute(plan)
            own = set(plan.req_ids) | {name for row_id in plan.req_ids for name, _ in self._named_beams(row_id)}
            readers = self._readers(plan, self.spans)
            spoilt = {block for block, ids in readers.items() if ids <= own} - held_elsewhere
            self.store.spoil(spoilt.union(load.block for load in plan.loads), plan.stores)
        self.named_before.update(plan.req_ids, plan.finished_req_ids, plan.preempted_req_ids)

    def _drop_rows(self, plan: SchedulerOutput) -> None:
        for row_id in plan.finished_req_ids + plan.preempted_req_ids:
            assert row_id in self.rows or row_id in self.named_before, f"{row_id} is dropped, and has no row"
            self.rows.pop(row_id, None)
            self.beams.pop(row_id, None)

    def _check_transfers(self, plan: SchedulerOutput) -> None:
        targets = [copy.dst for copy in plan.block_copies] + [load.block for load in plan.loads]
        assert len(set(targets)) == len(targets), "a block is the target of two transfers"
        slots = [store.slot for store in plan.stores]
        assert len(set(slots)) == len(slots), "a slot is the target of two transfers"
        for transfer in [*plan.stores, *plan.loads]:
            assert 1 <= transfer.slot <= self.num_host_blocks

    def _enter_copies(self, plan: SchedulerOutput) -> None:
        new_ids = {new.req_id for new in plan.scheduled_new_reqs}
        captures = {capture.req_id: capture for capture in plan.captures}
        for copy in plan.block_copies:
            assert copy.req_id in plan.req_ids, "a copy for a branch that does not run"
            if copy.req_id in captures:
                assert captures[copy.req_id].block_ids[copy.group][copy.index] == copy.dst
                continue
            if copy.req_id not in plan.num_scheduled_tokens:
                holders = [row for row in self.beams[copy.req_id] if row.tables[copy.group][copy.index] == copy.dst]
                assert len(holders) == 1, "a copy that is not one beam's"
                continue
            table = self.rows[copy.req_id].tables[copy.group]
            assert table[copy.index] == (copy.dst if copy.req_id in new_ids else copy.src)
            table[copy.index] = copy.dst

    def _append_blocks(self, plan: SchedulerOutput) -> None:
        known = plan.scheduled_cached_reqs
        for row_id, num_computed, appended in zip(known.req_ids, known.num_computed_tokens, known.new_block_ids):
            row = self.rows[row_id]
            if self.lateness and row.num_computed_tokens > num_computed:
                assert num_computed == len(row.token_ids) - 1, "more than the last token is computed again"
                row.num_computed_tokens = num_computed
            assert row.num_computed_tokens == num_computed
            for table, ids in zip(row.tables, appended or [[] for _ in row.tables]):
                table.extend(ids)

    # ---- rows ----

    def _add_row(self, new: NewRequestData) -> None:
        assert new.req_id not in self.rows, f"{new.req_id} is sent in full although the runner knows it"
        row = self._row_of(new.req_id, new)
        row.extend(new.token_ids)
        row.num_prompt_tokens, row.num_computed_tokens = new.num_prompt_tokens, new.num_computed_tokens
        row.params, row.seed = new.params, new.seed
        row.pooling = new.params if isinstance(new.params, PoolingParams) else None
        is_mean = row.pooling is not None and row.pooling.pooling == "mean"
        assert not is_mean or row.num_computed_tokens == 0, f"the first rows of {new.req_id} are missing in its mean"
        self.rows[new.req_id] = row

    def _row_of(self, branch_id: str, plan: NewRequestData | CaptureStep) -> Row:
        """With the tables that the plan gives it, and no token."""
        request = self._request_of(branch_id)
        encoder_input = request.encoder_input
        num_positions = 0 if encoder_input is None else encoder_input.num_positions
        assert plan.num_encoder_positions == num_positions
        assert len(plan.cross_block_ids) == -(-num_positions // self.cross_size)
        tables = [list(ids) for ids in plan.block_ids]
        salt, cross = self._salt_of(branch_id), plan.cross_block_ids
        return Row([], tables, salt, plan.adapter_slot, cross, encoder_input, request, plan.overrides)

    def _request_of(self, branch_id: str) -> EngineCoreRequest:
        return self.requests[branch_id.split("#")[0]]

    def _salt_of(self, branch_id: str) -> int:
        request = self._request_of(branch_id)
        salt = hash(tuple(map(ord, request.cache_salt or "")))
        return salt if request.adapter is None else hash((salt, int(request.adapter.digest, 16)))

    def _spans_of(self, capture: CaptureStep) -> list[tuple[str, Row, int]]:
        """Each span as a row whose computed tokens are those before it."""
        if capture.branch_id:
            assert not capture.token_ids and not capture.spans and not capture.block_ids
            return []
        tokens = self.requests[capture.req_id].prompt_token_ids
        row = self._row_of(capture.req_id, capture)
        row.extend(tokens)
        spans = []
        run: list[int] = []
        for first, count, is_written in capture.spans:
            spans.append((capture.req_id, replace(row, num_computed_tokens=first, is_written=is_written), count))
            run += tokens[first : first + count]
        assert capture.token_ids == run, f"{capture.req_id} runs tokens that do not stand there"
        return spans

    def _move_beams(self, step: BeamStep) -> None:
        if step.parents is not None:
            old = self.beams.get(step.req_id) or [self.rows[step.req_id]]
            beams = []
            num_new = len(step.token_ids) // len(step.parents)
            num_held = step.num_computed_tokens - step.num_restored_tokens
            for beam, parent in enumerate(step.parents):
                row = old[parent].fork(num_held)
                assert row.num_computed_tokens == num_held
                row.num_computed_tokens = step.num_computed_tokens
                row.extend(step.token_ids[beam * num_new : (beam + 1) * num_new])
                beams.append(row)
            self.beams[step.req_id] = beams
        rows = self.beams[step.req_id]
        for group, ids in enumerate(step.block_ids):
            num_columns = len(ids) // len(rows)
            for beam, row in enumerate(rows):
                row.tables[group][step.first_columns[group] :] = ids[beam * num_columns : (beam + 1) * num_columns]

    def _named_beams(self, row_id: str) -> list[tuple[str, Row]]:
        return [(f"beam {beam} of {row_id}", row) for beam, row in enumerate(self.beams.get(row_id, []))]

    def _scheduled(self, plan: SchedulerOutput) -> list[tuple[str, Row, int]]:
        """Every row that runs: its name, itself, and its tokens."""
        scheduled = [(row_id, self.rows[row_id], count) for row_id, count in plan.num_scheduled_tokens.items()]
        for step in plan.beam_steps:
            if step.num_tokens:
                named = self._named_beams(step.req_id)
                assert len(named) == step.num_beams
                scheduled += [(name, row, step.num_tokens) for name, row in named]
        return scheduled + self.spans

    # ---- what is read and written ----

    def _run_encoder(self, plan: SchedulerOutput, held: dict[int, set[str]]) -> None:
        """Cross tables are written by the encoder, each by one step, and before anything can have read them."""
        new_ids = {new.req_id for new in plan.scheduled_new_reqs} | {capture.req_id for capture in plan.captures}
        new_ids.update(name for row_id in new_ids.copy() for name, _ in self._named_beams(row_id))  # resumed searches
        written: set[int] = set()
        for step in plan.encoder_steps:
            assert step.encoder_input == self._request_of(step.req_id).encoder_input
            num_blocks = -(-step.encoder_input.num_positions // self.cross_size)
            assert len(set(step.block_ids)) == len(step.block_ids) == (0 if step.captured else num_blocks)
            for block in step.block_ids:
                assert block not in written, f"block {block} belongs to two encoder inputs"
                assert held.get(block, set()) <= new_ids, f"the encoder writes to block {block}, which is in use"
                assert step.req_id in held.get(block, set()), f"{step.req_id} does not read what is written for it"
            written.update(step.block_ids)
            for position in range(step.encoder_input.num_positions if step.block_ids else 0):
                block, offset = step.block_ids[position // self.cross_size], position % self.cross_size
                self.store.write(block, offset, cross_content(self._salt_of(step.req_id), step.encoder_input, position))

    def _write(self, plan: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        readers = self._readers(plan)
        new_ids = {new.req_id for new in plan.scheduled_new_reqs}
        for row_id, row, _ in self._scheduled(plan):
            self._read_states(row_id, row)
        for row_id, row, count in self._scheduled(plan):
            end = row.num_computed_tokens + count
            assert count > 0 and (end <= len(row.token_ids) or self._is_early(row_id, row))
            for position in range(row.num_computed_tokens, end if row.is_written else 0):
                for group, (table, size) in enumerate(zip(row.tables, self.sizes)):
                    place, offset = divmod(position, size)
                    block = table[place]
                    if group in self.states:
                        if position < end - 1 and offset < size - 1:
                            continue
                        assert block and readers.get(block, set()) <= {row_id}, f"{row_id} writes another's state"
                        offset = 0
                    assert (block, offset) not in written, f"slot {block}:{offset} is written twice"
                    written.add((block, offset))
                    content = (
                        row.contents[position]
                        if position < len(row.contents)
                        else f"no token of {row_id} in step {plan.step}"
                    )
                    self.store.write(block, offset, (group, content))
                    for other in readers.get(block, set()) - {row_id}:
                        # Only a branch that comes in with this very step may share what it writes, as a prefix hit.
                        assert other in new_ids, f"{row_id} writes block {block}, which {other} holds"
                        assert end >= (place + 1) * size, f"{other} has hit a block that is not full"

    def _readers(self, plan: SchedulerOutput, spans: Sequence[tuple[str, Row, int]] = ()) -> dict[int, set[str]]:
        """The holders of a block. Entries before a sliding window are stale: the block may be another sequence's by
        now. So are the beams of a search that does not run: where they go on is said when it does."""
        readers: dict[int, set[str]] = {}
        beams = [named for step in plan.beam_steps if step.num_tokens for named in self._named_beams(step.req_id)]
        for row_id, row in [*self.rows.items(), *beams, *((row_id, row) for row_id, row, _ in spans)]:
            for block in row.cross:
                readers.setdefault(block, set()).add(row_id)
            for group, table in enumerate(row.tables):
                first = self._first_read(group, row.num_computed_tokens) // self.sizes[group]
                for block in table[first:]:
                    readers.setdefault(block, set()).add(row_id)
        return readers

    def _first_read(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _is_early(self, row_id: str, row: Row) -> bool:
        """Whether it got no token in the step before, which this step was planned to compute."""
        return self.num_late.get((row_id, len(row.token_ids)), 0) > 0

    def _read_states(self, row_id: str, row: Row) -> None:
        """Before anything is written: the state behind the tokens that are computed."""
        last = row.num_computed_tokens - 1
        for group in self.states if last >= 0 else ():
            assert row.is_written, f"{row_id} runs tokens again"
            block = row.tables[group][last // self.sizes[group]]
            found = self.store.read(block, 0) if block else "null"
            if last < len(row.contents):
                assert found == (group, row.contents[last]), f"{row_id} goes on from {found!r} at {last}"

    def _read(self, row_id: str, row: Row, count: int) -> None:
        end = min(row.num_computed_tokens + count, len(row.contents))
        for group, table in enumerate(row.tables):
            if group in self.states:
                continue
            for position in range(self._first_read(group, row.num_computed_tokens), end):
                block = table[position // self.sizes[group]]
                found = self.store.read(block, position % self.sizes[group]) if block else "null"
                assert found == (group, row.contents[position]), (
                    f"{row_id} reads {found!r} at {position}, block {block}"
                )

    def _read_across(self, row_id: str, row: Row) -> None:
        for position in range(0 if row.encoder_input is None else row.encoder_input.num_positions):
            block = row.cross[position // self.cross_size]
            found = self.store.read(block, position % self.cross_size)
            assert found == cross_content(row.salt, row.encoder_input, position), (
                f"{row_id} reads {found!r} at encoder position {position}, block {block}"
            )

    # ---- results ----

    def _results(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput()
        for row_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[row_id]
            chunk = self._prompt_logprobs(row, count)
            if chunk is not None:
                result.prompt_logprobs[row_id] = chunk
            row.pooled += row.prefixes[row.num_computed_tokens : row.num_computed_tokens + count]
            row.num_computed_tokens += count
        self._choose_candidates(plan, result)
        self._read_out(plan, result)
        for row_id in plan.pooled_req_ids:
            row = self.rows[row_id]
            assert row.pooling is not None and row.num_computed_tokens == len(row.token_ids)
            result.pooled[row_id] = vector_of(row.pooled if row.pooling.pooling == "mean" else row.pooled[-1:])
        self._sample_all(plan, result)
        self._draft_behind(plan, result)
        return result

    def _draft_behind(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """What drafts on the device write in slots from a branch's last token on, as far as its blocks reach."""
        for row_id, length in plan.draft_lengths.items():
            assert length > 0 and row_id in plan.sampled_req_ids
            if row_id not in result.req_ids:
                continue
            row = self.rows[row_id]
            for position in range(len(row.token_ids) - 1, len(row.token_ids) - 1 + length):
                for table, size in zip(row.tables, self.sizes):
                    place, offset = divmod(position, size)
                    if place < len(table):
                        self.store.write(table[place], offset, GARBAGE)

    def _sample_all(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        sampled: list[tuple[str, list[int]]] = []
        for row_id in plan.sampled_req_ids:
            row = self.rows[row_id]
            if row_id in plan.scheduled_spec_decode_tokens:
                sampled.append((row_id, self._check_drafts(row, plan.scheduled_spec_decode_tokens[row_id])))
                continue
            if self.burst > 1 and row.num_computed_tokens < len(row.token_ids):
                result.known.append(row_id)  # planned before the last run of tokens was known
                continue
            if self._is_late(row_id, row) and row_id not in plan.fanout:
                result.late.append(row_id)
                continue
            assert row.pooling is None and row.num_computed_tokens == len(row.token_ids)
            for child_id, seed in plan.fanout.get(row_id, []):
                sampled.append((child_id, self._sample(row, seed)))
            tokens = self._sample(row, row.seed)
            row.extend(tokens)
            sampled.append((row_id, tokens))
        for row_id, tokens in sampled:
            result.req_ids.append(row_id)
            result.sampled_token_ids.append(tokens)
            root_id = row_id.split("#")[0]  # a child has no row yet
            if self.rows[row_id if row_id in self.rows else root_id].params.logprobs is not None:
                result.logprobs[row_id] = logprobs_of(tokens)

    def _is_late(self, row_id: str, row: Row) -> bool:
        if row.num_computed_tokens > len(row.token_ids):
            return True
        key = row_id, len(row.token_ids)
        num_late = self.num_late.get(key, 0)
        if not self.lateness or num_late >= hash((row.prefixes[-1], 7)) % (self.lateness + 1):
            self.num_late.pop(key, None)
            return False
        self.num_late[key] = num_late + 1
        return True

    def _read_out(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for capture in plan.captures:
            rows = self.spans
            if capture.branch_id:  # the prefixes know the salt: rows of another sequence would show
                rows = [(capture.req_id, *self.ran[capture.branch_id])]
            prefixes = [
                row.prefixes[position]
                for row_id, row, count in rows
                if row_id == capture.req_id
                for position in range(row.num_computed_tokens, row.num_computed_tokens + count)
            ]
            if capture.captured:
                states = states_of([prefixes[row] for row in capture.captured], capture.layers, capture.dtype)
                result.hidden_states[capture.req_id] = states
        for step in plan.encoder_steps:
            if step.captured:
                states = encoder_states(step.encoder_input, step.captured, step.layers, step.dtype)
                result.hidden_states[step.req_id] = states

    def _choose_candidates(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for step in plan.beam_steps:
            rows = self.beams[step.req_id] if step.num_tokens else [self.rows[step.req_id]]
            for row in rows if step.num_tokens else []:
                row.num_computed_tokens += step.num_tokens
            if not step.num_candidates:
                continue
            assert len(rows) == step.num_beams and all(row.num_computed_tokens == len(row.token_ids) for row in rows)
            num_tokens = len(rows[0].token_ids) - rows[0].num_prompt_tokens
            result.candidates[step.req_id] = best_candidates(
                [row.prefixes[-1] for row in rows],
                step.scores,
                step.num_candidates,
                rows[0].params,
                num_tokens,
                self.vocabulary,
            )

    def _sample(self, row: Row, seed: int) -> list[int]:
        """One token, or a run of them where bursts are on, as with speculation."""
        prefix = row.prefixes[-1]
        num_output = len(row.token_ids) - row.num_prompt_tokens
        tokens: list[int] = []
        for _ in range(1 + hash((prefix, 5)) % self.burst):
            tokens.append(next_token(prefix, seed, num_output + len(tokens), row.params, self.vocabulary))
            prefix = extend_prefix(prefix, tokens[-1])
        return tokens

    def _check_drafts(self, row: Row, drafts: list[int]) -> list[int]:
        """The tokens up to the first that is not as guessed, or a run of tokens without a choice. What was guessed
        leaves the row."""
        num_tokens = len(row.token_ids) - len(drafts)
        num_output = num_tokens - row.num_prompt_tokens
        kept: list[int] = []
        for place, draft in enumerate([*drafts, None]):
            prefix = row.prefixes[num_tokens - 1 + place]
            kept.append(next_token(prefix, row.seed, num_output + place, row.params, self.vocabulary))
            if kept[-1] != draft:
                break
        num_right = len(kept) - 1
        for values in (row.token_ids, row.prefixes, row.contents):
            del values[num_tokens:]
        if self.burst > 1:
            kept = self._sample(row, row.seed)
            num_right = min(num_right, len(kept) - 1)
        row.extend(kept)
        row.num_computed_tokens = num_tokens + num_right
        return kept

    def _prompt_logprobs(self, row: Row, count: int) -> PromptLogprobsChunk | None:
        if not isinstance(row.params, SamplingParams) or row.params.prompt_logprobs is None:
            return None
        # The row at position p says how probable the prompt token at p + 1 was.
        start = row.num_computed_tokens + 1
        tokens = row.token_ids[start : min(start + count, row.num_prompt_tokens)]
        if not tokens:
            return None
        return PromptLogprobsChunk(start, logprobs_of(tokens))
