"""Models with states out of GGUF files against transformers. The files are written as llama.cpp's converter writes
them, by bench/cpu_parts/state_files.py, with names of the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bench.cpu_parts.state_files import write_state_file
from ratoon.core.errors import ModelError
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.build import build_model
from ratoon.models.source import resolve_model
from tests.golden.dense_step import dense_logits
from tests.golden.tiny_models import TinyModel, random_token_ids
from tests.golden.tiny_states import STATE_MODELS, tiny_granite_hybrid, tiny_mamba2
from tests.unit.layers.ranks import on_all_ranks

CPU = torch.device("cpu")
Q8 = gguf.GGMLQuantizationType.Q8_0


def convert(tiny: TinyModel, path: Path, kind: gguf.GGMLQuantizationType | None = None, **changed: Any) -> Path:
    return write_state_file(tiny.oracle, path, kind, {key.partition(".")[2]: value for key, value in changed.items()})


@pytest.mark.parametrize("family", STATE_MODELS)
def test_a_converted_model_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    tiny = STATE_MODELS[family]()
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf")))
    assert (found.config.state_space, found.config.experts) == (tiny.config.state_space, tiny.config.experts)
    assert found.config.rotary_layers == tiny.config.rotary_layers
    assert found.config.max_position == (32768 if "mamba2" in family else 131072)
    model = build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
    ids = random_token_ids(40)
    torch.testing.assert_close(dense_logits(model, ids), tiny.oracle_logits(ids), atol=5e-5, rtol=0)


@pytest.mark.parametrize("make", [lambda: tiny_mamba2(2), tiny_granite_hybrid], ids=["mamba2", "granite hybrid"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_their_heads(make: Any, world_size: int, tmp_path: Path) -> None:
    """With 4 ranks of 2 groups each has a part of one, whose norm takes what other ranks have."""
    tiny = make()
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf")))
    ids = random_token_ids(9)

    def logits_of(shard: Shard) -> torch.Tensor:
        part = ModelPart(shard)
        return dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32, part=part), ids)

    for logits in on_all_ranks(world_size, logits_of):
        torch.testing.assert_close(logits, tiny.oracle_logits(ids), atol=5e-5, rtol=0)


@pytest.mark.skipif(bool(native_ops_reasons(CPU, torch.float32)), reason="no kernels for this processor")
def test_products_of_states_stay_in_the_bits_of_their_file(tmp_path: Path) -> None:
    """Against the same file decoded to floats: what differs is the rounding of activations to 8 bits."""
    found = resolve_model(str(convert(tiny_mamba2(), tmp_path / "m.gguf", Q8)))
    ops, ids = NativeOps(), random_token_ids(30)
    kept = dense_logits(build_model(found.config, found.tensors, ops, CPU, torch.float32), ids)
    decoded = dense_logits(build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32), ids)
    assert any(one["format"] == "Q8_0" for one in ops.kept_formats())
    assert 0 < (kept - decoded).norm() < 0.05 * decoded.norm()


def test_a_length_that_a_file_has_is_kept(tmp_path: Path) -> None:
    path = convert(tiny_mamba2(), tmp_path / "m.gguf", **{"mamba2.context_length": 4096})
    assert resolve_model(str(path)).config.max_position == 4096


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"granitehybrid.ssm.inner_size": 100}, "granitehybrid.ssm.inner_size; a multiple"),
        ({"granitehybrid.ssm.group_count": 3}, "mamba_n_groups"),
        ({"granitehybrid.block_count": 2**31}, "granitehybrid.block_count; a number from 1 to 4096"),
        ({"granitehybrid.ssm.time_step_rank": "many"}, "granitehybrid.ssm.time_step_rank; a whole number"),
        ({"granitehybrid.attention.head_count_kv": [2, 1, 0, 0]}, "head_count_kv differs between layers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        resolve_model(str(convert(tiny_granite_hybrid(), tmp_path / "m.gguf", **changed)))


def test_decays_above_0_are_refused(tmp_path: Path) -> None:
    tiny = tiny_mamba2()
    with torch.no_grad():  # below this sum, the exponential of a decay is no number
        tiny.oracle.backbone.layers[1].mixer.A_log.fill_(float("nan"))
    found = resolve_model(str(convert(tiny, tmp_path / "m.gguf")))
    with pytest.raises(ModelError, match=r"decays above 0 in blk\.1\.ssm_a"):
        build_model(found.config, found.tensors, TorchOps(), CPU, torch.float32)
