"""The backends of state-space layers that run on a CPU, against the recurrence written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.attention.cpu_states import CpuStateBackend
from ratoon.attention.interface import AttentionBackend
from ratoon.attention.select import select_backend
from ratoon.attention.state_space import TorchStateBackend
from ratoon.attention.triton_states import TritonStateBackend
from ratoon.core.errors import ConfigError
from ratoon.layers.native import library
from tests.unit.attention.state_batches import StateBatch, make_layer, needs_of

PLAIN = make_layer(4, 16, 24)
LAYERS = {
    "plain": PLAIN,
    "groups": make_layer(6, 32, 16, groups=3, has_bias=False, limit=(0.01, 0.5)),
    "odd": make_layer(3, 21, 7, width=3),
    "wide": make_layer(2, 72, 5, groups=2, width=2),
    "one number": make_layer(2, 1, 1, width=1),
}
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")
BACKENDS = [TorchStateBackend, pytest.param(CpuStateBackend, marks=needs_kernels)]
LENGTHS = [45, 1, 18]
CUTS = [[7, 8, 9, 30, 44], [], [1, 2, 3, 16]]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("cuts", [(), CUTS], ids=["whole", "cut"])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.one_in(3)
def test_results_and_pages_equal_the_definition(
    kind: type[AttentionBackend], name: str, cuts: list[list[int]], block_size: int
) -> None:
    batch = StateBatch(LENGTHS, LAYERS[name], block_size)
    outputs, pages = batch.run(kind.create(needs_of(LAYERS[name])), cuts)
    batch.check(outputs)
    if kind is CpuStateBackend:
        batch.check_pages(pages, is_transposed=True)


@needs_kernels
@pytest.mark.parametrize("name", LAYERS)
def test_on_the_cpu_a_row_has_the_same_bits_in_any_batch_and_for_any_cut(name: str) -> None:
    batch, backend = StateBatch(LENGTHS, LAYERS[name], 8), CpuStateBackend()
    together, pages = batch.run(backend)
    for cuts in (CUTS, [list(range(1, length)) for length in LENGTHS]):
        outputs, others = batch.run(backend, cuts)
        assert all(torch.equal(found, expected) for found, expected in zip(outputs, together, strict=True))
        for found, expected in zip(others, pages, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for index, expected in enumerate(together):
        alone = StateBatch([LENGTHS[index]], LAYERS[name], 16)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(backend)[0][0], expected)


@needs_kernels
def test_rows_that_are_not_kept_leave_every_page_as_it_is() -> None:
    batch, backend = StateBatch([20, 9], PLAIN, 8), CpuStateBackend()
    outputs, pages = batch.run(backend)
    before = [part.clone() for part in pages]
    again = batch.step(backend, pages, [16, 8], [20, 9], keeps=False)
    assert torch.equal(again[0], outputs[0][16:]) and torch.equal(again[1], outputs[1][8:])
    for part, kept in zip(pages, before, strict=True):
        torch.testing.assert_close(part, kept, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_inputs_that_are_no_numbers_are_seen_in_the_results_of_their_request_alone() -> None:
    batch, backend = StateBatch([6, 6], PLAIN, 8), CpuStateBackend()
    expected = batch.run(backend)[0]
    batch.sequences[0][2, -1] = torch.nan  # a time step of the last head
    found = batch.run(backend)[0]
    assert torch.equal(found[0][:2], expected[0][:2]) and torch.equal(found[1], expected[1])
    assert found[0][2:, -PLAIN.head_dim :].isnan().all() and not found[0][:, : -PLAIN.head_dim].isnan().any()


@needs_kernels
def test_the_time_step_of_a_very_small_input_keeps_its_digits() -> None:
    """log(1 + e^x) for x far below zero is e^x, which 1 + e^x has lost."""
    batch, backend = StateBatch([1], PLAIN, 8), CpuStateBackend()
    for value in (-30.0, -9.0, 0.0, 15.0, 60.0):
        batch.sequences[0][:, -PLAIN.num_heads :] = value
        _, (states, _) = batch.run(backend)
        (expected,) = batch.expected()
        found = states[batch.tables[0, 0]].mT.double()
        torch.testing.assert_close(found, expected.states[0], rtol=1e-5, atol=0)


def test_the_backend_is_chosen_with_reasons() -> None:
    needs = needs_of(PLAIN)
    if library() is not None:
        assert isinstance(select_backend("auto", needs, "layers 0-3").backend, CpuStateBackend)
        # The setting is about attention.
        assert isinstance(select_backend("torch", needs, "layers 0-3").backend, CpuStateBackend)
    halves = select_backend("auto", replace(needs, dtype=torch.bfloat16), "layers 0-3")
    assert halves.backend.name == "torch states"
    assert "computes in float32, not in torch.bfloat16" in halves.reasons_against["cpu states"]
    assert "runs on CUDA, not on cpu" in halves.reasons_against["triton states"]
    with pytest.raises(ConfigError, match="torch states: the order of its sums depends on the batch"):
        select_backend("auto", replace(needs, dtype=torch.bfloat16, batch_invariant=True), "layers 0-3")
    assert CpuStateBackend.reasons_against(replace(needs, content="keys and values"))
    assert TritonStateBackend.reasons_against(replace(needs, content="keys and values"))


def test_without_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratoon.attention.cpu_states.library", lambda: None)
    assert select_backend("auto", needs_of(PLAIN), "layers 0-3").backend.name == "torch states"
