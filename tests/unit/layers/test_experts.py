"""Mixtures of experts by all Ops: against a loop in float64, and that a row's result depends on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.experts import check_rule
from ratoon.layers.native.recording import Arena, Recording
from ratoon.layers.native_experts import NativeExperts
from ratoon.layers.native_ops import NativeOps, encode, native_ops_reasons, set_native_threads
from ratoon.layers.ops import ExpertGate, ExpertWeights, Ops, Routes, RoutingRule, WeightUse
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_ops import TorchExperts, TorchOps
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

Tensor = torch.Tensor
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
has_kernels = not native_ops_reasons(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(not has_kernels, reason="no kernels for this processor; `make setup` builds them")

RULES = {
    "softmax": RoutingRule(12, 3),
    "softmax of the chosen": RoutingRule(12, 3, renormalise=True, scale=1.5),
    "all experts": RoutingRule(5, 5, renormalise=True),
    "one expert": RoutingRule(1, 1),
    "sigmoid": RoutingRule(12, 4, "sigmoid", renormalise=True, scale=2.5),
    "groups": RoutingRule(12, 3, "sigmoid", renormalise=True, num_groups=4, top_groups=2),
    "groups of softmax": RoutingRule(12, 3, num_groups=3, top_groups=1),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_ops() -> Iterator[Ops]:
    yield TorchOps()
    if has_kernels:
        yield NativeOps()
    try:
        from ratoon.layers.cuda_ops import CudaOps
    except ImportError:
        return
    yield CudaOps()


OPS = {ops.name: ops for ops in every_ops()}


def device_of(ops: Ops) -> torch.device:
    return DEVICE if ops.name == "cuda" else CPU


def expected_routes(rule: RoutingRule, bias: Tensor | None, logits: Tensor) -> list[dict[int, float]]:
    """The weight of each chosen expert of each row, written out."""
    found = []
    for row in logits.double():
        scores = (row.sigmoid() if rule.scoring == "sigmoid" else row.softmax(0)).tolist()
        choice = [score + (0.0 if bias is None else float(bias[e])) for e, score in enumerate(scores)]
        size = rule.num_experts // rule.num_groups
        groups = [sorted(choice[start : start + size])[::-1] for start in range(0, rule.num_experts, size)]
        goodness = [sum(group[: 1 if bias is None else 2]) for group in groups]
        best = sorted(range(rule.num_groups), key=goodness.__getitem__)[-rule.top_groups :]
        allowed = [e for e in range(rule.num_experts) if e // size in best]
        chosen = sorted(allowed, key=choice.__getitem__)[-rule.top_k :]
        total = sum(scores[e] for e in chosen) if rule.renormalise else 1.0
        found.append({e: scores[e] / total * rule.scale for e in chosen})
    return found


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", OPS)
def test_rows_go_to_the_experts_of_the_best_scores(kind: str, with_bias: bool, name: str) -> None:
    rule, ops = RULES[name], OPS[kind]
    logits = random(9, rule.num_experts + 2)[:, : rule.num_experts] * 2  # with other columns behind
    bias = random(rule.num_experts, seed=1) * 0.3 if with_bias else None
    device = device_of(ops)
    counts = torch.zeros(rule.num_experts, dtype=torch.int64, device=device)
    on_device = None if bias is None else bias.to(device)
    routes = ops.make_router(rule, on_device, counts)(logits.to(device))
    assert routes.experts.dtype == torch.int32 and routes.weights.dtype == torch.float32
    for row, wanted in enumerate(expected_routes(rule, bias, logits)):
        found = dict(zip(routes.experts[row].tolist(), routes.weights[row].tolist(), strict=True))
        assert found.keys() == wanted.keys()
        assert all(abs(found[e] - wanted[e]) <= 1e-6 for e in wanted)
    wanted_counts = torch.bincount(routes.experts.flatten().cpu().long(), minlength=rule.num_experts)
    assert torch.equal(counts.cpu(), wanted_counts)


def make_weights(count: int, hidden: int, inner: int, bias: bool = False) -> list[ExpertWeights]:
    weights = []
    for e in range(count):
        parts = [
            StoredTensor.of_floats(random(*shape, seed=10 * e + place) / shape[1] ** 0.5)
            for place, shape in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)])
        ]
        biases = (random(2 * inner, seed=10 * e + 4), random(hidden, seed=10 * e + 5)) if bias else (None, None)
        weights.append(ExpertWeights(*parts, *biases))
    return weights


def expected_sum(
    weights: Sequence[ExpertWeights], own: range, gate: ExpertGate, x: Tensor, routes: Routes
) -> Tensor:  # fmt: skip
    """In float64, pair by pair."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, place in product(range(len(x)), range(routes.experts.shape[1])):
        number = int(routes.experts[row, place])
        if number not in own:
            continue
        one = weights[number - own.start]
        both = torch.cat((one.gate.floats(), one.up.floats())).double() @ x[row].double()
        both = both if one.gate_up_bias is None else both + one.gate_up_bias
        first, second = both.chunk(2)
        if gate.kind == "clamped_swiglu":
            first = first.clamp(max=gate.limit)
            inner = first * (1.702 * first).sigmoid() * (second.clamp(-gate.limit, gate.limit) + 1)
        else:
            inner = torch.nn.functional.silu(first) * second
        result = one.down.floats().double() @ inner
        result = result if one.down_bias is None else result + one.down_bias
        y[row] += float(routes.weights[row, place]) * result
    return y


