"""State-space layers by the CUDA backend: on a GPU where there is one, otherwise under Triton's interpreter on the CPU
(tests/conftest.py). Sizes are small because the interpreter is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import triton_states
from ratoon.attention.triton_states import TritonStateBackend, choose_chunk_tiles, choose_step_tiles
from ratoon.layers.attention import StateSpaceLayer
from tests.triton_interpreter import repair_interpreter
from tests.unit.attention.state_batches import StateBatch, make_layer, needs_of

pytestmark = pytest.mark.slow  # Triton's interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = make_layer(2, 16, 16, device=DEVICE)
ODD = make_layer(2, 18, 7, groups=2, width=3, has_bias=False, limit=(0.01, 0.5), device=DEVICE)
LENGTHS = [40, 1, 19]
FACTOR = 4.0 if DEVICE == "cuda" else 1.0  # of powers of e

repair_interpreter()


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the interpreter is that of its programs, whatever their size."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_states, "MIXED_CHANNELS", 128)
        choose = choose_chunk_tiles
        monkeypatch.setattr(triton_states, "choose_chunk_tiles", lambda *sizes: choose(*sizes)._replace(chunk=16))


def run(batch: StateBatch, backend: TritonStateBackend, cuts: list[list[int]]) -> list[torch.Tensor]:
    outputs, pages = batch.run(backend, cuts)
    batch.check(outputs, FACTOR)
    batch.check_pages(pages, is_transposed=False, factor=FACTOR)
    return outputs


@pytest.mark.parametrize("layer", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("block_size", [2, 24])
@pytest.mark.one_in(3)
def test_prompts_decodes_and_continuations_equal_the_definition(layer: StateSpaceLayer, block_size: int) -> None:
    """Steps with prompts in chunks beside requests of few tokens, and with one token of each."""
    batch = StateBatch(LENGTHS, layer, block_size, device=DEVICE)
    run(batch, TritonStateBackend(), [[18, 19, 20], [], [17, 18]])


def test_steps_of_few_tokens_and_whole_prompts_have_the_same_bits_if_they_must() -> None:
    batch = StateBatch([22, 9], PLAIN, 8, device=DEVICE)
    backend = TritonStateBackend.create(needs_of(PLAIN, "cuda", invariant=True))
    assert isinstance(backend, TritonStateBackend)
    whole, cut = run(batch, backend, []), run(batch, backend, [[1, 19], [3, 4]])
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    alone = StateBatch([9], PLAIN, 8, device=DEVICE)
    alone.sequences = batch.sequences[1:]
    assert torch.equal(alone.run(backend)[0][0], whole[1])


def test_a_padded_step_reads_nothing_but_tensors_on_the_device() -> None:
    """A CUDA graph has rows and requests of padding, and arrays on the host that belong to no step."""
    batch, backend = StateBatch([6, 12, 9], PLAIN, 4, device=DEVICE), TritonStateBackend()
    pages = batch.pages_of(backend)
    first = batch.step(backend, pages, [0, 0, 0], [5, 8, 8])
    second = batch.step(backend, pages, [5, 8, 8], [6, 9, 9], padding=3)
    third = batch.step(backend, pages, [6, 9, 9], [6, 12, 9], padding=1)
    batch.check([torch.cat(parts) for parts in zip(first, second, third, strict=True)], FACTOR)
    batch.check_pages(pages, is_transposed=False, factor=FACTOR)
    assert backend.supports_graphs


def test_rows_that_are_not_kept_leave_every_page_as_it_is() -> None:
    batch, backend = StateBatch([20, 9], PLAIN, 8, device=DEVICE), TritonStateBackend(batch_invariant=True)
    outputs, pages = batch.run(backend)
    before = [part.clone() for part in pages]
    again = batch.step(backend, pages, [16, 8], [20, 9], keeps=False)
    assert torch.equal(again[0], outputs[0][16:]) and torch.equal(again[1], outputs[1][8:])
    for part, kept in zip(pages, before, strict=True):
        torch.testing.assert_close(part, kept, rtol=0, atol=0, equal_nan=True)


def test_sixteen_bits_go_in_and_come_out() -> None:
    """Products of chunks have 10 bits, in which each of their terms is off by 2**-11 at most."""
    batch = StateBatch([20, 1], PLAIN, 16, device=DEVICE, dtype=torch.float16)
    outputs, _ = batch.run(TritonStateBackend())
    assert outputs[0].dtype == torch.float16
    batch.check(outputs, 1.0 if DEVICE == "cpu" else 100.0)


def test_tiles_fit_into_registers_and_do_not_depend_on_a_step() -> None:
    assert choose_step_tiles(64, 128).columns == 32 and choose_step_tiles(32, 128).columns == 32
    assert choose_step_tiles(64, 256).columns == 16 and choose_step_tiles(5, 16).columns == 8
    assert choose_chunk_tiles(64, 128, torch.bfloat16)[:2] == (32, 8)
    assert choose_chunk_tiles(8, 16, torch.float32).columns == 16


def test_what_the_backend_can_serve_is_said_with_reasons() -> None:
    needs = needs_of(PLAIN, "cuda", torch.bfloat16)
    if DEVICE == "cuda":
        assert not TritonStateBackend.reasons_against(needs)
    assert "runs on CUDA, not on cpu" in TritonStateBackend.reasons_against(replace(needs, device_type="cpu"))
    assert any("float64" in why for why in TritonStateBackend.reasons_against(replace(needs, dtype=torch.float64)))
