"""The feed-forward half of a layer with many experts, of which each row goes to a few.

A router chooses the experts of a row; what they make of it is added up, times weights of the router, and with shared
experts, which every row goes to. Of several ranks each has a part of every expert, or, with expert parallelism, some of
the experts whole. In both cases the ranks' results are summed; whole experts' results in large steps by all-to-all,
where the layer has an exchange (expert_exchange.py). The arithmetic is that of `Ops.make_router` and
`Ops.make_experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ratoon.core.errors import ModelError
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.expert_exchange import ExpertExchange, may_exchange
from ratoon.layers.mlp import GATED_NAMES, GatedMLP
from ratoon.layers.norm import LinearInput, Normed
from ratoon.layers.ops import ExpertGate, ExpertWeights, RoutingRule, WeightUse
from ratoon.layers.products import join_rows
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The tensor names of a family, below the layer's feed-forward half. Experts are
    `experts.{number}.{projection}`."""

    router: str = "gate"
    projections: Sequence[str] = GATED_NAMES  # gate, up, down
    router_bias: bool = False
    exact_router: bool = False  # its logits are computed in float32; those of sigmoids always are
    choice_bias: str | None = None  # of the numbers that are added to scores for the choice
    shared: str | None = None  # of experts that every row goes to, as one gated MLP
    shared_gate: str | None = None  # of the layer with one output that the latter's result is gated with


