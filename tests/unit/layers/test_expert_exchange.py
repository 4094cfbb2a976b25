"""Ranks that have experts whole and exchange results by all-to-all: what a layer computes, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from ratoon.execution.passes import graphs, recorded_passes
from ratoon.layers import expert_exchange
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.expert_exchange import ExpertExchange, expected_share, may_exchange
from ratoon.layers.experts import ExpertMLP, ExpertNames
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops, Routes, RoutingRule
from ratoon.layers.shard import Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights
from tests.unit.layers.ranks import Meeting, Rank, on_all_ranks
from tests.unit.layers.test_layers import RandomSource

Tensor = torch.Tensor
CPU = torch.device("cpu")
HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 32, 16, 24, 8, 2
RULE = RoutingRule(EXPERTS, TOP_K, "softmax", True)
PLAIN = ExpertNames()
WITH_SHARED = ExpertNames(shared="shared", shared_gate="shared_gate")
ALL_OPS: list[Ops] = [TorchOps()]
if not native_ops_reasons(CPU, torch.float32):
    ALL_OPS.append(NativeOps())


@pytest.fixture(autouse=True)
def exchanges_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_exchange, "LEAST_ROWS_ON_CPU", 1)


def source_of_layer() -> RandomSource:
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (EXPERTS, HIDDEN), "shared_gate.weight": (1, HIDDEN)}
    for part, inner in [(f"experts.{number}", INNER) for number in range(EXPERTS)] + [("shared", SHARED)]:
        shapes |= {f"{part}.{name}.weight": (inner, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{part}.down_proj.weight": (HIDDEN, inner)}
    source = RandomSource(**shapes)
    for tensor in source.tensors.values():
        tensor.div_(4)
    return source


def make_layer(source: RandomSource, names: ExpertNames, shard: Shard, ops: Ops, counts: bool = False) -> ExpertMLP:
    weights = Weights(source, ops, CPU, torch.float32, shard)
    weights.counts_experts = counts
    return ExpertMLP(weights, HIDDEN, INNER, RULE, names, SHARED)


def on_expert_ranks(world_size: int, dispatch: str, work: Callable[[Shard], Tensor]) -> list[Tensor]:
    return on_all_ranks(world_size, lambda shard: work(replace(shard, expert_parallel=True, expert_dispatch=dispatch)))


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("names", [PLAIN, WITH_SHARED], ids=["plain", "with shared experts"])
@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 2), (2, 33), (4, 10), (4, 64)])
def test_a_layer_by_all_to_all_has_the_numbers_of_the_sum(
    ops: Ops, names: ExpertNames, world_size: int, num_rows: int
) -> None:
    """On every rank. Rows do not divide evenly among ranks."""
    source, x = source_of_layer(), torch.randn(num_rows, HIDDEN)
    whole = make_layer(source, names, Shard(), ops)(x.clone())

    def compute(shard: Shard) -> Tensor:
        return make_layer(source, names, shard, ops)(x.clone())

    def by_sum(shard: Shard) -> Tensor:
        layer = make_layer(source, names, shard, ops)
        assert layer.exchange is not None
        layer.exchange.least_rows = num_rows + 1
        return layer(x.clone())

    found = on_expert_ranks(world_size, "all_to_all", compute)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], whole, atol=1e-5, rtol=0)
    (summed, *_) = on_expert_ranks(world_size, "all_to_all", by_sum)
    if world_size == 2 and ops.name == "native":  # torch has other sums in other batches, and of more ranks
        assert torch.equal(found[0], summed), "steps that are repeated have the same numbers as those that are not"
    torch.testing.assert_close(found[0], summed, atol=1e-6, rtol=0)


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
def test_rows_of_each_expert_are_counted_on_all_ranks(ops: Ops) -> None:
    source, x = source_of_layer(), torch.randn(21, HIDDEN)

    def count(shard: Shard) -> Tensor:
        layer = make_layer(source, PLAIN, shard, ops, counts=True)
        layer(x.clone())
        assert layer.counts is not None
        return layer.counts

    alone = count(Shard())
    assert alone.sum() == 21 * TOP_K
    assert all(torch.equal(counts, alone) for counts in on_expert_ranks(4, "all_to_all", count))


def test_adapters_change_shared_experts_of_own_rows() -> None:
    source, x, slots = source_of_layer(), torch.randn(9, HIDDEN), torch.tensor([0, -1, 0, 1, -1, 0, 1, 1, 0]).int()
    low, high = torch.randn(2, HIDDEN), torch.randn(SHARED, 2)

    def compute(shard: Shard) -> Tensor:
        weights = Weights(source, TorchOps(), CPU, torch.float32, shard)
        layer = ExpertMLP(weights, HIDDEN, INNER, RULE, WITH_SHARED, SHARED)
        target = weights.adapter_targets["shared.up_proj"]
        target.product.open_slots(2, 2, CPU, torch.float32)
        target.load(1, low, high, 0.5)
        return layer(x.clone(), AdapterRows(slots))

    alone = compute(Shard())
    assert not torch.allclose(alone, make_layer(source, WITH_SHARED, Shard(), TorchOps())(x), atol=1e-3)
    for found in on_expert_ranks(2, "all_to_all", compute):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


class Counting(Rank):
    """Counts the numbers that a rank sends to others: sums and concatenations go round a ring."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        super().__init__(meeting, rank)
        self.world_size, self.sent = world_size, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent += 2 * x.numel() * (self.world_size - 1) // self.world_size
        return super().all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        self.sent += x.numel() * (self.world_size - 1)
        return super().all_gather(x, size)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        self.sent += (len(x) - counts[self.rank][self.rank]) * x.shape[1]
        return super().all_to_all(x, counts)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_ranks_send_what_the_formula_says(top_k: int) -> None:
    """Against the sum, which sends 2 · T · H · (W - 1) / W numbers whatever the router chooses."""
    world_size, num_rows, num_experts, hidden = 4, 64, 32, 48
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_rows)]).int()
    y = torch.randn(num_rows, hidden)
    owners = experts // (num_experts // world_size)  # of experts
    pairs = sum(len(set(ranks) - {row // 16}) for row, ranks in enumerate(owners.tolist()))
    counters: list[Counting] = []

    def exchange(shard: Shard) -> Tensor:
        assert isinstance(shard.collective, Rank)
        counting = Counting(shard.collective.meeting, shard.rank, world_size)
        counters.append(counting)
        by_ranks = ExpertExchange(replace(shard, collective=counting), num_experts, CPU)
        rows = by_ranks.slice_rows(num_rows)
        routes = by_ranks.gather_routes(Routes(experts[rows.own], torch.ones(rows.num_own, top_k)), rows)
        assert torch.equal(routes.experts, experts)
        return by_ranks.gather_rows(by_ranks.combine(y.clone(), experts, rows), rows)

    for found in on_all_ranks(world_size, exchange):
        times = torch.tensor([len(set(ranks)) for ranks in owners.tolist()])
        torch.testing.assert_close(found, y * times[:, None])  # every rank has given the same y
    sent = sum(counting.sent for counting in counters)
    of_routes = num_rows * 2 * top_k * (world_size - 1)
    assert sent == pairs * hidden + num_rows * hidden * (world_size - 1) + of_routes
    by_sum = 2 * num_rows * hidden * (world_size - 1)
    expected = expected_share(top_k, world_size)
    assert abs(sent - of_routes - by_sum * (1 + expected) / 2) < 0.1 * by_sum
    assert (sent < 0.9 * by_sum) == (top_k < 8), "with eight experts nearly every rank has one of each row"


def test_auto_chooses_where_less_is_sent() -> None:
    def chosen(
        top_k: int, world_size: int, dispatch: str = "auto", shared: bool = False, parallel: bool = True
    ) -> bool:
        shard = Shard(0, world_size, Rank(Meeting(world_size), 0), parallel, dispatch)
        return may_exchange(shard, top_k, shared)

    assert chosen(2, 4) and chosen(4, 4) and chosen(8, 8) and chosen(1, 2)
    assert not chosen(8, 2) and not chosen(8, 4) and not chosen(2, 2)
    assert not chosen(2, 4, shared=True), "shared experts would be whole on every rank"
    assert chosen(8, 2, "all_to_all", shared=True)
    in_memory = Rank(Meeting(4), 0)
    in_memory.can_be_recorded = True
    assert not may_exchange(Shard(0, 4, in_memory, True, "auto"), 2, False), "ranks in one memory send nothing"
    assert may_exchange(Shard(0, 4, in_memory, True, "all_to_all"), 2, False)
    assert not chosen(2, 4, "all_reduce") and not chosen(2, 4, "all_to_all", parallel=False)


def test_steps_that_may_be_repeated_keep_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded pass or a graph holds no exchange, whose sizes are those of one step. A rank that repeats a step and
    one that does not have to make the same calls, so the number of rows decides."""
    monkeypatch.undo()
    assert expert_exchange.LEAST_ROWS_ON_CPU > recorded_passes.MAX_TOKENS
    assert max(graphs.MAX_TOKENS, graphs.MAX_DECODES) < expert_exchange.LEAST_ROWS_ON_GPU
    shard = Shard(0, 16, Rank(Meeting(16), 0), True, "all_to_all")
    exchange = ExpertExchange(shard, 16, CPU)
    sliced = [ExpertExchange(replace(shard, rank=rank), 16, CPU).slice_rows(exchange.least_rows) for rank in range(16)]
    assert all(rows.num_own > 0 for rows in sliced), "and no rank is without rows"
    assert sum(rows.num_own for rows in sliced) == exchange.least_rows
