from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratoon.cli import main
from ratoon.core.errors import ConfigError
from ratoon.models import installed
from ratoon.models.installed import installed_models

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_hub_models", lambda: iter(()))
    monkeypatch.delenv("RATOON_MODELS", raising=False)


def write_model(folder: Path, config: object = CONFIG, num_bytes: int = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"w" * num_bytes)
    return folder


def named(folders: list[Path]) -> dict[str, installed.InstalledModel]:
    return {Path(model.name).name: model for model in installed_models(folders) if model.kind != "embedded"}


def test_folders_and_gguf_files_are_found_below_what_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "org" / "one")
    (tmp_path / "two.gguf").write_bytes(b"GGUF" * 100)
    write_model(tmp_path / "a" / "b" / "c" / "d" / "too-deep")
    write_model(tmp_path / ".hidden" / "three")
    found = named([tmp_path, tmp_path / "org"])
    assert sorted(found) == ["one", "two.gguf"]
    assert (found["two.gguf"].kind, found["two.gguf"].size) == ("gguf", 400)
    assert (found["one"].kind, found["one"].architecture) == ("folder", "LlamaForCausalLM")
    assert found["one"].size == 1000 + len(json.dumps(CONFIG))


@pytest.mark.parametrize(
    ("config", "note"),
    [({**CONFIG, "architectures": ["X"]}, "architecture 'X' is not supported"), ("{oops", "can't be read as JSON")],
)
def test_what_can_not_be_used_is_listed_with_the_reason(tmp_path: Path, config: object, note: str) -> None:
    write_model(tmp_path / "odd", config)
    assert note in named([tmp_path])["odd"].note


def test_the_environment_names_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "one")
    monkeypatch.setenv("RATOON_MODELS", f"{tmp_path}:")
    assert list(named([])) == ["one"]
    with pytest.raises(ConfigError, match="there is no folder"):
        installed_models([tmp_path / "nowhere"])


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "one", num_bytes=3 * 2**20)
    assert main(["models", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "kind", "size"]
    assert rows[-1].split() == [str(folder), "folder", "3.0", "MiB", "LlamaForCausalLM"]
    assert rows[0].split()[:2] == ["smollm2-135m", "embedded"]
    assert main(["models", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["path"] == str(folder)
    assert main(["models", str(tmp_path / "nowhere")]) == 2
