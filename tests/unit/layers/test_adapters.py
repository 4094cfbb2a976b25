"""Adapters add their low-rank products to the rows that have them, beside any linear layer, and to no others."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from ratoon.layers.native import library
from ratoon.layers.native_adapters import NativeLowRank
from ratoon.layers.ops import Ops
from ratoon.layers.shard import Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model, collect_shapes
from ratoon.models.dummy_source import DummySource
from tests.golden.dense_step import DenseStep
from tests.golden.tiny_models import DictSource
from tests.unit.layers.ranks import on_all_ranks
from tests.unit.layers.test_shards import ALL_OPS, CPU, random_source, weights_for
from tests.unit.models.test_build_model import GPT2, LLAMA

Tensor = torch.Tensor
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
SLOTS, MAX_RANK = 3, 4
MIXED = torch.tensor(
    [-1, 0, 2, 0, -1, 2], dtype=torch.int32
)  # rows of the base model and of two adapters; slot 1 is empty


def matrices(num_out: int, num_in: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, num_in, generator=generator), torch.randn(num_out, rank, generator=generator) / 8


def load_all(targets: dict, shapes: dict[str, tuple[int, int]]) -> dict[int, dict[str, Tensor]]:
    """Two adapters of different rank for all these layers; gives what each adds to the layers' weights."""
    added: dict[int, dict[str, Tensor]] = {0: {}, 2: {}}
    for number, (name, shape) in enumerate(shapes.items()):
        targets[name].open_slots(SLOTS, MAX_RANK, CPU, torch.float32)
        for slot, rank in ((0, 2), (2, 4)):
            a, b = matrices(*shape, rank, seed=10 * number + slot)
            targets[name].load(slot, a, b)
            added[slot][name] = b @ a
    return added


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
def test_mixed_rows_of_a_fused_layer_equal_products_with_each_rows_own_weight(ops: Ops) -> None:
    shapes = {"q": (8, 5), "k": (4, 5), "v": (4, 5)}
    source = random_source(**{f"{name}__weight": shape for name, shape in shapes.items()})
    weights = weights_for(source, ops=ops)
    qkv = QKVLinear(weights, ("q", "k", "v"), 5, num_heads=4, num_kv_heads=2, head_dim=2)
    added = load_all(weights.adapter_targets, shapes)
    x = torch.randn(6, 5)
    found, base = qkv(x, AdapterRows(MIXED)), qkv(x)
    for name, part, plain in zip(shapes, found, base, strict=True):
        for row, slot in enumerate(MIXED.tolist()):
            weight = source.tensors[f"{name}.weight"] + (added[slot][name] if slot >= 0 else 0)
            torch.testing.assert_close(part[row].flatten(), weight @ x[row], **CLOSE)
            assert slot >= 0 or torch.equal(part[row], plain[row])


def merged(source: DictSource, added: dict[str, Tensor], transposed: bool = False) -> DictSource:
    """The checkpoint with an adapter's products in its weights."""
    tensors = {f"{name}.weight": change.t() if transposed else change for name, change in added.items()}
    return DictSource({name: tensor + tensors.get(name, 0) for name, tensor in source.tensors.items()})


def build(config, source, ops: Ops | None = None) -> LanguageModel:
    return build_model(config, source, ops or TorchOps(), CPU, torch.float32)


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config.architecture)
@torch.inference_mode()
def test_a_models_rows_under_adapters_equal_the_models_with_merged_weights(config, ops: Ops) -> None:
    """Every linear layer is a target: fused attention, the fused MLP, the head; the last layer has some rows only."""
    random = DummySource(collect_shapes(config), seed=5)
    source = DictSource({name: random.read(name).data * 5 for name in random.shapes()})
    model = build(config, source, ops)
    gpt2 = config is GPT2
    shapes = {name: source.tensors[f"{name}.weight"].shape for name in model.adapter_targets if name != "lm_head"}
    assert len(shapes) == (4 if gpt2 else 7) * config.num_layers and "lm_head" in model.adapter_targets
    added = load_all(dict(model.adapter_targets), {name: s[::-1] if gpt2 else s for name, s in shapes.items()})
    ids, positions = torch.arange(5), torch.arange(5)
    rows = torch.tensor([1, 4])
    references = {slot: build(config, merged(source, added[slot], gpt2), ops) for slot in added} | {-1: model}
    for slot, reference in references.items():
        adapters = AdapterRows(torch.full((5,), slot, dtype=torch.int32))
        found = model.forward(ids, positions, DenseStep(adapters), rows).normed
        expected = reference.forward(ids, positions, DenseStep(), rows).normed
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(
            model.compute_logits(found, adapters.select(rows)), reference.compute_logits(found), **CLOSE
        )
    # The last row alone has another: keys of the rows before it differ.
    mixed = AdapterRows(torch.tensor([0, 0, 0, 0, 2], dtype=torch.int32))
    selected = model.forward(ids, positions, DenseStep(mixed), rows).normed
    whole = model.forward(ids, positions, DenseStep(mixed)).normed
    torch.testing.assert_close(selected, whole[rows], **CLOSE)
    assert not torch.allclose(
        selected[1], model.forward(ids, positions, DenseStep(AdapterRows(mixed.slots * 0))).normed[4]
    )


