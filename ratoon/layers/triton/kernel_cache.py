"""Triton's cache of compiled kernels on disk, on a bad day: a directory that can't be written, a full disk, a file that
is not whole. Kernels are compiled then, and kept in a temporary directory. The files are Triton's own.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from ratoon.layers.triton.internals import FileCacheManager, use_cache_class

logger = logging.getLogger(__name__)

_SIZES = "sizes"  # of a group's files; Triton ignores it
_IN_MEMORY = "/dev/shm"


class KernelCache(FileCacheManager):
    falls_back = True  # to a temporary directory, which ends with this process

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            if override or dump or not self.falls_back:
                raise
            self._move(next(temporary_directories(error)))

    def _move(self, directory: str) -> None:
        self.cache_dir = os.path.join(directory, self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        try:
            return super().put(data, filename, binary)
        except OSError as error:
            if not self.falls_back:
                raise
            for directory in temporary_directories(error):
                try:
                    self._move(directory)
                    return super().put(data, filename, binary)
                except OSError:
                    continue
            raise

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        sizes = {name: os.path.getsize(path) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, _SIZES: sizes}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        try:
            group = super().get_group(filename)
            if group is not None:
                self._check(filename, group)
            return group
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("a kernel in %s can't be used, and is compiled again: %s", self.cache_dir, error)
            return None

    def _check(self, filename: str, group: dict[str, str]) -> None:
        with open(self._make_path(f"__grp__{filename}")) as file:
            contents = json.load(file)
        for name in contents["child_paths"]:
            size = os.path.getsize(group[name]) if name in group else 0
            if not size or size != contents.get(_SIZES, {}).get(name, size):
                raise ValueError(f"{name} is not whole")


def use_kernel_cache() -> None:
    """Sets the cache for all of this process, unless another class was set."""
    use_cache_class(KernelCache)


_temporary: dict[str | None, str] = {}


def temporary_directories(error: OSError) -> Iterator[str]:
    """Where kernels go because of `error`: on the disk for temporary files, then in memory."""
    if not _temporary:
        logger.warning(
            "kernels are compiled again at the next start: the cache can't be written, see TRITON_CACHE_DIR: %s", error
        )
    for parent in (None, _IN_MEMORY):
        if parent not in _temporary:
            try:
                _temporary[parent] = tempfile.mkdtemp(prefix="ratoon-kernels-", dir=parent)
            except OSError as problem:
                error = problem
                continue
            atexit.register(shutil.rmtree, _temporary[parent], ignore_errors=True)
        yield _temporary[parent]
    raise error
