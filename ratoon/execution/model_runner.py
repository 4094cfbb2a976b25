"""The runner: carries a step plan out in two phases, `execute_model` (forward pass) and `sample_tokens`.

It wires the parts together and orders them; each part has its own module. It knows branches only by their rows, and
nothing of requests, queues or block accounting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.core.kv import KVCacheConfig
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.plan import MAX_CAPTURE_SPANS, SchedulerOutput
from ratoon.execution.beam_candidates import beam_rows_of, choose_candidates
from ratoon.execution.beam_rows import BeamRows
from ratoon.execution.branch_rows import BranchRows
from ratoon.execution.buffers import indices_on
from ratoon.execution.capture import StepCapture, captured_rows, lay_out_spans, only_reads
from ratoon.execution.encoder import EncoderRunner
from ratoon.execution.kv_tensors import KVTensors
from ratoon.execution.pooling import PoolingBranches, PoolingSpan
from ratoon.execution.sampler import Sampler, prompt_logprobs
from ratoon.execution.sampling_rows import SamplingRows
from ratoon.execution.step_context import PagedStep
from ratoon.execution.step_inputs import InputPreparation, StepInputs
from ratoon.models.base import CausalLM
from ratoon.models.encoder_decoder import EncoderDecoderLM

PROMPT_LOGPROBS_ROWS = 128  # prompt rows whose logits are held at one time


@dataclass(slots=True)
class PromptSpan:
    """Consecutive rows of one branch whose next token is a prompt token that the caller wants to know about."""

    req_id: str
    row: int  # of the branch
    start: int  # prompt position of the first one
    count: int
    num_logprobs: int


@dataclass(slots=True)
class ExecutedStep:
    """What the first phase leaves for the second. Tensors are on the device and may still be in the making."""

    plan: SchedulerOutput
    # [S + B + P + V + C, H]: the newest token of every sampled branch, and of every beam that wants candidates; rows
    # for prompt log-probabilities, for vectors, and rows that `capture` has taken already
    hidden: torch.Tensor
    num_beams: int  # B
    prompt_spans: list[PromptSpan]
    pooling_spans: list[PoolingSpan]
    captures: list[StepCapture]  # of the decoder's rows, and of the encoder's


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_config: KVCacheConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        max_num_reqs: int,
        max_num_tokens: int,
    ) -> None:
        self.model = model
        self.backend = backend
        self.device = device
        self.kv = KVTensors(kv_config, backend, dtype, device)
        num_rows = max_num_reqs + MAX_CAPTURE_SPANS
        self.encoder: EncoderRunner | None = None
        max_encoder_len = 0
        if model.config.encoder is not None:
            self.encoder = EncoderRunner(backend, self.kv, kv_config.block_size, dtype, device)
            max_encoder_len = model.config.encoder.max_position
        self.rows = BranchRows(num_rows, max_model_len, kv_config.block_size, len(kv_config.groups), max_encoder_len)
        self.sampling_rows = SamplingRows(max_num_reqs)
        self.sampler = Sampler(self.sampling_rows)
        self.pooling = PoolingBranches()
        self.beam_rows = BeamRows(self.rows, self.sampling_rows)
        self.inputs = InputPreparation(self.rows, max_num_tokens, num_rows, device)
        self.num_computed_tokens = 0  # rows that went through the model, since the start
        self._executed: ExecutedStep | None = None

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Bring the rows up to date and launch the forward pass. Waits for nothing on the device."""
        self._executed = None
        self._apply_changes(plan)
        encoder_capture = None
        if plan.encoder_steps:
            assert self.encoder is not None and isinstance(self.model, EncoderDecoderLM), "the model has no encoder"
            encoder_capture = self.encoder.run(self.model, plan.encoder_steps)
        if plan.total_num_scheduled_tokens:
            self._executed = self._run_decoder(plan)
        elif encoder_capture is not None:
            self._executed = ExecutedStep(plan, torch.empty(0), 0, [], [], [])
        if encoder_capture is not None:
            assert self._executed is not None
            self._executed.captures.append(encoder_capture)

    def _run_decoder(self, plan: SchedulerOutput) -> ExecutedStep:
        inputs = self._prepare(plan)
        metadata = [self.backend.build_metadata(group) for group in inputs.groups]
        cross = None if inputs.cross is None else self.backend.build_metadata(inputs.cross)
        last_tokens = (inputs.cu_num_tokens - 1).tolist()
        last_token = dict(zip(plan.num_scheduled_tokens, last_tokens))
        beams = beam_rows_of(plan, last_token, last_tokens[len(last_token) :]) if plan.beam_steps else []
        prompt_spans = self._prompt_spans(plan)
        pooling_spans = self.pooling.spans(plan, last_token) if self.pooling else []
        capture = self._capture(plan) if plan.captures else None
        last_rows = [] if capture is None else capture.last_rows
        wanted = self._wanted_rows(plan, last_token, beams, prompt_spans, pooling_spans, last_rows)
        step = PagedStep(self.backend, self.kv, metadata, cross)
        if capture is None:
            hidden = self.model.forward(inputs.input_ids, inputs.positions, step, wanted)
        else:
            depth = capture.num_layers_read if only_reads(plan) else len(self.model.layers)
            hidden = self.model.forward_and_read(inputs.input_ids, inputs.positions, step, wanted, capture, depth)
        self.num_computed_tokens += plan.total_num_scheduled_tokens
        captures = [] if capture is None else [capture]
        return ExecutedStep(plan, hidden, len(beams), prompt_spans, pooling_spans, captures)

    def _prepare(self, plan: SchedulerOutput) -> StepInputs:
        rows, num_scheduled = self._batch(plan)
        if not plan.captures:
            return self.inputs.prepare(rows, num_scheduled)
        spans = lay_out_spans(self.rows, plan.captures)
        unwritten = np.array([False] * len(rows) + [not written for written in spans.written])
        rows = np.concatenate([rows, spans.rows]).astype(np.int64)
        num_scheduled = np.concatenate([num_scheduled, spans.counts]).astype(np.int64)
        try:
            return self.inputs.prepare(rows, num_scheduled, unwritten)
        finally:
            self.rows.give_back(spans.rows)  # the step has what it needs of them

    def _capture(self, plan: SchedulerOutput) -> StepCapture:
        first_row = plan.total_num_scheduled_tokens - sum(len(capture.token_ids) for capture in plan.captures)
        return StepCapture(captured_rows(plan.captures, first_row), len(self.model.layers), self.device)

    def _batch(self, plan: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the step, and the tokens of each: branches in the plan's order, then beams."""
        row_of = self.rows.row_of
        rows = [row_of[req_id] for req_id in plan.num_scheduled_tokens]
        num_scheduled = list(plan.num_scheduled_tokens.values())
        for step in plan.beam_steps:
            if step.num_tokens:
                beams = self.beam_rows.rows_of(step.req_id).tolist()
                rows += beams
                num_scheduled += [step.num_tokens] * len(beams)
        return np.array(rows), np.array(num_scheduled, np.int64)

    def _wanted_rows(
        self,
        plan: SchedulerOutput,
        last_token: dict[str, int],
        beams: list[int],
        prompt_spans: list[PromptSpan],
        pooling_spans: list[PoolingSpan],
        captured: list[int],
    ) -> torch.Tensor | None:
        """Which rows of the step anybody reads: None when that is all of them, in order."""
        wanted = [last_token[req_id] for req_id in plan.sampled_req_ids] + beams
        for span in prompt_spans:
            first = last_token[span.req_id] + 1 - plan.num_scheduled_tokens[span.req_id]
            wanted += range(first, first + span.count)
        for pooled in pooling_spans:
            wanted += range(pooled.first, pooled.first + pooled.count)
        wanted += captured
        if wanted == list(range(plan.total_num_scheduled_tokens)):
            return None
        return indices_on(self.device, wanted)

    def _prompt_spans(self, plan: SchedulerOutput) -> list[PromptSpan]:
        spans = []
        for req_id, count in plan.num_scheduled_tokens.items():
            row = self.rows.row_of[req_id]
            params = self.rows.params[row]
            if params is None or params.prompt_logprobs is None:
                continue
            start = int(self.rows.num_computed[row])
            count = min(start + count, int(self.rows.num_prompt[row]) - 1) - start  # the last prompt token has no next
            if count > 0:
                spans.append(PromptSpan(req_id, row, start, count, params.prompt_logprobs))
        return spans

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        """The order of core/plan.py: drop, move blocks, add, append."""
        self.kv.move_blocks(plan)
        for req_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            row = self.rows.drop(req_id)
            if row is not None:
                self.sampling_rows.remove(row)
        if self.pooling:
            self.pooling.drop((*plan.finished_req_ids, *plan.preempted_req_ids))
        if self.beam_rows:
            self.beam_rows.drop((*plan.finished_req_ids, *plan.preempted_req_ids))
        new_ids = set()
        for new in plan.scheduled_new_reqs:
            row = self.rows.add(new)
            prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
            self.sampling_rows.add(row, new.sampling_params, new.seed, prompt, output, new.encoder_token_ids)
            if new.pooling_params is not None:
                self.pooling.add(new)
            new_ids.add(new.req_id)
        new_ids.update(step.req_id for step in plan.beam_steps if step.num_tokens)
        new_ids.update(capture.req_id for capture in plan.captures)
        for copy in plan.block_copies:
            if copy.req_id not in new_ids:  # those come with it in their tables
                self.rows.replace_block(copy)
        cached = plan.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows.row_of[req_id]
            self.rows.num_computed[row] = computed
            if blocks is not None:
                self.rows.append_blocks(row, blocks)
        for step in plan.beam_steps:
            if step.num_tokens:
                self.beam_rows.apply(step)

    @torch.inference_mode()
    def sample_tokens(self, grammar: object | None = None) -> ModelRunnerOutput:
        """Choose a token for every branch that the plan names. `grammar` is the place for structured output's masks."""
        executed, self._executed = self._executed, None
        if executed is None:
            return ModelRunnerOutput()
        plan = executed.plan
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(executed))
        if executed.pooling_spans:
            first = len(plan.sampled_req_ids) + executed.num_beams + sum(s.count for s in executed.prompt_spans)
            self.pooling.pool(executed.pooling_spans, executed.hidden[first:], output)
        for capture in executed.captures:
            capture.give(output)
        num_sampled = len(plan.sampled_req_ids)
        if not num_sampled + executed.num_beams:
            return output
        logits = self.model.compute_logits(executed.hidden[: num_sampled + executed.num_beams])
        if num_sampled:
            self._sample(plan, logits[:num_sampled], output)
        if executed.num_beams:
            choose_candidates(plan, logits[num_sampled:], output, self.beam_rows, self.sampling_rows)
        return output

    def _sample(self, plan: SchedulerOutput, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        ids, rows, seeds, source = self._draws(plan)
        if len(ids) > len(plan.sampled_req_ids):  # several choices from one row
            logits = logits[torch.from_numpy(source).to(self.device)]
        sampled = self.sampler.sample(logits, rows, seeds)

        tokens = sampled.to_numpy()  # the one wait for the device in a step
        bad = set(sampled.bad_rows)
        own = np.array([index for index in range(len(plan.sampled_req_ids)) if index not in bad], np.int64)
        self.rows.append_tokens(rows[own], tokens[own])
        self.sampling_rows.append_tokens(rows[own], tokens[own])
        for index, token in enumerate(tokens.tolist()):
            if index in bad:
                output.errors[ids[index]] = "the model's logits hold no usable number (NaN or all tokens forbidden)"
            else:
                output.req_ids.append(ids[index])
                output.sampled_token_ids.append([token])
        output.logprobs = {ids[index]: lists for index, lists in sampled.logprobs_lists().items() if index not in bad}

    def _draws(self, plan: SchedulerOutput) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """Who gets a token: ids, their rows, their seeds, and which of the sampled rows each draws from.

        The sampled branches come first, in the plan's order, then the children of fan-outs.
        """
        ids = list(plan.sampled_req_ids)
        rows = [self.rows.row_of[req_id] for req_id in ids]
        seeds = [self.rows.seeds[row] for row in rows]
        source = list(range(len(ids)))
        for parent, children in plan.fanout.items():
            index = plan.sampled_req_ids.index(parent)
            for child, seed in children:
                ids.append(child)
                rows.append(rows[index])
                seeds.append(np.uint64(seed))
                source.append(index)
        return ids, np.array(rows), np.array(seeds, np.uint64), np.array(source)

    def _prompt_logprobs(self, executed: ExecutedStep) -> dict[str, PromptLogprobsChunk]:
        """What the model expected at the prompt positions that follow the spans' rows."""
        result = {}
        first = len(executed.plan.sampled_req_ids) + executed.num_beams
        for span in executed.prompt_spans:
            lists = LogprobsLists([], [], [])
            for offset in range(0, span.count, PROMPT_LOGPROBS_ROWS):
                count = min(PROMPT_LOGPROBS_ROWS, span.count - offset)
                logits = self.model.compute_logits(executed.hidden[first + offset : first + offset + count])
                position = span.start + offset + 1
                next_ids = torch.from_numpy(self.rows.token_ids[span.row, position : position + count]).long()
                part = prompt_logprobs(logits, next_ids, span.num_logprobs)
                lists.token_ids += part.token_ids
                lists.logprobs += part.logprobs
                lists.sampled_ranks += part.sampled_ranks
            result[span.req_id] = PromptLogprobsChunk(span.start + 1, lists)
            first += span.count
        return result