def test_a_head_may_have_an_adapter_too() -> None:
    model = build(LLAMA, DummySource(collect_shapes(LLAMA)))
    target = model.adapter_targets["lm_head"]
    hidden, rows = torch.randn(3, 8), AdapterRows(torch.tensor([1, -1, 1], dtype=torch.int32))
    base = model.compute_logits(hidden)
    assert torch.equal(model.compute_logits(hidden, rows), base)  # no slot is open: nothing is added
    target.open_slots(2, 2, CPU, torch.float32)
    a, b = matrices(LLAMA.vocab_size, 8, 2, seed=1)
    target.load(1, a, b)
    expected = base + torch.tensor([[1.0], [0.0], [1.0]]) * (hidden @ a.T @ b.T)
    torch.testing.assert_close(model.compute_logits(hidden, rows), expected, **CLOSE)
    target.clear(1)
    assert torch.equal(model.compute_logits(hidden, rows), base)


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_a_rank_takes_its_part_of_an_adapter(kind: str) -> None:
    source = random_source(weight=(6, 8))
    x, slots = torch.randn(6, 8), AdapterRows(MIXED)
    a, b = matrices(6, 8, 3, seed=4)

    def work(shard: Shard | None) -> Tensor:
        weights = weights_for(source, shard)
        layer = (ColumnParallelLinear if kind == "columns" else RowParallelLinear)(weights, 8, 6)
        target = weights.adapter_targets[""]
        target.open_slots(SLOTS, MAX_RANK, CPU, torch.float32)
        target.load(2, a, b)
        own = x.chunk(2, dim=1)[shard.rank] if shard is not None and kind == "rows" else x
        return layer(own, slots)

    expected, found = work(None), on_all_ranks(2, work)
    torch.testing.assert_close(torch.cat(found, dim=1) if kind == "columns" else found[1], expected, **CLOSE)


def test_matrices_that_do_not_fit_the_layer_are_refused() -> None:
    model = build(LLAMA, DummySource(collect_shapes(LLAMA)))
    target = model.adapter_targets["model.layers.0.mlp.up_proj"]
    target.open_slots(1, 2, CPU, torch.float32)
    with pytest.raises(ModelError, match=r"up_proj: has matrices of shapes \(2, 9\) and \(12, 2\); \(rank, 8\) and"):
        target.load(0, torch.zeros(2, 9), torch.zeros(12, 2))
    with pytest.raises(ModelError, match=r"has the rank 3; at most 2"):
        target.load(0, torch.zeros(3, 8), torch.zeros(12, 3))
    with pytest.raises(ModelError, match="has a weight of shape"):
        target.load_weight(0, torch.zeros(12, 8))


@pytest.mark.skipif(library() is None, reason="kernels are not built")
@pytest.mark.parametrize("rank", [1, 16, 20, 72])
def test_beside_weights_in_few_bits_adapters_are_rounded_to_8(rank: int) -> None:
    """The largest of 64 normal numbers is below 3.5 deviations nearly always. Rounding to steps of 1 / 127 of it has
    a deviation of 1 / √12 steps: 0.8 % for a matrix, and √2 times that for two."""
    num_inputs, widths, rows = 200, (24, 40), 9
    rounded = NativeLowRank(num_inputs, widths, 2, has_few_bits=True)
    added = torch.zeros(2, sum(widths), num_inputs)
    for slot in range(2):
        for part, (first, width) in enumerate(zip((0, widths[0]), widths)):
            a, b = matrices(width, num_inputs, rank, seed=10 * slot + part)
            rounded.load(slot, part, a, b, 0.5)
            added[slot, first : first + width] = 0.5 * (b @ a)
    x, slots = torch.randn(rows, num_inputs), torch.arange(rows, dtype=torch.int32) % 3 - 1
    found = torch.zeros(rows, sum(widths))
    rounded.add(found, x, slots)
    expected = torch.stack(
        [added[slot] @ row if slot >= 0 else torch.zeros(sum(widths)) for slot, row in zip(slots, x)]
    )
    assert torch.equal(found[slots < 0], expected[slots < 0])
    assert (found - expected).norm() < 0.012 * expected.norm()
    for row in range(rows):  # a row is the same alone
        alone = torch.zeros(1, sum(widths))
        rounded.add(alone, x[row : row + 1], slots[row : row + 1])
        assert torch.equal(alone[0], found[row])


