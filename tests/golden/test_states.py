"""State-space and hybrid models against transformers, in float32: logits, engines, and what prefixes and forks do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_models import random_token_ids
from tests.golden.tiny_states import STATE_MODELS

CPU = torch.device("cpu")
TOLERANCE = 5e-5  # of logits that reach about 3


@pytest.mark.parametrize("family", STATE_MODELS)
def test_logits_equal_those_of_transformers(family: str) -> None:
    tiny = STATE_MODELS[family]()
    model = tiny.build()
    for length in (1, 2, 40):
        token_ids = random_token_ids(length, seed=length)
        torch.testing.assert_close(
            dense_logits(model, token_ids), tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("family", STATE_MODELS)
def test_a_folder_as_transformers_writes_it_has_the_same_model(family: str, tmp_path: Path) -> None:
    tiny = STATE_MODELS[family]()
    tiny.oracle.save_pretrained(tmp_path)
    found = resolve_model(str(tmp_path))
    assert found.config.state_space == tiny.config.state_space
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    token_ids = random_token_ids(30)
    assert torch.equal(dense_logits(model, token_ids), dense_logits(tiny.build(), token_ids))


@pytest.mark.parametrize("family", STATE_MODELS)
def test_the_config_of_transformers_is_parsed_as_the_one_written_by_hand(family: str) -> None:
    tiny = STATE_MODELS[family]()
    assert parse_hf_config(tiny.oracle.config.to_dict(), "config") == tiny.config
