"""Mixtures of experts against transformers, in float32: logits, and the same from files in all their forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_mixtures import MIXTURES
from tests.golden.tiny_models import random_token_ids

CPU = torch.device("cpu")
TOLERANCE = 2e-5  # of logits that reach about 3
OPS: dict[str, Ops] = {"torch": TorchOps()}
if not native_ops_reasons(CPU, torch.float32):
    OPS["native"] = NativeOps()


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_those_of_transformers(family: str, kind: str) -> None:
    tiny = MIXTURES[family]()
    model = build_model(tiny.config, tiny.source, OPS[kind], CPU, torch.float32)
    for length in (1, 2, 40):
        token_ids = random_token_ids(length, seed=length)
        logits = dense_logits(model, token_ids)
        torch.testing.assert_close(logits, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_folder_as_transformers_writes_it_has_the_same_model(family: str, tmp_path: Path) -> None:
    """With the experts of a layer apart, as most files have them, and the config as it is parsed."""
    tiny = MIXTURES[family]()
    tiny.oracle.save_pretrained(tmp_path)
    found = resolve_model(str(tmp_path))
    assert found.config.experts == tiny.config.experts
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    token_ids = random_token_ids(30)
    torch.testing.assert_close(dense_logits(model, token_ids), tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_config_of_transformers_is_parsed_as_the_one_written_by_hand(family: str) -> None:
    tiny = MIXTURES[family]()
    parsed = parse_hf_config(tiny.oracle.config.to_dict(), "config")
    token_ids = random_token_ids(20)
    assert torch.equal(
        dense_logits(tiny._replace(config=parsed).build(), token_ids), dense_logits(tiny.build(), token_ids)
    )
