"""A head that guesses next tokens from the states of the engine's model."""

from __future__ import annotations

import numpy as np
import torch

from ratoon.execution.drafting.draft_model import greedy_tokens, inputs_of_group
from ratoon.execution.drafting.interface import Choose, Inputs, PassOfDrafts
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.kv.kv_tensors import LayerCaches
from ratoon.execution.passes.ends import InnerLayers, Layers
from ratoon.execution.passes.step_context import PagedStep
from ratoon.models.draft_head import DraftHead

Tensor = torch.Tensor


class HeadDrafter:
    """Implements Drafter. The row of a position reads the token behind it: its keys and values lie in the position's
    slot, and are complete as soon as the next token is known."""

    lag = 1

    def __init__(
        self,
        head: DraftHead,
        caches: LayerCaches,
        table: int,
        inputs: Inputs,
        branches: InputBatch,
        num_layers: int,
        token_memory: Tensor | None = None,
    ) -> None:
        """`num_layers`: of the model. `token_memory`: that of the branches, where it lies on the device."""
        self.reads: Layers | None = InnerLayers.of(head.config.reads, num_layers)
        self._head = head
        self._caches = caches
        self._table = table
        self._inputs = inputs
        self._branches = branches
        self._token_memory = token_memory

    def run(self, one: PassOfDrafts, states: Tensor | None, choose: Choose | None = None) -> tuple[Tensor, Tensor]:
        assert states is not None, "the program has copied them"
        head, caches = self._head, self._caches
        hidden = head.begin(states) if states.dim() == 3 else states
        inputs = inputs_of_group(self._inputs.prepare(one.rows, one.counts), self._table, len(caches.backends))
        metadata = [backend.build_metadata(group) for backend, group in zip(caches.backends, inputs.groups)]
        rows = None
        if len(one.read) != one.num_tokens:
            rows = indices_on(hidden.device, one.read.tolist())
        ids = self._tokens_behind(one, hidden.device)
        final = head.forward(ids, hidden, inputs.positions, PagedStep(caches, metadata), rows)
        if not len(one.read):
            return ids[:0], final.stream
        logits = head.compute_logits(final.normed)
        if choose is not None:
            return choose(self._over_vocabulary(logits)), final.stream
        draft_ids = greedy_tokens(logits)
        tokens = torch.where(draft_ids < 0, draft_ids, head.tokens_of(draft_ids.clamp(min=0)))
        return tokens, final.stream

    def _over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits over tokens that the head can guess [D, draft vocabulary] → over all tokens of the model [D, V]."""
        config = self._head.config
        draft_ids = torch.arange(config.draft_vocab_size, device=logits.device)
        found = logits.new_full((len(logits), config.layer.vocab_size), -torch.inf)
        return found.index_copy_(1, self._head.tokens_of(draft_ids), logits[:, : config.draft_vocab_size])

    def _tokens_behind(self, one: PassOfDrafts, device: torch.device) -> Tensor:
        """[T]: of each token of the pass, the one behind it."""
        branches = self._branches
        first = one.rows * branches.max_model_len + branches.num_computed[one.rows] + 1
        ends = one.counts.cumsum()
        cells = np.repeat(first - (ends - one.counts), one.counts) + np.arange(one.num_tokens)
        if self._token_memory is None:
            return torch.from_numpy(branches.memory[cells].astype(np.int64)).to(device)
        return self._token_memory[indices_on(device, cells.tolist())].to(torch.int64)

    def clear(self) -> None:
        """Nothing is kept."""