def random_routes(rows: int, experts: int, top_k: int, seed: int = 3) -> Routes:
    chosen = random(rows, experts, seed=seed).topk(top_k).indices.int()
    return Routes(chosen, random(rows, top_k, seed=seed + 1).softmax(-1))


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("bias", "gate"), [(False, ExpertGate()), (True, ExpertGate("clamped_swiglu", 0.8))], ids=["silu", "clamped"]
)
@pytest.mark.parametrize("own", [range(8), range(2, 6)], ids=["all", "some"])
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.one_in(3)
def test_the_chosen_experts_are_summed(kind: str, own: range, bias: bool, gate: ExpertGate, rows: int) -> None:
    """Of experts on other ranks nothing is added."""
    ops = OPS[kind]
    if kind == "cuda" and DEVICE.type == "cpu" and rows == 7:
        pytest.skip("the interpreter is slow")
    hidden, inner = 48, 24
    weights, routes = make_weights(8, hidden, inner, bias)[own.start : own.stop], random_routes(rows, 8, 3)
    x = random(rows, hidden + 3, seed=2)[:, :hidden]
    expected = expected_sum(weights, own, gate, x, routes)
    device = device_of(ops)
    on_device = (
        ExpertWeights(
            *(part.to(device, torch.float32) for part in one[:3]),
            *(None if part is None else part.to(device) for part in one[3:]),
        )
        for one in weights
    )
    y = ops.make_experts(on_device, own, gate)(x.to(device), Routes(*(part.to(device) for part in routes)))
    torch.testing.assert_close(y.cpu().double(), expected, atol=2e-6, rtol=0)


def test_no_rows_have_no_results() -> None:
    """The last layer of a step that reads no rows has none."""
    experts = TorchOps().make_experts(iter(make_weights(8, 48, 24, False)), range(8), ExpertGate())
    assert experts(torch.empty(0, 48), random_routes(0, 8, 3)).shape == (0, 48)


def test_many_pairs_are_sorted_by_torch_as_few_are_by_a_kernel() -> None:
    kernels = pytest.importorskip("ratoon.layers.triton.experts")
    for rows, top_k, own in [(1, 1, range(8)), (13, 3, range(8)), (40, 2, range(3, 5)), (3, 2, range(7, 8))]:
        experts = random_routes(rows, 8, top_k).experts.to(DEVICE)
        few = kernels.sort_pairs(experts, own, 16)
        many = kernels._sort_by_torch(experts, own, 16, len(few.experts))
        assert torch.equal(few.counts, many.counts)
        used = few.counts > 0
        assert torch.equal(few.experts[used], many.experts[used])
        inside = (torch.arange(16, device=DEVICE)[None, :] < few.counts[:, None]).flatten()
        assert torch.equal(few.order[inside], many.order[inside])
        wanted = sorted(i for i, e in enumerate(experts.flatten().tolist()) if e in own)
        assert sorted(few.order[inside].tolist()) == wanted


