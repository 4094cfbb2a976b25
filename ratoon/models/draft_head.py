"""Draft heads: small modules that guess next tokens from the hidden states of the model that they were trained on.

A row of a head reads the states of the model at one position and the token behind it, and guesses the token behind
that one. Its own state takes the place of the model's when it goes on. Kinds of heads are EAGLE-3 (eagle3.py) and
multi-token prediction (multi_token.py), files of them are read in head_source.py. Which rows run, and where keys and
values lie, is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.layers.attention import AttentionLayer, StepContext
from ratoon.layers.embedding import VocabParallelEmbedding
from ratoon.layers.linear import QKVLinear, RowParallelLinear
from ratoon.layers.mlp import GatedMLP
from ratoon.layers.norm import RMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.weights import Weights
from ratoon.models.base import FinalStates, LanguageModel
from ratoon.models.decoder import PreNormLayer, SelfAttention

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    kind: str  # "eagle3" or "mtp"
    layer: ModelConfig  # the sizes of the head's layer, and the model's vocabulary
    draft_vocab_size: int  # tokens that it can guess
    reads: tuple[int, ...]  # layers of the model's stream, as LanguageModel counts them, up to `num_layers` + 1
    target_hidden_size: int


class DraftHead(ABC):
    """One layer over the token behind a position and the states at it. All choices are made when it is built."""

    config: DraftHeadConfig
    attention_layers: Sequence[AttentionLayer]

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """What the head reads, [N, H], of the model's states [layers, N, H] at the layers `config.reads`."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, step: StepContext, rows: Tensor | None = None
    ) -> FinalStates:
        """[T] tokens behind the positions [T], and what `begin` or the head itself has made of the positions, [T, H] →
        the states of all rows, or of these `rows` [R]. The stream of a row is what its next row reads as `hidden`."""

    @abstractmethod
    def compute_logits(self, normed: Tensor) -> Tensor:
        """[R, H] → [R, draft vocabulary]."""

    def tokens_of(self, draft_ids: Tensor) -> Tensor:
        """The model's ids [R] of tokens of the draft vocabulary."""
        return draft_ids


# ---- parts that kinds of heads share ----


def take_embedding(weights: Weights, config: ModelConfig, target: LanguageModel) -> VocabParallelEmbedding:
    """The head's own table below these weights, or the model's."""
    if weights.has("weight"):
        return VocabParallelEmbedding(weights, config.vocab_size, config.hidden_size)
    if config.hidden_size != target.config.hidden_size:
        problem = f"has no embeddings of {config.hidden_size} numbers, and those of the model have "
        raise ModelError(
            weights.source.name, problem + str(target.config.hidden_size), f"a tensor {weights.prefix}weight"
        )
    return target.embed


def attention_layer_of(config: ModelConfig, weights: Weights) -> AttentionLayer:
    heads, kv_heads = map(len, weights.shard.cut_heads(config.num_heads, config.num_kv_heads))
    return AttentionLayer(0, heads, kv_heads, config.head_dim, config.head_dim**-0.5, config.window_of_layer(0))


def build_layer(
    config: ModelConfig,
    weights: Weights,
    norm: RMSNorm,
    layer: AttentionLayer,
    max_position: int,
    input_size: int,
) -> PreNormLayer:
    """A Llama layer whose attention reads inputs of `input_size`; `norm` is the one before it."""
    attention, hidden_size = weights / "self_attn", config.hidden_size
    attention.ignore("rotary_emb.inv_freq")
    width = config.num_heads * config.head_dim
    return PreNormLayer(
        norm,
        SelfAttention(
            layer,
            QKVLinear(
                attention, ("q_proj", "k_proj", "v_proj"), input_size, config.num_heads, config.num_kv_heads,
                config.head_dim, config.attention_bias,
            ),
            RowParallelLinear(attention / "o_proj", width, hidden_size, config.attention_output_bias),
            Rotary(weights, config, max_position),
        ),
        RMSNorm(weights / "post_attention_layernorm", hidden_size, config.norm_eps),
        GatedMLP(weights / "mlp", hidden_size, config.intermediate_size, config.mlp_bias, config.activation),
    )  # fmt: skip


def with_window(config: DraftHeadConfig, window: int | None) -> DraftHeadConfig:
    """The head with a layer that reads no further back than this."""
    return config if window is None else replace(config, layer=replace(config.layer, sliding_window=window))
