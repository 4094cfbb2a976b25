"""Which backend, and which kernels, layers of gpt-oss get by default: none of them is the reference, and none is kept
from them by their sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ratoon.attention import triton_backend, triton_balanced, triton_prefill
from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.early_kernels import expected_launches
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.select import BACKENDS, select_backend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.kv import LatentSpec
from ratoon.layers.attention import AttentionLayer, LatentAttentionLayer
from ratoon.layers.native import library
from ratoon.models.build import declare_model
from ratoon.models.hf_config import parse_hf_config

BLOCK_SIZE = 16
# The sizes of openai/gpt-oss-20b, with fewer layers and experts.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16", "vocab_size": 1000,
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss() -> ModelConfig:
    return parse_hf_config(GPT_OSS, "gpt-oss")


def layers() -> list[AttentionLayer]:
    found = [layer for layer in declare_model(gpt_oss(), 4096).attention_layers if isinstance(layer, AttentionLayer)]
    assert [layer.window for layer in found] == [128, None] and all(layer.sinks is not None for layer in found)
    return found


def needs_of(layer: AttentionLayer, device: str, dtype: torch.dtype, kept: str | None, **more: Any) -> AttentionNeeds:
    spec = layer.kv_spec(BLOCK_SIZE, kept or str(dtype).removeprefix("torch."))
    return AttentionNeeds.of([layer], spec, torch.device(device), dtype, **more)


CPU_TABLE = [("float32", False), ("float16", False), ("int8", False), ("float32", True)]
GPU_TABLE = [
    (torch.bfloat16, None, False), (torch.float16, None, False), (torch.float32, None, False),
    (torch.bfloat16, "float8_e4m3fn", False), (torch.bfloat16, None, True), (torch.float32, None, True),
]  # fmt: skip


@pytest.mark.skipif(library() is None, reason="no kernels for this processor")
@pytest.mark.parametrize(("kept", "batch_invariant"), CPU_TABLE)
def test_on_a_cpu_it_is_the_backend_of_its_kernels(kept: str, batch_invariant: bool) -> None:
    for layer in layers():
        choice = select_backend(
            "auto", needs_of(layer, "cpu", torch.float32, kept, batch_invariant=batch_invariant), "layers"
        )
        assert type(choice.backend) is CpuAttentionBackend, choice.reasons_against


@pytest.mark.parametrize(("dtype", "kept", "batch_invariant"), GPU_TABLE, ids=str)
def test_on_a_gpu_it_is_the_backend_of_its_kernels(
    dtype: torch.dtype, kept: str | None, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_backend.torch.cuda, "is_available", lambda: False)  # of any capability
    for layer in layers():
        needs = needs_of(layer, "cuda", dtype, kept, batch_invariant=batch_invariant)
        choice = select_backend("auto", needs, "layers")
        assert type(choice.backend) is TritonAttentionBackend, choice.reasons_against
        # A window may begin behind a prefix that requests share; results with the same bits in any batch share none.
        assert choice.backend.shares_prefixes == (layer.window is None and not batch_invariant)


@pytest.mark.parametrize("index", [0, 1], ids=["window", "all keys"])
def test_on_a_hopper_gpu_they_have_the_kernels_of_other_layers(index: int) -> None:
    layer = layers()[index]
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pages = torch.zeros(2, 2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim, dtype=kv_dtype)
        block_n = triton_balanced.choose_balance(kv_dtype).block_n
        assert triton_prefill.serves(layer, torch.bfloat16, pages, BLOCK_SIZE)
        assert triton_balanced.serves(layer, torch.bfloat16, pages, BLOCK_SIZE, block_n)


def test_the_kernel_of_long_prompts_is_compiled_early_for_them() -> None:
    launches = expected_launches(EngineConfig(model="gpt-oss"), gpt_oss())
    assert [(one.arguments["has_window"], one.arguments["has_sinks"]) for one in launches] == [
        (True, True),
        (False, True),
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_latent_attention_may_have_sinks(device: str) -> None:
    layer = LatentAttentionLayer(0, 16, 1, 576, 0.07, rope_dim=64, sinks=torch.zeros(16))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kept = str(dtype).removeprefix("torch.")
    needs = AttentionNeeds.of([layer], LatentSpec(BLOCK_SIZE, 576, kept), torch.device(device), dtype)
    assert needs.has_sinks
    fast = CpuAttentionBackend if device == "cpu" else TritonAttentionBackend
    assert fast.reasons_against(needs) == fast.reasons_against(replace(needs, has_sinks=False))


def test_every_backend_says_that_it_reads_sinks() -> None:
    assert {backend.name for backend in BACKENDS if backend.has_sinks} == {"cpu", "triton", "torch"}
    assert BACKENDS[-1] is TorchReferenceBackend, "the one that the others must not fall to"
