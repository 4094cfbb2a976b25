"""The table of angles against transformers, for every kind of scaling, near and far positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_rotary_pos_emb

from ratoon.core.config import ModelConfig, RopeScaling
from ratoon.core.errors import ModelError
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.rotary import Rotary, cos_sin_table
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

needs_kernels = pytest.mark.skipif(library() is None, reason="there are no kernels for this machine")

MAX_POSITION = 131072
TOLERANCE = 1e-6

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=256,
    intermediate_size=10,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=MAX_POSITION,
    rope_theta=500000.0,
)

YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"kind": "default"},
    "linear": {"kind": "linear", "factor": 3.7},
    "dynamic": {"kind": "dynamic", "factor": 4.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_max_position": 8192},
    "llama3 with other borders": {
        "kind": "llama3",
        "factor": 32.0,
        "original_max_position": 4096,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
    },
    "yarn": YARN,
    "yarn with a given attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn with other borders": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn without truncation": {**YARN, "truncate": False},
}
THEIR_NAMES = {"kind": "rope_type", "original_max_position": "original_max_position_embeddings"}


def with_scaling(scaling: dict[str, Any], **changes: Any) -> ModelConfig:
    return replace(CONFIG, rope_scaling=RopeScaling(**scaling), **changes)


def their_rotary(config: ModelConfig, scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    parameters = {THEIR_NAMES.get(name, name): value for name, value in scaling.items()}
    if scaling["kind"] == "llama3":
        parameters.setdefault("low_freq_factor", config.rope_scaling.low_freq_factor)
        parameters.setdefault("high_freq_factor", config.rope_scaling.high_freq_factor)
    oracle_config = transformers.LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rope_parameters={"rope_theta": config.rope_theta, **parameters},
    )
    return LlamaRotaryEmbedding(oracle_config)


def their_table(oracle: LlamaRotaryEmbedding, positions: Tensor) -> Tensor:
    cos, sin = oracle(torch.empty(1), positions[None])  # [1, P, head_dim] each, both halves the same
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.one_in(3)
def test_the_table_is_that_of_transformers_at_near_and_far_positions(name: str, theta: float) -> None:
    config = with_scaling(SCALINGS[name], rope_theta=theta)
    table = cos_sin_table(config, MAX_POSITION)
    assert table.shape == (MAX_POSITION, config.head_dim)
    assert table.dtype == torch.float32
    positions = torch.cat([torch.arange(600), torch.arange(600, MAX_POSITION, 997), torch.tensor([MAX_POSITION - 1])])
    expected = their_table(their_rotary(config, SCALINGS[name]), positions)
    torch.testing.assert_close(table[positions], expected, atol=TOLERANCE, rtol=0)


def test_every_scaling_gives_another_table() -> None:
    tables = [cos_sin_table(with_scaling(scaling), 600) for name, scaling in SCALINGS.items() if name != "dynamic"]
    for index, table in enumerate(tables):
        assert not any(torch.allclose(table, other, atol=1e-3) for other in tables[:index])


def test_a_short_table_is_the_beginning_of_a_long_one() -> None:
    for scaling in SCALINGS.values():
        config = with_scaling(scaling, max_position=48)
        torch.testing.assert_close(cos_sin_table(config, 40), cos_sin_table(config, 96)[:40], atol=TOLERANCE, rtol=0)


def test_dynamic_scaling_is_unscaled_up_to_the_original_length() -> None:
    config = with_scaling(SCALINGS["dynamic"], max_position=64)
    plain = cos_sin_table(with_scaling(SCALINGS["default"]), 128)
    table = cos_sin_table(config, 128)
    assert torch.equal(table[:64], plain[:64])
    assert not torch.allclose(table[64:], plain[64:], atol=1e-2)


def test_dynamic_scaling_beyond_the_original_length_is_that_of_a_sequence_that_grew_to_there() -> None:
    config = with_scaling(SCALINGS["dynamic"], max_position=64)
    table = cos_sin_table(config, 200)
    oracle = their_rotary(config, SCALINGS["dynamic"])
    rows = torch.cat([their_table(oracle, torch.tensor([position])) for position in range(200)])
    torch.testing.assert_close(table, rows, atol=1e-5, rtol=0)  # one bit of the base is 1e-5 in an angle of 100


def test_only_the_rotary_dimensions_are_in_the_table() -> None:
    partial = cos_sin_table(replace(CONFIG, rotary_dim=32), 50)
    narrow = cos_sin_table(replace(CONFIG, head_dim=32), 50)
    assert torch.equal(partial, narrow)


def test_an_unknown_scaling_is_named_already_on_the_meta_device() -> None:
    config = with_scaling({"kind": "spiral"})
    weights = Weights(None, TorchOps(), torch.device("meta"), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"'spiral'.*yarn"):
        Rotary(weights, config, 16)


def test_the_rotary_layer_turns_by_the_rows_of_its_table_in_float32_for_any_dtype() -> None:
    weights = Weights(None, TorchOps(), torch.device("cpu"), torch.bfloat16)  # type: ignore[arg-type]
    rotary = Rotary(weights, CONFIG, 20)
    assert rotary.cos_sin.dtype == torch.float32
    assert rotary.cos_sin.shape == (20, 64)
    q, k = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    q[..., 0] = k[..., 0] = 1
    rotary(q, k, torch.tensor([19]))
    for turned in (q, k):
        torch.testing.assert_close(turned[0, 0, 0], torch.tensor(19.0).cos())
        torch.testing.assert_close(turned[0, 1, 32], torch.tensor(19.0).sin())


# ---- positions on several axes ----


@pytest.mark.parametrize("sections", [[16, 24, 24], [8, 12, 12], [1, 0, 7]])
@pytest.mark.parametrize("ops", [TorchOps, pytest.param(NativeOps, marks=needs_kernels)])
def test_sections_of_heads_turn_as_those_of_qwen2_vl(ops: type[Any], sections: list[int]) -> None:
    head_dim, num_tokens = 2 * sum(sections), 37
    theirs = Qwen2VLRotaryEmbedding(
        transformers.Qwen2VLTextConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2000,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        )
    )
    config = replace(CONFIG, head_dim=head_dim, rope_theta=1e6, rope_scaling=RopeScaling(sections=tuple(sections)))
    rotary = Rotary(Weights(None, ops(), torch.device("cpu"), torch.float32), config, 2000)  # type: ignore[arg-type]
    positions = torch.randint(0, 2000, (3, num_tokens + 4))[:, :num_tokens]  # as a step has them: in longer memory
    q, k = torch.randn(num_tokens, 4, head_dim), torch.randn(num_tokens, 2, head_dim)
    cos, sin = theirs(q, positions[:, None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary(q, k, positions)
    for got, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got, wanted[0].transpose(0, 1), rtol=0, atol=1e-5)


def test_axes_that_agree_turn_heads_as_one_axis_does() -> None:
    weights = Weights(None, TorchOps(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    one, three = (Rotary(weights, with_scaling(scaling), 100) for scaling in ({}, {"sections": (8, 12, 12)}))
    heads = torch.randn(5, 6, 64)
    positions = torch.tensor([3, 99, 0, 7, 41])
    first, second = heads.clone(), heads.clone()
    one(first[:, :4], first[:, 4:], positions)
    three(second[:, :4], second[:, 4:], positions.expand(3, -1))
    assert torch.equal(first, second)


def test_sections_that_are_not_all_pairs_of_a_head_are_refused() -> None:
    weights = Weights(None, TorchOps(), torch.device("meta"), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"\[8, 12, 8\], 28 pairs of a head.*32 pairs"):
        Rotary(weights, with_scaling({"sections": (8, 12, 8)}), 16)


@pytest.mark.parametrize("ops", [TorchOps, pytest.param(NativeOps, marks=needs_kernels)])
def test_positions_that_are_the_same_on_all_axes_may_be_given_once(ops: type[Any]) -> None:
    weights = Weights(None, ops(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    rotary = Rotary(weights, replace(CONFIG, rope_scaling=RopeScaling(sections=(8, 12, 12))), 64)
    positions = torch.tensor([0, 3, 17, 63, 5])
    heads = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    once, by_axis = heads.clone(), heads.clone()
    rotary(once[:, :2], once[:, 2:], positions)
    rotary(by_axis[:, :2], by_axis[:, 2:], positions.expand(3, -1).contiguous())
    assert torch.equal(once, by_axis) and not torch.equal(once, heads)
