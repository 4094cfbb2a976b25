"""Layers take the right tensors by name, fuse them into one product, and hand out views of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.embedding import Embedding, LMHead, VocabParallelEmbedding
from ratoon.layers.linear import ColumnParallelLinear, MergedLinear, QKVLinear
from ratoon.layers.mlp import MLP, GatedMLP
from ratoon.layers.norm import HeadRMSNorm, LayerNorm, RMSNorm
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Destination, Weights

Tensor = torch.Tensor


class CountingOps(TorchOps):
    """Notes the shape of every weight that is made into a product."""

    def __init__(self) -> None:
        self.products: list[tuple[int, ...]] = []

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        assert weight.is_contiguous()
        self.products.append(tuple(weight.shape))
        return super().make_linear(weight, bias)


class RandomSource:
    name = "random"

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.tensors = {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        return StoredTensor.of_floats(self.tensors[name], part)


def weights_of(source: RandomSource, dtype: torch.dtype = torch.float32) -> Weights:
    torch.manual_seed(0)
    return Weights(source, CountingOps(), torch.device("cpu"), dtype)


def test_a_linear_layer_with_and_without_bias() -> None:
    source = RandomSource(weight=(5, 8), bias=(5,))
    x = torch.randn(3, 8)
    product = x @ source.tensors["weight"].T
    torch.testing.assert_close(ColumnParallelLinear(weights_of(source), 8, 5)(x), product)
    torch.testing.assert_close(
        ColumnParallelLinear(weights_of(source), 8, 5, bias=True)(x), product + source.tensors["bias"]
    )


def test_a_transposed_linear_layer_reads_its_weight_as_in_by_out() -> None:
    source = RandomSource(weight=(8, 5))
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        ColumnParallelLinear(weights_of(source), 8, 5, transposed=True)(x), x @ source.tensors["weight"]
    )


def test_merged_layers_are_one_product_in_the_order_of_their_names() -> None:
    source = RandomSource(gate__weight=(6, 8), gate__bias=(6,), up__weight=(4, 8), up__bias=(4,))
    weights = weights_of(source)
    merged = MergedLinear(weights, ("gate", "up"), 8, (6, 4), bias=True)
    x = torch.randn(3, 8)
    apart = [x @ source.tensors[f"{name}.weight"].T + source.tensors[f"{name}.bias"] for name in ("gate", "up")]
    torch.testing.assert_close(merged(x), torch.cat(apart, dim=1))
    assert weights.ops.products == [(10, 8)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("bias", [False, True])
def test_query_key_and_value_are_views_of_one_product(bias: bool) -> None:
    shapes = {"q": 4 * 6, "k": 2 * 6, "v": 2 * 6}
    source = RandomSource(
        **{f"{name}__weight": (size, 8) for name, size in shapes.items()},
        **{f"{name}__bias": (size,) for name, size in shapes.items()},
    )
    weights = weights_of(source)
    qkv = QKVLinear(weights, ("q", "k", "v"), 8, num_heads=4, num_kv_heads=2, head_dim=6, bias=bias)
    x = torch.randn(3, 8)
    parts = qkv(x)
    for name, part, heads in zip("qkv", parts, (4, 2, 2)):
        expected = x @ source.tensors[f"{name}.weight"].T + bias * source.tensors[f"{name}.bias"]
        torch.testing.assert_close(part, expected.view(3, heads, 6))
    assert weights.ops.products == [(8 * 6, 8)]  # type: ignore[attr-defined]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_query_key_and_value_that_the_checkpoint_has_fused_and_transposed() -> None:
    source = RandomSource(c_attn__weight=(8, 3 * 8), c_attn__bias=(3 * 8,))
    qkv = QKVLinear(weights_of(source), ("c_attn",), 8, 2, 2, 4, bias=True, transposed=True)
    x = torch.randn(3, 8)
    fused = x @ source.tensors["c_attn.weight"] + source.tensors["c_attn.bias"]
    for part, expected in zip(qkv(x), fused.split(8, dim=1)):
        torch.testing.assert_close(part, expected.view(3, 2, 4))


def test_a_part_without_a_bias_gets_zeros_beside_those_that_have_one() -> None:
    source = RandomSource(q__weight=(4, 8), q__bias=(4,), k__weight=(4, 8), v__weight=(4, 8), v__bias=(4,))
    weights = weights_of(source)
    qkv = QKVLinear(weights, ("q", "k", "v"), 8, num_heads=1, num_kv_heads=1, head_dim=4, bias=(True, False, True))
    x, stored = torch.randn(3, 8), source.tensors
    q, k, v = (part.flatten(1) for part in qkv(x))
    torch.testing.assert_close(q, x @ stored["q.weight"].T + stored["q.bias"])
    torch.testing.assert_close(k, x @ stored["k.weight"].T)
    torch.testing.assert_close(v, x @ stored["v.weight"].T + stored["v.bias"])
    weights.check_nothing_left()


def test_a_part_of_the_wrong_shape_is_named_before_anything_is_fused() -> None:
    source = RandomSource(q__weight=(24, 8), k__weight=(12, 8), v__weight=(12, 9))
    with pytest.raises(ModelError, match=r"'v\.weight' has shape \(12, 9\)"):
        QKVLinear(weights_of(source), ("q", "k", "v"), 8, num_heads=4, num_kv_heads=2, head_dim=6)


def test_a_tied_head_multiplies_by_the_embedding_itself() -> None:
    source = RandomSource(embed__weight=(7, 8), head__weight=(7, 8))
    weights = weights_of(source)
    embedding = VocabParallelEmbedding(weights / "embed", 7, 8)
    x = torch.randn(2, 8)
    tied = LMHead(weights / "head", embedding, tied=True)
    torch.testing.assert_close(tied(x), x @ source.tensors["embed.weight"].T)
    weights.check_nothing_left()  # the copy in the file is no left-over
    untied = LMHead(weights / "head", embedding, tied=False)
    torch.testing.assert_close(untied(x), x @ source.tensors["head.weight"].T)


def test_a_head_may_have_a_bias_and_a_table_unused_rows_before_the_first() -> None:
    source = RandomSource(positions__weight=(9, 8), embed__weight=(7, 8))
    weights = weights_of(source)
    positions = Embedding(weights / "positions", 7, 8, num_unused=2)
    assert torch.equal(positions(torch.tensor([0, 6])), source.tensors["positions.weight"][[2, 8]])
    x, bias = torch.randn(2, 8), torch.randn(7)
    head = LMHead(weights / "head", VocabParallelEmbedding(weights / "embed", 7, 8), tied=True, bias=bias)
    torch.testing.assert_close(head(x), x @ source.tensors["embed.weight"].T + bias)


def test_logits_have_the_dtype_of_the_model() -> None:
    weights = weights_of(RandomSource(embed__weight=(7, 8)), torch.bfloat16)
    embedding = VocabParallelEmbedding(weights / "embed", 7, 8)
    assert embedding(torch.tensor([1, 2])).dtype == torch.bfloat16
    head = LMHead(weights / "head", embedding, tied=True)
    assert head(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_layer_norm_may_have_the_names_of_the_first_bert() -> None:
    source = RandomSource(gamma=(8,), beta=(8,))
    x = torch.randn(3, 8)
    expected = torch.nn.functional.layer_norm(x, (8,), source.tensors["gamma"], source.tensors["beta"], 1e-6)
    torch.testing.assert_close(LayerNorm(weights_of(source), 8, 1e-6)(x), expected)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_a_norm_with_a_residual_equals_adding_first(norm_class: type[RMSNorm | LayerNorm]) -> None:
    norm = norm_class(weights_of(RandomSource(weight=(8,), bias=(8,))), 8, 1e-6)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    total = x + residual
    alone = norm(total)
    torch.testing.assert_close(norm(x, residual), alone)
    torch.testing.assert_close(residual, total)
    assert not torch.allclose(alone, total)


def test_a_head_norm_gives_every_head_the_same_weight() -> None:
    source = RandomSource(weight=(4,))
    heads = torch.randn(3, 2, 4)
    expected = torch.nn.functional.rms_norm(heads, (4,), source.tensors["weight"], 1e-6)
    HeadRMSNorm(weights_of(source), 4, 1e-6)(heads)
    torch.testing.assert_close(heads, expected)


def test_a_gated_mlp_is_two_products() -> None:
    source = RandomSource(gate_proj__weight=(6, 8), up_proj__weight=(6, 8), down_proj__weight=(8, 6))
    weights = weights_of(source)
    x = torch.randn(3, 8)
    gate, up = x @ source.tensors["gate_proj.weight"].T, x @ source.tensors["up_proj.weight"].T
    expected = (gate * gate.sigmoid() * up) @ source.tensors["down_proj.weight"].T
    torch.testing.assert_close(GatedMLP(weights, 8, 6)(x), expected)
    assert weights.ops.products == [(12, 8), (8, 6)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_a_gate_may_have_another_activation_and_the_parts_other_names(activation: str) -> None:
    source = RandomSource(wi_0__weight=(6, 8), wi_1__weight=(6, 8), wo__weight=(8, 6))
    weights = weights_of(source)
    x = torch.randn(3, 8)
    gate, up = x @ source.tensors["wi_0.weight"].T, x @ source.tensors["wi_1.weight"].T
    expected = (weights.ops.activation(gate, activation) * up) @ source.tensors["wo.weight"].T
    mlp = GatedMLP(weights, 8, 6, activation=activation, names=("wi_0", "wi_1", "wo"))
    torch.testing.assert_close(mlp(x), expected)


def test_an_activation_that_nobody_computes_is_refused_when_the_model_is_built() -> None:
    weights = weights_of(RandomSource(up__weight=(6, 8), down__weight=(8, 6)))
    up, down = ColumnParallelLinear(weights / "up", 8, 6), ColumnParallelLinear(weights / "down", 6, 8)
    MLP(up, down, weights.ops, "gelu_new")
    with pytest.raises(ModelError, match="'swoosh'"):
        MLP(up, down, weights.ops, "swoosh")
    with pytest.raises(ModelError, match="'swoosh'"):
        GatedMLP(weights, 8, 6, activation="swoosh")
