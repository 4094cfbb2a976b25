"""Adapters' files are read by their headers, compared with the model, and refused where they ask for something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.models import adapters
from ratoon.models.adapters import digest_of, fit, inspect, open_adapter
from ratoon.models.build import collect_shapes
from ratoon.models.gguf_source import PERMUTED
from ratoon.models.peft_adapter import is_brief_pattern
from tests.unit.models.test_build_model import GPT2, LLAMA

SHAPES = collect_shapes(LLAMA)
LAYER = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def pair(layer: str, rank: int = 4, shape: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    num_outputs, num_inputs = shape or SHAPES[f"{layer}.weight"]
    prefix = f"base_model.model.{layer}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, num_inputs),
        f"{prefix}.lora_B.weight": torch.randn(num_outputs, rank),
    }


def save(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    save_file(pair(LAYER) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_inspected_by_its_headers(tmp_path: Path) -> None:
    tensors = pair(LAYER) | pair("model.layers.1.mlp.down_proj", rank=6)
    folder = save(tmp_path / "one", tensors)
    adapter = inspect(folder, SHAPES, max_rank=6)
    assert (adapter.rank, adapter.path, len(adapter.digest)) == (6, str(folder.resolve()), 32)
    file = open_adapter(folder)
    assert {name: part.scale for name, part in file.parts.items()} == {
        LAYER: 2.0,
        "model.layers.1.mlp.down_proj": pytest.approx(8 / 6),
    }
    a, b = file.read(LAYER)
    assert torch.equal(a, tensors[f"base_model.model.{LAYER}.lora_A.weight"]) and b.shape == (8, 4)
    with pytest.raises(ModelError, match=r"has the rank 6; at most 5 \(max_lora_rank\)"):
        inspect(folder, SHAPES, max_rank=5)


def test_files_are_hashed_again_only_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hashed = save(tmp_path / "one"), []
    hash_files = adapters._hash
    monkeypatch.setattr(adapters, "_hash", lambda files: hashed.append(files) or hash_files(files))
    first = digest_of(folder)
    assert digest_of(folder) == first and len(hashed) == 2, "files that were written just now may change unseen"
    monkeypatch.setattr(adapters, "SETTLED_NS", -(10**12))
    assert [digest_of(folder) for _ in range(3)] == [first] * 3 and len(hashed) == 3
    save(folder)  # other numbers, the same sizes
    assert digest_of(folder) != first and len(hashed) == 4


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = save(tmp_path / "first")
    torch.manual_seed(1)
    same, other = save(tmp_path / "same"), save(tmp_path / "other")
    assert digest_of(first) == digest_of(same) != digest_of(other)
    before = digest_of(first)
    save(first, lora_alpha=9)
    assert digest_of(first) != before


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 16}}, 4.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 16}}, 2.0),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.(q|k)_proj": 20}}, 5.0),
        ({"rank_pattern": {"q_proj": 4}, "r": 99}, 2.0),
    ],
)
def test_the_scale_is_that_of_peft(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    assert open_adapter(save(tmp_path, **fields)).parts[LAYER].scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported; expected 'none'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the model's"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern has the pattern"),
        ({"alpha_pattern": [3]}, "alpha_pattern is"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; expected a list"),
    ],
)
def test_what_would_act_in_another_way_is_refused_by_its_field(tmp_path: Path, fields: dict, said: str) -> None:
    with pytest.raises(ModelError, match=r"config field " + said.replace("(", r"\(")):
        open_adapter(save(tmp_path, **fields))


def test_patterns_of_files_are_matched_in_little_time() -> None:
    assert is_brief_pattern(r"layers\.[0-3]\.self_attn\.(q|v)_proj") and is_brief_pattern("^model.layers.0.mlp.up_proj")
    for bomb in ("(a*)*b", "(a|a)+", "a*a*a*a*b", "(?:a+)", r"(a)\1", "x" * 300, "("):
        assert not is_brief_pattern(bomb)


def test_what_does_not_fit_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has a product of shape \(8, 9\) for .*q_proj.*has the shape \(8, 8\)"):
        inspect(save(tmp_path / "shape", pair(LAYER, shape=(8, 9))), SHAPES)
    with pytest.raises(ModelError, match=r"layers.9.self_attn.q_proj', which the model has not"):
        inspect(save(tmp_path / "name", pair("model.layers.9.self_attn.q_proj", shape=(8, 8))), SHAPES)
    lone = {name: tensor for name, tensor in pair(LAYER).items() if "lora_A" in name}
    with pytest.raises(ModelError, match="has one of lora_A and lora_B"):
        open_adapter(save(tmp_path / "lone", lone))
    both = pair(LAYER) | {f"base_model.model.{LAYER}.lora_B.weight": torch.zeros(8, 3)}
    with pytest.raises(ModelError, match=r"has matrices of shapes \(4, 8\) and \(8, 3\)"):
        open_adapter(save(tmp_path / "ranks", both))
    with pytest.raises(ModelError, match="whose meaning is unknown"):
        open_adapter(save(tmp_path / "other", pair(LAYER) | {"base_model.model.model.norm.weight": torch.zeros(8)}))


def test_whole_weights_are_for_embeddings_and_heads(tmp_path: Path) -> None:
    table = SHAPES["model.embed_tokens.weight"]
    saved = {
        "base_model.model.lm_head.weight": torch.zeros(table),
        "base_model.model.model.embed_tokens.weight": torch.zeros(table),
    }
    fitted = fit(
        open_adapter(save(tmp_path / "both", pair(LAYER) | saved, modules_to_save=["lm_head", "embed_tokens"])), SHAPES
    )
    assert set(fitted.layers) == {LAYER, "lm_head", "model.embed_tokens"} and fitted.rank == 4
    # Without being named there, they are the model's own, which PEFT writes beside an adapter of the head.
    fitted = fit(open_adapter(save(tmp_path / "copies", pair(LAYER) | saved)), SHAPES)
    assert set(fitted.layers) == {LAYER}
    resized = {"base_model.model.lm_head.weight": torch.zeros(table[0] + 1, table[1])}
    with pytest.raises(ModelError, match="an adapter whose vocabulary was not resized"):
        inspect(save(tmp_path / "resized", pair(LAYER) | resized, modules_to_save=["lm_head"]), SHAPES)
    norm = {"base_model.model.model.norm.weight": torch.zeros(8)}
    with pytest.raises(
        ModelError, match=r"'model.norm' \(modules_to_save\); only for the token embeddings and the head"
    ):
        inspect(save(tmp_path / "norm", pair(LAYER) | norm, modules_to_save=["norm"]), SHAPES)


def test_a_table_is_adapted_the_other_way_round(tmp_path: Path) -> None:
    vocabulary, size = SHAPES["model.embed_tokens.weight"]
    a, b = torch.randn(3, vocabulary), torch.randn(size, 3)
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    file = open_adapter(save(tmp_path / "table", {f"{prefix}A": a, f"{prefix}B": b}))
    assert fit(file, SHAPES).layers == {"model.embed_tokens": "model.embed_tokens"}
    low, rows = file.read("model.embed_tokens")
    assert torch.equal(rows @ low, a.T @ b.T)
    with pytest.raises(ModelError, match=r"has a product of shape .* for 'model.embed_tokens'"):
        fit(open_adapter(save(tmp_path / "other", {f"{prefix}A": a[:, 1:].contiguous(), f"{prefix}B": b})), SHAPES)


def test_layers_are_found_with_and_without_their_prefix(tmp_path: Path) -> None:
    shapes = {name.removeprefix("transformer."): shape for name, shape in collect_shapes(GPT2).items()}
    inputs, outputs = shapes["h.0.attn.c_attn.weight"]
    folder = save(tmp_path, pair("transformer.h.0.attn.c_attn", shape=(outputs, inputs)), fan_in_fan_out=True)
    assert fit(open_adapter(folder), shapes).layers == {"h.0.attn.c_attn": "transformer.h.0.attn.c_attn"}
    assert set(fit(open_adapter(folder), collect_shapes(GPT2)).layers) == {"transformer.h.0.attn.c_attn"}


def test_layers_of_models_that_read_images_are_found_by_the_names_of_their_modules(tmp_path: Path) -> None:
    name = LAYER.replace("model.", "model.language_model.", 1)
    file = open_adapter(save(tmp_path, pair(name, shape=SHAPES[f"{LAYER}.weight"])))
    assert fit(file, SHAPES).layers == {LAYER: name}
    assert fit(file, {f"{name}.weight": SHAPES[f"{LAYER}.weight"]}).layers == {name: name}


def test_pickles_are_not_opened_and_say_how_to_convert(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    for function in (open_adapter, digest_of):
        with pytest.raises(
            ModelError, match=r"adapter_model.bin, a pickle, which is never opened; .*safe_serialization=True"
        ):
            function(folder)
    with pytest.raises(ModelError, match="is not there"):
        open_adapter(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no adapter_config.json"):
        open_adapter(tmp_path.parent)
    with pytest.raises(ModelError, match="is one file of an adapter; the folder"):
        open_adapter(folder / "adapter_config.json")


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, keys.get("architecture", "llama"))
    writer.add_string("general.type", keys.get("type", "adapter"))
    writer.add_string("adapter.type", keys.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", keys.get("alpha", 8.0))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", PERMUTED)
def test_gguf_adapters_have_the_models_names_and_its_order_of_rows(architecture: str, tmp_path: Path) -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 8, 4)).astype(np.float32)
    heads, head_dim = LLAMA.num_heads, LLAMA.head_dim
    # llama.cpp has the two coordinates of a rotation side by side
    reordered = b.reshape(heads, 2, head_dim // 2, 4).swapaxes(1, 2).reshape(8, 4)
    tensors = {"blk.1.attn_q.weight.lora_a": a.T.copy(), "blk.1.attn_q.weight.lora_b": reordered}
    path = write_gguf(tmp_path / "adapter.gguf", tensors, architecture=architecture)
    assert inspect(path, SHAPES).rank == 4
    file = open_adapter(path, LLAMA)
    found_a, found_b = file.read("model.layers.1.self_attn.q_proj")
    assert file.parts["model.layers.1.self_attn.q_proj"].scale == 2.0
    assert np.array_equal(found_a.numpy(), a.T) and np.array_equal(found_b.numpy(), b)
    with pytest.raises(ModelError, match=r"general.type; a file of an adapter"):
        open_adapter(write_gguf(tmp_path / "model.gguf", tensors, type="model"))
    with pytest.raises(ModelError, match="whose meaning is unknown"):
        open_adapter(write_gguf(tmp_path / "norm.gguf", {"output_norm.weight": a}))


def test_inspecting_does_not_import_torch(tmp_path: Path) -> None:
    shapes = "{'model.layers.0.self_attn.q_proj.weight': (8, 8)}"
    code = f"import sys; from ratoon.models.adapters import inspect; found = inspect(sys.argv[1], {shapes})"
    code += "; print(found.rank, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(save(tmp_path))], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "False"]