@pytest.mark.skipif(library() is None, reason="kernels are not built")
def test_one_large_number_of_an_adapter_rounds_few_others() -> None:
    a, b = matrices(16, 256, 16, seed=0)
    large = a.clone()
    large[3, 200] = 1000.0
    x = torch.randn(4, 256)
    x[:, 192:] = 0  # none of the numbers that share its scale is multiplied
    sums = []
    for matrix in (a, large):
        rounded = NativeLowRank(256, (16,), 1, has_few_bits=True)
        rounded.load(0, 0, matrix, b, 1.0)
        y = torch.zeros(4, 16)
        rounded.add(y, x, torch.zeros(4, dtype=torch.int32))
        sums.append(y)
    assert torch.equal(*sums)


@pytest.mark.skipif(library() is None, reason="kernels are not built")
def test_numbers_that_are_not_finite_are_not_rounded_away() -> None:
    a, b = matrices(16, 64, 4, seed=0)
    a[2, 5] = float("nan")
    rounded = NativeLowRank(64, (16,), 1, has_few_bits=True)
    rounded.load(0, 0, a, b, 1.0)
    y = torch.zeros(1, 16)
    rounded.add(y, torch.ones(1, 64), torch.zeros(1, dtype=torch.int32))
    assert y.isnan().all()


@pytest.mark.skipif(library() is None, reason="kernels are not built")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_not_rounded_to_numbers(value: float) -> None:
    a, b = matrices(16, 130, 4, seed=0)
    rounded = NativeLowRank(130, (16,), 1, has_few_bits=True)
    rounded.load(0, 0, a, b, 1.0)
    x, y = torch.ones(3, 130), torch.zeros(3, 16)
    x[1, 129] = value
    rounded.add(y, x, torch.zeros(3, dtype=torch.int32))
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.skipif(library() is None, reason="kernels are not built")
def test_a_small_number_beside_a_large_one_of_a_row_is_kept() -> None:
    """A row is rounded to 16 bits: what is a thousandth of the largest number beside it counts to 2 %."""
    a, b = matrices(16, 64, 16, seed=0)
    rounded = NativeLowRank(64, (16,), 1, has_few_bits=True)
    rounded.load(0, 0, a, b, 1.0)
    x = torch.full((2, 64), 1e-3)
    x[:, 0] = torch.tensor([1.0, 1.0])
    x[1, 1:] = 0
    y = torch.zeros(2, 16)
    rounded.add(y, x, torch.zeros(2, dtype=torch.int32))
    small = 1e-3 * (b @ a[:, 1:].sum(1))
    assert (y[0] - y[1] - small).norm() < 0.02 * small.norm()


@pytest.mark.skipif(library() is None, reason="kernels are not built")
@pytest.mark.parametrize("has_few_bits", [True, False])
def test_an_adapter_gets_the_memory_of_the_one_that_had_its_slot(has_few_bits: bool) -> None:
    """Only an adapter of the same rank gets it. One of another rank has memory of its own, and nothing of the first is
    left."""
    products = NativeLowRank(40, (24,), 1, has_few_bits)
    x, slots = torch.randn(2, 40), torch.zeros(2, dtype=torch.int32)
    places = []
    for seed, rank in enumerate((4, 4, 7, 3)):
        a, b = matrices(24, 40, rank, seed)
        products.load(0, 0, a, b, 1.0)
        places.append(products._entries[0].a)
        y = torch.zeros(2, 24)
        products.add(y, x, slots)
        assert (y - x @ (b @ a).T).norm() < 0.012 * y.norm()
        products.clear(0)
        products.add(y.zero_(), x, slots)
        assert not y.any()
    assert places[0] == places[1]
