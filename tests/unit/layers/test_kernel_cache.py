"""Compiled kernels on a disk that can't be written, or has files that are not whole."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import FileCacheManager

from ratoon.layers.triton import kernel_cache
from ratoon.layers.triton.kernel_cache import KernelCache

BINARY = b"machine code"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_temporary", {})


def keep_kernel() -> str:
    cache = KernelCache("key")
    path = cache.put(BINARY, "kernel.cubin")
    cache.put_group("kernel.json", {"kernel.cubin": path, "kernel.json": cache.put("{}", "kernel.json")})
    return path


def find_kernel() -> dict[str, str] | None:
    return KernelCache("key").get_group("kernel.json")


def test_what_is_kept_is_found_also_by_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert find_kernel() is None
    path = keep_kernel()
    assert find_kernel() == FileCacheManager("key").get_group("kernel.json")
    assert Path(path).read_bytes() == BINARY


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.json", "__grp__kernel.json"])
def test_a_kernel_that_is_not_whole_is_compiled_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    name: str,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keep_kernel()
    harm(tmp_path / "key" / name)
    with caplog.at_level(logging.WARNING):
        assert find_kernel() is None
    assert "compiled again" in caplog.text or not (tmp_path / "key" / "__grp__kernel.json").exists()
    keep_kernel()
    assert find_kernel() is not None


def test_kernels_go_elsewhere_where_there_can_be_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        path = keep_kernel()
        keep_kernel()
    assert Path(path).read_bytes() == BINARY
    assert caplog.text.count("TRITON_CACHE_DIR") == 1
    monkeypatch.setattr(KernelCache, "falls_back", False)
    with pytest.raises(NotADirectoryError):
        keep_kernel()


def test_kernels_go_elsewhere_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "full"))
    monkeypatch.setattr(kernel_cache, "_IN_MEMORY", str(tmp_path))
    put = FileCacheManager.put

    def put_unless_full(self: FileCacheManager, data: object, filename: str, binary: bool = True) -> str:
        if not str(self.cache_dir).startswith(str(tmp_path / "ratoon-kernels-")):  # nor is there room for other files
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, data, filename, binary)

    monkeypatch.setattr(FileCacheManager, "put", put_unless_full)
    with caplog.at_level(logging.WARNING):
        path = keep_kernel()
    assert Path(path).read_bytes() == BINARY
    assert os.strerror(errno.ENOSPC) in caplog.text
