"""The runner: executes a step plan in two phases, `execute_model` (forward pass) and `sample_tokens`.

It wires and orders the parts, each of which has its own module. It knows branches by their rows only; requests, queues
and block accounting are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.core.kv import KVCacheConfig
from ratoon.core.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS, NewRequestData, SchedulerOutput
from ratoon.execution.adapter_slots import AdapterSlots
from ratoon.execution.drafting.build import BuiltDraft, make_drafting
from ratoon.execution.drafting.drafting import Drafting
from ratoon.execution.drafting.drawn import DrawnDrafts
from ratoon.execution.grammar.compiler import GrammarCompiler
from ratoon.execution.inputs.batch_rows import BatchRows, ColumnSource, SpanRows
from ratoon.execution.inputs.columns import StepColumns
from ratoon.execution.inputs.embeddings import EmbeddingTable
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.row_writes import RowWrites
from ratoon.execution.inputs.step_inputs import InputPreparation
from ratoon.execution.inputs.visible_ends import visible_ends
from ratoon.execution.kv.kv_tensors import KVTensors
from ratoon.execution.passes.calls import Calls
from ratoon.execution.passes.encoder import EncoderRunner
from ratoon.execution.passes.media import MediaRunner
from ratoon.execution.passes.program import Driver, ProgramStep, StepProgram
from ratoon.execution.readers.beams import BeamReaders
from ratoon.execution.readers.hidden_states import NO_SPANS, CaptureReaders, lay_out_spans
from ratoon.execution.readers.interface import ExecutedPass, PendingOutput, ReaderSource, RowReader, StepLayout, join
from ratoon.execution.readers.pooling import PoolingBranches
from ratoon.execution.readers.prompt_logprobs import PromptLogprobsReaders
from ratoon.execution.readers.sampled import SampledReaders
from ratoon.execution.sampling.beam_rows import BeamRows
from ratoon.execution.sampling.mask_column import MaskColumn
from ratoon.execution.sampling.penalty_rows import PenaltyRows
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from ratoon.models.base import LanguageModel
from ratoon.models.encoder_decoder import EncoderDecoderLM

if TYPE_CHECKING:
    from ratoon.execution.inputs.device_inputs import DeviceInputs, DeviceRows
    from ratoon.execution.passes.graphs import Capture, StepGraphs
    from ratoon.execution.passes.recorded_passes import RecordedPasses


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
        encoder_may_round: bool = False,
        inputs_on_device: bool | None = None,
        capture: Capture | None = None,
        record: bool = False,
        grammars: GrammarCompiler | None = None,
        jump_forward: bool = False,
        has_adapters: bool = False,
        adapters: AdapterSlots | None = None,
        by_rejection: bool = False,
        draft: BuiltDraft | None = None,
        draft_backends: Sequence[AttentionBackend] = (),
    ) -> None:
        """`backends`: one for each of the KV config's groups, the cross group's last; `encoder_backend`: for the
        encoder's own attention, where the model has one. `encoder_may_round`: the attention of an encoder of images may
        round to bf16. `inputs_on_device`: whether kernels prepare a step's inputs;
        by default on CUDA. `capture`: makes graphs of small steps whose inputs are on the device. `record`: small steps
        are recorded passes, where the backends allow it: the model's layers use no collective. `grammars`: of
        structured output. `jump_forward`: tokens without a choice are appended at once. `has_adapters`: whether
        rows may have adapters, which are in the slots of `adapters`. `by_rejection`: drafts are accepted by rejection
        sampling. `draft`: the model or head that drafts, with backends for each of the KV config's attached groups."""
        self.device = device
        self.kv = KVTensors(kv_config, backends, device, draft_backends)
        if draft is not None:
            max_num_tokens += max_num_reqs  # a draft runs over what a step has computed and its new tokens
        num_rows = max_num_reqs + MAX_CAPTURE_SPANS
        self.encoder: EncoderRunner | None = None
        max_encoder_len = 0
        cross_block_size = kv_config.block_size if kv_config.cross is None else kv_config.cross.spec.block_size
        if model.config.encoder is not None:
            assert encoder_backend is not None, "the model has an encoder"
            self.encoder = EncoderRunner(encoder_backend, self.kv, cross_block_size, dtype, device)
            max_encoder_len = model.config.encoder.max_position
        on_device = device.type == "cuda" if inputs_on_device is None else inputs_on_device
        journal = RowWrites() if on_device else None
        self.input_batch = InputBatch(
            num_rows,
            max_model_len,
            [group.spec.block_size for group in kv_config.groups],
            journal,
            max_encoder_len,
            cross_block_size,
            model.config.rope_axes,
            has_adapters=has_adapters,
            attends_both_ways=model.config.sees_ahead,
        )
        self.adapters = adapters
        self._batch_rows = BatchRows(self.input_batch)
        penalties = PenaltyRows(model.config.vocab_size, device) if device.type == "cuda" else None
        self.sampling_rows = SamplingRows(max_num_reqs, penalties, grammars)
        # A row that is left out computes its last token again, which reads what a sliding window may have passed, or a
        # state that the token itself has overwritten
        self.sampling_rows.may_be_late = all(group.spec.growth == "full" for group in kv_config.groups)
        self.pooling = PoolingBranches(model)
        self.beam_rows = BeamRows(self.input_batch, self.sampling_rows)
        self.embeddings = EmbeddingTable(model.config.hidden_size, dtype, device)
        self._column_sources: list[ColumnSource] = []
        if model.stage.is_first:  # later ones read rows of the stage before them
            self._column_sources.append(self.embeddings.columns_of)
        if model.config.sees_ahead:
            self._column_sources.append(visible_ends)
        self.media = MediaRunner(self.embeddings, device, dtype, encoder_may_round)
        self.program = StepProgram(model, self.kv)
        self.inputs: InputPreparation | DeviceInputs
        self._resident: DeviceRows | None = None  # the rows on the device
        self.graphs: StepGraphs | None = None
        self.recorded: RecordedPasses | None = None
        self._drivers: list[Driver] = []  # the first that can run a step does
        if on_device:
            masks = self._make_device_inputs(num_rows, max_num_tokens, capture, grammars, jump_forward)
        else:
            masks = None
            self.inputs = InputPreparation(self.input_batch, max_num_tokens, num_rows, device)
        if record:
            from ratoon.execution.passes.recorded_passes import RecordedPasses

            self.recorded = RecordedPasses(self.kv) if RecordedPasses.can_serve(self.kv) else None
        self._drivers.append(Calls(self.program, self.inputs, device, self.recorded, masks))
        # Of a pipeline, the last stage has the results; earlier ones copy rows of their layers for it.
        self._has_results = model.stage.is_last
        sampler = Sampler(self.sampling_rows, by_rejection)
        self._drawn = DrawnDrafts(self.input_batch, sampler) if by_rejection and draft is not None else None
        self._sources: list[ReaderSource] = [CaptureReaders(model.config.num_layers, model)]
        if self._has_results:
            self._sources[:0] = self._result_sources(
                jump_forward and grammars is not None, sampler, waits_for_drafts=draft is not None
            )
        self.drafting: Drafting | None = None
        self._draft_settings = kv_config.attached[0].table if kv_config.attached else 0, record
        if draft is not None:
            self.attach_draft(draft)
        self.num_computed_tokens = 0  # rows run through the model since the start
        self._spans = NO_SPANS  # rows that the step reads, until what comes behind it has run
        self._output = ModelRunnerOutput()  # what the first phase leaves for the second:
        self._executed: list[ExecutedPass] = []
        self._awaits_adapters = False

    def _make_device_inputs(
        self,
        num_rows: int,
        max_num_tokens: int,
        capture: Capture | None,
        grammars: GrammarCompiler | None,
        jump_forward: bool,
    ) -> MaskColumn | None:
        """Makes the inputs that kernels prepare, and the driver of graphs. Returns the masks that graphs read."""
        from ratoon.execution.inputs.device_inputs import DeviceInputs
        from ratoon.execution.passes.graphs import MAX_DECODES, Graphs, graph_sizes

        sizes = [] if capture is None else graph_sizes(max_num_tokens)
        max_padded = max(sizes, default=0)
        max_decodes = min(max_padded, MAX_DECODES)
        inputs = DeviceInputs(self.input_batch, max_num_tokens, num_rows, max_padded, max_decodes, self.device)
        self.inputs, self._resident = inputs, inputs.resident
        self.sampling_rows.tells_runs = jump_forward and grammars is not None
        if capture is None:
            return None
        masks = MaskColumn(max_decodes, self.device)
        self.sampling_rows.mask_column = None if grammars is None else masks
        driver = Graphs(self.program, inputs, sizes, capture, masks)
        self.graphs = driver.steps
        self._drivers.append(driver)
        return masks

    def _result_sources(self, jumps: bool, sampler: Sampler, waits_for_drafts: bool) -> list[ReaderSource]:
        """The readers of everything but hidden states, in the order in which they look at a plan."""
        return [
            SampledReaders(self.input_batch, sampler, self._resident, jumps, waits_for_drafts, self._drawn),
            BeamReaders(self.beam_rows, self.device, self.model.config.vocab_size),
            PromptLogprobsReaders(self.input_batch, self.program),
            self.pooling,
        ]

    @property
    def model(self) -> LanguageModel:
        return self.program.model

    def attach_draft(self, draft: BuiltDraft) -> None:
        """Draft behind steps from now on."""
        table, record = self._draft_settings
        memory = None if self._resident is None else self._resident.memory
        num_layers = self.model.config.num_layers
        self.drafting = make_drafting(
            draft, self.kv.attached, table, self.inputs, self.input_batch, num_layers, memory, record, self._drawn
        )
        self._sources.append(self.drafting)

    def detach_draft(self) -> None:
        """Forget the model or head that drafts: its memory is about to be freed."""
        if self.drafting is not None:
            self._sources.remove(self.drafting)
            self.drafting = None

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Update the rows and launch the forward pass. Does not wait for the device."""
        self._executed, self._output = [], ModelRunnerOutput()
        self._give_back_spans()  # of a step that failed
        self._apply_changes(plan)
        if self.adapters is not None:
            self.adapters.begin(plan.adapter_loads)
            self._awaits_adapters = plan.awaits_adapters
            self.adapters.require(step.adapter_slot for step in plan.encoder_steps if step.adapter_slot >= 0)
        self.sampling_rows.fill_ahead()  # of new rows
        if plan.encoder_steps:
            assert self.encoder is not None and isinstance(self.model, EncoderDecoderLM), "the model has no encoder"
            self._executed += self.encoder.run(self.model, plan.encoder_steps)
        if plan.scheduled_encoder_inputs and self.model.stage.is_first:
            self.media.run(self.model, plan.scheduled_encoder_inputs)
        if plan.total_num_scheduled_tokens:
            self._spans = lay_out_spans(self.input_batch, plan.captures)
            try:
                self._executed.append(self._run_program(plan, self._spans))
            finally:
                if self.drafting is None:
                    self._give_back_spans()  # their content is in the step's inputs now
            self.num_computed_tokens += plan.total_num_scheduled_tokens

    def _give_back_spans(self) -> None:
        spans, self._spans = self._spans, NO_SPANS
        self.input_batch.give_back(spans.rows)

    def _run_program(self, plan: SchedulerOutput, spans: SpanRows) -> ExecutedPass:
        beams = [(self.beam_rows.rows_of(step.req_id), step.num_tokens) for step in plan.beam_steps if step.num_tokens]
        batch = self._batch_rows.lay_out(plan, beams, spans)
        if self.adapters is not None and "adapter_slots" in batch.columns:
            self.adapters.require(set(batch.columns["adapter_slots"].tolist()) - {-1})
        layout = StepLayout(plan, batch)
        if self.drafting is not None:
            self.drafting.begin(plan, batch, spans)
        readers: list[RowReader] = []
        for source in self._sources:
            readers += source.readers(plan, layout, self._output)
        if len(readers) > 1:
            readers.sort(key=lambda reader: reader.wanted.end.rank)
        wanted = [reader.wanted for reader in readers]
        columns: StepColumns = batch.columns
        for find_columns in self._column_sources:
            found = find_columns(self.input_batch, batch)
            if found:
                columns = {**columns, **found}
        step = ProgramStep(batch, wanted, columns)
        for driver in self._drivers:
            results = driver.run(step)
            if results is not None:
                self._output.has_prepared = driver.has_prepared
                return ExecutedPass(readers if self._has_results else (), results)
        raise AssertionError("the last driver runs any step")

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        """The order of core/plan.py: drop, move blocks, add, append."""
        self._move_blocks(plan)
        gone = (*plan.finished_req_ids, *plan.preempted_req_ids)
        for req_id in gone:
            row = self.input_batch.drop(req_id)
            if row is not None:
                self.sampling_rows.remove(row)
        if gone:
            self.pooling.drop(gone)
            self.beam_rows.drop(gone)
        for key in plan.free_encoder_mm_hashes:
            self.embeddings.free(key)
        new_ids = set()
        for new in plan.scheduled_new_reqs:
            row = self.input_batch.add(new)
            if self._has_results:
                self._begin_results(new, row)
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
        for req_id, computed, tokens in zip(cached.req_ids, cached.num_computed_tokens, cached.new_token_ids):
            if tokens:
                row = self.input_batch.row_of[req_id]
                self.input_batch.tell_tokens(row, max(computed, int(self.input_batch.num_prompt[row])), tokens)
        for row, tokens in self.sampling_rows.append_told():
            self.input_batch.append_run(row, tokens)
        for req_id, tokens in plan.scheduled_spec_decode_tokens.items():
            self.input_batch.write_drafts(self.input_batch.row_of[req_id], tokens)
        for step in plan.beam_steps:
            if step.num_tokens:
                self.beam_rows.apply(step)

    def _begin_results(self, new: NewRequestData, row: int) -> None:
        if isinstance(new.params, PoolingParams):
            self.pooling.add(new)
            return
        prompt, output = new.token_ids, new.token_ids[new.num_prompt_tokens :]
        if output:
            prompt = prompt[: new.num_prompt_tokens]
        self.sampling_rows.add(row, new.params, new.seed, prompt, output, new.encoder_token_ids)

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
        self._output.transfers = self.kv.move_blocks(plan)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample a token for every branch in `sampled_req_ids`, and read out all other results. On CUDA this waits only
        if one of these needs the host; otherwise the output is pending."""
        executed, self._executed, output = self._executed, [], self._output
        if self.adapters is not None:
            output.adapters = self.adapters.report(waits=self._awaits_adapters)
        if self._resident is not None:
            cast("DeviceInputs", self.inputs).note_launched()
        parts = [forward_pass.read(output) for forward_pass in executed]
        if self.drafting is not None:
            parts.append(self.drafting.after_step(output))
            self._give_back_spans()
        finish = join(parts)
        return output if finish is None else PendingOutput(output, finish)
