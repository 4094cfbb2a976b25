"""A runner without a model: it carries out plans to the letter, on a KV store that remembers what was written where.

The content of a slot is a hash of every token up to it (and of the tenant's salt), so a wrong block, a missing copy or
a block shared by mistake all show as wrong content where a branch reads. The next token is a function of the whole
prefix and the branch's seed, so that batching, preemption and forks must not change a single one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ratoon.core.kv import KVCacheConfig, SlidingWindowSpec
from ratoon.core.outputs import BeamCandidates, LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.plan import BeamStep, CaptureStep, NewRequestData, SchedulerOutput
from ratoon.core.request import Extraction
from ratoon.core.wire import WireTensor
from ratoon.scheduling.beams import BeamSearch, Hypothesis
from tests.property.extractions import states_of

GARBAGE = "garbage"


def extend_prefix(prefix: int, token: int) -> int:
    return hash((prefix, token))


def next_token(prefix: int, seed: int, num_output_tokens: int, params: SamplingParams, vocabulary: int) -> int:
    token = hash((prefix, seed, 4)) % vocabulary
    stops = params.all_stop_token_ids or []
    while token in stops and num_output_tokens < params.min_tokens:
        token = (token + 1) % vocabulary
    return token


def reference_tokens(
    prompt: list[int], params: SamplingParams, seed: int, max_total_tokens: int, vocabulary: int
) -> list[int]:
    """What one choice must come to, computed alone."""
    prefix = 0
    for token in prompt:
        prefix = extend_prefix(prefix, token)
    output: list[int] = []
    while len(prompt) + len(output) < max_total_tokens:
        token = next_token(prefix, seed, len(output), params, vocabulary)
        output.append(token)
        prefix = extend_prefix(prefix, token)
        if token in (params.all_stop_token_ids or []):
            break
    return output


def best_candidates(
    prefixes: list[int], scores: list[float], num_candidates: int, held_back: list[int], vocabulary: int
) -> BeamCandidates:
    """Of beams with these prefixes: what a model would say that finds some tokens equally good."""
    found = []
    for beam, (prefix, score) in enumerate(zip(prefixes, scores)):
        for token in range(vocabulary):
            logprob = float("-inf") if token in held_back else -(hash((prefix, token, 7)) % 40) / 8
            found.append((score + logprob, beam, token))
    found.sort(key=lambda candidate: (-candidate[0], candidate[1:]))
    best = found[:num_candidates]
    return BeamCandidates([c[0] for c in best], [c[1] for c in best], [c[2] for c in best])


def reference_texts(
    prompt: list[int], params: BeamSearchParams, max_total_tokens: int, vocabulary: int
) -> list[Hypothesis]:
    """What a beam search must find, alone."""
    search = BeamSearch(params, max_total_tokens - len(prompt))
    start = 0
    for token in prompt:
        start = extend_prefix(start, token)
    prefixes = [start]
    while not search.done:
        found = best_candidates(
            prefixes, search.scores, search.num_candidates, sorted(search.held_back_token_ids), vocabulary
        )
        moves = search.advance(found.scores, found.beams, found.token_ids)
        prefixes = [extend_prefix(prefixes[parent], token) for parent, token in zip(moves.parents, moves.tokens)]
    return search.hypotheses()


def reference_states(token_ids: list[int], extraction: Extraction) -> WireTensor:
    """What must be read out of a sequence."""
    prefixes: list[int] = []
    for token in token_ids:
        prefixes.append(extend_prefix(prefixes[-1] if prefixes else 0, token))
    return states_of([prefixes[position] for position in extraction.positions], extraction.layers, extraction.dtype)


def reference_vector(prompt: list[int], params: PoolingParams) -> WireTensor:
    """What a prompt's vector must be: a number for each row that went into it, in order."""
    prefixes: list[int] = []
    for token in prompt:
        prefixes.append(extend_prefix(prefixes[-1] if prefixes else 0, token))
    return vector_of(prefixes if params.pooling == "mean" else prefixes[-1:])


def vector_of(numbers: list[int]) -> WireTensor:
    return WireTensor("int64", (len(numbers),), array("q", numbers).tobytes())


def logprobs_of(tokens: list[int]) -> LogprobsLists:
    return LogprobsLists([[token] for token in tokens], [[-float(token)] for token in tokens], [1] * len(tokens))


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    tables: list[list[int]]
    num_computed_tokens: int
    salt: int
    pooling: PoolingParams | None = None
    is_written: bool = True  # False: it only reads what others have written
    pooled: list[int] = field(default_factory=list)  # the prefixes of computed rows, for a mean
    prefixes: list[int] = field(default_factory=list)  # of tokens, for sampling
    contents: list[int] = field(default_factory=list)  # of tokens and salt, for the store

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            self.token_ids.append(token)
            self.prefixes.append(extend_prefix(self.prefixes[-1] if self.prefixes else 0, token))
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


