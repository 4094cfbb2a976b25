"""Weights of cross-attention that ends of a step read: computed beside attention, from the queries of the rows that are
read and the keys in the cache.

Attention itself keeps no weights, and a step that reads none is not changed by this. The result is the softmax over all
positions of a row's encoder input, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, CommonAttentionMetadata, LayerCache
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.passes.ends import CrossHead, CrossWeights, EndRows
from ratoon.layers.attention import CrossAttentionLayer
from ratoon.layers.shard import Shard

Tensor = torch.Tensor


class CrossWeightRows:
    """The rows of one pass whose cross-attention weights are read, and the weights that its layers give."""

    def __init__(
        self, wanted: Sequence[EndRows], inputs: CommonAttentionMetadata, num_heads: int, shard: Shard, first_layer: int
    ) -> None:
        """`inputs`: of cross-attention, with the numbers on the host. `num_heads`: of the model, of which this rank has
        a part; `first_layer`: the model's layer that is the first one here."""
        self._wanted = wanted
        self._inputs = inputs
        self._own_heads = shard.cut("attention heads", num_heads)
        self._shard = shard
        self._first_layer = first_layer
        self.found: list[dict[CrossHead, Tensor]] = [{} for _ in wanted]  # of each end

    @classmethod
    def of(
        cls,
        wanted: Sequence[EndRows],
        inputs: CommonAttentionMetadata | None,
        num_heads: int,
        shard: Shard,
        first_layer: int,
    ) -> CrossWeightRows | None:
        """None: no end reads weights."""
        if inputs is None or not any(isinstance(each.end, CrossWeights) for each in wanted):
            return None
        return cls(wanted, inputs, num_heads, shard, first_layer)

    def observe(self, layer: CrossAttentionLayer, q: Tensor, backend: AttentionBackend, kv_cache: LayerCache) -> None:
        """Gets the queries [T, heads, head_dim] of a layer, before it attends."""
        index = self._first_layer + layer.index
        for each, found in zip(self._wanted, self.found):
            if not isinstance(each.end, CrossWeights):
                continue
            heads = [head for layer_of_head, head in each.end.heads if layer_of_head == index]
            if heads:
                weights = self._weights(layer, q, backend, kv_cache, each.rows, heads)
                found.update({(index, head): weights[place] for place, head in enumerate(heads)})

    def add_up(self) -> None:
        """Puts together what the ranks have: each computes its own heads, and has zeros for the others."""
        all_reduce = self._shard.all_reduce
        if all_reduce is None:
            return
        for found in self.found:
            for head in sorted(found):
                found[head] = all_reduce(found[head])

    def _weights(
        self,
        layer: CrossAttentionLayer,
        q: Tensor,
        backend: AttentionBackend,
        kv_cache: LayerCache,
        rows: np.ndarray,
        heads: list[int],
    ) -> Tensor:
        """[heads, N, positions] of these rows [N]."""
        inputs = self._inputs
        requests = np.searchsorted(inputs.query_start_loc, rows, side="right") - 1
        longest = int(inputs.seq_lens[requests].max())
        weights = torch.zeros((len(heads), len(rows), longest), device=q.device)
        own = [place for place, head in enumerate(heads) if head in self._own_heads]
        if not own:
            return weights
        local = [heads[place] - self._own_heads.start for place in own]
        for request in np.unique(requests).tolist():
            places = np.flatnonzero(requests == request).tolist()
            length = int(inputs.seq_lens[request])
            blocks = inputs.block_table_device[request, : -(-length // inputs.block_size)]
            keys = backend.read_keys(layer, kv_cache, blocks)[local, :length]  # [own, S, head_dim]
            queries = q[indices_on(q.device, rows[places].tolist())][:, local].float()  # [n, own, head_dim]
            scores = torch.einsum("nhd,hsd->hns", queries, keys) * layer.scale
            whole = torch.zeros((len(own), len(places), longest), device=q.device)
            whole[..., :length] = scores.softmax(-1)
            weights[torch.tensor(own, device=q.device)[:, None], indices_on(q.device, places)] = whole
        return weights