@needs_kernels
class TestOnCPU:
    FORMATS = ("F32", "BF16", "Q8_0", "Q4_1", "mixed")

    def make(self, kind: str) -> tuple[NativeExperts, list[ExpertWeights]]:
        """Weights in this format, and the numbers that they stand for."""
        ops, kept, count = NativeOps(), [], 6
        for one in make_weights(count, 96, 64):
            parts = [self.stored(kind, place, part.data, ops) for place, part in enumerate(one[:3])]
            kept.append(ExpertWeights(*parts))
        experts = ops.make_experts(iter(kept), range(count), ExpertGate())
        assert isinstance(experts, NativeExperts)
        return experts, kept

    def stored(self, kind: str, place: int, numbers: Tensor, ops: NativeOps) -> StoredTensor:
        """Mixed: gate in 4 bits, up in 8, down in floats."""
        kind = ("Q4_1", "Q8_0", "F32")[place] if kind == "mixed" else kind
        if kind in ("F32", "BF16"):
            numbers = numbers.bfloat16() if kind == "BF16" else numbers
            return ops.quantize(StoredTensor.of_floats(numbers), WeightUse.EXPERT)
        return encode(numbers, 8 if kind == "Q8_0" else 4)

    @pytest.mark.parametrize("kind", FORMATS)
    def test_weights_are_multiplied_in_their_format(self, kind: str) -> None:
        experts, weights = self.make(kind)
        x, routes = random(20, 96, seed=5), random_routes(20, 6, 2)
        expected = expected_sum(weights, range(6), ExpertGate(), x, routes)
        off = (experts(x, routes) - expected).norm() / expected.norm()
        assert off < (1e-6 if kind in ("F32", "BF16") else 0.02)  # activations in 8 bits

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_number_of_threads(self, kind: str) -> None:
        experts, _ = self.make(kind)
        x, routes = random(150, 96, seed=5), random_routes(150, 6, 2)
        whole = experts(x, routes)
        try:
            for threads, (first, last) in zip((1, 2, 3, 5, 2), [(0, 1), (5, 7), (17, 30), (60, 150), (149, 150)]):
                set_native_threads(threads)
                some = Routes(routes.experts[first:last], routes.weights[first:last])
                assert torch.equal(experts(x[first:last], some), whole[first:last])
        finally:
            set_native_threads(torch.get_num_threads())

    def test_a_recorded_pass_sends_rows_to_other_experts_when_it_is_repeated(self) -> None:
        ops, rule = NativeOps(), RoutingRule(6, 2, renormalise=True)
        experts, _ = self.make("Q8_0")
        counts = torch.zeros(6, dtype=torch.int64)
        route = ops.make_router(rule, None, counts)
        inputs, logits = random(4, 96), random(4, 7)
        with Recording(Arena()) as recording:
            y = ops.add_gated(experts(inputs, route(logits[:, :6])), inputs, logits[:, 6:])
        program = recording.program()
        assert program is not None, recording.obstacles
        inputs.copy_(random(4, 96, seed=8))
        logits.copy_(random(4, 7, seed=9))
        program.run()
        again = experts(inputs, route(logits[:, :6]))
        assert torch.equal(y, ops.add_gated(again, inputs, logits[:, 6:]))
        assert int(counts.sum()) == 3 * 8
        torch.testing.assert_close(
            TorchOps().add_gated(torch.zeros(4, 96), inputs, logits[:, 6:]),
            ops.add_gated(torch.zeros(4, 96), inputs, logits[:, 6:]),
        )

    def test_experts_whose_inputs_are_in_an_order_of_their_own_are_multiplied_one_by_one(self) -> None:
        from ratoon.layers.grouped import grouped_tensor

        def stored(*shape: int) -> StoredTensor:
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
            scales = torch.full((shape[0], shape[1] // 32), 0.01)
            order = torch.arange(shape[1]).flip(0)
            return grouped_tensor(codes, scales, torch.full_like(scales, 128.0), 8, order)

        weights = [ExpertWeights(stored(64, 96), stored(64, 96), stored(96, 64)) for _ in range(2)]
        experts = NativeOps().make_experts(iter(weights), range(2), ExpertGate())
        assert isinstance(experts, TorchExperts)
        x, routes = random(5, 96), random_routes(5, 2, 1)
        expected = expected_sum(weights, range(2), ExpertGate(), x, routes)
        assert (experts(x, routes) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (RoutingRule(4, 5), "5 of 4 experts"),
        (RoutingRule(6, 2, num_groups=4), "6 experts in 4 groups"),
        (RoutingRule(8, 3, num_groups=4, top_groups=1), "more than 1 of 4 groups have"),
    ],
)
def test_a_rule_that_can_t_be_followed_is_refused(rule: RoutingRule, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        check_rule(rule)
