"""The runner: executes a step plan in two phases, `execute_model` (forward pass) and `sample_tokens`.

It wires and orders the parts, each of which has its own module. It knows branches by their rows only; requests, queues
and block accounting are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.core.kv import KVCacheConfig, SlidingWindowSpec
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, SchedulerOutput
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.row_writes import RowWrites
from ratoon.execution.inputs.step_inputs import InputPreparation, ReadRows, StepInputs
from ratoon.execution.kv.kv_tensors import KVTensors
from ratoon.execution.passes.encoder import EncoderRunner
from ratoon.execution.passes.step_context import PagedStep
from ratoon.execution.readers.beams import BeamKeysPass, CandidatesReader
from ratoon.execution.readers.hidden_states import CaptureReader, captured_rows, lay_out_spans
from ratoon.execution.readers.interface import (
    ExecutedPass,
    LogitsPass,
    LogitsReader,
    NextTokenReader,
    PassEnd,
    PendingOutput,
    RowReader,
    StepLayout,
    join,
    rows_of,
)
from ratoon.execution.readers.pooling import PoolingBranches
from ratoon.execution.readers.prompt_logprobs import PromptLogprobsReader, wants_prompt_logprobs
from ratoon.execution.readers.sampled import MaskedPass, SampledOnHost, SampledPass, SampledRowsReader
from ratoon.execution.sampling.beam_rows import BeamRows
from ratoon.execution.sampling.mask_column import MaskColumn
from ratoon.execution.sampling.penalty_rows import PenaltyRows
from ratoon.execution.sampling.sampler import HostTokens, Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.layers import sampling
from ratoon.layers.beams import SearchShape
from ratoon.models.base import LanguageModel, StreamObserver
from ratoon.models.encoder_decoder import EncoderDecoderLM

if TYPE_CHECKING:
    from ratoon.execution.inputs.device_inputs import DeviceInputs, DeviceRows
    from ratoon.execution.passes.graphs import Capture, GraphKey, StepGraphs
    from ratoon.execution.passes.recorded_passes import RecordedPasses


FIRST = np.zeros(1, np.int64)  # the one request of a step

Executed = ExecutedPass | LogitsPass | BeamKeysPass | SampledPass | MaskedPass | SampledOnHost


class ModelRunner:
    def __init__(
        self,
        model: LanguageModel,
        backends: Sequence[AttentionBackend],
        kv_config: KVCacheConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        max_num_reqs: int,
        max_num_tokens: int,
        encoder_backend: AttentionBackend | None = None,
        inputs_on_device: bool | None = None,
        capture: Capture | None = None,
        record: bool = False,
        grammars: GrammarCompiler | None = None,
        jump_forward: bool = False,
    ) -> None:
        """`backends`: one for each of the KV config's groups, the cross group's last; `encoder_backend`: for the
        encoder's own attention, where the model has one. `inputs_on_device`: whether kernels prepare a step's inputs;
        by default on CUDA. `capture`: makes graphs of small steps whose inputs are on the device. `record`: small steps
        are recorded passes, where the backends allow it: the model's layers use no collective. `grammars`: of
        structured output. `jump_forward`: tokens without a choice are appended at once, where rows are on the host."""
        self.model = model
        self.device = device
        self.kv = KVTensors(kv_config, backends, device)
        num_rows = max_num_reqs + MAX_CAPTURE_SPANS
        self.encoder: EncoderRunner | None = None
        max_encoder_len = 0
        if model.config.encoder is not None:
            assert encoder_backend is not None, "the model has an encoder"
            self.encoder = EncoderRunner(encoder_backend, self.kv, kv_config.block_size, dtype, device)
            max_encoder_len = model.config.encoder.max_position
        on_device = device.type == "cuda" if inputs_on_device is None else inputs_on_device
        journal = RowWrites() if on_device else None
        self.input_batch = InputBatch(
            num_rows, max_model_len, kv_config.block_size, len(kv_config.groups), max_encoder_len, journal
        )
        penalties = PenaltyRows(model.config.vocab_size, device) if device.type == "cuda" else None
        self.sampling_rows = SamplingRows(max_num_reqs, penalties, grammars)
        # A row that is left out computes its last token again, which reads what a sliding window may have passed
        self.sampling_rows.may_be_late = not any(isinstance(g.spec, SlidingWindowSpec) for g in kv_config.groups)
        self.sampler = Sampler(self.sampling_rows)
        self._jumps = jump_forward and grammars is not None
        self.pooling = PoolingBranches()
        self.beam_rows = BeamRows(self.input_batch, self.sampling_rows)
        self.inputs: InputPreparation | DeviceInputs
        self._resident: DeviceRows | None = None  # the rows on the device
        self.graphs: StepGraphs | None = None
        if on_device:
            from ratoon.execution.inputs.device_inputs import DeviceInputs
            from ratoon.execution.passes.graphs import (
                MAX_DECODES,
                StepGraphs,
                graph_sizes,
                max_prefill_tokens,
                run_padded,
                sample_padded,
            )

            sizes = [] if capture is None else graph_sizes(max_num_tokens)
            max_padded = max(sizes, default=0)
            inputs = DeviceInputs(
                self.input_batch, max_num_tokens, num_rows, max_padded, min(max_padded, MAX_DECODES), device
            )
            self.inputs, self._resident = inputs, inputs.resident
            self.sampling_rows.spells_forced_text = False  # it would cost more than it saves
            if capture is not None:
                masks = MaskColumn(min(max_padded, MAX_DECODES), device)
                self.sampling_rows.mask_column = None if grammars is None else masks
                self.graphs = StepGraphs(
                    sizes,
                    lambda key: run_padded(key, inputs, self.kv, self.model),
                    capture,
                    max_prefill_tokens(model.config),
                    inputs.send_padding,
                    lambda key, logits: sample_padded(key, inputs, logits, masks.words),
                )
        else:
            self.inputs = InputPreparation(self.input_batch, max_num_tokens, num_rows, device)
        self.recorded: RecordedPasses | None = None
        if record:
            from ratoon.execution.passes.recorded_passes import RecordedPasses

            self.recorded = RecordedPasses(self.kv) if RecordedPasses.can_serve(self.kv) else None
        self.num_computed_tokens = 0  # rows run through the model since the start
        self._executed: list[Executed] = []  # what the first phase leaves for the second
        self._known: list[str] = []  # the same: ModelRunnerOutput.known,
        self._late: list[str] = []  # and what it has of ModelRunnerOutput.late

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Update the rows and launch the forward pass. Does not wait for the device."""
        self._executed, self._known, self._late = [], [], []
        self._apply_changes(plan)
        self.sampling_rows.fill_ahead()  # of new rows
        if plan.encoder_steps:
            assert self.encoder is not None and isinstance(self.model, EncoderDecoderLM), "the model has no encoder"
            self._executed += self.encoder.run(self.model, plan.encoder_steps)
        if plan.total_num_scheduled_tokens:
            self._executed.append(self._run_decoder(plan))

    def _run_decoder(self, plan: SchedulerOutput) -> Executed:
        rows, num_scheduled = self._batch(plan)
        executed: Executed | None = None
        if self.graphs is not None and not (plan.captures or plan.encoder_steps or self.pooling):
            num_tokens = plan.total_num_scheduled_tokens
            has_beams = any(step.num_tokens for step in plan.beam_steps)  # others read the last row of a prompt
            size = self.graphs.size_for(num_tokens, len(rows) == num_tokens, has_beams)
            if size is not None:
                executed = self._run_padded(plan, rows, num_scheduled, size)
        if executed is None:
            inputs = self._prepare(plan, rows, num_scheduled)
            executed = self._run_greedy(plan, inputs, rows) or self._run_alone(plan, inputs)
        self.num_computed_tokens += plan.total_num_scheduled_tokens
        return executed

    def _run_padded(
        self, plan: SchedulerOutput, rows: np.ndarray, num_scheduled: np.ndarray, size: int
    ) -> Executed | None:
        """Run a small step from fixed memory. None: it must run alone."""
        from ratoon.execution.passes.graphs import GraphKey, padded_read, padded_reqs

        graphs, inputs = self.graphs, cast("DeviceInputs", self.inputs)
        assert graphs is not None
        is_decode = len(rows) == plan.total_num_scheduled_tokens
        num_reqs = None
        if not is_decode:
            num_padding = size - plan.total_num_scheduled_tokens
            num_reqs = padded_reqs(len(rows), num_padding, size, self.input_batch.max_model_len)
            if num_reqs is None:
                return None

        def num_read(wanted: list[int]) -> int | None:
            every = is_decode and wanted == list(range(len(rows)))
            return None if every else padded_read(len(wanted), size)

        ends = num_scheduled.cumsum()
        all_sampled = is_decode and len(plan.sampled_req_ids) == len(rows)  # which then are no prompts
        if not all_sampled and wants_prompt_logprobs(plan, self.input_batch):
            return None
        if plan.sampled_req_ids and not (plan.fanout or plan.beam_steps):
            count = None if all_sampled else padded_read(len(plan.sampled_req_ids), size)
            sampled = self._sample_padded(plan, rows, num_scheduled, ends, GraphKey(size, num_reqs, count))
            if sampled is not None:
                return sampled
        layout = StepLayout.of(plan, ends)
        if plan.beam_steps and not plan.sampled_req_ids:
            reader = CandidatesReader(plan.beam_steps, layout, self.beam_rows)
            beams = reader.plain_searches(self.device)
            if beams is not None:
                _, searches = beams
                key = GraphKey(size, num_reqs, num_read(reader.rows), None, SearchShape.of(searches))
                inputs.send(rows, num_scheduled, read_rows=np.array(reader.rows, np.int64), beams=beams)
                keys = graphs.run(key)
                assert keys is not None
                return BeamKeysPass(keys[: len(searches)], searches, self.model.config.vocab_size, reader)
        readers = self._readers(plan, layout)
        wanted = rows_of(readers)
        key = GraphKey(size, num_reqs, num_read(wanted))
        inputs.send(rows, num_scheduled, read_rows=np.array(wanted, np.int64))
        logits = graphs.run(key)
        assert logits is not None
        return LogitsPass(logits[: len(wanted)], cast("list[NextTokenReader]", readers))

    def _sample_padded(
        self, plan: SchedulerOutput, rows: np.ndarray, num_scheduled: np.ndarray, ends: np.ndarray, key: GraphKey
    ) -> SampledPass | MaskedPass | None:
        """Run a small step that also chooses a token for each branch that is sampled. None: the rules of one ask for
        more than that, or it wants log-probabilities."""
        graphs, inputs = self.graphs, cast("DeviceInputs", self.inputs)
        assert graphs is not None
        if key.num_read is None:  # all requests, in their own order
            ids, requests, own, read_rows = list(plan.num_scheduled_tokens), np.arange(len(rows)), rows, None
        elif len(rows) == 1:
            ids, requests, own, read_rows = plan.sampled_req_ids.copy(), FIRST, rows, ends - 1
        else:
            place_of = {req_id: place for place, req_id in enumerate(plan.num_scheduled_tokens)}
            ids, requests = list(plan.sampled_req_ids), np.array([place_of[name] for name in plan.sampled_req_ids])
            own, read_rows = rows[requests], ends[requests] - 1
        seeds = self.input_batch.seeds[own]
        masked = self.sampler.masked_numbers(own, seeds)
        found = masked or self.sampler.plain_numbers(own, seeds)
        if found is None:
            return None
        numbers, mode = found
        inputs.send(rows, num_scheduled, read_rows=read_rows, read_requests=requests, numbers=numbers)
        if masked is not None:
            logits = graphs.run(key)
            assert logits is not None
            sample = partial(graphs.sample, key._replace(mode=mode), logits)
            return MaskedPass(sample, inputs, ids, own, self.input_batch, self.sampling_rows)
        graphs.run(key._replace(mode=mode))
        return SampledPass(inputs.tokens(len(own)), ids, own, self.input_batch, self.sampling_rows)

    def _run_greedy(self, plan: SchedulerOutput, inputs: StepInputs, rows: np.ndarray) -> SampledOnHost | None:
        """Run a recorded step and take the most probable token of every branch. None: a branch asks for more than that,
        or there is no such recording; then nothing was run."""
        if self.recorded is None or self._resident is not None:  # a device's own rows would not get the tokens
            return None
        if plan.captures or plan.fanout or plan.beam_steps or self.pooling:
            return None
        num_sampled = len(plan.sampled_req_ids)
        # Branches without a token of their own are prompts
        is_decode = num_sampled == len(rows) == plan.total_num_scheduled_tokens
        if not is_decode or self.sampling_rows.needs[rows].any():
            return None
        result = self.recorded.run(self.model, inputs, PassEnd.TOKENS)
        if result is None:
            return None
        tokens = result.tokens or HostTokens(sampling.greedy(self.model.compute_logits(result.states.normed)))
        return SampledOnHost(tokens, list(plan.num_scheduled_tokens), rows, self.input_batch, self.sampling_rows)

    def _run_alone(self, plan: SchedulerOutput, inputs: StepInputs) -> ExecutedPass | LogitsPass:
        """Run a step of any kind, from inputs of its own size."""
        readers = self._readers(plan, StepLayout.of(plan, inputs.cu_num_tokens))
        rows = rows_of(readers)
        # None: all rows of the step, in order
        every = len(rows) == plan.total_num_scheduled_tokens and rows == list(range(len(rows)))
        wanted = None if every else indices_on(self.device, rows)
        if self.recorded is not None and not (plan.captures or self.pooling):
            only_logits = every and all(isinstance(reader, NextTokenReader) for reader in readers)
            result = self.recorded.run(self.model, inputs, PassEnd.LOGITS if only_logits else PassEnd.STATES)
            if result is not None and result.logits is not None:
                return LogitsPass(result.logits, cast("list[NextTokenReader]", readers))
            if result is not None:
                return ExecutedPass(result.states if wanted is None else result.states.select(wanted), readers)
        metadata = [backend.build_metadata(group) for backend, group in zip(self.kv.backends, inputs.groups)]
        cross = None if inputs.cross is None else self.kv.cross_backend.build_metadata(inputs.cross)
        observers = [reader for reader in readers if isinstance(reader, StreamObserver)]
        num_layers = None
        if inputs.writes_nothing and not rows:  # nothing needs the layers after the last one that is observed
            num_layers = max((observer.num_layers_read for observer in observers), default=0)
        read = None
        if wanted is not None and cross is None and self.model.config.causal:
            read = ReadRows.of(rows, inputs)
        step = PagedStep(self.kv, metadata, cross, read)
        states = self.model.forward(inputs.input_ids, inputs.positions, step, wanted, observers, num_layers)
        return ExecutedPass(states, readers)

    def _readers(self, plan: SchedulerOutput, layout: StepLayout) -> list[RowReader]:
        """The readers of the step, one for each kind of result that it has."""
        next_token: list[LogitsReader] = []
        if plan.sampled_req_ids:
            sampled = SampledRowsReader(plan, layout, self.input_batch, self.sampler, self._resident, self._jumps)
            self._known, self._late = sampled.known, sampled.late
            next_token.append(sampled)
        if plan.beam_steps:
            next_token.append(CandidatesReader(plan.beam_steps, layout, self.beam_rows))
        compute_logits = self.model.compute_logits
        readers: list[RowReader] = [
            NextTokenReader(next_token, compute_logits),
            PromptLogprobsReader(plan, layout, self.input_batch, compute_logits),
        ]
        if self.pooling:
            readers.append(self.pooling.reader(plan, layout))
        if plan.captures:
            captured = captured_rows(plan.captures, layout)
            readers.append(CaptureReader(captured, len(self.model.layers), self.device))
        return [reader for reader in readers if reader.rows or isinstance(reader, StreamObserver)]

    def _prepare(self, plan: SchedulerOutput, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        if not plan.captures:
            return self.inputs.prepare(rows, num_scheduled)
        spans = lay_out_spans(self.input_batch, plan.captures)
        unwritten = np.array([False] * len(rows) + [not written for written in spans.written])
        rows = np.concatenate([rows, spans.rows]).astype(np.int64)
        num_scheduled = np.concatenate([num_scheduled, spans.counts]).astype(np.int64)
        try:
            return self.inputs.prepare(rows, num_scheduled, unwritten)
        finally:
            self.input_batch.give_back(spans.rows)  # their content is in the step's inputs now

    def _batch(self, plan: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the step, and the tokens of each: branches in the plan's order, then beams."""
        row_of = self.input_batch.row_of
        rows = [row_of[req_id] for req_id in plan.num_scheduled_tokens]
        num_scheduled = list(plan.num_scheduled_tokens.values())
        for step in plan.beam_steps:
            if step.num_tokens:
                beams = self.beam_rows.rows_of(step.req_id).tolist()
                rows += beams
                num_scheduled += [step.num_tokens] * len(beams)
        return np.array(rows), np.array(num_scheduled, np.int64)

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        """The order of core/plan.py: drop, move blocks, add, append."""
        self._move_blocks(plan)
        for req_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            row = self.input_batch.drop(req_id)
            if row is not None:
                self.sampling_rows.remove(row)
        if self.pooling:
            self.pooling.drop((*plan.finished_req_ids, *plan.preempted_req_ids))
        if self.beam_rows:
            self.beam_rows.drop((*plan.finished_req_ids, *plan.preempted_req_ids))
        new_ids = set()
        for new in plan.scheduled_new_reqs:
            row = self.input_batch.add(new)
            if isinstance(new.params, PoolingParams):
                self.pooling.add(new)
            else:
                prompt, output = new.token_ids, new.token_ids[new.num_prompt_tokens :]
                if output:
                    prompt = prompt[: new.num_prompt_tokens]
                self.sampling_rows.add(row, new.params, new.seed, prompt, output, new.encoder_token_ids)
            new_ids.add(new.req_id)
        new_ids.update(step.req_id for step in plan.beam_steps if step.num_tokens)
        new_ids.update(capture.req_id for capture in plan.captures)
        for copy in plan.block_copies:
            if copy.req_id not in new_ids:  # new rows have it in their tables
                self.input_batch.replace_block(copy)
        cached = plan.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.input_batch.row_of[req_id]
            self.input_batch.num_computed[row] = computed
            if blocks is not None:
                self.input_batch.append_blocks(row, blocks)
        for step in plan.beam_steps:
            if step.num_tokens:
                self.beam_rows.apply(step)

    def _move_blocks(self, plan: SchedulerOutput) -> None:
        """Copies on a device wait for the step's numbers, if nothing but the step follows."""
        if self._resident is not None:
            inputs = cast("DeviceInputs", self.inputs)
            inputs.note_copies(())  # those of a step that failed
            if plan.total_num_scheduled_tokens and plan.block_copies and not plan.encoder_steps:
                copies = self.kv.copies_in_any_order(plan)
                if copies is not None and len(copies) <= inputs.max_copies:
                    inputs.note_copies(copies, self.kv.copy_listed)
                    return
        self.kv.move_blocks(plan)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample a token for every branch in `sampled_req_ids`, and read out all other results. On CUDA this waits only
        if one of these needs the host; otherwise the output is pending."""
        executed, self._executed = self._executed, []
        if self._resident is not None:
            cast("DeviceInputs", self.inputs).note_launched()
        output = ModelRunnerOutput(known=self._known, late=self._late)
        finish = join([forward_pass.read(output) for forward_pass in executed])
        if finish is None:
            return output
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return PendingOutput(output, finish, done)
