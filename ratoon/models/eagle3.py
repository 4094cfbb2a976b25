"""EAGLE-3: a head that reads a low, a middle and a high layer of its model, and guesses among the most frequent tokens.

The names of tensors are those of published heads: `fc`, `midlayer` (or `layers.0`), `norm`, `lm_head`, and `d2t`, which
says how far a token of the draft vocabulary is from the model's.
"""

from __future__ import annotations

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.attention import StepContext
from ratoon.layers.linear import Linear, Piece
from ratoon.layers.norm import RMSNorm
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights
from ratoon.models.base import FinalStates, LanguageModel, end_of_stream
from ratoon.models.draft_head import (
    DraftHead,
    DraftHeadConfig,
    attention_layer_of,
    build_layer,
    take_embedding,
)

Tensor = torch.Tensor


class Eagle3Head(DraftHead):
    def __init__(self, config: DraftHeadConfig, weights: Weights, max_position: int, target: LanguageModel) -> None:
        self.config = config
        sizes = config.layer
        size, eps = sizes.hidden_size, sizes.norm_eps
        self.embed = take_embedding(weights / "embed_tokens", sizes, target)
        fc = weights / "fc"
        num_read = len(config.reads) * config.target_hidden_size
        self.fuse = Linear([Piece(fc, size, fc.has("bias"), [range(size)])], num_read)
        below = weights / "midlayer"
        if not below.has("hidden_norm.weight") and (weights / "layers.0").has("hidden_norm.weight"):
            below = weights / "layers.0"
        self.embedding_norm = RMSNorm(below / "input_layernorm", size, eps)
        self.attention_layers = [attention_layer_of(sizes, weights)]
        hidden_norm = RMSNorm(below / "hidden_norm", size, eps)
        self.layer = build_layer(sizes, below, hidden_norm, self.attention_layers[0], max_position, 2 * size)
        self.final_norm = RMSNorm(weights / "norm", size, eps)
        self.lm_head = DraftLMHead(weights / "lm_head", config.draft_vocab_size, size)
        weights.ignore("t2d", "d2t")
        self.offsets = _read_offsets(weights, config)

    def begin(self, states: Tensor) -> Tensor:
        num_layers, num_rows, size = states.shape
        return self.fuse(states.transpose(0, 1).reshape(num_rows, num_layers * size))

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, step: StepContext, rows: Tensor | None = None
    ) -> FinalStates:
        norm = self.layer.attention_norm
        both = torch.cat([self.embedding_norm(self.embed(input_ids)), norm(hidden)], dim=-1)  # [T, 2H]
        attended = self.layer.attention(both, positions, step)
        if rows is None:
            stream = hidden.clone()  # it is added to
        else:
            attended, stream = attended[rows], hidden[rows]
        return end_of_stream(self.final_norm, self.layer.finish(attended, stream, None), stream)

    def compute_logits(self, normed: Tensor) -> Tensor:
        return self.lm_head(normed)

    def tokens_of(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.offsets is None else draft_ids + self.offsets[draft_ids]


class DraftLMHead:
    """Hidden states [R, hidden] → logits [R, draft vocabulary]. A rank multiplies by its rows of the weight."""

    def __init__(self, weights: Weights, vocab_size: int, size: int) -> None:
        self.shard, self.vocab_size = weights.shard, vocab_size
        part = TensorSlice.of_range(0, weights.shard.cut_vocabulary(vocab_size), vocab_size)
        weight = weights.take_stored("weight", vocab_size, size, part=part, use=WeightUse.VOCABULARY)
        self.multiply = make_product(weights.ops, [weight], None)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.multiply(hidden)
        if self.shard.collective is not None:
            logits = self.shard.collective.all_gather(logits, self.vocab_size)
        return logits


def _read_offsets(weights: Weights, config: DraftHeadConfig) -> Tensor | None:
    """[draft vocabulary]: what is added to an id of the draft vocabulary. None: both vocabularies are the same."""
    source, size = weights.source, config.draft_vocab_size
    found = source.shapes().get("d2t")
    if found is None:
        if size == config.layer.vocab_size:
            return None
        problem = f"can guess {size:,} of {config.layer.vocab_size:,} tokens and does not say which"
        raise ModelError(source.name, problem, f"a tensor 'd2t' of {size:,} whole numbers")
    if tuple(found) != (size,):
        raise ModelError(source.name, f"tensor 'd2t' has shape {tuple(found)}", f"the config asks for {(size,)}")
    if weights.device.type == "meta":
        return None
    offsets = source.read("d2t").data.to(torch.int64)
    ids = torch.arange(size) + offsets
    if size and not (int(ids.min()) >= 0 and int(ids.max()) < config.layer.vocab_size):
        problem = f"tensor 'd2t' leads to the tokens {int(ids.min())} to {int(ids.max())}"
        raise ModelError(source.name, problem, f"tokens of the vocabulary: 0 to {config.layer.vocab_size - 1}")
    return offsets.to(weights.device)
