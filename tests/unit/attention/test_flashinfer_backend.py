"""FlashInfer's backend, with a FlashInfer that computes by the definition from the arguments of the real one."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import flashinfer_backend, triton_backend
from ratoon.attention.flashinfer_backend import FlashInferBackend, Prompts, find_prompts, page_tables
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.select import select_backend
from ratoon.core.errors import ConfigError
from ratoon.layers.attention import AttentionLayer
from tests.triton_interpreter import interpreted, repair_interpreter
from tests.unit.attention.test_backends import Batch

Tensor = torch.Tensor
NEEDS = AttentionNeeds("cuda", torch.bfloat16, 16, 128, 32, 8)
MIXED = ([40, 0, 33], [1, 70, 65])  # cached and new tokens
LAYER = AttentionLayer(0, 2, 1, 16, 0.25)

repair_interpreter()


class FakeWrapper:
    """As BatchPrefillWithPagedKVCacheWrapper of flashinfer-python 0.6, for pages in the layout HND."""

    made: list[FakeWrapper]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        self.num_plans = self.num_runs = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        assert all(one is not None and one.dtype == torch.int32 and one.device.type == "cpu" for one in lists)
        assert seq_lens is not None and kv_data_type == q_data_type and num_qo_heads % num_kv_heads == 0
        self.num_plans += 1
        self.queries = qo_indptr.diff().tolist()
        self.lengths = (paged_kv_indptr.diff().sub(1) * page_size + paged_kv_last_page_len).tolist()
        assert seq_lens.tolist() == self.lengths
        self.pages = paged_kv_indices.split(paged_kv_indptr.diff().tolist())
        self.group, self.causal, self.scale, self.dtype = num_qo_heads // num_kv_heads, causal, sm_scale, q_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor, enable_pdl: bool) -> None:
        assert q.dtype == paged_kv_cache.dtype == self.dtype and out.shape == q.shape and not enable_pdl
        self.num_runs += 1
        for rows, result, pages, length in zip(
            q.split(self.queries), out.split(self.queries), self.pages, self.lengths
        ):
            keys, values = (
                paged_kv_cache[pages.long(), part].transpose(1, 2).flatten(0, 1)[:length].double() for part in (0, 1)
            )  # [length, kv_heads, head_dim]
            scores = torch.einsum("qhd,khd->hqk", rows.double(), keys.repeat_interleave(self.group, 1)) * self.scale
            if self.causal:
                hidden = torch.ones(len(rows), length).triu(length - len(rows) + 1).bool()
                scores.masked_fill_(hidden, -torch.inf)
            weighted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(self.group, 1))
            result.copy_(weighted)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(FakeWrapper, "made", [], raising=False)
    monkeypatch.setattr(flashinfer_backend, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flashinfer_backend, "_MIN_SCORES", 0)
    monkeypatch.setattr(triton_backend, "choose_store_tile", lambda num_tokens: (16, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, num_heads=4, num_kv_heads=4), replace(LAYER, causal=False)])
def test_prompts_with_and_without_cached_tokens_are_attended_to_by_definition(layer: AttentionLayer) -> None:
    computed, scheduled = MIXED if layer.causal else ([0, 0, 0], [3, 70, 66])
    batch = Batch(computed, scheduled, layer, 16)
    for got, expected in zip(batch.run(FlashInferBackend(), apart=True), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    (wrapper,) = FakeWrapper.made
    assert wrapper.num_plans == wrapper.num_runs >= 1


@interpreted
@pytest.mark.parametrize("min_scores", [0, 2**23])
def test_prompts_apart_from_each_other_and_short_ones_are_left_to_triton(
    min_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backend, "_MIN_SCORES", min_scores)
    batch = Batch([0, 0, 0], [70, 1, 65] if min_scores == 0 else [1, 70, 65], LAYER, 16)
    for got, expected in zip(batch.run(FlashInferBackend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert FakeWrapper.made == []


def test_prompts_are_found_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "_MIN_SCORES", 70 * 70 + 65 * 98)
    inputs = Batch(*MIXED, LAYER, 16).inputs(*MIXED)
    assert find_prompts(inputs, np.array([1, 70, 65]), 33) == Prompts(1, 3, 1, 136)
    monkeypatch.setattr(flashinfer_backend, "_MIN_SCORES", 70 * 70 + 65 * 98 + 1)
    assert find_prompts(inputs, np.array([1, 70, 65]), 33) is None


@interpreted
def test_steps_without_prompts_and_padded_steps_are_left_to_triton() -> None:
    batch = Batch([40, 33], [1, 4], LAYER, 16)
    backend = FlashInferBackend()
    inputs = batch.inputs([40, 33], [1, 4])
    assert not backend.build_metadata(inputs).plan(2).has_long
    for got, expected in zip(batch.run(backend), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert sum(wrapper.num_runs for wrapper in FakeWrapper.made) == 1, "the history alone is long"
    inputs.is_padded = True
    assert backend.build_metadata(inputs).query_lens is None


def test_layers_of_a_step_share_a_plan_if_it_is_the_same_for_them() -> None:
    backend, batch = FlashInferBackend(), Batch([0], [70], LAYER, 16)
    (pages,) = (batch.filled(batch.num_blocks, 2, 1, 16, 16).zero_() for _ in range(1))
    for step in range(2):
        metadata = backend.build_metadata(batch.inputs([0], [70]))
        for layer in (LAYER, replace(LAYER, index=1), replace(LAYER, index=2, scale=0.5), replace(LAYER, index=3)):
            backend.attend(layer, torch.randn(70, 2, 16), (pages,), metadata)
        assert [(wrapper.num_plans, wrapper.num_runs) for wrapper in FakeWrapper.made] == [
            (step + 1, 3 * (step + 1)),
            (step + 1, step + 1),
        ]


def test_a_wrapper_whose_plan_is_still_copied_is_not_planned_again() -> None:
    class Event:
        def query(self) -> bool:
            return False

    backend, batch = FlashInferBackend(), Batch([0], [70], LAYER, 16)
    pages = batch.filled(batch.num_blocks, 2, 1, 16, 16).zero_()
    for _ in range(2):
        metadata = backend.build_metadata(batch.inputs([0], [70]))
        backend.attend(LAYER, torch.randn(70, 2, 16), (pages,), metadata)
        backend._wrappers[-1].copied = Event()  # type: ignore[assignment]
    assert [wrapper.num_plans for wrapper in FakeWrapper.made] == [1, 1]


def test_pages_are_listed_one_request_after_the_other() -> None:
    tables = np.array([[5, 9, 0], [7, 0, 0], [3, 4, 8]])
    starts, pages, filled = page_tables(tables, np.array([17, 16, 33]), 16)
    assert (starts.tolist(), pages.tolist(), filled.tolist()) == ([0, 2, 3, 6], [5, 9, 7, 3, 4, 8], [1, 16, 1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "cpu"}, "runs on CUDA"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "keeps keys and values in"),
        ({"head_dim": 80}, "head_dim must be 64, 128, 256, not 80"),
        ({"window": 100}, "sliding windows"),
        ({"has_bias": True}, "bias"),
        ({"batch_invariant": True}, "depend on the batch"),
    ],
)
def test_what_it_can_not_serve_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert FlashInferBackend.reasons_against(NEEDS) == []
    assert any(reason in why for why in FlashInferBackend.reasons_against(replace(NEEDS, **change)))
    with pytest.raises(ConfigError, match=reason):
        select_backend("flashinfer", replace(NEEDS, **change), "layers 0-3")


def test_it_serves_where_it_is_asked_for_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select_backend("flashinfer", NEEDS, "layers 0-3")
    assert chosen.backend.name == "flashinfer" and chosen.reasons_against["triton"] == ["flashinfer was asked for"]
    chosen = select_backend("auto", NEEDS, "layers 0-3")
    assert chosen.backend.name == "triton" and "flashinfer" not in chosen.reasons_against
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="flashinfer is not installed"):
        select_backend("flashinfer", NEEDS, "layers 0-3")
