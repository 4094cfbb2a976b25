"""The products of adapters by Triton's kernels: on the GPU where there is one, otherwise under the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ratoon.core.errors import ModelError
from ratoon.layers.cuda_ops import CudaLinear, CudaOps
from ratoon.layers.ops import RMSWeights
from ratoon.layers.torch_adapters import TorchLowRank, TorchTables
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.triton import low_rank
from ratoon.layers.triton.low_rank import TritonLowRank, TritonTables
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

Tensor = torch.Tensor
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 8e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 0.06, "rtol": 0.03},
}
# The interpreter multiplies no bfloat16 tiles.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
SLOTS = 4


def both(
    num_inputs: int, outputs: list[int], max_rank: int, dtype: torch.dtype, takes_weights: bool = False
) -> list[TritonLowRank | TorchLowRank]:
    return [
        TritonLowRank(num_inputs, outputs, SLOTS, max_rank, DEVICE, dtype, takes_weights=takes_weights),
        TorchLowRank(outputs, TorchOps().rms_norm, DEVICE, dtype),
    ]


def load(products: list, slot: int, part: int, rank: int, num_inputs: int, num_outputs: int, scale: float = 1) -> None:
    a, b = torch.randn(rank, num_inputs), torch.randn(num_outputs, rank) / 8
    for each in products:
        each.load(slot, part, a, b, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("rows", "num_inputs"), [(1, 40), (19, 70), (18, 600)])
@pytest.mark.one_in(5)
def test_rows_get_the_products_of_their_slots(rows: int, num_inputs: int, has_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    outputs = [150, 20, 33]
    products = both(num_inputs, outputs, 40, dtype)
    load(products, 0, 0, 5, num_inputs, 150)
    load(products, 0, 2, 1, num_inputs, 33, 0.5)
    load(products, 3, 0, 40, num_inputs, 150, 2.0)
    load(products, 3, 1, 16, num_inputs, 20)
    slots = torch.randint(-1, SLOTS, (rows,), dtype=torch.int32, device=DEVICE)
    slots[0] = 3
    x = torch.randn(rows, num_inputs + 3, device=DEVICE, dtype=dtype)[:, :num_inputs]
    base = torch.randn(rows, sum(outputs) + 5, device=DEVICE, dtype=dtype)
    norm = RMSWeights(torch.randn(num_inputs, device=DEVICE, dtype=dtype), 1e-5) if has_norm else None
    found, expected = base.clone(), base.clone()
    for each, y in zip(products, (found, expected), strict=True):
        each.add(y[:, : sum(outputs)], x, slots, norm)
    scale = num_inputs**0.5
    torch.testing.assert_close(found / scale, expected / scale, **CLOSE[dtype])
    alone = (slots < 0) | (slots == 1) | (slots == 2)
    assert torch.equal(found[alone], base[alone]) and torch.equal(found[:, sum(outputs) :], base[:, sum(outputs) :])
    for each in products:
        each.clear(0)
        each.clear(3)
    before = found.clone()
    products[0].add(found[:, : sum(outputs)], x, slots, norm)
    assert torch.equal(found, before)


def test_many_rows_have_larger_tiles_and_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "MANY_FROM", 10)
    products = both(48, [40], 4, torch.float32)
    load(products, 1, 0, 4, 48, 40)
    slots = torch.tensor([1] * 60 + [-1] * 10, dtype=torch.int32, device=DEVICE)
    x, base = torch.randn(70, 48, device=DEVICE), torch.randn(70, 40, device=DEVICE)
    found, expected = base.clone(), base.clone()
    for each, y in zip(products, (found, expected), strict=True):
        each.add(y, x, slots)
    torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


def test_a_whole_weight_replaces_the_product() -> None:
    products = both(70, [150], 8, torch.float32, takes_weights=True)
    weight = torch.randn(150, 70)
    a, b = torch.randn(3, 70), torch.randn(150, 3)
    for each in products:
        each.load(2, 0, None, weight, 1.0)
        each.load(1, 0, a, b, 1.0)
    low = (b @ a).to(DEVICE)
    slots = torch.tensor([2, -1, 2, 1], dtype=torch.int32, device=DEVICE)
    x, base = torch.randn(4, 70, device=DEVICE), torch.randn(4, 150, device=DEVICE)
    for each in products:
        y = base.clone()
        each.add(y, x, slots)
        expected = torch.where((slots == 2)[:, None], x @ weight.to(DEVICE).T, base)
        expected[3] += low @ x[3]
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [range(20), range(10, 20)])
def test_tables_of_adapters_replace_rows(rows: range) -> None:
    table, ids = torch.randn(20, 24), torch.tensor([0, 19, 12, 3, 12], device=DEVICE)
    slots = torch.tensor([1, 1, -1, 1, 0], dtype=torch.int32, device=DEVICE)
    base = torch.randn(5, 24, device=DEVICE)
    results = []
    for tables in (TritonTables(2, rows, DEVICE, torch.float32), TorchTables(rows, DEVICE, torch.float32)):
        tables.load(1, table[rows.start : rows.stop])
        found = base.clone()
        tables.replace(found, ids, slots)
        results.append(found)
        tables.clear(1)
        again = base.clone()
        tables.replace(again, ids, slots)
        assert torch.equal(again, base)
    assert torch.equal(*results)
    own = table[19] if 19 in rows else torch.zeros(24)
    assert torch.equal(results[0][1].cpu(), own) and torch.equal(results[0][2], base[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "slots", "max_rank"), [(1, 8, 16), (19, 3, 40), (140, 16, 16)])
@pytest.mark.one_in(5)
def test_a_product_joined_with_its_adapters_is_the_product_and_theirs(
    rows: int, slots: int, max_rank: int, has_residual: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    outputs, num_inputs = [96, 32, 64], 48
    product = CudaLinear(torch.randn(192, num_inputs, device=DEVICE, dtype=dtype) / 8, None, ())
    apart = TorchLowRank(outputs, TorchOps().rms_norm, DEVICE, dtype)
    norm = None if has_residual else RMSWeights(torch.randn(num_inputs, device=DEVICE, dtype=dtype), 1e-5)
    x = torch.randn(rows, num_inputs, device=DEVICE, dtype=dtype)
    stream = torch.randn(rows, 192, device=DEVICE, dtype=dtype)
    expected = product.fused(x, norm, stream.clone() if has_residual else None)
    joined = CudaOps().join_low_rank(product, outputs, slots, max_rank)
    assert joined is not None
    torch.testing.assert_close(product.fused(x, norm, stream.clone() if has_residual else None), expected)
    load([joined, apart], 0, 0, 5, num_inputs, 96, 0.5)
    load([joined, apart], 0, 2, 1, num_inputs, 64)
    load([joined, apart], slots - 1, 1, 16, num_inputs, 32, 2.0)
    load([joined, apart], 1, 0, max_rank, num_inputs, 96)
    joined.clear(1)
    apart.clear(1)
    of_rows = torch.randint(-1, slots, (rows,), dtype=torch.int32, device=DEVICE)
    of_rows[0] = slots - 1
    apart.add(expected, x, of_rows, norm)
    found = joined.multiply(x, norm, stream if has_residual else None, of_rows)
    assert (found is stream) == has_residual
    torch.testing.assert_close(found / 8, expected / 8, **CLOSE[dtype])
    if not has_residual:
        gated = joined.multiply_gate(x, norm, of_rows)
        torch.testing.assert_close(gated / 8, TorchOps().silu_and_mul(found) / 8, **CLOSE[dtype])


def test_products_are_joined_with_few_adapters_of_small_rank_alone() -> None:
    ops, product = CudaOps(), CudaLinear(torch.randn(64, 32, device=DEVICE), None, ())
    assert ops.join_low_rank(product, [64], 8, 64) is None
    assert ops.join_low_rank(product, [40, 24], 2, 16) is None
    assert CudaOps(batch_invariant=True).join_low_rank(product, [64], 2, 16) is None
    joined = ops.join_low_rank(product, [64], 2, 16)
    assert joined is not None
    with pytest.raises(ModelError, match="not finite"):
        joined.load(0, 0, torch.zeros(4, 32), torch.full((64, 4), torch.inf), 1.0)
