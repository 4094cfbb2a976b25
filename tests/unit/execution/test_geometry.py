"""Memory and backends follow from what layers need, group by group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.attention import select
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.config import ModelConfig
from ratoon.core.errors import ConfigError
from ratoon.execution.kv.geometry import Geometry, geometry_of
from ratoon.models.build import declare_model
from tests.unit.models.test_build_model import LLAMA
from tests.unit.models.test_encoder_models import BART, BERT, T5

CPU = torch.device("cpu")
MIXED = replace(
    LLAMA, architecture="Qwen2ForCausalLM", num_layers=6, sliding_window=6, attention_bias=True,
    sliding_layers=(False, True, True, False, True, False),
)  # fmt: skip


class PlainBackend(TorchReferenceBackend):
    """Supports plain causal attention only."""

    name = "plain"
    seen: list[AttentionNeeds] = []  # noqa: RUF012

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        cls.seen.append(needs)
        reasons = [] if needs.window is None else ["knows no window"]
        reasons += [] if needs.causal else ["is causal"]
        return reasons + (["adds no bias"] if needs.has_bias else [])


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", [PlainBackend, TorchReferenceBackend])
    monkeypatch.setattr(PlainBackend, "seen", [])


def geometry(config: ModelConfig, backend: str = "auto") -> Geometry:
    return geometry_of(declare_model(config, config.max_position), backend, 16, CPU, torch.float32)


def choices(config: ModelConfig) -> dict[str, tuple[str, list[str]]]:
    """By layers: the backend, and what was said against the plain one."""
    return {
        choice.layers: (choice.backend.name, choice.reasons_against.get("plain", []))
        for choice in geometry(config).all_choices
    }


@pytest.mark.usefixtures("plain")
def test_every_group_gets_the_backend_that_can_serve_it() -> None:
    assert choices(MIXED) == {
        "layers 0, 3, 5 (full)": ("plain", []),
        "layers 1-2, 4 (window)": ("torch", ["knows no window"]),
    }
    assert choices(BERT) == {"layers 0-1 (full)": ("torch", ["is causal"])}


@pytest.mark.usefixtures("plain")
def test_an_encoder_and_what_reads_across_from_it_are_groups_of_their_own() -> None:
    assert choices(BART) == {
        "layers 0-1 (full)": ("plain", []),
        "cross-attention of layers 0-1 (cross)": ("torch", ["is causal"]),
        "encoder layers 0 (full)": ("torch", ["is causal"]),
    }
    found = choices(T5)
    assert list(found.values()) == [
        ("torch", ["adds no bias"]),
        ("torch", ["is causal"]),
        ("torch", ["is causal", "adds no bias"]),
    ]


@pytest.mark.usefixtures("plain")
def test_needs_say_what_the_layers_of_the_group_are() -> None:
    geometry(MIXED)
    full, window = PlainBackend.seen
    heads = (MIXED.head_dim, MIXED.num_heads, MIXED.num_kv_heads)
    assert full == AttentionNeeds("cpu", torch.float32, 16, *heads)
    assert window == AttentionNeeds("cpu", torch.float32, 16, *heads, window=6)


@pytest.mark.usefixtures("plain")
def test_keys_and_values_that_are_kept_in_another_dtype_are_a_need() -> None:
    fp8 = torch.float8_e4m3fn
    kept = geometry_of(declare_model(BART, BART.max_position), "auto", 16, CPU, torch.float32, fp8)
    assert [group.spec.tensors[0].dtype for group in (*kept.groups, kept.cross) if group] == ["float8_e4m3fn"] * 2
    assert [needs.kv_dtype for needs in PlainBackend.seen] == [fp8, fp8, None]  # an encoder keeps nothing
    exact = geometry(BART)
    assert kept.groups[0].spec.page_size_bytes * 4 == exact.groups[0].spec.page_size_bytes


@pytest.mark.usefixtures("plain")
def test_only_the_attention_of_an_encoder_to_its_own_input_may_round() -> None:
    model = declare_model(BART, BART.max_position)
    geometry_of(model, "auto", 16, CPU, torch.float32, encoder_may_round=True)
    geometry_of(model, "auto", 16, CPU, torch.float32)
    assert [needs.may_round for needs in PlainBackend.seen] == [False, False, True] + [False] * 3


@pytest.mark.usefixtures("plain")
def test_a_backend_that_can_not_serve_one_of_the_groups_is_refused_with_its_layers() -> None:
    with pytest.raises(ConfigError, match=r"'plain' can't serve layers 1-2, 4 \(window\): plain: knows no window"):
        geometry(MIXED, "plain")
    assert {choice.backend.name for choice in geometry(MIXED, "torch").all_choices} == {"torch"}
    asked = geometry(MIXED, "torch").all_choices[0]
    assert asked.reasons_against == {"plain": ["torch was asked for"]}


def test_groups_are_those_of_equal_memory() -> None:
    found = geometry(MIXED)
    assert [group.layers for group in found.groups] == [(0, 3, 5), (1, 2, 4)] and found.cross is None
    found = geometry(BART)
    assert found.cross is not None and found.cross.layers == (0, 1) and len(found.choices) == 2