class FakeRunner:
    def __init__(
        self,
        kv_config: KVCacheConfig,
        salts: dict[str, int],
        sequences: dict[str, list[int]],
        vocabulary: int,
        burst: int = 1,
    ) -> None:
        self.block_size = kv_config.block_size
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindowSpec) else None for g in kv_config.groups]
        self.salts = salts  # request id → salt
        self.sequences = sequences  # request id → tokens of what is read out; the plan has only those that run
        self.vocabulary = vocabulary
        self.burst = burst  # tokens that a branch may get in one step
        self.rows: dict[str, Row] = {}
        self.beams: dict[str, list[Row]] = {}  # by the trunk's id
        self.store: dict[int, list[object]] = {}  # block id → (group, content) by offset
        self.spans: list[tuple[str, Row, int]] = []  # of the last plan's captures: id, row, tokens
        self.num_computed = 0  # tokens, over all steps

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for row_id in plan.finished_req_ids + plan.preempted_req_ids:
            del self.rows[row_id]  # and nobody else may be named
            self.beams.pop(row_id, None)
        for new in plan.scheduled_new_reqs:
            self._add_row(new)
        for step in plan.beam_steps:
            if step.num_tokens:
                self._move_beams(step)
        self._copy_blocks(plan)
        self._append_blocks(plan)
        self.spans = [span for capture in plan.captures for span in self._spans_of(capture)]
        scheduled = self._scheduled(plan)
        assert plan.total_num_scheduled_tokens == sum(count for _, _, count in scheduled)
        self._write(plan)
        for row_id, row, count in scheduled:
            self._read(row_id, row, count)
        return self._results(plan)

    def _spans_of(self, capture: CaptureStep) -> list[tuple[str, Row, int]]:
        """Each span as a row whose computed tokens are those before it."""
        tokens = self.sequences[capture.req_id]
        row = Row([], len(tokens), SamplingParams(), 0, list(capture.block_ids), 0, self.salts[capture.req_id])
        row.extend(tokens)
        spans = []
        run: list[int] = []
        for first, count, is_written in capture.spans:
            spans.append((capture.req_id, replace(row, num_computed_tokens=first, is_written=is_written), count))
            run += tokens[first : first + count]
        assert capture.token_ids == run, f"{capture.req_id} runs tokens that do not stand there"
        return spans

    def _scheduled(self, plan: SchedulerOutput) -> list[tuple[str, Row, int]]:
        """Every row that runs: its name, itself, and its tokens."""
        scheduled = [(row_id, self.rows[row_id], count) for row_id, count in plan.num_scheduled_tokens.items()]
        for step in plan.beam_steps:
            if step.num_tokens:
                named = self._named_beams(step.req_id)
                assert len(named) == step.num_beams
                scheduled += [(name, row, step.num_tokens) for name, row in named]
        return scheduled + self.spans

    def _named_beams(self, row_id: str) -> list[tuple[str, Row]]:
        return [(f"beam {beam} of {row_id}", row) for beam, row in enumerate(self.beams.get(row_id, []))]

    def _move_beams(self, step: BeamStep) -> None:
        if step.parents is not None:
            old = self.beams.get(step.req_id) or [self.rows[step.req_id]]
            beams = []
            num_new = len(step.token_ids) // len(step.parents)
            for beam, parent in enumerate(step.parents):
                row = old[parent].fork(step.num_computed_tokens)
                assert row.num_computed_tokens == step.num_computed_tokens
                row.extend(step.token_ids[beam * num_new : (beam + 1) * num_new])
                beams.append(row)
            self.beams[step.req_id] = beams
        rows = self.beams[step.req_id]
        for group, ids in enumerate(step.block_ids):
            num_columns = len(ids) // len(rows)
            for beam, row in enumerate(rows):
                row.tables[group][step.first_column :] = ids[beam * num_columns : (beam + 1) * num_columns]

    def spoil(self, plan: SchedulerOutput, held_elsewhere: set[int]) -> None:
        """What a step that raised may leave behind: garbage in every block that only its own branches read or write."""
        own = set(plan.req_ids) | {name for row_id in plan.req_ids for name, _ in self._named_beams(row_id)}
        for block, readers in self._readers(plan, self.spans).items():
            if readers <= own and block not in held_elsewhere:
                self.store[block] = [GARBAGE] * self.block_size

    def _add_row(self, new: NewRequestData) -> None:
        assert new.req_id not in self.rows, f"{new.req_id} is sent in full although the runner knows it"
        salt = self.salts[new.req_id.split("#")[0]]
        tables = [list(ids) for ids in new.block_ids]
        row = Row(
            [], new.num_prompt_tokens, new.sampling_params, new.seed, tables, new.num_computed_tokens, salt,
            new.pooling_params,
        )  # fmt: skip
        row.extend(new.token_ids)
        self.rows[new.req_id] = row

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        new_ids = {new.req_id for new in plan.scheduled_new_reqs}
        contents = [list(self.store[copy.src]) for copy in plan.block_copies]  # all are read before one is written
        for copy, content in zip(plan.block_copies, contents):
            assert copy.req_id in plan.req_ids, "a copy for a branch that does not run"
            self.store[copy.dst] = content
            captures = {capture.req_id: capture for capture in plan.captures}
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
            assert row.num_computed_tokens == num_computed
            for table, ids in zip(row.tables, appended or [[] for _ in row.tables]):
                table.extend(ids)

    def _write(self, plan: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        readers = self._readers(plan)
        new_ids = {new.req_id for new in plan.scheduled_new_reqs}
        for row_id, row, count in self._scheduled(plan):
            end = row.num_computed_tokens + count
            assert count > 0 and end <= len(row.token_ids)
            self.num_computed += count
            for position in range(row.num_computed_tokens, end if row.is_written else 0):
                place, offset = divmod(position, self.block_size)
                for group, table in enumerate(row.tables):
                    block = table[place]
                    assert block != 0, f"{row_id} writes position {position} to the null block"
                    assert (block, offset) not in written, f"slot {block}:{offset} is written twice"
                    written.add((block, offset))
                    self.store.setdefault(block, [None] * self.block_size)[offset] = (group, row.contents[position])
                    for other in readers.get(block, set()) - {row_id}:
                        # Only a branch that comes in with this very step may share what it writes, as a prefix hit.
                        assert other in new_ids, f"{row_id} writes block {block}, which {other} holds"
                        assert end >= (place + 1) * self.block_size, f"{other} has hit a block that is not full"

    def _readers(self, plan: SchedulerOutput, spans: Sequence[tuple[str, Row, int]] = ()) -> dict[int, set[str]]:
        """Who holds a block. Entries that fell out of a window are stale: the block may be anybody's by now. So are the
        beams of a search that does not run: where they go on is said when it does."""
        readers: dict[int, set[str]] = {}
        beams = [named for step in plan.beam_steps if step.num_tokens for named in self._named_beams(step.req_id)]
        for row_id, row in [*self.rows.items(), *beams, *((row_id, row) for row_id, row, _ in spans)]:
            for group, table in enumerate(row.tables):
                first = self._first_read(group, row.num_computed_tokens) // self.block_size
                for block in table[first:]:
                    readers.setdefault(block, set()).add(row_id)
        return readers

    def _first_read(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _read(self, row_id: str, row: Row, count: int) -> None:
        end = row.num_computed_tokens + count
        for group, table in enumerate(row.tables):
            for position in range(self._first_read(group, row.num_computed_tokens), end):
                block = table[position // self.block_size]
                found = self.store[block][position % self.block_size] if block else "null"
                assert found == (group, row.contents[position]), (
                    f"{row_id} reads {found!r} at {position}, block {block}"
                )

    def _results(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput()
        sampled: list[tuple[str, list[int]]] = []
        for row_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[row_id]
            chunk = self._prompt_logprobs(row, count)
            if chunk is not None:
                result.prompt_logprobs[row_id] = chunk
            row.pooled += row.prefixes[row.num_computed_tokens : row.num_computed_tokens + count]
            row.num_computed_tokens += count
        self._choose_candidates(plan, result)
        for capture in plan.captures:
            prefixes = [
                row.prefixes[position]
                for row_id, row, count in self.spans
                if row_id == capture.req_id
                for position in range(row.num_computed_tokens, row.num_computed_tokens + count)
            ]
            if capture.captured:
                states = states_of([prefixes[row] for row in capture.captured], capture.layers, capture.dtype)
                result.hidden_states[capture.req_id] = states
        for row_id in plan.pooled_req_ids:
            row = self.rows[row_id]
            assert row.pooling is not None and row.num_computed_tokens == len(row.token_ids)
            result.pooled[row_id] = vector_of(row.pooled if row.pooling.pooling == "mean" else row.pooled[-1:])
        for row_id in plan.sampled_req_ids:
            row = self.rows[row_id]
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
        return result

    def _choose_candidates(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for step in plan.beam_steps:
            rows = self.beams[step.req_id] if step.num_tokens else [self.rows[step.req_id]]
            for row in rows if step.num_tokens else []:
                row.num_computed_tokens += step.num_tokens
            if not step.num_candidates:
                continue
            assert len(rows) == step.num_beams and all(row.num_computed_tokens == len(row.token_ids) for row in rows)
            result.candidates[step.req_id] = best_candidates(
                [row.prefixes[-1] for row in rows], step.scores, step.num_candidates, step.held_back, self.vocabulary
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

    def _prompt_logprobs(self, row: Row, count: int) -> PromptLogprobsChunk | None:
        if row.params.prompt_logprobs is None:
            return None
        # The row at position p says how probable the prompt token at p + 1 was.
        start = row.num_computed_tokens + 1
        tokens = row.token_ids[start : min(start + count, row.num_prompt_tokens)]
        if not tokens:
            return None
        return PromptLogprobsChunk(start, logprobs_of(tokens))