class ExpertMLP:
    """[T, H] → [T, H]. `rule` has the numbers of experts, `inner` is the inner size of each."""

    __slots__ = (
        "add",
        "add_gated",
        "counts",
        "exchange",
        "experts",
        "logits",
        "num_experts",
        "reduce",
        "route",
        "route_own",
        "shared",
        "shared_gate",
    )

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        inner: int,
        rule: RoutingRule,
        names: ExpertNames,
        shared_inner: int = 0,
        bias: bool = False,
        gate: ExpertGate | None = None,
    ) -> None:
        """`shared_inner`: the inner size of shared experts together. `bias`: of the experts' products."""
        check_rule(rule)
        ops, shard = weights.ops, weights.shard
        whole = weights.replicated()
        self.num_experts = rule.num_experts
        choice_bias = None
        if names.choice_bias is not None:
            choice_bias = whole.take(names.choice_bias, rule.num_experts, dtype=torch.float32)
        self.shared_gate = names.shared_gate is not None
        self.logits = _make_router_product(whole, hidden_size, rule, names)
        self.counts: Tensor | None = None
        if weights.counts_experts:
            self.counts = torch.zeros(rule.num_experts, dtype=torch.int64, device=weights.device)
        self.route = ops.make_router(rule, choice_bias, self.counts)
        taken = _take_experts(weights, hidden_size, inner, rule.num_experts, names.projections, bias)
        self.experts = ops.make_experts(taken, own_experts(weights, rule.num_experts), gate or ExpertGate())
        self.exchange: ExpertExchange | None = None
        if may_exchange(shard, rule.top_k, names.shared is not None):
            self.exchange = ExpertExchange(shard, rule.num_experts, weights.device)
        # An exchange counts the rows of all ranks once it knows their routes.
        self.route_own = self.route if self.exchange is None else ops.make_router(rule, choice_bias)
        self.shared: GatedMLP | None = None
        if names.shared is not None:
            # With an exchange, the owner of a row computes shared experts for it, and has them whole.
            of_shared = weights if self.exchange is None else weights.replicated(adapted=True)
            self.shared = GatedMLP(of_shared / names.shared, hidden_size, shared_inner, reduces=False)
        self.add, self.add_gated = ops.add, ops.add_gated
        self.reduce = shard.all_reduce

    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor:
        if isinstance(x, Normed):
            x = x.compute()
        exchange = self.exchange
        if exchange is not None and len(x) >= exchange.least_rows:
            return self._exchange_rows(exchange, x, adapters)
        logits = self.logits(x)  # [T, E], and the gate of shared experts behind it
        y = self.experts(x, self.route(logits[:, : self.num_experts]))
        if exchange is None:
            y = self._add_shared(y, x, logits, adapters)
        if self.reduce is not None:
            y = self.reduce(y)
        return y if exchange is None else self._add_shared(y, x, logits, adapters)

    def _exchange_rows(self, exchange: ExpertExchange, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        rows = exchange.slice_rows(len(x))
        own = x[rows.own]
        logits = self.logits(own)
        routes = exchange.gather_routes(self.route_own(logits[:, : self.num_experts]), rows)
        if self.counts is not None:
            self.counts += torch.bincount(routes.experts.flatten(), minlength=self.num_experts)
        y = exchange.combine(self.experts(x, routes), routes.experts, rows)
        y = self._add_shared(y, own, logits, None if adapters is None else adapters.select(rows.own))
        return exchange.gather_rows(y, rows)

    def _add_shared(self, y: Tensor, x: Tensor, logits: Tensor, adapters: AdapterRows | None) -> Tensor:
        if self.shared is None:
            return y
        shared = self.shared(x, adapters)
        return self.add_gated(y, shared, logits[:, self.num_experts :]) if self.shared_gate else self.add(y, shared)

    def add_to(self, stream: Tensor, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor | None:
        return self(x, adapters)


def check_rule(rule: RoutingRule) -> None:
    """ModelError for numbers that do not go together."""
    if not 0 < rule.top_k <= rule.num_experts:
        problem = f"{rule.top_k} of {rule.num_experts} experts can't be chosen"
        raise ModelError("config", problem, f"1 to {rule.num_experts}")
    if rule.num_experts % rule.num_groups or not 0 < rule.top_groups <= rule.num_groups:
        problem = f"{rule.num_experts} experts in {rule.num_groups} groups, of which {rule.top_groups} are chosen"
        raise ModelError("config", problem, "groups of equal size, and no more chosen than there are")
    if rule.top_k > rule.top_groups * (rule.num_experts // rule.num_groups):
        problem = f"{rule.top_k} experts are more than {rule.top_groups} of {rule.num_groups} groups have"
        raise ModelError("config", problem, "fewer experts, or more groups")


def own_experts(weights: Weights, num_experts: int) -> range:
    """The experts that this rank has: all, unless ranks share them out."""
    if not weights.shard.expert_parallel:
        return range(num_experts)
    return weights.shard.cut("experts", num_experts)


def _make_router_product(
    weights: Weights, hidden_size: int, rule: RoutingRule, names: ExpertNames
) -> Callable[[Tensor], Tensor]:
    """[T, H] → the logits of experts, and behind them the gate of shared experts, if there is one. Every rank has all.
    Sigmoids, and some families' softmax, are trained with logits in float32."""
    parts = [(names.router, rule.num_experts), *([(names.shared_gate, 1)] if names.shared_gate else [])]
    is_exact = (rule.scoring == "sigmoid" or names.exact_router) and weights.dtype != torch.float32
    dtype = torch.float32 if is_exact else weights.dtype
    weight = join_rows([weights.take(f"{name}.weight", size, hidden_size, dtype=dtype) for name, size in parts])
    bias = None
    if names.router_bias:
        bias = weights.take(f"{names.router}.bias", rule.num_experts, dtype=dtype)
    if is_exact:
        return lambda x: functional.linear(x.float(), weight, bias)
    return weights.ops.make_linear(weight, bias)


def _take_experts(
    weights: Weights, hidden_size: int, inner: int, num_experts: int, projections: Sequence[str], bias: bool
) -> Iterator[ExpertWeights]:
    """One after the other. Those of other ranks are not read; of experts that are cut, a rank has some inner features,
    and the first adds the bias of down."""
    shard, own = weights.shard, own_experts(weights, num_experts)
    features = range(inner) if shard.expert_parallel else shard.cut("inner features of an expert", inner)
    cut = TensorSlice.of_range(0, features, inner)
    gate_name, up_name, down_name = projections
    for number in range(num_experts):
        expert = weights / "experts" / number
        if number not in own:
            for name in projections:
                (expert / name).ignore("weight", *(["bias"] if bias else []))
            continue
        gate, up = (
            (expert / name).take_stored("weight", inner, hidden_size, part=cut, use=WeightUse.EXPERT)
            for name in (gate_name, up_name)
        )
        down_cut = None if cut is None else cut._replace(dim=1)
        down = (expert / down_name).take_stored("weight", hidden_size, inner, part=down_cut, use=WeightUse.EXPERT)
        if not bias:
            yield ExpertWeights(gate, up, down)
            continue
        gate_up_bias = join_rows([(expert / name).take("bias", inner, part=cut) for name in (gate_name, up_name)])
        down_bias = (expert / down_name).take("bias", hidden_size)
        if cut is not None and shard.rank > 0:
            down_bias = torch.zeros_like(down_bias) if down_bias.device.type != "meta" else down_bias
        yield ExpertWeights(gate, up, down, gate_up_bias, down_bias)
