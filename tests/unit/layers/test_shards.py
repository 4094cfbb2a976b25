"""Ranks that each take a part of the weights compute together what one computes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.layers.embedding import LMHead, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, GatedMLP
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Destination, Weights
from ratoon.models.build import build_model, collect_shapes, declare_model
from ratoon.models.dummy_source import DummySource
from tests.golden.dense_batch import DenseMemory, DensePass
from tests.unit.layers.ranks import Meeting, Rank, on_all_ranks
from tests.unit.layers.test_layers import RandomSource
from tests.unit.models.test_build_model import BASES, GPT2, LLAMA

Tensor = torch.Tensor
CPU = torch.device("cpu")
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
ALL_OPS: list[Ops] = [TorchOps()]
if not native_ops_reasons(CPU, torch.float32):
    ALL_OPS.append(NativeOps())


def weights_for(source: RandomSource, shard: Shard | None = None, ops: Ops | None = None) -> Weights:
    return Weights(source, ops or TorchOps(), CPU, torch.float32, shard)


def random_source(**shapes: tuple[int, ...]) -> RandomSource:
    torch.manual_seed(1)
    source = RandomSource(**shapes)
    for tensor in source.tensors.values():
        tensor.div_(4)
    return source


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_of_two_ranks_side_by_side_and_rows_of_two_ranks_summed_are_the_layer(
    bias: bool, transposed: bool
) -> None:
    source = random_source(weight=(8, 6) if transposed else (6, 8), bias=(6,))
    whole = ColumnParallelLinear(weights_for(source), 8, 6, bias, transposed)
    x = torch.randn(3, 8)
    columns = on_all_ranks(2, lambda shard: ColumnParallelLinear(weights_for(source, shard), 8, 6, bias, transposed)(x))
    torch.testing.assert_close(torch.cat(columns, dim=1), whole(x), **CLOSE)

    def rows(shard: Shard) -> Tensor:
        own = x[:, 4 * shard.rank : 4 * shard.rank + 4]
        return RowParallelLinear(weights_for(source, shard), 8, 6, bias, transposed)(own)

    for found in on_all_ranks(2, rows):
        torch.testing.assert_close(found, whole(x), **CLOSE)


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mlps_of_several_ranks_are_that_of_one(world_size: int, ops: Ops) -> None:
    names = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    biases = {f"{name}__bias": shape[:1] for name, shape in names.items()}
    source = random_source(**{f"{name}__weight": shape for name, shape in names.items()}, **biases)
    x = torch.randn(5, 8)

    def gated(shard: Shard | None) -> Tensor:
        return GatedMLP(weights_for(source, shard, ops), 8, 6, bias=True)(x)

    def gelu(shard: Shard | None) -> Tensor:
        return GatedMLP(weights_for(source, shard, ops), 8, 6, activation="gelu_new")(x)

    def plain(shard: Shard | None) -> Tensor:
        weights = weights_for(source, shard, ops)
        up = ColumnParallelLinear(weights / "up_proj", 8, 6, bias=True)
        return MLP(up, RowParallelLinear(weights / "down_proj", 6, 8, bias=True), ops, "relu")(x)

    for compute in (gated, gelu, plain):
        expected = compute(None)
        for found in on_all_ranks(world_size, compute):
            torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocabulary", "world_size"), [(8, 2), (7, 2), (7, 3)])
def test_a_table_cut_by_vocabulary_looks_up_every_id_and_gives_all_logits(
    vocabulary: int, world_size: int, tied: bool
) -> None:
    source = random_source(embed__weight=(vocabulary, 6), head__weight=(vocabulary, 6))
    ids, hidden, bias = torch.arange(vocabulary).flip(0), torch.randn(3, 6), torch.randn(vocabulary)

    def both(shard: Shard | None) -> tuple[Tensor, Tensor]:
        weights = weights_for(source, shard)
        embedding = VocabParallelEmbedding(weights / "embed", vocabulary, 6)
        return embedding(ids), LMHead(weights / "head", embedding, tied, bias)(hidden)

    rows, logits = both(None)
    for found_rows, found_logits in on_all_ranks(world_size, both):
        assert torch.equal(found_rows, rows)
        torch.testing.assert_close(found_logits, logits, **CLOSE)


@pytest.mark.parametrize(("num_kv_heads", "world_size", "expected"), [(4, 2, [0, 0, 1, 1]), (2, 4, [0, 0, 1, 1])])
def test_key_value_heads_are_shared_out_or_repeated(num_kv_heads: int, world_size: int, expected: list[int]) -> None:
    """4 of them over 2 ranks are two each; 2 over 4 ranks are one each, every one of them twice."""
    source = random_source(q__weight=(8 * 3, 5), k__weight=(num_kv_heads * 3, 5), v__weight=(num_kv_heads * 3, 5))
    x = torch.randn(2, 5)

    def project(shard: Shard | None) -> tuple[Tensor, ...]:
        return QKVLinear(weights_for(source, shard), ("q", "k", "v"), 5, 8, num_kv_heads, 3)(x)

    q, k, _ = project(None)
    found = on_all_ranks(world_size, project)
    torch.testing.assert_close(torch.cat([part[0] for part in found], dim=1), q, **CLOSE)
    if num_kv_heads >= world_size:
        torch.testing.assert_close(torch.cat([part[1] for part in found], dim=1), k, **CLOSE)
    else:
        for part, head in zip(found, expected, strict=True):
            torch.testing.assert_close(part[1], k[:, head : head + 1], **CLOSE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda shard: shard.cut("outputs", 7), r"7 outputs can't be cut into 2 equal parts; a number .* divides 7"),
        (lambda shard: shard.cut_heads(5, 1), "5 attention heads can't be cut into 2 equal parts"),
        (lambda shard: shard.cut_heads(6, 3), "3 key-value heads can't be shared by 2 ranks; a divisor or a multiple"),
        (lambda shard: shard.cut_vocabulary(1), "2 ranks have a vocabulary of 1; fewer ranks"),
    ],
)
def test_what_ranks_can_not_share_is_said(build: Callable[[Shard], object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(Shard(1, 2, collective=object()))  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [(2, 2), (-1, 1), (0, 2, None), (0, 0)])
def test_a_rank_that_can_not_be_is_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="rank"):
        Shard(*arguments)


class CountingSource(DummySource):
    """Counts the numbers that are read of matrices."""

    num_read = 0

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        stored = super().read(name, part, destination)
        self.num_read += stored.data.numel() if len(stored.shape) == 2 else 0
        return stored


def logits_of(config: ModelConfig, shard: Shard | None, rows: Tensor | None = None) -> tuple[Tensor, int]:
    source = CountingSource(collect_shapes(config), seed=3)
    model = build_model(config, source, TorchOps(), CPU, torch.float32, part=ModelPart(shard or Shard()))
    ids = torch.arange(config.vocab_size)
    step = DensePass(DenseMemory(1), [len(ids)])
    if config.encoder is not None:
        from ratoon.models.encoder_decoder import EncoderBatch, EncoderDecoderLM

        assert isinstance(model, EncoderDecoderLM)
        states = model.encode(EncoderBatch(ids, ids), DensePass(DenseMemory(1), [len(ids)])).normed
        model.store_cross(states, step)
    states = model.forward(ids, torch.arange(len(ids)), step, rows).normed
    return (states if config.architecture == "BertModel" else model.compute_logits(states)), source.num_read


FAMILIES = {
    "LlamaForCausalLM": replace(LLAMA, num_kv_heads=1),  # one key-value head, which both ranks have
    "Qwen3ForCausalLM": replace(LLAMA, num_kv_heads=2, tie_word_embeddings=True),
    "GPT2LMHeadModel": GPT2,
    "BertModel": BASES["BertModel"],
    "BartForConditionalGeneration": BASES["BartForConditionalGeneration"],
    "T5ForConditionalGeneration": BASES["T5ForConditionalGeneration"],
}


def with_four_heads(config: ModelConfig) -> ModelConfig:
    """Where there are fewer key-value heads than heads, they stay as they are, and ranks have the same ones."""
    encoder = config.encoder and replace(config.encoder, num_heads=4, head_dim=2, intermediate_size=12)
    num_kv_heads = config.num_kv_heads if config.num_kv_heads < config.num_heads else 4
    return replace(config, num_heads=4, head_dim=2, num_kv_heads=num_kv_heads, encoder=encoder)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_a_tiny_model_on_several_ranks_is_the_model_on_one(architecture: str, world_size: int) -> None:
    """Whole layers, all kinds of attention, the last layer's rows only; and a rank reads its part of the weights."""
    config = replace(FAMILIES[architecture], architecture=architecture)
    config = with_four_heads(config) if world_size == 4 else config
    rows = torch.tensor([0, 5])
    expected, num_whole = logits_of(config, None, rows)

    def work(shard: Shard) -> tuple[Tensor, int]:
        with torch.inference_mode():
            return logits_of(config, shard, rows)

    for found, num_read in on_all_ranks(world_size, work):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert num_read < (0.75 if world_size == 2 else 0.6) * num_whole


def test_what_communicates_is_declared() -> None:
    config = replace(LLAMA, num_kv_heads=2)
    parts: list[frozenset[str]] = []
    for shard in (Shard(), Shard(0, 2, Rank(Meeting(2), 0))):
        model = declare_model(config, 8, ModelPart(shard))
        parts.append(model.communicating_parts)
        layer = model.layers[0]
        assert layer.attention.output.communicates == layer.mlp.down.communicates == (shard.world_size > 1)  # type: ignore
        assert not layer.attention.qkv.linear.communicates  # type: ignore[attr-defined]
    assert parts == [frozenset(), frozenset({"embed", "layers", "head"})]
