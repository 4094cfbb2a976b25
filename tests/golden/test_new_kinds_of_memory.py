"""A new kind of layer, declared in this file only, runs without changes to the engine.

The layer keeps one latent vector for a token and reads it as key and value. An ordinary layer that is given its key as
value computes the same from two, so that an engine of those is the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.attention import select
from ratoon.attention.interface import AttentionNeeds, LayerCache
from ratoon.attention.torch_reference import ReferenceMetadata, TorchReferenceBackend
from ratoon.core.kv import KVCacheSpec, PageTensor
from ratoon.core.outputs import TransferReport
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.plan import BlockTransfer, SchedulerOutput
from ratoon.execution.kv.kv_tensors import KVTensors
from ratoon.layers.attention import AttentionLayer, HeadTransform, StepContext
from ratoon.models import base
from tests.depths import both_depths
from tests.golden.engines import engine, greedy, run, tokens_of
from tests.golden.tiny_models import random_token_ids

TWO_GROUPS = "qwen2 with windows by layer type"
PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 61, 5)]


class LatentSpec(KVCacheSpec, frozen=True):
    content: ClassVar[str] = "a latent vector"
    growth: ClassVar[str] = "full"

    width: int
    dtype: str

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        return (PageTensor((self.block_size, self.width), self.dtype),)


class KeyIsValueLayer(AttentionLayer):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: StepContext,
        transform: HeadTransform | None = None,
    ) -> torch.Tensor:
        return step.attend(self, q, k, k, transform)


class LatentLayer(KeyIsValueLayer):
    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        return LatentSpec(block_size, self.num_kv_heads * self.head_dim, dtype)


class LatentBackend(TorchReferenceBackend):
    name = "latent"

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        return [] if needs.content == LatentSpec.content else [f"reads {LatentSpec.content}, not {needs.content}"]

    def store(
        self, layer: Any, k: torch.Tensor, v: torch.Tensor, kv_cache: LayerCache, metadata: ReferenceMetadata
    ) -> None:
        (cache,) = kv_cache  # [blocks, block_size, width]
        slots, block_size = metadata.inputs.slot_mapping, metadata.inputs.block_size
        cache[slots // block_size, slots % block_size] = k.flatten(1)

    def attend(self, layer: Any, q: torch.Tensor, kv_cache: LayerCache, metadata: ReferenceMetadata) -> torch.Tensor:
        latent = kv_cache[0].unflatten(2, (layer.num_kv_heads, layer.head_dim))
        return super().attend(layer, q, (torch.stack([latent, latent], dim=1),), metadata)


@contextmanager
def engine_of(kind: type[AttentionLayer], **settings: Any) -> Iterator[LLM]:
    """Layers without a window are of this kind."""

    def make(*args: Any, soft_cap: float | None) -> AttentionLayer:
        assert soft_cap is None
        layer = AttentionLayer(*args)
        return kind(*args) if layer.window is None else layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "AttentionLayer", make)
        patch.setattr(select, "BACKENDS", [*select.BACKENDS, LatentBackend])
        with engine(TWO_GROUPS, **settings) as llm:
            yield llm


def choices_of(llm: LLM, params: list[SamplingParams]) -> list[list[list[int]]]:
    return [[list(choice.token_ids) for choice in output.outputs] for output in run(llm, PROMPTS, params)]


def test_layers_with_one_tensor_of_another_width_answer_as_ordinary_ones_do() -> None:
    params = [greedy(14), greedy(20), greedy(14), SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True)]
    with engine_of(KeyIsValueLayer) as llm:
        ordinary_bytes = llm.describe()["kv_bytes_per_token"]
        expected = choices_of(llm, params)
        searched = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=8))[0]
    with engine_of(LatentLayer, max_num_batched_tokens=40) as llm:
        facts = llm.describe()
        assert choices_of(llm, params) == expected
        again = run(llm, PROMPTS, params)
        assert tokens_of(again) == [choices[0] for choices in expected]
        assert [output.num_cached_tokens for output in again] == [32, 0, 48, 0]
        found = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=8))[0]
        assert [choice.token_ids for choice in found.outputs] == [choice.token_ids for choice in searched.outputs]
    # Blocks of the window's group decide what a block costs, and the smaller ones of the latent group lie in them.
    assert facts["kv_groups"] == 2 and facts["kv_bytes_per_token"] <= ordinary_bytes
    backends = {choice["layers"].rpartition("(")[2]: choice for choice in facts["attention"]}
    assert backends["full)"]["backend"] == "latent"
    assert backends["full)"]["reasons_against"]["torch"] == ["reads keys and values, not a latent vector"]
    assert backends["window)"]["backend"] != "latent"
    assert "latent" in facts["attention_backend"]


@both_depths
def test_such_blocks_are_swapped_out_and_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped: list[BlockTransfer] = []
    move_blocks = KVTensors.move_blocks

    def count(self: KVTensors, plan: SchedulerOutput) -> TransferReport | None:
        swapped.extend(plan.loads)
        return move_blocks(self, plan)

    monkeypatch.setattr(KVTensors, "move_blocks", count)
    with engine_of(KeyIsValueLayer) as llm:
        expected = tokens_of(run(llm, PROMPTS, greedy(40)))
    with engine_of(LatentLayer, num_blocks=17, swap_memory="1MiB") as llm:
        assert tokens_of(run(llm, PROMPTS, greedy(40))) == expected
    assert swapped
