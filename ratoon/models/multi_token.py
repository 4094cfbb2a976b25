"""Multi-token prediction: a module that was trained with its model, and reads the states behind the model's last norm.

The names of tensors are those of DeepSeek's modules, at any place in the checkpoint: `enorm`, `hnorm`, `eh_proj`, a
layer, and `shared_head`. Its layer is a Llama layer; embeddings and output head are the model's where it has none.
"""

from __future__ import annotations

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.attention import StepContext
from ratoon.layers.linear import Linear, Piece
from ratoon.layers.norm import RMSNorm
from ratoon.layers.weights import Weights
from ratoon.models.base import FinalStates, LanguageModel, end_of_stream
from ratoon.models.draft_head import DraftHead, DraftHeadConfig, attention_layer_of, build_layer, take_embedding
from ratoon.models.eagle3 import DraftLMHead

Tensor = torch.Tensor

MARK = "eh_proj.weight"  # of the module, wherever it is


class MultiTokenHead(DraftHead):
    def __init__(self, config: DraftHeadConfig, weights: Weights, max_position: int, target: LanguageModel) -> None:
        self.config = config
        sizes = config.layer
        size, eps = sizes.hidden_size, sizes.norm_eps
        if size != config.target_hidden_size:
            problem = f"has a hidden size of {size}, and its model one of {config.target_hidden_size}"
            raise ModelError(weights.source.name, problem, "the same: the module continues the model's states")
        below = _find_module(weights)
        self.embed = take_embedding(below / "embed_tokens", sizes, target)
        self.embedding_norm = RMSNorm(below / "enorm", size, eps)
        self.hidden_norm = RMSNorm(below / "hnorm", size, eps)
        self.project = Linear([Piece(below / "eh_proj", size, False, [range(size)])], 2 * size)
        self.attention_layers = [attention_layer_of(sizes, weights)]
        norm = RMSNorm(below / "input_layernorm", size, eps)
        self.layer = build_layer(sizes, below, norm, self.attention_layers[0], max_position, size)
        self.final_norm = RMSNorm(below / "shared_head" / "norm", size, eps)
        head = below / "shared_head" / "head"
        self.lm_head = DraftLMHead(head, sizes.vocab_size, size) if head.has("weight") else target.lm_head

    def begin(self, states: Tensor) -> Tensor:
        return states[0]

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, step: StepContext, rows: Tensor | None = None
    ) -> FinalStates:
        both = torch.cat([self.embedding_norm(self.embed(input_ids)), self.hidden_norm(hidden)], dim=-1)  # [T, 2H]
        stream = self.project(both)
        attended = self.layer.attend(stream, None, positions, step)
        if rows is not None:
            attended, stream = attended[rows], stream[rows]
        return end_of_stream(self.final_norm, self.layer.finish(attended, stream, None), stream)

    def compute_logits(self, normed: Tensor) -> Tensor:
        return self.lm_head(normed)


def _find_module(weights: Weights) -> Weights:
    """The view below which the module's tensors are. Raises ModelError unless there is exactly one module."""
    places = sorted(name.removesuffix(MARK) for name in weights.source.shapes() if name.endswith(MARK))
    if len(places) != 1:
        raise ModelError(weights.source.name, f"has {len(places)} tensors '…{MARK}'", "one module")
    return weights / places[0].removesuffix(".") if places[0] else weights
