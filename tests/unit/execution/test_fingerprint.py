"""The fingerprint of KV blocks: what makes the bytes of a block mean something else changes it."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratoon.core.config import CacheConfig, EngineConfig, RopeScaling
from ratoon.core.kv import KVFingerprint
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.models import digest
from ratoon.observe.startup import StartupTimer
from tests.golden.tiny_models import tiny_llama


def fingerprint(
    name: str = "here",
    changed: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **cache: Any,
) -> KVFingerprint:
    """`changed`: in the config of the model. `settings`: of the engine."""
    tiny = tiny_llama()
    config = EngineConfig(
        model="tiny", device="cpu", dtype="float32", cache=CacheConfig(num_blocks=8, **cache), **(settings or {})
    )
    source = copy(tiny.source)
    source.name = name
    executor = UniProcExecutor(config, replace(tiny.config, **(changed or {})), source, StartupTimer())
    try:
        return executor.facts.kv_config.fingerprint
    finally:
        executor.close()


def test_engines_of_one_model_and_the_same_settings_agree() -> None:
    found = fingerprint()
    assert found == fingerprint()
    assert found.weights and found.dtype == "float32" and len(found.specs) == len(found.page_orders) == 1
    assert msgspec.structs.replace(found, version=0).differences(found) == "version is 0, not 1"


def test_other_weights_sizes_and_types_are_told_apart() -> None:
    found = fingerprint()
    assert "weights" in fingerprint("elsewhere").differences(found)
    assert "specs" in fingerprint(block_size=32).differences(found)
    assert "specs" in fingerprint(kv_cache_dtype="float16").differences(found)


def test_other_formats_of_the_weights_are_told_apart() -> None:
    """With equal specs and pages, too: only the numbers of keys and values differ."""
    kinds = [
        fingerprint(settings={"quantization": kept}, kv_cache_dtype="float16") for kept in ("none", "int8", "int4")
    ]
    assert len({kind.digest for kind in kinds}) == 3
    assert kinds[0].differences(kinds[1]).startswith("arithmetic is ")
    auto = fingerprint(settings={"quantization": "auto"}, kv_cache_dtype="float16")
    assert auto == kinds[0], "nothing is quantised in either"


def test_the_frequencies_that_the_longest_sequence_chooses_are_told_apart() -> None:
    factors = (1.0,) * (tiny_llama().config.head_dim // 2)
    scaling = RopeScaling("longrope", 2.0, 64, short_factors=factors, long_factors=factors)
    short, longer, long = (
        fingerprint(changed={"rope_scaling": scaling}, settings={"max_model_len": length}) for length in (32, 64, 96)
    )
    assert short == longer
    assert "arithmetic" in long.differences(short)


def test_equal_files_agree_wherever_and_whenever_they_were_written(tmp_path: Path) -> None:
    def written(name: str, content: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(content)
        return folder

    found = fingerprint(str(written("model", b"weights")))
    elsewhere = written("the same on another host", b"weights")
    (elsewhere / "README.md").write_text("What this is.")
    assert fingerprint(str(elsewhere)) == found
    os.utime(written("model", b"weights") / "model.safetensors", (1e9, 1e9))
    assert fingerprint(str(tmp_path / "model")) == found
    assert "weights" in fingerprint(str(written("model", b"Weights"))).differences(found), "of equal size"


def test_another_rope_is_told_apart() -> None:
    scaled = fingerprint(changed={"rope_theta": 5.0})
    assert "weights" in scaled.differences(fingerprint())


def test_a_large_file_is_read_in_pieces_and_a_changed_tensor_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "NUM_PIECES", 16)
    monkeypatch.setattr(digest, "PIECE_BYTES", 8)
    monkeypatch.setattr(digest, "HEAD_BYTES", 100)
    file, size = tmp_path / "model.gguf", 10_000
    file.write_bytes(bytes(size))
    found = digest.digest_of_file(file)
    for start, length in ((0, 1), (99, 1), (2_000, 1_000), (size - 1, 1)):
        changed = bytearray(size)
        changed[start : start + length] = b"x" * length
        file.write_bytes(changed)
        os.utime(file, (start, start))
        assert digest.digest_of_file(file) != found
    reads: list[int] = []
    monkeypatch.setattr(digest, "_read", lambda stream, offset, count: reads.append(count) or b"")
    digest.digest_of_file(file.rename(tmp_path / "other.gguf"))
    assert sum(reads) == 100 + 16 * 8
